"""The status of every row of a partition, as it is reported."""

from __future__ import annotations

from typing import Any

import numpy as np

from transfer_queue.controller.readiness import Slots
from transfer_queue.controller.table import Table, rows_bytes
from transfer_queue.wire.messages import RowStatus


def unknown(rid: int) -> RowStatus:
    """There is no such partition, or no such field."""
    return RowStatus(rid, False, 0, b"", b"", None)


def status(rid: int, table: Table, live: Slots | slice, flags: np.ndarray[Any, Any]) -> RowStatus:
    """The status of the live rows, with their indexes as runs."""
    index = table.index[live]
    num = len(index)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(index) != 1) + 1]) if num else np.empty(0, np.int64)
    runs = np.stack([index[starts], np.diff(starts, append=num)], axis=1)
    values = np.ascontiguousarray(flags).view(np.int8).tobytes()
    return RowStatus(rid, True, num, rows_bytes(runs), values, table.declared, table.cleared)
