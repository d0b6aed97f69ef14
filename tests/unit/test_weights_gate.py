"""The gate that requests pass between steps: pauses, in threads and coroutines."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from conftest import until

from transfer_queue.errors import Aborted, DeadlineExceeded, GenerationPaused, InvalidInput, UnknownMode
from transfer_queue.weights import Gate
from transfer_queue.weights.receive.gate import Mode
from transfer_queue.weights.receive.pauses import Pauses

ROOM_S = 20.0


def talking(gate: Gate, name: str, steps: list[str]) -> None:
    """A request that goes on until it is aborted; notes each step."""
    with gate.request(name) as request:
        while True:
            with request.step(ROOM_S):
                steps.append(name)


@pytest.fixture
def threads() -> Any:
    with ThreadPoolExecutor(8) as found:
        yield found


def test_keep_returns_between_steps_and_nothing_runs_until_the_resume(threads: ThreadPoolExecutor) -> None:
    gate, steps = Gate(), []
    calls = [threads.submit(talking, gate, name, steps) for name in ("a", "b")]
    until(lambda: {"a", "b"} <= set(steps), "steps of both")
    gate.pause("keep", ROOM_S)
    assert gate.is_paused()
    frozen = len(steps)
    late = threads.submit(talking, gate, "c", steps)
    until(lambda: len(gate.running) == 3, "the late request")
    assert len(steps) == frozen
    gate.resume()
    assert not gate.is_paused()
    until(lambda: "c" in steps, "a step of the late request")
    assert gate.abort(["a", "nobody"]) == 1
    assert gate.abort() == 2
    for call in (*calls, late):
        with pytest.raises(Aborted):
            call.result(ROOM_S)
    assert gate.running == []


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_that_comes_too_late_is_none(mode: Mode) -> None:
    gate = Gate()
    with gate.request("a") as request:
        with request.step(), pytest.raises(DeadlineExceeded, match="not paused"):
            gate.pause(mode, 0.01)
        assert not gate.is_paused()
        assert request.aborted == (mode == "abort")
        with gate.request("b") as other, other.step():
            pass


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_new_requests_are_refused_until_the_resume(mode: Mode) -> None:
    cleared = []
    gate = Gate(clear_cache=lambda: cleared.append(mode))
    gate.pause(mode, ROOM_S)
    gate.pause(mode, ROOM_S, clear_cache=False)
    assert cleared == [mode]
    with pytest.raises(GenerationPaused), gate.request():
        pass
    gate.resume()
    with gate.request("a"), pytest.raises(InvalidInput, match="'a' is running"), gate.request("a"):
        pass
    gate.pause("keep", ROOM_S)
    assert cleared == [mode]
    with pytest.raises(UnknownMode):
        gate.pause("later", ROOM_S)  # type: ignore[arg-type]
    assert gate.is_paused()


def test_frozen_requests_end_when_a_wait_follows(threads: ThreadPoolExecutor) -> None:
    gate = Gate()

    def short() -> str:
        with gate.request("a") as request:
            for _ in range(3):
                with request.step(ROOM_S):
                    pass
        return "whole"

    gate.pause("keep", ROOM_S)
    call = threads.submit(short)
    until(lambda: gate.running == ["a"], "the request")
    gate.pause("wait", ROOM_S)
    assert call.result(ROOM_S) == "whole"
    assert gate.is_paused()


def test_a_resume_overtakes_a_pause_that_waits(threads: ThreadPoolExecutor) -> None:
    gate = Gate()
    with gate.request("a"):
        pause: Future[None] = threads.submit(gate.pause, "wait", ROOM_S)
        until(lambda: refused(gate), "the pause")
        gate.resume()
        with pytest.raises(Aborted, match="before the running requests had ended"):
            pause.result(ROOM_S)
        assert not gate.is_paused()
        assert not refused(gate)


def test_a_pause_that_waits_outlasts_pauses_of_other_owners(threads: ThreadPoolExecutor) -> None:
    gate = Gate()
    pauses = Pauses(gate, ROOM_S)
    with gate.request("a") as request:
        call: Future[None] = threads.submit(pauses.pause, "wait", True, "", None)
        for run in ("trainer", "another", "trainer"):
            until(lambda: refused(gate), "the pause")
            pauses.pause("keep", True, run, None)
            pauses.resume(run)
            with request.step(ROOM_S):
                pass
        assert not call.done()
    call.result(ROOM_S)
    assert gate.is_paused()
    pauses.resume("")
    assert not refused(gate)


@pytest.mark.parametrize("lease_s", [None, 0.3])
def test_a_pause_that_waits_lets_no_request_run_on_while_the_freeze_that_overtook_it_is_held(
    lease_s: float | None, threads: ThreadPoolExecutor
) -> None:
    gate = Gate()
    pauses = Pauses(gate, ROOM_S)
    with gate.request("a") as request:
        call: Future[None] = threads.submit(pauses.pause, "wait", True, "", None)
        until(lambda: refused(gate), "the pause")
        pauses.pause("keep", True, "trainer", lease_s)
        if lease_s is None:
            until(lambda: bool(pauses._overtaken), "the pause that waits to see it")
            with pytest.raises(DeadlineExceeded, match="frozen"), request.step(0.05):
                pass
            assert pauses.is_paused()
            pauses.resume("trainer")
        until(lambda: refused(gate), "the pause, again")
        with request.step(ROOM_S):
            pass
        assert not call.done()
    call.result(ROOM_S)
    assert gate.is_paused()


def refused(gate: Gate) -> bool:
    try:
        with gate.request():
            return False
    except GenerationPaused:
        return True


def test_coroutines_pass_the_same_gate() -> None:
    gate, steps = Gate(), []

    async def talk(name: str) -> str:
        try:
            async with gate.request(name) as request:
                while True:
                    async with request.step(ROOM_S):
                        steps.append(name)
                        await asyncio.sleep(0)
        except Aborted:
            return "aborted"

    async def all_of_it() -> None:
        talks = [asyncio.create_task(talk(name)) for name in ("a", "b")]
        while len(steps) < 10:
            await asyncio.sleep(0)
        await asyncio.to_thread(gate.pause, "keep", ROOM_S)
        frozen = len(steps)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(steps) == frozen
        with pytest.raises(DeadlineExceeded, match="frozen"):
            async with gate.request("c") as request, request.step(0.01):
                pass
        gate.abort(["a"])
        assert await talks[0] == "aborted"
        assert len(steps) == frozen
        talks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await talks[1]
        assert gate.running == []

    asyncio.run(all_of_it())
