"""Properties of the codec: any value round-trips, and any selection of rows equals the same selection of a list."""

from __future__ import annotations

import collections
import datetime
import decimal
from typing import Any

import numpy as np
import torch
from blocks import assert_rows, compact, get, put, put_row, rows_of, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from transfer_queue.codec.needed import all_ranges, index_ranges, value_ranges
from transfer_queue.codec.rows import BlockBytes
from transfer_queue.codec.values import Lifting, pack

QUICK = settings(
    max_examples=200, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)

offsets = st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23))
named_zones = st.builds(datetime.timezone, offsets, st.text("ab", max_size=2))
zones = st.none() | st.just(datetime.timezone.utc) | named_zones
folds = st.sampled_from([0, 1])
any_text = st.text(st.characters(exclude_categories=())) | st.text(max_size=5)
hashable_atoms = [
    st.none(), st.booleans(), st.integers(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), any_text,
    st.binary(max_size=8), st.complex_numbers(allow_nan=False), st.decimals(allow_nan=False), st.fractions(),
    st.uuids(), st.dates(), st.timedeltas(),
    st.builds(lambda t, fold: t.replace(fold=fold), st.datetimes(timezones=zones), folds),
    st.builds(lambda t, fold: t.replace(fold=fold), st.times(), folds),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3)),
]  # fmt: skip


@st.composite
def hashables(draw: st.DrawFn, depth: int = 1) -> Any:
    shape = draw(st.sampled_from(["atom", "tuple", "frozenset"])) if depth else "atom"
    if shape == "atom":
        return draw(draw(st.sampled_from(hashable_atoms)))
    inner = draw(st.lists(hashables(depth - 1), max_size=3))
    return tuple(inner) if shape == "tuple" else frozenset(inner)


DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.uint16, torch.complex64, torch.float8_e5m2]


def tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    content = (torch.arange(size, dtype=torch.int64) * 7 + seed) % (2 if dtype == torch.bool else 120)
    flat = content.to(torch.uint8)
    return flat.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


tensors = st.builds(tensor, st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 99))
arrays = st.builds(
    lambda code, shape, seed: (np.arange(int(np.prod(shape, dtype=int))) + seed).reshape(shape).astype(code),
    st.sampled_from(["f4", ">i2", "M8[s]", "U4", "O", "?"]),
    st.lists(st.integers(0, 3), max_size=2),
    st.integers(0, 99),
)


ATOMS = [st.floats(), st.binary(max_size=8).map(bytearray), st.just(decimal.Decimal("NaN")), hashables()]


