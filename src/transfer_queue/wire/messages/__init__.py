"""Every message of the protocol, as msgspec structs in tagged unions.

    base         what messages are made of, and the answers that any request may get
    sessions     who speaks, for how long, and what became of its requests
    blocks       memory that is reserved, filled, read and given up
    rows         rows that are made, named, changed and removed
    reads        where the cells of rows lie
    tasks        rows that a task gets, and what it has had
    leases       rows that a task holds
    steps        what tasks took in each step of a training loop
    listings     keys
    groups       groups of siblings
    locks        names that are held
    partitions   a partition as a whole
    series       partitions of which only so many may be open
    staleness    versions of weights, and how many rows may be started
    checkpoints  everything in the service at once
    units        between storage units and the controller, and from readers to units of other hosts
    services     what is asked of a service as a whole
    overview     what a service holds, who waits for what, what became of a row, for people

Row sets travel as little-endian int64 bytes (`rows`), parallel to the caller's order. `rid` is chosen by the
client, unique within its session; a mutating request repeated with the same `rid` gets its first reply again.
`timeout_s` is how long the server may park the request. `service` is the life of the service that named the rows or the
lease of a request (b"": not known); a server of another life refuses it.
"""

from __future__ import annotations

import gc
import numbers
import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, TypeAlias

import msgspec

