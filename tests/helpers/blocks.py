"""Codec tests without a service: plan values into blocks of plain memory, read rows of them back, compare exactly."""

from __future__ import annotations

import dataclasses
import struct
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDictBase

from transfer_queue.codec.assemble import Assembler
from transfer_queue.codec.layout import Layout, decode_layout, encode_layout, sizes_of
from transfer_queue.codec.lone_rows import LoneRows
from transfer_queue.codec.plan import BlockPlan, plan_batch, plan_row
from transfer_queue.codec.rows import BlockBytes, Copier
from transfer_queue.codec.select import selected
from transfer_queue.memory.copy import Mover
from transfer_queue.schema import FieldSchema

Pick = tuple[int, int, int]  # block, first row, number of rows


def block_of(plan: BlockPlan, view_nbytes: int = -1) -> BlockBytes:
    """The block a put of `plan` leaves in a store, as a reader sees it."""
    data = np.full(plan.nbytes, 0xAA, np.uint8)
    plan.write(data, Mover(1))
    return BlockBytes(data, decode_layout(plan.layout()), view_nbytes)


def put(
    values: Mapping[str, Any] | TensorDictBase, rows: int, allow_pickle: bool = False, view: int = -1
) -> BlockBytes:
    return block_of(plan_batch(values, rows, allow_pickle), view)


def put_row(values: Mapping[str, Any], allow_pickle: bool = False) -> BlockBytes:
    return block_of(plan_row(values, allow_pickle))


def schema_of(blocks: Sequence[BlockBytes], field: str) -> FieldSchema:
    """What a table's schema of `field` is after puts of these blocks."""
    found: FieldSchema | None = None
    for block in blocks:
        column = block.layout.column(field)
        assert column is not None
        new = column.schema()
        assert found is None or found.conflict(new) is None
        found = new if found is None else found.merged(new)
    assert found is not None
    return found


def alone(
    blocks: Sequence[BlockBytes], layouts: Sequence[bytes] | None = None, order: Sequence[int] = ()
) -> LoneRows | None:
    """Blocks of one row each as a reader of many sees them: side by side in one memory, in this order."""
    layouts = [encode_layout(block.layout) for block in blocks] if layouts is None else layouts
    found = sizes_of(layouts)
    if found is None:
        return None
    rows = list(order) or list(range(len(blocks)))
    nbytes = np.array([len(block.data) for block in blocks], np.int64)
    offsets = np.concatenate([[0], nbytes.cumsum()[:-1]])
    memory = np.concatenate([block.data for block in blocks])
    template, numbers = found
    return LoneRows(template, numbers[rows], [memory], np.zeros(len(rows), np.int64), offsets[rows], nbytes[rows])


def get(
    blocks: BlockBytes | Sequence[BlockBytes], field: str, picks: Sequence[Pick] | None = None, **options: Any
) -> Any:
    """The value a read of the picked rows gives; all rows of all blocks by default."""
    blocks = [blocks] if isinstance(blocks, BlockBytes) else blocks
    picks = [(n, 0, block.layout.rows) for n, block in enumerate(blocks)] if picks is None else picks
    assembler = Assembler(Copier(), options.get("allow_pickle", False), options.get("out"))
    schema = options.get("schema") or schema_of(blocks, field)
    return assembler.field(schema, [(blocks[number], start, count) for number, start, count in picks])


def compact(block: BlockBytes, rows: Sequence[int], fields: Sequence[str] | None = None) -> BlockBytes:
    """The block that compaction makes of some rows."""
    names = [c.name for c in block.layout.columns] if fields is None else fields
    layout, fill = selected(block.layout, block.data, np.array(rows, np.int64), names)
    data = np.full(layout.nbytes, 0xBB, np.uint8)
    fill(data)
    return BlockBytes(data, decode_layout(encode_layout(layout)), -1)


def rows_of(value: Any) -> list[Any]:
    """The rows of a column a reader got."""
    if isinstance(value, torch.Tensor):
        return list(value.unbind())
    if isinstance(value, NonTensorStack):
        return [item.data for item in value.tensordicts]
    return [value[row] for row in range(len(value))]


def through(value: Any, allow_pickle: bool = False) -> Any:
    """One object through a block and back."""
    block = put_row({"x": {"value": value}}, allow_pickle)
    return rows_of(get(block, "x", allow_pickle=allow_pickle))[0]["value"]


def changed(block: BlockBytes, layout: Layout) -> BlockBytes:
    return BlockBytes(block.data, decode_layout(encode_layout(layout)), block.view_nbytes)


def same(one: Any, other: Any) -> bool:
    """Equal in value and in every type, bit by bit for numbers and tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return same_tensor(one, other)
    if isinstance(one, np.ndarray):
        return same_array(one, other)
    if isinstance(one, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return same([one.real, one.imag], [other.real, other.imag])
    if isinstance(one, TensorDictBase):
        mine, theirs = ([(k, td.get(k)) for k in td.keys()] for td in (one, other))  # noqa: SIM118
        return one.batch_size == other.batch_size and same(mine, theirs)
    if isinstance(one, (dict, OrderedDict)):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, deque) and one.maxlen != other.maxlen:
        return False
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (set, frozenset)):
        return len(one) == len(other) and all(any(same(mine, theirs) for theirs in other) for mine in one)
    if dataclasses.is_dataclass(one):
        return same(vars(one), vars(other))
    if isinstance(one, np.dtype):
        return bool(one == other)
    return repr(one) == repr(other) and bool(one == other or one != one)


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_nested or other.is_nested:
        both = one.is_nested and other.is_nested and one.layout == other.layout and one.dtype == other.dtype
        return both and same(list(one.unbind()), list(other.unbind()))
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return tensor_bytes(one) == tensor_bytes(other)


def tensor_bytes(value: torch.Tensor) -> bytes:
    flat = torch.empty(value.shape, dtype=value.dtype)
    flat.copy_(value.detach())
    return flat.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


def same_array(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.kind == "O":
        return same(one.ravel().tolist(), other.ravel().tolist())
    return one.tobytes() == other.tobytes()


def assert_rows(value: Any, expected: Sequence[Any]) -> None:
    found = rows_of(value)
    assert len(found) == len(expected)
    for row, (have, want) in enumerate(zip(found, expected, strict=True)):
        assert same(have, want), f"row {row}: {have!r} is not {want!r}"
