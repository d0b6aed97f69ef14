"""Columns: a version may have millions of pieces, and an object for each would take seconds.

A column is a flat array with an integer for each row; where it travels, its bytes are little-endian. Rows of few kinds
say which one, by number. What is ragged (the cells of shards, the pieces of tensors) lies one behind the other, and
another column says how many each one has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from transfer_queue.memory.bytes import Bytes, Ints

K = TypeVar("K", bound=Hashable)
DIGEST_NBYTES = 16
Column: TypeAlias = NDArray[Any]


def column_of(data: bytes, width: int = 4) -> Column:
    """The integers of `width` bytes; `ValueError` when `data` is not some of them."""
    return np.frombuffer(data, f"<i{width}")


def bytes_of(column: Column, width: int = 4) -> bytes:
    """See `column_of`. `OverflowError` for an integer that needs more."""
    if len(column) and width < 8 and max(-int(column.min()) - 1, int(column.max())) >> (8 * width - 1):
        raise OverflowError(f"{int(column.max())} needs more than {width} bytes")
    return column.astype(f"<i{width}").tobytes()


def ends_of(counts: Column) -> tuple[Ints, Ints]:
    """Where the runs of these many rows begin and end."""
    ends = np.cumsum(counts, dtype=np.int64)
    return ends - counts, ends


def spread(first: Column, counts: Column) -> Ints:
    """`counts` rows from `first` on, for one run after the other."""
    begin, ends = ends_of(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(first - begin, counts)


def numbered(values: Iterable[K]) -> tuple[Ints, list[K]]:
    """For each value the number of its kind, and the kinds, in the order in which they come."""
    number: defaultdict[K, int] = defaultdict()
    number.default_factory = number.__len__
    found = np.array([number[value] for value in values], np.int64)
    return found, list(number)


def numbered_runs(column: Column, counts: Column) -> tuple[Ints, Ints]:
    """As `numbered`, of runs of rows; of each kind, the first run that is one."""
    wide = np.ascontiguousarray(column, np.int64)
    data = wide.tobytes()
    ends = (8 * np.cumsum(counts, dtype=np.int64)).tolist()
    number: defaultdict[bytes, int] = defaultdict()
    number.default_factory = number.__len__
    found = np.array([number[data[a:b]] for a, b in zip([0, *ends], ends, strict=False)], np.int64)
    return found, np.unique(found, return_index=True)[1]


def alike(column: Column, counts: Column) -> Iterator[Ints]:
    """The runs that are the same, by number, together."""
    found, first = numbered_runs(column, counts)
    order = order_of(found)
    yield from np.split(order, np.cumsum(np.bincount(found, minlength=len(first)))[:-1]) if len(order) else ()


def order_of(column: Column) -> Ints:
    """`argsort`, stable. Of numbers that are small it takes a tenth of the time, by their digits."""
    is_small = len(column) > 0 and column.min() >= 0 and column.max() < 1 << 16
    return np.argsort(column.astype(np.uint16) if is_small else column, kind="stable")


def first_of(groups: Column, num: int) -> Ints:
    """The first row of each of `num` groups, given the group of each row; each has one."""
    found = np.empty(num, np.int64)
    found[groups[::-1]] = np.arange(len(groups) - 1, -1, -1)
    return found


def digests_from(texts: Iterable[str]) -> Bytes:
    """Hex digests as a row of bytes each."""
    return digest_rows(bytes.fromhex("".join(texts)))


def digest_rows(column: bytes) -> Bytes:
    """A column of digests, a row for each."""
    return np.frombuffer(column, np.uint8).reshape(-1, DIGEST_NBYTES)


def hex_of(digests: Bytes) -> Bytes:
    """The hex digits of each row, as ASCII."""
    return np.frombuffer(digests.tobytes().hex().encode(), np.uint8).reshape(-1, 2 * DIGEST_NBYTES)


def texts_of(digests: Bytes) -> list[str]:
    """As `digests_from` takes them."""
    text = digests.tobytes().hex()
    return [text[at : at + 2 * DIGEST_NBYTES] for at in range(0, len(text), 2 * DIGEST_NBYTES)]
