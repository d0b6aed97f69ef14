"""`TransferQueueBridge`, as vime's driver, rollout manager and Megatron ranks call it."""

from __future__ import annotations

import importlib
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import transfer_queue as tq
from transfer_queue.arguments import instance
from transfer_queue.bridge import Fetched, RolloutBridge, Schedule
from transfer_queue.bridge.ranks import fetch_together
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.drivers import run
from transfer_queue.client.operations.partitions import open_partition
from transfer_queue.errors import DeadlineExceeded, InvalidInput, LeaseExpired
from transfer_queue.integrations.vime.fields import (
    SCHEDULE,
    SCHEMA,
    WHOLE,
    as_rollout_batch,
    default_fields,
    normalized,
)
from transfer_queue.integrations.vime.schedule import made_schedule, parallel_config
from transfer_queue.metadata import BatchMeta

log = logging.getLogger("transfer_queue")

TRAIN_PARTITION_PREFIX = "train_"
ACTOR_TRAIN_TASK = "actor_train"
CRITIC_TRAIN_TASK = "critic_train"
CRITIC_VALUE_FIELDS = ["values"]
SERIES = "train"
LEASE_S = 86400.0  # longer than anybody trains on one rollout: what ends a lease is the end of its rank
REMARK_S = 60.0  # a rollout that waits for room says so this often


