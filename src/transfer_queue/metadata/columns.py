"""Per-row columns that slices share for as long as nobody can change them.

A column is frozen until its rows are shown to the caller. Showing copies them once; from then on the shown list belongs
to one meta, edits made to it count, and anything derived from it copies. So slicing costs no per-row work until someone
has asked for the rows, and a change never reaches another meta.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from transfer_queue.arguments import mapping, mappings
from transfer_queue.errors import InvalidInput
from transfer_queue.metadata.merge import copy_dict, same_value

T = TypeVar("T")
IntArray: TypeAlias = npt.NDArray[np.int64]
Where: TypeAlias = "slice | IntArray"
Row: TypeAlias = "dict[str, Any]"
# Which of a row's keys the caller changed: these, or None for the row as a whole (keys were removed).
Mark: TypeAlias = "frozenset[str] | None"

_UNMARKED: Mark = frozenset()
_EMPTY: Mapping[str, Any] = MappingProxyType({})


def int_array(values: Any, what: str) -> IntArray:
    """`values` as a 1-D int64 array; the same memory when it is one already.

    Raises:
        InvalidInput: not one-dimensional, or not all whole numbers below 2**63.
    """
    try:
        array = np.asarray(values if hasattr(values, "__array__") else list(values))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"{what} must be a list of ints: {error}") from error
    if array.ndim == 1 and not array.size:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidInput(f"{what} must be a list of ints, got {array.ndim} dimensions of {array.dtype}")
    narrowed = array.astype(np.int64, copy=False)
    if array.dtype == np.uint64 and bool((narrowed < 0).any()):
        raise InvalidInput(f"{what} must be below 2**63")
    return narrowed


def take(rows: list[T], where: Where) -> list[T]:
    """The rows at `where`, in its order."""
    return rows[where] if isinstance(where, slice) else list(map(rows.__getitem__, where.tolist()))


def check_length(rows: Sized, size: int, what: str) -> None:
    """InvalidInput unless there is one entry per row."""
    if len(rows) != size:
        raise InvalidInput(f"{what} has {len(rows)} entries for {size} rows")


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Mark:
    """What must be sent so that `before` becomes `now`."""
    if before.keys() - now.keys():
        return None
    return frozenset(k for k, value in now.items() if k not in before or not same_value(before[k], value))


def _both(a: Mark, b: Mark) -> Mark:
    return None if a is None or b is None else a | b


def packed_ids(ids: IntArray) -> tuple[int, int] | tuple[str, bytes]:
    """(first, count) for consecutive indexes, which is what one put allocates, else the narrowest array's bytes."""
    if len(ids) and int(ids[-1]) - int(ids[0]) == len(ids) - 1 and bool((np.diff(ids) == 1).all()):
        return int(ids[0]), len(ids)
    narrow: npt.NDArray[Any] = ids.astype(np.int32)
    if not np.array_equal(narrow, ids):
        narrow = ids
    return narrow.dtype.str, narrow.tobytes()


def unpacked_ids(packed: tuple[int, int] | tuple[str, bytes]) -> IntArray:
    """The indexes that `packed_ids` packed."""
    first, rest = packed
    if isinstance(first, int):
        return np.arange(first, first + int(rest), dtype=np.int64)
    assert isinstance(rest, bytes)
    return np.frombuffer(rest, np.dtype(first)).astype(np.int64)


