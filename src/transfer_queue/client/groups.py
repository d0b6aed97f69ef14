"""Groups of siblings as producers and consumers use them. `transfer_queue.groups` says what a pool is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tensordict import TensorDict

from transfer_queue.arguments import instance, instances, mapping, number, text, texts
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.describing import batch_meta, committed_meta
from transfer_queue.client.drivers import awaitable, blocking
from transfer_queue.client.effects import Call, HoldSession, Operation, seconds
from transfer_queue.client.operations import rows as ops
from transfer_queue.client.operations.steps import ResumedGroups, step_number
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.share import store_shared
from transfer_queue.client.transfer.write import TargetRows, checked_values, is_on, store
from transfer_queue.codec.filling import BlockPlan
from transfer_queue.errors import InvalidInput, TransferQueueError, error_from_code
from transfer_queue.groups import GroupPolicy
from transfer_queue.metadata import BatchMeta, KVBatchMeta
from transfer_queue.wire import messages as m

LEASE_S = 300.0
KINDS = ("infra", "data")


class GroupTicket(NamedTuple):
    """The permission to open one group; `target` is the version of the weights that it is for, None: any."""

    number: int
    target: int | None


class SlotAttempt(NamedTuple):
    """One try at one sibling. `prompt` and `source` are what the group was opened with, `start_version` the trainer's
    version then, `target` the version that it is for."""

    group_id: str
    slot: int
    attempt: int
    source: str
    start_version: int
    target: int | None
    prompt: dict[str, Any]

    def result(
        self,
        *,
        reward: float | None = None,
        oldest_version: int | None = None,
        newest_version: int | None = None,
        tokens: int = 0,
        info: Mapping[str, Any] | None = None,
        num_rows: int = 1,
    ) -> SlotResult:
        """What came of it, for `finish_batch`; each as `finish` takes it."""
        found = None if reward is None else number(reward, "a reward")
        told = dict(mapping({} if info is None else info, "info"))
        return SlotResult(self, found, oldest_version, newest_version, tokens, told, num_rows)


class SlotResult(NamedTuple):
    """What came of an attempt. `num_rows`: how many of the rows beside it are its own."""

    attempt: SlotAttempt
    reward: float | None
    oldest_version: int | None
    newest_version: int | None
    tokens: int
    info: dict[str, Any]
    num_rows: int


class RefusedResult(NamedTuple):
    """A result that nobody wants any more, and why: `StaleAttempt`, `GroupEnded` or, where rows were named that are
    not there, `RowCleared`."""

    attempt: SlotAttempt
    error: TransferQueueError


@dataclass(frozen=True)
class FinishedBatch:
    """`metadata`: the rows of the results that are in, in order."""

    metadata: BatchMeta | KVBatchMeta
    refused: list[RefusedResult]


class GroupMember(NamedTuple):
    """One sibling of a group that was selected. `rows`: where its rows are in the batch; none where they are
    `withheld`. The versions are those that made its tokens."""

    slot: int
    attempt: int
    rows: range
    reward: float | None
    oldest_version: int
    newest_version: int
    tokens: int
    info: dict[str, Any]
    withheld: bool


@dataclass(frozen=True)
class SelectedGroup:
    """One whole group. `age`: how many versions the trainer has made since the one that it is judged by.
    `times_sampled`: how often it was selected, this time included. `probability`: with which one draw picks it of all
    that there were; 1 where the policy draws nothing."""

    group_id: str
    source: str
    start_version: int
    target: int | None
    age: int
    prompt: dict[str, Any]
    members: list[GroupMember]
    priority: float
    times_sampled: int
    probability: float

    @property
    def rewards(self) -> list[float | None]:
        """Of all members, also of those whose rows are withheld."""
        return [member.reward for member in self.members]


@dataclass(frozen=True)
class GroupBatch:
    """Groups on a lease. `metadata` has the rows of all their members, in order; `version` is what they were selected
    at. `ended`: no more will come after these. `num_sealed`: how many there were to choose from; a draw with the
    probability p is to count 1 / (num_sealed * p) for what the trainer learns to be that of even draws."""

    groups: list[SelectedGroup]
    metadata: BatchMeta
    version: int
    lease: int = field(repr=False)
    ended: bool = False
    num_sealed: int = 0

    def __len__(self) -> int:
        return len(self.groups)


class GroupOperations:
    """The operations as generators; `GroupPool` below runs them."""

    session: Session
    partition_id: str

    # producing

    def tickets(self, count: int, timeout_s: float | None = None) -> Operation[list[GroupTicket]]:
        """Permissions to open `count` groups.

        Waits until the policy's gate, or its rate, lets all of them through, in order of arrival, at most `timeout_s`
        (default: the configured one). An announced version and a group that was given up let others in; with a rate, a
        group that is selected does. A ticket that no group was
        opened with returns when this process ends. Raises `DeadlineExceeded`, and `InvalidInput` for more than the gate
        ever lets through, or where `end` was said.
        """
        wait_s = yield from _taking(self, timeout_s)
        reply = (yield _call(self, m.TakeTickets, count, wait_s, wait_s=wait_s))[0]
        return [GroupTicket(one.number, one.target) for one in reply.tickets]

    def return_tickets(self, tickets: Iterable[GroupTicket]) -> Operation[None]:
        """No groups will be opened with these."""
        yield _call(self, m.ReturnTickets, [one.number for one in instances(tickets, GroupTicket, "tickets")])

    def open(
        self,
        group_id: str,
        size: int,
        *,
        min_size: int | None = None,
        source: str = "",
        prompt: Mapping[str, Any] | None = None,
        start_version: int | None = None,
        ticket: GroupTicket | None = None,
        refills: bool = False,
        priority: float = 1.0,
    ) -> Operation[None]:
        """A group of `size` siblings, of which `min_size` (default: all) have to get a result.

        `source` names the data set for the counters, `prompt` is for whoever works on it (values as in a tag, or where
        to find them). `start_version`: default the trainer's version now. A policy with a gate or a rate wants a
        `ticket`; `refills` says that the group replaces an evicted one (`refills()`). `priority`, from 0 to 1e12, is
        for policies that go by it. Opening a group twice in the same way changes nothing. Raises `InvalidInput`,
        `UnsupportedValue`, and `GroupEnded` for an id that was used before.
        """
        number = None if ticket is None else instance(ticket, GroupTicket, "ticket").number
        told = checked_values({} if prompt is None else prompt, "prompt")
        least = size if min_size is None else min_size
        yield _call(
            self, m.OpenGroup, group_id, size, least, source, told, start_version, number, refills,
            priority,
        )  # fmt: skip

    def claim(
        self,
        max_slots: int = 1,
        group_id: str | None = None,
        timeout_s: float | None = None,
        attempt_s: float | None = None,
    ) -> Operation[list[SlotAttempt]]:
        """Siblings to work on: up to `max_slots` that nobody works on, oldest group first, or of one group.

        Waits until there is one, at most `timeout_s`; an empty list says that none will come (`end`), or that the group
        `group_id` has none left. When this process ends, its attempts have failed and others get the siblings; so they
        do `attempt_s` later (default: never) where there is no result, as of a process that is frozen or stuck. Raises
        `DeadlineExceeded`, `GroupEnded`, `InvalidInput`.
        """
        limit_s = None if attempt_s is None else seconds(attempt_s, "attempt_s")
        if limit_s == 0:  # which would say that it may take for ever
            raise InvalidInput(f"attempt_s={attempt_s}: an attempt takes more than 0 seconds")
        wait_s = yield from _taking(self, timeout_s)
        reply = (yield _call(self, m.ClaimSlots, max_slots, group_id, wait_s, limit_s or 0.0, wait_s=wait_s))[0]
        return [
            SlotAttempt(one.group, one.slot, one.attempt, one.source, one.start, one.target, one.prompt)
            for one in reply.slots
        ]

    def finish(
        self,
        attempt: SlotAttempt,
        data: TensorDict | Mapping[str, Any] | BatchMeta | KVBatchMeta,
        *,
        reward: float | None = None,
        oldest_version: int | None = None,
        newest_version: int | None = None,
        tokens: int = 0,
        info: Mapping[str, Any] | None = None,
        dedupe: bool | None = None,
    ) -> Operation[BatchMeta | KVBatchMeta]:
        """The result of an attempt: new rows of any number, which are put with it in one step, or the metadata of rows
        that are in the partition already, by index or by key.

        The versions are those that made its tokens (default: the group's `start_version`). `dedupe`: of new rows, as in
        `kv_put`; siblings with one image have it once. `info` has values as in a tag. Saying the same result of the
        same rows twice changes nothing; new rows are another result. The result of the last sibling seals the group
        and wakes who waits for it. Returns the rows' metadata. Raises `StaleAttempt` or `GroupEnded` where nobody wants
        the result any more (new rows are not stored, others are cleared), `InvalidInput` for another result than the
        first, `UnsupportedValue`.
        """
        plan = yield from _placed(self, data)
        one = instance(attempt, SlotAttempt, "attempt").result(
            reward=reward, oldest_version=oldest_version, newest_version=newest_version, tokens=tokens, info=info,
            num_rows=plan.rows if isinstance(plan, BlockPlan) else len(plan),
        )  # fmt: skip
        found = yield from _finish(self, [one], plan, dedupe)
        for refused in found.refused:
            raise refused.error
        return found.metadata

    def finish_batch(
        self,
        results: Sequence[SlotResult],
        data: TensorDict | Mapping[str, Any] | BatchMeta | KVBatchMeta,
        *,
        dedupe: bool | None = None,
    ) -> Operation[FinishedBatch]:
        """The results of several attempts (`SlotAttempt.result`), in one step. `data` has the rows of all of them in
        that order, each `num_rows`; it is what `finish` takes, and new rows are one put. `dedupe` as in `finish`.

        What `finish` would refuse with `StaleAttempt`, `GroupEnded` or `RowCleared` is in `refused`, and of it nothing
        is stored; the others are in. Raises `InvalidInput`, with nothing stored, where one of them has another result
        already, or the rows do not fit.
        """
        return (yield from _finish(self, results, (yield from _placed(self, data)), dedupe))

    def fail(self, attempts: SlotAttempt | Sequence[SlotAttempt], kind: str = "infra") -> Operation[None]:
        """Attempts have failed: their siblings are tried again, by anybody, until their attempts are spent.

        `kind`, for the counters: "infra" (a worker, a tool), or "data" (the prompt). An attempt that another one
        followed is ignored.
        """
        if text(kind, "kind") not in KINDS:
            raise InvalidInput(f"kind {kind!r}: expected one of {KINDS}")
        found = [attempts] if isinstance(attempts, SlotAttempt) else instances(attempts, SlotAttempt, "attempts")
        yield _call(self, m.FailSlots, [m.Attempt(one.group_id, one.slot, one.attempt) for one in found], kind)

    def refills(self, max_groups: int, timeout_s: float | None = None) -> Operation[int]:
        """How many groups to open in place of evicted ones, `max_groups` at most. Waits until there is one.

        Each is paid by opening a group with `refills=True`; what was not paid when this process ends is offered to
        others. Raises `DeadlineExceeded`, and `InvalidInput` where `end` was said.
        """
        wait_s = yield from _taking(self, timeout_s)
        return (yield _call(self, m.TakeRefills, max_groups, wait_s, wait_s=wait_s))[0].count

    def end(self) -> Operation[None]:
        """No more groups will be opened: whoever waits for more than can come, or to open more, hears of it. Tickets
        that no group was opened with mean nothing any more."""
        yield _call(self, m.EndPool)

    def remove(self, discard: bool = False) -> Operation[None]:
        """The service forgets the pool: its counters, who waits for it (they get `InvalidInput`), which groups it had.
        Rows of groups that were used stay. Where there is no pool nothing changes.

        Raises `InvalidInput` while it has groups that nobody used up, or tickets that somebody holds: with `discard`
        these groups are given up and their rows cleared; leases on them are over, and results of their attempts are
        refused. Pools that are not removed stay for as long as the service lives.
        """
        yield _call(self, m.RemovePool, discard)

    # judging

    def advance(self, version: int) -> Operation[None]:
        """The trainer has `version` now. `set_weight_version` says so to all pools; an older one changes nothing."""
        yield _call(self, m.AdvancePool, version)

    def filter(self, group_ids: str | Sequence[str]) -> Operation[None]:
        """These groups are not wanted: they are evicted, once they are sealed. Raises `GroupEnded`."""
        yield _call(self, m.FilterGroups, _ids(group_ids))

    def set_priorities(self, priorities: Mapping[str, float]) -> Operation[None]:
        """These groups have other priorities from now on, from 0 to 1e12: all of them, or none where one is refused. A
        group on a lease is offered again with its new one. Those that have ended are left out. Raises `InvalidInput`.
        """
        given = mapping(priorities, "priorities")
        yield _call(self, m.PrioritizeGroups, list(given), [number(one, "a priority") for one in given.values()])

    def retarget(self, group_id: str, target: int) -> Operation[None]:
        """A group of a later version takes the place of one that version `target` lacks; its own place is free again.

        Raises `InvalidInput` where that version lacks none, or the policy has no targets.
        """
        yield _call(self, m.RetargetGroup, group_id, target)

    # consuming

    def select(
        self,
        min_groups: int,
        max_groups: int | None = None,
        *,
        version: int | None = None,
        fields: Sequence[str] = (),
        lease_s: float = LEASE_S,
        timeout_s: float | None = None,
    ) -> Operation[GroupBatch]:
        """`min_groups` to `max_groups` (default: as many) whole groups that the policy serves now, on a lease.

        Waits until there are `min_groups`, at most `timeout_s`; fewer come where no more can (`ended`), or where the
        policy lets a version shrink. With `fields` a group comes once all its rows have them: what others compute for
        each row, such as advantages, is waited for. `version` is the trainer's (default: the one announced last), which
        judges first. Groups that are not acknowledged within `lease_s` seconds, or when this process ends, are judged
        again and offered to others. Raises `DeadlineExceeded`, `GroupsShort`, `InvalidInput`.
        """
        names = ops.field_list(fields)
        wait_s = yield from _taking(self, timeout_s)
        most = min_groups if max_groups is None else max_groups
        reply = (yield _call(self, m.SelectGroups, min_groups, most, version, lease_s, wait_s, names, wait_s=wait_s))[0]
        metadata = batch_meta(self.session.service_id, reply.rows, self.partition_id)
        first = itertools.count()
        return GroupBatch(
            [_selected(one, first) for one in reply.groups], metadata, reply.version, reply.lease, reply.ended,
            reply.num_sealed,
        )  # fmt: skip

    def renew(self, batch: GroupBatch, lease_s: float = LEASE_S) -> Operation[None]:
        """The lease lasts at least `lease_s` from now on. Raises `LeaseExpired`."""
        if _checked(batch).groups:
            yield Call(m.RenewGroups(self.session.next_rid(), batch.lease, lease_s))

    def ack(
        self, batch: GroupBatch, group_ids: str | Sequence[str] | None = None, clear: bool = False
    ) -> Operation[None]:
        """These groups of a batch (default: all) were used. Those that are used up by it (`max_times_sampled` of the
        policy) are gone for good, with `clear` their rows, too; others are offered again. Raises `LeaseExpired` when
        the lease was over before: nothing changes then."""
        if _checked(batch).groups:
            names = None if group_ids is None else _ids(group_ids)
            yield Call(m.AckGroups(self.session.next_rid(), batch.lease, names, clear))

    def release(self, batch: GroupBatch, group_ids: str | Sequence[str] | None = None) -> Operation[None]:
        """These groups of a batch (default: all) were not used: they are judged again and offered. Raises as `ack`."""
        if _checked(batch).groups:
            names = None if group_ids is None else _ids(group_ids)
            yield Call(m.ReleaseGroups(self.session.next_rid(), batch.lease, names))

    # steps

    def checkpoint(self, step: int) -> Operation[None]:
        """`resume` may go back to this step (from 0, rising; the newest may be marked again): call it once the model
        that learned from all acknowledged groups is saved. From the first mark on, rows that `ack` was told to clear
        stay until the next one. Where groups with more than 262,144 rows were used up since the oldest mark, it is
        forgotten. A loop that takes rows for tasks as well marks both as one: `client.checkpoint(step, tasks, pools=)`.

        Raises `InvalidInput` for an earlier step, and for policies whose groups are used several times or at a rate.
        """
        yield _call(self, m.MarkPool, step_number(step))

    def resume(self, step: int) -> Operation[ResumedGroups]:
        """The groups that were handed out after a marked step are handed out once more: `select` gives them batch by
        batch as before, in the same order, with the members that were withheld then, however old they are by now. What
        somebody has on a lease is taken back (`LeaseExpired`). A `select` that asks for fewer or more groups than such
        a batch has gets it judged again and offered like any other. Raises `InvalidInput` for a step without a mark.
        """
        reply = (yield _call(self, m.ResumePool, step_number(step)))[0]
        return ResumedGroups(reply.batches, reply.groups, reply.lost)

    def wait(self, min_groups: int, timeout_s: float | None = None) -> Operation[int]:
        """How many groups `select` could give now, which nobody gets by it. Waits until there are `min_groups`, at most
        `timeout_s`; fewer where no more can come, or where the policy lets a version shrink. Raises `DeadlineExceeded`,
        `GroupsShort`."""
        wait_s = _waiting(self, timeout_s)
        return (yield _call(self, m.AwaitGroups, min_groups, wait_s, wait_s=wait_s))[0].count

    def status(self) -> Operation[dict[str, Any]]:
        """Groups by state, the version, who waits, how many attempts are `running` and which sessions make them
        (`workers`: `session` in hexadecimal), the open group that came first with its slots by state
        (`oldest_open`), and for each source the totals of `SourceCounters` with
        `starved_s`, the seconds since one of its groups was consumed, or since the first of those that it has was
        opened (None: neither, in this life of the service)."""
        return (yield _call(self, m.DescribePool))[0].values


class PoolOf(Protocol):
    """What an operation needs of its pool."""

    @property
    def session(self) -> Session: ...
    @property
    def partition_id(self) -> str: ...


def _checked(batch: Any) -> GroupBatch:
    if not isinstance(batch, GroupBatch):
        raise InvalidInput(f"batch is a GroupBatch, as select returned it, got {type(batch).__qualname__}")
    return batch


def _ids(group_ids: str | Iterable[str]) -> list[str]:
    """Ids of groups: one, or several."""
    return [group_ids] if isinstance(group_ids, str) else texts(group_ids, "group_ids")


def _call(pool: PoolOf, kind: Any, *args: Any, wait_s: float = 0.0) -> Call:
    return Call(kind(pool.session.next_rid(), pool.partition_id, *args), wait_s=wait_s)


def _taking(pool: PoolOf, timeout_s: float | None) -> Operation[float]:
    """As `_waiting`, for what the session holds afterwards: it must not end with the next call that is broken off."""
    if not pool.session.is_held:
        yield HoldSession()
    return _waiting(pool, timeout_s)


def _waiting(pool: PoolOf, timeout_s: float | None) -> float:
    return pool.session.timeout_s if timeout_s is None else timeout_s


def _placed(pool: PoolOf, data: Any) -> Operation[BlockPlan | BatchMeta | KVBatchMeta]:
    """The metadata of rows that are in the pool's partition, or the plan of new ones."""
    if not isinstance(data, (BatchMeta, KVBatchMeta)):
        return (yield from ops.planned(pool.session, data, None))
    places = {data.partition_id} if isinstance(data, KVBatchMeta) else set(data.partition_ids)
    if places - {pool.partition_id}:
        raise InvalidInput(f"the rows are in {', '.join(map(repr, places))}, not in {pool.partition_id!r}")
    return data


def _finish(
    pool: PoolOf, results: Sequence[SlotResult], rows: BlockPlan | BatchMeta | KVBatchMeta, dedupe: bool | None
) -> Operation[FinishedBatch]:
    finished = [
        m.FinishedSlot(
            one.attempt.group_id, one.attempt.slot, one.attempt.attempt, one.reward, one.oldest_version,
            one.newest_version, one.tokens, checked_values(one.info, "info"), one.num_rows,
        ) for one in instances(results, SlotResult, "results")
    ]  # fmt: skip
    if isinstance(rows, BlockPlan):
        target = TargetRows(pool.partition_id, rows.rows, finishes=finished)
        storing = store_shared if is_on(pool.session, "dedupe", dedupe) else store
        written = yield from storing(pool.session, rows, target, None)
        metadata = committed_meta(pool.session.service_id, written, pool.partition_id, rows.schema(), None)
        return FinishedBatch(metadata, _refused(results, written.refused))
    if isinstance(rows, KVBatchMeta):
        call = _call(pool, m.FinishSlots, finished, b"", b"", list(rows.keys))
    else:
        call = _call(pool, m.FinishSlots, finished, rows.indexes.tobytes(), rows.service_id)
    refused = (yield call)[0].refused
    return FinishedBatch(_left(results, rows, {one.at for one in refused}), _refused(results, refused))


def _left(results: Sequence[SlotResult], rows: BatchMeta | KVBatchMeta, refused: Set[int]) -> BatchMeta | KVBatchMeta:
    """The rows of the results that are in."""
    if not refused:
        return rows
    firsts = itertools.accumulate((one.num_rows for one in results), initial=0)
    spans = [range(first, first + one.num_rows) for first, one in zip(firsts, results, strict=False)]
    kept = [row for place, span in enumerate(spans) if place not in refused for row in span]
    if isinstance(rows, KVBatchMeta):
        return rows.select_keys([rows.keys[row] for row in kept])
    return rows.select_samples(kept)


def _refused(results: Sequence[SlotResult], refused: Sequence[m.RefusedSlot]) -> list[RefusedResult]:
    return [RefusedResult(results[one.at].attempt, error_from_code(one.code, one.text)) for one in refused]


def _selected(one: m.LentGroup, first: itertools.count[int]) -> SelectedGroup:
    members = []
    for member in one.members:
        rows = [next(first) for _ in range(member.count)]
        span = range(rows[0], rows[-1] + 1) if rows else range(0)
        members.append(
            GroupMember(
                member.slot, member.attempt, span, member.reward, member.oldest, member.newest, member.tokens,
                member.info, member.withheld,
            )
        )  # fmt: skip
    return SelectedGroup(
        one.group, one.source, one.start, one.target, one.age, one.prompt, members, one.priority, one.times_sampled,
        one.probability,
    )  # fmt: skip


def open_pool(session: Session, partition_id: str, policy: GroupPolicy, version: int | None) -> Operation[None]:
    yield Call(m.OpenPool(session.next_rid(), partition_id, policy, version))


class GroupPool:
    """The groups of one partition. Made by `transfer_queue.group_pool`.

    Every method exists as `name` (blocks) and `async_name` (awaits). Besides what is listed each may raise
    `InvalidInput` where the partition has no pool, `ServiceUnavailable`, `DeadlineExceeded`.
    """

    def __init__(self, client: TransferQueueClient, partition_id: str) -> None:
        self.partition_id = text(partition_id, "partition_id")
        self._client = client

    @property
    def session(self) -> Session:
        """The session of the client that it was made with."""
        return self._client.session

    tickets, async_tickets = blocking(GroupOperations.tickets), awaitable(GroupOperations.tickets)
    return_tickets, async_return_tickets = (
        blocking(GroupOperations.return_tickets),
        awaitable(GroupOperations.return_tickets),
    )
    open, async_open = blocking(GroupOperations.open), awaitable(GroupOperations.open)
    claim, async_claim = blocking(GroupOperations.claim), awaitable(GroupOperations.claim)
    finish, async_finish = blocking(GroupOperations.finish), awaitable(GroupOperations.finish)
    finish_batch, async_finish_batch = (
        blocking(GroupOperations.finish_batch),
        awaitable(GroupOperations.finish_batch),
    )
    fail, async_fail = blocking(GroupOperations.fail), awaitable(GroupOperations.fail)
    refills, async_refills = blocking(GroupOperations.refills), awaitable(GroupOperations.refills)
    end, async_end = blocking(GroupOperations.end), awaitable(GroupOperations.end)
    remove, async_remove = blocking(GroupOperations.remove), awaitable(GroupOperations.remove)
    advance, async_advance = blocking(GroupOperations.advance), awaitable(GroupOperations.advance)
    filter, async_filter = blocking(GroupOperations.filter), awaitable(GroupOperations.filter)
    set_priorities, async_set_priorities = (
        blocking(GroupOperations.set_priorities),
        awaitable(GroupOperations.set_priorities),
    )
    retarget, async_retarget = blocking(GroupOperations.retarget), awaitable(GroupOperations.retarget)
    select, async_select = blocking(GroupOperations.select), awaitable(GroupOperations.select)
    renew, async_renew = blocking(GroupOperations.renew), awaitable(GroupOperations.renew)
    ack, async_ack = blocking(GroupOperations.ack), awaitable(GroupOperations.ack)
    release, async_release = blocking(GroupOperations.release), awaitable(GroupOperations.release)
    checkpoint, async_checkpoint = blocking(GroupOperations.checkpoint), awaitable(GroupOperations.checkpoint)
    resume, async_resume = blocking(GroupOperations.resume), awaitable(GroupOperations.resume)
    wait, async_wait = blocking(GroupOperations.wait), awaitable(GroupOperations.wait)
    status, async_status = blocking(GroupOperations.status), awaitable(GroupOperations.status)

    def __repr__(self) -> str:
        return f"<GroupPool of partition {self.partition_id!r}>"
