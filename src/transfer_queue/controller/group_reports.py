"""What is told of a pool of groups: to who waits, to who looks, to who gets a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from transfer_queue.controller.fetch import row_set
from transfer_queue.controller.group_holdings import GroupLease
from transfer_queue.controller.recent import RecentEvents
from transfer_queue.controller.table import Table
from transfer_queue.groups import PoolCore, SiblingGroup
from transfer_queue.wire import messages as m

MAX_NAME = 60  # characters of a group's name where it is one thing of many


def summary(partition: str, pool: PoolCore) -> str:
    """What there is, for whoever waits for more."""
    rate = pool.policy.samples_per_insert
    allowed = "" if rate is None else f"; samples_per_insert={rate:g} allows {pool.samples_left():g} selections now"
    oldest = oldest_open(pool)
    behind = "" if oldest is None else (
        f"; the oldest open group is {oldest['group'][:MAX_NAME]!r}: {oldest['done']} of {oldest['size']} slots done, "
        f"{oldest['running']} running"
    )  # fmt: skip
    return (
        f"the pool of {partition!r} at version {pool.version} has {pool.num_open} open groups, "
        f"{pool.num_sealed} sealed ones ({pool.num_available} eligible), {pool.num_lent} lent, "
        f"{len(pool.state.reserved)} tickets out, {pool.state.owed} not refilled{allowed}{behind}"
    )


def oldest_open(pool: PoolCore) -> dict[str, Any] | None:
    """The open group that came first, and how many of its slots are in which state; None where no group is open."""
    group = next((one for one in pool.groups.values() if one.state == "open"), None) if pool.num_open else None
    if group is None:
        return None
    states = [slot.state for slot in group.slots]
    return {
        "group": group.name, "source": group.source, "start_version": group.start, "size": len(states),
        **{state: states.count(state) for state in ("done", "running", "idle", "failed")},
    }  # fmt: skip


def by_state(pool: PoolCore) -> dict[str, int]:
    """How many groups there are of each state."""
    return {"open": pool.num_open, "sealed": pool.num_sealed, "lent": pool.num_lent, "due": pool.num_due}


def described(
    pool: PoolCore, used_at: Mapping[str, float | None], waiting: int, workers: Sequence[Mapping[str, Any]], now: float
) -> dict[str, Any]:
    """`GroupPool.status`. `used_at`: when a group of each source was consumed last, or opened first (None: not in this
    life of the service); `waiting`: requests; `workers`: who makes how many attempts."""
    sources = {
        name: {
            **{field: getattr(one, field) for field in one.__struct_fields__},
            "starved_s": _since(used_at[name], now),
        }
        for name, one in pool.state.sources.items()
    }
    return {
        "version": pool.version, **by_state(pool), "eligible": pool.num_available,
        "tickets_out": len(pool.state.reserved), "owed": pool.state.owed,
        "steps": pool.steps.marked, "waiting": waiting, "ended": pool.state.ended, "sampled": pool.state.sampled,
        "running": sum(one["attempts"] for one in workers), "workers": list(workers),
        "oldest_open": oldest_open(pool),
        "excused": {str(version): count for version, count in pool.state.excused.items()}, "sources": sources,
    }  # fmt: skip


def _since(then: float | None, now: float) -> float | None:
    return None if then is None else max(0.0, now - then)


def lent_group(pool: PoolCore, group: SiblingGroup, probability: float, held: list[int]) -> m.LentGroup:
    """A group for who gets it; the rows of the slots `held` are withheld."""
    members = []
    for number, slot in enumerate(group.slots):
        if slot.result is not None:
            one, kept = slot.result, number in held
            members.append(
                m.LentMember(
                    number, slot.attempts - 1, 0 if kept else len(one.rows), one.reward, one.oldest, one.newest,
                    one.tokens, one.info, kept,
                )
            )  # fmt: skip
    return m.LentGroup(
        group.name, group.source, group.start, group.target, pool.age(group), group.prompt, members, group.priority,
        group.times_sampled, probability,
    )  # fmt: skip


def leased(lease: GroupLease, pool: PoolCore) -> m.LeaseOverview:
    """A lease, as it is shown."""
    rows = sum(len(pool.groups[name].rows) for name in lease.names if name in pool.groups)
    return m.LeaseOverview(lease.number, lease.partition, "", rows, lease.names, [lease.session], lease.deadline)


def tell_rows(
    recent: RecentEvents, now: float, what: str, lease: GroupLease, names: Iterable[str], pool: PoolCore
) -> None:
    """What became of rows of groups of a lease, for who looks at one of them. Of "selected" ones some are withheld."""
    kept, withheld = list[tuple[str, list[int]]](), list[tuple[str, list[int]]]()
    for group in [pool.groups[name] for name in names if name in pool.groups]:
        held = pool.withheld(group) if what == "selected" else []
        for number, slot in enumerate(group.slots):
            if slot.result is not None:
                (withheld if number in held else kept).append((group.name, slot.result.rows))
    recent.judged(now, what, lease.session, lease.partition, kept)
    recent.judged(now, "withheld", lease.session, lease.partition, withheld)


def finished_rows(recent: RecentEvents, now: float, session: bytes, message: m.FinishSlots, pool: PoolCore) -> None:
    """Rows that were there before are results of attempts now, as far as they are wanted."""
    found, rows = list[m.FinishedSlot](), list[int]()
    for one in message.finished:
        group = pool.groups.get(one.group)
        slot = None if group is None else group.slots[one.slot]
        if slot is not None and slot.result is not None and slot.attempts == one.attempt + 1:
            found.append(one)
            rows += slot.result.rows
    recent.finished(now, session, message.partition, found, np.array(rows, np.int64))


def has_fields(table: Table | None, fields: Sequence[str], group: SiblingGroup) -> bool:
    """Whether every row of the group has these fields."""
    ready = None if table is None else table.ready(table.slots_of(np.array(group.rows, np.int64)), fields)
    return ready is not None and bool(ready.all())


def rows_of(table: Table | None, groups: Sequence[SiblingGroup], held: Sequence[list[int]]) -> m.RowSet:
    """The rows of these groups, in order; of each without those of the slots that are withheld."""
    rows = [
        row for group, slots in zip(groups, held, strict=True) for number, slot in enumerate(group.slots)
        if slot.result is not None and number not in slots for row in slot.result.rows
    ]  # fmt: skip
    if table is None or not rows:
        return m.RowSet(0, b"", None, [], None)
    found = table.slots_of(np.array(rows, np.int64))
    return row_set(0, table, found, table.common_fields(found))
