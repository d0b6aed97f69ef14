"""What the columns of a rollout are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from transfer_queue.arguments import mapping
from transfer_queue.errors import InvalidInput

MARKER = "__rank_{}_of_{}__"
KINDS = "biuf"


@dataclass(frozen=True, kw_only=True)
class RolloutColumn:
    """Base of the kinds of columns. `optional`: a batch may come without it, and a rank fetches it where it came."""

    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Numbers(RolloutColumn):
    """One number for each row; ranks get a tensor (rows,) of `dtype`, a name of NumPy's."""

    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class Ragged(RolloutColumn):
    """An array (length, *`shape`) for each row, of any length: a list of numbers, a tensor or an array.

    Ranks get `dtype`. `stored` is what is stored and moved (None: `dtype`): a narrower one makes each row smaller, and
    refuses rows with numbers that it does not have. Names are NumPy's. Whole numbers come back as they were put, or are
    refused; floats are rounded to the narrower of the two.
    """

    dtype: str = "int64"
    shape: tuple[int, ...] = ()
    stored: str | None = None

    @property
    def narrow(self) -> str:
        return self.stored or self.dtype


@dataclass(frozen=True, kw_only=True)
class Objects(RolloutColumn):
    """Anything for each row, None included: dicts with tensors, texts, metadata. It comes back as it was put."""


@dataclass(frozen=True, kw_only=True)
class Inferred(RolloutColumn):
    """What the rows of a put look like: numbers become int64, uint64 where int64 is too small, float64 or bool
    (objects, where float64 would round an int, or ints are beyond these), arrays of one dtype and rank a ragged column,
    and everything else objects."""


def is_name(name: object) -> bool:
    """Whether a column can be called so. Names that begin with __ are the bridge's own."""
    return isinstance(name, str) and bool(name) and not name.startswith("__")


def native(dtype: str) -> np.dtype[Any]:
    """The dtype of this name as tensors have it: in the byte order of this machine."""
    return np.dtype(np.dtype(dtype).name)


def has_all_of(dtype: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether every number of `other` is one of `dtype`. NumPy calls it safe, too, to round integers of 64 bits."""
    is_rounded = dtype.kind == "f" and other.kind in "iu" and other.itemsize == 8
    return bool(np.can_cast(other, dtype)) and not is_rounded


class RolloutSchema:
    """The columns of a rollout by name, in their order. `others`: what columns are that are not among them (None: there
    are none). Raises `InvalidInput` for what is no column."""

    def __init__(self, columns: Mapping[str, RolloutColumn], *, others: RolloutColumn | None = None) -> None:
        self.columns = dict(mapping(columns, "columns"))
        self.others = others
        if not self.columns and others is None:
            raise InvalidInput("a schema has at least one column")
        for name, column in self.columns.items():
            if not is_name(name):
                raise InvalidInput(f"{name!r}: a column's name is a string that does not begin with __")
            if not isinstance(column, (Numbers, Ragged, Objects, Inferred)):
                raise InvalidInput(f"column {name!r}: expected Numbers, Ragged, Objects or Inferred, got {column!r}")
            for dtype in _dtypes(column):
                _check_dtype(name, dtype)
            if isinstance(column, Ragged) and not has_all_of(np.dtype(column.dtype), np.dtype(column.narrow)):
                raise InvalidInput(f"column {name!r}: {column.dtype} does not have all numbers of {column.narrow}")
            if isinstance(column, Ragged) and not all(type(size) is int and size > 0 for size in column.shape):
                raise InvalidInput(f"column {name!r}: shape {column.shape} of a row's steps")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def required(self) -> list[str]:
        return [name for name, column in self.columns.items() if not column.optional]

    def column(self, name: str) -> RolloutColumn | None:
        """What this column is; None where there is no such one, and where no column can be called so."""
        return self.columns.get(name, self.others) if is_name(name) else None

    def part(self, names: Iterable[str]) -> RolloutSchema:
        """The schema of these columns. Raises `InvalidInput` for one that is not there."""
        wanted = list(names)
        unknown = [name for name in wanted if self.column(name) is None]
        if unknown:
            raise InvalidInput(f"columns {unknown} are not in the schema, which has {list(self.columns)}")
        return RolloutSchema({name: column for name in wanted if (column := self.column(name)) is not None})


def _dtypes(column: RolloutColumn) -> list[str]:
    if isinstance(column, Ragged):
        return [column.dtype, column.narrow]
    return [column.dtype] if isinstance(column, Numbers) else []


def _check_dtype(name: str, dtype: str) -> None:
    try:
        kind = np.dtype(dtype).kind
    except TypeError:
        raise InvalidInput(f"column {name!r}: NumPy knows no dtype {dtype!r}") from None
    if kind not in KINDS or np.dtype(dtype).itemsize > 8:
        raise InvalidInput(f"column {name!r}: {dtype!r} is no dtype of numbers that tensors have")
