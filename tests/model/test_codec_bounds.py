"""Damaged blocks and layouts: refused with this package's errors, nothing read outside, no memory beyond them."""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from blocks import block_of, get, put, rows_of
from damage import FUZZ, NUMBERS, attempt, touch
from hypothesis import example, given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from transfer_queue.codec.assemble import Assembler
from transfer_queue.codec.layout import HEAD, MARK, Column, Layout, decode_layout, encode_layout
from transfer_queue.codec.plan import plan_batch
from transfer_queue.codec.rows import BlockBytes, Copier
from transfer_queue.codec.select import selected
from transfer_queue.codec.values import Ext, Lifting, encode
from transfer_queue.errors import ProtocolError, TransferQueueError

ROWS = 4
SLACK_NBYTES = 1 << 20


def sample() -> dict[str, Any]:
    """One column of every kind."""
    stack = [
        {"t": torch.arange(n + 1.0), "a": np.arange(n, dtype=">i4"), "s": (n, {n}), "j": jagged(n)} for n in range(ROWS)
    ]
    inner = TensorDict({"a": torch.ones(ROWS, 2), "b": NonTensorStack(*map(str, range(ROWS)))}, [ROWS])
    return {
        "dense": torch.arange(ROWS * 6, dtype=torch.float32).view(ROWS, 2, 3),
        "flat": torch.arange(ROWS),
        "ragged": [torch.arange(n + 1) for n in range(ROWS)],
        "ids": [torch.arange(3 * n).view(3, n) for n in range(ROWS)],
        "steps": [torch.empty(n, 0) for n in range(ROWS)],
        "varied": [torch.ones(n + 1, 2, 5 - n, dtype=torch.int16) for n in range(ROWS)],
        "text": ["a", b"b", None, {"c": [1.5]}],
        "buffers": stack,
        "nested": inner,
    }


def jagged(n: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(n), torch.arange(2)], layout=torch.jagged)


BATCH = sample()
PLAN = plan_batch(BATCH, ROWS)
ORIGINAL = block_of(PLAN)


def use(data: np.ndarray[Any, Any], layout: bytes, only: int | None = None, view: int = -1) -> None:
    """Read a block in every way there is; errors of this package and results inside the block are both fine."""
    tracemalloc.start()
    try:
        block = BlockBytes(data, decode_layout(layout), view)
        if block.layout.nbytes > len(data):
            return  # a reader compares this with the size of the block
        for column in block.layout.columns if only is None else block.layout.columns[only : only + 1]:
            for picks in ([(0, ROWS)], [(1, 2)], [(2, 1), (0, 2), *[(row % ROWS, 1) for row in range(8)]]):
                attempt(lambda column=column, picks=picks: read(block, column, picks))
            attempt(lambda column=column: scatter(block, column))
            attempt(lambda column=column: fill(block, column.name))
        assert tracemalloc.get_traced_memory()[1] < 16 * len(data) + SLACK_NBYTES
    except TransferQueueError:
        pass
    finally:
        tracemalloc.stop()


def read(block: BlockBytes, column: Column, picks: list[tuple[int, int]]) -> None:
    value = Assembler(Copier(), False).field(column.schema(), [(block, start, count) for start, count in picks])
    if isinstance(value, torch.Tensor) and value.is_nested and value.layout == torch.jagged:
        offsets = value.offsets()
        assert int(offsets[0]) >= 0
        assert int(offsets[-1]) <= value.values().shape[value._ragged_idx - 1]
        assert int(offsets.diff().min()) >= 0
    if value.numel() < 1 << 20 if isinstance(value, torch.Tensor) and not value.is_nested else True:
        touch(rows_of(value) if not isinstance(value, TensorDict) else list(value.values()))


def scatter(block: BlockBytes, column: Column) -> None:
    value = Assembler(Copier(), False).scattered(column.schema(), block, np.array([2, 0, *range(ROWS)]))
    if value is not None:
        touch(rows_of(value))


