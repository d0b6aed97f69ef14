"""Rows of one field that were put as different things: by kind, rank or dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from transfer_queue.codec.dtypes import torch_dtype
from transfer_queue.codec.layout import Column, offsets_of
from transfer_queue.codec.nested import Offsets, jagged, nested
from transfer_queue.codec.rows import Run
from transfer_queue.errors import SchemaConflict
from transfer_queue.schema import INTEGERS, NESTED, NUMBERS, OBJECTS

MAX_NAMED = 4


def are_alike(columns: Sequence[Column]) -> bool:
    """Whether the rows are of one kind, and of one rank where they are tensors."""
    if len(columns) == 1:
        return True
    return len({(column.kind in (OBJECTS, NESTED) and column.kind, len(column.shape)) for column in columns}) == 1


def common_dtype(columns: Sequence[Column], converts: bool = True) -> str | None:
    """The dtype of rows that are tensors; None where there are several.

    Python's ints take that of other numbers, and with `converts` whole numbers that of the floats beside them, where
    there is one: `widened` sees to it that none changes.
    """
    if len(columns) == 1:
        return columns[0].dtype
    dtypes = {column.dtype for column in columns if not column.weak} or {columns[0].dtype}
    if len(dtypes) == 1:
        return dtypes.pop() if dtypes <= NUMBERS or not any(column.weak for column in columns) else None
    floats = dtypes - INTEGERS
    return floats.pop() if converts and len(floats) == 1 and floats <= NUMBERS else None


def several_dtypes(runs: Sequence[Run], name_row: Callable[[int], str]) -> SchemaConflict:
    """The error that names rows and dtypes."""
    found = _rows_by_dtype(runs, name_row)
    return SchemaConflict(f"field {runs[0].column.name!r} has rows of several dtypes, get them one by one: {found}")


def does_not_fit(runs: Sequence[Run], row: int, dtype: str, name_row: Callable[[int], str]) -> SchemaConflict:
    """The error that names a row whose whole numbers are none of `dtype`, and what the others are."""
    found = _rows_by_dtype(runs, name_row)
    return SchemaConflict(
        f"field {runs[0].column.name!r}: an integer of {name_row(row)} does not fit into {dtype}, get it alone: {found}"
    )


def _rows_by_dtype(runs: Sequence[Run], name_row: Callable[[int], str]) -> str:
    rows: dict[str, list[str]] = {}
    start = 0
    for run in runs:
        names = rows.setdefault(run.column.dtype, [])
        names += [name_row(start + row) for row in range(min(run.rows, MAX_NAMED + 1))]
        start += run.rows
    return "; ".join(f"{dtype} in {_listed(names)}" for dtype, names in rows.items())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")


def widened(rows: Sequence[torch.Tensor], dtype: str) -> list[torch.Tensor] | int:
    """Whole numbers as `dtype`; the first row where that is another number."""
    wide = torch_dtype(dtype)
    found = [row.to(wide) for row in rows]
    changed = (at for at, row in enumerate(rows) if row.dtype != wide and not _is_exact(found[at], row))
    first = next(changed, None)
    return found if first is None else first


def _is_exact(wide: torch.Tensor, row: torch.Tensor) -> bool:
    """What is infinite, or above all integers, becomes some integer again: which one depends on the processor."""
    in_range = wide.isfinite().all() and (wide.double() < torch.iinfo(row.dtype).max + 1).all()
    return bool(in_range) and torch.equal(wide.to(row.dtype), row)


def are_tensors(rows: Sequence[Any]) -> bool:
    """Whether the rows, put among other things, are tensors that make one tensor column."""
    if type(rows[0]) is not torch.Tensor or not all(type(row) is torch.Tensor for row in rows):
        return False
    if any(row.is_nested for row in rows):
        return False  # strided ones are of that type, too; each is many rows of its own
    return len({(row.dtype, row.dim()) for row in rows}) == 1


def joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Row tensors of one dtype and rank as the column that a get returns."""
    if not rows[0].dim():
        return torch.stack(list(rows))
    sizes = list(zip(*(row.shape for row in rows), strict=True))
    differing = [dim for dim, at in enumerate(sizes) if len(set(at)) > 1] or [0]
    if len(differing) == 1:
        dim = differing[0]
        return jagged(torch.cat(list(rows), dim=dim), Offsets.of(offsets_of(sizes[dim])), dim + 1)
    values = torch.cat([row.reshape(-1) for row in rows])
    shapes = torch.tensor([row.shape for row in rows], device="cpu")
    steps = torch.tensor([torch.empty(row.shape, device="meta").stride() for row in rows], device="cpu")
    lengths = torch.tensor([row.numel() for row in rows], device="cpu")
    return nested(values, shapes, steps, lengths.cumsum(0) - lengths)
