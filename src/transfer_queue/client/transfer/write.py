"""Storing a planned batch: allocate, copy, commit."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from transfer_queue.arguments import flag
from transfer_queue.client.effects import Call, Notify, Offload, Operation, Together
from transfer_queue.client.remarks import warn_once
from transfer_queue.client.session import Session
from transfer_queue.codec.filling import BlockPlan
from transfer_queue.codec.values import Lowering, is_too_deep
from transfer_queue.errors import InvalidInput, StoreFull, UnsupportedValue
from transfer_queue.memory.bytes import Bytes
from transfer_queue.schema import FieldSchema
from transfer_queue.storage.shm import SMALL_NBYTES
from transfer_queue.wire import messages as m

WRITE_NBYTES = 32 << 20
_TAG_VALUES = Lowering(None, allow_pickle=False)
_NUMBERS = (np.bool_, np.integer, np.floating)  # travel as Python's
_EXACT = frozenset((str, float, bool, type(None), bytes))


class TargetRows(NamedTuple):
    """Which rows a commit writes: `keys` (upsert), `indexes` (existing), or `num` new ones."""

    partition: str
    num: int
    keys: list[str] | None = None
    indexes: bytes | None = None
    replaced: list[int] = []  # noqa: RUF012  positions whose tags replace the stored ones; never changed
    service: bytes = b""  # the life of the service that named the indexes
    strict_schema: bool | None = None  # None: as the service is configured
    expected: bytes | None = None  # the blocks that the cells lie in, unless they are to be overwritten in any case
    finishes: list[m.FinishedSlot] | None = None  # the attempts whose results they are
    shared: Sequence[m.SharedCells] = ()  # of fields besides those of the block


def store(session: Session, plan: BlockPlan, rows: TargetRows, tags: list[m.Tags] | None) -> Operation[m.Committed]:
    """Publish the planned block on `rows`: at most two round trips and one copy of the payload.

    A block in a storage engine is entered in the books of the controller's server, whose unit has them all.

    Waits for room up to the session's timeout, then raises `StoreFull`. Nothing is visible unless this returns.
    """
    fields, layout = plan.schema(), plan.layout()
    deadline = time.monotonic() + session.timeout_s
    if plan.nbytes <= m.INLINE_NBYTES:
        payload = np.empty(plan.nbytes, np.uint8)
        plan.write(payload, session.mover)
        try:
            memory = memoryview(payload)  # type: ignore[arg-type]
            return noted(rows, (yield commit(session, rows, fields, layout, 0, tags, memory))[0])
        except StoreFull:
            if time.monotonic() >= deadline:
                raise
            # there is no room for the bytes now: wait for it with an allocation
    return (yield from _store_block(session, plan, rows, tags, fields, layout, deadline))


def _store_block(
    session: Session,
    plan: BlockPlan,
    rows: TargetRows,
    tags: list[m.Tags] | None,
    fields: list[FieldSchema],
    layout: bytes,
    deadline: float,
) -> Operation[m.Committed]:
    to = session.engine.books if plan.nbytes > SMALL_NBYTES else ""
    block = yield from filled_block(session, plan, deadline, to)
    wait_s = max(0.0, deadline - time.monotonic())
    call = commit(session, rows, fields, layout, block, tags, wait_s=wait_s)
    call.to = to
    return noted(rows, (yield call)[0])


def filled_block(session: Session, plan: BlockPlan, deadline: float, to: str = "") -> Operation[int]:
    """A block with what is planned, which nobody sees before a commit names it."""
    nbytes = max(1, plan.nbytes)
    wait_s = max(0.0, deadline - time.monotonic())
    request = m.Allocate(session.next_rid(), nbytes, False, wait_s)
    allocated: m.Allocated = (yield Call(request, wait_s=wait_s, to=to))[0]
    match allocated.location:
        case m.InEngine(key):
            write = functools.partial(plan.write, mover=session.mover)
            yield from store_in_engine(session, allocated.block, key, nbytes, write, deadline)
        case m.InArena(arena=arena, offset=offset) if session.is_local:

            def fill() -> None:
                into = session.arenas[arena].writable(offset, nbytes)
                plan.write(into, session.mover)

            yield Offload(fill, nbytes)
        case m.InArena():
            own = session.pool.allocate(nbytes)
            yield Offload(lambda: plan.write(own, session.mover), nbytes)
            yield from send_block(session, allocated.block, own)
    return allocated.block


def store_in_engine(
    session: Session, block: int, key: str, nbytes: int, fill: Callable[[Bytes], None], deadline: float
) -> Operation[None]:
    """Have `fill` write a block there, under its key; it is given up when that fails."""
    try:
        yield Offload(lambda: session.engine.write(block, key, nbytes, fill, deadline), nbytes)
    except BaseException:
        yield Notify(m.Discard(block), session.engine.books)
        raise


def send_block(session: Session, block: int, data: Bytes) -> Operation[None]:
    """Fill a block that cannot be mapped. Over a transport the unit takes the bytes itself, and nobody writes into its
    memory: a writer that is late would write into what may be another's by then."""
    if session.transport:
        yield from _lend_block(session, block, data)
        return
    writes = []
    for start in range(0, len(data), WRITE_NBYTES):
        payload = memoryview(data[start : start + WRITE_NBYTES])  # type: ignore[arg-type]
        writes.append(Call(m.Write(session.next_rid(), block, start), payload))
    yield Together(writes)


