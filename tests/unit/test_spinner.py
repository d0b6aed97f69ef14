"""When a server looks for the next request, and when it sleeps. The clock is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from transfer_queue.server import spinner
from transfer_queue.server.spinner import COST, MAX_CREDIT, TRY_AGAIN, WINDOW, Spinner

SPIN_S = 0.5


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(spinner, "time", clock)
    monkeypatch.setattr(spinner, "usable_processors", lambda: 2.0)
    return clock


async def turn() -> None:
    """The loop looks at its sockets, and at what was to be called."""
    await asyncio.sleep(0)


async def looks_in_vain(looker: Spinner, clock: Clock) -> None:
    clock.now += SPIN_S
    await turn()
    assert not looker.spins


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))  # type: ignore[arg-type]


def test_it_looks_for_the_next_request_and_sleeps_when_none_came(clock: Clock) -> None:
    async def test() -> None:
        looker = Spinner(SPIN_S)
        looker.handled(None)
        for _ in range(5):
            clock.now += SPIN_S / 6
            await turn()
            assert looker.spins
        await looks_in_vain(looker, clock)

    run(test)


def test_each_request_begins_its_time_anew(clock: Clock) -> None:
    async def test() -> None:
        looker = Spinner(SPIN_S)
        for _ in range(5):
            looker.handled(None)
            clock.now += SPIN_S * 0.9
            await turn()
            assert looker.spins

    run(test)


def test_clients_that_call_less_often_let_it_sleep_but_for_a_try_now_and_then(clock: Clock) -> None:
    async def test() -> None:
        looker = Spinner(SPIN_S)
        for _ in range(MAX_CREDIT):  # more than there is credit for
            looker.handled(None)
            await looks_in_vain(looker, clock)
        looked = 0
        for _ in range(10 * (TRY_AGAIN + 1)):
            looker.handled(None)
            looked += looker.spins
            await looks_in_vain(looker, clock)
        assert looked == 10

    run(test)


def test_a_burst_pays_for_the_look_after_it(clock: Clock) -> None:
    async def test() -> None:
        looker = Spinner(SPIN_S)
        for _ in range(100):
            for _ in range(COST + 1):
                looker.handled(None)
                assert looker.spins
            await looks_in_vain(looker, clock)

    run(test)


@pytest.mark.parametrize(("spin_s", "processors"), [(0.0, 2.0), (SPIN_S, 1.5)])
def test_told_not_to_or_without_a_second_processor_it_never_looks(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, spin_s: float, processors: float
) -> None:
    async def test() -> None:
        looker = Spinner(spin_s)
        looker.handled(None)
        assert not looker.spins

    monkeypatch.setattr(spinner, "usable_processors", lambda: processors)
    run(test)


def test_it_sleeps_at_once_while_as_many_clients_work_as_there_are_processors(clock: Clock) -> None:
    async def test() -> None:
        looker = Spinner(SPIN_S)
        for asker in [*"ab"] * WINDOW:
            looker.handled(asker)
        await turn()
        assert not looker.spins
        for _ in range(WINDOW - 1):
            looker.handled("a")
            assert not looker.spins
        looker.handled("a")
        assert looker.spins
        await looks_in_vain(looker, clock)

    run(test)
