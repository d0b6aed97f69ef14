"""Calls of a storage engine end in time, and what comes too late is undone; sealed blocks say every change."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import until
from hypothesis import given, settings
from hypothesis import strategies as st
from strikes import struck_as_it_waits

from transfer_queue.client.engine import EngineAccess
from transfer_queue.controller import Controller
from transfer_queue.errors import ServiceUnavailable, StoreFull
from transfer_queue.memory.pool import Pool
from transfer_queue.sampler import SequentialSampler
from transfer_queue.server import engine_blocks
from transfer_queue.server.engine_blocks import EngineBlocks
from transfer_queue.storage.blocks import Unit
from transfer_queue.storage.engines import BlocksMissing, ReadSpan, Room, StorageEngine, deadline, sealed
from transfer_queue.storage.engines.deadline import GuardedEngine
from transfer_queue.storage.engines.files import Files
from transfer_queue.storage.in_time import OpenedOnce
from transfer_queue.storage.transports import guarded
from transfer_queue.storage.transports.guarded import GuardedTransport


class Slow(StorageEngine):
    """What it does waits for `gate`; `log` has what was done. `error` is raised instead, where there is one."""

    name = "Slow"
    gate = threading.Event()
    log: list[str] = []  # noqa: RUF012  the test's
    error: Exception | None = None

    def __init__(self, settings: Mapping[str, Any], serves: bool) -> None:
        if "missing" in settings:
            raise ImportError("No module named 'slow'")
        if "waits" in settings:
            self._do("open")

    @property
    def where(self) -> str:
        return "the corner"

    def _do(self, what: str) -> None:
        self.gate.wait()
        if self.error is not None:
            raise self.error
        self.log.append(what)

    def reserve(self, key: str, nbytes: int) -> Room:
        self._do(f"reserve {key}")
        return SlowRoom(self, nbytes)

    def read(self, spans: Sequence[ReadSpan]) -> None:
        self._do("read")

    def missing(self, keys: Sequence[str]) -> set[str]:
        return set()

    def drop(self, keys: Sequence[str]) -> None:
        self.log.append(f"drop {keys[0]}")

    def close(self) -> None:
        self.log.append("close")


class SlowRoom(Room):
    def __init__(self, engine: Slow, nbytes: int) -> None:
        self.memory = np.zeros(nbytes, np.uint8)
        self._engine = engine

    def seal(self) -> None:
        self._engine._do("seal")

    def abandon(self) -> None:
        self._engine.log.append("abandon")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[GuardedEngine]:
    monkeypatch.setattr(deadline, "engine_class", lambda name: Slow)
    Slow.gate.set()
    Slow.log, Slow.error = [], None
    yield GuardedEngine("Slow", {}, False, 5.0)
    Slow.gate.set()


def test_a_call_that_is_late_is_an_error_with_the_engine_and_the_time(engine: GuardedEngine) -> None:
    Slow.gate.clear()
    with pytest.raises(ServiceUnavailable, match=r"Slow at the corner did not answer within 0\.01 s"):
        engine.read([], 0.01)


def test_a_block_is_filled_once_however_often_there_is_no_place_for_it(
    engine: GuardedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come from a file, which is read once."""
    source, stored = iter([7, 8]), list[int]()

    def full_once(room: SlowRoom) -> None:
        monkeypatch.setattr(SlowRoom, "seal", lambda room: stored.extend(room.memory[:8].tolist()))
        raise StoreFull("no room just now")

    def fill(into: Any) -> None:
        into[:] = next(source)

    monkeypatch.setattr(SlowRoom, "seal", full_once)
    access = EngineAccess({"name": "Slow", "settings": {}}, Pool(0))
    access.write(1, "key", 8, fill, time.monotonic() + 60.0)
    assert stored == 8 * [7]


def test_threads_that_wait_for_the_same_opening_each_wait_no_longer_than_their_own_time(engine: GuardedEngine) -> None:
    Slow.gate.clear()
    access = EngineAccess({"name": "Slow", "settings": {"waits": True}}, Pool(0))

    def took(number: int) -> float:
        began = time.monotonic()
        with pytest.raises(ServiceUnavailable, match="Slow"):
            access.chunk(1, "key", 8, 0, 8, 0.3)
        return time.monotonic() - began

    with ThreadPoolExecutor(6) as threads:
        assert max(threads.map(took, range(6))) < 1.2, "one after the other they would take 1.8 s"


def test_who_has_more_time_tries_to_open_an_engine_again() -> None:
    began = threading.Event()

    def opens(timeout_s: float) -> str:
        if timeout_s < 1.0:
            began.set()
            time.sleep(timeout_s)
            raise ServiceUnavailable("late")
        return "engine"

    opened = OpenedOnce("Slow", opens)
    with ThreadPoolExecutor(2) as threads:
        impatient = threads.submit(opened.get, 0.2)
        began.wait(60)
        assert threads.submit(opened.get, 60.0).result() == "engine"
        assert impatient.exception() is not None


