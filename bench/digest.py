"""Sums of what arrived, one number a row and field, so that a wrong, missing or misplaced row shows."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.payloads import Columns

Array = npt.NDArray[Any]
Sums = npt.NDArray[np.uint64]
Digest = dict[str, Sums]


class WrongBytes(AssertionError):
    """What the reader holds is not what the writer put."""


def of_payload(columns: Columns) -> Digest:
    """Digest of a batch as it was built."""
    return {name: of_column(column.rows) for name, column in columns.items()}


def of_column(rows: Array | Iterable[Any]) -> Sums:
    """One sum a row, over the bits of its elements as unsigned words of the element's size."""
    if isinstance(rows, np.ndarray):
        words = _words(rows.reshape(len(rows), -1))
        sums: Sums = np.add.reduce(words, axis=1, dtype=np.uint64)
        return sums
    return np.array([of_value(row) for row in rows], dtype=np.uint64)


def of_packed(values: Array, offsets: Array) -> Sums:
    """The same for rows that lie one after another in `values`; offsets (N + 1), none empty."""
    words = _words(values.reshape(len(values), -1))
    per_step = np.add.reduce(words, axis=1, dtype=np.uint64) if words.shape[1] != 1 else words[:, 0]
    return np.add.reduceat(per_step, offsets[:-1], dtype=np.uint64)


def of_value(value: Any) -> int:
    """Sum of one row: arrays and tensors by their bits, text by CRC, dicts and lists by what they hold, in order."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return int(np.add.reduce(_words(value.reshape(-1)), dtype=np.uint64))
    if isinstance(value, dict):
        return zlib.crc32(repr([(key, of_value(value[key])) for key in sorted(value)]).encode())
    if isinstance(value, list):
        return zlib.crc32(repr([of_value(item) for item in value]).encode())
    return zlib.crc32(repr(value).encode())


def check(got: Digest, expected: Digest, positions: Sequence[int] | None = None) -> None:
    """Raise WrongBytes naming the field and the first row that differs; `positions` are the expected rows, in order."""
    if set(got) != set(expected):
        raise WrongBytes(f"fields {sorted(got)} arrived, {sorted(expected)} were put")
    for name, sums in expected.items():
        wanted = sums if positions is None else sums[np.asarray(positions)]
        if len(got[name]) != len(wanted):
            raise WrongBytes(f"{name}: {len(got[name])} rows arrived, {len(wanted)} were asked for")
        differing = np.flatnonzero(got[name] != wanted)
        if len(differing):
            raise WrongBytes(f"{name}: {len(differing)} rows differ, the first is row {differing[0]}")


def _words(array: Array) -> Array:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