class DictColumn:
    """One dict per row, or nothing at all while every dict is empty; remembers what its holder changed.

    `rows` and `marks` passed in become the column's own: the caller must not change them afterwards.
    """

    __slots__ = ("_base", "_marks", "_rows", "_shown", "size")

    def __init__(self, size: int, rows: list[Row] | None = None, marks: list[Mark] | None = None) -> None:
        self.size = size
        self._rows = rows
        self._marks = marks
        self._shown = False
        self._base: list[Row] | None = None  # the rows as they were when shown, to find edits by comparison

    @classmethod
    def given(cls, size: int, rows: Iterable[Mapping[str, Any]] | None, what: str, replace: bool = False) -> DictColumn:
        """Rows written by the caller, all of which count as changed. None or no rows: all empty.

        Raises:
            InvalidInput: there is not one dict per row, or something else among them.
        """
        copies = [] if rows is None else [copy_dict(row) for row in mappings(rows, what)]
        if copies or replace:
            check_length(copies, size, what)
        if replace:
            return cls(size, copies, [None] * size)
        return cls(size, copies, [frozenset(row) for row in copies]) if any(copies) else cls(size)

    def show(self) -> list[Row]:
        """The rows, for the caller to read and change; the same list every time."""
        if not self._shown:
            self._base, self._shown = self._rows, True
            self._rows = [copy_dict(row) for row in self.read()]
        assert self._rows is not None
        return self._rows

    def read(self) -> Sequence[Mapping[str, Any]]:
        """The rows, which the caller must not change."""
        if self._rows is None:
            return [_EMPTY] * self.size
        check_length(self._rows, self.size, "custom_meta")
        return self._rows

    def copies(self) -> list[Row]:
        """Independent copies of the rows."""
        return [copy_dict(row) for row in self.read()]

    def same(self, other: DictColumn) -> bool:
        """Whether both have equal rows."""
        return (self.blank and other.blank) or same_value(self.copies(), other.copies())

    @property
    def blank(self) -> bool:
        """Whether all rows are known to be empty and unchanged, without looking at them."""
        return self._rows is None and self._marks is None

    def take(self, where: Where, size: int) -> DictColumn:
        """The `size` rows at `where` as a column of their own."""
        if self.blank:
            return DictColumn(size)
        if self._rows is not None:
            check_length(self._rows, self.size, "custom_meta")
        rows = None if self._rows is None else take(self._rows, where)
        if self._shown:
            assert rows is not None
            positions = range(self.size)[where] if isinstance(where, slice) else where.tolist()
            return DictColumn(size, [copy_dict(row) for row in rows], [self._mark(i) for i in positions])
        return DictColumn(size, rows, None if self._marks is None else take(self._marks, where))

    def state(self) -> tuple[list[Row] | None, list[Mark] | None]:
        """Rows and marks in the smallest form that `DictColumn(size, *state)` accepts; nothing in it is shown."""
        column = self.take(slice(None), self.size)
        rows = column._rows if column._rows and any(column._rows) else None
        marks = column._marks
        if marks is None or not any(mark is None or mark for mark in marks):
            return rows, None
        seen: dict[Mark, Mark] = {}  # pickle stores one object once, and most rows changed the same keys
        return rows, [seen.setdefault(mark, mark) for mark in marks]

    def update(self, changes: Sequence[Mapping[str, Any] | None]) -> None:
        """Merges one dict into each row."""
        copies = [{} if change is None else copy_dict(mapping(change, "custom_meta")) for change in changes]
        before = self.read()
        if self._shown:
            for row, change in zip(self.show(), copies, strict=True):
                row.update(change)
        else:
            self._rows = [{**row, **change} for row, change in zip(before, copies, strict=True)]
        marks = self._marks or [_UNMARKED] * self.size
        self._marks = [_both(mark, frozenset(change)) for mark, change in zip(marks, copies, strict=True)]

    def edits(self) -> dict[int, tuple[bool, Row]]:
        """What the holder changed: position -> (replaces the whole dict, the keys and values to set)."""
        if not self._shown and self._marks is None:
            return {}
        found: dict[int, tuple[bool, Row]] = {}
        for position, row in enumerate(self.read()):
            mark = self._mark(position)
            if mark is None or not mark <= row.keys():  # a key that was set and then removed
                found[position] = (True, copy_dict(row))
            elif mark:
                found[position] = (False, {key: row[key] for key in row if key in mark})
        return found

    def forget_edits(self) -> None:
        """From now on the rows as they are count as unchanged."""
        self._marks = None
        if self._shown:
            self._base = self.copies()

    def _mark(self, position: int) -> Mark:
        mark = self._marks[position] if self._marks else _UNMARKED
        if not self._shown:
            return mark
        assert self._rows is not None
        return _both(mark, _changes(self._base[position] if self._base else _EMPTY, self._rows[position]))

    @classmethod
    def concat(cls, columns: Sequence[DictColumn]) -> DictColumn:
        """All rows of `columns`, in order."""
        size = sum(column.size for column in columns)
        if all(column.blank for column in columns):
            return cls(size)
        states = [(column.size, *column.state()) for column in columns]
        rows = list(chain.from_iterable(rows or [{}] * count for count, rows, _ in states))
        marks = list(chain.from_iterable(marks or [_UNMARKED] * count for count, _, marks in states))
        return cls(size, rows, marks)

    @classmethod
    def union(cls, first: DictColumn, second: DictColumn) -> DictColumn:
        """Row by row the keys of both; the second wins where both have one."""
        if second.blank:
            return first.take(slice(None), first.size)
        rows = [{**a, **b} for a, b in zip(first.copies(), second.copies(), strict=True)]
        marks = [_both(first._mark(i), second._mark(i)) for i in range(first.size)]
        return cls(first.size, rows, marks)