def test_an_engine_that_was_opened_by_one_thread_is_everybodys(engine: GuardedEngine) -> None:
    opened = OpenedOnce("Slow", lambda timeout_s: object())
    with ThreadPoolExecutor(6) as threads:
        assert len(set(threads.map(lambda _: opened.get(5.0), range(20)))) == 1


def test_deletions_that_hang_are_waited_for_by_one_thread(
    engine: GuardedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_blocks, "STEP_S", 0.001)
    monkeypatch.setattr(Slow, "drop", lambda slow, keys: slow._do(f"drop {keys}"))
    unit = Unit(1 << 20)
    blocks = EngineBlocks(engine, unit, Controller(SequentialSampler()), 5.0)
    unit.left_in_engine += ["a", "b"]

    async def delete() -> None:
        Slow.gate.clear()
        for _ in range(50):
            blocks.work()
            await asyncio.sleep(0.002)
        assert sum(thread.name == "tq-engine" for thread in threading.enumerate()) == 2, (
            "the call, and who keeps its time"
        )
        Slow.gate.set()
        while unit.left_in_engine:
            await asyncio.sleep(0.001)

    asyncio.run(delete())
    unit.close()
    assert Slow.log == ["drop ['a', 'b']"]


def test_an_engine_that_opens_too_late_is_closed(engine: GuardedEngine) -> None:
    Slow.gate.clear()
    with pytest.raises(ServiceUnavailable):
        GuardedEngine("Slow", {"waits": True}, False, 0.01)
    Slow.gate.set()
    until(lambda: Slow.log == ["open", "close"], "the engine closed")


def test_a_transport_that_opens_too_late_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, log = threading.Event(), list[str]()

    class Late:
        def __init__(self, settings: Mapping[str, Any], host: str) -> None:
            gate.wait()
            log.append("open")

        def close(self) -> None:
            log.append("close")

    monkeypatch.setattr(guarded, "transport_class", lambda name: Late)
    with pytest.raises(ServiceUnavailable):
        GuardedTransport("Late", {}, "host", 0.01)
    gate.set()
    until(lambda: log == ["open", "close"], "the transport closed")


def test_room_that_comes_too_late_is_abandoned(engine: GuardedEngine) -> None:
    Slow.gate.clear()
    with pytest.raises(ServiceUnavailable):
        engine.reserve("a", 8, 0.01)
    Slow.gate.set()
    until(lambda: Slow.log == ["reserve a", "abandon"], "the room given up")


def test_room_that_comes_when_its_caller_was_interrupted_is_abandoned(engine: GuardedEngine) -> None:
    Slow.gate.clear()
    struck_as_it_waits(lambda: engine.reserve("a", 8, 60.0), "tq-engine")
    Slow.gate.set()
    until(lambda: Slow.log == ["reserve a", "abandon"], "the room given up")


@pytest.mark.parametrize(
    "memory",
    [
        np.zeros(7, np.uint8),
        bytearray(8),
        np.zeros(8, np.int8),
        np.zeros(16, np.uint8)[::2],
        np.frombuffer(bytes(8), np.uint8),
    ],
    ids=["too small", "no array", "other numbers", "with gaps", "read-only"],
)
def test_memory_that_a_writer_cannot_fill_is_refused(
    engine: GuardedEngine, monkeypatch: pytest.MonkeyPatch, memory: Any
) -> None:
    """A writer fills by addresses."""
    room = SlowRoom(Slow({}, False), 8)
    room.memory = memory
    monkeypatch.setattr(Slow, "reserve", lambda slow, key, nbytes: room)
    with pytest.raises(ServiceUnavailable, match=r"Slow at the corner: .* is no room with contiguous memory for 8"):
        engine.reserve("a", 8, 5.0)


def test_what_is_sealed_too_late_is_dropped(engine: GuardedEngine) -> None:
    room = engine.reserve("a", 8, 5.0)
    Slow.gate.clear()
    with pytest.raises(ServiceUnavailable):
        engine.seal(room, "a", 0.01)
    Slow.gate.set()
    until(lambda: Slow.log == ["reserve a", "seal", "drop a"], "the object dropped")


@pytest.mark.parametrize("error", [StoreFull("full"), BlocksMissing(["a"])])
def test_what_an_engine_may_say_is_passed_on(engine: GuardedEngine, error: Exception) -> None:
    Slow.error = error
    with pytest.raises(type(error)):
        engine.read([], 5.0)


def test_only_a_read_says_that_something_is_missing(engine: GuardedEngine) -> None:
    Slow.error = BlocksMissing(["a"])
    with pytest.raises(ServiceUnavailable, match="nothing under"):
        engine.reserve("a", 8, 5.0)


def test_nothing_is_missing_that_was_not_asked_for(engine: GuardedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slow, "missing", lambda slow, keys: ["a", "b"])
    assert engine.missing(["b", "c"], 5.0) == {"b"}


