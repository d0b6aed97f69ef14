"""NeMo-RL's buffer, replaced where NeMo-RL makes it: its settings name a sampler, but no buffer."""

from __future__ import annotations

import importlib

from transfer_queue.errors import NotSupported
from transfer_queue.integrations.nemo_rl.buffer import TQReplayBuffer

DEFINED = "nemo_rl.algorithms.async_utils.replay_buffer"
MADE = "nemo_rl.algorithms.single_controller_utils.setup"


def install() -> None:
    """Have NeMo-RL's single controller make its buffer of this class. In the driver, before its setup. Doing it twice
    changes nothing.

    Raises ImportError without NeMo-RL, `NotSupported` for a release of it that makes its buffer elsewhere.
    """
    modules = [importlib.import_module(name) for name in (DEFINED, MADE)]
    if not all(hasattr(module, "TQReplayBuffer") for module in modules):
        raise NotSupported(f"this NeMo-RL has no TQReplayBuffer in {DEFINED} and {MADE}")
    for module in modules:
        module.TQReplayBuffer = TQReplayBuffer  # type: ignore[attr-defined]
