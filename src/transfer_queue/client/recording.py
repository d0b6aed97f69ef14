"""Operations as spans of a trace, where this process records one: what each was about is read from its messages."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from threading import get_ident
from time import monotonic_ns
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from transfer_queue.client.carried import CarriedCells
from transfer_queue.client.effects import Call
from transfer_queue.client.session import Session
from transfer_queue.codec.layout import Column, decode_layout
from transfer_queue.metadata import BatchMeta, KVBatchMeta
from transfer_queue.trace import switch
from transfer_queue.trace.lines import READ, USED, WROTE, TraceSpan
from transfer_queue.trace.rows import named, runs_of
from transfer_queue.trace.telemetry import OPERATION_TYPES, TAG, Telemetry
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import numbers_of

ACTIONS: Mapping[type, str] = {
    m.Commit: WROTE, m.Fetch: READ, m.Get: READ, m.SelectGroups: READ, m.Ack: USED, m.AckGroups: USED, m.MarkStep: USED,
}  # fmt: skip
BY_NAME = {  # what a span of OpenTelemetry has to know when it begins
    **dict.fromkeys(("put", "kv_put", "kv_batch_put", "update", "kv_update", "finish", "finish_batch"), WROTE),
    **dict.fromkeys(("get_meta", "get_data", "take", "stream", "select", "kv_batch_get", "kv_batch_get_by_meta"), READ),
}
NOTHING: Mapping[str, Any] = {}


class OperationNote:
    """Notes what an operation asks and hears while it is carried out; its driver says when. What that means is found
    out later, by the thread that writes. Each method that is called meanwhile costs an operation about a microsecond,
    as none of its code is in the processor's caches.

    `call` is on its way. `args` and `kwargs` are what the operation was called with: where cells came with their
    metadata, only that names the rows.
    """

    __slots__ = (
        "_asked", "_ended", "_error", "_given", "_heard", "_is_async", "_life", "_moved", "_name", "_span", "_started",
        "_unasked", "_waited", "call", "telemetry", "thread",
    )  # fmt: skip

    def __init__(
        self, session: Session, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = NOTHING
    ) -> None:
        self._name = name
        self._life = session.life
        self._given = args[0] if args else kwargs.get("metadata", kwargs.get("meta"))
        self._asked: list[tuple[Any, Any]] = []  # requests, and their replies; None where an error came instead
        self._unasked: object = None  # cells that it had already
        self.call: Call | None = None
        self._moved = self._waited = 0
        self.telemetry = switch.telemetry
        if self.telemetry is not None:
            self._span = self.telemetry.span(name.strip("_"), BY_NAME.get(name.strip("_"), ""))
        self._started = self._heard = monotonic_ns()

    def tag(self, request: m.Request) -> None:
        """It is sent now, and says whose it is."""
        if self.telemetry is not None:
            _tag(request, self.telemetry.parent_of(self._span))

    def heard(self, call: Call, reply: m.Reply, payload: memoryview) -> None:
        """It has its answer."""
        self.call = None
        self._asked.append((call.request, reply))
        self._moved += len(call.payload or payload)
        before, self._heard = self._heard, monotonic_ns()
        if call.wait_s and type(call.request) is not m.Commit:  # that waits for room alone
            self._waited += self._heard - before

    def ended(self, error: BaseException | None = None, *, is_async: bool = False) -> None:
        """The operation has ended, maybe with an error. `is_async`: others ran in its thread meanwhile."""
        self._ended, self._error = monotonic_ns(), None if error is None else type(error)
        self.thread, self._is_async = get_ident(), is_async
        call, self.call = self.call, None  # it holds the bytes
        if call is not None:
            self._asked.append((call.request, None))
            self._waited += self._ended - self._heard if call.wait_s else 0
        if not self._asked and error is None and type(self._given) is BatchMeta:
            self._unasked = self._given._carried
        if self.telemetry is not None:
            self._tell(self.telemetry, error)
        self._given = None
        if switch.recorder is not None:
            switch.recorder.add(self)

    def posted(self, request: m.Request) -> None:
        """The request was sent past the drivers, and nobody waits for its answer."""
        self._asked.append((request, None))
        self.ended()

    def _tell(self, telemetry: Telemetry, error: BaseException | None) -> None:
        if error is not None:
            telemetry.fail(self._span, error)
        telemetry.link(self._span, _tags(self._given, self._asked))
        telemetry.end(self._span, _attributes(self.span()))

    def span(self) -> TraceSpan:
        """What it was about."""
        made = TraceSpan(
            self._started, self._ended - self._started, self.thread, self._name.strip("_"), "", "",
            _action(self._asked), _shown(self._life.service), 0, self._moved, [], {}, 0, self._waited,
            "" if self._error is None else self._error.__name__, "", self._is_async,
        )  # fmt: skip
        found: list[bytes] = []
        for request, reply in self._asked:
            made.partition = made.partition or _text(request, "partition")
            made.task = made.task or _text(request, "task")
            if type(request) is m.Allocate:
                made.nbytes += request.nbytes
            elif type(reply) is m.Located and not self._moved and self._error is None:
                made.nbytes += _located_nbytes(reply)  # none were in the answer
            if ACTIONS.get(type(request), "") == made.action:
                _name_rows(made, found, request, reply)
        if isinstance(self._unasked, CarriedCells):
            made.action, made.partition = READ, self._unasked.asked.request.partition
            made.nbytes = 0 if self._unasked.located is None else _located_nbytes(self._unasked.located)
            found.append(self._unasked.rows)
            made.num_rows = len(self._unasked.rows) // 8
        if len(found) == 1 and len(found[0]) == 8:
            made.rows = [int.from_bytes(found[0], "little"), 1]
        elif found:
            made.rows = runs_of(np.frombuffer(b"".join(found), np.int64))
        return made


def noting(session: Session, name: str) -> OperationNote | None:
    """The note of an operation that begins, where this process records any."""
    return OperationNote(session, name) if switch.is_on else None


def nbytes_of(found: TensorDictBase) -> int:
    """Of the tensors; objects are not counted. Asks jagged tensors nothing: each question costs them 100 us."""
    columns = [column for column in found.values() if isinstance(column, torch.Tensor)]
    return sum((one if type(one) is torch.Tensor else getattr(one, "_values", one)).nbytes for one in columns)


def _located_nbytes(reply: m.Located) -> int:
    """Of the cells, as they lie in their blocks; rows that differ in length count as their block's average. Of a block
    whose layout is elsewhere all."""
    nbytes = 0.0
    layouts = [decode_layout(data) for data in reply.layouts]
    for part in reply.parts:
        runs = numbers_of(part.runs, 3)
        for piece, rows in zip(reply.pieces, np.bincount(runs[:, 0], runs[:, 2]).tolist(), strict=False):
            if 0 <= piece.layout < len(layouts):
                layout = layouts[piece.layout]
                cells = sum(_nbytes_of(one) for one in map(layout.column, part.fields) if one is not None)
                nbytes += rows * cells / max(1, layout.rows)
            elif rows:
                nbytes += piece.nbytes
    return round(nbytes)


def _nbytes_of(column: Column) -> int:
    return sum(nbytes for _, nbytes in column.parts) + sum(map(_nbytes_of, column.children))


def _action(asked: Sequence[tuple[Any, Any]]) -> str:
    """What an operation did to rows; one that reads them to write them has written them."""
    if len(asked) == 1:
        return ACTIONS.get(type(asked[0][0]), "")
    actions = {ACTIONS.get(type(request), "") for request, _ in asked}
    return next((one for one in (WROTE, READ, USED) if one in actions), "")


def _name_rows(made: TraceSpan, found: list[bytes], request: Any, reply: Any) -> None:
    """Count the rows that a request was about, and find what names them."""
    answer = reply.rows if type(reply) in (m.Handed, m.GroupsLent) else reply
    if type(answer) is m.Located and made.num_rows:
        return  # the cells of rows that this operation was handed before
    if type(request) is m.MarkStep:
        rows: Any = b"".join(some or b"" for _, some in request.used)
    else:
        rows = answer.rows if type(answer) in (m.RowSet, m.Committed) else getattr(request, "rows", None)
    lease = getattr(reply, "lease", 0) or getattr(answer, "lease", 0) or getattr(request, "lease", 0)
    if lease > 0:
        made.lease = -lease if type(request) in (m.SelectGroups, m.AckGroups) else lease
    keys = getattr(request, "keys", None)
    if type(rows) is bytes:
        found.append(rows)
        made.num_rows += len(rows) // 8
    if type(keys) is list:
        indexes = None if type(rows) is not bytes else np.frombuffer(rows, np.int64)
        made.keys |= named(keys, indexes)
        made.num_rows += 0 if indexes is not None else getattr(answer, "count", len(keys))


def _text(request: Any, name: str) -> str:
    value = getattr(request, name, "")
    return value if type(value) is str else ""


@functools.lru_cache(16)
def _shown(service_id: bytes) -> str:
    return service_id.hex()[:12]


# for OpenTelemetry


def _tag(request: Any, parent: str) -> None:
    """Have the rows of a commit say which span wrote them, unless their writer says so."""
    if parent and type(request) is m.Commit:
        request.tags = [{TAG: parent, **tag} for tag in request.tags or [{}] * request.count]


def _tags(given: object, asked: Sequence[tuple[Any, Any]]) -> list[Mapping[str, Any]]:
    """The tags of the rows that were read, as far as they are known here."""
    found: list[Mapping[str, Any]] = []
    for request, reply in asked:
        answer = reply.rows if type(reply) in (m.Handed, m.GroupsLent) else reply
        if type(request) in (m.Fetch, m.SelectGroups) and type(answer) is m.RowSet:
            found += answer.tags or []
    reads = not asked or any(type(request) is m.Get for request, _ in asked)
    if reads and not found and isinstance(given, BatchMeta):
        found += given.custom_meta
    elif reads and not found and isinstance(given, KVBatchMeta):
        found += given.tags or []
    return found


def _attributes(made: TraceSpan) -> dict[str, Any]:
    told = {
        "messaging.operation.name": made.name,
        "messaging.operation.type": OPERATION_TYPES.get(made.action, ""),
        "messaging.destination.name": made.partition,
        "messaging.consumer.group.name": made.task,
        "messaging.batch.message_count": made.num_rows,
        "tq.nbytes": made.nbytes,
        "tq.waited_s": made.waited_ns / 1e9,
    }
    return {name: value for name, value in told.items() if value != ""}
