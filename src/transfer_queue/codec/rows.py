"""Rows of blocks, selected and joined at the level of bytes. No torch.

A `BlockBytes` is the memory of one block with its layout. A selection is a list of runs (block, first row, count) in
result order. `gather_*` join the selected rows of a column; the result is a view of the block when the selection is one
run and the block allows it (zero-copy), and freshly allocated otherwise.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from transfer_queue.codec.layout import ALIGN, MAX_ELEMENTS, Column, Layout, checked_offsets, offsets_of
from transfer_queue.errors import ProtocolError
from transfer_queue.memory.bytes import Bytes, Ints, address_of
from transfer_queue.memory.copy import carry_out, moves_into
from transfer_queue.schema import DENSE, VARIED

PAIR = struct.Struct("<qq")
CHECK_SHARE = 256  # all offsets of a column are checked at once for a 256th of its rows: that costs as much as theirs
MANY = 8  # ragged runs from which on a plan of addresses is made: 24 instead of 90 µs at 8, 84 instead of 292 at 32


class BlockBytes:
    """The memory of one block. Views of parts of at least `view_nbytes` may be handed out (-1: none may).

    Raises `ProtocolError` when the layout needs more than there is.
    """

    def __init__(self, data: Bytes, layout: Layout, view_nbytes: int) -> None:
        if layout.nbytes > len(data):
            raise ProtocolError(f"a block of {len(data)} bytes with a layout of {layout.nbytes}")
        self.data = data  # uint8, at least layout.nbytes
        self.layout = layout
        self.view_nbytes = view_nbytes
        self._memory: memoryview | None = None
        self._checked: dict[tuple[int, int, int], Ints] = {}
        self._buffers: dict[int, ColumnBuffers] = {}

    @cached_property
    def address(self) -> int:
        return address_of(self.data)

    def part(self, column: Column, number: int) -> Bytes:
        offset, nbytes = column.parts[number]
        return self.data[offset : offset + nbytes]

    def message(self, column: Column, row: int) -> memoryview:
        """The data of one row, which is there, of an objects column; its two offsets are read once and checked."""
        if self._memory is None:
            self._memory = memoryview(self.data)  # type: ignore[arg-type]
        (start, nbytes), (offsets, _) = column.parts[:2]
        first, last = PAIR.unpack_from(self._memory, offsets + 8 * row)
        if not 0 <= first <= last <= nbytes:
            raise ProtocolError(f"column {column.name!r}: offsets do not ascend within 0..{nbytes}")
        return self._memory[start + first : start + last]

    def messages(self, column: Column, rows: Ints) -> list[memoryview]:
        """The data of these rows, which are there, of an objects column."""
        if len(rows) * CHECK_SHARE < self.layout.rows:
            return [self.message(column, row) for row in rows.tolist()]
        data = self.part(column, 0)
        offsets, memory = self.offsets(column, 1, len(data)), memoryview(data)  # type: ignore[arg-type]
        ends = offsets[rows + 1].tolist()
        return [memory[first:end] for first, end in zip(offsets[rows].tolist(), ends, strict=True)]

    def may_view(self, nbytes: int) -> bool:
        return 0 <= self.view_nbytes <= nbytes

    def ints(self, column: Column, number: int) -> Ints:
        part = self.part(column, number)
        if len(part) % 8:
            raise ProtocolError(f"column {column.name!r}: index part of {len(part)} bytes")
        return part.view(np.int64)

    def offsets(self, column: Column, number: int, limit: int) -> Ints:
        """An offsets part of rows + 1 entries, copied out and checked to ascend within 0..limit; read once."""
        place = (*column.parts[number], limit)
        found = self._checked.get(place)
        if found is None:
            found = checked_offsets(self.ints(column, number).copy(), limit, f"column {column.name!r}")
            self._checked[place] = found
        return found

    def buffers(self, column: Column) -> ColumnBuffers:
        """The buffers of an objects column that has some, checked; read once."""
        found = self._buffers.get(id(column))
        if found is None:
            found = self._buffers[id(column)] = _buffers(self, column)
        return found


class ColumnBuffers(NamedTuple):
    """Row `r` of an objects column refers to buffers `refs[ends[r] : ends[r + 1]]`; `spans` says where each lies."""

    ends: Ints
    refs: Ints
    spans: Ints  # (buffers, 2): start and nbytes in heap
    heap: Bytes


def _buffers(block: BlockBytes, column: Column) -> ColumnBuffers:
    refs, heap = block.ints(column, 3).copy(), block.part(column, 5)
    spans = block.ints(column, 4)
    if len(spans) % 2 or bool((spans < 0).any()) or bool((spans > len(heap)).any()):
        raise ProtocolError(f"column {column.name!r}: buffers outside their heap")
    spans = spans.reshape(-1, 2).copy()
    starts, ends = spans[:, 0], spans.sum(axis=1)
    if len(spans) and (ends[-1] > len(heap) or bool((ends[:-1] > starts[1:]).any()) or bool((starts % ALIGN).any())):
        raise ProtocolError(f"column {column.name!r}: buffers overlap or lie outside their heap")
    if bool((refs < 0).any()) or bool((refs >= len(spans)).any()):
        raise ProtocolError(f"column {column.name!r}: a row refers to a buffer that is not there")
    return ColumnBuffers(block.offsets(column, 2, len(refs)), refs, spans, heap)


class Run(NamedTuple):
    block: BlockBytes
    column: Column
    start: int
    rows: int


class Copier(NamedTuple):
    """Where joined rows get their memory, and how bytes are copied into it: by the end of `settle`. `collect` is
    `Copies.collect`."""

    allocate: Callable[[int], Bytes] = lambda nbytes: np.empty(nbytes, np.uint8)
    copy: Callable[[Bytes, Bytes], None] = np.copyto
    take: Callable[[Bytes, Bytes, Ints], None] = lambda into, source, rows: _take(into, source, rows)
    collect: Callable[[Bytes, Sequence[int], Sequence[int], object], None] = lambda into, sources, sizes, owners: (
        carry_out(moves_into(into, sources, sizes), ())
    )
    settle: Callable[[], None] = lambda: None


def _take(into: Bytes, source: Bytes, rows: Ints) -> None:
    np.take(source, rows, axis=0, out=into, mode="clip")


def join(spans: Sequence[Bytes], copier: Copier, view: bool) -> Bytes:
    """The spans one after the other; the only span itself when `view` allows it."""
    if view and len(spans) == 1:
        return spans[0]
    out = copier.allocate(sum(len(span) for span in spans))
    at = 0
    for span in spans:
        copier.copy(out[at : at + len(span)], span)
        at += len(span)
    return out


def _viewable(runs: Sequence[Run], nbytes: int) -> bool:
    return len(runs) == 1 and runs[0].block.may_view(nbytes)


def gather_dense(runs: Sequence[Run], copier: Copier) -> Bytes:
    """Values of the rows, (rows x shape) as bytes. All columns are dense and of one shape."""
    spans = []
    for block, column, start, count in runs:
        row = column.row_nbytes()
        first = column.parts[0][0] + start * row
        spans.append(block.data[first : first + count * row])
    return join(spans, copier, _viewable(runs, len(spans[0])))


def take_dense(block: BlockBytes, column: Column, rows: Ints, copier: Copier) -> Bytes:
    """Values of scattered rows of one block, (rows x shape) as bytes, in one indexed copy. The column is dense."""
    row = column.row_nbytes()
    out = copier.allocate(len(rows) * row)
    if row:
        copier.take(out.reshape(-1, row), block.part(column, 0).reshape(-1, row), rows)
    return out


def take_ragged(block: BlockBytes, column: Column, rows: Ints, copier: Copier) -> tuple[Bytes, Ints]:
    """`gather_ragged` of scattered rows of one block. The column is ragged in its first dimension."""
    sources, lengths, step = row_places(block, column, rows)
    return collected(sources.tolist(), (lengths * step).tolist(), block, copier), offsets_of(lengths)


def row_places(block: BlockBytes, column: Column, rows: Ints) -> tuple[Ints, Ints, int]:
    """Of these rows, which are there: their addresses, their lengths along the first dimension, and the bytes of a step
    along it. The column is dense, or ragged in its first dimension; a row without dimensions is one step."""
    step = math.prod(column.shape[1:]) * column.itemsize
    start = block.address + column.parts[0][0]
    if column.kind == DENSE:
        length = column.shape[0] if column.shape else 1
        return start + rows * (length * step), np.full(len(rows), length), step
    offsets = step_offsets(block, column, step)
    first = offsets[rows]
    return start + first * step, offsets[rows + 1] - first, step


def step_offsets(block: BlockBytes, column: Column, step: int) -> Ints:
    """The offsets of a ragged column; `step` bytes along its ragged dimension fill its values."""
    nbytes = column.parts[0][1]
    sizes = math.prod(max(size, 1) for size in column.shape) * column.itemsize
    limit = nbytes // step if step else MAX_ELEMENTS // sizes
    offsets = block.offsets(column, 1, limit)
    if step * limit != (nbytes if step else 0):
        raise ProtocolError(f"column {column.name!r}: {nbytes} bytes of values")
    return offsets


def collected(sources: Sequence[int], sizes: Sequence[int], owners: object, copier: Copier) -> Bytes:
    """The bytes at these addresses, one after the other. `owners` keep them alive."""
    out = copier.allocate(sum(sizes))
    copier.collect(out, sources, sizes, owners)
    return out


def row_numbers(runs: Ints) -> Ints:
    """Row numbers of runs (k, 2) of (first row, number of rows)."""
    starts, counts = runs[:, 0], runs[:, 1]
    if len(runs) == 1:
        return np.arange(starts[0], starts[0] + counts[0])
    if counts.max(initial=0) <= 1:
        return starts.copy()
    ends = counts.cumsum()
    return np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)


def gather_ragged(runs: Sequence[Run], ragged: int, copier: Copier) -> tuple[Bytes, Ints]:
    """(values joined along dimension `ragged`, offsets starting at 0).

    The columns are ragged along that dimension, or dense, and agree in all other dimensions.
    """
    if not ragged and len(runs) >= MANY:
        return _gather_many(runs, copier)
    spans: list[Bytes] = []
    pieces = []
    for run in runs:
        span, piece = _steps(run, ragged)
        spans.append(span)
        pieces.append(piece)
    offsets = join_offsets(pieces)
    outer, _, step = spans[0].shape
    total = int(offsets[-1])
    if _viewable(runs, spans[0].nbytes) and spans[0].flags.c_contiguous:
        return spans[0].reshape(-1), offsets
    out = copier.allocate(outer * total * step)
    into = out.reshape(outer, total, step)
    at = 0
    for span in spans:
        copier.copy(into[:, at : at + span.shape[1]], span)
        at += span.shape[1]
    return out, offsets


def _gather_many(runs: Sequence[Run], copier: Copier) -> tuple[Bytes, Ints]:
    """`gather_ragged` along the first dimension, of runs so many that a few calls of NumPy for each would be most of
    the cost."""
    step = math.prod(runs[0].column.shape[1:]) * runs[0].column.itemsize
    sources, sizes = [], []
    lengths: list[int] = []
    for block, column, start, count in runs:
        if column.kind == DENSE:
            length = column.shape[0]
            first, last = start * length, (start + count) * length
            if count == 1:
                lengths.append(length)
            else:
                lengths += [length] * count
        else:
            if column.ragged:
                raise ProtocolError(f"column {column.name!r}: ragged dimension {column.ragged}, expected 0")
            marks = step_offsets(block, column, step)[start : start + count + 1].tolist()
            first, last = marks[0], marks[-1]
            lengths += [b - a for a, b in itertools.pairwise(marks)]
        sources.append(block.address + column.parts[0][0] + first * step)
        sizes.append((last - first) * step)
    return collected(sources, sizes, runs, copier), offsets_of(lengths)


def _steps(run: Run, ragged: int) -> tuple[Bytes, tuple[Ints, int, int]]:
    """The rows' values as (outer slices, steps along `ragged`, bytes of a step); their offsets for `join_offsets`."""
    block, column, start, count = run
    outer = math.prod(column.shape[:ragged])
    step = math.prod(column.shape[ragged + 1 :]) * column.itemsize
    values = block.part(column, 0)
    if column.kind == DENSE:
        length, row = column.shape[ragged], column.row_nbytes()
        lying = values[start * row : (start + count) * row].reshape(count, outer, length, step)
        steps = lying.transpose(1, 0, 2, 3).reshape(outer, count * length, step)
        return steps, (np.arange(count + 1) * length, 0, count)
    if column.ragged != ragged:
        raise ProtocolError(f"column {column.name!r}: ragged dimension {column.ragged}, expected {ragged}")
    offsets = step_offsets(block, column, outer * step)
    first, last = int(offsets[start]), int(offsets[start + count])
    if outer * step:
        return values.reshape(outer, -1, step)[:, first:last], (offsets, start, count)
    return np.empty((outer, last - first, step), np.uint8), (offsets, start, count)


