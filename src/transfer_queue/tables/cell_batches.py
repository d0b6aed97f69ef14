"""The cells of listed rows, so many rows at a time as a bound of bytes allows.

Rows that were cleared since they were listed are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from tensordict import TensorDict

from transfer_queue.client.drivers import run
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.read import read
from transfer_queue.codec.columns import rows_of
from transfer_queue.codec.described import DESCRIPTIONS
from transfer_queue.codec.dtypes import torch_dtype
from transfer_queue.errors import RowCleared, SchemaConflict
from transfer_queue.memory.bytes import Ints
from transfer_queue.schema import FieldSchema
from transfer_queue.tables import columns, texts
from transfer_queue.tables.row_listing import Flags, RowListing
from transfer_queue.wire import messages as m

BATCH_ROWS, BATCH_NBYTES = 65536, 32 << 20
PROBE_ROWS = 16  # of fields whose rows may have any size: the first ones say how large the others may be
GROWTH = 16  # a batch has at most so many times the rows of the one before


class FieldColumn(NamedTuple):
    """A field to read. `as_bytes` and `max_chars` are about values that are no numbers."""

    schema: FieldSchema
    as_bytes: bool
    max_chars: int | None


class CellBatch(NamedTuple):
    """`positions` are those of the rows in the listing; `keys` None where they were not asked for."""

    positions: Ints
    keys: list[str | None] | None
    arrays: list[pa.Array]


class CellBatches:
    """The cells of the rows of a listing; `fields` in their order, and keys where `with_keys`."""

    def __init__(self, session: Session, listing: RowListing, fields: Sequence[FieldColumn], with_keys: bool) -> None:
        self._session = session
        self._listing = listing
        self._fields = list(fields)
        self._with_keys = with_keys

    def __iter__(self) -> Iterator[CellBatch]:
        names = [field.schema.name for field in self._fields]
        written = self._listing.written(names)
        at, step = 0, self._first_step()
        while at < len(self._listing):
            positions = np.arange(at, min(at + step, len(self._listing)))
            batch, nbytes = self._whole(positions, written)
            at += len(positions)
            if len(batch.positions):
                yield batch
                fitting = int(BATCH_NBYTES * len(batch.positions) / max(1, nbytes))
                step = max(1, min(fitting, BATCH_ROWS, step * GROWTH))

    def _first_step(self) -> int:
        sizes = [_row_nbytes(field.schema) for field in self._fields]
        known = [size for size in sizes if size is not None]
        fitting = BATCH_NBYTES // max(1, sum(known))
        return max(1, min(fitting, BATCH_ROWS if len(known) == len(sizes) else PROBE_ROWS))

    def _whole(self, positions: Ints, written: Flags) -> tuple[CellBatch, int]:
        """These rows, without those that were cleared, and how many bytes they have."""
        while True:
            rows = self._listing.rows[positions]
            keys = self._listing.keys(rows) if self._with_keys else None
            try:
                arrays, nbytes = self._cells(rows, written[positions])
            except RowCleared:
                is_alive = self._listing.alive(rows)
                if is_alive.all():
                    raise  # it was about other rows
                positions = positions[is_alive]
                continue
            if not written[positions].any(axis=1).all():  # rows of which no cell was read, which would tell
                is_alive = self._listing.alive(rows)
                positions = positions[is_alive]
                keys = None if keys is None else [key for key, has in zip(keys, is_alive, strict=True) if has]
                arrays = [array.filter(pa.array(is_alive)) for array in arrays]
            return CellBatch(positions, keys, arrays), nbytes

    def _cells(self, rows: Ints, written: Flags) -> tuple[list[pa.Array], int]:
        """The columns of rows, and how many bytes they have."""
        found = [pa.nulls(len(rows), columns.type_of(field.schema, field.as_bytes)) for field in self._fields]
        nbytes = 0
        for places, numbers in self._groups(written):
            data = self._read(rows[places], [self._fields[number].schema.name for number in numbers])
            for number in numbers:
                schema = self._fields[number].schema
                array = columns.numbers(schema, data[schema.name], len(places))
                nbytes += array.nbytes
                found[number] = columns.spread(array, places, len(rows))
        for number, (schema, as_bytes, max_chars) in enumerate(self._fields):
            places = np.flatnonzero(written[:, number])
            if len(places) and not columns.is_numeric(schema):
                values = self._values(rows[places], schema.name)
                nbytes += sum(map(texts.nbytes_of, values))
                found[number] = columns.spread(columns.others(values, as_bytes, max_chars), places, len(rows))
        return found, nbytes

    def _groups(self, written: Flags) -> list[tuple[Ints, list[int]]]:
        """(places of rows, fields of numbers) that are read together: fields that the same rows have."""
        groups: dict[bytes, tuple[Ints, list[int]]] = {}
        for number, field in enumerate(self._fields):
            flags = written[:, number]
            if columns.is_numeric(field.schema) and flags.any():
                groups.setdefault(flags.tobytes(), (np.flatnonzero(flags), []))[1].append(number)
        return list(groups.values())

    def _read(self, rows: Ints, names: list[str]) -> TensorDict:
        partition = self._listing.partition_id
        request = m.Get(self._session.next_rid(), partition, None, rows.tobytes(), names, True)
        return run(self._session, read(self._session, [request], decoding=DESCRIPTIONS))

    def _values(self, rows: Ints, name: str) -> list[Any]:
        """The rows of a field one by one. Those that no column can have together are read in halves."""
        try:
            return rows_of(self._read(rows, [name])[name])
        except SchemaConflict:
            if len(rows) == 1:
                raise
            half = len(rows) // 2
            return self._values(rows[:half], name) + self._values(rows[half:], name)


def _row_nbytes(field: FieldSchema) -> int | None:
    """The bytes of a row where all rows have the same number."""
    if not columns.is_numeric(field) or -1 in field.shape:
        return None
    return math.prod(field.shape) * torch_dtype(field.dtype).itemsize
