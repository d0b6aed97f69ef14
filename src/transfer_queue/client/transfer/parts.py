"""Fields of which only parts of the rows are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np
import torch

from transfer_queue.client.transfer.located import LocatedRows
from transfer_queue.codec.assemble import typed
from transfer_queue.codec.dtypes import torch_dtype
from transfer_queue.codec.nested import Offsets, jagged
from transfer_queue.codec.rows import BlockBytes, Copier
from transfer_queue.codec.slices import Slice, sliced
from transfer_queue.errors import SchemaConflict
from transfer_queue.memory.bytes import Ints
from transfer_queue.schema import DENSE, FieldSchema


def sliced_fields(
    slices: Mapping[str, Slice], replies: Sequence[LocatedRows], copier: Copier, plain: bool
) -> dict[str, torch.Tensor]:
    """The parts of the rows of all replies, one after the other, as jagged tensors in memory of the caller's own;
    `plain`: rows of one shape become a plain tensor. Raises `InvalidInput` for fields that have no such parts."""
    found = {}
    for name, part in slices.items():
        schema = _schema(name, replies)
        part.check(schema)
        rest = Slice(dim=part.dim)  # of rows that another server has cut
        runs: list[tuple[BlockBytes, Ints, Slice]] = []
        for one in replies:
            for section in one.reply.parts:
                if name in section.fields:
                    table = one.runs(section)
                    one.check(table)
                    for piece, first, count in table.tolist():
                        block, how = one.blocks[piece].gathered, rest if one.is_sliced(piece) else part
                        _check_dtype(block, schema)
                        runs.append((block, np.arange(first, first + count), how))
        values, marks = sliced(name, runs, copier)
        shape = part.shape(schema.shape)
        flat = typed(values, torch_dtype(schema.dtype), (int(marks[-1]), *shape[1:]))
        is_plain = plain and schema.kind == DENSE
        found[name] = flat.view(len(marks) - 1, *shape) if is_plain else jagged(flat, Offsets.of(marks), 1)
    return found


def _schema(name: str, replies: Sequence[LocatedRows]) -> FieldSchema:
    schemas = [field for one in replies for field in one.reply.schema if field.name == name]
    return reduce(FieldSchema.merged, schemas)


def _check_dtype(block: BlockBytes, schema: FieldSchema) -> None:
    column = block.layout.column(schema.name)
    if column is not None and column.dtype != schema.dtype:
        raise SchemaConflict(f"field {schema.name!r} has rows of {column.dtype} and {schema.dtype}")