def join_offsets(pieces: Sequence[tuple[Ints, int, int]]) -> Ints:
    """Offsets, from 0, of the rows `start .. start + count` of each (offsets, start, count)."""
    if len(pieces) == 1:
        offsets, start, count = pieces[0]
        found = offsets[start : start + count + 1]
        return found - found[0] if found[0] else found.copy()
    lengths = [offsets[s + 1 : s + n + 1] - offsets[s : s + n] for offsets, s, n in pieces]
    return offsets_of(np.concatenate(lengths))


def varied_parts(block: BlockBytes, column: Column) -> tuple[Bytes, Ints, Ints]:
    """(flattened values, offsets in elements, shapes (rows, ndim)) of a varied column, checked."""
    values = block.part(column, 0)
    offsets = block.offsets(column, 1, len(values) // column.itemsize)
    shapes = block.ints(column, 2).reshape(block.layout.rows, len(column.shape)).copy()
    if bool((shapes < 0).any()) or bool((np.maximum(shapes, 1).prod(axis=1, dtype=np.float64) > MAX_ELEMENTS).any()):
        raise ProtocolError(f"column {column.name!r}: impossible shapes")
    if not np.array_equal(shapes.prod(axis=1), np.diff(offsets)):
        raise ProtocolError(f"column {column.name!r}: shapes do not fit the offsets")
    return values, offsets, shapes


def gather_varied(runs: Sequence[Run], spans: Sequence[Bytes], copier: Copier) -> Bytes:
    """The flattened values of the rows one after the other, which `varied_spans` found."""
    return join(spans, copier, len(runs) == 1 and _viewable(runs, sum(map(len, spans))))


def varied_spans(runs: Sequence[Run]) -> tuple[list[Bytes], Ints]:
    """(where the values of the rows lie, in order; shapes (rows, ndim)), whatever kind the columns have."""
    spans: list[Bytes] = []
    shapes: list[Ints] = []
    known: dict[int, tuple[Bytes, Ints, Ints]] = {}  # by block
    for run in runs:
        block, column, start, count = run
        if column.kind == VARIED:
            if id(block) not in known:
                known[id(block)] = varied_parts(block, column)
            values, offsets, table = known[id(block)]
            size = column.itemsize
            spans.append(values[int(offsets[start]) * size : int(offsets[start + count]) * size])
            shapes.append(table[start : start + count])
            continue
        table = np.tile(np.array(column.shape, np.int64), (count, 1))
        if column.kind == DENSE:
            spans.append(gather_dense([run], Copier()))
        else:
            steps, piece = _steps(run, column.ragged)
            marks = join_offsets([piece])
            table[:, column.ragged] = np.diff(marks)
            spans += [steps[:, a:b].reshape(-1) for a, b in itertools.pairwise(marks.tolist())]
        shapes.append(table)
    return spans, np.concatenate(shapes)
