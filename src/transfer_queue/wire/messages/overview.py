"""Messages that show a service to people: what it holds, who waits for what, what became of a row.

They change nothing. Times are seconds before now, or from now on; a `session` is 16 bytes that name one client. Part of
the unions in `messages`.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from transfer_queue.schema import FieldSchema
from transfer_queue.wire.messages.base import Reply, Request, Tags


class ViewOverview(msgspec.Struct, array_like=True):
    """Rows that a task may take now: neither consumed nor lent, with all `fields` written. `oldest_s`: since the first
    of them exists, to within a tenth of a second; None where there is none, or it is not known."""

    fields: list[str]
    ready: int
    oldest_s: float | None


class TaskOverview(msgspec.Struct, array_like=True):
    """Rows of one consumer group. `kept`: for one of its ranks, for a loop that went back to an earlier step, or
    until the delay of a `nack` is over; `returned`: came back from a lease without an acknowledgement and are neither
    used nor dead yet; `dead`: dead letters. `max_age`: in versions, None: any. `stale`: rows of this partition that
    became too old for it, each once, cleared ones too. `cleared_consumed`: how many more were consumed and are cleared;
    it begins anew with the service and the partition."""

    name: str
    leased: int
    kept: int
    consumed: int
    returned: int
    dead: int
    max_age: int | None
    stale: int
    views: list[ViewOverview]
    cleared_consumed: int = 0

    @property
    def consumed_in_all(self) -> int:
        """Rows that are cleared included."""
        return self.consumed + self.cleared_consumed


class PartitionOverview(msgspec.Struct, array_like=True):
    """`rows` that somebody claimed; `declared`: how many there will be, where that was said. `written` has the number
    of rows with each of the `fields`. `lost`: rows that lost cells with their storage unit. `cleared`: how many more of
    the declared rows were there. `cleared_cells`: how many of each of the `fields` cleared rows had; begins anew
    with the service and the partition. `life` names the latter: another one of that name has another number."""

    name: str
    rows: int
    declared: int | None
    metadata: Tags
    fields: list[FieldSchema]
    written: list[int]
    tasks: list[TaskOverview]
    lost: int
    cleared: int = 0
    cleared_cells: list[int] = []
    life: int = -1

    @property
    def written_in_all(self) -> list[int]:
        """Of each field, rows that are cleared included."""
        return [there + gone for there, gone in itertools.zip_longest(self.written, self.cleared_cells, fillvalue=0)]


class WaitOverview(msgspec.Struct, array_like=True):
    """A request that waits: what was called, for which partition and task ("" where it is for none), how long it has
    waited, how long it will yet, and what it lacks, in words. `fields`: that a fetch asks for, and `wanted`
    how many rows of (0: all that were declared)."""

    call: str
    partition: str
    task: str
    session: bytes
    waited_s: float | None
    left_s: float
    lacks: str
    fields: list[str] = []
    wanted: int = 0


class LeaseOverview(msgspec.Struct, array_like=True):
    """`rows`: how many are left of it; `groups`: where it is one of groups. `left_s` until it ends by itself."""

    number: int
    partition: str
    task: str
    rows: int
    groups: list[str]
    holders: list[bytes]
    left_s: float


class SessionOverview(msgspec.Struct, array_like=True):
    """One client of the controller's server, over all its connections. `pid`: of its process where that is on this
    host and known, else 0. `pinned_nbytes`: memory that its views hold. `host`: the address that it comes from over a
    network, of its own host or of that host's unit; "" where it is on this host."""

    session: bytes
    pid: int
    local: bool
    connections: int
    pinned_nbytes: int
    host: str = ""


class GivenBack(msgspec.Struct, array_like=True):
    """What was left of `leases` of a task, so many; where they are leases of groups, also of how many `groups`."""

    partition: str
    task: str
    leases: int
    rows: int
    groups: int


class DepartureOverview(msgspec.Struct, array_like=True):
    """A client that ended `ago_s` ago, and what went back then of the leases that it alone held. `pid` as in
    `SessionOverview`."""

    session: bytes
    pid: int
    ago_s: float
    given_back: list[GivenBack]


class ReplicaStatus(msgspec.Struct, frozen=True):
    """An inference server, as the fleet of a trainer knows it: whether it serves the newest version; which one it
    serves (None: not known, or none that was sent) and what its users call that. `reason`: why it is fenced, "" while
    it is ready. Seconds: since it is so, and since it was last heard of (None: never)."""

    name: str
    ready: bool
    version: int | None
    label: str
    reason: str
    since_s: float
    heard_s: float | None


