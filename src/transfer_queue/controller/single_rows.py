"""What a table is asked of one row alone: in a fifth of the time that NumPy takes for arrays of one.

A service of rows that come one at a time does nothing else, with caches that are cold each time. A look at one item of
an array is then a tenth of a microsecond, and indexing by an array of one 2 to 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Cells = NDArray[np.uint16]
MANY = 16  # from so many columns on NumPy is faster


def has_all(cells: Cells, columns: Sequence[int], slot: int) -> bool:
    """Whether all these columns of a row are written."""
    if len(columns) > MANY:
        return bool(np.count_nonzero(cells[columns, slot]) == len(columns))
    item = cells.item
    return all(item(column, slot) for column in columns)


def slot_of(index: NDArray[np.int64], alive: NDArray[np.bool_], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The slot of the one row with the `wanted` index, among the ascending `index` of all; -1 where it is not alive."""
    found = index.searchsorted(wanted)
    at = found.item(0)
    if at == len(index) or index.item(at) != wanted.item(0) or not alive.item(at):
        found[0] = -1
    return found


def cells_of_blocks(cells: Cells, groups: Sequence[Any], slot: int, columns: Sequence[int]) -> list[tuple[int, int]]:
    """How many of these cells of a row each block has. `cells` has the columns of all fields."""
    under = cells[:, slot].tolist()
    counts: dict[int, int] = {}
    for column in columns:
        number = under[column]
        if number:
            counts[number] = counts.get(number, 0) + 1
    return [(groups[number].block.item(slot), count) for number, count in counts.items()]


def places_of(
    cells: Cells, groups: Sequence[Any], slot: int, columns: Sequence[tuple[str, int]]
) -> list[tuple[list[str], int, int]]:
    """Fields (name, column) of a row that lie alike, their block, and its row there. `cells` as before."""
    under = cells[:, slot].tolist()
    alike: dict[int, list[str]] = {}
    for name, column in columns:
        alike.setdefault(under[column], []).append(name)
    return [(names, groups[at].block.item(slot), groups[at].row.item(slot)) for at, names in alike.items()]
