"""Tasks that are cancelled wherever they wait, one place after the other."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any, NamedTuple

MOST = 500


class Cancelled(NamedTuple):
    """`at`: at which wait, 0 when the call came to its end. `result` is that of a call that nothing cancelled."""

    at: int
    result: Any = None


async def cancellations(action: Callable[[], Coroutine[Any, Any, Any]], *, late: bool) -> AsyncIterator[Cancelled]:
    """Have tasks make the call again and again, and cancel each one wait later than the one before; the last one comes
    to its end. `late`: not as the wait begins, but when what it waits for has come and the task has not gone on yet.

    A call that was cancelled must be as if it had not begun, or be whole: look after each.
    """
    for at in range(1, MOST):
        task = asyncio.create_task(_awaited(action(), at, late))
        try:
            result = await task
        except asyncio.CancelledError:
            yield Cancelled(at)
        else:
            yield Cancelled(0, result)
            return
    raise AssertionError(f"more than {MOST} waits")


async def _awaited(call: Coroutine[Any, Any, Any], at: int, late: bool) -> Any:
    """A task is made of a coroutine alone: since Python 3.12 of no generator that passes for one."""
    return await _cancelled_at(call, at, late)


@types.coroutine
def _cancelled_at(call: Coroutine[Any, Any, Any], at: int, late: bool) -> Generator[Any, Any, Any]:
    """The call, whose task is cancelled at its wait of this number."""
    task = asyncio.current_task()
    assert task is not None
    num_waits, value, error = 0, None, None
    while True:
        try:
            waits_for = call.send(value) if error is None else call.throw(error)
        except StopIteration as stop:
            return stop.value
        num_waits += 1
        if num_waits == at:
            if late and waits_for is not None:
                waits_for.add_done_callback(lambda _: task.cancel())
            else:
                task.cancel()
        value = error = None
        try:
            value = yield waits_for
        except BaseException as found:  # noqa: BLE001 the call is told, whatever it is
            error = found
