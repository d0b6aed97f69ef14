"""Tags of a BatchMeta: private to each meta, remembered when changed; and what slices share costs nothing."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from transfer_queue.errors import InvalidInput
from transfer_queue.metadata import BatchMeta, KVBatchMeta

DENSE: dict[str, Any] = {"dtype": torch.float32, "shape": torch.Size([2]), "is_nested": False, "is_non_tensor": False}


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301


def untouched(size: int, tags: list[dict[str, Any]] | None = None) -> BatchMeta:
    return BatchMeta._build(np.arange(size), "p", {"a": DENSE}, True, tags)


def batch(size: int) -> BatchMeta:
    tags = [{"t": i} for i in range(size)]
    return BatchMeta(range(size), ["p"] * size, {"a": DENSE}, np.ones(size), custom_meta=tags)


def test_changes_never_reach_another_meta() -> None:
    parent = batch(4)
    held = parent.custom_meta
    left, right = parent.chunk(2)
    held[0]["parent"] = 1
    left.custom_meta[0]["left"] = 1
    left.field_schema["a"]["dtype"] = "changed"
    left.extra_info["left"] = 1
    left.production_status[:] = 0
    assert parent.custom_meta[0] == {"t": 0, "parent": 1}
    assert left.custom_meta[0] == {"t": 0, "left": 1}
    assert (parent.field_schema["a"], parent.extra_info, parent.is_ready) == (DENSE, {}, True)
    assert right == batch(4)[2:]


def test_tags_passed_in_are_copied() -> None:
    tags = [{"l": [1]}]
    meta = BatchMeta([1], ["p"], custom_meta=tags)
    tags[0]["l"].append(2)
    assert meta.custom_meta == [{"l": [1]}]


# ---- tags the holder changed (T-17) ----


def test_tags_that_came_with_the_meta_are_not_edits() -> None:
    meta = untouched(2, [{"a": 1}, {}])
    assert meta.custom_meta == [{"a": 1}, {}]
    assert meta._tag_edits() == {}


def test_update_custom_meta_marks_only_the_given_keys() -> None:
    meta = untouched(2, [{"a": 1}, {"a": 2}])
    meta.update_custom_meta([{"b": 5}, {}])
    assert meta.custom_meta == [{"a": 1, "b": 5}, {"a": 2}]
    assert meta._tag_edits() == {0: (False, {"b": 5})}


def test_an_update_to_the_value_already_there_is_an_edit() -> None:
    meta = untouched(1, [{"a": 1}])
    meta.update_custom_meta([{"a": 1}])
    assert meta._tag_edits() == {0: (False, {"a": 1})}


def test_an_edit_of_a_shown_dict_is_found() -> None:
    meta = untouched(3, [{"a": 1, "v": np.zeros(2)} for _ in range(3)])
    meta.custom_meta[1]["a"] = True  # equal to 1, but another value
    del meta.custom_meta[2]["a"]
    edits = meta._tag_edits()
    assert edits.keys() == {1, 2}
    assert edits[1] == (False, {"a": True})
    assert edits[2][0] is True
    assert edits[2][1].keys() == {"v"}


def test_the_last_of_an_update_and_an_edit_in_place_is_sent() -> None:
    meta = untouched(1, [{"a": 1}])
    shown = meta.custom_meta
    meta.update_custom_meta([{"a": 2}])
    shown[0]["a"] = 1
    assert meta._tag_edits() == {0: (False, {"a": 1})}


def test_clear_and_assignment_replace_whole_rows() -> None:
    meta = untouched(2, [{"a": 1}, {}])
    meta.clear_custom_meta()
    assert meta.custom_meta == [{}, {}]
    assert meta._tag_edits() == {0: (True, {}), 1: (True, {})}
    meta.custom_meta = [{"n": 1}, {}]
    assert meta._tag_edits()[0] == (True, {"n": 1})


def test_edits_travel_with_their_rows() -> None:
    meta = untouched(4, [{"a": i} for i in range(4)])
    meta.update_custom_meta([{}, {"b": 1}, {}, {"b": 3}])
    meta.reorder([3, 2, 1, 0])
    parts = [pickled(part) for part in meta.chunk(2)]
    assert [part._tag_edits() for part in parts] == [{0: (False, {"b": 3})}, {0: (False, {"b": 1})}]
    assert BatchMeta.concat(parts)._tag_edits() == {0: (False, {"b": 3}), 2: (False, {"b": 1})}


def test_union_sends_the_edits_of_both_sides() -> None:
    first, second = untouched(2), untouched(2)
    first.update_custom_meta([{"a": 1}, {"a": 1}])
    second.update_custom_meta([{"a": 2}, {"b": 2}])
    assert first.union(second)._tag_edits() == {0: (False, {"a": 2}), 1: (False, {"a": 1, "b": 2})}


def test_forgotten_edits_are_not_sent_again() -> None:
    meta = untouched(1, [{"a": 1}])
    meta.custom_meta[0]["a"] = 2
    meta.update_custom_meta([{"b": 1}])
    meta._forget_tag_edits()
    assert meta._tag_edits() == {}
    meta.custom_meta[0]["b"] = 9
    assert meta._tag_edits() == {0: (False, {"b": 9})}


def test_tags_given_to_the_constructor_are_edits() -> None:
    assert BatchMeta([1, 2], ["p"] * 2, custom_meta=[{"a": 1}, {}])._tag_edits() == {0: (False, {"a": 1})}


def test_update_custom_meta_of_none_does_nothing_and_of_another_length_is_refused() -> None:
    meta = batch(2)
    meta.update_custom_meta(None)
    with pytest.raises(InvalidInput):
        meta.update_custom_meta([{}])
    assert meta == batch(2)


def test_get_all_custom_meta_is_a_deep_copy() -> None:
    meta = BatchMeta([1], ["p"], custom_meta=[{"l": [1]}])
    meta.get_all_custom_meta()[0]["l"].append(2)
    assert meta.custom_meta == [{"l": [1]}]


# ---- cost ----


def fastest(action: Callable[[], object]) -> float:
    def once() -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    return min(once() for _ in range(20))


def test_8192_rows_cost_no_per_row_work() -> None:
    """One dict comprehension over 8192 rows takes longer than any of these may."""
    meta = untouched(8192)
    scattered = BatchMeta._build(np.random.default_rng(0).permutation(8192), "p", {"a": DENSE}, True, None)
    order = np.arange(8192)[::-1]
    for some in (meta, scattered):
        parts = some.chunk(8)
        for action in (
            lambda some=some: some.chunk(8),
            lambda some=some: some[5],
            lambda some=some: some.select_fields(["a"]),
            lambda some=some: some.select_samples(order),
            lambda some=some: pickled(some),
            lambda parts=parts: BatchMeta.concat(parts),
        ):
            assert fastest(action) < 0.0005
    assert len(pickle.dumps(meta)) < 1000
    assert len(pickle.dumps(scattered)) < 4 * 8192 + 1000


def test_tags_of_8192_rows_are_shared_until_seen() -> None:
    meta = untouched(8192, [{"a": i} for i in range(8192)])
    assert fastest(lambda: meta.chunk(8)) < 0.001
    kv = KVBatchMeta._build([str(i) for i in range(8192)], [{"a": i} for i in range(8192)], "p", None)
    assert fastest(lambda: kv.chunk(8)) < 0.001


def test_importing_metadata_and_samplers_does_not_import_torch() -> None:
    code = "import sys, transfer_queue.metadata, transfer_queue.sampler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