def fill(block: BlockBytes, name: str) -> None:
    layout, write = selected(block.layout, block.data, np.array([0, 2]), [name])
    assert layout.nbytes <= len(block.data) + 4096
    write(np.empty(layout.nbytes, np.uint8))


# ---- layouts ----


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every leaf."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from places(item, (*path, number))
        if path:
            yield path
    else:
        yield path


def with_change(content: Any, path: tuple[Any, ...], value: Any) -> bytes:
    at = changed = copy.copy(content)
    for step in path[:-1]:
        at[step] = copy.copy(at[step])
        at = at[step]
    at[path[-1]] = value
    return msgspec.msgpack.encode(changed)


CONTENT = msgspec.msgpack.decode(PLAN.layout())
LEAVES = list(places(CONTENT))


def replacements(old: Any) -> list[Any]:
    if isinstance(old, int):
        return [*NUMBERS, old + 1, old - 1, old + 64, old - 64, old * 2, 2**64 - 1, None, "1", 1.5, []]
    if isinstance(old, str):
        return ["", "float64", "uint8", "no_such", "dense", "ragged", "varied", "objects", "nested", 1, None]
    shapes = [[], [-1], [0], [-1, -1], [2, 3], [2**62, 2**62], [1] * 70]
    return [*shapes, [[0, 0]], [[0, 2**63 - 1]], old + old, old[:-1], None]


def leaf(path: tuple[Any, ...]) -> Any:
    found = CONTENT
    for step in path:
        found = found[step]
    return found


@pytest.mark.parametrize("column", range(len(CONTENT[2])), ids=lambda n: str(CONTENT[2][n][0]))
def test_every_changed_field_of_a_column_is_refused_or_stays_inside(column: int) -> None:
    for path in LEAVES:
        if path[:2] == (2, column):
            for value in replacements(leaf(path)):
                use(ORIGINAL.data, with_change(CONTENT, path, value), column)


def test_changed_counts_of_a_layout_are_refused_or_stay_inside() -> None:
    for path in [(0,), (1,), (2,)]:
        for value in replacements(leaf(path)):
            use(ORIGINAL.data, with_change(CONTENT, path, value), view=0)


def outcome(layout: bytes) -> Any:
    try:
        return decode_layout.__wrapped__(layout)
    except ProtocolError as error:
        return str(error)


def test_the_quick_look_at_a_column_takes_what_the_whole_check_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = [with_change(CONTENT, path, value) for path in LEAVES for value in replacements(leaf(path))]
    sizes = [0, 1, ROWS, 2**31, 2**55, 2**56, -1]
    made = [
        msgspec.msgpack.encode([rows, 64, [["x", kind, "int8", itemsize, shape, ragged, parts, []]]])
        for rows in sizes
        for kind, parts in (("dense", [[0, 8]]), ("dense", [[0, 0]]), ("objects", [[0, 8], [0, 8 * (ROWS + 1)]]))
        for itemsize in (0, 1, 2, 33)
        for shape in ([], [1], [2, 1], [0], [0, 2**56], [2**56, 2], [-1], [1] * 65)
        for ragged in (-1, 0, 5)
    ]
    quick = [outcome(layout) for layout in (*changed, *made)]
    monkeypatch.setattr("transfer_queue.codec.layout._is_plain", lambda *_: False)
    assert quick == [outcome(layout) for layout in (*changed, *made)]
    assert sum(not isinstance(found, str) for found in quick) > 100


def test_every_cut_of_a_layout_is_refused() -> None:
    layout = PLAN.layout()
    for end in range(len(layout)):
        with pytest.raises(ProtocolError):
            decode_layout(layout[:end])


@pytest.mark.parametrize("num_dims", [65, 2**31, 2**62])
def test_the_layout_of_a_row_with_too_many_dimensions_is_refused(num_dims: int) -> None:
    template = msgspec.msgpack.encode([["x", "dense", "int8", 1, num_dims, -1, 1, False]])
    with pytest.raises(ProtocolError, match="dimensions"):
        decode_layout(HEAD.pack(MARK, 4, len(template)) + template + bytes(4 * (3 + 65)))


