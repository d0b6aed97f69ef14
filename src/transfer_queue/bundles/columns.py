"""Columns of a batch as tensors with names, which is what safetensors hold.

A dense column is one tensor, `field`; a jagged one is two, `field:values` and `field:offsets`. Every other column, with
Python values, several dtypes, or one that safetensors have no name for, is a block as it lies in the store:
`field:block`, and `field:layout` which says where in it the values are; so is one with the name of a file's own header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import torch

from transfer_queue.codec.assemble import Assembler
from transfer_queue.codec.layout import DAMAGED, decode_layout
from transfer_queue.codec.nested import Offsets, jagged, trimmed
from transfer_queue.codec.plan import plan_batch
from transfer_queue.codec.rows import BlockBytes, Copier
from transfer_queue.errors import CheckpointCorrupt, UnsupportedValue
from transfer_queue.memory.copy import Mover
from transfer_queue.schema import FieldSchema

Kind: TypeAlias = Literal["dense", "jagged", "block"]
Tensors: TypeAlias = dict[str, torch.Tensor]
PORTABLE = frozenset((
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
))  # fmt: skip
HEADER = "__metadata__"  # what safetensors keep of a file under this name is no tensor


class SavedColumn(msgspec.Struct):
    """How a field lies in its file. `ragged`: the dimension of a jagged one that differs, counted with the rows."""

    name: str
    kind: Kind
    ragged: int = 0
    schema: FieldSchema | None = None


def packed(name: str, column: Any, num_rows: int, allow_pickle: bool, into: Tensors) -> SavedColumn:
    """Add the tensors of a column to those of its file. `UnsupportedValue` where they could not be read again."""
    found = _packed(name, column, num_rows, allow_pickle, into)
    try:
        unpacked(found, into, num_rows, allow_pickle)
    except CheckpointCorrupt as error:
        raise UnsupportedValue(f"it could not be read again once it is saved: {error}") from None
    return found


def _packed(name: str, column: Any, num_rows: int, allow_pickle: bool, into: Tensors) -> SavedColumn:
    if isinstance(column, torch.Tensor) and column.dtype in PORTABLE and name != HEADER:
        if not column.is_nested:
            _add(into, name, column.contiguous())
            return SavedColumn(name, "dense")
        if column.layout is torch.jagged and column._lengths is None:  # type: ignore[attr-defined]
            values, offsets = trimmed(column)
            _add(into, f"{name}:values", values.contiguous())
            _add(into, f"{name}:offsets", offsets.to(torch.int64).contiguous())
            return SavedColumn(name, "jagged", int(column._ragged_idx))  # type: ignore[attr-defined]
    plan = plan_batch({name: column}, num_rows, allow_pickle)
    data = np.empty(max(1, plan.nbytes), np.uint8)
    plan.write(data, Mover(1))
    _add(into, f"{name}:block", torch.from_numpy(data))
    _add(into, f"{name}:layout", torch.frombuffer(bytearray(plan.layout()), dtype=torch.uint8))
    return SavedColumn(name, "block", schema=plan.schema()[0])


def _add(into: Tensors, name: str, tensor: torch.Tensor) -> None:
    if name in into:
        raise UnsupportedValue(f"fields whose names differ only in a part after a colon cannot be saved: {name!r}")
    memory = tensor.untyped_storage().data_ptr()
    if any(memory == other.untyped_storage().data_ptr() for other in into.values()):
        tensor = (
            tensor.clone()
        )  # safetensors refuse what lies in one memory, as the offsets of rows of equal lengths do
    into[name] = tensor


def unpacked(column: SavedColumn, tensors: Mapping[str, torch.Tensor], num_rows: int, allow_pickle: bool) -> Any:
    """The column that was packed. Raises `CheckpointCorrupt` for tensors that are not those of such a column."""
    try:
        found = _unpacked(column, tensors, num_rows, allow_pickle)
    except (*DAMAGED, KeyError, IndexError) as error:
        raise CheckpointCorrupt(f"field {column.name!r} is damaged: {error!r}") from None
    count = found.size(0) if isinstance(found, torch.Tensor) else len(found)  # a strided nested tensor has no len
    if count != num_rows:
        raise CheckpointCorrupt(f"field {column.name!r} has {count} rows, its batch {num_rows}")
    return found


def _unpacked(column: SavedColumn, tensors: Mapping[str, torch.Tensor], num_rows: int, allow_pickle: bool) -> Any:
    name = column.name
    if column.kind == "dense":
        return tensors[name]
    if column.kind == "jagged":
        return jagged(tensors[f"{name}:values"], Offsets.of(tensors[f"{name}:offsets"].numpy()), column.ragged)
    layout = decode_layout(tensors[f"{name}:layout"].numpy().tobytes())
    block = BlockBytes(tensors[f"{name}:block"].numpy(), layout, 0)
    assert column.schema is not None
    return Assembler(Copier(), allow_pickle).field(column.schema, [(block, 0, num_rows)])
