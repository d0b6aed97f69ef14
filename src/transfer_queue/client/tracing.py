"""One line of the debug log for every operation: what it did and how long it took."""

from __future__ import annotations

import logging
import time
from typing import Any, TypeVar

from tensordict import TensorDictBase

from transfer_queue.client.effects import Call, Effect, Operation, Trying
from transfer_queue.client.recording import nbytes_of
from transfer_queue.wire import messages as m

T = TypeVar("T")
log = logging.getLogger("transfer_queue")
LISTED = 8


def traced(operation: Operation[T], name: str) -> Operation[T]:
    """`operation`, which is logged at its end where anybody wants that; else as it is."""
    return _traced(operation, name.strip("_")) if log.isEnabledFor(logging.DEBUG) else operation


def _traced(operation: Operation[T], name: str) -> Operation[T]:
    seen = Seen()
    started = time.perf_counter()
    try:
        result = yield from _watched(operation, seen)
    except GeneratorExit:
        raise
    except BaseException as error:
        elapsed_ms = 1e3 * (time.perf_counter() - started)
        log.debug("%s%s: %s after %.2f ms: %s", name, seen.where(), type(error).__name__, elapsed_ms, error)
        raise
    elapsed_ms = 1e3 * (time.perf_counter() - started)
    log.debug("%s%s: %s%.2f ms", name, seen.where(), seen.what(result), elapsed_ms)
    return result


def _watched(operation: Operation[T], seen: Seen) -> Operation[T]:
    """The operation; `seen` learns of its calls."""
    try:
        effect: Effect = next(operation)
        while True:
            try:
                answer = yield Trying(_watched(effect.operation, seen)) if type(effect) is Trying else effect
            except GeneratorExit:
                operation.close()
                raise
            except BaseException as error:  # noqa: BLE001  the operation decides what becomes of it
                if type(effect) is Call:
                    seen.asked(effect)
                effect = operation.throw(error)
            else:
                if type(effect) is Call:
                    seen.asked(effect)
                    seen.answered(effect.request, answer[0])
                effect = operation.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result


class Seen:
    """What the calls of one operation were about."""

    def __init__(self) -> None:
        self.partitions: dict[str, None] = {}
        self.fields: dict[str, None] = {}
        self.rows = self.nbytes = 0
        self.counts = False  # whether rows were

    def asked(self, call: Call) -> None:
        request = call.request
        partition = getattr(request, "partition", None)
        if partition is not None:
            self.partitions[partition] = None
        if isinstance(request, m.Commit) and call.payload is not None:
            self.nbytes += len(call.payload)
        elif isinstance(request, m.Allocate):
            self.nbytes += request.nbytes

    def answered(self, request: m.Request, reply: m.Reply) -> None:
        match reply:
            case m.Committed() | m.RowSet():
                self._count(len(reply.rows) // 8, self._names(request))
            case m.Located():
                self._count(reply.count, [field.name for field in reply.schema])

    def _names(self, request: m.Request) -> list[str]:
        if isinstance(request, m.Commit):
            return [field.name for field in request.fields]
        names: list[str] = getattr(request, "fields", None) or []
        return names

    def _count(self, rows: int, fields: list[str]) -> None:
        self.counts = True
        self.rows += rows
        self.fields.update(dict.fromkeys(fields))

    def where(self) -> str:
        return "".join(f" {name!r}" for name in list(self.partitions)[:LISTED])

    def what(self, result: Any) -> str:
        """Rows, fields and bytes (of a put those of its block, of a get those of its tensors), as far as there were."""
        nbytes = nbytes_of(result) if isinstance(result, TensorDictBase) else self.nbytes
        names = f" x {list(self.fields)[:LISTED]}" if self.fields else ""
        return f"{self.rows} rows{names}, {nbytes} bytes, " if self.counts else ""
