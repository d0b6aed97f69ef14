"""Which spans of a thread lie on which track: on one track a span ends before the next begins, or lies within it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from transfer_queue.trace.lines import TraceSpan

OWN = 0  # the track of what the thread did itself; those from 1 on have what it awaited, beside each other


def tracks_of(spans: Sequence[TraceSpan]) -> list[int]:
    """The track of each span of one thread."""
    found = [OWN] * len(spans)
    order = sorted(range(len(spans)), key=lambda n: (spans[n].start_ns, -spans[n].duration_ns))
    open_until: list[int] = []  # on the thread's own track, the innermost last
    free: list[tuple[int, int]] = []  # when each of the others is free again
    for number in order:
        span = spans[number]
        end = span.start_ns + span.duration_ns
        if not span.is_async:
            while open_until and open_until[-1] <= span.start_ns:
                open_until.pop()
            if not open_until or end <= open_until[-1]:
                open_until.append(end)
                continue
        track = heapq.heappop(free)[1] if free and free[0][0] <= span.start_ns else len(free) + 1
        heapq.heappush(free, (end, track))
        found[number] = track
    return found
