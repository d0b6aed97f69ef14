"""Parts of the rows of a tensor column: a range of tokens, or what one rank of several takes. No torch.

Only the bytes of the part are copied, and over a network only they are sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from transfer_queue.codec.layout import Column, offsets_of
from transfer_queue.codec.rows import BlockBytes, Copier, collected, row_places
from transfer_queue.errors import InvalidInput, ProtocolError
from transfer_queue.memory.bytes import Bytes, Ints
from transfer_queue.schema import DENSE, RAGGED, FieldSchema


class Slice(msgspec.Struct, array_like=True, frozen=True):
    """Which part of each row to read. `dim` counts in the row, so 0 is its tokens.

    Of a range, `row[start:stop]` as in Python, with `stop` None for the end. Of ranks, the part of rank `part` of
    `parts`: `row[L * part // parts : L * (part + 1) // parts]` of L tokens; with `zigzag`, L is cut in 2 * `parts`
    chunks in that way and the part has chunk `part` and then chunk `2 * parts - 1 - part`, as context parallelism with
    causal attention deals them (Megatron-LM).
    """

    start: int = 0
    stop: int | None = None
    dim: int = 0
    part: int = 0
    parts: int = 1
    zigzag: bool = False

    @classmethod
    def of_rank(cls, rank: int, world_size: int, *, dim: int = 0, zigzag: bool = False) -> Slice:
        """What rank `rank` of `world_size` takes."""
        return cls(0, None, dim, rank, world_size, zigzag)

    def check(self, schema: FieldSchema) -> None:
        """`InvalidInput` unless rows of this field have such parts."""
        where = f"field {schema.name!r}"
        numbers = (self.start, self.dim, self.part, self.parts, *([] if self.stop is None else [self.stop]))
        if not all(isinstance(one, (int, np.integer)) for one in numbers):
            raise InvalidInput(f"{where}: {self} has what is no int")
        if not 0 <= self.part < self.parts or self.parts > 1 << 20 or max(abs(self.start), abs(self.stop or 0)) >> 62:
            raise InvalidInput(f"{where}: {self}")
        if self.parts > 1 and (self.start or self.stop is not None):
            raise InvalidInput(f"{where}: a slice has a range or a part, not both")
        if schema.kind not in (DENSE, RAGGED) or -1 in schema.shape[1:]:
            text = "expected a field of tensors that differ in their first dimension alone, in all its rows"
            raise InvalidInput(f"{where} of kind {schema.kind!r} and shape {schema.shape} cannot be sliced: {text}")
        if not 0 <= self.dim < len(schema.shape):
            raise InvalidInput(f"{where}: dimension {self.dim} of rows of shape {schema.shape}")

    def ranges(self, lengths: Ints) -> list[tuple[Ints, Ints]]:
        """(first, the one after the last) of each range, for rows of these lengths along `dim`."""
        if self.parts == 1 and not self.zigzag:
            first = np.clip(self.start + (self.start < 0) * lengths, 0, lengths)
            stop = lengths if self.stop is None else np.clip(self.stop + (self.stop < 0) * lengths, 0, lengths)
            return [(first, np.maximum(first, stop))]
        if not self.zigzag:
            return [(lengths * self.part // self.parts, lengths * (self.part + 1) // self.parts)]
        chunks = (self.part, 2 * self.parts - 1 - self.part)
        return [(lengths * chunk // (2 * self.parts), lengths * (chunk + 1) // (2 * self.parts)) for chunk in chunks]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the parts of rows of `shape`; -1 where it differs."""
        if shape[self.dim] < 0:
            return shape
        size = sum(int(stop[0] - first[0]) for first, stop in self.ranges(np.array([shape[self.dim]])))
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])


Runs = Sequence[tuple[BlockBytes, Ints, Slice]]  # (block, its rows, which part), in result order


def sliced(name: str, runs: Runs, copier: Copier) -> tuple[Bytes, Ints]:
    """(values of the parts of all rows, offsets along their first dimension).

    Raises `ProtocolError` for a block without such a column, or of another kind.
    """
    sources, sizes, owners = [], [], []
    inner: list[Bytes] = []
    lengths: list[Ints] = []
    for block, rows, part in runs:
        column = block.layout.column(name)
        if column is None or column.kind not in (DENSE, RAGGED) or column.ragged > 0 or not column.shape:
            raise ProtocolError(f"column {name!r}: not of rows that can be sliced")
        if part.dim:
            taken, steps = _inner(block, column, rows, part)
            inner += taken
            lengths.append(steps)
            continue
        addresses, steps, step = row_places(block, column, rows)
        ranges = part.ranges(steps)
        starts = np.stack([addresses + first * step for first, _ in ranges], axis=1).ravel()
        counts = np.stack([stop - first for first, stop in ranges], axis=1)
        sources += starts.tolist()
        sizes += (counts.ravel() * step).tolist()
        lengths.append(counts.sum(axis=1))
        owners.append(block)
    values = _joined(inner, copier) if inner else collected(sources, sizes, owners, copier)
    return values, offsets_of(np.concatenate(lengths))


def _inner(block: BlockBytes, column: Column, rows: Ints, part: Slice) -> tuple[list[Bytes], Ints]:
    """(the part of each row, its length along the first dimension), of parts along another dimension than that."""
    addresses, steps, step = row_places(block, column, rows)
    size = column.shape[part.dim]
    inner = math.prod(column.shape[part.dim + 1 :]) * column.itemsize
    outer = math.prod(column.shape[1 : part.dim])
    base = block.address
    taken = []
    ranges = [(int(a[0]), int(b[0])) for a, b in part.ranges(np.array([size]))]
    for address, length in zip((addresses - base).tolist(), steps.tolist(), strict=True):
        row = block.data[address : address + length * step].reshape(length * outer, size, inner)
        found = [row[:, first:stop] for first, stop in ranges]
        taken.append(found[0] if len(found) == 1 else np.concatenate(found, axis=1))
    return taken, steps


def _joined(parts: Sequence[Bytes], copier: Copier) -> Bytes:
    """The bytes of all, one after the other; copied here, for `copier` would copy later, when nobody keeps them."""
    out = copier.allocate(sum(one.nbytes for one in parts))
    at = 0
    for one in parts:
        out[at : at + one.nbytes].reshape(one.shape)[...] = one
        at += one.nbytes
    return out


def sliced_column(name: str, column: Column, part: Slice) -> Column:
    """What a column is whose rows are such parts, but for its places: its rows may differ in their first dimension."""
    shape = (-1, *part.shape(column.shape)[1:])
    return msgspec.structs.replace(column, name=name, kind=RAGGED, shape=shape, ragged=0, parts=[], children=[])
