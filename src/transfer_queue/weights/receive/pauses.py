"""Pauses of one server's generation, and for whom they were made."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from transfer_queue.errors import Aborted, TransferQueueError
from transfer_queue.weights.receive.gate import Generation, Mode

_STRENGTH = {"keep": 0, "wait": 1, "abort": 2}
_NOBODY_KNOWS = "?"


class HeldPause:
    """What one owner asked for. `wanted`: it was not resumed, or asked for anew, while it still waited."""

    def __init__(self, owner: str, mode: Mode, *, wanted: bool = True) -> None:
        self.owner = owner
        self.mode = mode
        self.wanted = wanted
        self.crossed = False  # another call went on at the same time: which one came last?
        self.lease: threading.Timer | None = None


class Pauses:
    """A pause that a trainer makes around a commit, or while a replica has old weights, is that run's, and has a lease:
    it ends with the lease, or once another run takes over, so that a trainer that dies leaves nobody frozen. A pause
    without an owner is somebody else's, and lasts until it is resumed. Each owner holds one at a time, from when it was
    reached; until then the one before is held. Generation goes on when the last one has ended, and until then is paused
    by the strongest mode of those that are held. One that waits and is overtaken by another owner's begins again after
    that, and once no freeze (keep) of others is held, in which it would let requests run on; until its time is up.
    Thread-safe."""

    def __init__(self, generation: Generation, timeout_s: float) -> None:
        self.generation = generation
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # never while the generation is being paused: that blocks
        self._held: dict[str, HeldPause] = {}  # by owner
        self._calls: set[HeldPause] = set()  # for which the generation is being paused just now
        self._overtaken: set[HeldPause] = set()  # that wait for such calls of other owners to end
        self._ended = threading.Condition(self._lock)  # such a call, or pause; or an overtaken one is unwanted
        self._reached = ""  # the mode that the generation was brought to; "" for none

    def owner(self, run_id: str = "") -> str:
        """The run that there is a pause of, or one that waits: this one if it has any; "" for none."""
        with self._lock:
            found = [*self._held, *(one.owner for one in self._pending() if one.wanted)]
            return run_id if run_id in found else next((owner for owner in found if owner), "")

    def pause(self, mode: Mode, clear_cache: bool, owner: str, lease_s: float | None) -> None:
        """Blocks until nothing runs. Repeated by the owner it begins the lease anew."""
        ours, end = HeldPause(owner, mode), time.monotonic() + self._timeout_s
        with self._lock:
            self._call_off(owner)
            self._begin(ours)
        while True:
            try:
                self._reach(ours, max(0.0, end - time.monotonic()), clear_cache, lease_s)
                break
            except Aborted:
                if not self._begin_again(ours, end):
                    raise
            finally:
                with self._lock:
                    self._overtaken.discard(ours)
                self._settle()
        if not ours.wanted and owner:
            raise Aborted("the pause was overtaken: by a resume, another pause, or another run")

    def resume(self, owner: str | None = None) -> None:
        """End the pause of this owner, and be paused by the strongest of the others; None: every pause. That one never
        blocks."""
        if owner is not None:
            self._end([owner])
            return
        with self._lock:
            for one in {*self._held, *(call.owner for call in self._pending())}:
                self._drop(one)
            self._resume()  # however it came to be paused

    def take_over(self, run_id: str) -> None:
        """End pauses of other runs."""
        with self._lock:
            owners = {*self._held, *(one.owner for one in self._pending())}
        self._end(owner for owner in owners if run_id and owner not in ("", run_id))

    def is_paused(self) -> bool:
        return self.generation.is_paused()

    def _reach(self, ours: HeldPause, timeout_s: float, clear_cache: bool, lease_s: float | None) -> None:
        """Pause the generation for this call, which has begun and ends here."""
        try:
            with self._lock:
                strongest = _strongest([ours, *(one for one in self._held.values() if one.owner != ours.owner)])
            self.generation.pause(strongest, timeout_s, clear_cache)
            with self._lock:
                self._reached = _NOBODY_KNOWS if ours.crossed else strongest
                if ours.wanted:
                    self._hold(ours, lease_s)
        except Aborted:
            with self._lock:
                if ours.crossed:  # not by what somebody else did to the generation
                    self._overtaken.add(ours)
            raise
        finally:
            with self._lock:
                self._leave(ours)

    def _begin_again(self, ours: HeldPause, end: float) -> bool:
        """Begin once no other call goes on, which would be overtaken in turn, and nobody else's freeze is held. False
        when it was not overtaken, or is not wanted any more, or its time is up."""

        def may_begin() -> bool:
            frozen = any(one.mode == "keep" and one.owner != ours.owner for one in self._held.values())
            return not self._calls and not (frozen and ours.mode == "wait")

        with self._lock:
            if ours not in self._overtaken:
                return False
            self._ended.wait_for(lambda: not ours.wanted or may_begin(), end - time.monotonic())
            begins = ours.wanted and may_begin() and time.monotonic() < end
            self._overtaken.discard(ours)
            if begins:
                self._begin(ours)
            return begins

    def _end(self, owners: Iterable[str]) -> None:
        with self._lock:
            for owner in owners:
                self._drop(owner)
        self._settle()

    def _settle(self) -> None:
        """Bring the generation to what is held now. While a call goes on it is left to that one, when it ends."""
        while True:
            with self._lock:
                if not self._held:
                    if (self._reached or self._calls) and not any(one.wanted for one in self._calls):
                        self._resume()
                    return
                weaker = HeldPause("", _strongest(self._held.values()), wanted=False)
                if self._calls or self._reached == weaker.mode:
                    return
                self._begin(weaker)
            try:
                with suppress(TransferQueueError):  # it stays paused as it was, or another call came, which is seen
                    self.generation.pause(weaker.mode, self._timeout_s, False)
            finally:
                with self._lock:
                    self._leave(weaker)
                    self._reached = _NOBODY_KNOWS if weaker.crossed else weaker.mode

    # under the lock

    def _begin(self, ours: HeldPause) -> None:
        ours.crossed = bool(self._calls)
        for one in self._calls:
            one.crossed = True
        self._calls.add(ours)

    def _leave(self, call: HeldPause) -> None:
        self._calls.discard(call)
        self._ended.notify_all()

    def _hold(self, ours: HeldPause, lease_s: float | None) -> None:
        before, self._held[ours.owner] = self._held.get(ours.owner), ours
        if before is not None and before.lease is not None:
            before.lease.cancel()
        if lease_s is not None:
            ours.lease = threading.Timer(max(0.0, lease_s), self._lapse, (ours,))
            ours.lease.name, ours.lease.daemon = "tq-weights-pause", True
            ours.lease.start()

    def _drop(self, owner: str) -> None:
        self._call_off(owner)
        ended = self._held.pop(owner, None)
        if ended is not None and ended.lease is not None:
            ended.lease.cancel()

    def _call_off(self, owner: str) -> None:
        for one in self._pending():
            if one.owner == owner:
                one.wanted = False
        self._ended.notify_all()

    def _pending(self) -> set[HeldPause]:
        return self._calls | self._overtaken

    def _resume(self) -> None:
        for one in self._calls:
            one.crossed = True
        self._reached = ""
        self.generation.resume()

    # of a timer

    def _lapse(self, ours: HeldPause) -> None:
        with self._lock:
            if self._held.get(ours.owner) is not ours:
                return
            del self._held[ours.owner]
            self._ended.notify_all()
        self._settle()


def _strongest(pauses: Iterable[HeldPause]) -> Mode:
    return max((one.mode for one in pauses), key=lambda mode: _STRENGTH.get(mode, 3))
