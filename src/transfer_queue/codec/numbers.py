"""Many Python numbers as machine numbers at once.

`marshal` writes an int of 32 bits as a tag and 4 bytes, a float as a tag and 8. So its bytes tell the exact type of
every item together with its value, in half the time that asking each item for its type and `struct` take
(docs/benchmarks.md). What it writes is read here, by NumPy: nothing is ever given to `marshal.loads`.
"""

from __future__ import annotations

import itertools
import marshal
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = 2  # floats are binary from here on, and later ones write what comes twice as a reference
FEW = 1024  # so many take about as long either way
PROBED = 8  # rows whose first item is looked at before all are written: long ints are often long from the first on
LIST_HEAD = 5  # bytes that say how long a list is
# By the kind of a dtype: its record, and the tags of an item and of what stands before the items of a row.
RECORDS = {
    "i": (np.dtype([("tag", "u1"), ("value", "<i4")]), ord("i"), ord("[")),
    "f": (np.dtype([("tag", "u1"), ("value", "<f8")]), ord("g"), ord("N")),
}
# Before the head of each row, so that it takes as many bytes as a float, and all records lie in one array.
FILLING = (None,) * 4


def exact_numbers(rows: Sequence[list[Any]], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """The items of all rows, one after the other; floats that `dtype` has not are rounded, to infinity beyond it.

    None where one is not exactly an int, for a dtype of signed ints of 32 bits or more, or a float, for one of floats
    (but of a subclass, a truth value, a scalar of NumPy), where an int needs more than 32 bits, or where they are few.
    """
    count = sum(map(len, rows))
    if count < FEW or dtype.kind not in RECORDS or not all(_may_fit(row[0]) for row in rows[:PROBED] if row):
        return None
    record, item, head = RECORDS[dtype.kind]
    is_float = dtype.kind == "f"
    parts: Any = list(itertools.chain.from_iterable((*FILLING, row) for row in rows)) if is_float else rows
    try:
        written = marshal.dumps(parts, VERSION)
    except ValueError:  # an item that it does not write, or lists in each other too deep
        return None
    if len(written) != LIST_HEAD + record.itemsize * (len(rows) + count):
        return None
    records = np.frombuffer(written, record, offset=LIST_HEAD)
    tags, lengths = records["tag"], np.fromiter(map(len, rows), np.int64, len(rows))
    are_items = tags == item
    # The first item of another type would begin where a record begins, with a tag of its own.
    heads = tags[np.cumsum(lengths + 1) - lengths - 1]
    if np.count_nonzero(are_items) != count or not (heads == head).all():
        return None
    with np.errstate(over="ignore"):
        return records["value"][are_items].astype(dtype, copy=False)


def _may_fit(first: Any) -> bool:
    return type(first) is float or (type(first) is int and -(1 << 31) <= first < 1 << 31)
