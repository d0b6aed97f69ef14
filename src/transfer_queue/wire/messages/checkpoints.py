"""Messages that carry everything in the service at once. They are part of the unions in `messages`."""

from __future__ import annotations

import msgspec

from transfer_queue.wire.messages.base import Reply, Request

STATE_S = 300.0  # the controller needs about a second per million rows to export or take a state


class Snapshot(Request):
    """The controller's whole state and every block it refers to, as of one instant (`Captured`).

    None of the blocks is recycled before this session sends `Recycle` or ends: time to pin them on their units.
    """


class Recycle(Request):
    """The blocks of the snapshot that was asked for as `snapshot` are pinned, or not needed; 0: of all of this
    session."""

    snapshot: int = 0


class Pin(Request):
    """Pin these blocks (int64) of this server's unit; see `Taken`. `Unpin` gives them back."""

    blocks: bytes


class Refilled(msgspec.Struct, array_like=True, gc=False):
    """`block`, unpublished and filled by this session, holds what the saved state calls block `saved`."""

    saved: int
    block: int
    layout: int


class Restore(Request):
    """Replace everything by the saved state in the payload, and publish its `blocks`: one atomic step."""

    blocks: list[Refilled]
    layouts: list[bytes]


class Captured(Reply):
    """Answer to `Snapshot`: the blocks (int64) of the state, which is the payload, and where the units are that have
    them; the server that answers is ""."""

    blocks: bytes
    units: dict[int, str]
