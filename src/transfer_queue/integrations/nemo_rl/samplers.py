"""NeMo-RL's four policies, decided by the service. `async_rl.sampler: {name: custom, target: "module:Class", ...}`.

`admit` waits in the service until the trainer's version lets the next batch begin. `select` does not wait, as NeMo-RL
wants it, unless `patience_s` says so; `wait_for_groups` does.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

import transfer_queue as tq
from transfer_queue.client.groups import GroupPool, GroupTicket
from transfer_queue.errors import DeadlineExceeded, InvalidInput
from transfer_queue.groups import GroupPolicy
from transfer_queue.integrations.nemo_rl.buffer import MAX_GROUPS, TQReplayBuffer

log = logging.getLogger("transfer_queue")

REMARK_S = 60.0  # a batch that waits for the trainer says so this often
ADMISSION = "{}/admission"  # the partition whose pool has a ticket for each batch; it has no rows


class PoolSampler(ABC):
    """A policy over the pool of a buffer, with a `window` of versions. `patience_s`: how long `select` waits for enough
    groups, in the service.

    The pool is opened when somebody needs it first: `set_dispatch_index` and `required_buffer_capacity` come before.
    Raises `InvalidInput` (a ValueError) for numbers that mean nothing, and for another buffer than ours.
    """

    supports_buffer_checkpoint: ClassVar[bool] = False  # of the form that NeMo-RL has had since autumn 2026
    stamps: ClassVar[bool] = False  # whether each group is for one step
    gated: ClassVar[bool] = True

    def __init__(self, buffer: TQReplayBuffer, window: int, patience_s: float) -> None:
        if not isinstance(buffer, TQReplayBuffer):
            raise InvalidInput(f"{type(self).__name__} needs the TQReplayBuffer of transfer_queue: see `install`")
        if type(window) is not int or window < 0 or not patience_s >= 0:
            raise InvalidInput(f"{window!r} versions, {patience_s!r} s of patience: expected 0 or more of each")
        self._buffer = buffer
        self._window = window
        self._patience_s = patience_s
        self._groups_per_step: int | None = None
        self._first: int | None = None  # the version that this run begins with
        self._last = -1  # the batch that was admitted last
        self._told = -1  # the newest version that the pools were told
        self._is_open = False
        self._admission: GroupPool | None = None
        self._tickets: list[GroupTicket] = []
        buffer.follow(self._open, stamps=self.stamps)

    @abstractmethod
    def policy(self) -> GroupPolicy:
        """Of the pool. Raises `InvalidInput` where something is not known that it needs."""

    def _open(self) -> GroupPool:
        """The buffer's pool, and that of admission. Raises `InvalidInput` where the trainer of this pool was further
        than where this run begins."""
        policy = msgspec.structs.replace(self.policy(), max_attempts=1)  # NeMo-RL tries again with another group
        pool = tq.group_pool(self._buffer.partition_id, policy, self._first)
        version = pool.status()["version"]
        if self._first is not None and version > self._first:
            raise InvalidInput(f"{pool} is at version {version}: a run from {self._first} on needs another partition")
        if self.gated:
            gate = GroupPolicy.in_order(self._window, 1)
            self._admission = tq.group_pool(ADMISSION.format(self._buffer.partition_id), gate, version)
        if self._first is not None:
            _give_up_idle(pool)
        self._is_open = True
        return pool

    async def _tell(self, version: int) -> None:
        """The trainer has this version: the pools judge by it, and who waits for it goes on."""
        pool = self._buffer.pool
        if version > self._told:
            await pool.async_advance(version)
            if self._admission is not None:
                await self._admission.async_advance(version)
            self._told = version

    # the side of rollouts

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> int | None:
        """Waits until the next batch of prompts may begin; the step that it is for, where each group is for one.

        The trainer's version lets it in when the service is told: by `select` and `evict`, by `set_weight_version`, or
        by the next look at `trainer_version_fn`, once a minute.
        """
        if not self.gated:
            return None
        await self._tell(trainer_version_fn())
        ticket = await self._ticket(trainer_version_fn)
        assert ticket.target is not None
        self._last = ticket.target
        return ticket.target if self.stamps else None

    async def _ticket(self, trainer_version_fn: Callable[[], int]) -> GroupTicket:
        """The permission for the next batch. Those of steps that have passed go back."""
        assert self._admission is not None
        while True:
            try:
                (ticket,) = await self._admission.async_tickets(1, timeout_s=REMARK_S)
                break
            except DeadlineExceeded as error:
                log.info("the next batch of prompts waits for the trainer: %s", error)
                await self._tell(trainer_version_fn())
        passed = [one for one in self._tickets if (one.target or 0) < self._told]
        self._tickets = [one for one in self._tickets if one not in passed] + [ticket]
        if passed:
            await self._admission.async_return_tickets(passed)
        return ticket

    @property
    def dispatch_index(self) -> int:
        """The batch that was admitted last."""
        return self._last

    def set_dispatch_index(self, resume_from_step: int) -> None:
        """The run begins with this step. Raises `InvalidInput` (a ValueError) for a negative one, and where groups were
        reserved or admitted before."""
        if resume_from_step < 0 or self._is_open:
            raise InvalidInput(f"a run from step {resume_from_step} on: say so first, with a step of 0 or more")
        self._first, self._last = resume_from_step, resume_from_step - 1

    def restore_dispatch_index(self, dispatch_index: int) -> None:
        """This batch was admitted last. Raises as `set_dispatch_index`."""
        self.set_dispatch_index(dispatch_index + 1)

    # the side of the trainer

    async def select(
        self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int
    ) -> tuple[Any, int]:
        """The metadata of whole groups that the policy serves at this version, as one, and how many groups they are;
        (None, 0) where there are fewer than `min_prompt_groups`. What it gives is the caller's: no `evict` counts it.

        Raises `InvalidInput` (a ValueError) for numbers that mean nothing.
        """
        if not 1 <= min_prompt_groups <= max_prompt_groups:
            raise InvalidInput(f"{min_prompt_groups} to {max_prompt_groups} groups: expected 1 or more")
        await self._tell(current_train_weight)
        return await self._buffer.take(min_prompt_groups, max_prompt_groups, current_train_weight, self._patience_s)

    async def wait_for_groups(
        self, min_groups: int, *, current_train_weight: int | None = None, timeout_s: float | None = None
    ) -> int:
        """How many groups `select` would find now. Waits in the service until there are `min_groups`, at most
        `timeout_s` seconds (default: the configured ones). Raises `DeadlineExceeded`."""
        if current_train_weight is not None:
            await self._tell(current_train_weight)
        return await self._buffer.pool.async_wait(min_groups, timeout_s=timeout_s)

    async def evict(self, *, current_train_weight: int) -> int:
        """How many finished groups of the buffer can never be selected any more. Their rows are cleared. Unfinished
        ones stay, and are judged when they are finished."""
        await self._tell(current_train_weight)
        return await self._buffer.drop_ended()

    def should_abort_inflight(self, *, start_weight_version: int, current_train_weight: int) -> bool:
        """Whether an unfinished group can never be selected any more."""
        return False

    @property
    def is_on_policy(self) -> bool:
        """Whether every group is of the trainer's own version."""
        return self._window == 0

    def required_buffer_capacity(self, groups_per_step: int) -> int | None:
        """How many groups a buffer has room for at least; None: any number. NeMo-RL says here how many groups a step
        has. Raises `InvalidInput` for none."""
        if groups_per_step < 1:
            raise InvalidInput(f"{groups_per_step} groups for each step: expected 1 or more")
        self._groups_per_step = groups_per_step
        return groups_per_step * (self._window + 1) if self.gated else None


