"""What requests about groups wait for, and in whose words."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from transfer_queue.groups import PoolCore
from transfer_queue.groups.again import unlike_before
from transfer_queue.groups.shortfall import needed
from transfer_queue.wait_queue import Waiter
from transfer_queue.wire import messages as m


def place_of(parked: Waiter[Any]) -> Hashable:
    """What it waits for: who waits for the same is answered in order of arrival."""
    message = parked.message
    match message:
        case m.ClaimSlots(group=group):
            return type(message), group
        case m.SelectGroups(fields=fields):
            return type(message), *fields
        case m.AwaitGroups():
            return parked.ticket  # it takes nothing, so nobody waits behind it
    return (type(message),)


def unlike_asked(message: Any, pool: PoolCore) -> list[str]:
    """The groups that are due in batches of another size than this request asks for. Raises `GroupsShort`."""
    if not isinstance(message, m.SelectGroups) or not pool.num_due:
        return []
    return unlike_before(pool, needed(pool, message.least), message.most)


def wanted(message: Any) -> str:
    """What a request waits for, in words."""
    match message:
        case m.TakeTickets(count=count):
            return f"{count} tickets"
        case m.ClaimSlots(group=group):
            return "a slot that nobody works on" + ("" if group is None else f", of group {group!r}")
        case m.SelectGroups(least=least, fields=fields):
            return f"{least} groups" + (f" with {fields} on all their rows" if fields else "")
        case m.AwaitGroups(count=count):
            return f"{count} groups"
    return "groups that were evicted"
