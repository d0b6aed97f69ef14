"""Who speaks to a server, for how long, and what became of its requests."""

from __future__ import annotations

from transfer_queue.wire.messages.base import Message, Request


class Hello(Message):
    """`service`, `unit`: the lives that the caller holds on to (b"": any); a server of others refuses it."""

    version: int
    session: bytes
    nonce: bytes
    service: bytes = b""
    unit: bytes = b""
    role: int = 0  # handshake.CLIENT or handshake.UNIT


class Proof(Message):
    mac: bytes


class Challenge(Message):
    nonce: bytes
    mac: bytes


class Welcome(Message):
    """The session is open. `door` is the socket that hands out arena descriptors ("" when not mappable).

    `service` names the life of the controller, and with it of all rows, leases and keys; `unit` that of this server,
    and with it of its arenas, blocks and pins. Both are random, and no other life ever has them.
    """

    pid: int
    door: str
    config: bytes
    service: bytes = b""
    unit: bytes = b""


class Adopt(Request):
    """Hold another session's pins as well (a forked child takes over what its parent reads)."""

    session: bytes


class Cancel(Message):
    """One way: request `rid` of this session is to have had no effect for it, answered or not.

    It is not parked any longer; the rows it took, the block or the pins it gave are given back. Rows that were
    `Received` stay taken.
    """

    rid: int


class Received(Message):
    """One way: the rows that these requests took are in their asker's hands; until then they are undone with them."""

    rids: list[int]


class Goodbye(Message):
    """One way: this session ends here, now, and will not come back."""
