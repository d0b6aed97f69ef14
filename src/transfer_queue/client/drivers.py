"""Running operations: blocking in the calling thread, or on the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from transfer_queue.client.effects import Call, Effect, HoldSession, Notify, Offload, Operation, Together, Trying
from transfer_queue.client.holding import Given
from transfer_queue.client.recording import OperationNote
from transfer_queue.client.session import Session
from transfer_queue.client.tracing import traced
from transfer_queue.errors import DeadlineExceeded, ServiceUnavailable
from transfer_queue.memory.streams import in_these_streams
from transfer_queue.trace import switch
from transfer_queue.wire import messages as m

P = ParamSpec("P")
T = TypeVar("T")
OFFLOAD_NBYTES = 1 << 20
UNANSWERED = (ServiceUnavailable, DeadlineExceeded)
GIVING = frozenset((  # answers that give something
    m.Allocated, m.Located, m.Taken, m.RowSet, m.Handed, m.Admitted, m.Locked, m.Tickets, m.SlotsClaimed, m.GroupsLent,
    m.Counted,
))  # fmt: skip
# Requests that take rows, the right to start some, a lock, groups.
TAKING = frozenset({m.Fetch, m.Insert, m.Admit, m.Lock, m.TakeTickets, m.ClaimSlots, m.SelectGroups, m.TakeRefills})


class HasSession(Protocol):
    @property
    def session(self) -> Session: ...


def run(session: Session, operation: Operation[T], note: OperationNote | None = None) -> T:
    """Carry out `operation` in this thread; `note` hears what it asks, and that it ended.

    When it ends with an exception, wherever that strikes (KeyboardInterrupt included), all that it was given is given
    back. When it returns, the service is told that the rows are in their asker's hands.
    """
    given = Given()
    try:
        session.uses.begin(given)
        result = _carry_out(session, operation, given, note)
        for call in given:
            if type(call.request) in TAKING:
                given.untold.append((session.confirmation(call.request.rid), call.to))
        session.tell(given.untold)
        if note is not None:
            note.ended()
        session.uses.end(given)  # not later: an interrupt that strikes in it gives back what the result is
        return result
    except BaseException as error:
        session.given_up.append((given, error.__class__))  # first of all: a second interrupt may come with any call
        try:
            if note is not None:
                note.ended(error)
            session.tell(given.untold)
            session.settle(not isinstance(error, UNANSWERED))
        finally:
            session.uses.end(given)
        raise


@contextlib.contextmanager
def given_back(session: Session) -> Iterator[Given]:
    """For calls that are no operation: what these asked for is given back when the block ends with an exception,
    wherever that strikes. Calls are entered before they are made; to give back what was given back already does no
    harm."""
    given = Given()
    try:
        session.uses.begin(given)
        yield given
        session.uses.end(given)
    except BaseException as error:
        session.given_up.append((given, error.__class__))
        try:
            session.settle(not isinstance(error, UNANSWERED))
        finally:
            session.uses.end(given)
        raise


def _carry_out(session: Session, operation: Operation[T], given: Given, note: OperationNote | None) -> T:
    try:
        effect = next(operation)
        while True:
            try:
                result = _perform(session, effect, given, note)
            except BaseException as error:  # noqa: BLE001  the operation decides what becomes of it
                effect = operation.throw(error)
            else:
                effect = operation.send(result)
    except StopIteration as stop:
        return stop.value


def _perform(session: Session, effect: Effect, given: Given, note: OperationNote | None) -> Any:
    """Servers are told what is to be told with as few calls of the system as possible: each may wake one that sleeps,
    which takes longer than most of what happens here. They hear of it before anything else is asked, or takes long."""
    if type(effect) is Notify:
        given.untold.append((effect.message, effect.to))
        return None
    if given.untold and not (type(effect) is Offload and effect.nbytes < OFFLOAD_NBYTES):
        session.tell(given.untold)
    if type(effect) is Call:
        given.append(effect)
        if note is not None:
            note.call = effect
            if note.telemetry is not None:
                note.tag(effect.request)
        found = session.call(effect)
        if note is not None:
            note.heard(effect, *found)
        if type(found[0]) not in GIVING:
            given.pop()
        return found
    if type(effect) is Offload:
        return effect.work()
    if type(effect) is Together:
        given += effect.calls
        return session.call_together(effect.calls)
    if type(effect) is HoldSession:
        return session.hold()
    assert type(effect) is Trying
    return _attempt(session, effect, given, note)


def _attempt(session: Session, attempt: Trying, given: Given, note: OperationNote | None) -> Any:
    attempted = Given()
    try:
        result = _carry_out(session, attempt.operation, attempted, note)
        given += attempted
        given.untold += attempted.untold
        return result
    except BaseException as error:
        session.given_up.append((attempted, error.__class__))
        session.tell(attempted.untold)
        session.settle(not isinstance(error, UNANSWERED))
        raise


async def run_async(session: Session, operation: Operation[T], note: OperationNote | None = None) -> T:
    """As `run`, on the running loop; work on many bytes goes to a thread, so the loop stays free."""
    given = Given()
    session.uses.begin(given, asyncio.get_running_loop())
    try:
        result = await _carry_out_async(session, operation, given, note)
        for call in given:
            if type(call.request) in TAKING:
                session.confirm_on_loop(call.request.rid, call.to)
        if note is not None:
            note.ended(is_async=True)
        return result
    except BaseException as error:
        if note is not None:
            note.ended(error, is_async=True)
        _cancel_on_loop(session, given)
        raise
    finally:
        session.uses.end(given)


async def _carry_out_async(session: Session, operation: Operation[T], given: Given, note: OperationNote | None) -> T:
    try:
        effect = next(operation)
        while True:
            try:
                result = await _perform_async(session, effect, given, note)
            except BaseException as error:  # noqa: BLE001  the operation decides what becomes of it
                effect = operation.throw(error)
            else:
                effect = operation.send(result)
    except StopIteration as stop:
        return stop.value


async def _perform_async(session: Session, effect: Effect, given: Given, note: OperationNote | None) -> Any:
    if type(effect) is Call:
        given.append(effect)
        if note is not None:
            note.call = effect
            if note.telemetry is not None:
                note.tag(effect.request)
        found = await session.call_async(effect)
        if note is not None:
            note.heard(effect, *found)
        if type(found[0]) not in GIVING:
            given.remove(effect)
        return found
    if type(effect) is Offload:
        if effect.nbytes < OFFLOAD_NBYTES:
            return effect.work()
        return await finished(
            asyncio.wrap_future(session.mover.start(session.uses.counted(in_these_streams(effect.work))))
        )
    if type(effect) is Together:
        given += effect.calls
        return await _together(session, effect.calls)
    if type(effect) is HoldSession:
        return await session.hold_async()
    if type(effect) is Trying:
        return await _attempt_async(session, effect, given, note)
    assert type(effect) is Notify
    return session.notify_on_loop(effect.message, effect.to)


async def _attempt_async(session: Session, attempt: Trying, given: Given, note: OperationNote | None) -> Any:
    attempted = Given()
    try:
        result = await _carry_out_async(session, attempt.operation, attempted, note)
    except BaseException:
        _cancel_on_loop(session, attempted)
        raise
    given += attempted
    return result


def _cancel_on_loop(session: Session, given: Given) -> None:
    for call in given:
        session.notify_on_loop(m.Cancel(call.request.rid), call.to)


async def _together(session: Session, calls: Sequence[Call]) -> list[tuple[Any, memoryview]]:
    """Their answers. Where one fails, or this is cancelled, the others are broken off; it ends when all have ended."""
    if not calls:
        return []
    tasks = [asyncio.ensure_future(session.call_async(call)) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [one for one in tasks if one.done() and not one.cancelled() and one.exception() is not None]
    finally:
        for one in tasks:
            one.cancel()
        await all_ended(tasks)
    return [one.result() for one in failed[:1] or tasks]


async def finished(work: asyncio.Future[T]) -> T:
    """The result of work in a thread. However often it is cancelled, it waits for the thread, and is cancelled then:
    the thread may be writing into a block, which nobody else may have meanwhile."""
    await all_ended([work])
    return work.result()


async def all_ended(work: Collection[asyncio.Future[Any]]) -> None:
    """Wait for the end of all, whatever it is. However often this is cancelled, it waits on, and is cancelled then."""
    interrupt: BaseException | None = None
    while not all(one.done() for one in work):
        try:
            await asyncio.wait(work)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit) as error:
            interrupt = error
    for one in work:
        _ = one.cancelled() or one.exception()  # counts as seen: maybe nobody will ask for it
    if interrupt is None:
        return
    try:
        raise interrupt
    finally:
        del interrupt  # its traceback has this frame: that would be a cycle


def blocking(operation: Callable[Concatenate[Any, P], Operation[T]]) -> Callable[Concatenate[Any, P], T]:
    """The method that runs `operation` on its object's session and blocks until it is done."""

    @functools.wraps(operation)
    def method(self: HasSession, /, *args: P.args, **kwargs: P.kwargs) -> T:
        session, name = self.session, operation.__name__
        note = OperationNote(session, name, args, kwargs) if switch.is_on else None
        return run(session, traced(operation(self, *args, **kwargs), name), note)

    show_as_public(method, operation)
    method.__name__ = operation.__name__.removeprefix("_")
    return method