def _lend_block(session: Session, block: int, data: Bytes) -> Operation[None]:
    wait_s = session.timeout_s
    with contextlib.ExitStack() as lending:
        lies = yield Offload(lambda: lending.enter_context(session.transport.lent(data, wait_s)), len(data))
        yield Call(m.Pull(session.next_rid(), block, lies, wait_s), wait_s=wait_s)


def commit(
    session: Session,
    rows: TargetRows,
    fields: list[FieldSchema],
    layout: bytes,
    block: int,
    tags: list[m.Tags] | None,
    payload: memoryview | None = None,
    wait_s: float | None = None,
) -> Call:
    """The request that publishes a block (0: the payload; -1: no block, only tags)."""
    wait_s = session.timeout_s if wait_s is None else wait_s
    request = m.Commit(
        session.next_rid(), rows.partition, rows.num, rows.keys, rows.indexes, fields, block, layout, tags, wait_s,
        rows.replaced, rows.service, is_on(session, "strict_schema", rows.strict_schema), rows.expected, rows.finishes,
        list(rows.shared),
    )  # fmt: skip
    return Call(request, payload, wait_s)


def noted(rows: TargetRows, reply: m.Committed) -> m.Committed:
    """The reply; what it remarks goes to the log, once in a process."""
    warn_once(f"put to partition {rows.partition!r}", reply.note)
    return reply


def is_on(session: Session, name: str, asked: bool | None) -> bool:
    """What the caller asks for; where it says nothing, what the service says."""
    return bool(session.config.get(name, False)) if asked is None else flag(asked, name)


def checked_tags(tags: Sequence[Mapping[str, Any]], count: int) -> list[m.Tags]:
    """Tags ready for the wire, types kept; `InvalidInput` or `UnsupportedValue` when they are not one dict per row."""
    try:
        found = len(tags)
    except TypeError:
        raise UnsupportedValue(f"tags is a list of dicts, got {type(tags).__qualname__}") from None
    if found != count:
        raise InvalidInput(f"{found} tags for {count} rows")
    return [checked_values(tag, "tag", row) for row, tag in enumerate(tags)]


def checked_values(values: Mapping[str, Any], what: str, row: int | None = None) -> m.Tags:
    """Values by name, ready for the wire, types kept. Raises as `checked_tags`, about the `what` of this row."""
    if not isinstance(values, Mapping):
        raise InvalidInput(f"{_place(what, row)}: a {what} is a dict, got {type(values).__qualname__}")
    out: m.Tags = {}
    for key, value in values.items():
        if type(key) is not str:
            raise InvalidInput(f"{_place(what, row)}: the names in a {what} are strings, got {key!r}")
        if type(value) in _EXACT or (type(value) is int and -(1 << 63) <= value < 1 << 63):
            out[key] = value
            continue
        if is_too_deep(value, m.MAX_NESTING):
            text = f"lists, dicts and others in each other, more than {m.MAX_NESTING} deep"
            raise InvalidInput(f"{_place(what, row)}, name {key!r}: {text}; put such a value into a field")
        try:
            out[key] = _TAG_VALUES.lower(value.item() if isinstance(value, _NUMBERS) else value)
        except (UnsupportedValue, RecursionError) as error:
            raise UnsupportedValue(f"{_place(what, row)}, name {key!r}: {error}") from None
    return out


def _place(what: str, row: int | None) -> str:
    return what if row is None else f"{what} {row}"
