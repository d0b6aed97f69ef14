"""What is missing, in words, for those who have waited for long."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np

from transfer_queue.controller.dealing import ranks_kept_for
from transfer_queue.controller.readiness import KEPT, TOO_OLD, Task
from transfer_queue.controller.staleness import EPOCH, Staleness
from transfer_queue.controller.table import Table
from transfer_queue.controller.weight_versions import FOREIGN
from transfer_queue.errors import DeadlineExceeded
from transfer_queue.names import hint
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.wait_queue import Waiter, WaitQueue
from transfer_queue.wire import messages as m

LISTED = 8
CALLED: dict[type, str] = {
    m.TakeTickets: "tickets", m.ClaimSlots: "claim", m.SelectGroups: "select", m.AwaitGroups: "wait",
    m.TakeRefills: "refills",
}  # fmt: skip
Counts: TypeAlias = dict[tuple[str, str], int]  # rows on which a field is written, by partition and field


class Fetches(Protocol):
    """The requests that wait for rows, and what they wait for."""

    parked: WaitQueue[m.Fetch]
    tables: Mapping[str, Table]
    sampler: BaseSampler
    staleness: Staleness
    outbox: list[tuple[Hashable, m.Reply]]


def tell_waiting(fetching: Fetches, quota_waiters: WaitQueue[Any], max_rows: int | None, now: float) -> None:
    """Tell those who are due what they wait for."""
    told: list[tuple[Hashable, m.Reply]] = []
    counts: Counts = {}
    for parked, waited_s in fetching.parked.due(now):
        text = of_fetch(parked.message, fetching.tables, type(fetching.sampler).__name__, counts)
        told.append((parked.ticket, m.Waiting(parked.message.rid, f"get_meta waits for {waited_s:g} s: {text}")))
    for room, waited_s in quota_waiters.due(now):
        used = sum(table.num_rows for table in fetching.tables.values())
        text = f"put waits for {waited_s:g} s: {used} of total_storage_size={max_rows} rows are in use"
        told.append((room.ticket, m.Waiting(room.message.rid, f"{text}; clear what was used")))
    admissions = fetching.staleness.admissions
    for asking, waited_s in admissions.parked.due(now):
        text = f"admit waits for {waited_s:g} s: {admissions.refusal(asking.message)}"
        told.append((asking.ticket, m.Waiting(asking.message.rid, text)))
    fetching.outbox.extend(told)


def answer_waiting(
    parked: WaitQueue[Any], outbox: list[tuple[Hashable, m.Reply]], now: float, name: str, reason: Callable[[Any], str]
) -> list[Waiter[Any]]:
    """Tell those who are due what they wait for (`reason` of a message), and those who waited long enough, who are
    returned: whoever came behind them may be answered now. `name` is what they called; "": as `called` says."""
    for one, waited_s in parked.due(now):
        text = f"{name or called(one.message)} waits for {waited_s:g} s: {reason(one.message)}"
        outbox.append((one.ticket, m.Waiting(one.message.rid, text)))
    expired = parked.expired(now)
    for one in expired:
        text = too_late(one.message, name, reason)
        outbox.append((one.ticket, m.Failed(one.message.rid, DeadlineExceeded.code, text)))
    return expired


def too_late(message: Any, name: str, reason: Callable[[Any], str]) -> str:
    """What is told to who waited long enough."""
    return f"{name or called(message)}: not within {message.timeout_s:g} s: {reason(message)}"


def called(message: Any) -> str:
    """What the asker called, where that is a method of a pool of groups; else the kind of message."""
    return CALLED.get(type(message), type(message).__name__)


def of_fetch(message: m.Fetch, tables: Mapping[str, Table], sampler: str, counts: Counts) -> str:
    """What was asked for, and how far it is. `counts` are those of this moment: many wait for the same."""
    text = (
        f"{_wanted(message)} rows with {message.fields[:LISTED]} in partition {message.partition!r} "
        f"for task {message.task!r}: "
    )
    table = tables.get(message.partition)
    if table is None:
        return f"{text}there is no such partition{hint(message.partition, tables)}"
    size = "" if table.declared is None else f" of {table.declared} declared"
    size += f" and {table.cleared} cleared" if table.cleared else ""
    written = ", ".join(_written(message.fields[:LISTED], table, counts))
    task = table.task(message.task)
    taken = _taken(message, table, task, sampler) + _foreign(table, task) + _away(message, table, task)
    taken += _lost(message, table)
    return f"{text}{table.num_rows} rows{size}, {written}; {taken}"


def nothing(rid: int, lease: int = 0) -> m.RowSet:
    """The empty answer."""
    return m.RowSet(rid, b"", None, [], None, lease)


def timed_out(message: m.Fetch, table: Table | None) -> m.RowSet:
    """The empty answer, or `DeadlineExceeded` where the caller did not ask for one."""
    if message.empty_on_timeout:
        return nothing(message.rid)
    raise DeadlineExceeded(too_few(message, table))


def too_few(message: m.Fetch, table: Table | None) -> str:
    """Why a request was not answered in its time."""
    wanted: int | str = message.batch_size
    if wanted == m.ALL:
        size = None if table is None else table.expects(message.fields)
        wanted = "the declared number of" if size is None else f"the {size} declared"
        gone = 0 if table is None else table.num_gone(message.fields)
        wanted += f", {gone} of them cleared," if gone else ""
    text = (
        f"partition {message.partition!r}: fewer than {wanted} rows with {message.fields} became ready "
        f"for task {message.task!r} within {message.timeout_s:g} s"
    )
    task = None if table is None else table.tasks.get(message.task)
    if task is not None and task.limit is not None and task.limit.max_age is not None:
        text += f", none of them more than {task.limit.max_age} versions of the weights old"
    if table is not None and task is not None:
        text += _foreign(table, task) + _away(message, table, task) + _lost(message, table)
        text += _had(message, table, task)
    if table is not None and task is not None and message.dp_size and (ranks := _of_ranks(table, task)):
        text += f"; rows are kept for others{ranks}"
    unwritten = message.fields if table is None else [name for name in message.fields if name not in table.fields]
    return f"{text}; nobody has written {unwritten} there" if unwritten else text


def rows_wanted(message: m.Fetch) -> int:
    """How many rows it waits for; 0: all that were declared."""
    return 0 if message.batch_size == m.ALL else message.batch_size * max(1, message.dp_size)


def _wanted(message: m.Fetch) -> str:
    each = message.batch_size
    if each == m.ALL:
        return "all that were declared"
    return f"{each} for each of {message.dp_size} ranks, {each * message.dp_size}" if message.dp_size else f"{each}"


def _written(fields: Iterable[str], table: Table, counts: Counts) -> Iterable[str]:
    """On how many rows each of the fields is written."""
    for name in fields:
        field = table.fields.get(name)
        if field is None:
            yield f"{name!r} written on none{hint(name, table.fields)}"
            continue
        count = counts.get((table.name, name))
        if count is None:
            count = counts[table.name, name] = int(np.count_nonzero(table.cells[field.number, table.live()]))
        yield f"{name!r} written on {count}"


def _foreign(table: Table, task: Task) -> str:
    """How many rows count as too old because of the epoch that they name, or do not name."""
    if task.limit is None or not task.limit.judges:
        return ""
    live = table.live_slots()
    slots = live[(table.row_versions.born[live] == FOREIGN) & (task.fates[live] & TOO_OLD != 0)].tolist()
    if not slots:
        return ""
    bare = sum(EPOCH not in (table.tags[slot] or {}) for slot in slots)
    why = f", {bare} of them for want of the tag {EPOCH!r}" if bare else ""
    return f", {len(slots)} too old because their epoch of the weights was not announced{why}"


def _away(message: m.Fetch, table: Table, task: Task) -> str:
    """How many rows would be ready if the storage units that have them were there."""
    if not table.away:
        return ""
    free = task.offered(table.live_slots())
    written, ready = table.written(free, message.fields), table.ready(free, message.fields)
    count = 0 if written is None or ready is None else int(np.count_nonzero(written & ~ready))
    return f", {count} on storage units that are away ({sorted(table.away)[:LISTED]})" if count else ""


def _lost(message: m.Fetch, table: Table) -> str:
    """How many rows lack what was lost with the storage that held it. They come only if somebody puts them again."""
    if not table.lost:
        return ""
    slots = table.live_slots()
    slots = slots[np.isin(table.index[slots], list(table.lost))]
    written = table.written(slots, message.fields)
    count = 0 if written is None else int(np.count_nonzero(~written))
    return f", {count} lost with the storage that held them, to be put again" if count else ""


def _had(message: m.Fetch, table: Table, task: Task) -> str:
    """For those who want all: how many rows are ready, and missing because the task has them."""
    if message.batch_size != m.ALL or not task.num_consumed + task.num_lent:
        return ""
    live = table.live_slots()
    ready = table.ready(live, message.fields)
    slots = live[:0] if ready is None else live[ready]
    taken, lent = int(np.count_nonzero(task.consumed[slots])), int(np.count_nonzero(task.lease[slots] > 0))
    had = [f"{taken} were taken by the task before: `reset_consumption` offers them again"] if taken else []
    had += [f"{lent} are on lease until their holder acknowledges, releases or ends"] if lent else []
    return "".join(f"; {one}" for one in had)


def _taken(message: m.Fetch, table: Table, task: Task, sampler: str) -> str:
    reserved = sum(task.lent.get(kind, 0) for kind in KEPT)
    old = " or too old" if task.limit is not None and task.limit.judges else ""
    text = f"{task.num_consumed} taken{old}, {task.num_lent - reserved} on lease"
    if reserved:
        text += f", {reserved} kept for other ranks{_of_ranks(table, task)}"
    view = task.views.get(tuple(message.fields))
    ready = 0 if view is None else view.count
    enough = ready >= message.batch_size * max(1, message.dp_size)
    return f"{text}, {ready} ready" + (f", but not what {sampler} takes" if enough else "")


def _of_ranks(table: Table, task: Task) -> str:
    """For which data-parallel ranks rows are kept, and which of them have asked for none."""
    ranks = [
        f"dp_rank {rank}" + ("" if has_asked else ", which has not asked for any yet")
        for rank, has_asked in ranks_kept_for(table, task).items()
    ]
    more = [f"{len(ranks) - LISTED} more"] if len(ranks) > LISTED else []
    return f" ({'; '.join(ranks[:LISTED] + more)})" if ranks else ""
