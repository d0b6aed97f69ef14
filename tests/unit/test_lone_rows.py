"""Rows that were put alone, read many at once: the same values as one by one, whatever the rows hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from blocks import alone, get, put_row, rows_of, same, schema_of
from damage import FUZZ, NUMBERS, attempt, touch
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.codec.assemble import Assembler
from transfer_queue.codec.layout import HEAD, Column, Layout, decode_layout, encode_layout, sizes_of
from transfer_queue.codec.rows import BlockBytes, Copier
from transfer_queue.errors import ProtocolError, TransferQueueError

SAMPLES: list[Any] = [
    st.integers(0, 9).map(torch.arange),
    st.integers(0, 9).map(lambda n: torch.ones(n, 3, dtype=torch.bfloat16)),
    st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda shape: torch.ones(*shape)),
    st.integers(0, 3).map(lambda n: torch.ones(2, n, dtype=torch.int16)),
    st.just(torch.tensor(2.5)),
    st.just(torch.ones(0, dtype=torch.bool)),
    st.text(max_size=300),
    st.binary(max_size=9),
    st.none(),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
    st.integers(0, 5).map(lambda n: {"t": torch.arange(n)}),
    st.lists(st.integers(-5, 5), max_size=4),
    st.integers(0, 3).map(lambda n: np.arange(n, dtype=">i4")),
]
ROW = {"x": torch.arange(5), "y": torch.ones(2, 3), "s": "text", "d": {"a": [1]}, "t": torch.tensor(1.0)}


def one_by_one(blocks: list[BlockBytes], name: str, order: list[int]) -> Any:
    return get(blocks, name, [(number, 0, 1) for number in order])


@settings(max_examples=150, deadline=None, database=None)
@given(st.data())
def test_many_at_once_are_what_they_are_one_by_one(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(SAMPLES), min_size=1, max_size=4))
    count = data.draw(st.integers(1, 9))
    blocks = [put_row({f"f{n}": data.draw(kind) for n, kind in enumerate(kinds)}) for _ in range(count)]
    order = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=12))
    rows = alone(blocks, order=order)
    if rows is None:
        return
    for number in range(len(kinds)):
        found = Assembler(Copier(), False).many(schema_of(blocks, f"f{number}"), rows)
        if found is not None:
            assert same(rows_of(found), rows_of(one_by_one(blocks, f"f{number}", order)))
            assert type(found) is type(one_by_one(blocks, f"f{number}", order))


@pytest.mark.parametrize("name", list(ROW))
def test_tensors_and_plain_values_need_no_look_at_each_row(name: str) -> None:
    blocks = [put_row(ROW | {"x": torch.arange(n), "s": "text" * n}) for n in range(9)]
    order = [3, 1, 1, 8]
    rows = alone(blocks, order=order)
    assert rows is not None
    found = Assembler(Copier(), False).many(schema_of(blocks, name), rows)
    assert same(rows_of(found), rows_of(one_by_one(blocks, name, order)))


def test_rows_of_several_kinds_are_looked_at_one_by_one() -> None:
    assert alone([put_row({"x": torch.arange(2)}), put_row({"x": torch.ones(2)})]) is None
    assert alone([put_row({"x": torch.arange(2)}), put_row({"x": torch.ones(2, 2).long()})]) is None
    assert alone([put_row({"x": torch.arange(2)}), put_row({"y": torch.arange(2)})]) is None
    assert alone([put_row({"x": "a"}), put_row({"x": torch.arange(2)})]) is None


def layouts() -> list[bytes]:
    blocks = [put_row(ROW | {"o": {"buffer": torch.arange(n)}, "x": torch.arange(n)}) for n in range(3)]
    return [encode_layout(block.layout) for block in blocks]


def test_a_layout_of_one_row_survives_its_encoding() -> None:
    for data in layouts():
        layout = decode_layout(data)
        assert layout.rows == 1
        assert encode_layout(layout) == data
    large = Layout(1, 2**33, [Column("x", "dense", "int8", 1, (2**33,), -1, [(0, 2**33)], [])])
    assert decode_layout(encode_layout(large)) == large


def test_layouts_of_rows_that_are_alike_differ_in_their_numbers_only() -> None:
    found = sizes_of(layouts())
    assert found is not None
    template, numbers = found
    assert numbers.shape == (3, template.size)
    assert [template.filled(row) for row in numbers.tolist()] == [decode_layout(data) for data in layouts()]


def test_every_cut_of_a_layout_is_refused() -> None:
    data = layouts()[1]
    for end in [*range(len(data)), len(data) + 4]:
        with pytest.raises(ProtocolError):
            decode_layout((data + bytes(4))[:end])


BLOCKS = [put_row(ROW | {"x": torch.arange(n)}) for n in range(1, 5)]
LAYOUTS = [encode_layout(block.layout) for block in BLOCKS]


def read_all(changed: bytes, row: int) -> None:
    """Read every field of rows of which one has a changed layout."""
    given = [*LAYOUTS[:row], changed, *LAYOUTS[row + 1 :]]
    rows = alone(BLOCKS, given)
    for name in ROW if rows is not None else ():
        found = Assembler(Copier(), False).many(schema_of(BLOCKS, name), rows)  # type: ignore[arg-type]
        if found is not None:
            touch(rows_of(found))
    touch(decode_layout(changed).nbytes)


def test_every_changed_number_is_refused_or_stays_inside() -> None:
    data = LAYOUTS[2]
    start = HEAD.size + HEAD.unpack_from(data)[2]
    for at in range(start, len(data), 4):
        old = int(np.frombuffer(data, np.int32, 1, at)[0])
        for value in [*(n for n in NUMBERS if -(2**31) <= n < 2**31), old + 1, old - 1, old + 64, old * 2]:
            changed = data[:at] + np.int32(value).tobytes() + data[at + 4 :]
            attempt(lambda changed=changed: read_all(changed, 2))


@FUZZ
@given(st.data())
def test_random_bytes_in_a_layout_of_one_row_are_refused_or_stay_inside(data: st.DataObject) -> None:
    changed = bytearray(LAYOUTS[2])
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_all(bytes(changed), 2)
    except TransferQueueError:
        return


def test_values_that_are_damaged_or_deep_are_told_apart_though_they_are_decoded_together() -> None:
    deep: list[Any] = []
    for _ in range(60):
        deep = [deep]
    values = [{"n": number, "deep": deep if number == 5 else None} for number in range(20)]
    blocks = [put_row({"x": value}) for value in values]
    rows = alone(blocks)
    assert rows is not None
    schema = schema_of(blocks, "x")
    one_by_one_found = attempted(lambda: rows_of(one_by_one(blocks, "x", list(range(20)))))
    assert attempted(lambda: rows_of(Assembler(Copier(), False).many(schema, rows))) == one_by_one_found
    start, nbytes = blocks[7].layout.columns[0].parts[0]
    blocks[7].data[start : start + nbytes] = 0xC1
    damaged_rows = alone(blocks)
    assert damaged_rows is not None
    with pytest.raises(ProtocolError, match="damaged"):
        Assembler(Copier(), False).many(schema, damaged_rows)


def attempted(work: Any) -> Any:
    try:
        return work()
    except ProtocolError as error:
        return str(error)
