"""The controller: what is visible when, and to whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tables import Box, indexes, packed, schema

from transfer_queue.controller import table as table_module
from transfer_queue.errors import (
    DeadlineExceeded,
    InvalidInput,
    NotReady,
    RowCleared,
    SamplerFailed,
    SchemaConflict,
    StoreFull,
    TransferQueueError,
    UnknownMode,
    UnknownRows,
)
from transfer_queue.sampler import BaseSampler, GRPOGroupNSampler
from transfer_queue.wire import messages as m


@pytest.fixture
def box() -> Box:
    return Box()


def refused(error: type[TransferQueueError], call: Any, match: str = ".") -> None:
    with pytest.raises(error, match=match):
        call()


# ---- putting ----


def test_new_rows_get_ascending_indexes_that_no_other_row_ever_has(box: Box) -> None:
    first = indexes(box.put(3))
    box.clear()
    second = indexes(box.put(2)) + indexes(box.put(2, partition="q"))
    assert first == [0, 1, 2]
    assert second == [3, 4, 5, 6]


def test_a_known_key_keeps_its_row_and_a_new_one_gets_one(box: Box) -> None:
    first = indexes(box.put(["a", "b"]))
    second = indexes(box.put(["c", "b"]))
    assert second[1] == first[1]
    assert second[0] not in first


def test_an_overwrite_frees_the_block_whose_last_cell_it_replaced(box: Box) -> None:
    box.put(["a", "b"], ["x", "y"])
    box.put(["a", "b"], ["x"])
    box.put(["a"], ["y"])
    assert box.freed() == []
    box.put(["b"], ["y"])
    assert box.freed() == [1]


def test_reading_gives_the_latest_cell_of_each_row(box: Box) -> None:
    box.put(["a", "b", "c"], ["x", "y"])
    box.put(["b"], ["x"])
    assert box.cells(["c", "b", "a"]) == {"x": [(1, 2), (2, 0), (1, 0)], "y": [(1, 2), (1, 1), (1, 0)]}


def test_a_put_with_an_old_index_of_a_cleared_row_is_refused(box: Box) -> None:
    """T-04."""
    rows = indexes(box.put(2))
    box.clear()
    refused(RowCleared, lambda: box.put(rows))
    other = indexes(box.put(2, partition="q"))
    refused(RowCleared, lambda: box.put(rows, partition="q"))
    assert box.cells(other, partition="q") == {"a": [(3, 0), (3, 1)]}
    refused(RowCleared, lambda: box.get(rows, partition="q"))
    refused(RowCleared, lambda: box.get(rows))


@pytest.mark.parametrize(
    "conflict", [schema("a", "float64"), schema("a", shape=(2, 2)), schema("a", ""), schema("a", "int64")], ids=str
)
def test_a_schema_conflict_is_refused_before_anything_is_visible(box: Box, conflict: Any) -> None:
    """T-03."""
    box.put(["k"], ["a"])
    for where in (["k"], ["new"], 2):
        tags = [{"t": 1}] * (where if isinstance(where, int) else len(where))
        refused(
            SchemaConflict, lambda where=where, tags=tags: box.put(where, ["b", conflict], tags, strict=True), "'a'"
        )
    assert box.scan(["a"]) == {0: 1}
    assert box.produced(["b"]) == (False, {})
    assert box.tags([0]) == [{}]
    assert box.cells(["k"]) == {"a": [(1, 0)]}


def test_a_widened_shape_is_one_schema(box: Box) -> None:
    box.put(1, [schema("a", shape=(2, 3))])
    box.put(1, [schema("a", shape=(2, 5))])
    assert box.get([0, 1]).schema[0].shape == (2, -1)


@pytest.mark.parametrize(
    "message",
    [
        m.Commit(1, "p", 0, None, None, [schema("a")], 1, b"", None, 0),
        m.Commit(1, "p", 2, None, None, [schema("a")], 1, b"", [{}], 0),
        m.Commit(1, "p", 2, ["a"], None, [schema("a")], 1, b"", None, 0),
        m.Commit(1, "p", 2, ["a", "a"], None, [schema("a")], 1, b"", None, 0),
        m.Commit(1, "p", 1, None, b"1234567", [schema("a")], 1, b"", None, 0),
        m.Commit(1, "p", 2, None, packed([0, 0]), [schema("a")], 1, b"", None, 0),
        m.Commit(1, "p", 1, None, None, [schema("a"), schema("a")], 1, b"", None, 0),
        m.Commit(1, "p", 1, None, None, [schema("a")], -2, b"", None, 0),
        m.Commit(1, "p", 1, None, None, [], 1, b"", None, 0),
        m.Insert(1, "p", 0, ["a"], 0),
        m.Insert(1, "p", 1, [], 0),
        m.SetTags(1, "p", packed([0, 1]), [{}], False),
        m.SetTags(1, "p", b"123", [{}], False),
        m.SetPartition(1, "p", -1, {}),
        m.Fetch(1, "p", [], 1, "t", {}, 9.0, False),
        m.Fetch(1, "p", ["a", "a"], 1, "t", {}, 9.0, False),
        m.Fetch(1, "p", ["a"], 0, "t", {}, 9.0, False),
    ],
    ids=str,
)
def test_a_wrong_request_is_refused_and_creates_nothing(box: Box, message: Any) -> None:
    """T-07 (duplicate keys) among others."""
    refused(InvalidInput, lambda: box.handle(message))
    assert box.partitions() == []
    assert box.controller.num_waiting == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: m.Get(1, "p", None, rows, None, False),
        lambda rows: m.NameRows(1, "p", rows),
        lambda rows: m.Clear(1, "p", None, rows),
        lambda rows: m.SetTags(1, "p", rows, [{}], False),
    ],
)
def test_row_indexes_that_are_not_whole_are_refused(box: Box, make: Any) -> None:
    box.put(2)
    refused(InvalidInput, lambda: box.handle(make(b"1234567")))


def test_too_many_field_sets_are_refused_before_rows_exist(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "MAX_GROUPS", 2)
    box.put(1, ["a"])
    box.put(1, ["b"])
    refused(InvalidInput, lambda: box.put(["k"], ["a", "b"]), "sets of fields")
    assert len(indexes(box.put(1, ["a"]))) == 1
    assert box.handle(m.Find(1, "p", ["k"], False, 0)).rows == b""


# ---- tags ----


def test_tags_are_visible_with_the_rows_they_came_with(box: Box) -> None:
    """T-02."""
    box.fetch(2, wait_s=9, ticket="w")
    reply = box.put(2, tags=[{"n": 0}, {"n": 1}])
    ((ticket, handed),) = box.controller.outbox
    assert (ticket, handed.rows, handed.tags) == ("w", reply.rows, [{"n": 0}, {"n": 1}])


def test_tags_merge_name_by_name(box: Box) -> None:
    """T-17."""
    box.put(["k"], tags=[{"a": 1}])
    box.tag([0], [{"reward": 1.0}])
    box.put(["k"], ["b"], tags=[{"a": 2}])
    assert box.tags([0]) == [{"a": 2, "reward": 1.0}]
    box.put(["k"], ["c"])
    assert box.tags([0]) == [{"a": 2, "reward": 1.0}]


def test_tags_can_be_replaced_or_put_alone(box: Box) -> None:
    box.put(["k"], [], tags=[{"a": 1}])
    box.tag([0], [{"b": 2}], replace=True)
    assert box.tags([0]) == [{"b": 2}]
    refused(RowCleared, lambda: box.tag([7], [{}]))


# ---- partitions ----


def test_rows_of_two_partitions_never_mix(box: Box) -> None:
    """T-09, T-16."""
    one, two = indexes(box.put(2, partition="one")), indexes(box.put(3, partition="two"))
    assert box.fetch(9, partition="one", empty=True) == []
    assert box.fetch(2, partition="one") == one
    assert box.fetch(3, partition="two") == two
    refused(RowCleared, lambda: box.put([one[0], two[0]], ["b"], partition="one"))
    assert box.produced(["b"], "one") == (False, {})


def test_a_partition_has_a_declared_size_and_metadata(box: Box) -> None:
    box.handle(m.SetPartition(1, "p", 8, {"a": 1}))
    box.handle(m.SetPartition(1, "p", None, {"b": 2}))
    box.put(2)
    info = box.handle(m.GetPartition(1, "p"))
    assert (info.known, info.size, info.metadata, info.rows) == (True, 8, {"a": 1, "b": 2}, 2)
    assert box.handle(m.Consumption(1, "p", "t")).declared == 8
    assert not box.handle(m.GetPartition(1, "q")).known


def test_reserved_rows_are_claimed_first_and_count_only_then() -> None:
    box = Box(reserved_rows=3)
    assert indexes(box.put(["a"])) == [0]
    assert box.handle(m.GetPartition(1, "p")).rows == 1
    assert indexes(box.put(4)) == [1, 2, 3, 4]
    assert indexes(box.put(1, partition="q")) == [5]
    assert indexes(box.put(1)) == [8]


def test_reserved_and_inserted_rows_can_be_cleared(box: Box) -> None:
    """T-05."""
    rows = indexes(box.insert(4))
    assert box.produced(["a"]) == (False, {})
    assert box.scan(["a"]) == dict.fromkeys(rows, 0)
    box.clear(rows[:1])
    assert list(box.scan(["a"])) == rows[1:]
    box.clear()
    assert box.partitions() == []
    held = Box(reserved_rows=2)
    held.insert(1)
    held.clear()
    assert held.partitions() == []


def test_an_empty_partition_can_be_cleared(box: Box) -> None:
    """T-06."""
    box.handle(m.SetPartition(1, "p", 4, {}))
    box.clear()
    assert box.partitions() == []


def test_a_partition_that_is_to_get_more_rows_outlives_its_last_key(box: Box) -> None:
    box.handle(m.SetPartition(1, "p", 4, {"step": 7}))
    box.clear(["nobody"])
    box.put(["a", "b"])
    box.fetch(1)
    box.clear(["a", "b"])
    assert box.partitions() == ["p"]
    assert box.handle(m.GetPartition(1, "p")).metadata == {"step": 7}
    assert box.lend(2, until_done=True, batch_index=1, wait_s=60, ticket="more") is None
    box.put(["c", "d"])
    assert box.answers() == [("more", [2, 3])]
    box.clear(["c", "d"])
    assert box.partitions() == []


def test_a_partition_that_is_to_get_more_rows_with_a_field_outlives_its_last_key(box: Box) -> None:
    box.handle(m.SetPartition(1, "p", None, {}, {"a": 2}))
    box.put(["a"])
    box.clear(["a"])
    assert box.partitions() == ["p"]
    box.put(["b"])
    box.clear(["b"])
    assert box.partitions() == []


@pytest.mark.parametrize("parts", [["abcdef"], ["ab", "cd", "ef"], ["abcde", "f"]])
def test_a_partition_of_more_rows_than_declared_goes_with_its_last_key(box: Box, parts: list[str]) -> None:
    box.handle(m.SetPartition(1, "p", 4, {}))
    box.put(list("abcdef"))
    for part in parts:
        assert box.partitions() == ["p"]
        box.clear(list(part))
    assert box.partitions() == []


def test_a_partition_whose_keys_were_put_anew_goes_with_its_last_key(box: Box) -> None:
    box.handle(m.SetPartition(1, "p", 4, {}))
    box.put(list("abcd"))
    box.clear(list("abc"))
    box.put(list("abc"))
    box.clear(list("ab"))
    box.clear(list("cd"))
    assert box.partitions() == []


def test_a_request_of_an_earlier_release_clears_a_partition_with_its_last_key(box: Box) -> None:
    box.handle(m.SetPartition(1, "p", 4, {}))
    box.put(["a"])
    box.handle(m.Clear(1, "p", ["a"], None))
    assert box.partitions() == []


def test_clearing_unknown_rows_keys_or_partitions_does_nothing(box: Box) -> None:
    box.put(["a"])
    for rows in ([99], ["zz"], []):
        box.clear(rows)
    box.clear(partition="q")
    assert box.scan(["a"]) == {0: 1}


def test_clearing_rows_frees_their_cells_and_keeps_the_others(box: Box) -> None:
    box.put(["a", "b", "c"], ["x"])
    box.clear(["b"])
    refused(RowCleared, lambda: box.get([1]))
    refused(UnknownRows, lambda: box.get(["b"]))
    assert box.cells(["c", "a"]) == {"x": [(1, 2), (1, 0)]}
    assert box.freed() == []
    box.clear(["a", "c"])
    assert box.freed() == [1]
    assert box.partitions() == []


def test_slots_of_cleared_rows_are_dropped_without_changing_the_rest() -> None:
    box = Box()
    rows = [indexes(box.put(1000, tags=[{"n": n}] * 1000)) for n in range(6)]
    assert box.fetch(1500) == [*rows[0], *rows[1][:500]]
    for cleared in (rows[0], rows[1], rows[3], rows[4]):
        box.clear(cleared)
    assert box.controller.tables["p"].size == 3000
    assert box.fetch(2000) == rows[2] + rows[5]
    assert box.tags([rows[2][0], rows[5][9]]) == [{"n": 2}, {"n": 5}]
    assert box.cells(rows[5][:1]) == {"a": [(6, 0)]}


# ---- status ----


def test_production_is_per_row_and_field(box: Box) -> None:
    box.put(["a", "b"], ["x"])
    box.put(["b"], ["y"])
    assert box.produced(["x", "y"]) == (True, {0: [1, 0], 1: [1, 1]})
    assert box.produced(["x", "zz"])[0] is False
    assert box.produced(["x"], "q")[0] is False


def test_consumption_is_per_task(box: Box) -> None:
    box.put(3)
    box.fetch(2, task="one")
    assert box.consumed("one") == {0: 1, 1: 1, 2: 0}
    assert box.consumed("two") == {0: 0, 1: 0, 2: 0}
    box.reset("two")
    assert box.consumed("one") == {0: 1, 1: 1, 2: 0}
    box.reset(None)
    assert box.consumed("one") == {0: 0, 1: 0, 2: 0}


# ---- reading ----


def test_unknown_keys_are_dropped_or_refused_as_asked(box: Box) -> None:
    """T-08."""
    box.put(["a", "b"], ["x"])
    assert box.get(["a", "zz", "b"]).count == 2
    refused(UnknownRows, lambda: box.get(["a", "zz"], strict=True), "zz")
    refused(UnknownRows, lambda: box.get(["zz"]))
    refused(UnknownRows, lambda: box.get(["a"], partition="q"))


def test_fields_that_are_not_ready_are_dropped_or_refused_as_asked(box: Box) -> None:
    """T-08."""
    box.put(["a", "b"], ["x"])
    box.put(["a"], ["y"])
    assert set(box.cells(["a", "b"], ["x", "y"])) == {"x"}
    assert set(box.cells(["a"])) == {"x", "y"}
    refused(NotReady, lambda: box.get(["a", "b"], ["x", "y"], strict=True), "'y'")
    refused(NotReady, lambda: box.get([0, 1], ["y"]), "'y'")
    refused(InvalidInput, lambda: box.get([0], ["x", "x"]))


def test_inserting_needs_a_size_and_fields(box: Box) -> None:
    refused(UnknownMode, lambda: box.insert(0))


def test_names_of_rows_and_rows_of_names(box: Box) -> None:
    box.put(["a"])
    box.put(1)
    assert box.handle(m.NameRows(1, "p", packed([1, 0, 9]))).names == [None, "a", None]
    found = box.handle(m.Find(1, "p", ["zz", "a"], False, 0))
    assert indexes(found) == [0]
    made = box.handle(m.Find(1, "p", ["zz", "a", "zz"], True, 0))
    assert indexes(made) == [2, 0, 2]


class Broken(BaseSampler):
    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
        return kwargs["choose"](ready_indexes)


@pytest.mark.parametrize("choose", [lambda ready: ([999], []), lambda ready: ([0], [999]), lambda ready: ready[10]])
def test_a_sampler_that_fails_is_an_internal_error_and_consumes_nothing(choose: Any) -> None:
    box = Box(Broken())
    box.put(2)
    refused(SamplerFailed, lambda: box.fetch(1, choose=choose), "Broken")
    assert box.consumed() == {0: 0, 1: 0}


def test_bad_sampling_of_a_waiter_answers_the_waiter_not_the_writer() -> None:
    box = Box(GRPOGroupNSampler(2))
    box.fetch(2, wait_s=9, ticket="bad")
    assert indexes(box.put(4, tags=[{"group_id": []}] * 4)) == [0, 1, 2, 3]
    assert isinstance(dict(box.answers())["bad"], InvalidInput)


def test_sampling_that_no_rows_could_satisfy_is_refused_before_it_waits() -> None:
    box = Box(GRPOGroupNSampler(2))
    refused(InvalidInput, lambda: box.fetch(3, wait_s=9, ticket="odd"))
    box.put(1)
    refused(InvalidInput, lambda: box.fetch(2, wait_s=9, ticket="bad", dp_rank=[1], batch_index={}))
    assert box.controller.num_waiting == 0


# ---- moving ----


def test_relocation_keeps_every_cell(box: Box) -> None:
    box.put(["a", "b", "c", "d"], ["x", "y"])
    box.put(["b"], ["x", "y"])
    box.clear(["a"])
    box.put(["c"], ["x"])
    rows, fields = box.controller.rows_in(1)  # type: ignore[misc]
    assert (rows.tolist(), fields) == ([2, 3], ["x", "y"])
    box.clear(["d"])
    assert box.controller.relocate(1, 77, rows)
    box.controller.check_invariants()
    assert box.freed() == [1]
    assert box.cells(["c", "b"]) == {"x": [(3, 0), (2, 0)], "y": [(77, 0), (2, 0)]}


def test_relocating_a_block_without_cells_is_refused(box: Box) -> None:
    box.put(["a"])
    box.clear()
    assert box.controller.rows_in(1) is None
    assert not box.controller.relocate(1, 2, np.array([0]))


def test_a_put_that_cannot_ever_fit_is_refused_at_once() -> None:
    box = Box(max_rows=2)
    refused(StoreFull, lambda: box.put(3, timeout_s=9), "total_storage_size=2")
    refused(DeadlineExceeded, lambda: box.fetch(1))
    assert box.partitions() == []
