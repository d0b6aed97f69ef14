"""NeMo-RL's buffer, replaced where NeMo-RL makes it: its settings name a sampler, but no buffer."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from transfer_queue.errors import NotSupported
from transfer_queue.integrations.nemo_rl.buffer import TQReplayBuffer

DEFINED = "nemo_rl.algorithms.async_utils.replay_buffer"
MADE = "nemo_rl.algorithms.single_controller_utils.setup"


def install() -> None:
    """Have NeMo-RL's single controller make its buffer of this class. In the driver, before its setup. Doing it twice
    changes nothing.

    Raises ImportError without NeMo-RL, `NotSupported` for a release of it that makes its buffer elsewhere, or whose
    buffer can do what this one cannot.
    """
    modules: list[Any] = [importlib.import_module(name) for name in (DEFINED, MADE)]
    if not all(hasattr(module, "TQReplayBuffer") for module in modules):
        raise NotSupported(f"this NeMo-RL has no TQReplayBuffer in {DEFINED} and {MADE}")
    if more := _names(modules[0].TQReplayBuffer) - _names(TQReplayBuffer):
        raise NotSupported(f"the TQReplayBuffer of this NeMo-RL also has {sorted(more)}: it is newer than ours")
    for module in modules:
        module.TQReplayBuffer = TQReplayBuffer


def _names(kind: type) -> set[str]:
    """What others call of a class, and what it is made with."""
    called = {name for name in vars(kind) if not name.startswith("_")}
    return called | set(inspect.signature(kind).parameters)