def test_deeply_nested_columns_are_refused() -> None:
    data = b"\x93\x01\x00\x91" + b"\x98\xa1x\xa6nested\xa0\x00\x90\xff\x90\x91" * 100_000
    with pytest.raises(ProtocolError):
        decode_layout(data)


def test_a_layout_of_many_rows_without_bytes_allocates_nothing() -> None:
    for rows in (2**31, 2**40, 2**55):
        for shape in [[0], [0, 3], [3, 0]]:
            column = ["x", "dense", "int8", 1, shape, -1, [[0, 0]], []]
            use(np.zeros(64, np.uint8), msgspec.msgpack.encode([rows, 0, [column]]))


def test_two_columns_that_share_offsets_are_each_checked() -> None:
    long = ["a", "ragged", "int8", 1, [-1], 0, [[0, 64], [64, 16]], []]
    short = ["b", "ragged", "int8", 1, [-1], 0, [[0, 8], [64, 16]], []]
    data = np.zeros(128, np.uint8)
    data[64:80].view(np.int64)[:] = [0, 64]
    block = BlockBytes(data, decode_layout(msgspec.msgpack.encode([1, 128, [long, short]])), -1)
    assert len(rows_of(get(block, "a"))[0]) == 64
    with pytest.raises(ProtocolError, match="offsets"):
        get(block, "b")


@FUZZ
@given(st.data())
def test_random_bytes_in_a_layout_are_refused_or_stay_inside(data: st.DataObject) -> None:
    layout = bytearray(PLAN.layout())
    for _ in range(data.draw(st.integers(1, 4))):
        layout[data.draw(st.integers(0, len(layout) - 1))] = data.draw(st.integers(0, 255))
    use(ORIGINAL.data, bytes(layout))


@FUZZ
@given(st.binary(max_size=64))
@example(b"\xc1")
def test_any_bytes_as_a_layout_are_refused_or_stay_inside(layout: bytes) -> None:
    use(np.zeros(64, np.uint8), layout)


# ---- blocks ----