from transfer_queue.errors import InvalidInput
from transfer_queue.wire.framing import UNREADABLE, unsendable
from transfer_queue.wire.messages.base import MAX_NESTING as MAX_NESTING
from transfer_queue.wire.messages.base import REMOTE as REMOTE
from transfer_queue.wire.messages.base import Done as Done
from transfer_queue.wire.messages.base import Failed as Failed
from transfer_queue.wire.messages.base import InArena as InArena
from transfer_queue.wire.messages.base import InEngine as InEngine
from transfer_queue.wire.messages.base import Inline as Inline
from transfer_queue.wire.messages.base import Location as Location
from transfer_queue.wire.messages.base import Message as Message
from transfer_queue.wire.messages.base import Piece as Piece
from transfer_queue.wire.messages.base import Registered as Registered
from transfer_queue.wire.messages.base import Remote as Remote
from transfer_queue.wire.messages.base import Reply as Reply
from transfer_queue.wire.messages.base import Request as Request
from transfer_queue.wire.messages.base import Tags as Tags
from transfer_queue.wire.messages.base import Waiting as Waiting
from transfer_queue.wire.messages.base import is_too_deep as is_too_deep
from transfer_queue.wire.messages.blocks import CARRIED_NBYTES as CARRIED_NBYTES
from transfer_queue.wire.messages.blocks import CARRIED_ROWS as CARRIED_ROWS
from transfer_queue.wire.messages.blocks import INLINE_NBYTES as INLINE_NBYTES
from transfer_queue.wire.messages.blocks import UNIT_SHIFT as UNIT_SHIFT
from transfer_queue.wire.messages.blocks import Allocate as Allocate
from transfer_queue.wire.messages.blocks import Allocated as Allocated
from transfer_queue.wire.messages.blocks import Data as Data
from transfer_queue.wire.messages.blocks import Discard as Discard
from transfer_queue.wire.messages.blocks import Pull as Pull
from transfer_queue.wire.messages.blocks import Read as Read
from transfer_queue.wire.messages.blocks import ReportMissing as ReportMissing
from transfer_queue.wire.messages.blocks import Unpin as Unpin
from transfer_queue.wire.messages.blocks import Write as Write
from transfer_queue.wire.messages.checkpoints import Captured as Captured
from transfer_queue.wire.messages.checkpoints import Pin as Pin
from transfer_queue.wire.messages.checkpoints import Recycle as Recycle
from transfer_queue.wire.messages.checkpoints import Refilled as Refilled
from transfer_queue.wire.messages.checkpoints import Restore as Restore
from transfer_queue.wire.messages.checkpoints import Snapshot as Snapshot
from transfer_queue.wire.messages.groups import AckGroups as AckGroups
from transfer_queue.wire.messages.groups import AdvancePool as AdvancePool
from transfer_queue.wire.messages.groups import Attempt as Attempt
from transfer_queue.wire.messages.groups import AwaitGroups as AwaitGroups
from transfer_queue.wire.messages.groups import ClaimedSlot as ClaimedSlot
from transfer_queue.wire.messages.groups import ClaimSlots as ClaimSlots
from transfer_queue.wire.messages.groups import ConsumeGroups as ConsumeGroups
from transfer_queue.wire.messages.groups import DescribePool as DescribePool
from transfer_queue.wire.messages.groups import EndPool as EndPool
from transfer_queue.wire.messages.groups import FailSlots as FailSlots
from transfer_queue.wire.messages.groups import FilterGroups as FilterGroups
from transfer_queue.wire.messages.groups import FinishSlots as FinishSlots
from transfer_queue.wire.messages.groups import GroupsLent as GroupsLent
from transfer_queue.wire.messages.groups import IssueTickets as IssueTickets
from transfer_queue.wire.messages.groups import LendGroups as LendGroups
from transfer_queue.wire.messages.groups import LentGroup as LentGroup
from transfer_queue.wire.messages.groups import LentMember as LentMember
from transfer_queue.wire.messages.groups import MarkPool as MarkPool
from transfer_queue.wire.messages.groups import NumberedTicket as NumberedTicket
from transfer_queue.wire.messages.groups import OpenGroup as OpenGroup
from transfer_queue.wire.messages.groups import OpenPool as OpenPool
from transfer_queue.wire.messages.groups import PoolResumed as PoolResumed
from transfer_queue.wire.messages.groups import PrioritizeGroups as PrioritizeGroups
from transfer_queue.wire.messages.groups import ReleaseGroups as ReleaseGroups
from transfer_queue.wire.messages.groups import RemovePool as RemovePool
from transfer_queue.wire.messages.groups import RenewGroups as RenewGroups
from transfer_queue.wire.messages.groups import ResumePool as ResumePool
from transfer_queue.wire.messages.groups import RetargetGroup as RetargetGroup
from transfer_queue.wire.messages.groups import ReturnTickets as ReturnTickets
from transfer_queue.wire.messages.groups import SelectGroups as SelectGroups
from transfer_queue.wire.messages.groups import SlotsClaimed as SlotsClaimed
from transfer_queue.wire.messages.groups import SlotsFinished as SlotsFinished
from transfer_queue.wire.messages.groups import StartSlots as StartSlots
from transfer_queue.wire.messages.groups import TakeRefills as TakeRefills
from transfer_queue.wire.messages.groups import TakeTickets as TakeTickets
from transfer_queue.wire.messages.groups import Tickets as Tickets
from transfer_queue.wire.messages.groups import UnlendGroups as UnlendGroups
from transfer_queue.wire.messages.groups import UnstartSlots as UnstartSlots
from transfer_queue.wire.messages.leases import Ack as Ack
from transfer_queue.wire.messages.leases import Lent as Lent
from transfer_queue.wire.messages.leases import ListDeadLetters as ListDeadLetters
from transfer_queue.wire.messages.leases import Nack as Nack
from transfer_queue.wire.messages.leases import Release as Release
from transfer_queue.wire.messages.leases import Renew as Renew
from transfer_queue.wire.messages.leases import Requeue as Requeue
from transfer_queue.wire.messages.leases import Requeued as Requeued
from transfer_queue.wire.messages.listings import Changes as Changes
from transfer_queue.wire.messages.listings import KeyVersions as KeyVersions
from transfer_queue.wire.messages.listings import Listing as Listing
from transfer_queue.wire.messages.listings import ListKeys as ListKeys
from transfer_queue.wire.messages.listings import WatchKeys as WatchKeys
from transfer_queue.wire.messages.locks import KeepLock as KeepLock
from transfer_queue.wire.messages.locks import ListLocks as ListLocks
from transfer_queue.wire.messages.locks import Lock as Lock
from transfer_queue.wire.messages.locks import Locked as Locked
from transfer_queue.wire.messages.locks import Unlock as Unlock
from transfer_queue.wire.messages.overview import CellMap as CellMap
from transfer_queue.wire.messages.overview import DepartureOverview as DepartureOverview
from transfer_queue.wire.messages.overview import DescribeService as DescribeService
from transfer_queue.wire.messages.overview import EventsSeen as EventsSeen
from transfer_queue.wire.messages.overview import FleetOverview as FleetOverview
from transfer_queue.wire.messages.overview import FollowEvents as FollowEvents
from transfer_queue.wire.messages.overview import GivenBack as GivenBack
from transfer_queue.wire.messages.overview import InspectRow as InspectRow
from transfer_queue.wire.messages.overview import LeaseOverview as LeaseOverview
from transfer_queue.wire.messages.overview import MapCells as MapCells
from transfer_queue.wire.messages.overview import PartitionOverview as PartitionOverview
from transfer_queue.wire.messages.overview import ReplicaStatus as ReplicaStatus
from transfer_queue.wire.messages.overview import ReportReplicas as ReportReplicas
from transfer_queue.wire.messages.overview import RowEvent as RowEvent
from transfer_queue.wire.messages.overview import RowInspected as RowInspected
from transfer_queue.wire.messages.overview import RowOfTask as RowOfTask
from transfer_queue.wire.messages.overview import RowsEvent as RowsEvent
from transfer_queue.wire.messages.overview import ServiceOverview as ServiceOverview
from transfer_queue.wire.messages.overview import SessionOverview as SessionOverview
from transfer_queue.wire.messages.overview import TaskOverview as TaskOverview
from transfer_queue.wire.messages.overview import ViewOverview as ViewOverview
from transfer_queue.wire.messages.overview import WaitOverview as WaitOverview
from transfer_queue.wire.messages.partitions import DescribePartition as DescribePartition
from transfer_queue.wire.messages.partitions import GetPartition as GetPartition
from transfer_queue.wire.messages.partitions import ListPartitions as ListPartitions
from transfer_queue.wire.messages.partitions import PartitionDescription as PartitionDescription
from transfer_queue.wire.messages.partitions import PartitionInfo as PartitionInfo
from transfer_queue.wire.messages.partitions import SetPartition as SetPartition
from transfer_queue.wire.messages.reads import Get as Get
from transfer_queue.wire.messages.reads import Located as Located
from transfer_queue.wire.messages.reads import Part as Part
from transfer_queue.wire.messages.rows import DONE as DONE
from transfer_queue.wire.messages.rows import PASSED as PASSED
from transfer_queue.wire.messages.rows import Clear as Clear
from transfer_queue.wire.messages.rows import Commit as Commit
from transfer_queue.wire.messages.rows import Committed as Committed
from transfer_queue.wire.messages.rows import Find as Find
from transfer_queue.wire.messages.rows import FinishedSlot as FinishedSlot
from transfer_queue.wire.messages.rows import Insert as Insert
from transfer_queue.wire.messages.rows import NameRows as NameRows
from transfer_queue.wire.messages.rows import Names as Names
from transfer_queue.wire.messages.rows import RefusedSlot as RefusedSlot
from transfer_queue.wire.messages.rows import RowSet as RowSet
from transfer_queue.wire.messages.rows import SetTags as SetTags
from transfer_queue.wire.messages.rows import SharedCells as SharedCells
from transfer_queue.wire.messages.series import DescribeSeries as DescribeSeries
from transfer_queue.wire.messages.series import EnterSeries as EnterSeries
from transfer_queue.wire.messages.series import FinishPartition as FinishPartition
from transfer_queue.wire.messages.series import OpenPartition as OpenPartition
from transfer_queue.wire.messages.services import Report as Report
from transfer_queue.wire.messages.services import Stats as Stats
from transfer_queue.wire.messages.services import Stop as Stop
from transfer_queue.wire.messages.sessions import Adopt as Adopt
from transfer_queue.wire.messages.sessions import Cancel as Cancel
from transfer_queue.wire.messages.sessions import Challenge as Challenge
from transfer_queue.wire.messages.sessions import Goodbye as Goodbye
from transfer_queue.wire.messages.sessions import Hello as Hello
from transfer_queue.wire.messages.sessions import Proof as Proof
from transfer_queue.wire.messages.sessions import Received as Received
from transfer_queue.wire.messages.sessions import Welcome as Welcome
from transfer_queue.wire.messages.staleness import Admit as Admit
from transfer_queue.wire.messages.staleness import Admitted as Admitted
from transfer_queue.wire.messages.staleness import Announce as Announce
from transfer_queue.wire.messages.staleness import Counted as Counted
from transfer_queue.wire.messages.staleness import GiveBack as GiveBack
from transfer_queue.wire.messages.steps import GetStep as GetStep
from transfer_queue.wire.messages.steps import MarkStep as MarkStep
from transfer_queue.wire.messages.steps import ResumeStep as ResumeStep
from transfer_queue.wire.messages.steps import StepResumed as StepResumed
from transfer_queue.wire.messages.steps import StepTaken as StepTaken
from transfer_queue.wire.messages.steps import TakenBatch as TakenBatch
from transfer_queue.wire.messages.tasks import ALL as ALL
from transfer_queue.wire.messages.tasks import Consumption as Consumption
from transfer_queue.wire.messages.tasks import Fetch as Fetch
from transfer_queue.wire.messages.tasks import Handed as Handed
from transfer_queue.wire.messages.tasks import ListTags as ListTags
from transfer_queue.wire.messages.tasks import Production as Production
from transfer_queue.wire.messages.tasks import ResetConsumption as ResetConsumption
from transfer_queue.wire.messages.tasks import RowStatus as RowStatus
from transfer_queue.wire.messages.tasks import Scan as Scan
from transfer_queue.wire.messages.tasks import TagColumns as TagColumns
from transfer_queue.wire.messages.units import Blocks as Blocks
from transfer_queue.wire.messages.units import CellDigests as CellDigests
from transfer_queue.wire.messages.units import Cut as Cut
from transfer_queue.wire.messages.units import DigestCells as DigestCells
from transfer_queue.wire.messages.units import Drop as Drop
from transfer_queue.wire.messages.units import Gathered as Gathered
from transfer_queue.wire.messages.units import GatherRows as GatherRows
from transfer_queue.wire.messages.units import Join as Join
from transfer_queue.wire.messages.units import Joined as Joined
from transfer_queue.wire.messages.units import Moved as Moved
from transfer_queue.wire.messages.units import ReportUnit as ReportUnit
from transfer_queue.wire.messages.units import ResolveCommits as ResolveCommits
from transfer_queue.wire.messages.units import SparseBlock as SparseBlock
from transfer_queue.wire.messages.units import Take as Take
from transfer_queue.wire.messages.units import Taken as Taken