class FleetOverview(msgspec.Struct, array_like=True):
    """What the client `session` said `said_s` ago of the replicas that its weights go to."""

    session: bytes
    said_s: float
    replicas: list[ReplicaStatus]


class ReportReplicas(Request):
    """What the asker's weights go to, in place of what it said before (`Done`). It is forgotten with its session."""

    replicas: list[ReplicaStatus]


class DescribeService(Request):
    """All of it at one instant (`ServiceOverview`); of waiting requests and of leases at most `most` each."""

    most: int = 256


class ServiceOverview(Reply):
    """`num_waits` and `num_leases` are all of them. `groups`: pools by partition, as `GroupPool.status` has them;
    `series` as `series_status`. `weight_version`: announced last; `num_announcements`: so far. `server`: counts and
    sizes of the controller's server, as `stats()`. `fleets`: who serves which weights, as trainers report it.
    `departures`: who ended lately with something on lease, the latest last; the server forgets them when it ends."""

    partitions: list[PartitionOverview]
    waits: list[WaitOverview]
    num_waits: int
    leases: list[LeaseOverview]
    num_leases: int
    groups: dict[str, dict[str, Any]]
    series: dict[str, dict[str, Any]]
    weight_version: int | None
    num_announcements: int
    run_id: str
    fleets: list[FleetOverview]
    server: dict[str, Any] = {}  # noqa: RUF012  never changed
    sessions: list[SessionOverview] = []  # noqa: RUF012
    departures: list[DepartureOverview] = []  # noqa: RUF012


class MapCells(Request):
    """Which cells of a partition are there, `rows_each` rows as one, from the row at position `start` (a multiple of
    `rows_each`) on (`CellMap`). A slice of the partition: the answer says where the next one begins."""

    partition: str
    start: int
    rows_each: int


class CellMap(Reply):
    """Shares of 0 to 255, a byte for each run of `rows_each` live rows: of each field those that are written, of each
    task those that are consumed and those that are on lease. `next`: 0 at the end. `first_rows`: the global index of
    the first row of each run, int64. `known` false: there is no such partition."""

    known: bool
    size: int
    next: int
    fields: list[str]
    written: list[bytes]
    tasks: list[str]
    consumed: list[bytes]
    leased: list[bytes]
    first_rows: bytes


class InspectRow(Request):
    """One row, by key or by global index (`RowInspected`). Refused with `UnknownRows` where it is not there."""

    partition: str
    key: str | None
    row: int | None


class RowOfTask(msgspec.Struct, array_like=True):
    """What a row is to a task: "waiting" (a field is missing), "ready", "leased", "kept", "delayed", "dead",
    "consumed", or "too old", which counts as consumed and was not used. `attempts`: how often it came back, the last
    time for this `reason`. `steps`: (step, batch) that used it, step -1 for one that is not marked yet."""

    task: str
    state: str
    lease: int
    attempts: int
    reason: str
    steps: list[tuple[int, int]]


class RowEvent(msgspec.Struct, array_like=True):
    """Something that happened to the row, `ago_s` ago: "written" (`detail`: fields), "taken" (task), "acknowledged",
    "returned" (task and reason); of a row of a group "finished" (slot and attempt), and with the group as `detail`
    "selected", "withheld" (the group was selected without it), "acknowledged", "returned". `session`: whose request it
    was, b"" for the service's own."""

    ago_s: float
    what: str
    session: bytes
    task: str
    detail: str


class RowInspected(Reply):
    """`written`: fields that the row has. `age`: versions of the weights announced since the oldest one that made it,
    None where its tags do not say. `group`: the group of siblings that it belongs to. `events`: the latest that the
    service remembers, oldest first; none of them outlives its server."""

    row: int
    key: str | None
    tags: Tags
    written: list[FieldSchema]
    missing: list[str]
    age: int | None
    group: str | None
    tasks: list[RowOfTask]
    events: list[RowEvent]


class FollowEvents(Request):
    """What happened to rows of a partition since event number `since` of the memory `memory` (`EventsSeen`), the oldest
    `most` of that. 0 for `memory`: nothing yet, only where to begin. The partition need not exist."""

    partition: str
    since: int
    memory: int
    most: int = 1024


class RowsEvent(RowEvent, array_like=True):
    """The same of `rows` rows at once; `first` and `last`: the smallest and the largest global index of them."""

    rows: int
    first: int
    last: int


class EventsSeen(Reply):
    """`since` and `memory` for the next request. A memory is that of one server process: another one begins anew, and
    then there are no events here. `missed`: how many events of all partitions were forgotten before they were asked
    for."""

    since: int
    memory: int
    missed: int
    events: list[RowsEvent]
