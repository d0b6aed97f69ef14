"""BatchMeta and KVBatchMeta: the contract of docs/compatibility, and that no operation works row by row."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.errors import InvalidInput, SchemaConflict
from transfer_queue.metadata import BatchMeta

DENSE: dict[str, Any] = {"dtype": torch.float32, "shape": torch.Size([2]), "is_nested": False, "is_non_tensor": False}


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301


def ragged(lengths: list[int]) -> dict[str, Any]:
    shapes = [(n,) for n in lengths]
    return {
        "dtype": torch.int64,
        "shape": shapes[0] if shapes else None,
        "is_nested": True,
        "is_non_tensor": False,
        "per_sample_shapes": shapes,
    }


def batch(size: int = 4, first: int = 10, partition: str = "p", **extra: Any) -> BatchMeta:
    return BatchMeta(
        list(range(first, first + size)),
        [partition] * size,
        {"a": DENSE, "r": ragged(list(range(size)))},
        np.ones(size),
        extra,
        [{"t": i} for i in range(size)],
    )


def untouched(size: int, tags: list[dict[str, Any]] | None = None) -> BatchMeta:
    return BatchMeta._build(np.arange(size), "p", {"a": DENSE}, True, tags)


@st.composite
def batches(draw: st.DrawFn) -> BatchMeta:
    size = draw(st.integers(0, 12))
    column = {"min_size": size, "max_size": size}
    ids = draw(st.lists(st.integers(0, 2**40), **column))
    schema = {"a": DENSE, "r": ragged(draw(st.lists(st.integers(0, 5), **column)))}
    partitions = draw(st.lists(st.sampled_from("pq"), **column) | st.just(["p"] * size))
    status = draw(st.lists(st.sampled_from([0, 1]), **column) | st.just([1] * size))
    tags = draw(st.none() | st.lists(st.dictionaries(st.sampled_from("xyz"), st.integers()), **column))
    meta = BatchMeta(ids, partitions, schema, np.array(status), {"k": 1}, tags)
    if draw(st.booleans()):  # every operation must work on what has been looked into, too
        _ = meta.global_indexes, meta.partition_ids, meta.custom_meta, meta.field_schema, meta.production_status
    return meta


def rows(meta: BatchMeta) -> list[tuple[Any, ...]]:
    status = meta.production_status.tolist()
    columns = (meta.global_indexes, meta.partition_ids, status, meta.custom_meta, meta.get_shapes("r"))
    return list(zip(*columns, strict=True))


# ---- construction and attributes ----


def test_attributes_are_the_lists_of_the_public_contract() -> None:
    meta = batch(2, e=1)
    assert meta.global_indexes == [10, 11]
    assert meta.partition_ids == ["p", "p"]
    assert meta.production_status.dtype == np.int8
    assert meta.custom_meta == [{"t": 0}, {"t": 1}]
    assert meta._custom_backend_meta == [{}, {}]
    assert meta.extra_info == {"e": 1}
    assert meta.field_names == ["a", "r"]
    assert (meta.size, len(meta), meta.is_ready) == (2, 2, True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"partition_ids": []},
        {"production_status": np.ones(2)},
        {"production_status": np.int8(1)},
        {"custom_meta": [{}, {}]},
        {"_custom_backend_meta": [{}, {}]},
        {"field_schema": {"r": ragged([1, 2])}},
        {"global_indexes": ["a"]},
        {"global_indexes": [1.5]},
        {"global_indexes": [2**70]},
        {"global_indexes": [[1]]},
    ],
)
def test_constructor_refuses_columns_that_do_not_fit(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        BatchMeta(**{"global_indexes": [1], "partition_ids": ["p"], **wrong})


def test_empty_meta_is_falsy_and_never_ready() -> None:
    for meta in (BatchMeta.empty({"e": 1}), BatchMeta(), untouched(0)):
        assert not meta
        assert not meta.is_ready
        assert meta.global_indexes == []


def test_without_production_status_no_row_is_ready() -> None:
    assert BatchMeta([1], ["p"]).production_status.tolist() == [0]


def test_is_ready_follows_changes_of_production_status() -> None:
    meta = batch()
    meta.production_status[0] = 0
    assert not meta.is_ready


def test_build_keeps_the_callers_array_writable_and_its_own_read_only() -> None:
    indexes = np.arange(3)
    meta = BatchMeta._build(indexes, "p", {}, True, None)
    indexes[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        meta.indexes[0] = 5


def test_indexes_given_as_an_array_are_copied() -> None:
    indexes = np.arange(2)
    meta = BatchMeta(indexes, ["p", "p"])
    indexes[0] = 9
    assert meta.global_indexes == [0, 1]


def test_sole_partition_names_the_partition_or_refuses() -> None:
    assert batch().sole_partition == "p"
    with pytest.raises(InvalidInput):
        _ = BatchMeta([1, 2], ["p", "q"]).sole_partition
    with pytest.raises(InvalidInput):
        _ = BatchMeta.empty().sole_partition


def test_attributes_can_be_assigned() -> None:
    meta = batch(2)
    meta.global_indexes = [7, 8]
    meta.partition_ids = ["x", "y"]
    meta.custom_meta = [{"n": 1}, {}]
    meta.production_status = np.array([1, 0])
    meta.field_schema = {"z": DENSE}
    second = meta[1]
    assert (second.global_indexes, second.partition_ids, second.custom_meta) == ([8], ["y"], [{}])
    assert (second.field_names, second.is_ready) == (["z"], False)


def test_edits_of_a_returned_list_count() -> None:
    meta = batch(3)
    meta.global_indexes[0] = 99
    meta.partition_ids[0] = "q"
    assert meta.indexes.tolist() == [99, 11, 12]
    assert [part.partition_ids for part in meta.chunk_by_partition()] == [["q"], ["p", "p"]]


def test_a_resized_list_is_refused_by_the_next_operation() -> None:
    for name in ("global_indexes", "partition_ids", "custom_meta"):
        meta = batch(3)
        getattr(meta, name).append(getattr(meta, name)[0])
        with pytest.raises(InvalidInput, match="entries for 3 rows"):
            pickle.dumps(meta)


def test_samples_are_read_only_views_of_rows() -> None:
    view = batch(3).samples[-1]
    assert (view.global_index, view.partition_id, view.production_status) == (12, "p", 1)
    assert view.custom_meta == {"t": 2}
    assert view.fields["r"]["shape"] == (2,)
    assert "per_sample_shapes" not in view.fields["r"]
    for mapping in (view.custom_meta, view.fields, view.fields["a"]):
        with pytest.raises(TypeError):
            mapping["x"] = 1  # type: ignore[index]


def test_samples_can_be_counted_iterated_and_printed() -> None:
    samples = batch(3).samples
    assert len(samples) == 3
    assert [view.global_index for view in samples] == [10, 11, 12]
    assert "global_index=10" in repr(samples[0])
    with pytest.raises(IndexError):
        _ = samples[3]


def test_dtypes_and_shapes_come_once_per_row() -> None:
    meta = batch(2)
    assert meta.get_dtypes("a") == [torch.float32] * 2
    assert meta.get_shapes("a") == [(2,), (2,)]
    assert meta.get_shapes("r") == [(0,), (1,)]
    for ask in (meta.get_dtypes, meta.get_shapes):
        with pytest.raises(KeyError):
            ask("missing")


def test_extra_info_methods() -> None:
    meta = batch(1)
    meta.set_extra_info("a", [1])
    meta.update_extra_info({"b": 2})
    everything = meta.get_all_extra_info()
    everything["a"].append(2)
    assert (meta.get_extra_info("a"), meta.get_extra_info("z", 0), meta.has_extra_info("b")) == ([1], 0, True)
    assert (meta.remove_extra_info("b"), meta.remove_extra_info("b")) == (2, None)
    meta.clear_extra_info()
    assert meta.extra_info == {}


def test_repr_is_short_for_many_rows() -> None:
    assert len(repr(untouched(100_000))) < 250


# ---- parts of a batch ----


@settings(deadline=None)
@given(batches(), st.integers(1, 15))
def test_chunk_then_concat_is_identity(meta: BatchMeta, chunks: int) -> None:
    parts = meta.chunk(chunks)
    sizes = [part.size for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert len(parts) == chunks
    assert max(sizes) - min(sizes) <= 1
    joined = BatchMeta.concat(parts)
    assert rows(joined) == rows(meta) if meta else not joined


@settings(deadline=None)
@given(batches(), st.data())
def test_select_samples_is_a_selection_from_the_list_of_rows(meta: BatchMeta, data: st.DataObject) -> None:
    position = st.integers(0, meta.size - 1) if meta else st.nothing()
    chosen = data.draw(st.lists(position))
    assert rows(meta.select_samples(chosen)) == [rows(meta)[i] for i in chosen]


@settings(deadline=None)
@given(batches(), st.slices(12))
def test_slicing_is_slicing_the_list_of_rows(meta: BatchMeta, where: slice) -> None:
    assert rows(meta[where]) == rows(meta)[where]


@settings(deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_reorder_permutes_the_list_of_rows(meta: BatchMeta, random: Any) -> None:
    order = list(range(meta.size))
    random.shuffle(order)
    before = rows(meta.copy())
    meta.reorder(order)
    assert rows(meta) == [before[i] for i in order]


@settings(deadline=None)
@given(batches())
def test_pickling_and_copying_keep_everything(meta: BatchMeta) -> None:
    for copied in (pickled(meta), copy.deepcopy(meta), meta.copy()):
        assert copied == meta
        assert copied._tag_edits() == meta._tag_edits()
        copied.production_status[:] = 0


@settings(deadline=None)
@given(batches())
def test_chunk_by_partition_keeps_order_and_every_row(meta: BatchMeta) -> None:
    parts = meta.chunk_by_partition()
    assert [part.sole_partition for part in parts] == list(dict.fromkeys(meta.partition_ids))
    for part in parts:
        assert rows(part) == [row for row in rows(meta) if row[1] == part.sole_partition]


@pytest.mark.parametrize("positions", [[-1], [4], [0.5], ["a"], [True]])
def test_select_samples_refuses_bad_positions(positions: list[Any]) -> None:
    with pytest.raises(InvalidInput):
        batch(4).select_samples(positions)


def test_indexing_follows_list_rules() -> None:
    meta = batch(4)
    assert (meta[0].global_indexes, meta[-1].global_indexes, meta[np.int64(1)].global_indexes) == ([10], [13], [11])
    assert [part.global_indexes for part in meta] == [[10], [11], [12], [13]]
    for position in (4, -5):
        with pytest.raises(IndexError):
            _ = meta[position]
    for wrong in ([0], "a", None):
        with pytest.raises(TypeError):
            _ = meta[wrong]  # type: ignore[index]


def test_chunk_into_none_or_fewer() -> None:
    with pytest.raises(ZeroDivisionError):
        batch().chunk(0)
    assert batch().chunk(-1) == []
    assert [part.size for part in batch(2).chunk(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1], [-1, 0, 1], [0, 1, 3]])
def test_reorder_refuses_what_is_not_a_permutation(order: list[int]) -> None:
    meta = batch(3)
    with pytest.raises(InvalidInput):
        meta.reorder(order)
    assert meta == batch(3)


# ---- joining ----


def test_concat_skips_empties_and_keeps_repeated_rows() -> None:
    joined = BatchMeta.concat([BatchMeta.empty(), batch(2), None, batch(2)])
    assert joined.global_indexes == [10, 11, 10, 11]
    assert BatchMeta.concat([]) == BatchMeta.empty()


def test_concat_refuses_other_fields_and_dtypes() -> None:
    meta = batch(2)
    other = meta.select_fields(["a"])
    with pytest.raises(ValueError, match="field_names"):
        BatchMeta.concat([meta, other])
    assert BatchMeta.concat([other, meta], validate=False).field_names == ["a"]
    other.field_schema["a"]["dtype"] = torch.int8
    with pytest.raises(SchemaConflict, match="dtype"):
        BatchMeta.concat([meta.select_fields(["a"]), other])


def test_concat_joins_extra_info_and_refuses_conflicts() -> None:
    values = {"t": torch.ones(2), "n": np.ones(2), "d": {"x": [np.zeros(1)]}}
    joined = BatchMeta.concat([batch(1, **values), batch(1, **copy.deepcopy(values), more=1)])
    assert joined.extra_info.keys() == {"t", "n", "d", "more"}
    for other in ({"t": torch.zeros(2)}, {"n": np.ones(3)}, {"d": {"x": [np.ones(1)]}}, {"t": 1}):
        with pytest.raises(ValueError, match="conflicting"):
            BatchMeta.concat([batch(1, **values), batch(1, **other)])


def test_parts_and_joined_metas_count_their_own_repeated_rows() -> None:
    first, second = batch(3, 0, repeated=1), batch(4, 10, repeated=2)
    assert [part.extra_info.get("repeated") for part in (first[:2], first[1:], second[-1], second[::-1][:3])] == [
        None, 1, 1, 2
    ]  # fmt: skip
    joined = BatchMeta.concat([first, second, batch(2, 20)])
    assert joined.extra_info["repeated"] == 3
    sent = pickled(joined)
    assert [part.extra_info.get("repeated") for part in (sent[:3], sent[3:7], sent[7:])] == [1, 2, None]
    assert BatchMeta.concat(joined.chunk(9)) == joined
    joined.reorder(range(8, -1, -1))
    assert joined[:4].extra_info["repeated"] == 2
    assert joined.copy()[4:].extra_info["repeated"] == 1


def test_concat_of_two_dense_shapes_is_ragged() -> None:
    wide = BatchMeta([1], ["p"], {"a": {**DENSE, "shape": torch.Size([3])}})
    joined = BatchMeta.concat([BatchMeta([0], ["p"], {"a": DENSE}), wide])
    assert joined.field_schema["a"]["is_nested"]
    assert joined.get_shapes("a") == [(2,), (3,)]


def test_concat_of_dense_and_ragged_is_ragged() -> None:
    dense = BatchMeta([1], ["p"], {"r": {**DENSE, "dtype": torch.int64}})
    joined = BatchMeta.concat([dense, BatchMeta([2], ["p"], {"r": ragged([5])})])
    assert joined.get_shapes("r") == [(2,), (5,)]
    assert joined.field_schema["r"]["shape"] is None


def test_union_prefers_the_other_side_and_is_ready_only_when_both_are() -> None:
    first, second = batch(2, k=1, own=1), batch(2, k=2).select_fields(["a"])
    second.field_schema["a"]["dtype"] = torch.int8
    second.production_status[1] = 0
    second.update_custom_meta([{"t": 9}, {"u": 1}])
    joined = first.union(second)
    assert joined.field_names == ["a", "r"]
    assert joined.field_schema["a"]["dtype"] == torch.int8
    assert joined.production_status.tolist() == [1, 0]
    assert joined.extra_info == {"k": 2, "own": 1}
    assert joined.custom_meta == [{"t": 9}, {"t": 1, "u": 1}]


def test_union_with_an_empty_side_is_a_copy_of_the_other() -> None:
    meta = batch(2)
    for joined in (meta.union(None), meta.union(BatchMeta.empty()), BatchMeta.empty().union(meta)):
        assert joined == meta
        assert joined is not meta


def test_union_refuses_other_rows_or_partitions() -> None:
    for other in (batch(2, first=11), batch(2, partition="q")):
        with pytest.raises(InvalidInput):
            batch(2).union(other)


def test_equality_is_by_value_and_agrees_with_hash() -> None:
    assert batch() == batch()
    assert hash(batch()) == hash(batch())
    for other in (batch(3), batch(partition="q"), batch(k=1), batch().select_fields(["a"]), "meta"):
        assert batch() != other
    tagged = batch()
    tagged.update_custom_meta([{"x": 1}] * 4)
    assert batch() != tagged


ARRAY = np.array([1, 0])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("partition_ids", one) for one in (None, "pq", 5, [None, None], [["p"], ["p"]], {"p": 1, "q": 2})),
        *(("field_schema", one) for one in (ARRAY, "x", [1], {1: DENSE}, {"a": 1}, {"a": {"per_sample_shapes": 3}})),
        *(
            ("production_status", one)
            for one in ("x", ["a", "b"], [None, 1], [300, 1], [[1], [1, 2]], [float("nan"), 1])
        ),
        *(("extra_info", one) for one in (ARRAY, "x", [1], 5)),
        *(("custom_meta", one) for one in (ARRAY, "xy", 5, [None, {}], [[], {}])),
    ],
)
def test_contents_of_a_wrong_type_are_named(name: str, wrong: object) -> None:
    given: dict[str, Any] = {"global_indexes": [1, 2], "partition_ids": ["p", "p"], name: wrong}
    with pytest.raises(InvalidInput, match=name):
        BatchMeta(**given)
    if name != "extra_info":
        with pytest.raises(InvalidInput, match=name):
            setattr(BatchMeta([1, 2], ["p", "p"]), name, wrong)


def test_what_is_no_list_of_metas_or_number_of_parts_is_refused() -> None:
    meta = BatchMeta([1, 2], ["p", "p"])
    for call in (lambda: BatchMeta.concat(5), lambda: BatchMeta.concat([5]), lambda: meta.chunk("2")):  # type: ignore[arg-type,list-item]
        with pytest.raises(InvalidInput):
            call()  # type: ignore[no-untyped-call]
    for change in (meta.select_fields, meta.update_extra_info, meta.update_custom_meta):
        with pytest.raises(InvalidInput):
            change(5)  # type: ignore[operator]
