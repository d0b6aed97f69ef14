"""Rows that are made, named, changed and removed."""

from __future__ import annotations

import msgspec

from transfer_queue.schema import FieldSchema
from transfer_queue.wire.messages.base import Reply, Request, Seconds, Tags

DONE = -1  # the lease of an empty `RowSet`: nothing is left to wait for
PASSED = -2  # likewise: nothing is left of this batch of a rank, whose next one may be asked for


class FinishedSlot(msgspec.Struct, array_like=True):
    """The result of an attempt at a slot of a group, but for its rows: the versions of the weights that made its tokens
    (None: the one that the group was started at), and what its producer says of it. `count`: how many of the request's
    rows are its own; they come in the order of the results."""

    group: str
    slot: int
    attempt: int
    reward: float | None
    oldest: int | None
    newest: int | None
    tokens: int
    info: Tags
    count: int = 1


class RefusedSlot(msgspec.Struct, array_like=True):
    """The result at place `at` of a request is not wanted; `code` and `text` are those of the error that says why."""

    at: int
    code: str
    text: str


class SharedCells(msgspec.Struct, array_like=True):
    """Cells of one field in a commit, of rows that may have one in common: `rows`, int64, are positions in the commit,
    `places` the row of `block` that each has.

    The block is new with the commit (then `layout` describes it, and `prints` has 16 bytes for each of its rows), or
    one of shared cells that rows of the partition have: where it is gone, `CellsChanged` and no effect.
    """

    field: FieldSchema
    block: int
    rows: bytes
    places: bytes
    is_new: bool
    layout: bytes = b""
    prints: bytes = b""


class Commit(Request):
    """Publish one block as cells of `fields` on some rows, merge `tags`, and wake waiters: one atomic step.

    Rows are named by `keys` (upsert), by `rows` (existing indexes), or by neither (`count` new rows).
    `block` is 0 when the payload rides inline, -1 when there are only tags. `strict`: refused when a field holds
    another dtype, rank or kind. `expected`, int64 (field, 2, row), names the block that each of these cells lies in
    now, and its row there (0 and 0: not written): where one lies elsewhere, `CellsChanged` and no effect. `finishes`:
    the rows, which are new, are the results of these attempts; those of a result that is not wanted are not made, and
    the answer says which it was. `shared`: cells of other fields, one for each row; together they are the commit's one
    step.
    """

    partition: str
    count: int
    keys: list[str] | None
    rows: bytes | None
    fields: list[FieldSchema]
    block: int
    layout: bytes
    tags: list[Tags] | None
    timeout_s: Seconds
    replaced: list[int] = []  # noqa: RUF012  positions whose tags replace the stored ones instead of merging
    service: bytes = b""
    strict: bool = False
    expected: bytes | None = None
    finishes: list[FinishedSlot] | None = None
    shared: list[SharedCells] = []  # noqa: RUF012


class Committed(Reply):
    """`tags` are the merged tags of the rows (None: all empty), `fields` those every row now has. `loads`: see
    `lives`. `note`: a remark for the writer. `refused`: of the results that the rows were to be."""

    rows: bytes
    tags: list[Tags] | None
    fields: list[str]
    loads: int = 0
    note: str = ""
    refused: list[RefusedSlot] = []  # noqa: RUF012  never changed


class Insert(Request):
    """Reserve `count` rows, creating the partition. `alone`: refused where it has rows, so that of several who fill a
    partition one does; until the answer is confirmed, the rows go with their asker unless `fields` are written."""

    partition: str
    count: int
    fields: list[str]
    timeout_s: Seconds
    alone: bool = False


class Find(Request):
    """Rows of `keys`; unknown keys are created or dropped."""

    partition: str
    keys: list[str]
    create: bool
    timeout_s: Seconds


class NameRows(Request):
    """Keys of `rows` (None where a row has none, or is not there). Refused as `DataLost` where rows of the life
    `service` are not here."""

    partition: str
    rows: bytes
    service: bytes = b""


class Names(Reply):
    names: list[str | None]


class Clear(Request):
    """Remove rows (`keys`, `rows`, or the whole partition when both are None). Unknown ones are ignored. With its last
    key a partition is gone, but with `spares` only when no more rows are to come that were declared."""

    partition: str
    keys: list[str] | None
    rows: bytes | None
    service: bytes = b""
    spares: bool = False

    @property
    def is_asked(self) -> bool:
        """Whether a client asks, whose requests have numbers from 1: what the service takes back by itself was never
        there for anybody."""
        return self.rid != 0


class SetTags(Request):
    partition: str
    rows: bytes
    tags: list[Tags]
    replace: bool
    service: bytes = b""


class RowSet(Reply):
    """Rows with what metadata needs. `ready` is None when all are, else one byte per row (or row and field).

    `lease` is the number of the lease they are held on, 0 for none; `DONE` in the empty answer to a fetch `until_done`.
    `loads`: see `lives`. `repeated`: how many at the end are rows of this or of other ranks' shares once more, so that
    all ranks get the same number. `redelivered`: (position, attempts, reason of the last one) of rows that the task had
    on a lease before and did not use.
    """

    rows: bytes
    tags: list[Tags] | None
    schema: list[FieldSchema]
    ready: bytes | None
    lease: int = 0
    loads: int = 0
    repeated: int = 0
    redelivered: list[tuple[int, int, str]] | None = None