@st.composite
def values(draw: st.DrawFn, with_arrays: bool = True, depth: int = 3) -> Any:
    kinds = ["atom", *(["list", "tuple", "set", "dict", "pairs", "ordered", "deque"] if depth else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "atom":
        return draw(draw(st.sampled_from([*ATOMS, tensors, arrays] if with_arrays else ATOMS)))
    items = [draw(values(with_arrays, depth - 1)) for _ in range(draw(st.integers(0, 3)))]
    if kind == "set":
        return draw(st.sets(hashables(), max_size=3))
    keys = any_text if kind == "dict" else hashables()
    match kind:
        case "list":
            return items
        case "tuple":
            return tuple(items)
        case "deque":
            return collections.deque(items, draw(st.none() | st.integers(0, 4)))
    pairs = {draw(keys): item for item in items}
    return collections.OrderedDict(pairs) if kind == "ordered" else pairs


@QUICK
@given(values(with_arrays=False))
def test_packing_keeps_type_and_value(value: Any) -> None:
    assert same(Lifting().unpack(pack(value)), value)


@QUICK
@given(st.lists(values(), min_size=1, max_size=3))
def test_a_column_of_any_values_comes_back(rows: list[Any]) -> None:
    assert_rows(get(put_row({"x": {"v": rows}}), "x"), [{"v": rows}])
    named = [{"v": row} for row in rows]  # a list of equally shaped tensors would be a tensor column
    assert_rows(get(put({"x": named}, len(rows)), "x"), named)


# ---- rows against a list of rows ----

Table = tuple[str, list[list[Any]]]
lengths = st.integers(0, 4)
KINDS = ["dense", "ragged", "ragged2d", "varied", "objects", "nested", "numbers"]


def row_of(kind: str, seed: int, one: int, two: int) -> Any:
    shapes = {"dense": [2, 3], "ragged": [one], "ragged2d": [3, one], "varied": [one, 2, two], "nested": [3]}
    if kind == "objects":
        return {"t": tensor(torch.float32, [one, two], seed), "n": (seed,), "a": np.arange(one)}
    return [seed] * one if kind == "numbers" else tensor(torch.int32, shapes[kind], seed)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """A kind of column, and the rows of each put."""
    kind = draw(st.sampled_from(KINDS))
    row = st.builds(row_of, st.just(kind), st.integers(0, 99), lengths, lengths)
    return kind, draw(st.lists(st.lists(row, min_size=1, max_size=5), min_size=1, max_size=3))


def column_of(kind: str, rows: list[Any]) -> Any:
    if kind == "nested":
        return TensorDict({"a": torch.stack(rows), "b": {"c": [str(row[0].item()) for row in rows]}}, [len(rows)])
    return rows


def model_of(kind: str, rows: list[Any]) -> list[Any]:
    return [torch.tensor(row, dtype=torch.int64) for row in rows] if kind == "numbers" else rows


def found_rows(kind: str, value: Any) -> list[Any]:
    if kind != "nested":
        return rows_of(value)
    assert value["b", "c"] == [str(row[0].item()) for row in value["a"]]
    return list(value["a"])


def check(kind: str, value: Any, expected: list[Any]) -> None:
    found = found_rows(kind, value)
    if kind == "numbers" and all(type(row) is list for row in found):  # a put of empty lists only
        assert found == [row.tolist() for row in expected]
    else:
        assert same(found, expected)


@QUICK
@given(tables(), st.data())
def test_any_runs_of_any_blocks_equal_the_rows_of_the_model(table: Table, data: st.DataObject) -> None:
    kind, puts = table
    if kind == "numbers" and any(not any(rows) for rows in puts):
        puts = [[[*row, 1] for row in rows] for rows in puts]
    blocks = [put({"x": column_of(kind, rows)}, len(rows), view=data.draw(st.sampled_from([-1, 0]))) for rows in puts]
    picks = []
    for _ in range(data.draw(st.integers(1, 12))):
        number = data.draw(st.integers(0, len(puts) - 1))
        start = data.draw(st.integers(0, len(puts[number]) - 1))
        picks.append((number, start, data.draw(st.integers(1, len(puts[number]) - start))))
    expected = [row for number, start, count in picks for row in model_of(kind, puts[number])[start : start + count]]
    check(kind, get(blocks, "x", picks), expected)


@QUICK
@given(tables(), st.data())
def test_compaction_equals_the_rows_of_the_model(table: Table, data: st.DataObject) -> None:
    kind, puts = table
    rows = puts[0]
    block = put({"x": column_of(kind, rows), "y": list(range(len(rows)))}, len(rows))
    kept = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1)))
    smaller = compact(block, kept, ["x"])
    assert [column.name for column in smaller.layout.columns] == ["x"]
    assert len(smaller.data) <= len(block.data)
    check(kind, get(smaller, "x"), [model_of(kind, rows)[row] for row in kept])
    again = sorted(data.draw(st.sets(st.integers(0, len(kept) - 1), min_size=1)))
    check(kind, get(compact(smaller, again), "x"), [model_of(kind, rows)[kept[row]] for row in again])


@QUICK
@given(st.lists(st.lists(st.integers() | st.floats() | st.booleans(), max_size=4), min_size=1, max_size=4))
def test_lists_of_numbers_become_tensors_of_the_same_numbers_or_stay_lists(rows: list[list[Any]]) -> None:
    kinds = {type(item) for row in rows for item in row}
    found = rows_of(get(put({"x": rows}, len(rows)), "x"))
    if all(type(row) is list for row in found):
        assert same(found, rows)
    elif kinds == {int}:
        assert [row.tolist() for row in found] == rows
    elif kinds == {bool}:
        assert same([row.tolist() for row in found], rows)
    else:
        assert all(row.dtype in (torch.float32, torch.int64) for row in found)
        assert [len(row) for row in found] == [len(row) for row in rows]


@QUICK
@given(tables(), st.data())
def test_the_bytes_that_rows_are_said_to_need_are_enough(table: Table, data: st.DataObject) -> None:
    """As a reader of a storage engine has them: the rest of the block is something else."""
    kind, puts = table
    rows = puts[0]
    block = put({"other": [float(n) for n in range(len(rows))], "x": column_of(kind, rows)}, len(rows))
    picked = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1)))
    image = BlockBytes(np.full(len(block.data), 0xCC, np.uint8), block.layout, -1)
    for ranges in (index_ranges(block.layout, {"x"}), value_ranges(image, np.array(picked), {"x"})):
        for first, end in ranges:
            image.data[first:end] = block.data[first:end]
    check(kind, get(image, "x", [(0, row, 1) for row in picked]), [model_of(kind, rows)[row] for row in picked])
    assert all(first >= 0 and end <= len(block.data) for first, end in all_ranges(block.layout, {"x"}))
