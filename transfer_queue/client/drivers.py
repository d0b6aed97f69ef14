"""Running operations: blocking in the calling thread, or on the running event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from transfer_queue.client.effects import Call, Effect, Notify, Offload, Operation, Together
from transfer_queue.client.session import Session

P = ParamSpec("P")
T = TypeVar("T")
OFFLOAD_NBYTES = 1 << 20


class HasSession(Protocol):
    @property
    def session(self) -> Session: ...


def run(session: Session, operation: Operation[T]) -> T:
    """Carry out `operation` in this thread."""
    try:
        effect = next(operation)
        while True:
            try:
                result = _perform(session, effect)
            except BaseException as error:  # noqa: BLE001  the operation decides what becomes of it
                effect = operation.throw(error)
            else:
                effect = operation.send(result)
    except StopIteration as stop:
        return stop.value


def _perform(session: Session, effect: Effect) -> Any:
    if type(effect) is Call:
        return session.call(effect)
    if type(effect) is Offload:
        return effect.work()
    if type(effect) is Together:
        return session.call_together(effect.calls)
    assert type(effect) is Notify
    return session.notify(effect.message, effect.to)


async def run_async(session: Session, operation: Operation[T]) -> T:
    """Carry out `operation` on the running loop; work on many bytes goes to a thread, so the loop stays free."""
    try:
        effect = next(operation)
        while True:
            try:
                result = await _perform_async(session, effect)
            except BaseException as error:  # noqa: BLE001  the operation decides what becomes of it
                effect = operation.throw(error)
            else:
                effect = operation.send(result)
    except StopIteration as stop:
        return stop.value


async def _perform_async(session: Session, effect: Effect) -> Any:
    if type(effect) is Call:
        return await session.call_async(effect)
    if type(effect) is Offload:
        if effect.nbytes < OFFLOAD_NBYTES:
            return effect.work()
        return await _finish(asyncio.wrap_future(session.mover.start(effect.work)))
    if type(effect) is Together:
        return await asyncio.gather(*(session.call_async(call) for call in effect.calls))
    assert type(effect) is Notify
    return await session.notify_async(effect.message, effect.to)


async def _finish(work: asyncio.Future[T]) -> T:
    """The result of work in a thread. Cancellation waits for the thread: it may be writing into a block."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def blocking(operation: Callable[Concatenate[Any, P], Operation[T]]) -> Callable[Concatenate[Any, P], T]:
    """The method that runs `operation` on its object's session and blocks until it is done."""

    @functools.wraps(operation)
    def method(self: HasSession, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(self.session, operation(self, *args, **kwargs))

    return method


def awaitable(
    operation: Callable[Concatenate[Any, P], Operation[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The coroutine method that runs `operation` on its object's session and the running loop."""

    @functools.wraps(operation)
    async def method(self: HasSession, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await run_async(self.session, operation(self, *args, **kwargs))

    return method
