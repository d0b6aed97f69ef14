"""What requests about groups may ask for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from transfer_queue.controller.group_holdings import GroupLease, SessionHoldings
from transfer_queue.controller.leases import check_lease, check_seconds
from transfer_queue.controller.readiness import Slots
from transfer_queue.controller.table import Table
from transfer_queue.errors import InvalidInput
from transfer_queue.groups import PoolCore, SiblingGroup
from transfer_queue.groups.consistency import is_consistent
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import indexes_of

REQUESTS = (
    m.OpenPool, m.TakeTickets, m.ReturnTickets, m.OpenGroup, m.ClaimSlots, m.StartSlots, m.FinishSlots, m.FailSlots,
    m.FilterGroups, m.RetargetGroup, m.AdvancePool, m.EndPool, m.SelectGroups, m.RenewGroups, m.AckGroups,
    m.ReleaseGroups, m.ConsumeGroups, m.AwaitGroups, m.TakeRefills, m.DescribePool, m.PrioritizeGroups,
    m.IssueTickets, m.LendGroups, m.UnlendGroups, m.RemovePool, m.UnstartSlots,
    m.MarkPool, m.ResumePool,
)  # fmt: skip
OUTCOMES = (  # nobody asks for them
    m.IssueTickets, m.StartSlots, m.UnstartSlots, m.LendGroups, m.UnlendGroups, m.ConsumeGroups,
)  # fmt: skip
MAX_COUNT = 1 << 20
MAX_VERSION, MAX_TOKENS, MAX_STEP = 1 << 40, 1 << 40, 1 << 62


def check_waiting(message: Any, pool: PoolCore) -> None:
    """`InvalidInput` for numbers that mean nothing, and for what could never be had."""
    counts = [getattr(message, name) for name in ("count", "least", "most") if hasattr(message, name)]
    if not all(1 <= count <= MAX_COUNT for count in counts):
        raise InvalidInput(f"{type(message).__name__}: expected from 1 to {MAX_COUNT}, got {counts}")
    policy = pool.policy
    if isinstance(message, m.ClaimSlots):
        check_seconds("attempt_s", message.attempt_s)
    if isinstance(message, m.SelectGroups):
        check_lease(message.lease_s)
        if message.most < message.least or message.lease_s <= 0:
            raise InvalidInput(f"select {message.least} to {message.most} groups for {message.lease_s} s")
        if message.least > pool.rate.most_samples:
            raise InvalidInput(
                f"{message.least} groups at once: samples_per_insert and error_buffer allow "
                f"{pool.rate.most_samples:g} at most, a larger error_buffer more"
            )
    if isinstance(message, m.TakeTickets) and policy.gate is not None:
        most = (policy.gate + 1) * policy.groups_per_version
        if message.count > most:
            raise InvalidInput(f"{message.count} tickets at once: the gate is open for {most} at most")
    if isinstance(message, m.TakeTickets) and message.count > pool.rate.most_inserts:
        raise InvalidInput(
            f"{message.count} tickets at once: samples_per_insert and error_buffer allow "
            f"{pool.rate.most_inserts:g} at most, a larger error_buffer more"
        )


def check_pools(
    pools: Mapping[str, PoolCore], holdings: Collection[SessionHoldings], leases: Collection[GroupLease],
    tables: Mapping[str, Table],
) -> None:  # fmt: skip
    """An AssertionError unless every pool agrees with itself, with the leases and tickets that sessions have (each of
    those that are out is one's), and with the rows of its partition."""
    for partition, pool in pools.items():
        assert is_consistent(pool)
        lent = {group.name for group in pool.groups.values() if group.state == "lent"}
        assert lent <= {name for lease in leases if lease.partition == partition for name in lease.names}
        held = [ticket for one in holdings for ticket in one.tickets.get(partition, ())]
        assert sorted(ticket for ticket in held if ticket in pool.state.reserved) == sorted(pool.state.reserved)
        rows, table = np.array(list(pool.rows), np.int64), tables.get(partition)
        assert not len(rows) or (table is not None and bool((table.slots_of(rows) >= 0).all()))
        assert sum(one.refills.get(partition, 0) for one in holdings) <= pool.state.owed
    assert {name for one in holdings for name in (*one.tickets, *one.attempts, *one.refills)} <= pools.keys()


def check_slots(pool: PoolCore, attempts: Iterable[m.Attempt]) -> None:
    """`InvalidInput` for a slot that its group does not have; groups that have ended are not looked at."""
    for one in attempts:
        if one.group in pool.groups:
            pool.groups[one.group].slot(one.slot)


def check_unused(partition: str, pool: PoolCore, what: str = "is in use") -> None:
    """`InvalidInput` for a pool that has what somebody may still want."""
    if pool.in_use:
        raise InvalidInput(
            f"the pool of {partition!r} {what}: it has {pool.num_open} open groups, {pool.num_sealed} sealed and "
            f"{pool.num_lent} lent, and {len(pool.state.reserved)} tickets out"
        )


def check_step(step: int) -> None:
    """`InvalidInput` for a number that no step has."""
    if not 0 <= step < MAX_STEP:
        raise InvalidInput(f"step {step}: expected a number from 0 to {MAX_STEP}")


def check_versions(*versions: int | None) -> None:
    """`InvalidInput` for numbers that no version has."""
    if any(version is not None and not 0 <= version < MAX_VERSION for version in versions):
        raise InvalidInput(f"versions {versions}: expected numbers from 0 to {MAX_VERSION}")


def versions_of(one: m.FinishedSlot, group: SiblingGroup) -> tuple[int, int]:
    """The oldest and the newest version of a result. `InvalidInput` where they, or its tokens, mean nothing."""
    oldest = group.start if one.oldest is None else one.oldest
    newest = oldest if one.newest is None else one.newest
    check_versions(oldest, newest)
    if newest < oldest or not 0 <= one.tokens < MAX_TOKENS:
        raise InvalidInput(f"versions {oldest} to {newest}, {one.tokens} tokens")
    return oldest, newest


def named_rows(message: m.FinishSlots, table: Table | None) -> Slots:
    """The rows that results name, by index or by key; -1 for one that is not there."""
    num_rows = len(message.rows) // 8 if message.keys is None else len(message.keys)
    if table is None:
        return np.full(num_rows, -1, np.int64)
    named = np.array([table.keys.get(key, -1) for key in message.keys or ()], np.int64)
    slots = named if message.keys is not None else table.slots_of(indexes_of(message.rows))
    return np.where(slots < 0, -1, table.index[slots])
