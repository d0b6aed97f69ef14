"""What one session has of pools of groups: it returns with the session."""

from __future__ import annotations


class GroupLease:
    """Groups that one session has."""

    __slots__ = ("deadline", "names", "number", "partition", "session")

    def __init__(self, number: int, partition: str, names: list[str], session: bytes, deadline: float) -> None:
        self.number = number
        self.partition = partition
        self.names = names
        self.session = session
        self.deadline = deadline


class SessionHoldings:
    """What a session has of the pools, by partition, but leases."""

    def __init__(self) -> None:
        self.tickets: dict[str, set[int]] = {}
        self.attempts: dict[str, set[tuple[str, int, int]]] = {}
        self.refills: dict[str, int] = {}
