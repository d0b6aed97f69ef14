"""The recordings of a job as one trace in the Trace Event Format, which Perfetto and Chrome open."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import msgspec

from transfer_queue.trace.clocks import shifts_ns
from transfer_queue.trace.flows import Place, row_flows, version_flows
from transfer_queue.trace.lines import READ, USED, WROTE, TraceSpan
from transfer_queue.trace.recordings import TracedProcess
from transfer_queue.trace.tracks import OWN, tracks_of

CATEGORIES = {WROTE: "put", READ: "get", USED: "ack"}
SHOWN_RUNS, SHOWN_KEYS = 16, 8
PARKED_NS = 1_000_000  # shorter waits are no slices of their own
EDGE_NS = 1_000  # how far within its slice an arrow begins
_encode = msgspec.json.Encoder().encode


class PlacedSpan(NamedTuple):
    """A span on its track, on the clock of the timeline."""

    start_ns: int
    duration_ns: int
    pid: int
    tid: int
    span: TraceSpan

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


class Counts(NamedTuple):
    """What is in a timeline. `lost`: spans that its processes could not keep."""

    processes: int
    spans: int
    flows: int
    lost: int


Timed = tuple[int, int, dict[str, Any]]  # when, minus how long, and the event without its time


def write_timeline(
    processes: Sequence[TracedProcess], into: BinaryIO, since_s: float | None = None, max_flows: int = 200
) -> Counts:
    """Write the trace, as JSON with an event on each line, in the order of time.

    `since_s`: only what had not ended so many seconds before the last span's end. `max_flows`: how many rows have
    arrows from the put that wrote them to the last span that was about them.
    """
    slices, names = _laid_out(processes)
    if since_s is not None:
        last = max((one.end_ns for one in slices.values()), default=0)
        slices = {place: one for place, one in slices.items() if last - one.end_ns <= since_s * 1e9}
    first = min((one.start_ns for one in slices.values()), default=0)
    spans = [(one.start_ns, place, one.span) for place, one in slices.items()]
    ways = [("row", *way) for way in row_flows(spans, max_flows)]
    ways += [("weights", *way) for way in version_flows(spans)]
    timed = [event for one in slices.values() for event in _slice(one)]
    for number, (category, name, places) in enumerate(ways, 1):
        timed += _flow({"id": number, "cat": category, "name": name}, [slices[place] for place in places])
    timed.sort(key=lambda one: one[:2])
    lost = sum(max(one.lost, default=0) for one in processes)
    events = [_encode(event) for event in names]
    events += (_encode({**event, "ts": (at - first) / 1000}) for at, _, event in timed)
    into.write(b'{"displayTimeUnit":"ms","traceEvents":[\n' + b",\n".join(events))
    into.write(b'\n],"otherData":' + _encode(_about(processes, first, lost)) + b"}\n")
    return Counts(len(processes), len(slices), len(ways), lost)


def _laid_out(processes: Sequence[TracedProcess]) -> tuple[dict[Place, PlacedSpan], list[dict[str, Any]]]:
    """All spans on their tracks, and the events that name processes and tracks."""
    shifts = shifts_ns([one.header for one in processes])
    slices: dict[Place, PlacedSpan] = {}
    names: list[dict[str, Any]] = []
    tids = itertools.count(1)
    for number, (process, pid) in enumerate(zip(processes, _pids(processes), strict=True)):
        shift = shifts[process.header.ident]
        names += _process_names(process, pid)
        by_thread: defaultdict[int, list[int]] = defaultdict(list)
        for position, span in enumerate(process.spans):
            by_thread[span.thread].append(position)
        for thread, positions in by_thread.items():
            name = process.threads.get(thread, f"thread {thread}")
            tracks: dict[int, int] = {}
            for position, track in zip(positions, tracks_of([process.spans[n] for n in positions]), strict=True):
                if track not in tracks:
                    tracks[track] = next(tids)
                    shown = name if track == OWN else f"{name}, awaited {track}"
                    names.append(_name("thread_name", pid, {"name": shown}, tracks[track]))
                span = process.spans[position]
                start, length = span.start_ns + shift, max(1, span.duration_ns)
                slices[number, position] = PlacedSpan(start, length, pid, tracks[track], span)
    return slices, names


def _pids(processes: Sequence[TracedProcess]) -> list[int]:
    """The processes' own numbers, where no two of them (of several hosts, or one after the other) have the same."""
    found: dict[int, None] = {}
    others = itertools.count(1 << 30)
    for one in processes:
        found[next(others) if one.header.pid in found or not 0 < one.header.pid < 1 << 30 else one.header.pid] = None
    return list(found)


