"""Pauses of several owners that wait, fail, overtake each other and end in any order, at a generation of the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from transfer_queue.errors import Aborted, DeadlineExceeded
from transfer_queue.weights.receive.gate import Mode
from transfer_queue.weights.receive.pauses import Pauses

ROOM_S = 20.0
MODES: list[Mode] = ["keep", "wait", "abort"]  # the strongest last
OWNERS = ["", "run", "other"]
OF_THREAD = threading.local()  # `asked`: the pause that it makes


class Asked:
    """A pause that was asked for. `wanted`: it goes on, and no other call of its owner came since."""

    def __init__(self, owner: str, mode: Mode) -> None:
        self.owner = owner
        self.mode = mode
        self.wanted = True


class Stop:
    """Where a call to the generation stands until the test lets it go on."""

    def __init__(self, can_fail: bool, reached_for: Asked | None) -> None:
        self.can_fail = can_fail
        self.reached_for = reached_for
        self.fails = False
        self.go_on = threading.Event()


class Driven:
    """A `Generation` as `Gate` is one, whose calls stop as they begin, while they wait, and before they return."""

    def __init__(self) -> None:
        self.mode: Mode | None = None
        self.stops: list[Stop] = []
        self.changed = threading.Condition()
        self._resting: Mode | None = None
        self._turn = 0

    def pause(self, mode: Mode, timeout_s: float, clear_cache: bool = True) -> None:
        asked = OF_THREAD.asked if clear_cache else None  # nobody asks for a weaker mode
        self._stop()
        turn = self._set(mode)
        fails = self._stop(can_fail=asked is not None)  # a weaker mode is reached: nothing runs
        if self._turn != turn:
            raise Aborted("another call came")
        if fails:
            self._set(self._resting)
            raise DeadlineExceeded("requests ran on")
        self._resting = mode
        self._stop(reached_for=asked)

    def resume(self) -> None:
        self._resting = None
        self._set(None)

    def is_paused(self) -> bool:
        return self._resting is not None

    def abort(self, request_ids: Any = None) -> int:
        return 0

    def _set(self, mode: Mode | None) -> int:
        self.mode = mode
        self._turn += 1
        return self._turn

    def _stop(self, can_fail: bool = False, reached_for: Asked | None = None) -> bool:
        stop = Stop(can_fail, reached_for)
        with self.changed:
            self.stops.append(stop)
            self.changed.notify_all()
        assert stop.go_on.wait(ROOM_S)
        return stop.fails


class PausesModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.generation = Driven()
        self.pauses = Pauses(self.generation, ROOM_S)
        self.asked: list[Asked] = []
        self.held: dict[str, Mode] = {}
        self.num_running = 0

    # what the owners do

    @rule(owner=st.sampled_from(OWNERS), mode=st.sampled_from(MODES), lease_s=st.sampled_from([None, 3600.0]))
    def pause(self, owner: str, mode: Mode, lease_s: float | None) -> None:
        self.call_off(owner)
        one = Asked(owner, mode)
        self.asked.append(one)

        def work() -> None:
            OF_THREAD.asked = one
            with suppress(Aborted, DeadlineExceeded):
                self.pauses.pause(mode, True, owner, lease_s)
            one.wanted = False

        self.run(work)

    @rule(owner=st.sampled_from(OWNERS))
    def resume(self, owner: str) -> None:
        self.end(owner)
        self.run(lambda: self.pauses.resume(owner))
        if not self.held and not any(one.wanted for one in self.asked):
            assert self.generation.mode is None, "those that wait are woken at once"

    @rule()
    def resume_all(self) -> None:
        for owner in OWNERS:
            self.end(owner)
        self.pauses.resume()
        assert self.generation.mode is None

    @rule(run_id=st.sampled_from(OWNERS[1:]))
    def take_over(self, run_id: str) -> None:
        for owner in set(OWNERS) - {"", run_id}:
            self.end(owner)
        self.run(lambda: self.pauses.take_over(run_id))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def lapse(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        lease = self.pauses._held[owner].lease
        if lease is not None and lease.function.__name__ == "_lapse":
            del self.held[owner]
            lease.cancel()  # it is over now
            self.run(lambda: lease.function(*lease.args))

    # what the generation does

    @precondition(lambda self: self.generation.stops)
    @rule(data=st.data(), fails=st.booleans())
    def go_on(self, data: st.DataObject, fails: bool) -> None:
        stop = data.draw(st.sampled_from(self.generation.stops))
        stop.fails = fails and stop.can_fail
        self.let_go(stop)

    @rule()
    def go_on_all(self) -> None:
        """Generation runs exactly when no pause is held, and is paused by the strongest of those."""
        while self.generation.stops:
            self.let_go(self.generation.stops[0])
        found = {owner: one.mode for owner, one in self.pauses._held.items()}
        assert found == self.held
        strongest = max(self.held.values(), key=MODES.index, default=None)
        assert self.generation.mode == strongest
        assert self.generation.is_paused() == bool(self.held)

    def teardown(self) -> None:
        self.go_on_all()
        self.pauses.resume()

    # the model

    def call_off(self, owner: str) -> None:
        for one in self.asked:
            if one.owner == owner:
                one.wanted = False

    def end(self, owner: str) -> None:
        self.call_off(owner)
        self.held.pop(owner, None)

    def run(self, work: Callable[[], None]) -> None:
        def counted() -> None:
            try:
                work()
            finally:
                with self.generation.changed:
                    self.num_running -= 1
                    self.generation.changed.notify_all()

        self.num_running += 1
        threading.Thread(target=counted).start()
        self.wait()

    def let_go(self, stop: Stop) -> None:
        with self.generation.changed:
            self.generation.stops.remove(stop)
        one = stop.reached_for
        if one is not None and one.wanted:
            self.held[one.owner] = one.mode
        stop.go_on.set()
        self.wait()

    def wait(self) -> None:
        """Until every thread has ended, or stands at a stop, or waits for those that do, or for the end of a freeze."""

        def has_settled() -> bool:
            waiting, num_stops = list(self.pauses._overtaken), len(self.generation.stops)
            if self.num_running != num_stops + len(waiting):
                return False
            frozen = {owner for owner, one in self.pauses._held.copy().items() if one.mode == "keep"}
            return num_stops > 0 or all(one.mode == "wait" and frozen - {one.owner} for one in waiting)

        end = time.monotonic() + ROOM_S
        with self.generation.changed:
            while not self.generation.changed.wait_for(has_settled, 0.001):  # nobody tells of one that begins to wait
                assert time.monotonic() < end


TestPausesModel = PausesModel.TestCase
TestPausesModel.settings = settings(
    max_examples=300, stateful_step_count=30, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def returning(model: PausesModel, work: Callable[[], object]) -> Stop:
    """The call to the generation that comes of this, when it has done what was asked, and has not returned yet."""
    work()
    for _ in range(2):
        model.let_go(model.generation.stops[-1])
    return model.generation.stops[-1]


def crossed(model: PausesModel, call: Stop) -> None:
    """A stronger pause comes and ends before that call has returned."""
    model.let_go(returning(model, lambda: model.pause("other", "abort", None)))
    model.resume("other")
    model.let_go(call)
    model.teardown()


def test_a_pause_knows_no_mode_when_another_one_was_reached_before_it_returned() -> None:
    model = PausesModel()
    crossed(model, returning(model, lambda: model.pause("run", "keep", None)))


def test_a_weaker_mode_is_asked_for_again_when_a_stronger_pause_came_meanwhile() -> None:
    model = PausesModel()
    for owner, mode in (("run", "keep"), ("other", "abort")):
        model.let_go(returning(model, lambda: model.pause(owner, mode, None)))  # noqa: B023 it is over then
    crossed(model, returning(model, lambda: model.resume("other")))
