"""One cell as bytes: what tells it from others, however it lies. No torch.

Two cells are the same where their tags and all their buffers are. A tag has what a cell is besides the bytes of its
arrays: dtype and shape of a tensor, the message of an object. Cells of a batch and of a block are compared, and named
by digests, in this form.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import NamedTuple

import msgspec
from xxhash import xxh3_128

from transfer_queue.codec.layout import Column
from transfer_queue.codec.rows import BlockBytes, step_offsets
from transfer_queue.errors import ProtocolError
from transfer_queue.memory.bytes import Bytes, address_of
from transfer_queue.schema import DENSE, OBJECTS, RAGGED

SAMPLES, SAMPLE_NBYTES = 64, 64  # of a buffer that is larger, so much of it makes the print

_encode = msgspec.msgpack.Encoder().encode
_compare = ctypes.CDLL(None).memcmp
_compare.argtypes, _compare.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int


class Cell(NamedTuple):
    tag: bytes
    buffers: list[Bytes]

    @property
    def nbytes(self) -> int:
        return len(self.tag) + sum(map(len, self.buffers))


def tensor_tag(dtype: str, shape: tuple[int, ...]) -> bytes:
    return _encode((dtype, shape))


def print_of(cell: Cell) -> bytes:
    """16 bytes that are the same for the same cells, and seldom for others. It reads 4 KiB of a large buffer."""
    found = xxh3_128(cell.tag)
    for buffer in cell.buffers:
        found.update(len(buffer).to_bytes(8, "little"))
        step = len(buffer) // SAMPLES
        if step <= SAMPLE_NBYTES:
            found.update(memoryview(buffer))  # type: ignore[arg-type]
            continue
        samples = buffer[: SAMPLES * step].reshape(SAMPLES, step)[:, :SAMPLE_NBYTES]
        found.update(samples.tobytes())
        found.update(buffer[-SAMPLE_NBYTES:].tobytes())
    return found.digest()


def are_same(one: Cell, other: Cell) -> bool:
    """Ends with the first difference."""
    if one.tag != other.tag or len(one.buffers) != len(other.buffers):
        return False
    return all(map(_same_bytes, one.buffers, other.buffers))


def _same_bytes(one: Bytes, other: Bytes) -> bool:
    if len(one) != len(other):
        return False
    at, also = address_of(one), address_of(other)
    return at == also or not len(one) or _compare(at, also, len(one)) == 0


def digest_of(cell: Cell) -> bytes:
    """SHA-256 of all of it (FIPS 180-4): who has no way to compare the bytes trusts that others have another."""
    found = hashlib.sha256()
    for part in (cell.tag, *cell.buffers):
        found.update(len(part).to_bytes(8, "little"))
        found.update(memoryview(part))  # type: ignore[arg-type]
    return found.digest()


def cell_in(block: BlockBytes, column: Column, row: int) -> Cell | None:
    """The cell of a row that is there; None for a kind of column that has no cells of this form.

    Raises `ProtocolError` for a damaged block.
    """
    if column.kind == OBJECTS:
        return _object_in(block, column, row)
    if column.kind == DENSE:
        nbytes = column.row_nbytes()
        values = block.part(column, 0)[row * nbytes : (row + 1) * nbytes]
        return Cell(tensor_tag(column.dtype, column.shape), [values])
    if column.kind == RAGGED and column.ragged == 0:
        step = column.row_nbytes()
        values = block.part(column, 0)
        first, end = step_offsets(block, column, step)[row : row + 2].tolist()
        return Cell(tensor_tag(column.dtype, (end - first, *column.shape[1:])), [values[first * step : end * step]])
    return None


def _object_in(block: BlockBytes, column: Column, row: int) -> Cell:
    message = bytes(block.message(column, row))
    if len(column.parts) == 2:
        return Cell(message, [])
    ends, refs, spans, heap = block.buffers(column)
    numbers = refs[ends[row] : ends[row + 1]]
    return Cell(message, [heap[start : start + nbytes] for start, nbytes in spans[numbers].tolist()])


def checked_row(block: BlockBytes, row: int) -> int:
    if not 0 <= row < block.layout.rows:
        raise ProtocolError(f"row {row} of a block of {block.layout.rows}")
    return row