PROTOCOL_VERSION = 24


ClientMessage: TypeAlias = (
    Hello | Proof | Allocate | Write | Read | Commit | Insert | Fetch | Scan | Find | NameRows | Get | Unpin | Discard
    | Cancel | Received | Goodbye | Take | Join | Moved | Gathered | ResolveCommits
    | Clear | SetTags | ListKeys | Consumption | Production | ResetConsumption | ListPartitions | SetPartition
    | GetPartition | DescribePartition | Adopt | Stats | Stop | Snapshot | Pin | Recycle | Restore
    | Ack | Renew | Release | Nack | ListDeadLetters | Requeue | Announce | Admit | GiveBack
    | Lock | KeepLock | Unlock | ListLocks | MarkStep | ResumeStep | GetStep | ReportMissing | Pull
    | OpenPool | TakeTickets | ReturnTickets | OpenGroup | ClaimSlots | StartSlots | FinishSlots | FailSlots
    | FilterGroups | RetargetGroup | AdvancePool | EndPool | SelectGroups | RenewGroups | AckGroups | ReleaseGroups
    | ConsumeGroups | AwaitGroups | TakeRefills | DescribePool | IssueTickets | LendGroups | UnlendGroups
    | OpenPartition | EnterSeries | FinishPartition | DescribeSeries | DigestCells | WatchKeys | PrioritizeGroups
    | DescribeService | MapCells | InspectRow | ReportReplicas | RemovePool | UnstartSlots
    | ListTags | MarkPool | ResumePool | FollowEvents | ReportUnit
)  # fmt: skip
ServerMessage: TypeAlias = (
    Challenge | Welcome | Done | Failed | Allocated | Data | Committed | RowSet | Located | Taken | Names | Listing
    | RowStatus | PartitionInfo | Report | Joined | Blocks | Drop | SparseBlock | GatherRows | Captured | Lent
    | Handed | Counted | Admitted | Waiting | Locked | PartitionDescription | Requeued
    | StepResumed | StepTaken | Tickets | SlotsClaimed | SlotsFinished | GroupsLent | CellDigests | KeyVersions
    | ServiceOverview | CellMap | RowInspected | TagColumns | PoolResumed | EventsSeen
)  # fmt: skip


