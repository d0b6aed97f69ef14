"""Checks what several clients did to one service at once. Pure: no clock, no files, no service.

A history is a list of records: who did what, from when to when (`time.monotonic`, which processes of one host share),
and how it ended. What has an unknown outcome (a deadline, a lost connection, a killed client) took effect at any time
after its start, or never. `check_keys` and `check_rows` return a `Violation` for everything that no correct service
could have answered, with a name for what is wrong; an empty list means that the history is possible.

Keys. Every key is a register that holds a value or is absent. A key's history is right when its operations, each taken
as one instant between its start and its end, have an order in which every read gives what the write before it left
(linearisability: Herlihy and Wing 1990). The search takes, again and again, one of the operations that no other
remaining one precedes, and goes back where none fits (Wing and Gong 1993); a set of taken operations with the value
they left is tried once (Lowe 2017). Three properties keep it small: a read that fits the value at hand may always be
taken at once; a write of unknown outcome that nobody read is left out; one that was read came before that read
ended. Every write has a value of its own, so a read tells which write it saw.

Rows are in `histories_rows`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Outcome = Literal["ok", "refused", "unknown"]
MAX_STATES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Record:
    """An operation of one process. `refused`: it certainly changed nothing and took nothing."""

    process: str
    started: float
    ended: float = math.inf
    outcome: Outcome = "unknown"


@dataclass(frozen=True, kw_only=True)
class Put(Record):
    """The key has this value now. No two puts of a history have the same value."""

    key: str
    value: int


@dataclass(frozen=True, kw_only=True)
class Get(Record):
    """What was read: None where the key was absent."""

    key: str
    value: int | None = None


@dataclass(frozen=True, kw_only=True)
class Clear(Record):
    """The key is absent now."""

    key: str


class Violation(NamedTuple):
    name: str
    subject: str  # a key, a row, a task
    text: str
    records: tuple[Record, ...] = ()

    def __str__(self) -> str:
        return "\n    ".join([f"{self.name}, {self.subject}: {self.text}", *map(str, self.records)])


def check_keys(history: Iterable[Record]) -> list[Violation]:
    """At most one violation per key. Raises `RuntimeError` for a key that would take too long to decide."""
    by_key: dict[str, list[Put | Get | Clear]] = defaultdict(list)
    for record in history:
        if isinstance(record, (Put, Get, Clear)):
            by_key[record.key].append(record)
    found = (_check_key(key, records) for key, records in sorted(by_key.items()))
    return [violation for violation in found if violation is not None]


def _check_key(key: str, records: Sequence[Put | Get | Clear]) -> Violation | None:
    writers = {record.value: record for record in records if isinstance(record, Put)}
    assert len(writers) == sum(isinstance(record, Put) for record in records), f"two puts of one value to {key}"
    reads = [record for record in records if isinstance(record, Get) and record.outcome == "ok"]
    for read in reads:
        writer = None if read.value is None else writers.get(read.value)
        if read.value is not None and writer is None:
            return Violation("read of a value never written", key, f"nobody put {read.value}", (read,))
        if writer is not None and writer.outcome == "refused":
            return Violation("read of a refused write", key, f"the put of {read.value} raised", (writer, read))
        if writer is not None and read.ended < writer.started:
            return Violation("read before its write", key, f"{read.value} was not put yet", (read, writer))
    blocked = _unordered(*_steps(records, reads))
    return None if blocked is None else _named(key, blocked, records, reads)


class _Step(NamedTuple):
    started: float
    ended: float
    value: int | None
    record: Put | Get | Clear


def _steps(records: Sequence[Put | Get | Clear], reads: Sequence[Get]) -> tuple[list[_Step], list[_Step]]:
    """(what has to be put in order, clears that may have happened), by start."""
    read_by = _first_reads(reads)
    steps, optional = [_Step(read.started, read.ended, read.value, read) for read in reads], []
    for record in records:
        value = record.value if isinstance(record, Put) else None
        if isinstance(record, Get) or record.outcome == "refused":
            continue
        if record.outcome == "ok":
            ended = min(record.ended, read_by.get(value, math.inf)) if isinstance(record, Put) else record.ended
            steps.append(_Step(record.started, ended, value, record))
        elif value in read_by and isinstance(record, Put):
            steps.append(_Step(record.started, read_by[value], value, record))
        elif value in read_by:
            optional.append(_Step(record.started, math.inf, None, record))
    return sorted(steps, key=lambda step: step[:2]), sorted(optional, key=lambda step: step[:2])


def _first_reads(reads: Sequence[Get]) -> dict[int | None, float]:
    """When the first read of each value ended: whoever wrote it had done so."""
    ends: dict[int | None, float] = {}
    for read in reads:
        ends[read.value] = min(read.ended, ends.get(read.value, math.inf))
    return ends


def _unordered(steps: Sequence[_Step], optional: Sequence[_Step]) -> list[Get] | None:
    """None when there is an order; else the reads that fit nowhere after the longest one that was found."""
    stack: list[tuple[int, int, int | None]] = [(0, 0, None)]  # taken steps (bits), clears used, value
    seen: dict[tuple[int, int | None], int] = {}  # how few clears were used to get there
    best, blocked = -1, [step.record for step in steps if isinstance(step.record, Get)]
    for _ in range(MAX_STATES):
        if not stack:
            return blocked
        taken, cleared, value = stack.pop()
        if taken == (1 << len(steps)) - 1:
            return None
        if seen.get((taken, value), math.inf) <= cleared:
            continue
        seen[taken, value] = cleared
        enabled, limit = _enabled(steps, taken)
        fitting = next((i for i in enabled if isinstance(steps[i].record, Get) and steps[i].value == value), None)
        if fitting is not None:
            stack.append((taken | 1 << fitting, cleared, value))
            continue
        if taken.bit_count() > best:
            best = taken.bit_count()
            blocked = [step.record for i in enabled if isinstance((step := steps[i]).record, Get)]
        if value is not None and cleared < len(optional) and optional[cleared].started <= limit:
            stack.append((taken, cleared + 1, None))  # those that may come now are all alike
        writes = [i for i in reversed(enabled) if not isinstance(steps[i].record, Get)]
        stack += [(taken | 1 << i, cleared, steps[i].value) for i in writes]
    raise RuntimeError(f"undecided after {MAX_STATES} states of a history of {len(steps)} operations")


def _enabled(steps: Sequence[_Step], taken: int) -> tuple[list[int], float]:
    """The steps that may come next, and the end of the one that has to come soonest."""
    found, limit = [], math.inf
    i = (~taken & (taken + 1)).bit_length() - 1  # the first that is not taken
    while i < len(steps) and steps[i].started <= limit:
        if not taken >> i & 1:
            found.append(i)
            limit = min(limit, steps[i].ended)
        i += 1
    return [i for i in found if steps[i].started <= limit], limit


def _named(key: str, blocked: Sequence[Get], records: Sequence[Put | Get | Clear], reads: Sequence[Get]) -> Violation:
    """What is wrong with a key's history: by the writes that a read should have seen and did not."""
    first = _first_reads(reads)
    for read in sorted(reads, key=lambda read: read.ended):
        missed = [record for record in records if not isinstance(record, Get) and _hides(record, read, records, first)]
        text = f"{'absent' if read.value is None else read.value} was read after"
        for name, some in (
            ("stale read", [w for w in missed if (w.value if isinstance(w, Put) else None) in first]),
            ("lost write", missed),
        ):
            if some:
                last = max(some, key=lambda write: write.ended)
                return Violation(name, key, f"{text} a later write returned", (last, read))
    return Violation("no order", key, "these reads fit nowhere", tuple(blocked))


def _hides(
    write: Put | Clear, read: Get, records: Sequence[Put | Get | Clear], first: Mapping[int | None, float]
) -> bool:
    """Whether `write` ended before the read began, and certainly came after whatever left what was read."""
    if write.outcome != "ok" or not write.ended < read.started:
        return False
    if read.value is None:
        undone = (r for r in records if isinstance(r, Clear) and r.outcome != "refused" and r.ended >= write.started)
        return isinstance(write, Put) and all(clear.started > read.ended for clear in undone)
    source = next(r for r in records if isinstance(r, Put) and r.value == read.value)
    return min(source.ended, first[read.value]) < write.started
