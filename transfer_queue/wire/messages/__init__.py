"""Every message of the protocol, as msgspec structs in tagged unions.

    base           what messages are made of
    checkpoints    everything in the service at once
    leases         rows that a task holds
    listings       keys
    locks          names that are held
    partitions     a partition as a whole
    staleness      versions of weights, and how many rows may be started
    units          between storage units and the controller, and from readers to units of other hosts

Row sets travel as little-endian int64 bytes (`rows`), parallel to the caller's order. `rid` is chosen by the
client, unique within its session; a mutating request repeated with the same `rid` gets its first reply again.
`timeout_s` is how long the server may park the request. `service` is the life of the service that named the rows or the
lease of a request (b"": not known); a server of another life refuses it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from transfer_queue.errors import InvalidInput
from transfer_queue.schema import FieldSchema
from transfer_queue.wire.messages.base import REMOTE as REMOTE
from transfer_queue.wire.messages.base import InArena as InArena
from transfer_queue.wire.messages.base import Inline as Inline
from transfer_queue.wire.messages.base import Location as Location
from transfer_queue.wire.messages.base import Message as Message
from transfer_queue.wire.messages.base import Piece as Piece
from transfer_queue.wire.messages.base import Remote as Remote
from transfer_queue.wire.messages.base import Reply as Reply
from transfer_queue.wire.messages.base import Request as Request
from transfer_queue.wire.messages.base import Tags as Tags
from transfer_queue.wire.messages.checkpoints import Captured as Captured
from transfer_queue.wire.messages.checkpoints import Pin as Pin
from transfer_queue.wire.messages.checkpoints import Recycle as Recycle
from transfer_queue.wire.messages.checkpoints import Refilled as Refilled
from transfer_queue.wire.messages.checkpoints import Restore as Restore
from transfer_queue.wire.messages.checkpoints import Snapshot as Snapshot
from transfer_queue.wire.messages.leases import Ack as Ack
from transfer_queue.wire.messages.leases import Lent as Lent
from transfer_queue.wire.messages.leases import Release as Release
from transfer_queue.wire.messages.leases import Renew as Renew
from transfer_queue.wire.messages.listings import Changes as Changes
from transfer_queue.wire.messages.listings import Listing as Listing
from transfer_queue.wire.messages.listings import ListKeys as ListKeys
from transfer_queue.wire.messages.locks import KeepLock as KeepLock
from transfer_queue.wire.messages.locks import ListLocks as ListLocks
from transfer_queue.wire.messages.locks import Lock as Lock
from transfer_queue.wire.messages.locks import Locked as Locked
from transfer_queue.wire.messages.locks import Unlock as Unlock
from transfer_queue.wire.messages.partitions import DescribePartition as DescribePartition
from transfer_queue.wire.messages.partitions import GetPartition as GetPartition
from transfer_queue.wire.messages.partitions import PartitionDescription as PartitionDescription
from transfer_queue.wire.messages.partitions import PartitionInfo as PartitionInfo
from transfer_queue.wire.messages.partitions import SetPartition as SetPartition
from transfer_queue.wire.messages.staleness import Admit as Admit
from transfer_queue.wire.messages.staleness import Admitted as Admitted
from transfer_queue.wire.messages.staleness import Announce as Announce
from transfer_queue.wire.messages.staleness import Counted as Counted
from transfer_queue.wire.messages.staleness import GiveBack as GiveBack
from transfer_queue.wire.messages.units import Blocks as Blocks
from transfer_queue.wire.messages.units import Cut as Cut
from transfer_queue.wire.messages.units import Drop as Drop
from transfer_queue.wire.messages.units import Join as Join
from transfer_queue.wire.messages.units import Joined as Joined
from transfer_queue.wire.messages.units import Moved as Moved
from transfer_queue.wire.messages.units import ResolveCommits as ResolveCommits
from transfer_queue.wire.messages.units import SparseBlock as SparseBlock
from transfer_queue.wire.messages.units import Take as Take
from transfer_queue.wire.messages.units import Taken as Taken

PROTOCOL_VERSION = 5
INLINE_NBYTES = 64 << 10  # payloads up to this size ride with their message instead of lying in a mapped block
UNIT_SHIFT = 40  # the bits of a block number above these name its unit
DONE = -1  # the lease of an empty `RowSet`: nothing is left to wait for
PASSED = -2  # likewise: nothing is left of this batch of a rank, whose next one may be asked for


class Hello(Message):
    """`service`, `unit`: the lives that the caller holds on to (b"": any); a server of others refuses it."""

    version: int
    session: bytes
    nonce: bytes
    service: bytes = b""
    unit: bytes = b""
    role: int = 0  # hello.CLIENT or hello.UNIT


class Proof(Message):
    mac: bytes


class Allocate(Request):
    """Reserve an unpublished block of `nbytes`; `pin`: the client keeps its memory mapped beyond publication."""

    nbytes: int
    pin: bool
    timeout_s: float


class Write(Request):
    """Fill `payload` into an unpublished block of this session at `offset` (clients that cannot map the arena)."""

    block: int
    offset: int


class Read(Request):
    """Bytes of a block this session has pinned."""

    block: int
    offset: int
    nbytes: int


class Commit(Request):
    """Publish one block as cells of `fields` on some rows, merge `tags`, and wake waiters: one atomic step.

    Rows are named by `keys` (upsert), by `rows` (existing indexes), or by neither (`count` new rows).
    `block` is 0 when the payload rides inline, -1 when there are only tags. `strict`: refused when a field holds
    another dtype, rank or kind. `expected`, int64 (field, row), names the block that each of these cells lies in now
    (0: not written): where one is another, `CellsChanged` and no effect.
    """

    partition: str
    count: int
    keys: list[str] | None
    rows: bytes | None
    fields: list[FieldSchema]
    block: int
    layout: bytes
    tags: list[Tags] | None
    timeout_s: float
    replaced: list[int] = []  # noqa: RUF012  positions whose tags replace the stored ones instead of merging
    service: bytes = b""
    strict: bool = False
    expected: bytes | None = None


class Insert(Request):
    """Reserve `count` rows, creating the partition."""

    partition: str
    count: int
    fields: list[str]
    timeout_s: float


class Fetch(Request):
    """Hand `batch_size` ready rows to `task`; parks until the sampler is satisfied.

    With `lease_s` the rows are lent to the session `holder` (b"": the asker's) until they are acknowledged. With
    `until_done` the answer is empty once every row is used or lent to that holder, and there are as many as declared.
    With `locate` the answer is `Handed`: it has where the cells are as well.

    With `dp_size` the rows are dealt to that many ranks at once, `batch_size` to each, and `sampling` says whose share
    (`dp_rank`) of which batch (`batch_index`) this is. `used`: rows of that share that were used before and are not
    wanted again. With `until_cleared` the answer is also empty where the partition is gone.
    """

    partition: str
    fields: list[str]
    batch_size: int
    task: str
    sampling: dict[str, Any]
    timeout_s: float
    empty_on_timeout: bool
    lease_s: float = 0.0
    until_done: bool = False
    holder: bytes = b""
    locate: bool = False
    waited_s: float = 0.0  # with earlier requests for the same rows
    dp_size: int = 0
    used: int = 0
    until_cleared: bool = False


class Scan(Request):
    """Every row of a partition with its readiness over `fields`."""

    partition: str
    fields: list[str]


class Find(Request):
    """Rows of `keys`; unknown keys are created or dropped."""

    partition: str
    keys: list[str]
    create: bool
    timeout_s: float


class NameRows(Request):
    """Keys of `rows` (None where a row has none)."""

    partition: str
    rows: bytes


class Get(Request):
    """Locate and pin the cells of `fields` (None: all that every row has) on `keys` or `rows`.

    With `by_key`, unknown keys and fields that are not ready on every row are dropped unless `strict`.
    """

    partition: str
    keys: list[str] | None
    rows: bytes | None
    fields: list[str] | None
    strict: bool
    service: bytes = b""


class Unpin(Message):
    """One way: this session no longer reads these blocks, which its request `rid` pinned (one entry per pin)."""

    rid: int
    blocks: list[int]


class Discard(Message):
    """One way: this session gives up an unpublished block."""

    block: int


class Cancel(Message):
    """One way: request `rid` of this session is to have had no effect for it, answered or not.

    It is not parked any longer; the rows it took, the block or the pins it gave are given back. Rows that were
    `Received` stay taken.
    """

    rid: int


class Received(Message):
    """One way: the rows that these requests took are in their asker's hands; until then they are undone with them."""

    rids: list[int]


class Clear(Request):
    """Remove rows (`keys`, `rows`, or the whole partition when both are None). Unknown ones are ignored."""

    partition: str
    keys: list[str] | None
    rows: bytes | None
    service: bytes = b""


class SetTags(Request):
    partition: str
    rows: bytes
    tags: list[Tags]
    replace: bool
    service: bytes = b""


class Consumption(Request):
    partition: str
    task: str


class Production(Request):
    partition: str
    fields: list[str]


class ResetConsumption(Request):
    partition: str
    task: str | None


class ListPartitions(Request):
    pass


class Adopt(Request):
    """Hold another session's pins as well (a forked child takes over what its parent reads)."""

    session: bytes


class Goodbye(Message):
    """One way: this session ends here, now, and will not come back."""


class Stats(Request):
    pass


class Stop(Request):
    """End the server; refused unless sent by its owner's session or a local peer with the same user."""


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


class Done(Reply):
    note: str = ""  # a remark for the caller's log


class Failed(Reply):
    code: str
    text: str


class Waiting(Reply):
    """Not the answer yet: the request stays parked, and `text` says what is missing."""

    text: str


class Allocated(Reply):
    block: int
    arena: int
    offset: int


class Data(Reply):
    """Answer to `Read`: the bytes are the payload."""


class Committed(Reply):
    """`tags` are the merged tags of the rows (None: all empty), `fields` those every row now has. `loads`: see
    `lives`. `note`: a remark for the writer."""

    rows: bytes
    tags: list[Tags] | None
    fields: list[str]
    loads: int = 0
    note: str = ""


class RowSet(Reply):
    """Rows with what metadata needs. `ready` is None when all are, else one byte per row (or row and field).

    `lease` is the number of the lease they are held on, 0 for none; `DONE` in the empty answer to a fetch `until_done`.
    `loads`: see `lives`. `repeated`: how many at the end are rows of this or of other ranks' shares once more, so that
    all ranks get the same number.
    """

    rows: bytes
    tags: list[Tags] | None
    schema: list[FieldSchema]
    ready: bytes | None
    lease: int = 0
    loads: int = 0
    repeated: int = 0


class Part(msgspec.Struct, array_like=True, gc=False):
    """Fields that lie alike: `runs` is int64 (k, 3) of (piece, first row in it, number of rows), in result order."""

    fields: list[str]
    runs: bytes


class Located(Reply):
    """`units` has the address of every unit that pieces lie on elsewhere; "" is the server that answers."""

    count: int
    pieces: list[Piece]
    layouts: list[bytes]
    parts: list[Part]
    schema: list[FieldSchema]
    units: dict[int, str] = {}  # noqa: RUF012  msgspec copies it
    note: str = ""


class Handed(Reply):
    """Rows of a task, and their cells as a `Get` of them would give; the payload is that of `located`."""

    rows: RowSet
    located: Located


class Names(Reply):
    names: list[str | None]


class RowStatus(Reply):
    """`status` int8 (n,) or (n, fields) of n rows; `known` is False for an unknown partition or field.

    `runs` is int64 (k, 2): runs of ascending indexes as (first, number).
    """

    known: bool
    num_rows: int
    runs: bytes
    status: bytes
    declared: int | None


class Report(Reply):
    values: dict[str, Any]


ClientMessage: TypeAlias = (
    Hello | Proof | Allocate | Write | Read | Commit | Insert | Fetch | Scan | Find | NameRows | Get | Unpin | Discard
    | Cancel | Received | Goodbye | Take | Join | Moved | ResolveCommits
    | Clear | SetTags | ListKeys | Consumption | Production | ResetConsumption | ListPartitions | SetPartition
    | GetPartition | DescribePartition | Adopt | Stats | Stop | Snapshot | Pin | Recycle | Restore
    | Ack | Renew | Release | Announce | Admit | GiveBack | Lock | KeepLock | Unlock | ListLocks
)  # fmt: skip
ServerMessage: TypeAlias = (
    Challenge | Welcome | Done | Failed | Allocated | Data | Committed | RowSet | Located | Taken | Names | Listing
    | RowStatus | PartitionInfo | Report | Joined | Blocks | Drop | SparseBlock | Captured | Lent | Handed
    | Counted | Admitted | Waiting | Locked | PartitionDescription
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
decode_client = msgspec.msgpack.Decoder(ClientMessage).decode


def check_request(request: Request) -> None:
    """`InvalidInput` when the server would close the connection over `request`: an argument has the wrong type."""
    try:
        decode_client(encode(request))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise InvalidInput(f"{type(request).__name__}: {error}") from None


decode_server = msgspec.msgpack.Decoder(ServerMessage).decode

SMALL_HEADER_NBYTES, LARGE_HEADER_NBYTES = 1 << 20, 256 << 20
LARGE = frozenset(
    one.__name__.encode()
    for one in (Commit, Find, NameRows, Get, Unpin, Clear, SetTags, ListKeys, Take, Join, Moved, ResolveCommits, Pin,
                Restore, Ack, Release)
)  # fmt: skip


def header_limit(head: memoryview) -> int:
    """How long the header may be that begins like this: only what names rows, keys or blocks can need more than names
    of fields and a sampling_config. A header is an array whose first item is its kind (msgspec's tagged structs)."""
    start = 3 if head[0] == 0xDC else 1  # array 16, fixarray (the msgpack specification)
    size = head[start] & 0x1F  # fixstr
    return LARGE_HEADER_NBYTES if bytes(head[start + 1 : start + 1 + size]) in LARGE else SMALL_HEADER_NBYTES


# Replies of these are remembered, so that a retried request has its first outcome.
MUTATING = frozenset((
    Allocate, Commit, Insert, Fetch, Find, Clear, SetTags, ResetConsumption, SetPartition, Moved, Restore, Ack,
    Release, Announce, Admit, GiveBack, Lock, Unlock,
))  # fmt: skip
