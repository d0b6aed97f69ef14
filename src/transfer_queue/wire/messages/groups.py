"""Messages about groups of siblings (`transfer_queue.groups`). Part of the unions in `messages`.

`partition` names the pool, `group` one of its groups, and `slot` one of that group's siblings. `attempt` is the number
of one try at a slot.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from transfer_queue.groups.policy import GroupPolicy
from transfer_queue.wire.messages.base import Reply, Request, Seconds, Tags
from transfer_queue.wire.messages.rows import FinishedSlot, RefusedSlot, RowSet


class Attempt(msgspec.Struct, array_like=True):
    group: str
    slot: int
    attempt: int


class OpenPool(Request):
    """There is a pool for `partition` from now on; repeating it changes nothing. `version`: the trainer's (None: the
    one announced last, else 0). `first_number`: of its tickets and attempts; the service says it."""

    partition: str
    policy: GroupPolicy
    version: int | None
    first_number: int = 0


class TakeTickets(Request):
    """`count` tickets (`Tickets`); parks until the gate lets all of them through."""

    partition: str
    count: int
    timeout_s: Seconds


class IssueTickets(Request):
    """These are handed out: what a `TakeTickets` came to."""

    partition: str
    tickets: list[int]


class ReturnTickets(Request):
    """No group will be opened with these."""

    partition: str
    tickets: list[int]


class OpenGroup(Request):
    """See `PoolCore.open`. `start` None: the pool's version."""

    partition: str
    group: str
    size: int
    min_size: int
    source: str
    prompt: Tags
    start: int | None
    ticket: int | None
    refills: bool
    priority: float = 1.0


class ClaimSlots(Request):
    """Up to `count` idle slots, of one group or of all, whose attempts begin now (`SlotsClaimed`); parks until there is
    one. They fail with the session, and after `attempt_s` (0: however long they take)."""

    partition: str
    count: int
    group: str | None
    timeout_s: Seconds
    attempt_s: Seconds = 0.0


class StartSlots(Request):
    """Attempts at these slots begin: what a `ClaimSlots` came to (`SlotsClaimed`)."""

    partition: str
    slots: list[tuple[str, int]]


class UnstartSlots(Request):
    """Nobody makes these attempts: what a `ClaimSlots` came to whose answer reached nobody."""

    partition: str
    attempts: list[Attempt]


class FinishSlots(Request):
    """Attempts have their results (`SlotsFinished`): `rows` are in the partition, or those with these `keys`. A result
    is refused, and its rows are cleared, where another attempt took its place or the group has ended; it is refused,
    too, where a row of it is not there. The others are in."""

    partition: str
    finished: list[FinishedSlot]
    rows: bytes
    service: bytes = b""
    keys: list[str] | None = None


class FailSlots(Request):
    """These attempts have failed. `kind`: is it the infrastructure, or what was asked?"""

    partition: str
    attempts: list[Attempt]
    kind: Literal["infra", "data"]


class FilterGroups(Request):
    """The user does not want these groups."""

    partition: str
    groups: list[str]


class PrioritizeGroups(Request):
    """These groups have the priorities beside them from now on."""

    partition: str
    groups: list[str]
    priorities: list[float]


class RetargetGroup(Request):
    """See `groups.shortfall.retarget`."""

    partition: str
    group: str
    target: int


class AdvancePool(Request):
    """The trainer has `version`, unless it has a newer one."""

    partition: str
    version: int


class EndPool(Request):
    """No more groups will be opened."""

    partition: str


class RemovePool(Request):
    """There is no pool for `partition` any more; repeating it changes nothing. Refused while it is in use, unless
    `discards`: its groups are given up, and their rows cleared."""

    partition: str
    discards: bool


class MarkPool(Request):
    """What was used up since the last mark is what was used up for `step`. Rows that were to be cleared go."""

    partition: str
    step: int


class ResumePool(Request):
    """What was handed out after `step` is handed out again, in the batches and the order of before (`PoolResumed`)."""

    partition: str
    step: int


class PoolResumed(Reply):
    """So many batches, with so many groups, are handed out again. `lost`: groups of which rows are gone."""

    batches: int
    groups: int
    lost: int


class SelectGroups(Request):
    """`least` to `most` whole groups on a lease (`GroupsLent`), at `version` (None: the pool's; the newer one counts),
    all of whose rows have `fields`; parks until there are `least`, or none will come."""

    partition: str
    least: int
    most: int
    version: int | None
    lease_s: Seconds
    timeout_s: Seconds
    fields: list[str] = []  # noqa: RUF012  never changed


class RenewGroups(Request):
    """The lease lasts `lease_s` from now on."""

    lease: int
    lease_s: Seconds


class AckGroups(Request):
    """These groups of a lease (None: all that are left) were used. `clears`: their rows too."""

    lease: int
    groups: list[str] | None
    clears: bool


class ReleaseGroups(Request):
    """These groups of a lease (None: all that are left) were not used."""

    lease: int
    groups: list[str] | None


class ConsumeGroups(Request):
    """These groups were used: what an `AckGroups` came to."""

    partition: str
    groups: list[str]
    clears: bool


class LendGroups(Request):
    """Somebody has these groups: what a `SelectGroups` came to."""

    partition: str
    groups: list[str]


class UnlendGroups(Request):
    """Whoever had these groups did not use them: what a `ReleaseGroups`, or the end of a lease, came to."""

    partition: str
    groups: list[str]


class AwaitGroups(Request):
    """`Counted` once `count` groups are eligible, which nobody gets by it; parks until then."""

    partition: str
    count: int
    timeout_s: Seconds


class TakeRefills(Request):
    """The right to open groups in place of evicted ones, `most` at most (`Counted`); parks until there is one. It
    returns with the session's end, where no group was opened by it."""

    partition: str
    most: int
    timeout_s: Seconds


class DescribePool(Request):
    """(`Report`)."""

    partition: str


class NumberedTicket(msgspec.Struct, array_like=True):
    """`target`: the version that its group is for."""

    number: int
    target: int | None


class Tickets(Reply):
    tickets: list[NumberedTicket]


class ClaimedSlot(msgspec.Struct, array_like=True):
    group: str
    slot: int
    attempt: int
    source: str
    start: int
    target: int | None
    prompt: Tags


class SlotsClaimed(Reply):
    """`ended`: there is none, and none will come."""

    slots: list[ClaimedSlot]
    ended: bool


class SlotsFinished(Reply):
    refused: list[RefusedSlot]


class LentMember(msgspec.Struct, array_like=True):
    """One sibling with a result. `count`: how many rows of the answer are its own, in order; 0 where they are
    `withheld`."""

    slot: int
    attempt: int
    count: int
    reward: float | None
    oldest: int
    newest: int
    tokens: int
    info: dict[str, Any]
    withheld: bool


class LentGroup(msgspec.Struct, array_like=True):
    """`times_sampled`: this time included. `probability`: of its draw, 1 where nothing is drawn."""

    group: str
    source: str
    start: int
    target: int | None
    age: int
    prompt: Tags
    members: list[LentMember]
    priority: float
    times_sampled: int
    probability: float


class GroupsLent(Reply):
    """`rows` are those of all members, in order. `ended`: these are the last ones. `num_sealed`: how many there were to
    choose from."""

    lease: int
    version: int
    groups: list[LentGroup]
    rows: RowSet
    ended: bool
    num_sealed: int
