"""`TQReplayBuffer` of NeMo-RL: a slot for each group of a pool, under the names, lists and signatures of its own.

A group of NeMo-RL is committed whole, so it has one slot at the service, and its samples are the rows of that slot. The
process that reserved a group works on it: the group ends when the process does.
"""

from __future__ import annotations

import asyncio
import builtins
import inspect
import logging
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import transfer_queue as tq
from transfer_queue.client.groups import GroupBatch, GroupPool, GroupTicket, SelectedGroup, SlotAttempt
from transfer_queue.errors import DeadlineExceeded, GroupEnded, InvalidInput, RowCleared, StaleAttempt
from transfer_queue.groups import GroupPolicy
from transfer_queue.integrations.nemo_rl.payload import (
    ROUTED_EXPERTS,
    TASK,
    PackedGroup,
    PackRecord,
    described,
    meta_of,
    pack_as_nemo,
)
from transfer_queue.integrations.nemo_rl.saved import groups_to_restore

log = logging.getLogger("transfer_queue")

MAX_GROUPS = 1 << 20
UNFINISHED = -1  # the end weight of a slot whose group is not committed


class TQReplayBuffer:
    """The groups that this process knows, in the order they were reserved: `meta_list`, `start_weight_list`,
    `end_weight_list`, `target_step_list`, `ready_list` and `_group_ids` are parallel. Which of them a step may use is
    the service's to say, by the policy of the sampler that was made with this buffer; without one every finished group
    may be used.

    Used on one event loop, in a process that has called `tq.init()`. `dp_client` writes and reads rows of the same
    service: `put_samples`, `get_samples`, `clear_samples`, plain, coroutines or of a Ray actor. `pack` makes rows of a
    record (default: NeMo-RL's own functions).
    """

    def __init__(
        self,
        dp_client: Any,
        partition_id: str,
        *,
        pad_value_dict: Mapping[str, int],
        require_routed_experts: bool = False,
        pack: PackRecord = pack_as_nemo,
    ) -> None:
        self.partition_id = partition_id
        self.meta_list: list[Any] = []
        self.start_weight_list: list[int] = []
        self.end_weight_list: list[int] = []
        self.target_step_list: list[int | None] = []
        self.ready_list: list[bool] = []
        self._group_ids: list[str] = []
        self._dp_client = dp_client
        self._pad_value_dict = dict(pad_value_dict)
        self._require_routed_experts = require_routed_experts
        self._pack = pack
        self._pool: GroupPool | None = None
        self._open_pool: Callable[[], GroupPool] | None = None
        self._stamps = False
        self._attempts: dict[str, SlotAttempt] = {}
        self._tickets: dict[int | None, list[GroupTicket]] = {}
        self._withdrawn: set[str] = set()  # which somebody has who did not select them
        self._taken: set[str] = set()  # before their commit had its answer
        self._committed: set[str] = set()  # since the service was last asked what it has given up
        self._num_evicted = 0

    @property
    def pool(self) -> GroupPool:
        """The groups at the service. Blocks for a round trip where nobody needed it before."""
        if self._pool is None:
            tq.address()  # attaches this process, where it is not
            if self._open_pool is None:
                self._pool = tq.group_pool(self.partition_id, GroupPolicy(max_attempts=1))
            else:
                self._pool = self._open_pool()
        return self._pool

    def follow(self, open_pool: Callable[[], GroupPool], *, stamps: bool) -> None:
        """A sampler says how the pool is opened, when somebody needs it first. `stamps`: every group is for one step.

        Raises `InvalidInput` where the pool is open.
        """
        if self._pool is not None:
            raise InvalidInput("make the sampler before groups are reserved")
        self._open_pool, self._stamps = open_pool, stamps

    def size(self) -> int:
        return len(self._group_ids)

    def __len__(self) -> int:
        return len(self._group_ids)

    # producing

    def reserve(self, *, weight_version: int, target_step: int | None = None, group_id: str | None = None) -> str:
        """A slot for a group that is started at `weight_version`; its id. Blocks for two or three round trips.

        Raises `InvalidInput` (a ValueError) for an id that was used, and, with `in_order`, for a step that has as many
        groups as it has prompts or that was not admitted; nothing has changed then.
        """
        name = str(uuid.uuid4()) if group_id is None else group_id
        if name in self._group_ids:
            raise InvalidInput(f"group {name!r} is reserved already")
        attempt = self._begin(name, weight_version, target_step)
        if attempt is not None:
            self._attempts[name] = attempt
        self._append(name, weight_version, target_step)
        return name

    def _begin(self, name: str, start: int, step: int | None) -> SlotAttempt | None:
        """The attempt at a new group; None where its step has passed, so that nobody can use it."""
        ticket = None
        if self._stamps:
            if step is None:
                raise InvalidInput(f"group {name!r} needs a target_step: the sampler is in_order")
            if (ticket := self._ticket(step)) is None:
                return None
        try:
            self.pool.open(name, 1, start_version=start, ticket=ticket)
        except (InvalidInput, GroupEnded) as error:
            if ticket is not None:
                self.pool.return_tickets([ticket])
            raise InvalidInput(f"group {name!r}: {error}") from None
        claimed = self.pool.claim(1, name)
        if not claimed:
            raise InvalidInput(f"group {name!r} is reserved already, by another process")
        return claimed[0]

    def _ticket(self, step: int) -> GroupTicket | None:
        """One for this step; others that came with it are kept. None for a step that has passed."""
        held = self._tickets.setdefault(step, [])
        while not held:
            try:
                (ticket,) = self.pool.tickets(1, timeout_s=0)
            except DeadlineExceeded:
                if step < self.pool.status()["version"]:
                    return None
                raise InvalidInput(f"step {step} has all its groups, or was not admitted yet") from None
            self._tickets.setdefault(ticket.target, []).append(ticket)
        return held.pop()

    def _append(self, name: str, start: int, step: int | None, end: int = UNFINISHED, meta: Any = None) -> None:
        self._group_ids.append(name)
        self.meta_list.append(meta)
        self.start_weight_list.append(start)
        self.end_weight_list.append(end)
        self.target_step_list.append(step)
        self.ready_list.append(meta is not None)

    async def commit(self, group_id: str, record: Any, start_weight_version: int, end_weight_version: int) -> Any:
        """Write the rows of a reserved group and seal it, which answers who waits for it. The metadata of its rows.

        Raises `InvalidInput` (a ValueError) for a group without a slot, before anything is written, and for one that
        ended during the write, and RuntimeError where rows lack routed experts. Where anything fails, its rows are
        cleared; where that fails, too, both errors come as a group of exceptions.
        """
        if group_id not in self._group_ids:
            raise InvalidInput(f"group {group_id!r} has no slot: it was not reserved, or it is removed")
        self._withdrawn.discard(group_id)  # by an earlier try
        packed = self._pack(
            record, pad_value_dict=self._pad_value_dict, weight_version=start_weight_version, group_id=group_id
        )
        if self._require_routed_experts and ROUTED_EXPERTS not in list(packed.fields.keys()):
            raise RuntimeError(f"the rows of group {group_id!r} have no {ROUTED_EXPERTS}, which router replay needs")
        try:
            return await self._write(group_id, packed, start_weight_version, end_weight_version)
        except BaseException as error:
            await self._undo(group_id, packed.sample_ids, error)
            raise

    async def _write(self, name: str, packed: PackedGroup, start: int, end: int) -> Any:
        ids, fields, tags, lengths = packed
        await self._call("put_samples", sample_ids=ids, fields=fields, tags=tags)
        values = {
            "task_name": TASK, "sample_ids": list(ids), "fields": list(fields.keys()), "sequence_lengths": lengths,
            "tags": [dict(tag) for tag in tags],
        }  # fmt: skip
        await self._seal(name, values, start, end)
        meta = meta_of(self.partition_id, values)
        if name in self._taken:
            self._taken.discard(name)
            return meta
        if name not in self._group_ids:
            raise InvalidInput(f"group {name!r} was removed during the write; its rows are cleared")
        at = self._group_ids.index(name)
        self.meta_list[at] = meta
        self.end_weight_list[at] = end
        self.ready_list[at] = True
        self._committed.add(name)
        return meta

    async def _seal(self, name: str, values: dict[str, Any], start: int, end: int) -> None:
        """The group has its rows, which are written. One whose step has passed is not at the service."""
        attempt = self._attempts.get(name)
        if attempt is None:
            return
        rows = tq.KVBatchMeta(keys=values["sample_ids"], tags=values["tags"], partition_id=self.partition_id)
        tokens = sum(values["sequence_lengths"])
        try:
            await self.pool.async_finish(
                attempt, rows, oldest_version=start, newest_version=max(start, end), tokens=tokens, info=values
            )
        except RowCleared as error:
            raise InvalidInput(f"not all rows of group {name!r} are at the service of this process") from error
        except (GroupEnded, StaleAttempt) as error:
            raise InvalidInput(f"group {name!r} ended during the write; its rows are cleared: {error}") from error

    async def _undo(self, name: str, sample_ids: Sequence[str], error: BaseException) -> None:
        """Clear what a commit may have written, which failed with this error, unless somebody got the group before."""
        if name in self._taken:
            self._taken.discard(name)
            return
        self._withdrawn.add(name)  # nobody gets it who is answered meanwhile
        try:
            await self._call("clear_samples", sample_ids=list(sample_ids))
        except BaseException as second:
            if isinstance(error, asyncio.CancelledError) or sys.version_info < (3, 11):
                raise error from second
            text = "a commit failed, and clearing its rows did, too"
            raise builtins.BaseExceptionGroup(text, [error, second]) from None

    # removing

    async def remove_group(self, group_id: str, *, remove_in_dp: bool = False) -> int:
        """As `remove` for one group; 1. Raises `InvalidInput` (a ValueError) for one that has no slot."""
        if group_id not in self._group_ids:
            raise InvalidInput(f"group {group_id!r} has no slot")
        return await self.remove([self._group_ids.index(group_id)], remove_in_dp)

    async def remove(self, idxs: list[int], remove_in_dp: bool) -> int:
        """Give up the slots at these places; how many. The group of an unfinished one ends, and its place in its step
        is free again. Rows of finished ones go with `remove_in_dp`; without, they are the caller's.

        Raises IndexError for a place that is none, `InvalidInput` for one that is named twice; nothing has changed
        then.
        """
        if any(not 0 <= at < len(self) for at in idxs):
            raise IndexError(f"slots {idxs} of {len(self)}")
        if len(set(idxs)) != len(idxs):
            raise InvalidInput(f"slots {idxs} repeat")
        finished = {self._group_ids[at]: self.meta_list[at] for at in idxs if self.ready_list[at]}
        names = [self._group_ids[at] for at in idxs]
        attempts = [self._attempts[name] for name in names if name in self._attempts and name not in finished]
        known = {self._group_ids[at]: self.start_weight_list[at] for at in idxs if self._group_ids[at] in finished}
        known = {name: start for name, start in known.items() if name in self._attempts}
        self._drop(names)  # before anything is awaited: nobody else counts them
        if attempts:
            await self.pool.async_fail(attempts)
        if remove_in_dp and finished:
            ids = [one for meta in finished.values() for one in meta.sample_ids]
            await self._call("clear_samples", sample_ids=ids)
        elif known:
            await self._withdraw(known)
        return len(idxs)

    def _drop(self, names: Sequence[str]) -> None:
        gone = set(names)
        kept = [at for at, name in enumerate(self._group_ids) if name not in gone]
        parallel: list[list[Any]] = [
            self.meta_list, self.start_weight_list, self.end_weight_list, self.target_step_list, self.ready_list,
            self._group_ids,
        ]  # fmt: skip
        for values in parallel:
            values[:] = [values[at] for at in kept]
        for name in gone:
            self._attempts.pop(name, None)
            self._committed.discard(name)

    async def _withdraw(self, starts: Mapping[str, int]) -> None:
        """Somebody has these groups, by the versions they were started at, who did not select them. What the policy
        does not serve now is let go when it does; where no sampler has made one, it serves what is named here."""
        self._withdrawn.update(starts)
        version = max(starts.values()) if self._open_pool is None else None
        try:
            batch = await self.pool.async_select(1, MAX_GROUPS, version=version, timeout_s=0)
        except DeadlineExceeded:
            return
        if not await self._let_go(batch):
            await self.pool.async_release(batch)

    async def _let_go(self, batch: GroupBatch) -> bool:
        """Whether somebody has groups of this batch already: then those are used up, and the others go back."""
        names = [one.group_id for one in batch.groups]
        gone = [name for name in names if name in self._withdrawn]
        left = [name for name in names if name not in self._withdrawn]
        if gone and left:
            await self.pool.async_release(batch, left)
        if gone:
            await self.pool.async_ack(batch, gone)
            self._withdrawn.difference_update(gone)
        return bool(gone)

    # consuming, for samplers

    async def take(self, least: int, most: int, version: int, wait_s: float) -> tuple[Any, int]:
        """The metadata of `least` to `most` groups that the policy serves at `version`, as one, and how many they are;
        (None, 0) where there are not so many within `wait_s` seconds. They are the caller's, and their rows stay.

        Groups of other processes are among them.
        """
        while True:
            try:
                batch = await self.pool.async_select(least, most, version=version, timeout_s=wait_s)
            except DeadlineExceeded:
                return None, 0
            if await self._let_go(batch):
                continue
            if len(batch) < least:  # no more will come
                await self.pool.async_release(batch)
                return None, 0
            metas = [self._meta(one) for one in batch.groups]
            names = [one.group_id for one in batch.groups]
            self._taken.update(name for name in names if name in self._group_ids and not self._is_ready(name))
            self._drop(names)
            await self.pool.async_ack(batch)
            return (metas[0].concat(*metas[1:]) if len(metas) > 1 else metas[0]), len(metas)

    def _meta(self, group: SelectedGroup) -> Any:
        """Of its rows, as this process has it, or as it came with the group."""
        if self._is_ready(group.group_id):
            return self.meta_list[self._group_ids.index(group.group_id)]
        return meta_of(self.partition_id, group.members[0].info)

    def _is_ready(self, name: str) -> bool:
        return name in self._group_ids and self.ready_list[self._group_ids.index(name)]

    async def drop_ended(self) -> int:
        """Give up the finished slots whose groups the service has given up; how many. Their rows are cleared."""
        status = await self.pool.async_status()
        await self._return_tickets(status["version"])
        evicted = sum(one["evicted"] for one in status["sources"].values())
        asked = self._committed if evicted == self._num_evicted else self._group_ids
        names = [name for name in asked if self._is_ready(name)]
        ended = await asyncio.gather(*(self._has_ended(name) for name in names))
        self._num_evicted = evicted
        self._committed.difference_update(names)
        gone = [name for name, is_over in zip(names, ended, strict=True) if is_over and name in self._group_ids]
        passed = [self.meta_list[self._group_ids.index(name)] for name in gone if name not in self._attempts]
        self._drop(gone)
        if passed:
            await self._call("clear_samples", sample_ids=[one for meta in passed for one in meta.sample_ids])
        return len(gone)

    async def _return_tickets(self, version: int) -> None:
        """Nobody needs those of steps that have passed."""
        passed = [step for step in self._tickets if step is not None and step < version]
        tickets = [ticket for step in passed for ticket in self._tickets.pop(step)]
        if tickets:
            await self.pool.async_return_tickets(tickets)

    async def _has_ended(self, name: str) -> bool:
        if name not in self._attempts:
            return True
        try:
            await self.pool.async_claim(1, name, timeout_s=0)  # a finished group has nothing to claim
        except (GroupEnded, InvalidInput):
            return True
        return False

    # steps

    def count_for_target_step(self, target_step: int) -> int:
        """How many slots are for this step, unfinished ones too."""
        return self.target_step_list.count(target_step)

    def promote_ready_group(self, *, to_target_step: int) -> int | None:
        """A finished group of the latest later step takes a place that `to_target_step` lacks. The step that it was
        taken from, which is owed one; None where no later step has one to lend, or nothing is lacking. Blocks for a
        round trip or two."""
        later = [
            (step, -at) for at, step in enumerate(self.target_step_list)
            if step is not None and step > to_target_step and self.ready_list[at]
        ]  # fmt: skip
        if not later:
            return None
        lender, place = max(later)
        if held := self._tickets.get(to_target_step):
            self.pool.return_tickets([held.pop()])
        if self._stamps:
            try:
                self.pool.retarget(self._group_ids[-place], to_target_step)
            except (InvalidInput, GroupEnded) as error:
                log.warning("no group was promoted to step %s: %s", to_target_step, error)
                return None
        self.target_step_list[-place] = to_target_step
        return lender

    # saving

    async def state_dict(self, *, saved_capacity: int) -> dict[str, Any]:
        """The finished groups with their rows. Unfinished ones are not in it."""
        found = [
            {"meta": meta, "start_weight": start, "end_weight": end, "target_step": step, "group_id": name}
            for meta, start, end, step, name, ready in zip(
                self.meta_list, self.start_weight_list, self.end_weight_list, self.target_step_list, self._group_ids,
                self.ready_list, strict=True,
            ) if ready
        ]  # fmt: skip
        for group in found:
            meta = group["meta"]
            group["fields_data"] = await self._call(
                "get_samples", sample_ids=meta.sample_ids, select_fields=meta.fields
            )
        return {"partition_id": self.partition_id, "saved_capacity": saved_capacity, "groups": found}

    async def load_state_dict(
        self, state: Mapping[str, Any], *, max_groups: int, expected_partition_id: str, expected_group_size: int
    ) -> int:
        """Take up the groups of `state_dict`; how many. Those that the service still has are not written again.

        Raises `InvalidInput` (a ValueError) for a state that does not fit (`groups_to_restore`), before anything is
        written, and for a group that this service has seen the end of.
        """
        groups = groups_to_restore(
            state, max_groups=max_groups, partition_id=expected_partition_id, group_size=expected_group_size
        )
        for group in groups:
            await self._restore(group)
        return len(groups)

    async def _restore(self, group: Mapping[str, Any]) -> None:
        name, start, end, meta = (group[key] for key in ("group_id", "start_weight", "end_weight", "meta"))
        if name in self._group_ids:
            raise InvalidInput(f"group {name!r} is in this buffer already")
        if await self._is_there(name):
            self._attempts[name] = SlotAttempt(name, 0, 0, "", start, group["target_step"], {})
        else:
            attempt = self._begin(name, start, group["target_step"])
            if attempt is not None:
                self._attempts[name] = attempt
            await self._call("put_samples", sample_ids=meta.sample_ids, fields=group["fields_data"], tags=meta.tags)
            await self._seal(name, described(meta), start, end)
        self._append(name, start, group["target_step"], end, meta)
        self._committed.add(name)

    async def _is_there(self, name: str) -> bool:
        """Whether the service has this group, finished."""
        try:
            return not await self.pool.async_claim(1, name, timeout_s=0)
        except GroupEnded as error:
            raise InvalidInput(f"{error}: restore into a new service, or into another partition") from None
        except InvalidInput:
            return False

    async def _call(self, method: str, **arguments: Any) -> Any:
        """A call of the data plane's client for this partition."""
        function = getattr(self._dp_client, method)
        function = getattr(function, "remote", function)  # of a Ray actor
        found = function(partition_id=self.partition_id, **arguments)
        return await found if inspect.isawaitable(found) else found
