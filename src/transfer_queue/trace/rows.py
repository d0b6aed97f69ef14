"""Which rows a span was about, in few bytes: at most `MOST` runs of rows, and as many keys.

Of more a sample is named that is the same everywhere: rows whose index, and keys whose checksum, is a multiple of a
power of two. So a row in the sample of a large put is in that of each small get of it, and its way can be followed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MOST = 64
MAX_KEY = 128  # characters
Indexes = npt.NDArray[np.int64]


def runs_of(rows: Indexes) -> list[int]:
    """The rows as ascending runs: (first, number), one after the other."""
    if len(rows) < 2:
        return [int(rows[0]), 1] if len(rows) else []
    if rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return [int(rows[0]), len(rows)]
    rows = np.unique(rows)
    starts = _starts(rows)
    step = 1
    while len(starts) > MOST:
        step *= 2
        rows = rows[rows % step == 0]
        starts = _starts(rows)
    ends = np.append(starts[1:], len(rows))
    return np.stack([rows[starts], ends - starts], 1).ravel().tolist()


def _starts(rows: Indexes) -> Indexes:
    """Where runs begin."""
    return np.flatnonzero(np.diff(rows, prepend=rows[:1] - 2) != 1)


def named(keys: Sequence[str], rows: Indexes | None) -> dict[str, int]:
    """Keys with their rows, -1 where these are not known."""
    known = rows is not None and len(rows) == len(keys)
    if len(keys) <= MOST:
        return {key[:MAX_KEY]: int(rows[n]) if known else -1 for n, key in enumerate(keys)}  # type: ignore[index]
    sums = np.array([zlib.crc32(key.encode("utf-8", "replace")) for key in keys], np.int64)
    chosen, step = np.arange(len(keys)), 1
    while len(chosen) > MOST:
        step *= 2
        chosen = chosen[sums[chosen] % step == 0]
    return {keys[n][:MAX_KEY]: int(rows[n]) if known else -1 for n in chosen.tolist()}  # type: ignore[index]
