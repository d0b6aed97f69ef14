"""Rows of one field that were put as different things: by kind, rank or dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from transfer_queue.codec.dtypes import torch_dtype
from transfer_queue.codec.nested import Offsets, jagged, nested
from transfer_queue.codec.rows import Run
from transfer_queue.errors import SchemaConflict
from transfer_queue.schema import NESTED, NUMBERS, OBJECTS

MAX_NAMED = 4


def are_alike(runs: Sequence[Run]) -> bool:
    """Whether the rows are of one kind, and of one rank where they are tensors."""
    first = runs[0].column
    if len(runs) == 1 or all(run.column is first for run in runs):
        return True
    return len({(run.column.kind in (OBJECTS, NESTED) and run.column.kind, len(run.column.shape)) for run in runs}) == 1


def common_dtype(runs: Sequence[Run], name_row: Callable[[int], str]) -> str:
    """The dtype of rows that are tensors. Python's ints take that of the other numbers.

    Raises `SchemaConflict`, naming rows and dtypes, where there are several.
    """
    first = runs[0].column
    if len(runs) == 1:
        return first.dtype
    dtypes = {run.column.dtype for run in runs if not run.column.weak}
    if len(dtypes) == 1 and (dtypes <= NUMBERS or not any(run.column.weak for run in runs)):
        return dtypes.pop()
    if not dtypes:
        return first.dtype
    rows: dict[str, list[str]] = {}
    start = 0
    for run in runs:
        names = rows.setdefault(run.column.dtype, [])
        names += [name_row(start + row) for row in range(min(run.rows, MAX_NAMED + 1))]
        start += run.rows
    found = "; ".join(f"{dtype} in {_listed(names)}" for dtype, names in rows.items())
    raise SchemaConflict(f"field {first.name!r} has rows of several dtypes, get them one by one: {found}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")


def widened(rows: list[torch.Tensor], dtype: str, name: str, name_row: Callable[[int], str]) -> list[torch.Tensor]:
    """Integers as `dtype`; `SchemaConflict` where one of them would change."""
    wide = torch_dtype(dtype)
    found = []
    for number, row in enumerate(rows):
        if row.dtype == wide:
            found.append(row)
            continue
        found.append(row.to(wide))
        if not torch.equal(found[-1].to(row.dtype), row):
            raise SchemaConflict(f"field {name!r}: an integer of {name_row(number)} does not fit into {dtype}")
    return found


def are_tensors(rows: Sequence[Any]) -> bool:
    """Whether the rows, put among other things, are tensors that make one tensor column."""
    if type(rows[0]) is not torch.Tensor or not all(type(row) is torch.Tensor for row in rows):
        return False
    return len({(row.dtype, row.dim()) for row in rows}) == 1


def joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Row tensors of one dtype and rank as the column that a get returns."""
    if not rows[0].dim():
        return torch.stack(list(rows))
    sizes = list(zip(*(row.shape for row in rows), strict=True))
    differing = [dim for dim, at in enumerate(sizes) if len(set(at)) > 1] or [0]
    if len(differing) == 1:
        dim = differing[0]
        marks = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(sizes[dim], out=marks[1:])
        return jagged(torch.cat(list(rows), dim=dim), Offsets.of(marks), dim + 1)
    values = torch.cat([row.reshape(-1) for row in rows])
    shapes = torch.tensor([row.shape for row in rows])
    steps = torch.tensor([torch.empty(row.shape, device="meta").stride() for row in rows])
    lengths = torch.tensor([row.numel() for row in rows])
    return nested(values, shapes, steps, lengths.cumsum(0) - lengths)
