"""Rows that were put alone, written as columns of one block; and rows that lie in several blocks, read in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from blocks import alone, get, put, put_row, rows_of, same, schema_of
from damage import NUMBERS, attempt
from hypothesis import given, settings
from hypothesis import strategies as st
from test_lone_rows import SAMPLES

from transfer_queue.codec.assemble import Assembler
from transfer_queue.codec.joining import RowJoin
from transfer_queue.codec.layout import HEAD, decode_layout, encode_layout
from transfer_queue.codec.lone_rows import LoneRows
from transfer_queue.codec.rows import BlockBytes, Copier
from transfer_queue.codec.select import cut_out
from transfer_queue.codec.spread_rows import BlockShare, LoneShare, SpreadRows
from transfer_queue.errors import ProtocolError

QUICK = settings(max_examples=150, deadline=None, database=None)


def joined(rows: LoneRows) -> BlockBytes | None:
    """The block that gathering makes of them; None where it leaves them alone."""
    join = RowJoin(rows)
    if not all(join.add(name) for name in rows.names):
        return None
    data = np.full(join.nbytes, 0xCC, np.uint8)
    for _ in join.write(data):
        pass
    return BlockBytes(data, decode_layout(encode_layout(join.layout())), -1)


@QUICK
@given(st.data())
def test_gathered_rows_read_as_they_did_alone(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(SAMPLES), min_size=1, max_size=4))
    blocks = [put_row({f"f{n}": data.draw(kind) for n, kind in enumerate(kinds)}) for _ in range(5)]
    rows = alone(blocks)
    block = joined(rows) if rows is not None else None
    if block is None:
        return
    for number in range(len(kinds)):
        name = f"f{number}"
        before = get(blocks, name)
        after = get(block, name, schema=schema_of(blocks, name))
        assert type(after) is type(before)
        assert same(rows_of(after), rows_of(before))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([torch.arange(4) + n for n in range(5)], "dense"),
        ([torch.tensor(float(n)) for n in range(5)], "dense"),
        ([torch.arange(n) for n in range(5)], "ragged"),
        ([torch.ones(n, 5 - n) for n in range(5)], "varied"),
        (["text" * n for n in range(5)], "objects"),
    ],
)
def test_the_gathered_column_is_the_one_of_a_put_of_these_rows_together(values: list[Any], kind: str) -> None:
    rows = alone([put_row({"x": value}) for value in values])
    assert rows is not None
    block = joined(rows)
    assert block is not None
    made, together = block.layout.columns[0], put({"x": values}, 5).layout.columns[0]
    assert made.kind == together.kind == kind
    assert (made.shape, made.ragged, made.dtype) == (together.shape, together.ragged, together.dtype)


def test_columns_with_buffers_and_those_ragged_further_in_stay_alone() -> None:
    for values in ([{"t": torch.arange(n)} for n in range(3)], [torch.ones(2, n) for n in range(3)]):
        rows = alone([put_row({"x": value}) for value in values])
        assert rows is not None
        assert joined(rows) is None


def test_every_changed_number_of_a_layout_is_refused_or_stays_inside() -> None:
    blocks = [put_row({"x": torch.arange(n), "s": "text", "y": torch.ones(2, 3)}) for n in range(1, 5)]
    layouts = [encode_layout(block.layout) for block in blocks]
    data = layouts[2]
    for at in range(HEAD.size + HEAD.unpack_from(data)[2], len(data), 4):
        for value in (n for n in NUMBERS if -(2**31) <= n < 2**31):
            changed = data[:at] + np.int32(value).tobytes() + data[at + 4 :]
            rows = alone(blocks, [*layouts[:2], changed, layouts[3]])
            assert rows is not None
            attempt(lambda rows=rows: joined(rows))


def spread(
    several: Sequence[tuple[BlockBytes, list[int]]], lone: list[BlockBytes], order: list[int]
) -> tuple[SpreadRows, list[tuple[BlockBytes, int, int]]] | None:
    """Rows of blocks of several and of one row, in this order; and the same as runs."""
    runs = [(block, row, 1) for block, rows in several for row in rows] + [(block, 0, 1) for block in lone]
    runs = [runs[place] for place in order]
    place_of = np.argsort(order)
    shares, at = [], 0
    for block, rows in several:
        shares.append(BlockShare(block, np.array(rows, np.int64), place_of[at : at + len(rows)]))
        at += len(rows)
    if not lone:
        return SpreadRows(shares, None), runs
    matrix = alone(lone)
    return None if matrix is None else (SpreadRows(shares, LoneShare(matrix, place_of[at:])), runs)


@QUICK
@given(st.data())
def test_rows_of_several_blocks_read_in_one_pass_are_what_they_are_run_by_run(data: st.DataObject) -> None:
    sample = data.draw(st.sampled_from(SAMPLES))
    sizes = data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=3))
    several = []
    for size in sizes:
        block = put({"x": [data.draw(sample) for _ in range(size)]}, size)
        several.append((block, data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6))))
    lone = [put_row({"x": data.draw(sample)}) for _ in range(data.draw(st.integers(0, 4)))]
    order = data.draw(st.permutations(range(sum(len(rows) for _, rows in several) + len(lone))))
    given = spread(several, lone, order)
    try:
        schema = schema_of([block for block, _ in several] + lone, "x")
    except AssertionError:
        return  # a table would not take them together
    if given is None:
        return
    rows, runs = given
    found = Assembler(Copier(), False).many(schema, rows)
    if found is not None:
        expected = Assembler(Copier(), False).field(schema, runs)
        assert type(found) is type(expected)
        assert same(rows_of(found), rows_of(expected))


@pytest.mark.parametrize("name", ["x", "y", "s", "t"])
def test_gathered_rows_and_rows_alone_are_read_in_one_pass(name: str) -> None:
    def row(number: int) -> dict[str, Any]:
        return {
            "x": torch.arange(number % 5),
            "y": torch.full((2, 3), number),
            "s": str(number),
            "t": torch.tensor(float(number)),
        }

    gathered = joined(alone([put_row(row(number)) for number in range(10)]))  # type: ignore[arg-type]
    assert gathered is not None
    lone = [put_row(row(number)) for number in range(10, 20)]
    order = np.random.default_rng(1).permutation(20).tolist()
    given = spread([(gathered, list(range(10)))], lone, order)
    assert given is not None
    rows, _ = given
    found = Assembler(Copier(), False).many(schema_of([gathered, *lone], name), rows)
    expected = [row(number)[name] for number in order]
    assert all(same(one, other) for one, other in zip(rows_of(found), expected, strict=True))


def test_blocks_of_several_dtypes_or_without_the_field_are_read_run_by_run() -> None:
    several = [(put({"x": torch.ones(3, 2)}, 3), [0, 2])]
    for other in (
        put({"x": torch.ones(3, 2, dtype=torch.int64)}, 3),
        put({"x": torch.ones(3)}, 3),
        put({"y": [1, 2, 3]}, 3),
    ):
        given = spread([*several, (other, [1])], [], [0, 1, 2])
        assert given is not None
        assert given[0].plain("x") is None


DENSE_COLUMNS = {
    "flat": torch.arange(6, dtype=torch.int16),
    "wide": torch.arange(6 * 2 * 3, dtype=torch.float64).reshape(6, 2, 3),
    "empty": torch.zeros(6, 0),
}


@QUICK
@given(st.sets(st.sampled_from([*DENSE_COLUMNS, "text"]), min_size=1), st.integers(0, 5), st.integers(1, 6))
def test_rows_that_follow_each_other_are_cut_out_as_they_are(names: set[str], first: int, count: int) -> None:
    count = min(count, 6 - first)
    whole = put({**DENSE_COLUMNS, "text": [f"row {n}" for n in range(6)]}, 6)
    cut = cut_out(encode_layout(whole.layout), whole.data, first, count, sorted(names))
    data = np.full(cut.nbytes, 0xCC, np.uint8)
    cut.fill(data)
    found = BlockBytes(data, decode_layout(cut.layout), -1)
    assert {column.name for column in found.layout.columns} == names
    for name in names:
        assert same(rows_of(get(found, name)), rows_of(get(whole, name))[first : first + count])


@pytest.mark.parametrize("first", [-1, 3])
def test_rows_beyond_a_block_are_not_cut_out(first: int) -> None:
    whole = put({"x": torch.zeros(4, 3)}, 4)
    with pytest.raises(ProtocolError):
        cut_out(encode_layout(whole.layout), whole.data, first, 2, ["x"])


def test_rows_are_not_cut_out_of_less_memory_than_the_layout_has() -> None:
    whole = put({"x": torch.zeros(4, 100)}, 4)
    with pytest.raises(ProtocolError):
        cut_out(encode_layout(whole.layout), whole.data[:64], 0, 1, ["x"])
