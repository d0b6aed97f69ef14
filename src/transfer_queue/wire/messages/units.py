"""Messages between storage units and the controller, and from readers to the units of other hosts. They are part of the
unions in `messages`."""

from __future__ import annotations

import msgspec

from transfer_queue.wire.messages.base import Message, Piece, Reply, Request, Seconds
from transfer_queue.wire.messages.overview import WaitOverview


class Cut(msgspec.Struct, array_like=True, gc=False):
    """Some rows (ascending int64, distinct) and fields of a block; of fields in `slices`, only such parts of them:
    (start, stop, dim, part, parts, zigzag), see `codec.slices`."""

    block: int
    rows: bytes
    fields: list[str]
    slices: dict[str, tuple[int, int | None, int, int, int, bool]] = {}


class Take(Request):
    """Pin what a reader on another host needs of this unit's blocks; `Read` then fetches the bytes.

    A cut of part of a block is a block of its own, of exactly these rows, unless there is no room for it: then the
    whole block is given.
    """

    cuts: list[Cut]


class Taken(Reply):
    """One piece for each cut; they are pinned, or ride in the payload. `sliced`: those that have parts of rows where
    parts were asked for; the others have whole ones."""

    pieces: list[Piece]
    layouts: list[bytes]
    sliced: list[int] = []  # noqa: RUF012


class Join(Request):
    """A unit of another host offers itself: its incarnation, where readers reach it ("host:port"; without a host, the
    one this connection comes from), and the numbers (int64) of the blocks it has published. `returns`: when its server
    is killed another process goes on in its place. `away_s`: for how long its rows are waited for when it is away.
    `lasts`: it has a journal. `service`: where its blocks come from one, and are all that it has, of which service they
    are."""

    incarnation: bytes
    address: str
    blocks: bytes
    returns: bool = False
    away_s: Seconds = 60.0
    lasts: bool = False
    service: bytes = b""


class Joined(Reply):
    """The unit's number, which the numbers of its blocks begin with. No row refers to the blocks `gone` (int64)."""

    unit: int
    gone: bytes


class ReportUnit(Request):
    """How a unit is: `counts` of bytes by name, as in `stats()`, and the first of the `num_waits` puts that wait for
    room in it. Sent after it joined, when something changed, and while somebody waits, once a second at most."""

    counts: dict[str, int]
    num_waits: int
    waits: list[WaitOverview]


class DigestCells(Request):
    """SHA-256 of cells of a field, each in a row (int64) of a block (int64) of this unit; see `codec.cells`."""

    field: str
    blocks: bytes
    rows: bytes


class CellDigests(Reply):
    """b"" for a cell that is not there."""

    digests: list[bytes]


class Moved(Request):
    """A unit rewrote a sparse block as `target`, whose rows are `rows` (ascending int64) of the old one."""

    block: int
    target: int
    rows: bytes


class Gathered(Request):
    """A unit wrote what blocks of it hold of one row each as rows of `target`: row i what `blocks[i]` (int64) holds of
    the row with index `rows[i]` (int64)."""

    target: int
    blocks: bytes
    rows: bytes


class ResolveCommits(Request):
    """Which of these blocks (int64) does no row refer to? They never will: commits of them are refused from now on."""

    blocks: bytes


class Blocks(Reply):
    """Block numbers, int64."""

    numbers: bytes


class Drop(Message):
    """To a unit: no row refers to these blocks (int64) any more."""

    blocks: bytes


class SparseBlock(Message):
    """To a unit: rewrite `block`, of which only these rows (ascending int64) and fields are left."""

    block: int
    rows: bytes
    fields: list[str]


class GatherRows(Message):
    """To a unit: write what these blocks (int64) hold, the same fields of one row each, as one block. The indexes
    (int64) of the rows are for `Gathered`."""

    blocks: bytes
    rows: bytes
