"""Requests that change nothing: where rows are, which are ready or consumed, what partitions and keys there are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transfer_queue.controller.fetch import row_set
from transfer_queue.controller.hints import left_out
from transfer_queue.controller.locate import located, located_alike
from transfer_queue.controller.readiness import Slots
from transfer_queue.controller.status import status, unknown
from transfer_queue.controller.table import Table, rows_bytes
from transfer_queue.errors import RowCleared, UnknownRows
from transfer_queue.names import hint, unknown_partition
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import indexes_of


class Queries:
    """`rules` has the method that answers each type of request."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self._tables = tables
        self.rules: dict[type, Callable[[Any], m.Reply]] = {
            m.Scan: self.scan, m.ListTags: self.list_tags, m.Get: self.get, m.NameRows: self.name_rows,
            m.ListKeys: self.list_keys,
            m.Consumption: self.consumption, m.Production: self.production,
            m.ListPartitions: self.list_partitions, m.GetPartition: self.get_partition,
            m.DescribePartition: self.describe_partition,
        }  # fmt: skip

    def scan(self, message: m.Scan) -> m.Reply:
        table = self._table(message.partition)
        slots = table.live_slots()
        known = [name for name in message.fields if name in table.fields]
        ready = table.written(slots, known) if len(known) == len(message.fields) and known else None
        status = np.zeros(len(slots), np.int8) if ready is None else ready.astype(np.int8)
        return row_set(message.rid, table, slots, message.fields, status.tobytes())

    def list_tags(self, message: m.ListTags) -> m.Reply:
        table = self._table(message.partition)
        slots = table.live_slots()
        found: list[m.Tags | None] = table.tags  # cleared rows have none there
        names = [] if message.names else list(dict.fromkeys(itertools.chain.from_iterable(filter(None, found))))
        if len(slots) < len(found):
            found = [found[slot] for slot in slots.tolist()]
        columns = [[tag.get(name) if tag else None for tag in found] for name in message.names]
        return m.TagColumns(message.rid, rows_bytes(table.index[slots]), columns, names)

    def get(self, message: m.Get) -> m.Reply:
        table = self._tables.get(message.partition)
        if message.prints is not None:
            return located_alike(message, table)
        if message.keys is not None:
            slots = self._slots_of_keys(message, table)
            reply = located(message, table, slots)
            if len(slots) < len(message.keys) or len(reply.schema) < len(message.fields or ()):
                assert table is not None
                reply.note = left_out(message, table, reply.schema)
            return reply
        indexes = indexes_of(message.rows or b"")
        if table is None:
            raise RowCleared(f"partition {message.partition!r} does not exist any more")
        return located(message, table, known_slots(table, indexes))

    def _slots_of_keys(self, message: m.Get, table: Table | None) -> Slots:
        keys = message.keys or []
        known = [None] * len(keys) if table is None else list(map(table.keys.get, keys))
        found = [slot for slot in known if slot is not None]
        if not found or (message.strict and len(found) < len(keys)):
            missing = [key for key, slot in zip(keys, known, strict=True) if slot is None]
            detail = f" ({missing[:8]} in partition {message.partition!r})"
            if table is None:
                detail += hint(message.partition, self._tables)
            elif missing:
                detail += hint(missing[0], table.keys)
            raise UnknownRows("keys or partition were not found!" + detail)
        return np.array(found, np.int64)

    def name_rows(self, message: m.NameRows) -> m.Reply:
        table = self._table(message.partition)
        slots = table.slots_of(indexes_of(message.rows)).tolist()
        return m.Names(message.rid, [table.names[slot] if slot >= 0 else None for slot in slots])

    def list_keys(self, message: m.ListKeys) -> m.Reply:
        wanted = self._tables if message.partition is None else {message.partition}
        found = {name: self._tables[name] for name in wanted if name in self._tables}
        unknown = (-1, -1)
        listing = {name: table.listing(*message.known.get(name, unknown)) for name, table in found.items()}
        return m.Listing(message.rid, listing)

    def consumption(self, message: m.Consumption) -> m.Reply:
        table = self._tables.get(message.partition)
        if table is None:
            return unknown(message.rid)
        live = table.live()
        return status(message.rid, table, live, table.task(message.task).consumed[live])

    def production(self, message: m.Production) -> m.Reply:
        table = self._tables.get(message.partition)
        if table is None or not message.fields or any(name not in table.fields for name in message.fields):
            return unknown(message.rid)
        live = table.live()
        columns = sorted(table.fields[name].number for name in set(message.fields))
        return status(message.rid, table, live, (table.cells[columns][:, live] != 0).T)

    def list_partitions(self, message: m.ListPartitions) -> m.Reply:
        return m.Names(message.rid, list(self._tables))

    def get_partition(self, message: m.GetPartition) -> m.Reply:
        table = self._tables.get(message.partition)
        if table is None:
            return m.PartitionInfo(message.rid, False, None, {}, 0)
        schema = table.schema(list(table.fields))
        return m.PartitionInfo(message.rid, True, table.declared, table.metadata, table.num_rows, schema=schema)

    def describe_partition(self, message: m.DescribePartition) -> m.Reply:
        table = self._tables.get(message.partition)
        if table is None:
            return m.PartitionDescription(message.rid, False)
        slots = table.live_slots()
        fields = sorted(table.fields, key=lambda name: table.fields[name].number)
        columns = [table.fields[name].number for name in fields]
        consumed = {name: task.consumed[slots].astype(np.int8).tobytes() for name, task in table.tasks.items()}
        return m.PartitionDescription(
            message.rid,
            True,
            rows_bytes(table.index[slots]),
            rows_bytes(table.index[np.array(sorted(table.unclaimed), np.int64)]),
            table.schema(fields),
            (table.cells[columns][:, slots] != 0).T.astype(np.int8).tobytes(),
            [table.names[slot] for slot in slots.tolist()],
            table.tags_of(slots),
            consumed,
        )

    def _table(self, name: str) -> Table:
        try:
            return self._tables[name]
        except KeyError:
            raise UnknownRows(unknown_partition(name, self._tables)) from None


def known_slots(table: Table, indexes: NDArray[Any]) -> Slots:
    """The slots of rows. Raises `RowCleared` when one of them is not there."""
    slots = table.slots_of(indexes)
    if (slots.item() if len(slots) == 1 else slots.min(initial=0)) < 0:
        gone = indexes[slots < 0]
        raise RowCleared(f"partition {table.name!r}: rows {gone[:8].tolist()} were cleared or never existed")
    return slots
