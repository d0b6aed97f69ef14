"""Counting requests: a service that keeps numbers for monitoring. Without metrics the plain `Service` runs instead.

One list increment and two additions per request; what the numbers are called is decided when they are asked for.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Hashable
from time import monotonic
from typing import Any

from transfer_queue.server.block_requests import Answer
from transfer_queue.server.service import ControllerLike, Service
from transfer_queue.server.sessions import ServerSession
from transfer_queue.storage.blocks import Unit
from transfer_queue.wire import messages as m

CONTROLLER, STORAGE = "controller", "storage"
# Seconds. From .001 on the boundaries of 0.1.11; most requests here take less.
BOUNDS = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
)  # fmt: skip

# The operations of 0.1.11 that a message does. One message may be what were two requests, one to each role.
OPS: dict[type, tuple[tuple[str, str], ...]] = {
    m.Fetch: ((CONTROLLER, "GET_META"),),
    m.Insert: ((CONTROLLER, "GET_META"),),
    m.Scan: ((CONTROLLER, "GET_META"),),
    m.ListTags: ((CONTROLLER, "GET_META"),),
    m.Find: ((CONTROLLER, "KV_RETRIEVE_META"),),
    m.NameRows: ((CONTROLLER, "KV_RETRIEVE_KEYS"),),
    m.ListKeys: ((CONTROLLER, "KV_LIST"),),
    m.SetTags: ((CONTROLLER, "SET_CUSTOM_META"),),
    m.Consumption: ((CONTROLLER, "GET_CONSUMPTION"),),
    m.Production: ((CONTROLLER, "GET_PRODUCTION"),),
    m.ResetConsumption: ((CONTROLLER, "RESET_CONSUMPTION"),),
    m.ListPartitions: ((CONTROLLER, "GET_LIST_PARTITIONS"),),
    m.Commit: ((CONTROLLER, "NOTIFY_DATA_UPDATE"), (STORAGE, "PUT_DATA")),
    m.Clear: ((CONTROLLER, "CLEAR_META"), (STORAGE, "CLEAR_DATA")),
    m.Get: ((STORAGE, "GET_DATA"),),
    m.Allocate: ((STORAGE, "ALLOCATE"),),
    m.Write: ((STORAGE, "WRITE"),),
    m.Read: ((STORAGE, "READ"),),
    m.Take: ((STORAGE, "TAKE"),),
}
TAGS_ONLY = ((CONTROLLER, "SET_CUSTOM_META"),)
WHOLE_PARTITION = ((CONTROLLER, "CLEAR_PARTITION"), (STORAGE, "CLEAR_DATA"))
VARIED = frozenset({m.Commit, m.Clear})  # what they do depends on what they name


class Histogram:
    """How many durations fell below each of `BOUNDS` but not the one before; the last bucket has the longer ones."""

    __slots__ = ("buckets", "seconds")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds

    @property
    def count(self) -> int:
        return sum(self.buckets)

    def add(self, other: Histogram) -> None:
        self.buckets = [mine + more for mine, more in zip(self.buckets, other.buckets, strict=True)]
        self.seconds += other.seconds

    def quantile(self, share: float) -> float:
        """Estimate by a straight line through its bucket; the highest boundary where it lies above all, 0 for none."""
        wanted, below = share * self.count, 0
        for number, bound in enumerate(BOUNDS):
            within = self.buckets[number]
            if within and below + within >= wanted:
                low = BOUNDS[number - 1] if number else 0.0
                return low + (bound - low) * (wanted - below) / within
            below += within
        return BOUNDS[-1] if below < self.count else 0.0


class Meter:
    """The requests of one kind: how long the server was busy with each (`busy`), errors, rows, and for those that
    were parked how long they waited (`waits`)."""

    __slots__ = ("busy", "errors", "ops", "parked", "samples", "waits")

    def __init__(self, ops: tuple[tuple[str, str], ...]) -> None:
        self.ops = ops
        self.busy, self.waits = Histogram(), Histogram()
        self.errors = self.samples = self.parked = 0

    def add(self, other: Meter) -> None:
        self.busy.add(other.busy)
        self.waits.add(other.waits)
        self.errors += other.errors
        self.samples += other.samples
        self.parked += other.parked


class Meters(dict[type, Meter]):
    """One meter per type of message, made on first use; a message without a name in `OPS` is called as its type."""

    def __missing__(self, kind: type) -> Meter:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).upper()
        meter = self[kind] = Meter(OPS.get(kind, ((CONTROLLER, name),)))
        return meter


class MeteredService(Service):
    """A service that counts. `nbytes_in`: bytes published; `nbytes_out`: bytes of blocks handed to readers."""

    def __init__(self, controller: ControllerLike, unit: Unit, **parts: Any) -> None:
        super().__init__(controller, unit, **parts)
        self.started = monotonic()
        self.nbytes_in = self.nbytes_out = 0
        self._meters = Meters()
        self._tags_only, self._whole = Meter(TAGS_ONLY), Meter(WHOLE_PARTITION)
        self._parked: dict[Hashable, tuple[Meter, m.Request, float]] = {}

    def meters(self, role: str) -> dict[str, Meter]:
        """What was counted, by operation."""
        found: dict[str, Meter] = {}
        for meter in (*self._meters.values(), self._tags_only, self._whole):
            for of_role, name in meter.ops:
                if of_role == role:
                    found.setdefault(name, Meter(((role, name),))).add(meter)
        return {name: meter for name, meter in found.items() if meter.busy.count}

    def handle(
        self, message: m.Request, payload: memoryview, session: ServerSession, ticket: Hashable, now: float
    ) -> Answer | None:
        kind = type(message)
        meter = self._meters[kind]
        if kind in VARIED and self._is_special(message):
            meter = self._tags_only if kind is m.Commit else self._whole
        try:
            answer = Service.handle(self, message, payload, session, ticket, now)
        except Exception:  # a defect, which the caller reports
            meter.errors += 1
            meter.busy.observe(monotonic() - now)
            raise
        seconds = monotonic() - now
        busy = meter.busy
        busy.buckets[bisect_left(BOUNDS, seconds)] += 1
        busy.seconds += seconds
        if answer is None:
            meter.parked += 1
            self._parked[ticket] = (meter, message, now)
        else:
            count = COUNTS.get(type(answer[0]))
            if count is not None:
                count(self, meter, message, answer[0])
        return answer

    def _is_special(self, message: m.Request) -> bool:
        if isinstance(message, m.Commit):
            return message.block < 0
        return isinstance(message, m.Clear) and message.keys is None and message.rows is None

    def close_request(self, session: ServerSession, answer: Answer) -> None:
        """A parked request was answered."""
        reply = answer[0]
        waited = self._parked.pop(session.parked.get(reply.rid), None)
        if waited is not None:
            meter, message, since = waited
            meter.waits.observe(monotonic() - since)
            if type(reply) in COUNTS:
                COUNTS[type(reply)](self, meter, message, reply)
        super().close_request(session, answer)

    def detach(self, session: ServerSession, tickets: set[Hashable], now: float) -> None:
        super().detach(session, tickets, now)
        if not session.connections:  # what was answered while the last connection was closing
            for ticket in session.parked.values():
                self._parked.pop(ticket, None)

    def _forget(self, tickets: set[Hashable], is_asked_again: bool = False) -> None:
        super()._forget(tickets, is_asked_again)
        for ticket in tickets:
            self._parked.pop(ticket, None)


# What a reply says more than that the request was done; keyed by its type, since this runs for every request.


def _count_error(_service: MeteredService, meter: Meter, _message: m.Request, _reply: Any) -> None:
    meter.errors += 1


def _count_rows(_service: MeteredService, meter: Meter, _message: m.Request, reply: Any) -> None:
    meter.samples += len(reply.rows) // 8


def _count_refused(_service: MeteredService, meter: Meter, _message: m.Request, reply: Any) -> None:
    meter.errors += bool(reply.refused)


def _count_written(service: MeteredService, meter: Meter, message: Any, reply: Any) -> None:
    meter.samples += len(reply.rows) // 8
    meter.errors += bool(reply.refused)
    for number in (message.block, *(one.block for one in message.shared if one.is_new)):
        block = service.unit.block(number)
        if block is not None:
            service.nbytes_in += block.nbytes


def _count_read(service: MeteredService, meter: Meter, _message: m.Request, reply: Any) -> None:
    meter.samples += reply.count
    service.nbytes_out += sum([piece.nbytes for piece in reply.pieces])


def _count_named(_service: MeteredService, meter: Meter, message: m.Request, _reply: Any) -> None:
    if isinstance(message, m.Clear):
        meter.samples += len(message.keys or ()) + len(message.rows or b"") // 8
    elif isinstance(message, m.SetTags):
        meter.samples += len(message.tags)


def _count_handed(service: MeteredService, meter: Meter, _message: m.Request, reply: Any) -> None:
    meter.samples += len(reply.rows.rows) // 8
    service.nbytes_out += sum([piece.nbytes for piece in reply.located.pieces])


COUNTS: dict[type, Callable[[MeteredService, Meter, m.Request, Any], None]] = {
    m.Failed: _count_error, m.RowSet: _count_rows, m.Committed: _count_written, m.Located: _count_read,
    m.Handed: _count_handed, m.SlotsFinished: _count_refused,
    m.Done: _count_named,
}  # fmt: skip