@pytest.mark.parametrize("name", ["where", "place", "for_clients"])
def test_an_engine_that_cannot_say_where_it_is_is_closed(
    engine: GuardedEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fails(slow: Slow) -> str:
        raise OSError("lost")

    monkeypatch.setattr(Slow, name, property(fails))
    with pytest.raises(ServiceUnavailable, match="Slow: lost"):
        GuardedEngine("Slow", {}, True, 5.0)
    assert Slow.log == ["close"]


def test_settings_that_clients_cannot_be_told_are_refused(
    engine: GuardedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slow, "for_clients", {"path": object()})
    with pytest.raises(ServiceUnavailable, match="object is not JSON serializable"):
        GuardedEngine("Slow", {}, True, 5.0)


@pytest.mark.parametrize("error", [OSError("code 7"), ValueError("odd"), RuntimeError("lost")])
def test_whatever_else_it_raises_names_it(engine: GuardedEngine, error: Exception) -> None:
    Slow.error = error
    with pytest.raises(ServiceUnavailable, match=f"Slow at the corner: {error}") as raised:
        engine.read([], 5.0)
    assert raised.value.__cause__ is error


def test_a_library_that_is_not_installed_is_named(engine: GuardedEngine) -> None:
    with pytest.raises(ServiceUnavailable, match="Slow is not installed on this host: No module named 'slow'"):
        GuardedEngine("Slow", {"missing": True}, False, 5.0)


# ---- sealed blocks

QUICK = settings(max_examples=150, derandomize=True, deadline=None, database=None)
sizes = st.sampled_from([1, 7, 8, 9, 4096, sealed.GRAIN - 1, sealed.GRAIN, sealed.GRAIN + 1, 3 * sealed.GRAIN + 5])


def sealed_block(nbytes: int, block: int) -> np.ndarray:
    memory = np.random.default_rng(nbytes).integers(0, 256, sealed.sealed_nbytes(nbytes), np.uint8)
    sealed.seal(memory, nbytes, block)
    return memory


@QUICK
@given(sizes, st.integers(1, 1 << 50), st.data())
def test_a_changed_byte_is_found_and_nothing_else_is(nbytes: int, block: int, data: st.DataObject) -> None:
    memory = sealed_block(nbytes, block)
    whole = [(0, nbytes)]
    assert sealed.is_right(memory, nbytes, whole, block)
    assert not sealed.is_right(memory, nbytes, whole, block + 1), "another block's bytes"
    start, end = sealed.tail_range(nbytes)
    place = data.draw(st.integers(0, nbytes - 1) | st.integers(start, end - 1))
    memory[place] ^= data.draw(st.integers(1, 255))
    assert not sealed.is_right(memory, nbytes, whole, block)


@QUICK
@given(sizes, st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20)), max_size=6))
def test_grains_cover_the_ranges_and_no_more_than_their_grains(nbytes: int, pairs: list[tuple[int, int]]) -> None:
    ranges = [tuple(sorted((first % (nbytes + 1), last % (nbytes + 1)))) for first, last in pairs]
    found = sealed.in_grains(ranges, nbytes)  # type: ignore[arg-type]
    wanted = {place // sealed.GRAIN for first, last in ranges for place in {first, last - 1} if first < last}
    wanted |= {grain for first, last in ranges if first < last
               for grain in range(first // sealed.GRAIN, (last - 1) // sealed.GRAIN)}  # fmt: skip
    covered = [grain for first, last in found for grain in range(first // sealed.GRAIN, sealed.num_grains(last))]
    assert covered == sorted(wanted)
    assert all(0 <= first < last <= nbytes for first, last in found)


def test_what_a_killed_writer_left_of_a_file_goes_with_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files({"url": f"file://{tmp_path}"}, True)
    room = files.reserve("tq/life/7", 8)
    with monkeypatch.context() as patch:
        patch.setattr(files._system, "move", lambda *_: pytest.exit("as a kill: nothing cleans up"))
        with pytest.raises(pytest.exit.Exception):
            room.seal()
    assert len(list(tmp_path.glob("tq-*"))) == 1
    files.drop(["tq/life/7"])
    assert list(tmp_path.glob("tq-*")) == []


def test_files_may_lie_below_the_characters_of_patterns() -> None:
    files = Files({"url": "memory://test_engine_calls/run=[1]*?"}, True)
    for number in range(2):
        room = files.reserve(f"tq/life/{number}", 8)
        room.memory[:] = number
        room.seal()
    files.drop(["tq/life/0"])
    assert files.missing(["tq/life/0", "tq/life/1"]) == {"tq/life/0"}
    files.read([ReadSpan("tq/life/1", 0, found := np.zeros(8, np.uint8))])
    assert found.tolist() == [1] * 8
    files._system.remove("/test_engine_calls")
