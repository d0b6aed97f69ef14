"""The way of a row: from the put that wrote it, over the gets that read it, to the step that used it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transfer_queue.trace.lines import READ, USED, WROTE, TraceSpan
from transfer_queue.trace.rows import Indexes

MAX_STEPS = 64  # of one row
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
    written = RowRuns(one.rows for one in steps if one.span.action == WROTE)
    chosen = written.evenly_with(RowRuns(one.rows for one in steps if one.span.action != WROTE), most)
    ways: Mapping[int, list[Place]] = {row: [] for row in chosen.tolist()}
    for one in steps:
        for first, number in zip(one.rows[::2], one.rows[1::2], strict=True):
            begin, end = np.searchsorted(chosen, [first, first + number])
            for row in chosen[begin:end].tolist():
                ways[row].append(one.place)
    return [(f"row {row}", _shortened(way)) for row, way in ways.items() if len(way) > 1]


class RowRuns:
    """The rows of some runs. They are never listed: a line of a trace may name billions of them."""

    def __init__(self, named: Iterable[Sequence[int]]) -> None:
        pairs = np.array([number for one in named for number in one], np.int64).reshape(-1, 2)
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        ends = np.maximum.accumulate(pairs.sum(axis=1))  # of runs that overlap, the last one
        begins = np.ones(len(pairs), np.bool_)
        begins[1:] = pairs[1:, 0] > ends[:-1]
        self.firsts = pairs[begins, 0]
        self.ends = ends[np.append(begins[1:], True)] if len(pairs) else ends

    def has(self, rows: Indexes) -> npt.NDArray[np.bool_]:
        """Which of these are among them."""
        return np.searchsorted(self.firsts, rows, "right") > np.searchsorted(self.ends, rows, "right")

    def evenly_with(self, others: RowRuns, most: int) -> Indexes:
        """At most `most` of the rows that are here and among the others, ascending and evenly chosen."""
        edges = np.unique(np.concatenate([self.firsts, self.ends, others.firsts, others.ends]))
        firsts, ends = edges[:-1], edges[1:]  # between two edges rows are all alike
        both = self.has(firsts) & others.has(firsts)
        firsts, upto = firsts[both], np.cumsum((ends - firsts)[both])
        total = int(upto[-1]) if len(upto) else 0
        ranks = np.arange(total) if total <= most else np.linspace(0, total - 1, most).round().astype(np.int64)
        at = np.searchsorted(upto, ranks, "right")
        before = np.append(np.int64(0), upto)[at]
        found: Indexes = firsts[at] + ranks - before
        return found


def _shortened(way: list[Place]) -> list[Place]:
    """Each place once, the first and last of many."""
    way = list(dict.fromkeys(way))
    return way if len(way) <= MAX_STEPS else way[: MAX_STEPS // 2] + way[-MAX_STEPS // 2 :]
