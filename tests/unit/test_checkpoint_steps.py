"""Loading a checkpoint step by step: others are served meanwhile, from what was there, until all of it is replaced."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from services import captured, commit, filled, send
from tables import Box, busy, content, indexes, moved

from transfer_queue.controller import Controller, restore
from transfer_queue.controller.saved_state import CHUNK_ROWS, SavedController
from transfer_queue.controller.snapshot import exported
from transfer_queue.errors import CheckpointCorrupt, DataLost, RowCleared
from transfer_queue.sampler import SequentialSampler
from transfer_queue.server.service import Service
from transfer_queue.storage.blocks import Unit
from transfer_queue.wire import messages as m

# `busy()` as an earlier version saved it
OF_FORMAT_1 = (
    "eNp1U0tu2zAQJeUk7g9Fl132BEHbbIp2kzvkAAZFjlPVEqVoqMLe2e6imy6iWEC2oSHLaoDcwQvteoLeplJEKSndDiA8zJDze3z6XozDOGCK3k"
    "qYqpEnBUyfb5EFkQ/x708qZhLHEI8uEkjg2MSPEWpfKo/5IxP6eNaHztrInTkZoWIKFtsWcV4o5vqAVz9yyQLQUSmA+ywG8aIMQDHBFFvmqCAa"
    "FBJqFAvNVvTX6QG5t93mfsbqAzFGDQ4Mmnvk0OCRwaHBn4ms+3kBiIrkE5jh9Xrydj15t56c7GrLFTvH66WWZO3JRS4AopQutGy+QXOhGHvgC8"
    "wy7W4ESITt2A+ZOnmfOplm+yG+Hwq3ofsFuMKbyw0H38eMUMcpI6YUxBJX1UtKaL8YIY3v/OV3q7bLFudxmESYfTOzXWmm3cL1Qz7B6lWX98Rg"
    "HicSq1Obv84cC21+O79rlmrWt7Jz2lZvqFWS/KdUMzfvipnkR4dch32nA+u1TSdbBPZSJQ8lJvXbL7WqhrQdQCfV0ExjRHnRi3LXi3JuhPe64/"
    "GpwWf7wtonohHaSk+NvlYPOkozPbMV0ooiJb0i0uqIPn7p9IH8WU/J4b/JJ9b/YJPfUzIvv0KMXu0tNzxMpCIFRCH/jJclE4FXTyLmfwDGjDL1"
)


@pytest.fixture(autouse=True)
def _nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "SMALL_NBYTES", 0)


def start(box: Box, state: bytes, blocks: list[int], ticket: str = "load") -> None:
    """Begin to load a state; its blocks have numbers of their own."""
    refilled = [m.Refilled(saved, block, 0) for saved, block in moved(blocks).items()]
    box.controller.payloads[ticket] = memoryview(state)
    assert box.handle(m.Restore(7, refilled, [b""]), ticket) is None


def steps(box: Box) -> Iterator[int]:
    """Tidy until nothing is left to do."""
    count = 0
    while box.controller.unfinished:
        box.controller.tidy()
        box.controller.check_invariants()
        yield (count := count + 1)


def replies(box: Box) -> list[Any]:
    found = [(ticket, type(reply), getattr(reply, "code", "")) for ticket, reply in box.controller.outbox]
    box.controller.outbox.clear()
    return found


def large() -> tuple[bytes, list[int]]:
    box = Box()
    count = 5 * CHUNK_ROWS + 7
    box.put([f"k{n}" for n in range(count)], ["a", "b"], [{"n": n} for n in range(count)])
    return exported(box.controller.state)


def test_others_are_served_from_the_old_state_until_the_new_one_is_complete() -> None:
    box = busy()
    before, lease = box.partitions(), box.lend(1, task="lent")[0]
    state, blocks = large()
    start(box, state, blocks)
    seen = 0
    for _ in steps(box):
        if not box.controller.outbox:
            seen += 1
            assert box.partitions() == before
            assert box.renew(lease) == 1
            box.put([f"new{seen}"], ["a"], partition="q")
            assert box.cells([f"new{seen}"], partition="q") == {"a": [(box.last_block, 0)]}
    assert seen > 10
    assert replies(box) == [("load", m.Done, "")]
    assert box.partitions() == ["p"]
    assert set(box.controller.block_index.entries) == set(moved(blocks).values())
    assert set(box.freed()) >= {1, 2, 4, 5, box.last_block}
    with pytest.raises(RowCleared):
        box.get([0], partition="q")
    assert min(indexes(box.put(1))) >= 5 * CHUNK_ROWS + 7


def test_a_step_adds_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box()
    state, blocks = large()
    drafts: list[restore.NewState] = []
    make = restore.NewState
    monkeypatch.setattr(restore, "NewState", lambda controller: drafts.append(make(controller)) or drafts[-1])
    start(box, state, blocks)
    known = 0
    for _ in steps(box):
        now = sum(len(table.names) for table in drafts[0].tables.values())
        assert now - known <= CHUNK_ROWS
        known = max(known, now)
    assert known == 5 * CHUNK_ROWS + 7
    assert exported(box.controller.state)[1] == list(moved(blocks).values())


def test_a_load_whose_asker_is_gone_changes_nothing() -> None:
    state, blocks = large()
    count = 0
    while True:
        box = busy()
        before, _ = exported(box.controller.state), box.freed()
        start(box, state, blocks)
        for done in steps(box):
            if done > count:
                break
        if box.controller.outbox:
            break
        box.forget("load")
        list(steps(box))
        assert exported(box.controller.state) == before
        assert replies(box) == []
        assert box.freed() == []
        count += 1
    assert count > 10


def test_a_second_load_waits_for_the_first() -> None:
    box = Box()
    start(box, *large(), "first")
    start(box, *exported(busy().controller.state), "second")
    list(steps(box))
    assert replies(box) == [("first", m.Done, ""), ("second", m.Done, "")]
    assert box.partitions() == ["p", "q"]


@pytest.mark.parametrize("what", ["keys", "tags", "fewer", "repeated"])
def test_a_chunk_that_is_damaged_fails_the_load_and_changes_nothing(what: str) -> None:
    state, blocks = large()
    saved = msgspec.msgpack.decode(state, type=SavedController)
    table = saved.tables[0]
    if what == "fewer":
        del table.keys[-1]
    elif what == "repeated":
        table.keys[3] = table.keys[2]
    else:
        getattr(table, what)[3] = memoryview(b"\xc1")
    box = busy()
    before = exported(box.controller.state)
    start(box, msgspec.msgpack.encode(saved), blocks)
    list(steps(box))
    assert replies(box) == [("load", m.Failed, CheckpointCorrupt.code)]
    assert exported(box.controller.state) == before


def test_a_load_into_a_unit_that_is_lost_fails() -> None:
    box = Box()
    start(box, *large())
    box.controller.tidy()
    box.controller.lose(0)
    assert replies(box) == [("load", m.Failed, DataLost.code)]
    list(steps(box))
    assert box.partitions() == []


def test_a_state_of_format_1_is_read() -> None:
    state = zlib.decompress(base64.b64decode(OF_FORMAT_1))
    assert msgspec.msgpack.decode(state)["format"] == 1
    box = Box()
    box.controller.restoring.replace(state, moved([1, 2, 4, 5], 0))
    box.controller.check_invariants()
    wanted = busy()
    wanted.controller.tables["p"].cleared = 0  # format 1 does not say
    assert content(box.controller) == content(wanted.controller)


def test_tags_that_name_versions_count_as_before() -> None:
    box = Box()
    box.made_by(1)
    new = box.made_by(3)
    for version in (1, 2):
        box.announce(version)
    fresh = Box()
    start(fresh, *exported(box.controller.state))
    list(steps(fresh))
    fresh.announce(3)
    assert fresh.fetch(1, max_staleness=1) == new
    assert len(fresh.fetch(2, task="any")) == 2


# in the server's service


@pytest.fixture
def service() -> Iterator[Service]:
    unit = Unit(1 << 20)
    yield Service(Controller(SequentialSampler(), reserved_rows=0), unit)
    unit.close()


def test_the_blocks_of_a_load_are_published_with_its_rows(service: Service) -> None:
    session = service.sessions.attach(b"client", local=True)
    send(service, session, commit(1, 2), b"ab")
    cut, state = captured(service, session, 2)
    service.notify(m.Unpin(cut.rid, [piece.block for piece in cut.pieces]), session)
    request = filled(service, session, cut, 10)
    assert send(service, session, request, state) is None
    assert send(service, session, m.Clear(30, "p", None, None)) is not None
    while service.recycler:
        service.tidy()
        service.check_invariants()
    assert [type(answer[0]) for _, answer in service.answered(0.0)] == [m.Done]
    assert service.unit.published() == [one.block for one in request.blocks]
    assert service.controller.num_rows == 2


def test_the_blocks_of_a_load_go_with_its_asker(service: Service) -> None:
    session = service.sessions.attach(b"client", local=True)
    loader = service.sessions.attach(b"loader", local=True)
    send(service, session, commit(1, 2), b"ab")
    cut, state = captured(service, loader, 2)
    request = filled(service, loader, cut, 10)
    assert send(service, loader, request, state) is None
    service.tidy()
    service.detach(loader, {("link", request.rid)}, 0.0)
    while service.recycler:
        service.tidy()
    service.check_invariants()
    assert service.unit.used_nbytes == 64
    assert service.controller.num_rows == 2
