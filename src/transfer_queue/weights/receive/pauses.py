"""Pauses of one server's generation, and for whom they were made."""

from __future__ import annotations

import threading
import time

from transfer_queue.errors import Aborted
from transfer_queue.weights.receive.gate import Generation, Mode


class Pauses:
    """A pause that a trainer makes around a commit, or while a replica has old weights, is that run's, and has a lease:
    it ends with the lease, or once another run takes over, so that a trainer that dies leaves nobody frozen. A pause
    without an owner is somebody else's, and lasts until it is resumed. Thread-safe."""

    def __init__(self, generation: Generation, timeout_s: float) -> None:
        self.generation = generation
        self.owner = ""
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._lease = threading.Timer(0.0, lambda: None)
        self._due: float | None = None  # of the lease
        self._turn = 0  # of pauses and resumes: a lease belongs to one

    def pause(self, mode: Mode, clear_cache: bool, owner: str, lease_s: float | None) -> None:
        """Blocks until nothing runs. Repeated by the owner it begins the lease anew."""
        with self._lock:
            before, due = self.owner, self._due
        turn = self._next(owner)
        try:
            self.generation.pause(mode, self._timeout_s, clear_cache)
        except BaseException:  # it was not reached: the one before goes on, and its lease
            with self._lock:
                if self._turn == turn:
                    self.owner = before
                    self._lend(turn, due)
            raise
        with self._lock:
            if self._turn == turn and lease_s is not None:
                self._lend(turn, time.monotonic() + lease_s)
            taken = self._turn != turn
        if taken and owner:
            raise Aborted("the pause was overtaken: by a resume, another pause, or another run")

    def resume(self) -> None:
        self._next("")
        self.generation.resume()

    def take_over(self, run_id: str) -> None:
        """End a pause of another run."""
        with self._lock:
            other = bool(run_id and self.owner and self.owner != run_id)
        if other:
            self.resume()

    def is_paused(self) -> bool:
        return self.generation.is_paused()

    def _next(self, owner: str) -> int:
        with self._lock:
            self._lease.cancel()
            self._due = None
            self._turn += 1
            self.owner = owner
            return self._turn

    def _lend(self, turn: int, due: float | None) -> None:
        """Until then (None: until it is resumed). Under the lock."""
        self._due = due
        if due is not None:
            self._lease = threading.Timer(max(0.0, due - time.monotonic()), self._lapse, (turn,))
            self._lease.name, self._lease.daemon = "tq-weights-pause", True
            self._lease.start()

    def _lapse(self, turn: int) -> None:
        with self._lock:
            if self._turn != turn:
                return
            self._turn += 1
            self.owner = ""
        self.generation.resume()