def _give_up_idle(pool: GroupPool) -> None:
    """A run that begins has no use for what nobody works on: NeMo-RL never takes up a group of an earlier process."""
    try:
        pool.fail(pool.claim(MAX_GROUPS, timeout_s=0))
    except DeadlineExceeded:
        return


class WindowedSampler(PoolSampler):
    """Finished groups that are at most `max_staleness_versions` old, in order of arrival, or the freshest first."""

    gated: ClassVar[bool] = False

    def __init__(
        self,
        buffer: TQReplayBuffer,
        *,
        max_staleness_versions: int,
        sample_freshest_first: bool = False,
        patience_s: float = 0.0,
    ) -> None:
        super().__init__(buffer, max_staleness_versions, patience_s)
        self._freshest_first = sample_freshest_first

    def policy(self) -> GroupPolicy:
        policy = GroupPolicy.windowed(self._window, freshest_first=self._freshest_first)
        return msgspec.structs.replace(policy, aborts=False)  # NeMo-RL aborts rollouts itself

    def should_abort_inflight(self, *, start_weight_version: int, current_train_weight: int) -> bool:
        return start_weight_version < current_train_weight - self._window


class ReadyFirstSampler(PoolSampler):
    """Whatever is finished, in order of arrival; batches begin at most `max_staleness_versions` ahead."""

    def __init__(self, buffer: TQReplayBuffer, *, max_staleness_versions: int, patience_s: float = 0.0) -> None:
        super().__init__(buffer, max_staleness_versions, patience_s)

    def policy(self) -> GroupPolicy:
        return GroupPolicy()


class WeightFifoSampler(PoolSampler):
    """The oldest weights within the window first, all groups of them before any of the next."""

    def __init__(self, buffer: TQReplayBuffer, *, max_staleness_versions: int, patience_s: float = 0.0) -> None:
        super().__init__(buffer, max_staleness_versions, patience_s)

    def policy(self) -> GroupPolicy:
        return GroupPolicy(serve="cohort", window=self._window, stale="evict")


class InOrderSampler(PoolSampler):
    """Each batch is for one step, at most `max_lookahead_versions` ahead, and only that step gets it.

    `groups_per_step`: how many groups a step has; by default what `required_buffer_capacity` was asked for.
    """

    stamps: ClassVar[bool] = True

    def __init__(
        self,
        buffer: TQReplayBuffer,
        *,
        max_lookahead_versions: int,
        groups_per_step: int | None = None,
        patience_s: float = 0.0,
    ) -> None:
        super().__init__(buffer, max_lookahead_versions, patience_s)
        if groups_per_step is not None:
            self.required_buffer_capacity(groups_per_step)

    def policy(self) -> GroupPolicy:
        if self._groups_per_step is None:
            raise InvalidInput("in_order needs to know `groups_per_step`: the prompts of a step")
        return GroupPolicy.in_order(self._window, self._groups_per_step)