def _process_names(process: TracedProcess, pid: int) -> Iterator[dict[str, Any]]:
    header = process.header
    yield _name("process_name", pid, {"name": f"{header.name} ({header.host}, {header.pid})"})
    lost = max(process.lost, default=0)
    if lost:
        yield _name("process_labels", pid, {"labels": f"{lost} spans lost"})


def _name(kind: str, pid: int, args: dict[str, Any], tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _slice(one: PlacedSpan) -> Iterator[Timed]:
    """A complete event; a wait that is worth seeing is another one within it."""
    span = one.span
    category = "weights" if span.version else CATEGORIES.get(span.action, "call")
    place = {"pid": one.pid, "tid": one.tid}
    event = {"ph": "X", "name": span.name, "cat": category, **place, "dur": one.duration_ns / 1000, "args": _args(span)}
    yield one.start_ns, -one.duration_ns, event
    waited = min(span.waited_ns, one.duration_ns)
    if waited >= PARKED_NS:
        event = {"ph": "X", "name": "parked", "cat": "wait", **place, "dur": waited / 1000, "args": {}}
        yield one.start_ns, -waited, event


def _args(span: TraceSpan) -> dict[str, Any]:
    runs = list(zip(span.rows[::2], span.rows[1::2], strict=True))
    shown = [str(first) if number == 1 else f"{first}-{first + number - 1}" for first, number in runs[:SHOWN_RUNS]]
    told = {
        "partition": span.partition, "task": span.task, "version": span.version, "error": span.error,
        "rows": span.num_rows, "bytes": span.nbytes, "waited_ms": span.waited_ns / 1e6, "lease": abs(span.lease),
        "global_indexes": ", ".join([*shown, "..."] if len(runs) > SHOWN_RUNS else shown),
        "keys": list(span.keys)[:SHOWN_KEYS], "service": span.service,
    }  # fmt: skip
    return {name: value for name, value in told.items() if value}


def _flow(arrow: dict[str, Any], steps: Sequence[PlacedSpan]) -> Iterator[Timed]:
    """The arrows from the first step over those between to the last, each end within its slice."""
    for number, (step, at) in enumerate(zip(steps, _ends_of_arrows(steps), strict=True)):
        kind = "s" if not number else "t" if number < len(steps) - 1 else "f"
        event = {"ph": kind, **arrow, "pid": step.pid, "tid": step.tid}
        yield at, 0, {**event, "bp": "e"} if kind == "f" else event


def _ends_of_arrows(steps: Sequence[PlacedSpan]) -> list[int]:
    """When each step took effect, ascending: a put as soon as it had begun, everything else just before it ended."""
    found = [
        one.start_ns + min(EDGE_NS, one.duration_ns // 2) if one.span.action == WROTE else one.end_ns - 1
        for one in steps
    ]
    for number in range(len(steps) - 2, -1, -1):
        found[number] = max(steps[number].start_ns, min(found[number], found[number + 1]))
    return list(itertools.accumulate(found, max))


def _about(processes: Sequence[TracedProcess], first: int, lost: int) -> dict[str, Any]:
    hosts = sorted({one.header.host for one in processes})
    return {"recorded_by": "transfer_queue", "first_span_unix_ns": str(first), "hosts": hosts, "spans_lost": lost}
