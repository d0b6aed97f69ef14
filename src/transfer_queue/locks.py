"""Locks on keys, for those who agree to ask for them: no other function of this package looks at them.

    kv_local_lock    within this process: all its threads, tasks and event loops
    kv_global_lock   within the service: all its processes, leased and fenced

A lock is on one key of a partition or on several, which need not exist. Several are taken together, in order of
arrival: there is no deadlock between them, and nobody is overtaken. Locks do not nest, but a local one may be taken
inside a global one.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from transfer_queue import interface
from transfer_queue.client.drivers import run, run_async
from transfer_queue.client.effects import seconds
from transfer_queue.client.local_locks import LoopWaiter, ThreadWaiter, local
from transfer_queue.client.locks import GlobalLease, keeper, listing, taking
from transfer_queue.client.recording import noting
from transfer_queue.client.tracing import traced
from transfer_queue.errors import (
    InvalidInput,
    LockLostError,
    LockNotAllowed,
    TransferQueueError,
    UnsupportedValue,
)

T = TypeVar("T")
Keys = str | list[str]


class _Inside:
    """That a lock is held by whoever has this in his context: the thread or task that took it, and what it starts."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.has_ended = False  # set, not called: an interrupt may strike as a function begins

    @property
    def is_held(self) -> bool:
        return not self.has_ended and self._pid == os.getpid()


_inside: dict[str, ContextVar[_Inside | None]] = {
    kind: ContextVar(f"transfer_queue_{kind}", default=None) for kind in ("kv_local_lock", "kv_global_lock")
}


def _is_inside(kind: str) -> bool:
    held = _inside[kind].get()
    return held is not None and held.is_held


def _checked(kind: str, keys: Keys, partition_id: str) -> list[str]:
    """The keys, each once and sorted. Raises for what can't be locked, here and now."""
    if type(partition_id) is not str:
        raise UnsupportedValue(f"partition_id is a string, got {partition_id!r}")
    try:
        found = [keys] if isinstance(keys, str) else list(keys)
    except TypeError:
        raise UnsupportedValue(f"keys is a string or a list of strings, got {keys!r:.200}") from None
    if not set(map(type, found)) <= {str}:
        raise UnsupportedValue(f"keys is a string or a list of strings, got {keys!r:.200}")
    if not found:
        raise InvalidInput(f"{kind}: no keys")
    if _is_inside(kind):
        raise LockNotAllowed(f"Nested {kind}: take all keys together, in one call")
    if kind == "kv_global_lock" and _is_inside("kv_local_lock"):
        raise LockNotAllowed("take kv_global_lock before kv_local_lock, not inside it")
    return sorted(set(found))


