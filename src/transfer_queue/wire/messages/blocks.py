"""Memory that is reserved, filled, read and given up."""

from __future__ import annotations

from transfer_queue.wire.messages.base import InArena, InEngine, Message, Registered, Reply, Request, Seconds

CARRIED_ROWS, CARRIED_NBYTES = 256, 128 << 10  # at most, of a fetch with `carry`
INLINE_NBYTES = 64 << 10  # payloads up to this size ride with their message instead of lying in a mapped block
UNIT_SHIFT = 40  # the bits of a block number above these name its unit


class Allocate(Request):
    """Reserve an unpublished block of `nbytes`; `pin`: the client keeps its memory mapped beyond publication."""

    nbytes: int
    pin: bool
    timeout_s: Seconds


class Allocated(Reply):
    """`location`: where its bytes go."""

    block: int
    location: InArena | InEngine


class Write(Request):
    """Fill `payload` into an unpublished block of this session at `offset` (clients that cannot map the arena)."""

    block: int
    offset: int


class Pull(Request):
    """Fill an unpublished block of this session with what `lies` in memory that the client lends until it is answered,
    within `timeout_s`."""

    block: int
    lies: Registered
    timeout_s: Seconds


class Read(Request):
    """Bytes of a block this session has pinned."""

    block: int
    offset: int
    nbytes: int


class Data(Reply):
    """Answer to `Read`: the bytes are the payload."""


class ReportMissing(Request):
    """The storage engine has none of these `blocks` (int64) for this reader: the server looks, and gives up the rows of
    all that are gone."""

    blocks: bytes


class Unpin(Message):
    """One way: this session no longer reads these blocks, which its request `rid` pinned (one entry per pin)."""

    rid: int
    blocks: list[int]


class Discard(Message):
    """One way: this session gives up an unpublished block."""

    block: int
