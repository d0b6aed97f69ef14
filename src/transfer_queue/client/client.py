"""The client object. Every method exists as `name` (blocks) and `async_name` (awaits); both run the same operation.

Every method returns or raises within its deadline (`client.timeout_s` of the configuration unless it takes its own) and
is safe to call from several threads and event loops at once. Besides what is listed, each may raise
`ServiceUnavailable` when the server is gone and `DeadlineExceeded` when it does not answer.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from transfer_queue.client.dense import Pad
from transfer_queue.client.describing import batch_meta
from transfer_queue.client.drivers import awaitable, blocking
from transfer_queue.client.effects import Call, Operation
from transfer_queue.client.operations import overview as looks
from transfer_queue.client.operations import rows as ops
from transfer_queue.client.operations import staleness, steps, update
from transfer_queue.client.operations.kv import kv_list
from transfer_queue.client.operations.tasks import take
from transfer_queue.client.remarks import warn
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.allocation import Allocation, Specs, allocate
from transfer_queue.client.transfer.write import checked_values
from transfer_queue.codec.slices import Slice
from transfer_queue.errors import AccessDenied, ConfigError, InvalidInput, ServiceUnavailable, UnsupportedValue
from transfer_queue.metadata import BatchMeta
from transfer_queue.trace.switch import start_as_told
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address
from transfer_queue.wire.server_info import ZMQServerInfo, addresses_of

Status = tuple[torch.Tensor, torch.Tensor] | tuple[None, None]
STORAGE_MANAGERS = ("SimpleStorage", "AsyncSimpleStorageManager")


class Operations:
    """The operations as generators; `TransferQueueClient` below runs them."""

    session: Session

    def get_meta(
        self,
        data_fields: list[str],
        batch_size: int | None = None,
        partition_id: str = "",
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
        timeout_s: float | None = None,
        lease_s: float | None = None,
        token_budget: int | None = None,
    ) -> Operation[BatchMeta]:
        """Rows of a partition, by one of three modes.

        "fetch": `batch_size` rows whose `data_fields` are all written and that `task_name` has not taken; they count as
        taken at once. Blocks until the sampler finds them, at most `timeout_s` (default: the configured one; 0 under
        `polling_mode`, where too few rows give an empty meta). "insert": reserves new rows, not ready. "force_fetch":
        every row of the partition with its readiness. Raises `DeadlineExceeded`, `UnknownMode`, `InvalidInput`.

        With `lease_s` the rows of a fetch are lent for that many seconds, and taken once `ack` says so; the meta's
        `lease` is the number of the lease. What is not acknowledged in time, or when this process ends, is offered
        again. Repeating a fetch that the sampler remembers gives the same rows on the same lease, renewed.

        With `dp_size`, `dp_rank` and `batch_index` in `sampling_config`, `batch_size` rows for each of `dp_size` ranks
        are dealt at once, and this rank gets its share; repeating the call gives the same rows (docs/concepts.md). A
        sampler of yours that takes `dp_size` itself gets it instead. `sampling_config` may hold `max_staleness` (a
        number of versions, or None) and `untagged` ("accept" or "refuse") beside what the sampler takes: rows that are
        older count as used by the task (docs/staleness.md); and `max_deliver`, how often the task has a row on a lease
        in vain before it is a dead letter (`nack`).

        `token_budget` instead of `batch_size`, for `StreamingTokenBudgetSampler`: rows of about so many tokens.
        """
        return ops.get_meta(
            self.session, ops.field_list(data_fields), batch_size, partition_id, mode, task_name, sampling_config,
            timeout_s, lease_s, token_budget,
        )  # fmt: skip

    def take(
        self,
        partition_id: str,
        data_fields: list[str],
        batch_size: int | None,
        task_name: str,
        lease_s: float | None = None,
        timeout_s: float | None = None,
        sampling_config: dict[str, Any] | None = None,
        dense: bool = False,
        pad: Pad | None = None,
        slices: Mapping[str, Slice] | None = None,
    ) -> Operation[tuple[BatchMeta, TensorDict]]:
        """(metadata, data) of `batch_size` ready rows: `get_meta` in mode "fetch" and `get_data` in one round trip.

        `batch_size` None: all rows, once as many are ready as `set_partition` said that there will be with these
        fields, or in all (cleared rows count); no sampler is asked. Waits, takes or lends, and raises as those two.
        When it raises, nothing was taken. `dense`, `pad` and `slices` as in `get_data`.
        """
        fields = ops.field_list(data_fields)
        ops.check_slices(slices, fields)
        return take(
            self.session, partition_id, fields, batch_size, task_name, lease_s, timeout_s, sampling_config, dense, pad,
            slices,
        )  # fmt: skip

    def ack(self, metadata: BatchMeta) -> Operation[int]:
        """The rows, all or some of a lease, are used: the task never gets them again. Repeating it changes nothing.

        Any process that has the metadata may do it. Rows cleared since are ignored. Returns how many rows of the lease
        are left. Raises `LeaseExpired` when it was over before (nothing changes), `InvalidInput` without a lease.
        """
        return (yield Call(m.Ack(self.session.next_rid(), *ops.leased(metadata))))[0].rows

    def renew(self, metadata: BatchMeta, lease_s: float) -> Operation[int]:
        """The lease of the rows lasts at least `lease_s` from now on. Returns and raises as `ack`."""
        lease, _, service_id = ops.leased(metadata)
        return (yield Call(m.Renew(self.session.next_rid(), lease, lease_s, service_id)))[0].rows

    def release(self, metadata: BatchMeta) -> Operation[int]:
        """The rows, all or some of a lease, go back at once: the task is offered them again. As `ack` otherwise."""
        return (yield Call(m.Release(self.session.next_rid(), *ops.leased(metadata))))[0].rows

    def nack(self, metadata: BatchMeta, delay_s: float = 0.0, reason: str = "") -> Operation[int]:
        """The rows, all or some of a lease, were tried in vain: the task is offered them again after `delay_s`.

        Counts as an attempt, as it does when a lease ends without an acknowledgement; `release` does not. Whoever gets
        the rows next finds number and `reason` (1024 characters at most) in `metadata.redelivered`. As many attempts as
        the task may have (`sampling_config["max_deliver"]`, else `controller.max_deliver`) make a row a dead letter: it
        counts as used by the task. Returns and raises as `ack`, and `InvalidInput` for a delay that is none.
        """
        lease, rows, service_id = ops.leased(metadata)
        if type(delay_s) not in (int, float) or not 0 <= delay_s < 1e9 or not isinstance(reason, str):
            raise InvalidInput(f"delay_s {delay_s!r}, reason {reason!r}: expected seconds from 0, and a text")
        told = reason.encode("utf-8", "replace").decode()
        request = m.Nack(self.session.next_rid(), lease, rows, float(delay_s), told, service_id)
        return (yield Call(request))[0].rows

    def list_dead_letters(self, partition_id: str, task_name: str) -> Operation[BatchMeta]:
        """The rows that a task tried as often as it may, with the fields that all of them have; `get_data` reads them.
        `redelivered` says why. Empty for a task that is not known; raises `UnknownRows` for such a partition."""
        reply = (yield Call(m.ListDeadLetters(self.session.next_rid(), partition_id, task_name)))[0]
        return batch_meta(self.session.service_id, reply, partition_id)

    def requeue_dead_letters(
        self, partition_id: str, task_name: str, metadata: BatchMeta | None = None
    ) -> Operation[int]:
        """The task's dead letters, or those among `metadata`, are offered to it again, as if it had never had them.

        Returns how many there were: rows that are none are ignored. Raises as `list_dead_letters`, and `DataLost` for
        rows of a service that has ended.
        """
        if metadata is not None and not isinstance(metadata, BatchMeta):
            raise InvalidInput(f"metadata is that of dead letters, got {metadata!r}")
        rows, service_id = (None, b"") if metadata is None else (metadata.indexes.tobytes(), metadata.service_id)
        request = m.Requeue(self.session.next_rid(), partition_id, task_name, rows, service_id)
        return (yield Call(request))[0].count

    def checkpoint(
        self,
        step: int,
        tasks: Sequence[str] = (),
        used: BatchMeta | Sequence[BatchMeta] = (),
        pools: Sequence[str] = (),
    ) -> Operation[None]:
        """What `tasks` used since their last mark is what they used for `step`: call it when what was learned up to
        there is saved, and once before the first step, for nothing is noted before.

        The rows of `used`, which are on lease, are acknowledged with it: `stream.meta` of the batch in hand, of which
        rows that were given back (`nack`, `release`) are left out. Other rows on lease belong to the next step. Atomic.
        `pools`: the partitions whose pools of groups are marked with them, as by `GroupPool.checkpoint`.
        With data-parallel ranks one of them calls it, once all have acknowledged theirs. `resume` goes back to a mark,
        `get_step` tells what was used. The last 1,024 are remembered as long as the service lives, unless
        `reset_consumption` begins anew or a step has more than 4 million rows. The newest may be marked again and then
        has all since. Raises `LeaseExpired` (nothing is marked then), `InvalidInput` for a step before the last.
        """
        return steps.checkpoint(self.session, step, tasks, used, pools)

    def resume(self, step: int, tasks: Sequence[str] = (), pools: Sequence[str] = ()) -> Operation[steps.Resumed]:
        """Go back to a mark: what `tasks` took since is handed to them once more, and so are the groups of `pools`, as
        by `GroupPool.resume`; all of it, or nothing.

        A loop without ranks gets the same batches in the same order, ranks with a `dp_size` the same shares of the same
        batches, beginning with the one that they ask for first. Rows count as fresh, however old they are
        (docs/staleness.md). To loops that ask for other sizes, and to ranks without a `dp_size`, the rows are offered
        like any others. What the tasks have on lease is taken from whoever holds it, so end the loop before. Later
        marks are gone: the loop goes on counting from `step`. Raises `InvalidInput` for a step that was not marked.
        """
        return steps.resume(self.session, step, tasks, pools)

    def get_step(self, task_name: str, step: int | None = None) -> Operation[list[BatchMeta]]:
        """The batches that a task used for a step, in order; None: those since its last mark, with those on lease.

        Rows that were cleared are left out. Raises `InvalidInput` for a step that was not marked, or is forgotten.
        """
        return steps.get_step(self.session, task_name, step)

    def list_steps(self, task_name: str) -> Operation[list[int]]:
        """The steps that a task has marks of, ascending. Raises `InvalidInput` for a task without."""
        return steps.list_steps(self.session, task_name)

    def put(
        self,
        data: ops.Batch,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: ops.Parser | None = None,
        strict_schema: bool | None = None,
        dedupe: bool | None = None,
    ) -> Operation[BatchMeta]:
        """Write all fields of `data` (a TensorDict or a mapping of columns) to new rows, or to those of `metadata`.

        Atomic per partition: the cells become visible together, with the tags changed on `metadata`, when this returns.
        `metadata` is updated and returned; with it, `partition_id` can only be that of its rows. `data_parser` is
        called here before anything is sent, with a dict of the columns: tensors as they are, nested tensors and stacks
        as lists of their rows. It returns one with the same fields and numbers of rows.
        `strict_schema`, `dedupe`: see `kv_put`. Waits for room. Raises `InvalidInput`, `UnsupportedValue`,
        `SchemaConflict` (where strict), `StorageKeyNotFoundError` (the rows were cleared), `StoreFull`; nothing is
        visible then.
        """
        return ops.put(self.session, data, metadata, partition_id, data_parser, strict_schema, dedupe)

    def update(
        self,
        metadata: BatchMeta,
        fields: list[str] | str,
        values: ops.Batch | None = None,
        parser: update.Parser | str | None = None,
    ) -> Operation[BatchMeta]:
        """Replace the cells of `fields` by `parser(old, new)`, row by row; `values` has a column for each of `fields`.

        Atomic per partition, also towards others who update the same cells: see `transfer_queue.kv_update`.
        """
        return update.update(self.session, metadata, fields, values, parser)

    def get_data(
        self,
        metadata: BatchMeta,
        copy: bool = False,
        out: Mapping[str, torch.Tensor] | None = None,
        device: torch.device | str | None = None,
        dense: bool = False,
        pad: Pad | None = None,
        slices: Mapping[str, Slice] | None = None,
    ) -> Operation[TensorDict]:
        """The fields and rows of `metadata`, in its order.

        Writable and isolated: nobody else sees what the caller writes into them. Zero-copy where the rows lie together,
        unless `copy`; in-place changes of large views are slower than of copies. `out`: dense tensors (rows, *row
        shape) to fill. `device`: where the result goes. `dense`: no nested tensors; `pad`: a number, a `Padding` or a
        mapping of them by field, which fills up rows of different length (see `to_dense`). `slices`: the part of each
        row to read, by field: a range of tokens, or one rank's part. No other bytes of these fields are copied, or sent
        over a network. Raises `NotReady`,
        `StorageKeyNotFoundError`, `SchemaConflict` for rows of several dtypes, `InvalidInput`.
        """
        return ops.get_data(self.session, metadata, copy, out, device, dense, pad, slices)

    def allocate(self, specs: Specs, timeout_s: float | None = None) -> Operation[Allocation]:
        """Uninitialised tensors in the store, to be filled and published without a copy.

        `specs` maps field names to (shape with the rows first, dtype, or its name as "float32"). Waits for room, then
        raises `StoreFull`.
        """
        return allocate(self.session, specs, timeout_s)

    def set_custom_meta(self, metadata: BatchMeta) -> Operation[None]:
        """Replace the tags of the rows by `metadata.custom_meta`."""
        return ops.set_tags(self.session, metadata, ops.checked_meta(metadata).custom_meta)

    def clear_samples(self, metadata: BatchMeta) -> Operation[None]:
        """Remove the rows; the partition stays. Rows that are gone already are ignored."""
        return ops.clear_samples(self.session, metadata)

    def clear_partition(self, partition_id: str) -> Operation[None]:
        """Remove the partition with all rows, tags and consumption; an unknown one is fine."""
        reply = (yield Call(m.Clear(self.session.next_rid(), partition_id, None, None)))[0]
        warn("clear_partition", reply.note)

    def get_consumption_status(self, task_name: str, partition_id: str) -> Operation[Status]:
        """(global indexes ascending, int8: 1 where `task_name` took the row); (None, None) for an unknown partition."""
        request = m.Consumption(self.session.next_rid(), partition_id, task_name)
        return ops.status((yield Call(request))[0])

    def get_production_status(self, data_fields: list[str], partition_id: str) -> Operation[Status]:
        """(global indexes, int8 (rows, fields): 1 where written); fields in the order they were first written.

        (None, None) when the partition or a field is unknown.
        """
        request = m.Production(self.session.next_rid(), partition_id, ops.field_list(data_fields))
        return ops.status((yield Call(request))[0], len(set(data_fields)))

    def check_consumption_status(self, task_name: str, partition_id: str) -> Operation[bool]:
        """Whether `task_name` took every row, and as many as the partition declares were there: cleared ones count."""
        return ops.is_done((yield Call(m.Consumption(self.session.next_rid(), partition_id, task_name)))[0])

    def check_production_status(self, data_fields: list[str], partition_id: str) -> Operation[bool]:
        """Whether every row has all `data_fields`, and as many as the partition declares were there: cleared ones
        count."""
        return ops.is_done(
            (yield Call(m.Production(self.session.next_rid(), partition_id, ops.field_list(data_fields))))[0]
        )

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> Operation[bool]:
        """Offer every row again to one task, or to all. True, also for an unknown partition."""
        reply = (yield Call(m.ResetConsumption(self.session.next_rid(), partition_id, task_name)))[0]
        warn("reset_consumption", reply.note)
        return True

    def get_partition_list(self) -> Operation[list[str]]:
        return (yield Call(m.ListPartitions(self.session.next_rid())))[0].names

    def set_partition(
        self,
        partition_id: str,
        size: int | None = None,
        metadata: dict[str, Any] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Operation[None]:
        """Declare how many rows a partition will have in all (`size`) and with some fields (`sizes`), and merge
        `metadata` into its own; creates it. Raises `InvalidInput` for a size below 0."""
        tags = checked_values({} if metadata is None else metadata, "metadata")
        if sizes is not None and not isinstance(sizes, Mapping):
            raise InvalidInput(f"sizes is a dict of a number of rows for each field, got {type(sizes).__qualname__}")
        request = m.SetPartition(self.session.next_rid(), partition_id, size, tags, dict(sizes or {}))
        reply = (yield Call(request))[0]
        warn("set_partition", reply.note)

    def get_partition(self, partition_id: str) -> Operation[dict[str, Any] | None]:
        """`{"size", "metadata", "rows"}` of a partition, None for an unknown one."""
        info = (yield Call(m.GetPartition(self.session.next_rid(), partition_id)))[0]
        return {"size": info.size, "metadata": info.metadata, "rows": info.rows} if info.known else None

    def overview(self, most: int = 256) -> Operation[m.ServiceOverview]:
        """The whole service at one instant: partitions, fields, tasks, who waits for what and what each lacks, leases,
        groups, series, sessions, and the figures of `stats`; of requests that wait and of leases at most `most` each.

        It changes nothing, and costs the server about 1 ms for a million rows. Raises `InvalidInput` for a bad `most`.
        """
        return looks.overview(self.session, most)

    def report_replicas(self, replicas: Iterable[m.ReplicaStatus]) -> Operation[None]:
        """Say which inference servers this process sends weights to and how they are (`Fleet.status()`), in place of
        what it said before; `Fleet(queue=client)` does it by itself. People see it in overviews. It lasts as long as
        this client is attached. Raises `InvalidInput` for more than 4096."""
        return looks.report_replicas(self.session, replicas)

    def partition_map(self, partition_id: str, max_runs: int = 1024) -> Operation[looks.PartitionMap | None]:
        """Which cells of a partition are there, and which rows each task has or had, in at most `max_runs` runs of
        rows; None for an unknown partition. It comes in slices of about 2 ms: rows that are written or cleared between
        two of them are in one or in the other. Raises `InvalidInput` for a bad `max_runs`."""
        return looks.partition_map(self.session, partition_id, max_runs)

    def inspect_row(
        self, partition_id: str, key: str | None = None, row: int | None = None
    ) -> Operation[m.RowInspected]:
        """What is known of one row, named by its key or by its global index: tags, fields, what it is to each task,
        the steps that used it, and what happened to it lately. Raises `UnknownRows`, `InvalidInput`."""
        return looks.inspect_row(self.session, partition_id, key, row)

    def kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> Operation[BatchMeta]:
        """Metadata of the rows of `keys`, in their order; unknown keys are created, or left out."""
        session = self.session
        request = m.Find(session.next_rid(), partition_id, ops.key_list(keys), create, session.timeout_s)
        reply = (yield Call(request, wait_s=session.timeout_s))[0]
        meta = batch_meta(session.service_id, reply, partition_id)
        if not reply.schema:
            meta.production_status = np.zeros(len(meta), np.int8)
        return meta

    def kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> Operation[list[str | None]]:
        """The keys of rows, None where a row has none. Raises `UnknownRows` for an unknown partition, `InvalidInput`
        for no rows."""
        indexes = ops.index_list(global_indexes)
        request = m.NameRows(self.session.next_rid(), partition_id, np.array(indexes, np.int64).tobytes())
        return (yield Call(request))[0].names

    def kv_list(self, partition_id: str | None = None) -> Operation[dict[str, dict[str, dict[str, Any]]]]:
        """`{partition: {key: tag}}` of one partition (`{}` when unknown), or of all."""
        return (yield from kv_list(self.session, partition_id))

    def set_weight_version(self, version: int, epoch: str = "") -> Operation[int]:
        """See `transfer_queue.set_weight_version`."""
        return staleness.set_weight_version(self.session, version, epoch)

    def admit(
        self,
        task_name: str,
        num_rows: int,
        max_staleness: int | None = None,
        rows_per_version: int | None = None,
        timeout_s: float | None = None,
    ) -> Operation[None]:
        """See `transfer_queue.admit`."""
        return staleness.admit(self.session, task_name, num_rows, max_staleness, rows_per_version, timeout_s)

    def give_back(self, task_name: str, num_rows: int) -> Operation[None]:
        """See `transfer_queue.give_back`."""
        return staleness.give_back(self.session, task_name, num_rows)

    def stats(self) -> Operation[dict[str, Any]]:
        """Counts and sizes of the service, among them `pid`, `rows`, `arena_nbytes_used` and `_resident`."""
        return (yield Call(m.Stats(self.session.next_rid())))[0].values


class TransferQueueClient:
    """One process's access to the service. Made by `transfer_queue.init`, and given by `get_client`.

    A program may also make one of its own, under any `client_id`, for the service that `controller_info` names: the
    result of `process_zmq_server_info(controller)`, or `controller.zmq_info` of the configuration that `init` returned.
    It is attached at once, to the first place that answers, and `close` detaches it. The other two arguments are
    TransferQueue's and have no effect. Raises `UnsupportedValue` (a TypeError) unless `controller_info` is a
    `ZMQServerInfo`, `InvalidInput` (a ValueError) for None or a number below 1, `ServiceUnavailable`, `AccessDenied`.

    Where the service was started anew, each call in flight raises `ServiceRestarted`, and the next ones work on what is
    there now. Metadata of the old one raises `DataLost`, its leases `LeaseExpired`.
    """

    def __init__(
        self,
        client_id: str,
        controller_info: ZMQServerInfo,
        zmq_io_threads: int | None = None,
        zmq_max_sockets: int | None = None,
    ) -> None:
        for name, number in (("zmq_io_threads", zmq_io_threads), ("zmq_max_sockets", zmq_max_sockets)):
            if number is not None and number < 1:
                raise InvalidInput(f"{name} must be at least 1, got {number}")
        self._attach(client_id, _session_with(controller_info))

    @classmethod
    def of(cls, session: Session) -> TransferQueueClient:
        """The client of a session that is there already; `close` closes it."""
        client = cls.__new__(cls)
        client._attach(f"TransferQueueClient_{os.getpid()}", session)
        return client

    def _attach(self, client_id: str, session: Session) -> None:
        self.client_id = client_id
        self._session = session
        start_as_told()
        self._renewing = threading.Lock()
        _clients.add(self)

    def initialize_storage_manager(self, manager_type: str, config: Mapping[str, Any]) -> None:
        """Does nothing: the service says where its storage is. `config` is not looked at.

        Raises `ConfigError` (a ValueError) for another store than SimpleStorage ("AsyncSimpleStorageManager").
        """
        if manager_type not in STORAGE_MANAGERS:
            raise ConfigError(f"manager_type: {manager_type!r} is not available; this release has {STORAGE_MANAGERS}")

    @property
    def address(self) -> Address:
        """Where the service is."""
        return self._session.address

    @property
    def session(self) -> Session:
        """The session with the service as it is known now. Raises `ServiceUnavailable` when it ended and nothing
        answers in its place."""
        if self._session.ended is not None and not self._session.closed:
            with self._renewing:
                if self._session.ended is not None and not self._session.closed:
                    self._session = self._session.successor()
        return self._session

    take, async_take = blocking(Operations.take), awaitable(Operations.take)
    get_meta, async_get_meta = blocking(Operations.get_meta), awaitable(Operations.get_meta)
    ack, async_ack = blocking(Operations.ack), awaitable(Operations.ack)
    renew, async_renew = blocking(Operations.renew), awaitable(Operations.renew)
    release, async_release = blocking(Operations.release), awaitable(Operations.release)
    nack, async_nack = blocking(Operations.nack), awaitable(Operations.nack)
    checkpoint, async_checkpoint = blocking(Operations.checkpoint), awaitable(Operations.checkpoint)
    resume, async_resume = blocking(Operations.resume), awaitable(Operations.resume)
    get_step, async_get_step = blocking(Operations.get_step), awaitable(Operations.get_step)
    list_steps, async_list_steps = blocking(Operations.list_steps), awaitable(Operations.list_steps)
    list_dead_letters = blocking(Operations.list_dead_letters)
    async_list_dead_letters = awaitable(Operations.list_dead_letters)
    requeue_dead_letters = blocking(Operations.requeue_dead_letters)
    async_requeue_dead_letters = awaitable(Operations.requeue_dead_letters)
    put, async_put = blocking(Operations.put), awaitable(Operations.put)
    update, async_update = blocking(Operations.update), awaitable(Operations.update)
    get_data, async_get_data = blocking(Operations.get_data), awaitable(Operations.get_data)
    allocate, async_allocate = blocking(Operations.allocate), awaitable(Operations.allocate)
    set_custom_meta, async_set_custom_meta = blocking(Operations.set_custom_meta), awaitable(Operations.set_custom_meta)
    clear_samples, async_clear_samples = blocking(Operations.clear_samples), awaitable(Operations.clear_samples)
    clear_partition, async_clear_partition = blocking(Operations.clear_partition), awaitable(Operations.clear_partition)
    get_consumption_status = blocking(Operations.get_consumption_status)
    async_get_consumption_status = awaitable(Operations.get_consumption_status)
    get_production_status = blocking(Operations.get_production_status)
    async_get_production_status = awaitable(Operations.get_production_status)
    check_consumption_status = blocking(Operations.check_consumption_status)
    async_check_consumption_status = awaitable(Operations.check_consumption_status)
    check_production_status = blocking(Operations.check_production_status)
    async_check_production_status = awaitable(Operations.check_production_status)
    reset_consumption, async_reset_consumption = (
        blocking(Operations.reset_consumption),
        awaitable(Operations.reset_consumption),
    )
    get_partition_list, async_get_partition_list = (
        blocking(Operations.get_partition_list),
        awaitable(Operations.get_partition_list),
    )
    set_partition, async_set_partition = blocking(Operations.set_partition), awaitable(Operations.set_partition)
    get_partition, async_get_partition = blocking(Operations.get_partition), awaitable(Operations.get_partition)
    report_replicas, async_report_replicas = blocking(Operations.report_replicas), awaitable(Operations.report_replicas)
    overview, async_overview = blocking(Operations.overview), awaitable(Operations.overview)
    partition_map, async_partition_map = blocking(Operations.partition_map), awaitable(Operations.partition_map)
    inspect_row, async_inspect_row = blocking(Operations.inspect_row), awaitable(Operations.inspect_row)
    kv_retrieve_meta, async_kv_retrieve_meta = (
        blocking(Operations.kv_retrieve_meta),
        awaitable(Operations.kv_retrieve_meta),
    )
    kv_retrieve_keys, async_kv_retrieve_keys = (
        blocking(Operations.kv_retrieve_keys),
        awaitable(Operations.kv_retrieve_keys),
    )
    kv_list, async_kv_list = blocking(Operations.kv_list), awaitable(Operations.kv_list)
    set_weight_version = blocking(Operations.set_weight_version)
    async_set_weight_version = awaitable(Operations.set_weight_version)
    admit, async_admit = blocking(Operations.admit), awaitable(Operations.admit)
    give_back, async_give_back = blocking(Operations.give_back), awaitable(Operations.give_back)
    stats, async_stats = blocking(Operations.stats), awaitable(Operations.stats)

    def close(self) -> None:
        """Detach from the service. Tensors that were read stay valid."""
        self._session.close()

    def __enter__(self) -> TransferQueueClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<TransferQueueClient of {self._session.address}{', closed' if self._session.closed else ''}>"


_clients: weakref.WeakSet[TransferQueueClient] = weakref.WeakSet()


def _start_over() -> None:
    """In a forked child nobody attaches anew, whichever thread of the parent did and is not here."""
    for client in list(_clients):
        client._renewing = threading.Lock()


os.register_at_fork(after_in_child=_start_over)


def _session_with(info: ZMQServerInfo) -> Session:
    """A session at the first place of `info` that answers; this process pickles or not as TQ_ALLOW_PICKLE says."""
    if info is None:
        raise InvalidInput("controller_info cannot be None")
    if not isinstance(info, ZMQServerInfo):
        raise UnsupportedValue(f"controller_info must be a ZMQServerInfo, got {type(info).__qualname__}")
    *nearer, last = addresses_of(info)
    for address in nearer:
        try:
            session = Session(address)
        except (ServiceUnavailable, AccessDenied):  # its node's server may run as another user
            continue
        break
    else:
        session = Session(last)
    session.allow_pickle = os.environ.get("TQ_ALLOW_PICKLE") == "1"
    return session


AsyncTransferQueueClient = TransferQueueClient
