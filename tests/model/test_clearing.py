"""Clearing a partition: it is gone at once, and what it leaves is freed in slices between requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import test_controller_model as model
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from services import FIELD, commit
from tables import Box, indexes

from transfer_queue.controller import Controller, cleared_partitions
from transfer_queue.controller.snapshot import exported
from transfer_queue.errors import RowCleared
from transfer_queue.sampler import BaseSampler, RankAwareSampler, SequentialSampler
from transfer_queue.server import recycling
from transfer_queue.server.service import Service
from transfer_queue.server.sessions import ServerSession
from transfer_queue.storage.blocks import Unit
from transfer_queue.wire import messages as m

BLOCKS_OF_SLICE = cleared_partitions.SLICE // cleared_partitions.OF_BLOCK + 1


def filled(puts: int, rows: int = 1, sampler: BaseSampler | None = None, **more: Any) -> Box:
    """A box with a partition of `puts` blocks, whose remains are put off however few they are."""
    box = Box(sampler, **more)
    box.controller.state.cleared_partitions.at_once = -1
    for number in range(puts):
        box.put([f"k{number}-{row}" for row in range(rows)], ["a", "b"], [{"n": number}] * rows)
    return box


def test_a_large_partition_is_gone_before_its_blocks_are_freed() -> None:
    box = filled(3 * BLOCKS_OF_SLICE)
    rows = list(range(3 * BLOCKS_OF_SLICE))
    box.clear()
    assert (box.partitions(), box.controller.num_rows, box.freed()) == ([], 0, [])
    with pytest.raises(RowCleared):
        box.get(rows[:2])
    assert box.controller.unfinished


def test_each_slice_frees_a_bounded_number_of_blocks_and_all_of_them_are_freed_once() -> None:
    box = filled(3 * BLOCKS_OF_SLICE)
    box.clear()
    freed: list[int] = []
    while box.controller.unfinished:
        box.controller.tidy()
        box.controller.check_invariants()
        found = box.freed()
        assert len(found) <= BLOCKS_OF_SLICE
        freed += found
    assert sorted(freed) == list(range(1, 3 * BLOCKS_OF_SLICE + 1))
    assert not box.controller.block_index.entries


def test_the_memory_of_many_rows_is_freed_in_many_slices() -> None:
    box = filled(1, rows=10 * cleared_partitions.SLICE)
    table = box.controller.tables["p"]
    held = table.names, table.tags, table.keys
    box.clear()
    assert box.freed() == []
    before, slices = sum(map(len, held)), 0
    while box.controller.unfinished:
        box.controller.tidy()
        after = sum(map(len, held))
        assert before - after <= cleared_partitions.SLICE
        before, slices = after, slices + 1
    assert not before
    assert slices >= 30


def test_a_small_partition_is_freed_within_the_request() -> None:
    box = filled(20)
    box.controller.state.cleared_partitions.at_once = cleared_partitions.AT_ONCE
    box.clear()
    assert len(box.freed()) == 20
    assert not box.controller.unfinished


def test_the_name_is_free_for_a_new_partition_which_the_remains_do_not_touch() -> None:
    box = filled(BLOCKS_OF_SLICE)
    box.clear()
    fresh = indexes(box.put(["k0-0", "new"], ["a"]))
    assert min(fresh) >= BLOCKS_OF_SLICE
    assert box.tags(fresh) == [{}, {}]
    while box.controller.unfinished:
        box.controller.tidy()
        box.controller.check_invariants()
    assert box.cells(["k0-0", "new"]) == {"a": [(BLOCKS_OF_SLICE + 1, 0), (BLOCKS_OF_SLICE + 1, 1)]}


def test_leases_end_with_their_partition_and_waiters_wait_for_the_next_one() -> None:
    box = filled(4)
    lease, _ = box.lend(2)
    assert box.fetch(5, ["new"], wait_s=9, ticket="waits") is None
    box.clear()
    assert box.ack(lease) == 0
    fresh = indexes(box.put(5, ["new"]))
    assert box.answers() == [("waits", fresh)]


def test_a_block_that_is_being_moved_stays_dead_with_its_partition() -> None:
    box = filled(2)
    rows, _ = box.controller.rows_in(1)  # type: ignore[misc]
    box.clear()
    box.put(1)
    assert box.controller.rows_in(1) is None
    assert not box.controller.relocate(1, 50, rows)
    box.controller.lose(0)
    box.controller.check_invariants()


def test_a_snapshot_has_nothing_of_the_remains() -> None:
    box = filled(4)
    box.clear()
    box.put(1, partition="q")
    state, blocks = exported(box.controller.state)
    assert blocks == [box.last_block]
    assert b"k0-0" not in state


class Told(SequentialSampler):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, set[int]]] = []

    def forget(self, partition: str, indexes: set[int]) -> None:
        self.told.append((partition, indexes))


def test_a_sampler_with_its_own_forget_is_told_all_rows() -> None:
    sampler = Told()
    box = filled(3, 2, sampler)
    box.clear([1])
    box.clear()
    assert sampler.told == [("p", {1}), ("p", {0, 2, 3, 4, 5})]


def test_a_sampler_forgets_the_batches_of_a_cleared_partition() -> None:
    box = filled(2, 2, RankAwareSampler())
    first = box.fetch(2, dp_rank=0, batch_index=0)
    box.clear()
    box.put(2)
    assert first == [0, 1]
    assert box.fetch(2, dp_rank=0, batch_index=0) == [4, 5]


class ClearingModel(model.ControllerModel):
    """The controller's model, with remains that are put off."""

    @initialize(bounded=st.booleans())
    def start(self, bounded: bool) -> None:
        self.box = Box(max_rows=model.MAX_ROWS if bounded else None)
        self.box.controller.state.cleared_partitions.at_once = -1
        self.bounded = bounded

    @rule()
    def tidy(self) -> None:
        self.box.controller.tidy()
        self.box.controller.check_invariants()


