"""Pauses of one server's generation, and for whom they were made."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from transfer_queue.errors import Aborted
from transfer_queue.weights.receive.gate import Generation, Mode

_STRENGTH = {"keep": 0, "wait": 1, "abort": 2}


class HeldPause:
    """What one owner asked for. `due`: when its lease is over (None: it has none)."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.due: float | None = None
        self.lease = threading.Timer(0.0, lambda: None)


class Pauses:
    """A pause that a trainer makes around a commit, or while a replica has old weights, is that run's, and has a lease:
    it ends with the lease, or once another run takes over, so that a trainer that dies leaves nobody frozen. A pause
    without an owner is somebody else's, and lasts until it is resumed. Each owner has one at a time; generation goes on
    when the last one has ended, and until then is paused by the strongest mode of all. Thread-safe."""

    def __init__(self, generation: Generation, timeout_s: float) -> None:
        self.generation = generation
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._held: dict[str, HeldPause] = {}  # by owner

    @property
    def owner(self) -> str:
        """The run that there is a pause of; "" for none."""
        with self._lock:
            return next((owner for owner in self._held if owner), "")

    def pause(self, mode: Mode, clear_cache: bool, owner: str, lease_s: float | None) -> None:
        """Blocks until nothing runs. Repeated by the owner it begins the lease anew."""
        ours = HeldPause(mode)
        with self._lock:
            before = self._held.pop(owner, None)
            if before is not None:
                before.lease.cancel()
            self._held[owner] = ours
            strongest = max((one.mode for one in self._held.values()), key=lambda mode: _STRENGTH.get(mode, 3))
        try:
            self.generation.pause(strongest, self._timeout_s, clear_cache)
        except BaseException:  # it was not reached: the one before goes on, and its lease
            with self._lock:
                if self._held.get(owner) is ours:
                    del self._held[owner]
                    if before is not None:
                        self._held[owner] = before
                        self._lend(owner, before)
            raise
        with self._lock:
            taken = self._held.get(owner) is not ours
            if not taken and lease_s is not None:
                ours.due = time.monotonic() + lease_s
                self._lend(owner, ours)
            if not self._held:
                self.generation.resume()
        if taken and owner:
            raise Aborted("the pause was overtaken: by a resume, another pause, or another run")

    def resume(self, owner: str | None = None) -> None:
        """End the pause of this owner; None: every pause."""
        with self._lock:
            if owner is not None:
                self._end([owner])
            else:
                self._end(list(self._held))
                self.generation.resume()  # however it came to be paused

    def take_over(self, run_id: str) -> None:
        """End pauses of other runs."""
        with self._lock:
            self._end([owner for owner in self._held if run_id and owner not in ("", run_id)])

    def is_paused(self) -> bool:
        return self.generation.is_paused()

    def _end(self, owners: Iterable[str]) -> None:
        """Under the lock."""
        ended = [self._held.pop(owner) for owner in owners if owner in self._held]
        for one in ended:
            one.lease.cancel()
        if ended and not self._held:
            self.generation.resume()

    def _lend(self, owner: str, held: HeldPause) -> None:
        """Until it is due (None: until it is resumed). Under the lock."""
        if held.due is not None:
            held.lease = threading.Timer(max(0.0, held.due - time.monotonic()), self._lapse, (owner, held))
            held.lease.name, held.lease.daemon = "tq-weights-pause", True
            held.lease.start()

    def _lapse(self, owner: str, held: HeldPause) -> None:
        with self._lock:
            if self._held.get(owner) is held:
                self._end([owner])
