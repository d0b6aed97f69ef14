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

As bytes a layout is msgpack; but that of a row that was put alone is a template, which rows like it share, and the
numbers in which they differ, so that a reader of many such rows has one template and a matrix:

    head: 0xC1 (no msgpack begins so), bytes of a number (4 or 8), bytes of the template
    template: msgpack of `ColumnTemplate`s
    numbers: nbytes of the block; then the shape and the parts, each (offset, nbytes), of every column
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from transfer_queue.errors import ProtocolError
from transfer_queue.memory.bytes import Ints
from transfer_queue.schema import DENSE, NESTED, OBJECTS, RAGGED, VARIED, FieldSchema

ALIGN = 64
MAX_ELEMENTS = 1 << 56  # in bytes of the widest dtype still a 64-bit number
MAX_DIMS = 64
MAX_ITEMSIZE = 32
MOST_PARTS = 6
MARK = b"\xc1"
HEAD = struct.Struct("<cBxxI")
_LETTERS = {4: "i", 8: "q"}
DAMAGED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
NUM_PARTS = {DENSE: (1,), RAGGED: (2,), VARIED: (3,), OBJECTS: (2, 6), NESTED: (0,)}


class CellKind(NamedTuple):
    """What a get of rows needs to be the same to return each as it was put. `kind`: "" for all tensors."""

    name: str
    kind: str
    num_dims: int = 0
    dtype: str = ""
    weak: bool = False
    children: tuple[CellKind, ...] = ()


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

    def cells(self) -> CellKind:
        """What its rows have in common, however long they are."""
        if self.kind == OBJECTS:
            return CellKind(self.name, OBJECTS)
        if self.kind == NESTED:
            children = tuple(sorted(child.cells() for child in self.children))
            return CellKind(self.name, NESTED, len(self.shape), children=children)
        return CellKind(self.name, "", len(self.shape), self.dtype, self.weak)

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
        if len(column.parts) != 1 or not 0 < column.itemsize <= MAX_ITEMSIZE or len(column.shape) > MAX_DIMS:
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
    if column.kind in (DENSE, RAGGED, VARIED) and not 0 < column.itemsize <= MAX_ITEMSIZE:
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


class ColumnTemplate(msgspec.Struct, array_like=True, gc=False):
    """A `Column` without its numbers. None has columns inside."""

    name: str
    kind: str
    dtype: str
    itemsize: int
    num_dims: int
    ragged: int
    num_parts: int
    weak: bool


class Template:
    """`places`: each column, and where its numbers begin. `size`: how many there are in all, of `width` bytes each."""

    def __init__(self, columns: list[ColumnTemplate], width: int) -> None:
        self.places: dict[str, tuple[ColumnTemplate, int]] = {}
        self.size = 1
        self.width = width
        for column in columns:
            if not 0 <= column.num_dims <= MAX_DIMS or not 0 <= column.num_parts <= MOST_PARTS:
                raise ProtocolError(f"column {column.name!r}: {column.num_dims} dimensions, {column.num_parts} parts")
            self.places[column.name] = column, self.size
            self.size += column.num_dims + 2 * column.num_parts
        self._numbers = struct.Struct(f"<{self.size}{_LETTERS[width]}")

    def filled(self, numbers: Sequence[int]) -> Layout:
        columns = []
        for one, at in self.places.values():
            first = at + one.num_dims
            parts = [(numbers[k], numbers[k + 1]) for k in range(first, first + 2 * one.num_parts, 2)]
            shape = tuple(numbers[at:first])
            columns.append(Column(one.name, one.kind, one.dtype, one.itemsize, shape, one.ragged, parts, [], one.weak))
        return Layout(1, numbers[0], columns)

    def read(self, data: bytes, start: int) -> tuple[int, ...]:
        """The numbers in `data` from `start` to its end."""
        if len(data) != start + self._numbers.size:
            raise ProtocolError(f"not a layout: {len(data) - start} bytes of numbers")
        return self._numbers.unpack_from(data, start)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Layout).decode
_decode_template = msgspec.msgpack.Decoder(list[ColumnTemplate]).decode


def encode_layout(layout: Layout) -> bytes:
    if layout.rows != 1 or any(column.children for column in layout.columns):
        return _encode(layout)
    template = _encode(
        [(c.name, c.kind, c.dtype, c.itemsize, len(c.shape), c.ragged, len(c.parts), c.weak) for c in layout.columns]
    )
    numbers = [layout.nbytes]
    for column in layout.columns:
        numbers += column.shape
        for part in column.parts:
            numbers += part
    try:
        return HEAD.pack(MARK, 4, len(template)) + template + struct.pack(f"<{len(numbers)}i", *numbers)
    except struct.error:  # a block of more than 2 GiB
        return HEAD.pack(MARK, 8, len(template)) + template + struct.pack(f"<{len(numbers)}q", *numbers)


@lru_cache(maxsize=4096)
def decode_layout(data: bytes) -> Layout:
    """The layout in `data`, with every part inside the block and of the size its kind needs, or `ProtocolError`.

    Cached: the result is shared and must not be changed.
    """
    try:
        layout = _of_one_row(data) if data[:1] == MARK else _decode(data)
    except DAMAGED as error:
        raise ProtocolError(f"not a layout: {error}") from None
    check_layout(layout)
    return layout


def _of_one_row(data: bytes) -> Layout:
    head = _head(data)
    template = _template(head)
    return template.filled(template.read(data, len(head)))


def template_of(layout: bytes) -> bytes | None:
    """What the layouts of rows alike begin with; None for any but that of a row that was put alone."""
    return _head(layout) if layout[:1] == MARK else None


def sizes_of(layouts: Sequence[bytes]) -> tuple[Template, Ints] | None:
    """The template of all these rows, and their numbers (n, `size`), of which nothing is checked; None where they have
    several templates, or are not of rows that were put alone."""
    first = layouts[0]
    if first[:1] != MARK:
        return None
    head, size = _head(first), len(first)
    if not all(one.startswith(head) and len(one) == size for one in layouts):
        return None
    template = _template(head)
    if size != len(head) + template.size * template.width:
        return None
    numbers = np.frombuffer(b"".join([one[len(head) :] for one in layouts]), f"<i{template.width}")
    return template, numbers.reshape(len(layouts), template.size).astype(np.int64)


def _head(data: bytes) -> bytes:
    """The part of a row's layout that is the same for rows like it."""
    if len(data) < HEAD.size:
        raise ProtocolError(f"not a layout: {len(data)} bytes")
    _, _, nbytes = HEAD.unpack_from(data)
    return data[: HEAD.size + nbytes]


@lru_cache(maxsize=1024)
def _template(head: bytes) -> Template:
    _, width, _ = HEAD.unpack_from(head)
    if width not in _LETTERS:
        raise ProtocolError(f"not a layout: numbers of {width} bytes")
    try:
        return Template(_decode_template(head[HEAD.size :]), width)
    except DAMAGED as error:
        raise ProtocolError(f"not a layout: {error}") from None


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
