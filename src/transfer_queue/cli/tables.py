"""What is printed: tables, texts that are anybody's, JSON.

On a terminal a table is as wide as that: texts wrap, numbers and headings do not, and columns for which there is no
room come in a table below, again with the names of the rows. Where the output goes into a pipe or a file it is as wide
as it needs, a row a line. Every text in a table is made harmless: nothing in a key or a tag acts on a terminal.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

NUMBERS = (int, float)
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
MAX_CELL = 1000  # characters
MAX_DEPTH = 64
NAMES = 2  # columns at most that say what a row is
FOLDED = 16  # characters of a long text side by side, at least
GAP = 3  # between two columns


def harmless(text: str) -> str:
    """`text`, which may be anybody's, without what a terminal would act on."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def printable(text: str) -> Text:
    """`harmless` for rich, which would take brackets for styles."""
    from rich.text import Text

    return Text(harmless(text), overflow="fold")


class Number(int):
    """One that names something, a row or a process: it is printed as it is typed, `17168` and not `17,168`."""


def shown(value: Any, longest: int = MAX_CELL) -> str:
    """A value of a cell, on one line of at most so many characters."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        text = value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False) if value else ""
        return harmless(text if len(text) <= longest else f"{text[: longest - 1]}…")
    if isinstance(value, Number):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def size(nbytes: float) -> str:
    """Bytes for people: 1.5 GiB."""
    power = min(len(UNITS) - 1, int(math.log(max(1.0, nbytes), 1024)))
    return f"{nbytes / 1024**power:.{1 if power else 0}f} {UNITS[power]}"


def seconds(value: float | None) -> str:
    """A length of time for people: 3.1 s, 4:07, 2:04:07; "" for None."""
    if value is None:
        return ""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def console() -> Console:
    """Of standard output."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table of values; columns of numbers stand to the right."""
    lines = [list(row) for row in rows]
    right = [is_numeric([line[number] for line in lines]) for number in range(len(columns))]
    cells = [[shown(value) for value in line] for line in lines]
    if not sys.stdout.isatty():
        print("\n".join(aligned([columns, *cells], right)))
        return
    on = console()
    wanted = [max(map(_width, column)) for column in zip(columns, *cells, strict=True)]
    least = [
        wide if is_right else max(_width(name), min(wide, FOLDED))
        for name, wide, is_right in zip(columns, wanted, right, strict=True)
    ]
    names = max(1, min(NAMES, right.index(True) if True in right else NAMES))
    for part in stripes(least, names, on.width):
        widths = shares([least[at] for at in part], [wanted[at] for at in part], on.width - GAP * (len(part) - 1))
        picked = [[line[at] for at in part] for line in (columns, *cells)]
        _print_part(on, picked, widths, [right[at] for at in part])


def stripes(least: Sequence[int], names: int, width: int) -> list[list[int]]:
    """Which columns stand together where a table is wider than the terminal: the first `names`, which say what a row
    is, and some of the others, none of them folded to less than its `least`."""
    parts = [list(range(names))]
    for at in range(names, len(least)):
        if len(parts[-1]) > names and sum(least[one] + GAP for one in [*parts[-1], at]) - GAP > width:
            parts.append(list(range(names)))
        parts[-1].append(at)
    return parts


def shares(least: Sequence[int], wanted: Sequence[int], room: int) -> list[int] | None:
    """How wide each column is: as `wanted`, where there is room, else at its `least` and an equal part of the rest.
    None where there is none even for that."""
    left = room - sum(least)
    if left < 0:
        return None
    found, open_ones = list(least), sorted(range(len(least)), key=lambda at: wanted[at] - least[at])
    for number, at in enumerate(open_ones):
        more = min(wanted[at] - least[at], left // (len(open_ones) - number))
        found[at] += more
        left -= more
    return found


def _print_part(
    on: Console, lines: Sequence[Sequence[str]], widths: Sequence[int] | None, right: Sequence[bool]
) -> None:
    """A table that is not too wide; the first line has its headings."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, name in enumerate(lines[0]):
        justify: Literal["left", "right"] = "right" if right[place] else "left"
        made.add_column(name, justify=justify, overflow="fold", width=None if widths is None else widths[place])
    for line in lines[1:]:
        made.add_row(*map(printable, line))
    on.print(made)


def is_numeric(column: Iterable[Any]) -> bool:
    there = [one for one in column if one is not None]
    return bool(there) and all(isinstance(one, NUMBERS) and not isinstance(one, bool) for one in there)


def aligned(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """The rows as lines, each column as wide as its widest cell."""
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(_filled, row, widths, right)).rstrip() for row in rows]


def _filled(cell: str, width: int, is_right: bool) -> str:
    space = " " * (width - _width(cell))
    return space + cell if is_right else cell + space


def _width(cell: str) -> int:
    """On a terminal, where some signs are two places wide."""
    from rich.cells import cell_len

    return cell_len(cell)


def print_json(value: Any) -> None:
    """One line of JSON, for anybody to read (`plain`)."""
    print(json.dumps(plain(value), allow_nan=False))


def plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON has it: messages by the names of their fields, bytes as hex, numbers that JSON lacks as texts,
    values of other types as what `str` says. What lies deeper than `MAX_DEPTH` is cut off."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if depth >= MAX_DEPTH:
        return "..."
    fields = getattr(type(value), "__struct_fields__", None)
    if fields is not None:
        return {name: plain(getattr(value, name), depth + 1) for name in fields if name != "rid"}
    if isinstance(value, Mapping):
        return {str(plain(name, depth + 1)): plain(one, depth + 1) for name, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(one, depth + 1) for one in value]
    return str(value)
