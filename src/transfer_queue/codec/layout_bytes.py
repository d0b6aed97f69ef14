"""Layouts as bytes.

The layout of a row that was put alone is a template, which rows like it share, and the numbers in which they differ: so
a reader of many such rows has one template and a matrix. Any other layout is msgpack of `Layout`.

    head: 0xC1 (no msgpack begins so), bytes of a number (4 or 8), bytes of the template
    template: msgpack of `ColumnTemplate`s
    numbers: nbytes of the block; then the shape and the parts, each (offset, nbytes), of every column
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np

from transfer_queue.codec.layout import Column, Layout, check_layout
from transfer_queue.errors import ProtocolError
from transfer_queue.memory.bytes import Ints

MARK = 0xC1
HEAD = struct.Struct("<BBxxI")
MOST_PARTS = 6
_LETTERS = {4: "i", 8: "q"}
_DAMAGED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


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
            if column.num_dims < 0 or not 0 <= column.num_parts <= MOST_PARTS:
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
        layout = _of_one_row(data) if data[:1] == b"\xc1" else _decode(data)
    except _DAMAGED as error:
        raise ProtocolError(f"not a layout: {error}") from None
    check_layout(layout)
    return layout


def _of_one_row(data: bytes) -> Layout:
    head = _head(data)
    template = _template(head)
    return template.filled(template.read(data, len(head)))


def sizes_of(layouts: Sequence[bytes]) -> tuple[Template, Ints] | None:
    """The template of all these rows, and their numbers (n, `size`), of which nothing is checked; None where they have
    several templates, or are not of rows that were put alone."""
    first = layouts[0]
    if first[:1] != b"\xc1":
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
    except _DAMAGED as error:
        raise ProtocolError(f"not a layout: {error}") from None
