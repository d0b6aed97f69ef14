"""The way of a row: from the put that wrote it, over the gets that read it, to the step that used it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from transfer_queue.trace.lines import READ, USED, WROTE, TraceSpan
from transfer_queue.trace.rows import Indexes

MAX_STEPS = 64  # of one row
MAX_ROWS = 1 << 24  # that are looked at when some are chosen
Place = tuple[int, int]  # of a span: which process, and which of its spans


class RowStep(NamedTuple):
    """A span that did something to rows, in the order of what was done. `rows`: runs, with those of known keys."""

    at_ns: int
    place: Place
    span: TraceSpan
    rows: Sequence[int]


def row_flows(spans: Iterable[tuple[int, Place, TraceSpan]], most: int) -> list[tuple[str, list[Place]]]:
    """What each of at most `most` rows went through, evenly chosen among those that were written and read.

    `spans`: (start on one clock, place, span) of all processes. Rows of several services are kept apart.
    """
    by_service: defaultdict[str, list[RowStep]] = defaultdict(list)
    for seen in _in_order(spans):
        by_service[seen.span.service].append(seen)
    share = max(1, most // max(1, len(by_service)))
    found: list[tuple[str, list[Place]]] = []
    for steps in by_service.values():
        found += _flows(steps, share)
    return found[:most]


def version_flows(spans: Iterable[tuple[int, Place, TraceSpan]]) -> list[tuple[str, list[Place]]]:
    """The spans of each version of weights, from the trainer's to the commits."""
    ways: defaultdict[str, list[tuple[int, Place]]] = defaultdict(list)
    for start, place, span in spans:
        if span.version and span.name != "pack_weights":
            ways[span.version].append((start, place))
    return [(name, [place for _, place in sorted(way)]) for name, way in ways.items() if len(way) > 1]


def _in_order(spans: Iterable[tuple[int, Place, TraceSpan]]) -> Iterator[RowStep]:
    """What was done to rows, in the order in which it took effect: a put when it began at the earliest, everything
    else when it ended. Rows of keys and of leases that another span named are filled in."""
    timed = [
        (start if span.action == WROTE else start + span.duration_ns, place, span)
        for start, place, span in spans
        if span.action in (WROTE, READ, USED) and not span.error
    ]
    keyed: dict[tuple[str, str, str], int] = {}
    leased: dict[tuple[str, int], Sequence[int]] = {}
    for at, place, span in sorted(timed, key=lambda one: one[:2]):
        rows: Sequence[int] = span.rows
        for key, row in span.keys.items():
            name = (span.service, span.partition, key)
            if row >= 0:
                keyed[name] = row
            elif not span.rows and name in keyed:
                rows = [*rows, keyed[name], 1]
        lease = (span.service, span.lease)
        if span.lease and span.action == READ:
            leased[lease] = rows
        yield RowStep(at, place, span, rows or (leased.get(lease, ()) if span.action == USED else ()))


def _flows(steps: Sequence[RowStep], most: int) -> list[tuple[str, list[Place]]]:
    written = _rows([one.rows for one in steps if one.span.action == WROTE])
    read = _rows([one.rows for one in steps if one.span.action != WROTE])
    chosen = _evenly(np.intersect1d(written, read), most)
    ways: Mapping[int, list[Place]] = {row: [] for row in chosen.tolist()}
    for one in steps:
        for first, number in zip(one.rows[::2], one.rows[1::2], strict=True):
            begin, end = np.searchsorted(chosen, [first, first + number])
            for row in chosen[begin:end].tolist():
                ways[row].append(one.place)
    return [(f"row {row}", _shortened(way)) for row, way in ways.items() if len(way) > 1]


def _rows(runs: Iterable[Sequence[int]]) -> Indexes:
    """The rows of some runs, each once, ascending; the first `MAX_ROWS`."""
    found: list[Indexes] = []
    left = MAX_ROWS
    for one in runs:
        for first, number in zip(one[::2], one[1::2], strict=True):
            found.append(np.arange(first, first + min(number, left), dtype=np.int64))
            left -= min(number, left)
    return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)


def _evenly(rows: Indexes, most: int) -> Indexes:
    if len(rows) <= most:
        return rows
    return rows[np.linspace(0, len(rows) - 1, most).round().astype(np.int64)] if most else rows[:0]


def _shortened(way: list[Place]) -> list[Place]:
    """Each place once, the first and last of many."""
    way = list(dict.fromkeys(way))
    return way if len(way) <= MAX_STEPS else way[: MAX_STEPS // 2] + way[-MAX_STEPS // 2 :]
