"""What requests about groups wait for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

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