def index_parts() -> list[tuple[str, int, int, int]]:
    """(name, column, offset, entries) of every part that holds indexes."""
    return [
        (f"{column.name}-{number}", place, offset, nbytes // 8)
        for place, column in enumerate(ORIGINAL.layout.columns)
        for number, (offset, nbytes) in enumerate(column.parts)
        if number not in (0, 5)
    ]


@pytest.mark.parametrize(("name", "column", "offset", "entries"), index_parts(), ids=str)
def test_every_changed_index_is_refused_or_stays_inside(name: str, column: int, offset: int, entries: int) -> None:
    for entry in range(entries):
        old = int(ORIGINAL.data[offset : offset + 8 * entries].view(np.int64)[entry])
        for value in [*NUMBERS, old + 1, old - 1, old + 64, old * 2 + 1]:
            data = ORIGINAL.data.copy()
            data[offset : offset + 8 * entries].view(np.int64)[entry] = np.int64(value)
            use(data, PLAN.layout(), column)


def test_offsets_that_fall_are_refused() -> None:
    block = put({"x": [torch.arange(2), torch.arange(3)]}, 2)
    offset, nbytes = block.layout.columns[0].parts[1]
    block.data[offset : offset + nbytes].view(np.int64)[:] = [0, 4, 3]
    with pytest.raises(ProtocolError, match="ascend"):
        get(block, "x")


def test_ragged_rows_of_no_bytes_cannot_claim_endless_steps() -> None:
    block = put({"x": [torch.empty(1, 0), torch.empty(2, 0)]}, 2)
    offset, nbytes = block.layout.columns[0].parts[1]
    block.data[offset : offset + nbytes].view(np.int64)[1:] = 2**62
    with pytest.raises(ProtocolError):
        get(block, "x")


def test_shapes_whose_product_overflows_are_refused() -> None:
    block = put({"x": [torch.empty(0, 2), torch.empty(1, 0)]}, 2)
    offset, nbytes = block.layout.columns[0].parts[2]
    block.data[offset : offset + nbytes].view(np.int64)[:] = [2**32, 2**32, 2**62, 4]
    with pytest.raises(ProtocolError, match="shapes"):
        get(block, "x")


def test_buffers_that_overlap_cannot_multiply_memory() -> None:
    block = put({"x": [{"t": torch.ones(4096), "n": torch.full((4096,), n)} for n in range(4)]}, 4)
    offset, nbytes = block.layout.columns[0].parts[4]
    block.data[offset : offset + nbytes].view(np.int64).reshape(-1, 2)[:] = [0, 16384 * 4]
    for work in (lambda: get(block, "x"), lambda: selected(block.layout, block.data, np.arange(4), ["x"])):
        with pytest.raises(ProtocolError, match="overlap"):
            work()


@FUZZ
@given(st.data())
def test_random_bytes_in_a_block_are_refused_or_stay_inside(data: st.DataObject) -> None:
    block = ORIGINAL.data.copy()
    column = data.draw(st.integers(0, len(ORIGINAL.layout.columns) - 1))
    parts = [part for part in ORIGINAL.layout.columns[column].parts if part[1]] or [(0, len(block))]
    for _ in range(data.draw(st.integers(1, 6))):
        offset, nbytes = data.draw(st.sampled_from(parts))
        block[offset + data.draw(st.integers(0, nbytes - 1))] = data.draw(st.integers(0, 255))
    use(block, PLAN.layout(), column, view=data.draw(st.sampled_from([-1, 0])))


def test_rows_outside_a_block_are_refused() -> None:
    for picks in ([(0, 4, 1)], [(0, 3, 2)], [(0, -1, 1)], [(0, 0, 0)], [(0, 0, -1)], [(0, 0, 2**62)]):
        with pytest.raises(ProtocolError, match="dense"):
            get(ORIGINAL, "dense", picks)


# ---- values ----


DAMAGED = [
    None, 1, -1, "a", [], [1], [[]], [1, 2], ["a", 0, 0], {}, {"a": 1}, [[1, [2]]], [2**63, 0], [0, 0, 0], "1e", [1, 0],
    ["x", [2**62], 0], [[2**62], []], [[-1], []], [["<f8"], "a"], ["|O", b"12345678"], ["|O", [1], 0], [[[]]],
    ["2024", 5, 0], ["2024-01-01", 7, None], ["2024-01-01", 0, [2**60, None]], ["2024-01-01", 0, True], [10**18, 0, 0],
    "cuda:99999999999", ",i4", [",i4", b"1234"], [",i4", [1], 0], [False, {"a": 1}, 1], [False, {"a": 1}, {"b": "c"}],
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Data type alias")
@pytest.mark.parametrize("code", range(-1, 60))
def test_a_damaged_extension_is_refused(code: int) -> None:
    contents = [b"", b"\xc1", b"\x00" * 15, b"abc", *map(encode, DAMAGED)]
    for content in contents:
        data = encode(Ext(code, content)) if code > -1 else content
        block = put({"x": ["0123456789" * 20]}, 1)
        offset, _ = block.layout.columns[0].parts[0]
        for message in (data, encode([Ext(max(code, 0), content)])):
            block.data[offset : offset + len(message)] = np.frombuffer(message, np.uint8)
            place = block.layout.columns[0].parts[1][0]
            block.data[place : place + 16].view(np.int64)[:] = [0, len(message)]
            attempt(lambda block=block: touch(rows_of(get(BlockBytes(block.data, block.layout, -1), "x"))))


def test_extensions_nested_without_end_are_refused() -> None:
    data = encode(1)
    for _ in range(300):
        data = encode([Ext(1, data)])
    attempt(lambda: Lifting().unpack(data))


def test_a_layout_survives_its_own_encoding() -> None:
    again = decode_layout(encode_layout(ORIGINAL.layout))
    assert again == ORIGINAL.layout
    assert isinstance(again, Layout)
