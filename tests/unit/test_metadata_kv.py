"""KVBatchMeta: rows named by keys."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.errors import InvalidInput, UnknownRows
from transfer_queue.metadata import BatchMeta, KVBatchMeta


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301


def keyed(size: int = 4, **more: Any) -> KVBatchMeta:
    keys, tags = [f"k{i}" for i in range(size)], [{"t": i, "l": [i]} for i in range(size)]
    return KVBatchMeta(keys, tags, "p", ["a", "b"], **more)


def test_kv_is_a_dataclass_of_five_fields() -> None:
    assert [f.name for f in dataclasses.fields(KVBatchMeta)] == ["keys", "tags", "partition_id", "fields", "extra_info"]
    assert dataclasses.asdict(KVBatchMeta())["extra_info"] == {}
    assert dataclasses.replace(keyed(1), partition_id="q").tags == keyed(1).tags


@pytest.mark.parametrize(
    "wrong", [{"keys": ["a"]}, {"keys": ["a", "a"], "tags": [{}, {}]}, {"fields": ["a", "a"]}, {"tags": [{}]}]
)
def test_kv_constructor_refuses_what_does_not_fit(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        KVBatchMeta(**wrong)


def test_kv_tags_and_extra_info_are_copied_on_construction() -> None:
    tags, info = [{"l": [1]}], {"x": [1]}
    meta = KVBatchMeta(["a"], tags, extra_info=info)
    tags[0]["l"].append(2)
    info["x"].append(2)
    assert (meta.tags, meta.extra_info) == ([{"l": [1]}], {"x": [1]})


def test_kv_size_is_frozen_and_len_is_live() -> None:
    meta = keyed(2)
    meta.keys.append("more")
    assert (meta.size, len(meta)) == (2, 3)


def test_kv_built_without_tags_has_empty_ones_of_its_own() -> None:
    meta = KVBatchMeta._build(["a", "b"], None, "p", None)
    part = meta.chunk(2)[0]
    meta.tags[0]["x"] = 1
    assert (meta.tags, part.tags) == ([{"x": 1}, {}], [{}])
    assert meta == KVBatchMeta(["a", "b"], [{"x": 1}, {}], "p")
    with pytest.raises(AttributeError):
        _ = meta.missing  # type: ignore[attr-defined]


def test_kv_parts_have_tags_of_their_own() -> None:
    tags = [{"l": [i]} for i in range(4)]
    for meta in (keyed(), KVBatchMeta._build(list("abcd"), tags, "p", None)):
        part = meta.chunk(2)[0]
        part.tags[0]["l"].append(9)
        meta.tags[1]["new"] = 1
        assert meta.tags[0]["l"] == [0]
        assert "new" not in part.tags[1]


def test_kv_select_keys_orders_as_asked() -> None:
    meta = keyed().select_keys(["k2", "k0"])
    assert (meta.keys, [tag["t"] for tag in meta.tags], meta.partition_id, meta.fields) == (
        ["k2", "k0"],
        [2, 0],
        "p",
        ["a", "b"],
    )


def test_kv_select_keys_refuses_repeats_and_unknown_keys() -> None:
    with pytest.raises(ValueError, match="duplicate keys"):
        keyed().select_keys(["k0", "k0"])
    with pytest.raises(RuntimeError, match="zz"):
        keyed().select_keys(["k0", "zz"])
    with pytest.raises(UnknownRows):
        keyed().select_keys(["zz"])
    with pytest.raises(ValueError, match="not one str"):
        keyed().select_keys("k0")


def test_kv_reorder_is_in_place_and_counts_from_the_end() -> None:
    meta = keyed(3)
    meta.reorder([-1, 0, 1])
    assert (meta.keys, [tag["t"] for tag in meta.tags]) == (["k2", "k0", "k1"], [2, 0, 1])


def test_kv_reorder_refuses_bad_orders() -> None:
    for order in ([0], [0, 0, 1], [0, -3, 1]):  # -3 is row 0 again
        with pytest.raises(ValueError):
            keyed(3).reorder(order)
    with pytest.raises(IndexError):
        keyed(3).reorder([0, 1, 3])


@settings(deadline=None)
@given(st.integers(0, 12), st.integers(1, 15), st.booleans())
def test_kv_chunk_then_concat_is_identity(size: int, chunks: int, looked_into: bool) -> None:
    meta = keyed(size)
    if not looked_into:
        meta = KVBatchMeta._build(meta.keys, meta.tags, "p", meta.fields)
    joined = KVBatchMeta.concat(meta.chunk(chunks))
    assert (joined.keys, joined.tags) == (meta.keys, meta.tags)
    assert not size or joined.extra_info is None


def test_kv_chunk_into_none() -> None:
    with pytest.raises(ZeroDivisionError):
        keyed().chunk(0)


def test_kv_concat_refuses_what_does_not_fit() -> None:
    first = keyed(1)
    for change in ({"fields": ["c"]}, {"partition_id": "q"}, {"extra_info": {"e": 2}}, {"keys": ["k0"]}):
        other = dataclasses.replace(KVBatchMeta(["z"], [{}], "p", ["b", "a"], {"e": 1}), **change)
        with pytest.raises(InvalidInput):
            KVBatchMeta.concat([dataclasses.replace(first, extra_info={"e": 1}), other])


def test_kv_concat_with_unknown_fields_depends_on_which_comes_first() -> None:
    unknown = KVBatchMeta(["z"], [{}], "p")
    assert KVBatchMeta.concat([keyed(1), unknown]).fields == ["a", "b"]
    with pytest.raises(ValueError):
        KVBatchMeta.concat([unknown, keyed(1)])


def test_kv_concat_joins_extra_info_and_skips_empties() -> None:
    joined = KVBatchMeta.concat(
        [
            KVBatchMeta(),
            keyed(1, extra_info={"x": np.ones(1)}),
            None,
            KVBatchMeta(["z"], [{}], "p", extra_info={"y": 2}),
        ]
    )
    assert joined.keys == ["k0", "z"]
    assert joined.extra_info == {"x": np.ones(1), "y": 2}
    assert KVBatchMeta.concat([]) == KVBatchMeta()


def test_kv_pickles_before_and_after_its_tags_were_seen() -> None:
    for meta in (keyed(), KVBatchMeta._build(["a"], None, "p", None), KVBatchMeta._build(["a"], [{"t": 1}], "p", [])):
        assert pickled(meta) == meta
        assert copy.deepcopy(meta) == meta


def test_kv_repr_is_short_for_many_rows() -> None:
    assert len(repr(KVBatchMeta._build([f"key-{i}" for i in range(10_000)], None, "p", None))) < 200


def test_metadata_by_rows_and_by_keys_do_not_join() -> None:
    by_rows = BatchMeta([0], ["p"])
    for join in (KVBatchMeta.concat, BatchMeta.concat):
        with pytest.raises(InvalidInput, match="expected only"):
            join([keyed(), by_rows])  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match="expected a BatchMeta"):
        by_rows.union(keyed())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("keys", one) for one in (None, "ab", 5, [1, 2], [["a"], ["b"]], np.array([1, 0]), {"a": 1, "b": 2})),
        *(("tags", one) for one in (None, "ab", 5, [None, {}], [1, 2], np.array([1, 0]))),
        *(("partition_id", one) for one in (5, ["p"], np.array([1, 0]))),
        *(("fields", one) for one in ("x", 5, [1], [["x"]], np.array([1, 0]))),
        *(("extra_info", one) for one in ("x", 5, [1], np.array([1, 0]))),
    ],
)
def test_kv_contents_of_a_wrong_type_are_named(name: str, wrong: object) -> None:
    given: dict[str, Any] = {"keys": ["a", "b"], "tags": [{}, {}], name: wrong}
    with pytest.raises(InvalidInput, match=name):
        KVBatchMeta(**given)
