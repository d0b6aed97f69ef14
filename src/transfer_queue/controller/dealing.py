"""Batches of data-parallel ranks: one for all ranks is taken from the sampler at once, and each rank has its share.

A *group* is the ranks of one task that share one partition, for one loop over it; its members are the sessions that
asked in a rank's name. A rank that was told of the end and begins anew is of the next group, which the others come to
when they have been told: until then both are there, and no row is in shares of both.
A *deal* is one batch of it: `dp_size` times `batch_size` rows, or what is left of a partition that is whole. The share
of a rank that has not asked for it yet is kept for it (`DEALT`), so that no other rank can take it, however fast it is.

Rows of a share that come back before they were used (the rank died, its lease is over, it gave them back) are *loose*:
others of the task may take them, but no later deal does, so that the rank finds them when it asks again;
what others took meanwhile is replaced as far as rows are ready.

A row that its rank refused is not of the share any more: it comes in a later deal, or in the place of one that is gone.
Where some rank was told of the end before, or where it is left over at the end and the sampler does not pick it, it is
loose.

When the last member of a group has ended it is forgotten, and all that was kept for it is free; where a rank has not
asked yet, the rows are free and loose, and the group stays. It does not stay in the way of a later group for the sake
of ranks that were told of the end of these very rows before: they need not come once more. It also stays where others
were told of the end, for a rank that has not used all of its shares: one that goes on has what is left of them, and not
a part that is dealt anew; one that begins anew, whichever it is, begins a new group. It is also forgotten when
consumption is reset, and when the partition goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from transfer_queue.controller.endings import has_begun, is_complete
from transfer_queue.controller.readiness import DEALT, Slots, Task
from transfer_queue.controller.table import Table
from transfer_queue.errors import InvalidInput, MissingParameter, SamplerFailed
from transfer_queue.sampler.base import BaseSampler, takes, whole_number
from transfer_queue.sampler.streaming_token_budget_sampler import BUDGET
from transfer_queue.wire.messages import Fetch

MAX_RANKS = 1 << 16
DP_SIZE = "dp_size"
_NONE = np.empty(0, np.int64)

Deal: TypeAlias = "dict[int, Share]"  # by rank; without those that began with a later batch


class Share:
    """What one rank got of a deal, as global indexes in order: `dealt` is all of it, `rows` what it gets when it asks.
    `taken` were replaced, as others had taken them, or will be, as the rank refused them. `size` is what the largest
    share of the deal has."""

    __slots__ = ("dealt", "is_cut", "is_torn", "num_refused", "rows", "size", "taken", "used")

    def __init__(self, rows: Slots, size: int, used: int) -> None:
        self.rows = self.dealt = rows
        self.taken = _NONE
        self.size = size
        self.used = used  # rows that the rank had used of this batch before it was dealt
        self.is_torn = False  # some rows came back, and were not asked for since: `rows` are those
        self.is_cut = False  # so it was once, and others were used before
        self.num_refused = 0  # of `taken`, those that nothing was dealt for

    @property
    def own(self) -> Slots:
        """What comes back to it when it is given back."""
        return self.dealt[~np.isin(self.dealt, self.taken)] if len(self.taken) else self.dealt

    def give_back(self, mine: Slots) -> None:
        """These of its own rows came back."""
        own = self.own
        back = np.union1d(mine, self.rows) if self.is_torn else mine
        self.is_torn = True
        self.rows = own[np.isin(own, back)]
        self.is_cut = self.is_cut or len(self.rows) < len(own)

    def refuse(self, mine: Slots) -> None:
        """These of its own rows are so no longer; its rank gets others in their place when it has no other left, or
        comes back: peers of the rank get what it has."""
        self.is_cut = True
        self.rows = self.rows[~np.isin(self.rows, mine)]
        self.taken = np.concatenate([self.taken, mine])
        self.num_refused += len(mine)

    def wanted(self, used: int) -> int:
        """How many rows its rank is to get, which used so many already."""
        return self.size - max(0, used - self.used) if self.is_cut else self.size


class Dealt(Protocol):
    """A batch that was dealt, by rank; `size` is what the largest share had."""

    @property
    def shares(self) -> Mapping[int, Slots]: ...
    @property
    def size(self) -> int: ...


class EndedLoops(NamedTuple):
    """The `ranks` of `dp_size` that were told that nothing is left, since the row `last` (a global index) came."""

    dp_size: int
    last: int
    ranks: set[int]


class RankGroup:
    """`follows`: whether another one was there when it began."""

    def __init__(self, dp_size: int, batch_size: int, follows: bool = False) -> None:
        self.dp_size = dp_size
        self.batch_size = batch_size  # rows per rank
        self.members: dict[int, set[bytes]] = {}  # of every rank that ever asked; empty where all have ended
        self.first: dict[int, int] = {}  # the lowest batch that each rank asked for
        self.deals: dict[int, Deal] = {}
        self.loose: set[int] = set()
        self.refused: set[int] = set()  # rows that were dealt, and may be dealt again
        self.leases: set[int] = set()
        self.follows = follows
        self.ended: int | None = None  # the batch that there is not, as some ranks were told
        self.told: set[int] = set()
        self.finished: set[bytes] = set()  # the members that were told

    @property
    def sessions(self) -> set[bytes]:
        return set().union(*self.members.values())

    def is_late(self, table: Table, task: Task) -> bool:
        """Whether some rank has a share and has never asked: it is still to come, though the others have ended. Nobody
        who has begun anew waits for one that was told of the end of these rows before."""
        late = set(range(self.dp_size)) - self.members.keys()
        if not late or not self.deals:
            return False
        return task.groups[-1] is self or not late <= _ended_loops(table, task, self.dp_size)

    def is_left(self, table: Table, task: Task) -> bool:
        """Whether all have ended, some as they were told of the end of these rows and others amid their shares."""
        if self.sessions or task.groups[-1] is not self or not self.told & _ended_loops(table, task, self.dp_size):
            return False
        return any(self.owes(table, task, rank) for rank in self.members)

    def stays(self, table: Table, task: Task) -> bool:
        """Whether it is there still when all its members have ended."""
        return self.is_late(table, task) or self.is_left(table, task)

    @property
    def is_told(self) -> bool:
        return len(self.told) == self.dp_size

    def shares(self) -> Iterable[Share]:
        return (share for deal in self.deals.values() for share in deal.values())

    def loose_slots(self, table: Table, task: Task) -> Slots:
        """The loose rows that nobody has taken."""
        if not self.loose:
            return _NONE
        rows = np.fromiter(self.loose, np.int64, len(self.loose))
        slots = table.slots_of(rows)
        free = slots >= 0
        free[free] = ~task.consumed[slots[free]] & (task.lease[slots[free]] == 0)
        return np.sort(slots[free])

    def kept_slots(self, table: Table, task: Task) -> Slots:
        """Rows that are kept for ranks which have not asked for them."""
        slots = table.slots_of(np.concatenate([_NONE, *(share.rows for share in self.shares())]))
        slots = slots[slots >= 0]
        return slots[task.lease[slots] == DEALT]

    def owes(self, table: Table, task: Task, rank: int) -> bool:
        """Whether a rank has rows that it neither used nor refused, though it was told of the end: it was ahead of its
        work."""
        slots = table.slots_of(
            np.concatenate([_NONE, *(deal[rank].own for deal in self.deals.values() if rank in deal)])
        )
        slots = slots[slots >= 0]
        slots = slots[~task.consumed[slots] & ~np.isin(table.index[slots], list(self.refused))]
        leases = task.lease[slots]
        return bool(np.isin(leases, [0, DEALT, *self.leases]).any())

    def num_open(self, table: Table, task: Task) -> int:
        """How many rows were dealt and are not used."""
        self.leases &= task.lent.keys()
        lent = sum(task.lent[number] for number in self.leases)
        kept = task.lent.get(DEALT, 0) if task.groups == [self] else len(self.kept_slots(table, task))
        return lent + kept + len(self.loose_slots(table, task))


class Dealing:
    """The groups of all partitions, each at its task. `free(table, task name, slots)` offers rows that were kept."""

    def __init__(self, free: Callable[[Table, str, Slots], None]) -> None:
        self._free = free
        self._of_session: dict[bytes, set[tuple[str, str]]] = {}  # (partition, task) of its groups

    def prepare(self, message: Fetch, sampler: BaseSampler) -> None:
        """Know a request for a share, also by its sampling_config. Raises `InvalidInput` for one that cannot be met."""
        if not message.dp_size:
            if DP_SIZE not in message.sampling or BUDGET in message.sampling or takes(sampler, DP_SIZE):
                return  # by a budget of tokens the sampler itself plans for all ranks
            message.dp_size = whole_number(message.sampling.pop(DP_SIZE), DP_SIZE)
        if not 1 <= message.dp_size <= MAX_RANKS:
            raise InvalidInput(f"dp_size {message.dp_size}: expected 1 to {MAX_RANKS}")
        if message.sampling.get("dp_rank") is None or message.sampling.get("batch_index") is None:
            raise MissingParameter("dp_size needs dp_rank and batch_index beside it")
        rank, batch = rank_and_batch(message)
        if not 0 <= rank < message.dp_size:
            raise InvalidInput(f"dp_rank {rank} of dp_size {message.dp_size}")
        if batch < 0 or not 0 <= message.used < message.batch_size:
            raise InvalidInput(f"batch_index {batch}, {message.used} of {message.batch_size} rows used")
        planned = getattr(sampler, DP_SIZE, None)
        if isinstance(planned, int) and planned != message.dp_size:
            raise InvalidInput(
                f"dp_size {message.dp_size}: {type(sampler).__name__} divides batches among dp_size={planned} ranks"
            )

    def group_of(self, table: Table, message: Fetch, session: bytes) -> RankGroup | None:
        """The oldest group that is not over for this rank, nor for this member of it; None where it begins a new one.
        A loop that goes on, though nothing knows it any more, does so in the latest one."""
        task = table.task(message.task)
        groups: list[RankGroup] = task.groups
        rank, _ = rank_and_batch(message)
        begins = not has_begun(message)
        for group in groups:
            is_member = session in group.members.get(rank, ())
            is_told = begins and session in group.finished if is_member else rank in group.told
            if not is_told or group.owes(table, task, rank):
                return group
        return groups[-1] if groups and not begins else None

    def is_early(self, table: Table, message: Fetch, session: bytes) -> bool:
        """Whether a loop that begins finds that all rows were used and cleared: it waits for others, as for a partition
        that is to come. A rank whose group is still there belongs to the loop of the others."""
        if not message.until_done or not table.is_used_up or has_begun(message):
            return False
        return not message.dp_size or self.group_of(table, message, session) is None

    def join(self, table: Table, message: Fetch, session: bytes) -> RankGroup:
        """The group of a request, whose session is a member of it now. Raises `InvalidInput` where others of other
        sizes share the partition."""
        task = table.task(message.task)
        group = self.group_of(table, message, session)
        if group is not None and not has_begun(message) and not group.sessions and not group.is_late(table, task):
            self.disband(table, message.task, group)
            group = None
        if group is not None and (group.dp_size, group.batch_size) != (message.dp_size, message.batch_size):
            if group.sessions - {session}:
                raise InvalidInput(
                    f"task {message.task!r} of partition {table.name!r} is dealt to dp_size={group.dp_size} ranks in "
                    f"batches of {group.batch_size} rows; dp_size={message.dp_size} with batches of "
                    f"{message.batch_size} cannot share it"
                )
            self.disband(table, message.task, group)
            group = None
        if group is None:
            task.groups = [one for one in task.groups if not self._is_past(table, task, one)]
            for one in [one for one in task.groups if one.dp_size != message.dp_size and not one.sessions]:
                self.disband(table, message.task, one)  # who it waits for will not come
            group = RankGroup(message.dp_size, message.batch_size, bool(task.groups))
            task.groups.append(group)
        rank, batch = rank_and_batch(message)
        if rank not in group.first:
            self._begin(table, message.task, group, rank, batch)
        group.first[rank] = min(batch, group.first.get(rank, batch))
        group.members.setdefault(rank, set()).add(session)
        self._of_session.setdefault(session, set()).add((table.name, message.task))
        while left := next((one for one in task.groups if not one.sessions and not one.stays(table, task)), None):
            self.disband(table, message.task, left)
        return group

    def _is_past(self, table: Table, task: Task, group: RankGroup) -> bool:
        """Whether nobody will ask for anything of this group any more."""
        return group.is_told and group.sessions <= group.finished and not group.num_open(table, task)

    def _begin(self, table: Table, name: str, group: RankGroup, rank: int, batch: int) -> None:
        """A rank comes in at this batch: what was kept for it of earlier ones is for the others."""
        early = [number for number in group.deals if number < batch and rank in group.deals[number]]
        rows = [group.deals[number].pop(rank).rows for number in early]
        if rows:
            slots = table.slots_of(np.concatenate(rows))
            self._offer(table, name, slots[slots >= 0])

    def is_over(self, table: Table, message: Fetch, group: RankGroup, session: bytes) -> bool:
        """Whether this batch is never dealt: every row that there will be is used, or in somebody's share. Once a rank
        was told so, all of them are; after that, who asks again goes on, unless others have begun anew."""
        rank, batch = rank_and_batch(message)
        if batch in group.deals:  # if only for others: what they got is what this rank has to get
            return False
        if self.comes_later(message, group):
            return False
        goes_on = group.is_told and group is table.task(message.task).groups[-1]
        if group.ended is None or batch < group.ended or goes_on:
            if self.num_left(table, message, group) or (not group.deals and group.follows and table.is_used_up):
                return False  # it may be that only those before it cleared their last rows after it began
            group.ended = batch if group.ended is None else group.ended
        group.told.add(rank)
        group.finished.add(session)
        _note_end(table, table.task(message.task), group.dp_size, rank)
        return True

    def comes_later(self, message: Fetch, group: RankGroup) -> bool:
        """Whether this rank has a share of a later batch, as it goes on further back than one that asked before."""
        rank, batch = rank_and_batch(message)
        return any(number > batch and rank in deal for number, deal in group.deals.items())

    def is_passed(self, table: Table, message: Fetch, group: RankGroup) -> bool:
        """Whether nothing is left to deal for this batch, and the rank goes on with a later one."""
        return self.comes_later(message, group) and not self.num_left(table, message, group)

    def num_left(self, table: Table, message: Fetch, group: RankGroup) -> int:
        """How many rows the group may still be dealt, ready or not, those that another group has included; 1 while not
        all that were declared are there."""
        task = table.task(message.task)
        if not is_complete(table, message):
            return 1
        return table.num_rows - task.num_consumed - group.num_open(table, task)

    def find(self, message: Fetch, group: RankGroup) -> Share | None:
        rank, batch = rank_and_batch(message)
        return group.deals.get(batch, {}).get(rank)

    def to_deal(self, message: Fetch, group: RankGroup) -> tuple[list[int], int]:
        """The ranks that need a share of this batch, all but those that began later or have theirs, and how many rows
        each is to get."""
        rank, batch = rank_and_batch(message)
        size = message.batch_size - message.used
        if batch in group.deals:
            return [rank], min([size, *(share.size for share in group.deals[batch].values())])
        return [one for one in range(group.dp_size) if one == rank or group.first.get(one, batch) <= batch], size

    def loose(self, table: Table, message: Fetch) -> Slots:
        """Rows on offer that no new share gets."""
        task = table.task(message.task)
        return np.unique(np.concatenate([_NONE, *(group.loose_slots(table, task) for group in task.groups)]))

    def enter(
        self, table: Table, message: Fetch, group: RankGroup, ranks: Sequence[int], shares: list[list[int]]
    ) -> bool:
        """These rows are dealt now. False for no rows, unless the others have some: then they are repeated for this
        rank. Raises `SamplerFailed` for rows that are not on offer."""
        task = table.task(message.task)
        _, batch = rank_and_batch(message)
        rows = np.array([row for share in shares for row in share], np.int64)
        slots = table.slots_of(rows)
        if len(shares) != len(ranks) or (slots < 0).any() or len(task.offered(slots)) < len(rows):
            raise SamplerFailed(f"partition {table.name!r}: a deal of rows that are not on offer, or in two shares")
        if not len(rows) and batch not in group.deals:
            return False
        if group.is_told:
            group.ended, group.told, group.finished = None, set(), set()
        group.refused.difference_update(rows.tolist())
        deal = group.deals.setdefault(batch, {})
        size = max((share.size for share in deal.values()), default=max(map(len, shares)))
        for rank, share in zip(ranks, shares, strict=True):
            deal[rank] = Share(np.array(share, np.int64), size, message.used)
            if group.members.get(rank, True):
                task.reserve(table.slots_of(deal[rank].rows), DEALT)
            else:  # all that asked in its name have ended
                deal[rank].is_torn = True
                group.loose.update(share)
        return True

    def deal_again(self, table: Table, message: Fetch, deals: Sequence[Dealt]) -> None:
        """Batches that were dealt before are those from the one on that this request asks for. They are a new group's:
        nobody has any of their rows."""
        if not deals:
            return
        task = table.task(message.task)
        for group in list(task.groups):
            self.disband(table, message.task, group)
        task.forget_ranks()
        group = RankGroup(message.dp_size, message.batch_size)
        task.groups.append(group)
        _, batch = rank_and_batch(message)
        for number, dealt in enumerate(deals, batch):
            group.deals[number] = {rank: Share(rows, dealt.size, 0) for rank, rows in dealt.shares.items()}
            for share in group.deals[number].values():
                slots = table.slots_of(share.rows)  # some may have been cleared since
                task.reserve(task.offered(slots[slots >= 0]), DEALT)

    def mend(self, table: Table, message: Fetch, group: RankGroup, share: Share) -> int:
        """A rank asks for a share of which rows had come back: they are its own again. Returns how many others took,
        or it refused."""
        if not share.is_torn:
            return 0 if len(share.rows) else share.num_refused
        task = table.task(message.task)
        slots = table.slots_of(share.rows)
        alive = slots >= 0
        free = alive.copy()
        free[alive] = ~task.consumed[slots[alive]] & np.isin(task.lease[slots[alive]], (0, DEALT))
        group.loose.difference_update(share.rows.tolist())
        taken = share.rows[alive & ~free]
        share.taken = np.concatenate([share.taken, taken])
        share.rows = share.rows[free]
        share.is_torn = False
        return len(taken) + share.num_refused

    def replace(self, table: Table, message: Fetch, group: RankGroup, share: Share, rows: Sequence[int]) -> None:
        """Other rows in the place of those that are gone."""
        more = np.array(rows, np.int64)
        share.rows = np.concatenate([share.rows, more])
        share.dealt = np.concatenate([share.dealt[~np.isin(share.dealt, more)], more])  # one may be its own again
        share.taken = share.taken[~np.isin(share.taken, more)]
        share.num_refused = max(0, share.num_refused - len(more))
        task = table.task(message.task)
        group.refused.difference_update(rows)
        task.reserve(task.offered(table.slots_of(more)), DEALT)

    def padding(self, table: Table, message: Fetch, group: RankGroup, share: Share, own: Slots) -> Slots:
        """Rows to repeat, so that this rank gets as many as the one with the most: its own, else those of others."""
        missing = share.wanted(message.used) - len(own)
        if missing <= 0:
            return _NONE
        _, batch = rank_and_batch(message)
        for rows in ([share.dealt], [other.dealt for other in group.deals[batch].values()]):
            slots = table.slots_of(np.concatenate(rows))
            slots = slots[slots >= 0]
            written = table.written(slots, message.fields)
            slots = slots if written is None else slots[written]
            if len(slots):
                return np.resize(slots, missing)
        return _NONE

    # ends

    def offered(self, table: Table, name: str, slots: Slots) -> None:
        """Rows of a task are free again: those of shares are loose."""
        for group, share, mine in _dealt(table.tasks[name].groups, table.index[slots]):
            group.loose.update(mine.tolist())
            share.give_back(mine)

    def refused(self, table: Table, name: str, slots: Slots) -> None:
        """A rank refused these rows, which are about to be offered again, maybe later: they may come in another deal.
        Once some rank was told of the end there is none, and its rank is done with them all the same."""
        for group, share, mine in _dealt(table.tasks[name].groups, table.index[slots]):
            group.refused.update(mine.tolist())
            if group.ended is None:
                share.refuse(mine)

    def let_go_refused(self, group: RankGroup) -> bool:
        """The sampler does not take what is left: refused rows are dealt no more. False where there are none."""
        if not group.refused:
            return False
        group.loose |= group.refused
        group.refused.clear()
        return True

    def end_session(self, session: bytes, tables: Mapping[str, Table]) -> None:
        """A member is gone: the shares that are kept for its rank, unless it has other members, are for everybody."""
        for partition, name in sorted(self._of_session.pop(session, ())):
            table = tables.get(partition)
            if table is None or name not in table.tasks:
                continue
            for group in [one for one in table.tasks[name].groups if session in one.sessions]:
                self._leave(table, name, group, session)

    def _leave(self, table: Table, name: str, group: RankGroup, session: bytes) -> None:
        lost = [rank for rank, members in group.members.items() if members == {session}]
        for members in group.members.values():
            members.discard(session)
        group.finished.discard(session)
        if not group.sessions and group.stays(table, table.tasks[name]):
            self._offer(table, name, group.kept_slots(table, table.tasks[name]))
        elif not group.sessions:
            self.disband(table, name, group)
        elif lost:
            kept = [deal[rank].rows for deal in group.deals.values() for rank in lost if rank in deal]
            slots = table.slots_of(np.concatenate([_NONE, *kept]))
            self._offer(table, name, slots[slots >= 0])

    def disband(self, table: Table, name: str, group: RankGroup) -> None:
        """Forget a group; what was kept for it is free."""
        task = table.tasks[name]
        task.groups.remove(group)
        self._offer(table, name, group.kept_slots(table, task), is_news=bool(group.loose and task.groups))

    def forget(self, table: Table) -> None:
        """Forget the groups of a partition, whose rows need nothing any more."""
        for task in table.tasks.values():
            task.forget_ranks()

    def _offer(self, table: Table, name: str, slots: Slots, is_news: bool = False) -> None:
        """Those of these rows that are kept for a rank are so no longer. `is_news` to others also where none is."""
        freed = table.tasks[name].take_back(slots, DEALT, used=False)
        if len(freed) or is_news:
            self._free(table, name, freed)


def _dealt(groups: list[RankGroup], rows: Slots) -> Iterator[tuple[RankGroup, Share, Slots]]:
    """The shares that have some of these rows, each with its group and the rows that they are."""
    for group, share in [(one, share) for one in groups for share in one.shares()]:
        own = share.own
        mine = own[np.isin(own, rows)]
        if len(mine):
            yield group, share, mine


def ranks_kept_for(table: Table, task: Task) -> dict[int, bool]:
    """The ranks for which rows are kept, and whether each has asked for some in this loop."""
    found: dict[int, bool] = {}
    for group in task.groups:
        for rank, share in ((rank, share) for deal in group.deals.values() for rank, share in deal.items()):
            slots = table.slots_of(share.rows)
            if (task.lease[slots[slots >= 0]] == DEALT).any():
                found[rank] = found.get(rank, False) or rank in group.members
    return dict(sorted(found.items()))


def _ended_loops(table: Table, task: Task, dp_size: int) -> set[int]:
    """The ranks that were told of the end of the rows that there are: none came since."""
    known = task.loops
    is_of_these = known is not None and known.dp_size == dp_size and known.last >= table.last_index
    return known.ranks if is_of_these else set()


def _note_end(table: Table, task: Task, dp_size: int, rank: int) -> None:
    """A rank is told that nothing is left."""
    ranks = _ended_loops(table, task, dp_size)
    if not ranks:
        task.loops = EndedLoops(dp_size, table.last_index, ranks)
    ranks.add(rank)


def rank_and_batch(message: Fetch) -> tuple[int, int]:
    sampling = message.sampling
    return whole_number(sampling["dp_rank"], "dp_rank"), whole_number(sampling["batch_index"], "batch_index")
