"""SQL over live partitions, by DuckDB in this process.

Each partition that a query names is a table there, which DuckDB asks for columns. It may neither open files nor load
extensions nor change that.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from transfer_queue.background_call import BackgroundCall
from transfer_queue.client.effects import Call
from transfer_queue.client.session import Session
from transfer_queue.errors import Aborted, InvalidInput, TransferQueueError
from transfer_queue.names import unknown_partition
from transfer_queue.tables import texts
from transfer_queue.tables.partition_table import PartitionTable, table
from transfer_queue.wire import messages as m

CLOSED = {
    "enable_external_access": "false", "autoload_known_extensions": "false", "autoinstall_known_extensions": "false",
    "allow_community_extensions": "false", "temp_directory": "",
}  # fmt: skip
UNNAMED = {"STAR", "POSITIONAL_REFERENCE", "SHOW_REF", "PIVOT"}  # of a parsed query: what names no columns
LOCKED = ("SET python_enable_replacements=false", "SET lock_configuration=true")
UNKNOWN_TABLE = re.compile(r"Table with name (.*) does not exist!", re.DOTALL)
FOREVER_S = 1e6
ENDS_S = 1.0  # a query that is called off, unless it waits for the service


def sql(session: Session, query: str) -> pa.Table:
    """See `transfer_queue.sql`. An interrupt ends it at once."""
    if type(query) is not str:
        raise InvalidInput(f"a query is a string, got {type(query).__qualname__}")
    if texts.clean(query) != query:
        raise InvalidInput(f"a query is text, got halves of surrogate pairs: {query!r:.200}")
    running = RunningQuery(session, query)
    begun: list[BackgroundCall[pa.Table]] = []
    try:
        call = BackgroundCall("tq-sql", running.result, known=begun)
        call.ended(FOREVER_S)
        return call.outcome()
    finally:
        if not all(one.ended(0.0) for one in begun):
            running.interrupt()
            begun[0].ended(ENDS_S)


class RunningQuery:
    """A query, for a thread of its own: in the thread that asks for it DuckDB looks for signals between its tasks only,
    and one of them may last for hours."""

    def __init__(self, session: Session, query: str) -> None:
        self._session = session
        self._query = query
        self._lock = threading.Lock()
        self._connection: Any = None  # while it runs
        self._is_called_off = False

    def result(self) -> pa.Table:
        """Raises as `transfer_queue.sql`."""
        with duckdb.connect(":memory:", config=CLOSED) as connection:
            with self._lock:
                self._connection = connection
            try:
                return self._result(connection)
            finally:
                with self._lock:
                    self._connection = None

    def interrupt(self) -> None:
        """Let it end with an error, as soon as it does not wait for the service. For another thread."""
        with self._lock:
            self._is_called_off = True
            if self._connection is not None:
                self._connection.interrupt()

    def _result(self, connection: Any) -> pa.Table:
        found: list[ScannedTable] = []
        try:
            for setting in LOCKED:
                connection.execute(setting)
            named = _named(connection, _sole(connection, self._query))
            for name, partition in _tables(self._session, named.tables).items():
                found.append(ScannedTable(_table(self._session, partition, named)))
                connection.register(name, found[-1])
            if self._is_called_off:  # before there was anything to interrupt
                raise Aborted("SQL: the query was called off")
            result = connection.sql(self._query)
            return pa.table({}) if result is None else result.to_arrow_table()
        except (duckdb.Error, UnicodeError) as error:
            for one in found:
                if one.failed is not None:
                    raise one.failed from None
            raise InvalidInput(f"SQL: {_in_words(self._session, error)}") from None


class Named:
    """What a query names: tables, and columns in small letters. `is_all`: it means no others."""

    def __init__(self) -> None:
        self.tables: set[str] = set()
        self.columns: set[str] = set()
        self.is_all = True

    def collect(self, node: Any) -> None:
        """Take up a part of a parsed query."""
        if isinstance(node, list):
            for one in node:
                self.collect(one)
        elif isinstance(node, dict):
            kind = node.get("type")
            kind = kind if isinstance(kind, str) else ""  # of the number of a sampling clause it is a struct
            if kind in UNNAMED or node.get("ref_type") == "NATURAL" or node.get("using_columns"):
                self.is_all = False
            if node.get("show_type") == "SHOW_SPECIAL":  # of tables or databases, and none are here yet
                raise InvalidInput("SQL: a partition is a table once a query names it; `tq ls` lists them")
            if kind == "BASE_TABLE" or (kind == "SHOW_REF" and node["table_name"]):
                self.tables.add(str(node["table_name"]))
            elif node.get("class") == "COLUMN_REF":
                self.columns.add(str(node["column_names"][-1]).casefold())
            for one in node.values():
                self.collect(one)


def _named(connection: Any, query: str) -> Named:
    ((text,),) = connection.execute("select json_serialize_sql(?)", [query]).fetchall()
    parsed = json.loads(text)
    found = Named()
    if parsed.get("error", True):  # not a select
        found.tables, found.is_all = set(connection.get_table_names(query)), False
    else:
        found.collect(parsed["statements"])
    return found


def _in_words(session: Session, error: Exception) -> str:
    """What DuckDB says. It knows no partitions, so of a table that is not there it would name one of its own."""
    missing = UNKNOWN_TABLE.search(str(error)) if isinstance(error, duckdb.CatalogException) else None
    if missing is None:
        return str(error)
    return unknown_partition(missing[1], _partitions(session))


def _partitions(session: Session) -> list[str]:
    names: list[str] = session.call(Call(m.ListPartitions(session.next_rid())))[0].names
    return names


def _table(session: Session, partition: str, named: Named) -> PartitionTable:
    """The table of a partition; of tags, the most costly columns, only those that are named."""
    return table(session, partition, named=named.columns if named.is_all else None)


def _sole(connection: Any, query: str) -> str:
    """The one statement of a query. Raises `InvalidInput` for none, or several."""
    statements = connection.extract_statements(query)
    if len(statements) != 1:
        raise InvalidInput(f"SQL: {len(statements)} statements, expected one")
    return query


def _tables(session: Session, names: Iterable[str]) -> dict[str, str]:
    """The partition of each of these names, where there is one; as SQL has it, upper and lower case are the same.

    Raises `InvalidInput` where that leaves several.
    """
    known = _partitions(session)
    found: dict[str, str] = {}
    for name in names:
        alike = [one for one in known if one.casefold() == name.casefold()]
        if name in alike:
            alike = [name]
        if len(alike) > 1:
            raise InvalidInput(f"SQL: {name!r:.200} may be any of the partitions {alike[:8]!r:.400}")
        found.update((name, one) for one in alike)
    if len({one.casefold() for one in found.values()}) < len(set(found.values())):
        raise InvalidInput(f"SQL: partitions whose names differ only in case: {sorted(found.values())[:8]!r:.400}")
    return found


class ScannedTable(ds.Dataset):  # the only kind of object that DuckDB asks for columns
    """A table as a dataset of pyarrow. `failed` is what a scan raised: DuckDB gives only its text."""

    def __init__(self, found: PartitionTable) -> None:
        """Not that of a dataset, which refuses to be made."""
        self._table = found
        self.failed: TransferQueueError | None = None

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **_: Any) -> ds.Scanner:
        """The rows that pass `filter`, `columns` of them. Columns that neither names are not read."""
        wanted = self._table.schema.names if columns is None else list(columns)
        read = wanted if filter is None else [*wanted, *self._filtered(filter, wanted)]
        chosen = self._table.select(read)
        reader = pa.RecordBatchReader.from_batches(chosen.schema, self._watched(chosen))
        return ds.Scanner.from_batches(reader, columns=wanted, filter=filter)

    def _watched(self, chosen: PartitionTable) -> Any:
        try:
            yield from chosen.batches()
        except TransferQueueError as error:
            self.failed = error
            raise

    def _filtered(self, condition: Any, wanted: Sequence[str]) -> list[str]:
        """The columns that a condition needs beside those wanted: without one of them it cannot be bound."""
        schema = self._table.schema
        return [name for name in schema.names if name not in wanted and not _binds(condition, schema, name)]


def _binds(condition: Any, schema: pa.Schema, without: str) -> bool:
    rest = schema.remove(schema.get_field_index(without))
    empty = pa.RecordBatchReader.from_batches(rest, [])
    try:
        ds.Scanner.from_batches(empty, columns=[], filter=condition).to_table()
    except pa.ArrowInvalid:
        return False
    return True
