"""How many cells of each field were in rows that are cleared. Who looks needs them for rates: what is there says too
little of a job that clears rows as fast as it writes them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CellCounts = NDArray[np.int64]


def counted(totals: CellCounts, cells: NDArray[np.uint16], slots: NDArray[np.int64]) -> CellCounts:
    """`totals` by field, and the cells of `slots`, which are about to be removed. `cells` has those of all fields."""
    if len(totals) < len(cells):
        totals = np.concatenate([totals, np.zeros(len(cells) - len(totals), np.int64)])
    if len(slots) < 2:
        for slot in slots.tolist():
            totals += cells[:, slot] != 0
        return totals
    first, last = int(slots[0]), int(slots[-1])
    is_run = last - first == len(slots) - 1 and bool((slots[1:] > slots[:-1]).all())
    under = cells[:, first : last + 1] if is_run else cells[:, slots]  # a run costs a third
    totals += np.count_nonzero(under, axis=1)
    return totals
