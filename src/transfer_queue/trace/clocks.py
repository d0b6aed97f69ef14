"""One clock for the processes of several hosts."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from transfer_queue.trace.lines import TraceHeader


def shifts_ns(headers: Sequence[TraceHeader]) -> dict[str, int]:
    """For each process (`ident`) what makes its CLOCK_MONOTONIC the wall clock.

    The same for all processes of one boot of one host, which share the clock: what they recorded stays in order. Those
    of different hosts are as far off as the hosts' wall clocks.
    """
    seen: defaultdict[str, list[int]] = defaultdict(list)
    for one in headers:
        seen[one.boot or one.ident].append(one.wall_ns - one.monotonic_ns)
    middle = {boot: statistics.median_low(offsets) for boot, offsets in seen.items()}
    return {one.ident: middle[one.boot or one.ident] for one in headers}
