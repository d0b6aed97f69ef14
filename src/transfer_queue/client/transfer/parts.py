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
                        runs.append((block, np.arange(first, first + count), how))
        values, marks = sliced(name, runs, copier)
        shape = part.shape(schema.shape)
        flat = typed(values, torch_dtype(_dtype(name, [block for block, _, _ in runs])), (int(marks[-1]), *shape[1:]))
        is_plain = plain and schema.kind == DENSE
        found[name] = flat.view(len(marks) - 1, *shape) if is_plain else jagged(flat, Offsets.of(marks), 1)
    return found


def _schema(name: str, replies: Sequence[LocatedRows]) -> FieldSchema:
    schemas = [field for one in replies for field in one.reply.schema if field.name == name]
    return reduce(FieldSchema.merged, schemas)


def _dtype(name: str, blocks: Sequence[BlockBytes]) -> str:
    """That of the rows. Other rows of the field may have another, where these or those are Python's ints."""
    dtypes = {column.dtype for block in blocks if (column := block.layout.column(name)) is not None}
    if len(dtypes) > 1:
        raise SchemaConflict(f"field {name!r} has rows of {' and '.join(sorted(dtypes))}: read these without slices")
    return dtypes.pop()
