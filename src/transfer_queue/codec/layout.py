"""Where the columns of a block lie.

A block holds the rows of one put, column after column, each part 64-byte aligned. The parts of a column by kind:

| kind | parts |
|---|---|
| dense | values: rows x shape |
| ragged | values: the rows joined along dimension `ragged`; offsets: int64 (rows + 1), in units of that dimension |
| varied | values: the rows flattened and joined; offsets: int64 (rows + 1) in elements; shapes: int64 (rows, ndim) |
| objects | data: msgpack of each row; offsets: int64 (rows + 1) in bytes; with buffers also the four named below |
| nested | none: the columns of the TensorDict are its children |

Buffers of an objects column: ref_offsets int64 (rows + 1) into refs; refs int64, buffer numbers; spans int64
(buffers, 2) of (start, nbytes) in heap; heap, the bytes.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from transfer_queue.errors import ProtocolError
from transfer_queue.memory.bytes import Ints
from transfer_queue.schema import DENSE, NESTED, OBJECTS, RAGGED, VARIED, FieldSchema

ALIGN = 64
MAX_ELEMENTS = 1 << 56  # in bytes of the widest dtype still a 64-bit number
MAX_DIMS = 64
NUM_PARTS = {DENSE: (1,), RAGGED: (2,), VARIED: (3,), OBJECTS: (2, 6), NESTED: (0,)}


class Column(msgspec.Struct, array_like=True, gc=False):
    """One column of a layout. `parts` are (offset, nbytes) in the block; `shape` is a row's, -1 where it differs.

    `weak` as in `FieldSchema`.
    """

    name: str
    kind: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    ragged: int
    parts: list[tuple[int, int]]
    children: list[Column]
    weak: bool = False

    def schema(self) -> FieldSchema:
        return FieldSchema(self.name, self.kind, self.dtype, self.shape, self.weak)

    def row_nbytes(self) -> int:
        """Bytes of one row (dense), or of one step along the ragged dimension (ragged)."""
        nbytes = self.itemsize
        for size in self.shape:
            if size >= 0:
                nbytes *= size
        return nbytes


class Layout(msgspec.Struct, array_like=True, dict=True):
    rows: int
    nbytes: int
    columns: list[Column]

    def column(self, name: str) -> Column | None:
        by_name: dict[str, Column] | None = self.__dict__.get("_by_name")
        if by_name is None:
            by_name = self.__dict__["_by_name"] = {column.name: column for column in self.columns}
        return by_name.get(name)


def check_layout(layout: Layout) -> None:
    """`ProtocolError` unless every part is inside the block and of the size its kind needs."""
    if not 0 <= layout.rows < MAX_ELEMENTS or layout.nbytes < 0:
        raise ProtocolError(f"layout of {layout.rows} rows and {layout.nbytes} bytes")
    for column in layout.columns:
        if not _is_plain(column, layout):
            _check_column(column, layout)


def _is_plain(column: Column, layout: Layout) -> bool:
    """Whether this is a column of tensors of one shape, or of values without buffers, that `_check_column` takes. It is
    the same in a third of the time: each row that was put alone has a layout of its own."""
    if column.children or column.ragged != -1:
        return False
    rows = layout.rows
    if column.kind == OBJECTS:
        if len(column.parts) != 2 or column.shape or column.parts[1][1] != 8 * (rows + 1):
            return False
    elif column.kind == DENSE:
        if len(column.parts) != 1 or not 0 < column.itemsize <= 32 or len(column.shape) > MAX_DIMS:
            return False
        nbytes, elements = rows * column.itemsize, max(rows, 1)
        for size in column.shape:
            nbytes, elements = nbytes * size, elements * max(size, 1)
            if not 0 <= size <= MAX_ELEMENTS:
                return False
        if elements > MAX_ELEMENTS or column.parts[0][1] != nbytes:
            return False
    else:
        return False
    for offset, nbytes in column.parts:
        if offset < 0 or nbytes < 0 or offset % ALIGN or offset + nbytes > layout.nbytes:
            return False
    return True


def _check_column(column: Column, layout: Layout) -> None:
    where = f"column {column.name!r}"
    if len(column.parts) not in NUM_PARTS.get(column.kind, ()):
        raise ProtocolError(f"{where}: kind {column.kind!r} with {len(column.parts)} parts")
    for offset, nbytes in column.parts:
        if offset < 0 or nbytes < 0 or offset % ALIGN or offset + nbytes > layout.nbytes:
            raise ProtocolError(f"{where}: part at {offset} of {nbytes} bytes outside {layout.nbytes} bytes")
    if column.kind in (DENSE, RAGGED, VARIED) and not 0 < column.itemsize <= 32:
        raise ProtocolError(f"{where}: itemsize {column.itemsize}")
    if not _fits(column, layout.rows):
        raise ProtocolError(f"{where}: a {column.kind} column of row shape {column.shape}, dimension {column.ragged}")
    sizes = [nbytes for _, nbytes in column.parts]
    index_nbytes = 8 * (layout.rows + 1)
    if column.kind == DENSE and sizes[0] != layout.rows * column.row_nbytes():
        raise ProtocolError(f"{where}: {sizes[0]} bytes for {layout.rows} rows of {column.shape}")
    if column.kind == RAGGED and sizes[1] != index_nbytes:
        raise ProtocolError(f"{where}: offsets of the wrong size")
    if column.kind == VARIED and (sizes[1], sizes[2]) != (index_nbytes, 8 * layout.rows * len(column.shape)):
        raise ProtocolError(f"{where}: offsets or shapes of the wrong size")
    if column.kind == OBJECTS and (sizes[1] != index_nbytes or sizes[2:3] not in ([], [index_nbytes])):
        raise ProtocolError(f"{where}: offsets of the wrong size")
    if column.children and column.kind != NESTED:
        raise ProtocolError(f"{where}: a {column.kind} column has no columns inside")
    for child in column.children:
        _check_column(child, layout)


def _fits(column: Column, rows: int) -> bool:
    """Whether the row shape is one that the kind has, and of a size that arithmetic in 64 bits can hold."""
    shape = column.shape
    if len(shape) > MAX_DIMS or any(not -1 <= size <= MAX_ELEMENTS for size in shape):
        return False
    if max(rows, 1) * math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        return False
    differing = [d for d, size in enumerate(shape) if size == -1]
    if column.kind == RAGGED:
        return differing == [column.ragged]
    return column.ragged == -1 and (len(differing) > 1 if column.kind == VARIED else not differing)


class Builder:
    """Assigns aligned places to parts, one after the other."""

    def __init__(self) -> None:
        self.nbytes = 0

    def place(self, nbytes: int) -> tuple[int, int]:
        offset = self.nbytes
        self.nbytes = -(-(offset + nbytes) // ALIGN) * ALIGN
        return offset, nbytes


def offsets_of(lengths: ArrayLike) -> Ints:
    """Where rows of these lengths begin, one after the other from 0, and where the last one ends: (n + 1,)."""
    found = np.zeros(np.size(lengths) + 1, np.int64)
    np.cumsum(lengths, out=found[1:])
    return found


def checked_offsets(offsets: Ints, limit: int, what: str) -> Ints:
    """`offsets` (n + 1,), or `ProtocolError` unless they start at 0 or above, never fall and end within `limit`."""
    if len(offsets) and (offsets[0] < 0 or offsets[-1] > limit or bool((offsets[1:] < offsets[:-1]).any())):
        raise ProtocolError(f"{what}: offsets do not ascend within 0..{limit}")
    return offsets