def _refuse_loop(kind: str) -> None:
    """Waiting in a thread that runs an event loop would stop everything on it, the holder of the lock perhaps."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise LockNotAllowed(f"{kind} on a running event loop: use async_{kind}")


@contextlib.contextmanager
def kv_local_lock(keys: Keys, partition_id: str, timeout: float | None = None) -> Iterator[None]:
    """Hold the keys within this process: of all its threads, tasks and event loops one at a time is inside.

    Waits in order of arrival, at most `timeout` seconds in all (None: for ever), then raises `DeadlineExceeded`, a
    TimeoutError. Raises ValueError without keys; RuntimeError inside another local lock, also in tasks started there,
    and on a running event loop. A forked child holds none of its parent's locks.
    """
    _refuse_loop("kv_local_lock")
    names = [(partition_id, key) for key in _checked("kv_local_lock", keys, partition_id)]
    mark = _Inside()
    waiter: ThreadWaiter = local.take(names, None if timeout is None else seconds(timeout))
    try:
        _inside["kv_local_lock"].set(mark)
        yield
    finally:
        mark.has_ended = True
        try:
            local.leave(waiter)
        except BaseException:
            local.leave_at_last(waiter)
            raise


@contextlib.asynccontextmanager
async def async_kv_local_lock(keys: Keys, partition_id: str, timeout: float | None = None) -> AsyncIterator[None]:
    """As `kv_local_lock`, for tasks; a cancelled task takes nothing."""
    names = [(partition_id, key) for key in _checked("kv_local_lock", keys, partition_id)]
    mark = _Inside()
    waiter: LoopWaiter = await local.take_on_loop(names, None if timeout is None else seconds(timeout))
    try:
        _inside["kv_local_lock"].set(mark)
        yield
    finally:
        mark.has_ended = True
        local.leave(waiter)


@contextlib.contextmanager
def kv_global_lock(
    keys: Keys, partition_id: str, timeout: float | None = None, lease_s: float = 30
) -> Iterator[GlobalLease]:
    """Hold the keys within the service: of all its processes one at a time is inside.

    Waits in the service, in order of arrival, at most `timeout` seconds (None: for ever), then raises
    `DeadlineExceeded`, a TimeoutError. The lock is renewed in the background every third of `lease_s`. It ends with the
    block; when this process ends or closes; and when it was not renewed for `lease_s` seconds: the lease's `check`
    raises `LockLostError` then, and so does the end of the block, unless it raises something itself. Locks are of one
    life of the service: none outlives it.

    Raises ValueError without keys or where `lease_s` is not above 0; RuntimeError inside another global or a local
    lock, on a running event loop, and when there is no service (`NotInitialized`, `ServiceUnavailable`).
    """
    _refuse_loop("kv_global_lock")
    wanted = _checked_global(keys, partition_id, lease_s)
    session = interface._session()
    operation = traced(taking(session, partition_id, wanted, timeout, lease_s), "kv_global_lock")
    mark = _Inside()
    lease = run(session, operation, noting(session, "kv_global_lock"))
    raised = True
    try:
        keeper.add(lease)
        _inside["kv_global_lock"].set(mark)
        yield lease
        raised = False
    finally:
        mark.has_ended = lease.has_ended = True
        try:
            keeper.look()
            run(session, lease.giving_back())
        except LockLostError:
            if not raised:
                raise
        except BaseException:  # an interrupt, amid it perhaps
            with contextlib.suppress(TransferQueueError):
                run(session, lease.giving_back())
            raise


@contextlib.asynccontextmanager
async def async_kv_global_lock(
    keys: Keys, partition_id: str, timeout: float | None = None, lease_s: float = 30
) -> AsyncIterator[GlobalLease]:
    """As `kv_global_lock`, for tasks; a cancelled task takes nothing."""
    wanted = _checked_global(keys, partition_id, lease_s)
    session = interface._session()
    operation = traced(taking(session, partition_id, wanted, timeout, lease_s), "async_kv_global_lock")
    mark = _Inside()
    lease = await run_async(session, operation, noting(session, "kv_global_lock"))
    raised = True
    try:
        keeper.add(lease)
        _inside["kv_global_lock"].set(mark)
        yield lease
        raised = False
    finally:
        mark.has_ended = lease.has_ended = True
        keeper.look()
        giving_back = asyncio.ensure_future(run_async(session, lease.giving_back()))
        with contextlib.suppress(LockLostError) if raised else contextlib.nullcontext():
            await asyncio.shield(giving_back)  # cancelled once more, it is given back all the same


def _checked_global(keys: Keys, partition_id: str, lease_s: float) -> list[str]:
    if not seconds(lease_s, "lease_s") > 0:
        raise InvalidInput(f"lease_s must be above 0, got {lease_s}")
    return _checked("kv_global_lock", keys, partition_id)


def kv_local_locked(
    fn: Callable[..., T], keys: Keys, partition_id: str, *, lock_timeout: float | None = None, **kwargs: Any
) -> T:
    """`fn(keys, partition_id, **kwargs)` inside `kv_local_lock`. Raises TypeError for a coroutine function."""
    _check_plain(fn, "async_kv_local_locked")
    with kv_local_lock(keys, partition_id, timeout=lock_timeout):
        return fn(keys, partition_id, **kwargs)


async def async_kv_local_locked(
    fn: Callable[..., Awaitable[T]], keys: Keys, partition_id: str, *, lock_timeout: float | None = None, **kwargs: Any
) -> T:
    """`await fn(keys, partition_id, **kwargs)` inside `async_kv_local_lock`. Raises TypeError for a plain function."""
    _check_coroutine(fn, "kv_local_locked")
    async with async_kv_local_lock(keys, partition_id, timeout=lock_timeout):
        return await fn(keys, partition_id, **kwargs)


def kv_global_locked(
    fn: Callable[..., T],
    keys: Keys,
    partition_id: str,
    *,
    lock_timeout: float | None = None,
    lease_s: float = 30,
    **kwargs: Any,
) -> T:
    """`fn(keys, partition_id, **kwargs)` inside `kv_global_lock`. Raises TypeError for a coroutine function."""
    _check_plain(fn, "async_kv_global_locked")
    with kv_global_lock(keys, partition_id, timeout=lock_timeout, lease_s=lease_s):
        return fn(keys, partition_id, **kwargs)


async def async_kv_global_locked(
    fn: Callable[..., Awaitable[T]],
    keys: Keys,
    partition_id: str,
    *,
    lock_timeout: float | None = None,
    lease_s: float = 30,
    **kwargs: Any,
) -> T:
    """`await fn(keys, partition_id, **kwargs)` inside `async_kv_global_lock`. Raises TypeError for a plain function."""
    _check_coroutine(fn, "kv_global_locked")
    async with async_kv_global_lock(keys, partition_id, timeout=lock_timeout, lease_s=lease_s):
        return await fn(keys, partition_id, **kwargs)


def _check_plain(fn: Callable[..., Any], other: str) -> None:
    if inspect.iscoroutinefunction(fn):
        raise UnsupportedValue(f"fn is a coroutine function: use {other}")


def _check_coroutine(fn: Callable[..., Any], other: str) -> None:
    if not inspect.iscoroutinefunction(fn):
        raise UnsupportedValue(f"fn is not a coroutine function: use {other}")


def kv_lock_list(partition_id: str | None = None) -> dict[str, Any]:
    """The locks of the service, of one partition or of all:
    `{"holders": [{partition_id, key, holder: {node_ip, pid, thread}, held_s, lease_remaining_s}], "waiters": n}`.

    Raises RuntimeError when there is no service.
    """
    session = interface._session()
    return run(session, traced(listing(session, partition_id), "kv_lock_list"), noting(session, "kv_lock_list"))


async def async_kv_lock_list(partition_id: str | None = None) -> dict[str, Any]:
    """As `kv_lock_list`."""
    session = interface._session()
    operation = traced(listing(session, partition_id), "async_kv_lock_list")
    return await run_async(session, operation, noting(session, "kv_lock_list"))
