"""verl's replay buffers without polling: they look again when a key or a tag has changed, not every two seconds.

from transfer_queue.integrations import verl_replay
verl_replay.install()  # in the process of the trainer, before it samples
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import transfer_queue as tq
from transfer_queue.errors import NotSupported

MODULE = "verl.trainer.ppo.v1.replay_buffer"  # of verl 0.9.1
SYNC, WAIT = "_sync_metadata_from_transfer_queue", "_wait_for_next_poll"


def install() -> None:
    """Have `ReplayBuffer`, and all that is made from it, wait in the service between two looks. `poll_interval` is how
    long a buffer waits for a change before it looks all the same. A class that lists by a method of its own may sleep
    so long in its first wait through a change that came while it listed. Doing it twice changes nothing.

    Raises ImportError without verl, `NotSupported` for a release of it whose buffers wait in another way.
    """
    buffer = importlib.import_module(MODULE).ReplayBuffer
    sync, wait = getattr(buffer, SYNC, None), getattr(buffer, WAIT, None)
    if sync is None or wait is None:
        raise NotSupported(f"ReplayBuffer of this verl has no {SYNC} and {WAIT}: they are those of verl 0.9.1")
    if hasattr(wait, "__wrapped__"):
        return

    @functools.wraps(sync)
    def synchronized(self: Any) -> None:
        self._keys_seen = tq.kv_watch()  # before the listing: what changes after it ends the next wait
        sync(self)

    @functools.wraps(wait)
    def waited(self: Any, partition_id: str, last_debug_time: float) -> float:
        interval = self.poll_interval
        seen = getattr(self, "_keys_seen", None) or tq.kv_watch()  # a class may list by a method of its own
        self._keys_seen = tq.kv_watch(since=seen, timeout_s=interval)
        self.poll_interval = 0.0  # what is left of verl's own wait is what it logs
        try:
            found: float = wait(self, partition_id, last_debug_time)
        finally:
            self.poll_interval = interval
        return found

    setattr(buffer, SYNC, synchronized)
    setattr(buffer, WAIT, waited)
