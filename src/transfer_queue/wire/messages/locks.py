"""Messages about locks on names: advisory, leased, and of one life of the service. Part of the unions in `messages`.

`lock` is the number of a lock, which grows with each one that is granted.
"""

from __future__ import annotations

from transfer_queue.wire.messages.base import Reply, Request, Seconds, Tags


class Lock(Request):
    """Lock `keys` of `partition` for the asking session, all together (`Locked`); parks until it is its turn.

    It ends `lease_s` after it was granted or renewed last, at the latest. `holder` is for people: who it is.
    """

    partition: str
    keys: list[str]
    lease_s: Seconds
    timeout_s: Seconds
    holder: Tags


class KeepLock(Request):
    """The lock lasts `lease_s` from now on; refused when it has ended."""

    lock: int
    lease_s: Seconds


class Unlock(Request):
    """The lock ends here; refused when it has ended before."""

    lock: int


class ListLocks(Request):
    """Who has and waits for locks, of one partition or of all (`Report`)."""

    partition: str | None


class Locked(Reply):
    lock: int