def _plain_number(value: object) -> int | float:
    """Numbers of other libraries, such as NumPy's, travel as Python's."""
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        return float(value)
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidInput(f"an argument of type {type(value).__qualname__}: {value!r:.200}") from None


encode = msgspec.msgpack.Encoder(enc_hook=_plain_number).encode
decode_client = msgspec.msgpack.Decoder(ClientMessage).decode


def check_request(request: Request) -> None:
    """`InvalidInput` when the server would close the connection over `request`: an argument has the wrong type."""
    try:
        decode_client(encode(request))
    except UNREADABLE as error:
        raise unsendable(request, error) from None


decode_server = msgspec.msgpack.Decoder(ServerMessage).decode

SMALL_HEADER_NBYTES, LARGE_HEADER_NBYTES = 1 << 20, 256 << 20
LARGE = frozenset(
    one.__name__.encode()
    for one in (Commit, Find, NameRows, Get, Unpin, Clear, SetTags, ListKeys, Take, Join, Moved, Gathered,
                ResolveCommits, Pin, Restore, Ack, Release, Nack, Requeue, MarkStep, ReportMissing, FinishSlots,
                FailSlots, FilterGroups, AckGroups, ReleaseGroups, ReturnTickets, OpenGroup,
                PrioritizeGroups, Lock, WatchKeys)
)  # fmt: skip


