"""`tq sql`: a query over live partitions."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Annotated, Any

import typer

from transfer_queue.cli.attaching import Address, attached
from transfer_queue.cli.tables import aligned, harmless, printable

MAX_SHOWN = 1000  # rows of a table on a terminal
STEP = 4096  # rows that become Python objects at once


def sql(
    query: Annotated[str, typer.Argument(help='SQL of DuckDB. A partition is a table: select * from "my partition".')],
    as_json: Annotated[bool, typer.Option("--json", help="A list of objects.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated, the names of the columns first.")] = False,
    address: Address = None,
) -> None:
    """Ask live partitions in SQL.

    Only columns that the query names are read; files and network are out of reach. Columns: global_index, key, one for
    each field, tag_NAME for each tag (docs/tables.md). Needs the extra `sql`.
    """
    from transfer_queue.errors import InvalidInput
    from transfer_queue.tables import extras

    if as_json and as_csv:
        raise InvalidInput("--json or --csv, not both")
    extras.require("sql", "tq sql")
    from transfer_queue.tables.queries import sql as result_of

    with attached(address) as client:
        found = result_of(client.session, query)
    if as_json:
        _print_json(found)
    elif as_csv:
        _print_csv(found)
    else:
        _print_table(found)


def _rows(found: Any) -> Iterator[tuple[Any, ...]]:
    """The rows of a table of Arrow as Python values."""
    for batch in found.to_batches(max_chunksize=STEP):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _print_json(found: Any) -> None:
    """One object a line, so that a long list is written as it is made. NaN and infinities are null: JSON has none."""
    names = _distinct(found.schema.names)
    separator = "["
    for row in _rows(found):
        print(separator + _json(dict(zip(names, row, strict=True))), end="")
        separator = ",\n "
    print("[]" if separator == "[" else "]")


def _distinct(names: Sequence[str]) -> list[str]:
    """Names for the members of an object: those that are there already get a number, as DuckDB gives them."""
    found: dict[str, None] = {}
    for name in names:
        wanted, number = name, 0
        while wanted in found or (number and wanted in names):
            number += 1
            wanted = f"{name}_{number}"
        found[wanted] = None
    return list(found)


def _json(value: Any) -> str:
    """A decimal has all of its digits, which a float may not have."""
    if isinstance(value, Decimal):
        return str(int(value)) if value == value.to_integral_value() else format(value, "f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_json, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(name))}: {_json(one)}" for name, one in value.items()) + "}"
    if isinstance(value, float):
        return json.dumps(value if value - value == 0 else None)
    if isinstance(value, bytes):
        return json.dumps(value.hex())
    return json.dumps(value if value is None or isinstance(value, (bool, int, str)) else str(value))


def _print_csv(found: Any) -> None:
    """In a pipe texts are as they are; on a terminal nothing in them acts on it."""
    told = harmless if sys.stdout.isatty() else str
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(map(told, found.schema.names))
    for row in _rows(found):
        writer.writerow("" if value is None else told(_text(value)) for value in row)


def _text(value: Any) -> str:
    """A number or a text as it is, lists and structs as JSON."""
    if isinstance(value, (list, dict)):
        return _json(value)
    return value.hex() if isinstance(value, bytes) else str(value)


def _print_table(found: Any) -> None:
    rows = [["" if value is None else _text(value) for value in row] for row in _rows(found.slice(0, MAX_SHOWN))]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        shown = Table()
        for name in found.schema.names:
            shown.add_column(printable(name))
        for row in rows:
            shown.add_row(*map(printable, row))
        Console().print(shown)
    else:
        lines = [[harmless(text) for text in row] for row in [found.schema.names, *rows]]
        print("\n".join(aligned(lines, [False] * len(found.schema.names))))
    if found.num_rows > MAX_SHOWN:
        print(f"{found.num_rows - MAX_SHOWN} more rows: --csv and --json print all", file=sys.stderr)
