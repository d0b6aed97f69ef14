"""Operations as spans of a trace, where this process records one: what each was about is read from its messages."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from transfer_queue.client.effects import Call, Effect, Operation
from transfer_queue.client.session import Session
from transfer_queue.metadata import BatchMeta, KVBatchMeta
from transfer_queue.trace import switch
from transfer_queue.trace.lines import READ, USED, WROTE, TraceSpan
from transfer_queue.trace.rows import Indexes, named, runs_of
from transfer_queue.trace.telemetry import OPERATION_TYPES, TAG
from transfer_queue.wire import messages as m

T = TypeVar("T")
ACTIONS: Mapping[type, str] = {
    m.Commit: WROTE, m.Fetch: READ, m.Get: READ, m.SelectGroups: READ, m.Ack: USED, m.AckGroups: USED, m.MarkStep: USED,
}  # fmt: skip
BY_NAME = {  # what a span of OpenTelemetry has to know when it begins
    **dict.fromkeys(("put", "kv_put", "kv_batch_put", "update", "kv_update"), WROTE),
    **dict.fromkeys(("get_meta", "get_data", "take", "stream", "select", "kv_batch_get", "kv_batch_get_by_meta"), READ),
}
NOTHING: Mapping[str, Any] = {}
METADATA = (BatchMeta, KVBatchMeta)
Asked = tuple[Any, Any]  # a request, and its reply; None where an error came instead
Given = BatchMeta | KVBatchMeta | None


def recorded(
    session: Session, operation: Operation[T], name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = NOTHING
) -> Operation[T]:
    """`operation`, of which a span is made at its end where this process records any; else as it is.

    `args` and `kwargs` are what it was called with: where cells came with their metadata only that names the rows.
    """
    if not switch.is_on:
        return operation
    given = args[0] if args else kwargs.get("metadata", kwargs.get("meta"))
    return _recorded(session, operation, name.strip("_"), given if isinstance(given, METADATA) else None)


def _recorded(session: Session, operation: Operation[T], name: str, given: Given) -> Operation[T]:
    """The operation. What it asks and hears is noted; what that means is found out later, by the thread that writes."""
    telemetry = switch.telemetry
    span = None if telemetry is None else telemetry.span(name, BY_NAME.get(name, ""))
    asked: list[Asked] = []
    result: Any = None
    failed = ""
    moved = waited = 0
    started = began = time.monotonic_ns()
    try:
        effect: Effect = next(operation)
        while True:
            call = effect if type(effect) is Call else None
            if call is not None:
                if telemetry is not None:
                    _tag(call.request, telemetry.parent_of(span))
                began = time.monotonic_ns()
            try:
                answer = yield effect
            except GeneratorExit:
                operation.close()
                raise
            except BaseException as error:  # noqa: BLE001  the operation decides what becomes of it
                if call is not None:
                    waited += time.monotonic_ns() - began if call.wait_s else 0
                    asked.append((call.request, None))
                effect = operation.throw(error)
            else:
                if call is not None:
                    if call.wait_s and type(call.request) is not m.Commit:  # that waits for room alone
                        waited += time.monotonic_ns() - began
                    asked.append((call.request, answer[0]))
                    moved += len(call.payload or answer[1])
                effect = operation.send(answer)
    except StopIteration as stop:
        result = stop.value
        return result
    except BaseException as error:
        failed = type(error).__name__
        if telemetry is not None:
            telemetry.fail(span, error)
        raise
    finally:
        unasked = (given._parts, given.indexes) if not asked and type(given) is BatchMeta else None
        about = (
            _span, name, started, time.monotonic_ns(), threading.get_ident(), asyncio._get_running_loop() is not None,
            asked, waited, unasked, moved or _nbytes(result), failed, session.life.service,
        )  # fmt: skip
        if switch.recorder is not None:
            switch.recorder.add(about)
        if telemetry is not None:
            telemetry.link(span, _tags(given, asked))
            telemetry.end(span, _attributes(_span(*about[1:])))


def _nbytes(result: Any) -> int:
    """Of the tensors in a result."""
    if type(result) is TensorDict:
        return nbytes_of(result)
    return sum(map(_nbytes, result)) if type(result) is tuple else 0


def nbytes_of(found: TensorDictBase) -> int:
    """Of the tensors; objects are not counted. Asks jagged tensors nothing: each question costs them 100 us."""
    columns = [column for column in found.values() if isinstance(column, torch.Tensor)]
    return sum((one if type(one) is torch.Tensor else getattr(one, "_values", one)).nbytes for one in columns)


def _span(
    name: str, started: int, ended: int, thread: int, is_async: bool, asked: Sequence[Asked], waited: int,
    unasked: tuple[Any, Indexes] | None, nbytes: int, error: str, service_id: bytes,
) -> TraceSpan:  # fmt: skip
    """`unasked`: (partitions, rows) of metadata whose cells came with it: nobody was asked for them."""
    made = TraceSpan(
        started, ended - started, thread, name, "", "", _action(asked), _shown(service_id), 0, nbytes, [], {}, 0,
        waited, error, "", is_async,
    )  # fmt: skip
    found: list[bytes] = []
    for request, reply in asked:
        made.partition = made.partition or _text(request, "partition")
        made.task = made.task or _text(request, "task")
        if type(request) is m.Allocate:
            made.nbytes += request.nbytes
        elif ACTIONS.get(type(request), "") == made.action:
            _name_rows(made, found, request, reply)
    if unasked is not None:
        parts, rows = unasked
        made.action, made.partition = READ, parts if type(parts) is str else ""
        made.num_rows, made.rows = len(rows), runs_of(rows)
    elif len(found) == 1 and len(found[0]) == 8:
        made.rows = [int.from_bytes(found[0], "little"), 1]
    elif found:
        made.rows = runs_of(np.frombuffer(b"".join(found), np.int64))
    return made


def _action(asked: Sequence[Asked]) -> str:
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
    lease = answer.lease if type(answer) is m.RowSet else getattr(request, "lease", 0)
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


def _tags(given: Given, asked: Sequence[Asked]) -> list[Mapping[str, Any]]:
    """The tags of the rows that were read, as far as they are known here."""
    found: list[Mapping[str, Any]] = []
    for request, reply in asked:
        answer = reply.rows if type(reply) in (m.Handed, m.GroupsLent) else reply
        if type(request) in (m.Fetch, m.SelectGroups) and type(answer) is m.RowSet:
            found += answer.tags or []
    reads = not asked or any(type(request) is m.Get for request, _ in asked)
    if reads and not found and given is not None:
        found += given.custom_meta if isinstance(given, BatchMeta) else given.tags or []
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


def acknowledged(session: Session, ack: m.Ack, began_ns: int) -> None:
    """Record an acknowledgement that was sent past the drivers."""
    if switch.recorder is not None:
        is_async = asyncio._get_running_loop() is not None
        switch.recorder.add((
            _span, "ack", began_ns, time.monotonic_ns(), threading.get_ident(), is_async, [(ack, None)], 0, None, 0, "",
            session.life.service,
        ))  # fmt: skip
