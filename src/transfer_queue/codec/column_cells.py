"""The cells of a column that is about to be put, as bytes, and which of them are the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from transfer_queue.codec.arrays import BufferWriter, Source
from transfer_queue.codec.cells import Cell, are_same, print_of, tensor_tag
from transfer_queue.codec.columns import rows_of
from transfer_queue.codec.dtypes import dtype_name
from transfer_queue.codec.layout import Column
from transfer_queue.codec.values import pack
from transfer_queue.memory.bytes import Bytes, Ints
from transfer_queue.schema import DENSE, OBJECTS, RAGGED

MIN_NBYTES = 64 << 10  # smaller cells are not worth the look


class DistinctCells(NamedTuple):
    """The cells of a column, each once. `values`: the rows themselves; `numbers` (n,): which one each row has."""

    cells: list[Cell]
    values: list[Any]
    prints: list[bytes]
    numbers: Ints


def may_share(column: Column, rows: int) -> bool:
    """Whether some cells of a planned column are large enough, and of a kind that can be compared."""
    nbytes = sum(size for _, size in column.parts)
    if column.kind == OBJECTS:
        return len(column.parts) == 6 and nbytes >= MIN_NBYTES
    return (column.kind == DENSE or (column.kind == RAGGED and column.ragged == 0)) and nbytes >= rows * MIN_NBYTES


def distinct_cells(value: Any, column: Column, rows: int, allow_pickle: bool) -> DistinctCells | None:
    """The distinct cells of `value`, which was planned as `column`; None where all of them are small.

    Reads all of the bytes of cells that seem to be the same, and 4 KiB of others.
    """
    if isinstance(value, TensorDictBase) and column.kind != OBJECTS:
        return None
    if column.kind == OBJECTS:
        values = rows_of(value, rows)
        cells = _objects(values, allow_pickle)
    else:
        values = [_as_tensor(row, column) for row in rows_of(value)]
        cells = [Cell(tensor_tag(dtype_name(row.dtype), tuple(row.shape)), [_bytes(row)]) for row in values]
    if max(cell.nbytes for cell in cells) < MIN_NBYTES:
        return None
    by_place: dict[Any, int] = {}
    by_print: dict[bytes, list[int]] = {}
    kept: list[int] = []
    prints: list[bytes] = []
    numbers = np.empty(len(cells), np.int64)
    for row, cell in enumerate(cells):
        place = (cell.tag, *((buffer.ctypes.data, len(buffer)) for buffer in cell.buffers))
        number = by_place.get(place)
        if number is None:
            name = print_of(cell)
            alike = by_print.setdefault(name, [])
            number = next((one for one in alike if are_same(cells[kept[one]], cell)), None)
            if number is None:
                number = len(kept)
                alike.append(number)
                kept.append(row)
                prints.append(name)
            by_place[place] = number
        numbers[row] = number
    return DistinctCells([cells[row] for row in kept], [values[row] for row in kept], prints, numbers)


def _as_tensor(row: Any, column: Column) -> torch.Tensor:
    """A row of a tensor column: a tensor, an array, or a list of numbers."""
    if isinstance(row, torch.Tensor):
        return row.detach()
    lies = isinstance(row, np.ndarray) and row.flags.writeable and min(row.strides, default=0) >= 0
    return torch.from_numpy(row if lies else np.array(row, column.dtype))


def _objects(values: list[Any], allow_pickle: bool) -> list[Cell]:
    buffers = BufferWriter()
    lying: dict[int, Bytes] = {}
    cells = []
    for value in values:
        start = len(buffers.refs)
        message = pack(value, buffers, allow_pickle)
        buffers.end_row()
        for ref in buffers.refs[start:]:
            if ref not in lying:
                lying[ref] = _bytes(buffers.sources[ref])
        cells.append(Cell(message, [lying[ref] for ref in buffers.refs[start:]]))
    return cells


def _bytes(source: Source) -> Bytes:
    """Its bytes, where it lies where that can be."""
    if isinstance(source, np.ndarray):
        return np.ascontiguousarray(source).reshape(-1).view(np.uint8)
    plain = source.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