class TransferQueueBridge:
    """The way of rollout data from vime's rollout manager to its Megatron ranks. Made by `connect`.

    With `enable_vime_transfer_queue` off nothing is done, and `client` is None.
    """

    def __init__(self, args: Namespace, client: TransferQueueClient | None = None) -> None:
        self.args = args
        self.client = client
        self._leased: dict[str, tuple[int, BatchMeta]] = {}  # by task: the rollout that this rank trains on

    # the run

    @classmethod
    def enabled(cls, args: Namespace) -> bool:
        return bool(getattr(args, "enable_vime_transfer_queue", False))

    @classmethod
    def initialize(cls, args: Namespace) -> None:
        """In the driver, before actors start: start the service or find it, and keep in `args.tq_config` what they
        attach with."""
        if not cls.enabled(args):
            args.tq_config = None
            return
        os.environ.update(cls.env_vars(args))
        storage = {"num_data_storage_units": args.num_data_storage_units}  # no bound on rows: a sample may be several
        conf = {"backend": {"SimpleStorage": storage}}
        args.tq_config = tq.init(conf) or conf

    @classmethod
    def env_vars(cls, args: Namespace) -> dict[str, str]:
        """What vime puts into the environment of its actors."""
        if not cls.enabled(args):
            return {}
        rows = args.rollout_batch_size * args.n_samples_per_prompt
        return {"TQ_PRE_ALLOC_SAMPLE_NUM": str(rows), "TQ_ZERO_COPY_SERIALIZATION": "true"}

    @classmethod
    def connect(cls, args: Namespace) -> TransferQueueBridge:
        """In an actor. Raises `InvalidInput` (a ValueError) where `initialize` was not called before."""
        if not cls.enabled(args):
            return cls(args)
        if getattr(args, "tq_config", None) is None:
            raise InvalidInput(
                "args.tq_config is missing: TransferQueueBridge.initialize(args) runs before actors start"
            )
        tq.init(args.tq_config)
        return cls(args, tq.get_client())

    def close(self) -> None:
        if self.enabled(self.args):
            tq.close()

    @classmethod
    def data_parallel_size(cls, args: Namespace) -> int:
        """Of Megatron, before it is initialised. Raises `InvalidInput` for ranks that do not divide."""
        world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        model_size = 1
        for name in names:
            model_size *= int(getattr(args, name, 1))
        if model_size < 1 or world_size % model_size:
            raise InvalidInput(f"{world_size} ranks are not divisible by model parallel groups of {model_size}")
        return int(world_size // model_size)

    @staticmethod
    def partition_id(rollout_id: int) -> str:
        return f"{TRAIN_PARTITION_PREFIX}{rollout_id}"

    # columns

    @classmethod
    def normalize_train_data(cls, train_data: dict[str, Any]) -> dict[str, Any]:
        """With `total_lengths`, and defaults for `raw_reward`, `truncated` and `sample_indices`. Raises `InvalidInput`
        (a ValueError) where a required column is missing."""
        return normalized(train_data)

    @classmethod
    def default_train_data_fields(cls, args: Namespace) -> list[str]:
        return default_fields(args)

    @classmethod
    def critic_values_via_transfer_queue(cls, args: Namespace) -> bool:
        """Whether the actor gets the critic's values this way, and not as an object of Ray."""
        is_whole = int(getattr(args, "context_parallel_size", 1)) == 1
        return cls.enabled(args) and bool(getattr(args, "use_critic", False)) and is_whole

    @classmethod
    def actor_train_data_fields(cls, args: Namespace) -> list[str]:
        fields = default_fields(args)
        values = CRITIC_VALUE_FIELDS if cls.critic_values_via_transfer_queue(args) else []
        return list(dict.fromkeys([*fields, *values]))

    # a rollout

    def wait_for_staleness(self, rollout_id: int) -> None:
        """Open the rollout's partition, once at most `max_staleness` earlier ones are not cleared. It waits in the
        service; a rollout that waits for long says so in the log."""
        client = self._connected()
        partition = self.partition_id(rollout_id)
        while True:
            try:
                opening = open_partition(client.session, partition, SERIES, self.args.max_staleness, timeout_s=REMARK_S)
                return run(client.session, opening)
            except DeadlineExceeded as error:
                log.info("rollout %s waits for earlier ones to be cleared: %s", rollout_id, error)

    def transfer_rollout_data(
        self,
        rollout_id: int,
        train_data: dict[str, Any],
        *,
        schedule: Schedule | None = None,
        train_parallel_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Write one rollout. Waits as `wait_for_staleness`; checks everything before.

        Which rank trains on which rows, and in which micro-batches, says `schedule`; or the framework's
        `build_dp_schedule` with `train_parallel_config`, which its rollout manager has (default: by the flags of the
        run). Raises `InvalidInput` and `SchemaViolation` (ValueErrors), `NotSupported` where there is no such function.
        """
        client = self._connected()
        columns = normalized(train_data)
        if schedule is None:
            config = train_parallel_config or parallel_config(self.args, self.data_parallel_size(self.args))
            schedule = made_schedule(self.args, columns, config)
        schedule = instance(schedule, Schedule, "schedule")
        bridge = RolloutBridge(client, SCHEMA)
        whole = {told: list(columns[name]) for name, told in WHOLE.items()}
        ready = bridge.prepare(columns, schedule=replace(schedule, extra={**schedule.extra, **whole}))
        self.wait_for_staleness(rollout_id)
        bridge.put(self.partition_id(rollout_id), ready)

    def get_data(
        self,
        rollout_id: int,
        *,
        task_name: str,
        data_fields: list[str] | None = None,
        lease_s: float = LEASE_S,
        timeout_s: float | None = None,
    ) -> tuple[dict[str, Any], BatchMeta] | tuple[None, None]:
        """The rows of this rank as vime's actors take them, with the schedule, and their metadata for `put_data`.

        All ranks call it; one of each model-parallel group fetches, and the others receive. Blocks until all columns
        are written, those of `data_fields` that others derive as well; every other column that the rollout had
        comes with them, of objects those that vime forwards (`fields.FORWARDED`). (None, None) where that took longer
        than `timeout_s` (default: the session's); the log says what is missing. `raw_reward` is that of all rows, as
        vime has it, and `seq_lens` are the lengths of all of them, which vime's `Timer().seq_lens` takes.

        The rows are on a lease until the task's next rollout is asked for: a rank that is started again, or that asks
        for the same rollout again, gets them once more. With `lease_s=0` they are taken at once.
        """
        mpu = importlib.import_module("megatron.core.parallel_state")
        bridge = _EndingBridge(self._connected(), partial(self._end_lease, rollout_id, task_name))
        groups = [mpu.get_context_parallel_group(), mpu.get_tensor_model_parallel_group()]
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            groups.append(mpu.get_pipeline_model_parallel_group())
        try:
            fetched = fetch_together(
                bridge,
                groups,
                self.partition_id(rollout_id),
                task_name,
                mpu.get_data_parallel_rank(with_context_parallel=False),
                mpu.get_data_parallel_world_size(with_context_parallel=False),
                columns=data_fields,
                others=True,
                lease_s=lease_s,
                timeout_s=timeout_s,
            )
        except DeadlineExceeded as error:
            log.warning("rollout %s: %s", rollout_id, error)
            return None, None
        if fetched.meta.lease:
            self._leased[task_name] = rollout_id, fetched.meta
        batch = as_rollout_batch(fetched.columns, data_fields or ())
        batch |= {name: fetched.schedule[name] for name in SCHEDULE if fetched.schedule.get(name) is not None}
        return batch, fetched.meta

    def put_data(
        self, rollout_id: int, data: dict[str, Any], *, data_fields: list[str], batch_meta: BatchMeta | None = None
    ) -> None:
        """Write columns that a rank derived, for its rows `batch_meta`; ranks that wait for them get them.

        One rank of each model-parallel group calls it. Raises `InvalidInput` (a ValueError), `SchemaViolation`.
        """
        if not self.enabled(self.args) or self.client is None:
            return
        missing = [name for name in data_fields if name not in data]
        if missing or batch_meta is None:
            raise InvalidInput(
                f"rollout {rollout_id}: put_data needs batch_meta of get_data, and lacks fields {missing}"
            )
        RolloutBridge(self.client, SCHEMA).write_back(batch_meta, {name: data[name] for name in data_fields})

    def clear_partition(self, rollout_id: int) -> None:
        """The rollout is over; the next one may begin."""
        if self.enabled(self.args) and self.client is not None:
            self.client.clear_partition(self.partition_id(rollout_id))

    def _end_lease(self, rollout_id: int, task_name: str) -> None:
        """What the task had before was used, or is wanted again."""
        before, meta = self._leased.get(task_name, (rollout_id, None))
        if meta is None:
            return
        with suppress(LeaseExpired):  # it lasted too long, or the service is another one: there is nothing to end
            if before == rollout_id:
                self._connected().release(meta)
            else:
                self._connected().ack(meta)
        del self._leased[task_name]

    def _connected(self) -> TransferQueueClient:
        if self.client is None:
            raise InvalidInput("TransferQueueBridge.connect(args) makes a bridge that is connected")
        return self.client


class _EndingBridge(RolloutBridge):
    """Ends the lease on what its rank had before as a part of the fetch: where that fails, the other ranks of its
    group, which wait for what it fetches, hear of it as of any other fault."""

    def __init__(self, client: TransferQueueClient, end_lease: Callable[[], None]) -> None:
        super().__init__(client, SCHEMA)
        self._end_lease = end_lease

    def fetch_stored(self, *args: Any, **more: Any) -> Fetched:
        """As in `RolloutBridge`."""
        self._end_lease()
        return super().fetch_stored(*args, **more)