def awaitable(
    operation: Callable[Concatenate[Any, P], Operation[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The coroutine method that runs `operation` on its object's session and the running loop."""

    @functools.wraps(operation)
    async def method(self: HasSession, /, *args: P.args, **kwargs: P.kwargs) -> T:
        session, name = self.session, operation.__name__
        note = OperationNote(session, name, args, kwargs) if switch.is_on else None
        return await run_async(session, traced(operation(self, *args, **kwargs), name), note)

    show_as_public(method, operation)
    method.__name__ = f"async_{operation.__name__.removeprefix('_')}"
    return method


def show_as_public(function: Callable[..., Any], operation: Callable[..., Operation[Any]]) -> None:
    """Let `help`, `inspect.signature`, `typing.get_type_hints` and autospec show what callers of `function` see.

    That is the signature of `operation` without the `session` that a function finds by itself, and with the result's
    type instead of the generator's.
    """
    shown = inspect.signature(operation)
    returned = str(shown.return_annotation)
    assert returned.startswith("Operation[")  # annotations are texts in the modules that have operations
    parameters = [one for one in shown.parameters.values() if one.name != "session"]
    result = returned.removeprefix("Operation[").removesuffix("]")
    function.__signature__ = shown.replace(parameters=parameters, return_annotation=result)  # type: ignore[attr-defined]
    annotations = {one.name: one.annotation for one in parameters if one.annotation is not one.empty}
    function.__annotations__ = {**annotations, "return": result}