def check_length(message: Message, header: bytes) -> None:
    """`InvalidInput` for a header of `SMALL_HEADER_NBYTES` and more that is longer than a server reads: it would close
    the connection."""
    name, limit = type(message).__name__, header_limit(memoryview(header))
    if len(header) > limit:
        remedy = "name less in one call, and put what is long into fields of rows"
        raise InvalidInput(f"{name}: {len(header)} bytes of arguments, at most {limit}: {remedy}")


def header_limit(head: memoryview) -> int:
    """How long the header may be that begins like this: only what names rows, keys or blocks can need more than names
    of fields and a sampling_config. A header is an array whose first item is its kind (msgspec's tagged structs)."""
    start = 3 if head[0] == 0xDC else 1  # array 16, fixarray (the msgpack specification)
    size = head[start] & 0x1F  # fixstr
    return LARGE_HEADER_NBYTES if bytes(head[start + 1 : start + 1 + size]) in LARGE else SMALL_HEADER_NBYTES


# Replies of these are remembered, so that a retried request has its first outcome.
MUTATING = frozenset((
    Allocate, Commit, Insert, Fetch, Find, Clear, SetTags, ResetConsumption, SetPartition, Moved, Gathered, Restore,
    Ack, Release, Nack, Requeue, Announce, Admit, GiveBack, Lock, Unlock, MarkStep, ResumeStep,
    OpenPool, TakeTickets, ReturnTickets, OpenGroup, ClaimSlots, FinishSlots, FailSlots, FilterGroups,
    RetargetGroup, AdvancePool, EndPool, SelectGroups, AckGroups, ReleaseGroups, TakeRefills,
    OpenPartition, FinishPartition, PrioritizeGroups, RemovePool, MarkPool, ResumePool,
))  # fmt: skip

# What they end has a number that nothing else gets, and who called one off does not go on with it: they are carried out
# all the same. Else a lock, or rows of a lease that somebody renews, would stay taken.
ENDING = frozenset((Ack, Release, Nack, Unlock, AckGroups, ReleaseGroups))

# They change nothing, so no standby hears of them, and what they are asked at is no time of an event.
READS = frozenset((
    Get, Scan, ListTags, NameRows, ListKeys, Consumption, Production, ListPartitions, GetPartition, DescribePartition,
    ListDeadLetters, GetStep, DescribePool, DescribeSeries, WatchKeys, DescribeService, MapCells, InspectRow,
    FollowEvents,
))  # fmt: skip

# They add to what is kept; `Find` does where it is to `create`, and else changes nothing that lasts.
GROWING = frozenset((Commit, Insert, Find, SetTags, SetPartition, Restore, OpenGroup))

# The fields that hold plain values, which are anybody's: dicts, or results that have one.
PLAIN: dict[type, tuple[str, ...]] = {
    Commit: ("tags", "finishes"),
    SetTags: ("tags",),
    SetPartition: ("metadata",),
    Fetch: ("sampling",),
    Lock: ("holder",),
    OpenGroup: ("prompt",),
    FinishSlots: ("finished",),
}


def nests_too_deep(plain: Tags | Sequence[Tags] | Sequence[FinishedSlot]) -> bool:
    """Whether lists and dicts are nested more than `MAX_NESTING` deep somewhere in what such a field has.

    Most dicts have atoms alone. The collector tracks none of those, and to ask it takes a tenth of the time that a look
    at the values does (it tracks them all later than Python 3.13).
    """
    dicts: Iterable[Tags | FinishedSlot] = (plain,) if isinstance(plain, dict) else plain
    tracked = [one for one in dicts if gc.is_tracked(one)]
    return bool(tracked) and is_too_deep(chain.from_iterable(map(_values, tracked)))


def _values(one: Tags | FinishedSlot) -> Iterable[Any]:
    return (one.info if isinstance(one, FinishedSlot) else one).values()
