"""Messages about rows that a task holds on lease. Whoever knows the number of a lease may send them."""

from __future__ import annotations

from transfer_queue.wire.messages.base import Reply, Request, Seconds


class Ack(Request):
    """`rows` of a lease (None: all that are left) are used: the task never gets them again. Rows that were given back
    are refused, or left out with `but_returned`."""

    lease: int
    rows: bytes | None
    service: bytes = b""
    but_returned: bool = False


class Renew(Request):
    """The lease (0: every one that the asking session holds) lasts at least `lease_s` from now on."""

    lease: int
    lease_s: Seconds
    service: bytes = b""


class Release(Request):
    """`rows` of a lease (None: all that are left) were not used: they are offered to the task again. With lease 0: so
    is all that only this session holds, which leaves; what waits in its name is refused."""

    lease: int
    rows: bytes | None
    service: bytes = b""


class Nack(Request):
    """`rows` of a lease (None: all that are left) were tried in vain: the task is offered them again after `delay_s`,
    unless it has tried them as often as it may."""

    lease: int
    rows: bytes | None
    delay_s: Seconds
    reason: str
    service: bytes = b""


class ListDeadLetters(Request):
    """The rows that a task tried as often as it may, as a `RowSet` with `redelivered`."""

    partition: str
    task: str


class Requeue(Request):
    """Dead letters (`rows` of them, None: all) are offered to the task again, as if it had never tried them."""

    partition: str
    task: str
    rows: bytes | None
    service: bytes = b""


class Requeued(Reply):
    count: int


class Lent(Reply):
    """Answer to the four that name a lease: how many of its rows are neither used, nor given back, nor cleared.
    `returned` (int64): those that an `Ack` named and that had been given back, where they were to be left out."""

    rows: int
    returned: bytes = b""
