"""Which rows a partition has at one instant, with their tags, and which cells of them are written."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transfer_queue.arguments import items
from transfer_queue.client.effects import Call
from transfer_queue.client.session import Session
from transfer_queue.codec.collector import collector_pause
from transfer_queue.codec.rows import row_numbers
from transfer_queue.errors import InvalidInput, UnknownRows
from transfer_queue.memory.bytes import Ints
from transfer_queue.names import unknown_partition
from transfer_queue.schema import FieldSchema
from transfer_queue.tables import tag_columns
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import numbers_of

Flags = NDArray[np.bool_]


class RowListing:
    """Rows of a partition: global indexes, ascending unless keys were named. Holds no cells.

    `tag_values` or `all_tags` lists the rows, once; before there are none. Later questions are about the rows as they
    are then.
    """

    def __init__(self, session: Session, partition_id: str, keys: Sequence[str] | None = None) -> None:
        """Raises `UnknownRows` for a partition or keys that do not exist, `InvalidInput` for what names neither."""
        if type(partition_id) is not str:
            raise InvalidInput(f"partition_id is a string, got {partition_id!r}")
        self._session = session
        self.partition_id = partition_id
        info: m.PartitionInfo = self._ask(m.GetPartition(session.next_rid(), partition_id))
        if not info.known:
            known = self._ask(m.ListPartitions(session.next_rid())).names
            raise UnknownRows(unknown_partition(partition_id, known))
        self.fields: dict[str, FieldSchema] = {field.name: field for field in info.schema}
        self.rows: Ints = np.empty(0, np.int64)
        self._num_rows = info.rows
        self._named: m.RowSet | None = None
        if keys is not None:
            with collector_pause:  # of a tag for each row
                self._named = self._rows_of(items(keys, "keys"))

    def __len__(self) -> int:
        return len(self.rows)

    def tag_names(self) -> list[str]:
        """The names of tags that rows have now, in order of appearance."""
        if self._named is not None:
            return tag_columns.names_of(self._named.tags or [])
        names: list[str] = self._ask(m.ListTags(self._session.next_rid(), self.partition_id, [])).names
        return names

    def tag_values(self, names: Sequence[str]) -> list[list[Any]]:
        """List the rows; of each of these tags the value of each row, None where it has none."""
        if self._named is not None:
            tags = self.all_tags()
            return [[tag.get(name) for tag in tags] for name in names]
        found = None if names or not self.fields else self._status([next(iter(self.fields))])
        if found is not None:
            self.rows, columns = found[0], []
        else:
            with collector_pause:  # of values that are lists
                told = self._ask(m.ListTags(self._session.next_rid(), self.partition_id, list(names)))
            self.rows, columns = numbers_of(told.rows), told.columns
        return self._without_reserved(columns)

    def all_tags(self) -> list[m.Tags]:
        """List the rows; the tags of each."""
        found = self._named
        with collector_pause:
            told = found or self._ask(m.Scan(self._session.next_rid(), self.partition_id, []))
        self.rows = numbers_of(told.rows)
        tags = told.tags or [{}] * len(self.rows)
        (tags,) = [tags] if found is not None else self._without_reserved([tags])
        return tags

    def _ask(self, request: Any) -> Any:
        return self._session.call(Call(request, wait_s=self._session.timeout_s))[0]

    def _without_reserved(self, columns: list[list[Any]]) -> list[list[Any]]:
        """Rows that a declared partition holds ready for producers are none yet. It has them at its beginning only.
        Leaves them out, and what columns have of them."""
        if len(self.rows) <= self._num_rows:
            return columns
        found: m.PartitionDescription = self._ask(m.DescribePartition(self._session.next_rid(), self.partition_id))
        is_row = ~np.isin(self.rows, numbers_of(found.reserved) if found.known else [])
        self.rows = self.rows[is_row]
        return [list(itertools.compress(values, is_row)) for values in columns]

    def _rows_of(self, keys: list[str]) -> m.RowSet:
        if not keys or not set(map(type, keys)) <= {str}:
            raise InvalidInput("keys is a list of strings, at least one")
        keys = list(dict.fromkeys(keys))
        session = self._session
        found: m.RowSet = self._ask(m.Find(session.next_rid(), self.partition_id, keys, False, session.timeout_s))
        if len(found.rows) < 8 * len(keys):
            known = set(self._names(found.rows))
            missing = [key for key in keys if key not in known]
            raise UnknownRows(f"partition {self.partition_id!r}: keys not found: {missing[:8]!r:.400}")
        return found

    def _names(self, rows: bytes) -> list[str | None]:
        names: list[str | None] = self._ask(m.NameRows(self._session.next_rid(), self.partition_id, rows)).names
        return names

    def keys(self, rows: Ints) -> list[str | None]:
        """The keys of rows; None for one that has none, or was cleared."""
        try:
            return self._names(rows.tobytes())
        except UnknownRows:  # the partition went with its last row
            return [None] * len(rows)

    def written(self, fields: Sequence[str]) -> Flags:
        """Which cells of the listed rows are written, (rows, fields); none of rows that were cleared since."""
        flags = np.zeros((len(self.rows), len(fields)), np.bool_)
        known = [name for name in self.fields if name in set(fields)]  # in the order in which the service answers
        found = self._status(known) if known else None
        if found is not None:
            everything, status = found
            places = np.searchsorted(everything, self.rows).clip(max=len(everything) - 1)
            there = everything[places] == self.rows
            order = [known.index(name) for name in fields]
            flags[there] = status[places[there]][:, order]
        return flags

    def _status(self, fields: list[str]) -> tuple[Ints, Flags] | None:
        """(live rows, which of `fields` they have); None where there are none."""
        status: m.RowStatus = self._ask(m.Production(self._session.next_rid(), self.partition_id, fields))
        if not status.known:
            return None
        everything = row_numbers(numbers_of(status.runs, 2))
        return (
            (everything, np.frombuffer(status.status, np.int8).reshape(-1, len(fields)) != 0)
            if len(everything)
            else None
        )

    def alive(self, rows: Ints) -> Flags:
        """Which of the rows are not cleared."""
        if self.fields:
            found = self._status([next(iter(self.fields))])
            return np.isin(rows, [] if found is None else found[0])
        try:
            told = self._ask(m.ListTags(self._session.next_rid(), self.partition_id, []))
            return np.isin(rows, numbers_of(told.rows))
        except UnknownRows:
            return np.zeros(len(rows), np.bool_)
