"""`data_parser` functions of puts, right and wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Columns = dict[str, Any]


def parser(how: str) -> Callable[[Columns], Columns]:
    made = PARSERS[how]
    made.__module__ = "__main__"  # TransferQueue's storage cannot import this file: pickled whole
    return made


def _fails(columns: Columns) -> Columns:
    raise ValueError("the parser fails")


def _leaves_one_out(columns: Columns) -> Columns:
    return dict(list(columns.items())[1:])


def _adds_one(columns: Columns) -> Columns:
    return {**columns, "added": next(iter(columns.values()))}


def _shortens(columns: Columns) -> Columns:
    return {name: column[:-1] for name, column in columns.items()}


def _copies(columns: Columns) -> Columns:
    return dict(columns)


def _reverses(columns: Columns) -> Columns:
    return {name: column.flip(0) if hasattr(column, "flip") else column for name, column in columns.items()}


PARSERS: dict[str, Callable[[Columns], Columns]] = {
    "fails": _fails, "leaves one out": _leaves_one_out, "adds one": _adds_one, "shortens": _shortens,
    "returns as it was": _copies, "reverses": _reverses,
}  # fmt: skip
