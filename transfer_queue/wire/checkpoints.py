"""Messages that carry everything in the service at once. They are part of the unions in `messages`."""

from __future__ import annotations

import msgspec

from transfer_queue.wire.base import Piece, Reply, Request


class Snapshot(Request):
    """The controller's whole state and every block it refers to, pinned: one instant (`Cut`)."""


class Refilled(msgspec.Struct, array_like=True, gc=False):
    """`block`, unpublished and filled by this session, holds what the saved state calls block `saved`."""

    saved: int
    block: int
    layout: int


class Restore(Request):
    """Replace everything by the saved state in the payload, and publish its `blocks`: one atomic step."""

    blocks: list[Refilled]
    layouts: list[bytes]


class Cut(Reply):
    """Answer to `Snapshot`: the blocks of the state, which is the payload."""

    pieces: list[Piece]
    layouts: list[bytes]
