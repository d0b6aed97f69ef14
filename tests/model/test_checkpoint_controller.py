"""Exporting and importing the controller's state: any state comes back equal, and no bytes do harm."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
import test_controller_model as model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from tables import Box, busy, content, indexes, moved, reloaded

from transfer_queue.controller.saved_state import SavedController
from transfer_queue.controller.snapshot import exported
from transfer_queue.errors import CheckpointCorrupt, CheckpointUnsupported, DataLost, InvalidInput, StoreFull
from transfer_queue.sampler import GRPOGroupNSampler
from transfer_queue.wire import messages as m

quiet = settings(max_examples=300, derandomize=True, deadline=None, database=None)


def test_a_state_comes_back_equal_and_is_the_same_when_saved_again() -> None:
    box = busy()
    fresh = reloaded(box)
    renamed, back = Box(), exported(fresh.controller.state)
    renamed.controller.restoring.replace(back[0], moved(back[1], -1000))
    assert content(renamed.controller) == content(box.controller)


def test_new_rows_get_indexes_above_both_states() -> None:
    box, other = busy(), Box()
    other.put(100, ["z"], partition="z")
    state, blocks = exported(box.controller.state)
    other.controller.restoring.replace(state, moved(blocks))
    assert other.partitions() == ["p", "q"]
    assert min(indexes(other.put(1, ["a"], partition="new"))) >= 100
    assert min(indexes(reloaded(box).put(1, ["a"], partition="new"))) >= box.controller.state.next_index


def test_reserved_rows_stay_reserved_and_are_claimed_in_order() -> None:
    box = Box(reserved_rows=6)
    box.put(2)
    fresh = reloaded(box)
    assert fresh.controller.num_rows == 2
    assert indexes(fresh.put(5)) == indexes(box.put(5))


def test_rows_that_were_lost_with_their_storage_unit_stay_lost_until_they_are_written_again() -> None:
    box = Box()
    lost = indexes(box.put(2))
    box.controller.lose(0)
    fresh = reloaded(box)
    for one in (box, fresh):
        with pytest.raises(DataLost):
            one.get(lost)
    fresh.controller.check_invariants()
    fresh.put(lost)
    assert len(fresh.cells(lost)["a"]) == 2


def test_what_was_there_is_dropped_and_its_blocks_are_freed() -> None:
    other = busy()
    old = set(other.controller.block_index.entries)
    other.freed()
    state, blocks = exported(reloaded(busy()).controller.state)
    other.controller.restoring.replace(state, moved(blocks))
    other.controller.check_invariants()
    assert set(other.freed()) == old
    other.clear(None, "p")
    other.clear(None, "q")
    assert set(other.freed()) == {block + 1000 for block in blocks}


def test_parked_requests_are_served_from_the_restored_rows_or_stay_parked() -> None:
    state, blocks = exported(busy().controller.state)
    other = Box(max_rows=9)
    other.put(9, ["a"], partition="full")
    assert other.fetch(1, ["a"], wait_s=5, ticket="served") is None
    assert other.fetch(50, ["a"], wait_s=5, ticket="waits") is None
    assert other.put(["k"], partition="full", timeout_s=5, ticket="crowded") is None
    other.controller.restoring.replace(state, moved(blocks))
    other.controller.check_invariants()
    answers = dict(other.answers())
    assert answers.keys() == {"served", "crowded"}  # there is room for one more row now
    assert len(answers["served"]) == 1
    assert other.consumed()[answers["served"][0]] == 1
    assert other.partitions() == ["p", "q", "full"]
    assert other.controller.num_waiting == 1


def test_a_row_handed_out_before_is_not_handed_out_again() -> None:
    box = Box()
    box.put(6)
    taken = box.fetch(4)
    fresh = reloaded(box)
    assert not set(fresh.fetch(2)) & set(taken)
    assert fresh.fetch(1, empty=True) == []
    assert sorted(fresh.fetch(6, task="other")) == list(range(6))


def test_sampled_batches_are_remembered() -> None:
    box = Box(GRPOGroupNSampler(2))
    box.put(8)
    ranks = {rank: box.fetch(2, dp_rank=rank, batch_index=0) for rank in (0, 1)}
    fresh = reloaded(box, GRPOGroupNSampler(2))
    for rank, rows in ranks.items():
        assert fresh.fetch(2, dp_rank=rank, batch_index=0) == rows
    fresh.clear(ranks[0])
    assert fresh.fetch(2, dp_rank=0, batch_index=0) != ranks[0]


def test_another_sampler_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match=r"SequentialSampler.*GRPOGroupNSampler"):
        reloaded(busy(), GRPOGroupNSampler(2))


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(StoreFull, match="total_storage_size"):
        reloaded(busy(), max_rows=3)


def test_a_sampler_that_does_not_take_its_state_keeps_its_own() -> None:
    box = Box(GRPOGroupNSampler(1))
    box.put(2)
    first = box.fetch(1, dp_rank=0, batch_index=0)
    state, blocks = exported(box.controller.state)
    changed = msgspec.msgpack.decode(state)
    changed["sampler_state"] = {"other": 1}
    with pytest.raises(CheckpointCorrupt, match="does not take"):
        box.controller.restoring.replace(msgspec.msgpack.encode(changed), moved(blocks))
    assert box.fetch(1, dp_rank=0, batch_index=0) == first


@pytest.mark.parametrize("what", ["extra", "missing", "shared"])
def test_blocks_that_do_not_fit_are_refused_and_nothing_changes(what: str) -> None:
    state, blocks = exported(busy().controller.state)
    places = moved(blocks)
    if what == "extra":
        places[max(blocks) + 1] = 5000
    elif what == "missing":
        del places[blocks[0]]
    else:
        places[blocks[0]] = places[blocks[1]]
    other = busy()
    before = exported(other.controller.state)
    with pytest.raises(CheckpointCorrupt):
        other.controller.restoring.replace(state, places)
    other.controller.check_invariants()
    assert exported(other.controller.state) == before


def test_a_state_of_another_format_is_refused() -> None:
    state = msgspec.msgpack.decode(exported(Box().controller.state)[0])
    with pytest.raises(CheckpointUnsupported, match="format 7"):
        Box().controller.restoring.replace(msgspec.msgpack.encode({**state, "format": 7}), {})


def harmless(state: bytes, blocks: list[int]) -> None:
    """`state` is taken as a consistent whole, or refused without a change."""
    other = Box(reserved_rows=0)
    other.put(["old"], ["a"])
    before = exported(other.controller.state)
    try:
        other.controller.restoring.replace(state, moved(blocks))
    except (CheckpointCorrupt, CheckpointUnsupported, InvalidInput):
        assert exported(other.controller.state) == before
    other.controller.check_invariants()


STATE, BLOCKS = exported(busy().controller.state)


@given(place=st.integers(0, len(STATE) - 1), byte=st.integers(0, 255))
@quiet
def test_a_changed_byte_does_no_harm(place: int, byte: int) -> None:
    harmless(STATE[:place] + bytes([byte]) + STATE[place + 1 :], BLOCKS)


numbers = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-3, 20)


@given(data=st.data())
@quiet
def test_changed_numbers_do_no_harm(data: st.DataObject) -> None:
    """Like a changed byte, but aimed at the arrays."""
    saved = msgspec.msgpack.decode(STATE, type=SavedController)
    table = data.draw(st.sampled_from(saved.tables))
    group = data.draw(st.sampled_from(table.groups))
    what = data.draw(st.sampled_from(["index", "unclaimed", "runs", "blocks", "patterns", "cells", "fields", "next"]))
    if what in ("index", "unclaimed"):
        setattr(table, what, changed(getattr(table, what), data))
    elif what in ("runs", "blocks"):
        setattr(group, what, changed(getattr(group, what), data))
    elif what == "patterns":
        which = data.draw(st.integers(0, len(table.patterns) - 1))
        pattern = np.frombuffer(table.patterns[which], np.uint16).copy()
        pattern[data.draw(st.integers(0, len(pattern) - 1))] = data.draw(st.integers(0, 6))
        table.patterns[which] = pattern.tobytes()
    elif what == "cells":
        table.cells[data.draw(st.integers(0, len(table.cells) - 1))] = data.draw(st.integers(-3, 8))
    elif what == "fields":
        group.fields = data.draw(st.lists(st.sampled_from(["a", "b", "c", "o", "none"]), max_size=3))
    else:
        saved.next_index = data.draw(numbers)
    harmless(msgspec.msgpack.encode(saved), BLOCKS)


def changed(array: bytes, data: st.DataObject) -> bytes:
    found = np.frombuffer(array, np.int64).copy()
    if not len(found):
        return np.array([data.draw(numbers)], np.int64).tobytes()
    found[data.draw(st.integers(0, len(found) - 1))] = data.draw(numbers)
    return found.tobytes()


class CheckpointModel(model.ControllerModel):
    """The controller's model, with states that are saved and loaded in between."""

    renumbered = itertools.count(1)

    @rule(fresh=st.booleans())
    def reload(self, fresh: bool) -> None:
        """Into the same controller, or into a new one when nobody waits."""
        state, blocks = exported(self.box.controller.state)
        places = moved(blocks, 1_000_000 * next(self.renumbered))
        self.freed |= set(self.box.freed())
        if fresh and not self.waiting:
            now, numbers = self.box.now, self.box.numbers
            self.box = Box(max_rows=self.box.controller.max_rows)
            self.box.now, self.box.numbers = now, numbers
            self.box.controller.restoring.replace(state, places)
        else:
            self.box.controller.restoring.replace(state, places)
            assert set(self.box.freed()) == set(blocks)
        self.box.controller.check_invariants()
        assert not self.box.answers(), "no waiter could be served before"
        for table in self.tables.values():
            for row in table.values():
                row.cells = {field: (places[block], at) for field, (block, at) in row.cells.items()}


TestCheckpointModel = CheckpointModel.TestCase
TestCheckpointModel.settings = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def test_loops_over_a_partition_that_is_loaded_used_up_are_over_or_begin_with_the_next_rows() -> None:
    box, saved = Box(), Box()
    for one in (box, saved):
        one.handle(m.SetPartition(1, "p", 2, {}))
    saved.put(2), saved.clear([0, 1])
    assert box.lend(1, until_done=True, batch_index=1, wait_s=60, ticket="had begun") is None
    assert box.lend(1, until_done=True, batch_index=0, wait_s=60, ticket="begins") is None
    state, blocks = exported(saved.controller.state)
    box.controller.restoring.replace(state, moved(blocks))
    assert box.answers() == [("had begun", [])]
    box.put(2)
    assert box.answers() == [("begins", [2])]


def test_rows_that_were_there_and_are_cleared_are_known_after_a_load() -> None:
    box = Box()
    box.handle(m.SetPartition(1, "p", 4, {}))
    box.put(4)
    box.clear([0, 1])
    fresh = reloaded(box)
    fresh.fetch(2)
    assert fresh.lend(2, until_done=True, batch_index=1) == (m.DONE, [])
