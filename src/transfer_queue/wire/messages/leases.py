"""Messages about rows that a task holds on lease. Whoever knows the number of a lease may send them."""

from __future__ import annotations

from transfer_queue.wire.messages.base import Reply, Request


class Ack(Request):
    """`rows` of a lease (None: all that are left) are used: the task never gets them again."""

    lease: int
    rows: bytes | None
    service: bytes = b""


class Renew(Request):
    """The lease (0: every one that the asking session holds) lasts at least `lease_s` from now on."""

    lease: int
    lease_s: float
    service: bytes = b""


class Release(Request):
    """`rows` of a lease (None: all that are left) were not used: they are offered to the task again."""

    lease: int
    rows: bytes | None
    service: bytes = b""


class Lent(Reply):
    """Answer to all three: how many rows of the lease are neither used, nor given back, nor cleared."""

    rows: int
