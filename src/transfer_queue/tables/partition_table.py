"""A live partition as a table of Arrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import pyarrow as pa

from transfer_queue import arguments
from transfer_queue.client.session import Session
from transfer_queue.errors import InvalidInput
from transfer_queue.names import hint
from transfer_queue.tables import columns, tag_columns, texts
from transfer_queue.tables.cell_batches import CellBatch, CellBatches, FieldColumn
from transfer_queue.tables.row_listing import RowListing

INDEX, KEY, TAG = "global_index", "key", "tag_"
ALL_TAGS = "tags"  # the one column where there are too many names


class TableColumn(NamedTuple):
    """A column: the global index, the key, a field, or values of tags, which are read already."""

    about: pa.Field
    field: FieldColumn | None = None
    tags: pa.Array | None = None


class PartitionTable:
    """Rows of a partition, as they were listed when the table was made; their cells are read when the table is.

    pandas, polars, DuckDB and pyarrow read it directly (`__arrow_c_stream__`), as often as they like. Batches have
    about 32 MiB and at most 65536 rows. A cell that is not written is null. Rows cleared since the listing are left
    out; cells written since are as they are now, and `SchemaConflict` is raised where they do not fit the column.
    """

    def __init__(self, session: Session, listing: RowListing, found: Sequence[TableColumn]) -> None:
        self._session = session
        self._listing = listing
        self._columns = list(found)
        self.schema: pa.Schema = pa.schema([one.about for one in self._columns])

    @property
    def partition_id(self) -> str:
        """Whose rows they are."""
        return self._listing.partition_id

    def __len__(self) -> int:
        return len(self._listing)

    def __repr__(self) -> str:
        names = ", ".join(self.schema.names)
        return f"PartitionTable({self.partition_id!r:.80}, {len(self)} rows: {names:.200})"

    def select(self, names: Sequence[str]) -> PartitionTable:
        """The table of these columns only, each once; others are not read. Raises `InvalidInput` for one that is not
        there."""
        known = {one.about.name: one for one in self._columns}
        wanted = dict.fromkeys(arguments.texts(names, "columns"))
        for name in wanted:
            if name not in known:
                raise InvalidInput(f"no column {name!r:.200}{hint(name, known)}")
        return PartitionTable(self._session, self._listing, [known[name] for name in wanted])

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, some at a time. Each batch is read when it is asked for; blocks."""
        fields = [one.field for one in self._columns if one.field is not None]
        with_keys = any(one.about.name == KEY for one in self._columns)
        for found in CellBatches(self._session, self._listing, fields, with_keys):
            yield pa.record_batch(self._arrays(found), schema=self.schema)

    def _arrays(self, found: CellBatch) -> list[pa.Array]:
        cells = iter(found.arrays)
        arrays = []
        for about, field, tags in self._columns:
            if field is not None:
                arrays.append(next(cells))
            elif tags is not None:
                arrays.append(_rows_at(tags, found.positions))
            elif about.name == KEY:
                keys = [None if key is None else texts.clean(key) for key in found.keys or ()]
                arrays.append(pa.array(keys, about.type))
            else:
                arrays.append(pa.array(self._listing.rows[found.positions]))
        return arrays

    def to_reader(self) -> pa.RecordBatchReader:
        """A reader of `batches`."""
        return pa.RecordBatchReader.from_batches(self.schema, self.batches())

    def to_arrow(self) -> pa.Table:
        """All of the table in memory."""
        return self.to_reader().read_all()

    def to_pandas(self) -> Any:
        """A DataFrame of pandas, which has to be installed."""
        return self.to_arrow().to_pandas()

    def __arrow_c_schema__(self) -> Any:
        return self.schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.to_reader().__arrow_c_stream__(requested_schema)


def _rows_at(values: pa.Array, positions: Any) -> pa.Array:
    if len(positions) and positions[-1] - positions[0] == len(positions) - 1:
        return values.slice(int(positions[0]), len(positions))
    return values.take(pa.array(positions))


def table(
    session: Session,
    partition_id: str,
    fields: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    tags: Sequence[str] | None = None,
    as_bytes: Sequence[str] = (),
    preview_chars: int | None = 1024,
    named: Set[str] | None = None,
) -> PartitionTable:
    """See `transfer_queue.table`. `named`: of tags only these columns, in small letters, unless one is no column."""
    if preview_chars is not None and (type(preview_chars) is not int or preview_chars < 1):
        raise InvalidInput(f"preview_chars is a number of characters from 1, or None, got {preview_chars!r}")
    listing = RowListing(session, partition_id, keys)
    wanted = _known("fields", fields, list(listing.fields))
    raw = _known("as_bytes", as_bytes, wanted)
    for name in raw:
        if columns.is_numeric(listing.fields[name]):
            raise InvalidInput(f"as_bytes: field {name!r:.200} has numbers")
    names = ColumnNames()
    found = [
        TableColumn(pa.field(names.new(INDEX), pa.int64(), nullable=False)),
        TableColumn(pa.field(names.new(KEY), pa.large_string())),
    ]
    for name in wanted:
        field = FieldColumn(listing.fields[name], name in raw, preview_chars)
        found.append(TableColumn(columns.described_as(names.new(name), field.schema, field.as_bytes), field))
    if named is not None and names.has(named):
        tags = []
    return PartitionTable(session, listing, found + _tag_columns(listing, tags, names, named))


def _known(what: str, given: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Names that were given, all of `known` for None. Raises `InvalidInput` for others."""
    if given is None:
        return list(known)
    wanted = dict.fromkeys(arguments.texts(given, what))
    for name in wanted:
        if name not in known:
            raise InvalidInput(f"{what}: no field {name!r:.200}{hint(name, known)}")
    return list(wanted)


def _tag_columns(
    listing: RowListing, wanted: Sequence[str] | None, names: ColumnNames, named: Set[str] | None
) -> list[TableColumn]:
    """The tags of all rows, which are listed by this. A name that no row has gives a column of nulls where it was asked
    for."""
    known = listing.tag_names() if wanted is None else list(dict.fromkeys(arguments.texts(wanted, "tags")))
    if wanted is None and len(known) > tag_columns.MAX_NAMES:
        found = tag_columns.together(listing.all_tags())
        return [TableColumn(pa.field(names.new(ALL_TAGS), found.type), tags=found)]
    columns = {name: names.new(TAG + name) for name in known}
    if named is not None and not names.has(named):
        named = None  # it names something else, maybe the row as a whole
    read = [name for name, column in columns.items() if named is None or column.casefold() in named]
    made = []
    for name, values in zip(read, listing.tag_values(read), strict=True):
        found = tag_columns.column(values)
        about = pa.field(columns[name], found.type, metadata={"tq.tag": texts.clean(name)})
        made.append(TableColumn(about, tags=found))
    return made


class ColumnNames:
    """Gives every column a name of its own, also where upper and lower case are the same, as in SQL."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def has(self, names: Set[str]) -> bool:
        """Whether all these, in small letters, were given."""
        return names <= self._taken

    def new(self, wanted: str) -> str:
        """`wanted`, with a number behind it where it is taken; what no C string or UTF-8 has is replaced in it."""
        base = texts.clean(wanted).replace("\0", "␀") or "unnamed"
        found, number = base, 1
        while found.casefold() in self._taken:
            number += 1
            found = f"{base}_{number}"
        self._taken.add(found.casefold())
        return found