TestClearingModel = ClearingModel.TestCase
TestClearingModel.settings = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


# in the server's service

PUTS = 3 * recycling.DROPS_AT_ONCE
BLOCK_NBYTES = 64


@pytest.fixture
def service() -> Iterator[Service]:
    unit = Unit(PUTS * BLOCK_NBYTES + recycling.PAGE)
    yield Service(Controller(SequentialSampler(), reserved_rows=0), unit)
    unit.close()


@pytest.fixture
def full(service: Service) -> ServerSession:
    """A session that filled the store with one partition of one-row blocks."""
    session = service.sessions.attach(b"client", local=True)
    for rid in range(PUTS + recycling.PAGE // BLOCK_NBYTES):
        assert service.handle(commit(rid, 1), memoryview(b"a"), session, ("link", rid), 0.0) is not None
    return session


def clear(service: Service, session: ServerSession, partition: str = "p") -> None:
    answer = service.handle(m.Clear(-1, partition, None, None), memoryview(b""), session, ("link", -1), 0.0)
    assert answer is not None
    service.check_invariants()


def all_done(service: Service) -> None:
    while service.recycler:
        service.tidy()
    service.check_invariants()


def test_the_memory_of_a_large_partition_is_freed_between_requests(service: Service, full: ServerSession) -> None:
    clear(service, full)
    used = service.unit.used_nbytes
    assert used == service.unit.budget_nbytes
    service.tidy()
    assert 0 < used - service.unit.used_nbytes <= 2 * recycling.DROPS * BLOCK_NBYTES
    all_done(service)
    assert service.unit.used_nbytes == 0


def test_an_allocation_that_waits_is_answered_by_the_slice_that_makes_room(
    service: Service, full: ServerSession
) -> None:
    request = m.Allocate(9999, 8192, False, 60.0)
    assert service.handle(request, memoryview(b""), full, ("link", 9999), 0.0) is None
    clear(service, full)
    while service.recycler and not service.unit.outbox:
        service.tidy()
    assert [type(answer[0]) for _, answer in service.answered(0.0)] == [m.Allocated]
    assert service.unit.used_nbytes > 0.5 * service.unit.budget_nbytes


@pytest.mark.parametrize("inline", [True, False])
def test_nothing_is_refused_for_memory_that_is_yet_to_be_freed(
    service: Service, full: ServerSession, inline: bool
) -> None:
    clear(service, full)
    message = m.Commit(9999, "q", 8192, None, None, FIELD, 0, b"", None, 0.0) if inline else m.Allocate(
        9999, 8192, False, 0.0
    )  # fmt: skip
    answer = service.handle(message, memoryview(bytes(8192)), full, ("link", 9999), 0.0)
    assert answer is not None
    assert not isinstance(answer[0], m.Failed)
    assert service.recycler, "no more was freed than was needed"
    service.check_invariants()


def test_blocks_are_kept_for_a_saver_that_is_about_to_pin_them(service: Service, full: ServerSession) -> None:
    saver = service.sessions.attach(b"saver", local=True)
    captured = service.handle(m.Snapshot(1), memoryview(b""), saver, ("saver", 1), 0.0)
    assert captured is not None
    clear(service, full)
    all_done(service)
    assert service.unit.used_nbytes == service.unit.budget_nbytes
    service.handle(m.Recycle(2), memoryview(b""), saver, ("saver", 2), 0.0)
    all_done(service)
    assert service.unit.used_nbytes == 0
