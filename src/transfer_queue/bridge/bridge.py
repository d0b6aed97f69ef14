"""A step's rollout batch to data-parallel ranks, and back what they derive from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from transfer_queue.arguments import instance, items, mapping
from transfer_queue.bridge.conversion import FORMS, Form, checked_batch, read_columns, stored_columns, taken_columns
from transfer_queue.bridge.schedule import COLUMNS, Schedule
from transfer_queue.bridge.schema import MARKER, RolloutSchema
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.describing import batch_meta
from transfer_queue.client.drivers import given_back, run
from transfer_queue.client.effects import Call, Operation, Together
from transfer_queue.client.operations import rows as ops
from transfer_queue.client.operations.tasks import take
from transfer_queue.client.recording import noting
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.write import TargetRows, commit, store
from transfer_queue.codec.plan import plan_objects
from transfer_queue.codec.slices import Slice
from transfer_queue.errors import DeadlineExceeded, InvalidInput, SchemaViolation
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler.base import whole_number
from transfer_queue.wire import messages as m

DP_SIZE = "dp_size"  # in the metadata of a step


class Prepared(NamedTuple):
    """A batch that was checked and converted, and has yet to be put."""

    columns: dict[str, Any]
    schedule: Schedule

    @property
    def rows(self) -> int:
        return sum(map(len, self.schedule.partitions))


@dataclass
class Fetched:
    """What a rank got: its rows in the order of the schedule, `columns` in the form asked for, and what `schedule` says
    to it (`Schedule.of_rank`, and the names of the `columns` that the batch had)."""

    meta: BatchMeta
    columns: dict[str, Any]
    schedule: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.meta)

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]


class RolloutBridge:
    """Batches of rollouts as frameworks make them, to data-parallel ranks. A step is a partition; see the package.

    `schema` says what the columns are; writers and ranks have the same. `dedupe`: cells of 64 KiB and more that are the
    same, as images of one prompt, are stored once in a step (see `kv_put`).
    """

    def __init__(self, client: TransferQueueClient, schema: RolloutSchema, *, dedupe: bool = False) -> None:
        self.client = client
        self.schema = schema
        self.dedupe = dedupe

    def prepare(
        self, batch: Mapping[str, Any], *, dp_size: int | None = None, schedule: Schedule | None = None
    ) -> Prepared:
        """What `put` does before it stores anything: for those who wait in between. Raises as it does."""
        batch = taken_columns(mapping(batch, "batch"))
        rows = checked_batch(batch, self.schema)
        if schedule is None:
            plan = Schedule.even(rows, 1 if dp_size is None else dp_size)
        else:
            plan = instance(schedule, Schedule, "schedule")
        plan.check(rows)
        _check_told(plan, dp_size)
        order = [row for part in plan.partitions for row in part]
        return Prepared(stored_columns(batch, self.schema, order), plan)

    def put(
        self,
        partition_id: str,
        batch: Mapping[str, Any] | Prepared,
        *,
        dp_size: int | None = None,
        schedule: Schedule | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> list[BatchMeta]:
        """Store a step: the rows of `batch`, columns by name, dealt to ranks as `schedule` says, or evenly to `dp_size`
        of them (default: 1); or what `prepare` made of one, which has its schedule. Returns the metadata of each rank's
        rows. `metadata`: of the partition (`set_partition`); `dp_size` in it is the bridge's.

        A column is a list, tensor or array with one item for each row; a list of arrays becomes one ragged column. All
        is converted and checked before a row is stored, and all ranks get theirs in one step of the service, as it
        ends; a writer that is killed before leaves nothing to any. Of several that put one step at once, one does.
        Waits for room. Raises `SchemaViolation` (a ValueError), which names row and field, `InvalidInput` for a
        schedule that is none, arguments that say another one, and a step that is there already, `StoreFull`; no row of
        this call is there then, though the partition may be, with the size and `metadata` that were told.
        """
        if not isinstance(metadata, (Mapping, NoneType)):
            raise InvalidInput(f"metadata: expected a dict or None, got {type(metadata).__qualname__}")
        if DP_SIZE in (metadata or {}):
            raise InvalidInput(f"metadata: {DP_SIZE!r} is what the bridge says itself")
        if isinstance(batch, Prepared) and schedule is not None:
            raise InvalidInput("a batch that was prepared has its schedule: give this one to `prepare`")
        ready = batch if isinstance(batch, Prepared) else self.prepare(batch, dp_size=dp_size, schedule=schedule)
        plan = ready.schedule
        _check_told(plan, dp_size)
        sizes = {MARKER.format(rank, plan.dp_size): len(part) for rank, part in enumerate(plan.partitions)}
        ends = [0, *itertools.accumulate(map(len, plan.partitions))]
        session = self.client.session
        session.hold()
        with given_back(session) as given:
            fields, wait_s = list(ready.columns), session.timeout_s
            request = m.Insert(session.next_rid(), partition_id, ready.rows, fields, wait_s, alone=True)
            claim = Call(request, wait_s=wait_s)
            given.append(claim)
            meta = batch_meta(session.service_id, session.call(claim)[0], partition_id, fields)
            self.client.set_partition(partition_id, ready.rows, {**(metadata or {}), DP_SIZE: plan.dp_size}, sizes)
            parts = [meta[first:end] for first, end in itertools.pairwise(ends)]
            markers = [_marker(ready, rank) for rank in range(plan.dp_size)]
            run(session, _put_markers(session, parts, markers))
            self.client.put(ready.columns, metadata=meta, dedupe=self.dedupe)  # all ranks get theirs now
            session.notify(session.confirmation(request.rid))
        return [meta[first:end] for first, end in itertools.pairwise(ends)]

    def fetch(
        self,
        partition_id: str,
        task: str,
        dp_rank: int = 0,
        dp_size: int = 1,
        *,
        columns: Iterable[str] | None = None,
        others: bool | None = None,
        form: Form = "tensors",
        slices: Mapping[str, Slice] | None = None,
        lease_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Fetched:
        """The rows of rank `dp_rank` of `dp_size`, once all have the columns: one round trip on the writer's host.

        `columns`: names to wait for, also those that others derive and write back; without, those that no batch lacks.
        `others`: also all other columns that the batch had, which is one round trip more where there are any (default:
        without `columns`). `form` of the values: "tensors", "arrays" or
        "lists"; rows of a column share memory, and whoever writes into them changes nobody else's. `slices`: the part
        of each row to read, by column. `task` has the rows then, or has them on a lease until `ack`. Each task gets
        each row once. Waits `timeout_s` (default: the session's), then raises `DeadlineExceeded`, which says what is
        missing. Raises `InvalidInput` for unknown columns, slices of what is not read and a batch that was dealt to
        another number of ranks, and `SchemaViolation` where the writer had another schema, whose numbers this one's
        dtypes have not all of. Nothing was taken then.
        """
        if form not in FORMS:
            raise InvalidInput(f"form {form!r}: expected one of {list(FORMS)}")

        def convert(fetched: Fetched, content: dict[str, Any]) -> None:
            fetched.columns = read_columns(content, self.schema, form)

        return self.fetch_stored(
            partition_id, task, dp_rank, dp_size, convert, columns=columns, others=others, slices=slices,
            lease_s=lease_s, timeout_s=timeout_s,
        )  # fmt: skip

    def fetch_stored(
        self,
        partition_id: str,
        task: str,
        dp_rank: int,
        dp_size: int,
        convert: Callable[[Fetched, dict[str, Any]], None],
        *,
        columns: Iterable[str] | None = None,
        others: bool | None = None,
        slices: Mapping[str, Slice] | None = None,
        lease_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Fetched:
        """As `fetch`. `convert` gets the columns as they are stored; where it raises, nothing was taken."""
        names = self.schema.required() if columns is None else list(self.schema.part(items(columns, "columns")))
        ops.check_slices(slices, None)
        dp_rank, dp_size = whole_number(dp_rank, "dp_rank"), whole_number(dp_size, "dp_size")
        if not 0 <= dp_rank < dp_size:
            raise InvalidInput(f"dp_rank {dp_rank} of dp_size {dp_size}: ranks are numbered from 0")
        session, marker = self.client.session, MARKER.format(dp_rank, dp_size)

        def fetching() -> Operation[Fetched]:
            meta, data = yield from take(
                session, partition_id, [*names, marker], None, task, lease_s, timeout_s, None, False, None, slices
            )
            content: dict[str, Any] = {name: data.get(name) for name in names}
            fetched = Fetched(meta, {}, data.get(marker).tolist()[0])
            if columns is None if others is None else others:
                rest = [name for name in fetched.schedule[COLUMNS] if name not in names]
                content |= yield from _reading(session, meta, rest, slices)
            ops.check_slices(slices, list(content))
            convert(fetched, content)
            return fetched

        try:
            return run(session, fetching(), noting(session, "take"))
        except DeadlineExceeded:
            self._check_ranks(partition_id, dp_rank, dp_size)
            raise

    def _check_ranks(self, partition_id: str, dp_rank: int, dp_size: int) -> None:
        """`InvalidInput` where a step was dealt to another number of ranks than somebody waited for."""
        there = self.client.get_partition(partition_id)
        told = dp_size
        if there is not None and there["rows"]:  # a put that found no room leaves what it had told, and no rows
            told = there["metadata"].get(DP_SIZE, dp_size)
        if told != dp_size:
            raise InvalidInput(
                f"partition {partition_id!r} was dealt to {told} ranks: there is no {dp_rank} of {dp_size}"
            )

    def read(self, meta: BatchMeta, names: Sequence[str], slices: Mapping[str, Slice] | None = None) -> dict[str, Any]:
        """These columns of rows that were fetched, as they are stored. Raises `NotReady`."""
        session = self.client.session
        return run(session, _reading(session, meta, names, slices), noting(session, "get_data"))

    def write_back(self, fetched: Fetched | BatchMeta, columns: Mapping[str, Any]) -> None:
        """Columns that were derived, one item for each fetched row in their order: ranks that wait for them get them.

        Atomic. Raises `SchemaViolation`, `StorageKeyNotFoundError` where the step was cleared, `StoreFull`.
        """
        meta = instance(fetched.meta if isinstance(fetched, Fetched) else fetched, BatchMeta, "fetched")
        schema = self.schema.part(mapping(columns, "columns"))
        columns = taken_columns(columns)
        if checked_batch(columns, schema) != len(meta):
            raise SchemaViolation(f"columns {list(columns)} have not the {len(meta)} rows that were fetched")
        self.client.put(stored_columns(columns, schema, range(len(meta))), metadata=meta, dedupe=self.dedupe)

    def ack(self, fetched: Fetched) -> None:
        """The rows, which were fetched with `lease_s`, are used. Raises `LeaseExpired`."""
        self.client.ack(instance(fetched, Fetched, "fetched").meta)

    def clear(self, partition_id: str) -> None:
        """The step is over; nobody waits for it any more, and its memory is free."""
        self.client.clear_partition(partition_id)


def _check_told(plan: Schedule, dp_size: int | None) -> None:
    if dp_size not in (None, plan.dp_size):
        raise InvalidInput(f"dp_size={dp_size}, and a schedule for {plan.dp_size} ranks")


def _marker(ready: Prepared, rank: int) -> list[Any]:
    """What only the rows of a rank have; the first row's says everything."""
    first = {**ready.schedule.of_rank(rank), COLUMNS: list(ready.columns)}
    return [first] + [None] * (len(ready.schedule.partitions[rank]) - 1)


def _reading(
    session: Session, meta: BatchMeta, names: Sequence[str], slices: Mapping[str, Slice] | None
) -> Operation[dict[str, Any]]:
    if not names:
        return {}
    rows = BatchMeta._build(meta.indexes, meta.sole_partition, {key: {} for key in names}, True, None, meta.service_id)
    parts = {name: part for name, part in (slices or {}).items() if name in names}
    data = yield from ops.get_data(session, rows, False, None, None, slices=parts)
    return {name: data.get(name) for name in names}


def _put_markers(session: Session, parts: Sequence[BatchMeta], markers: Sequence[list[Any]]) -> Operation[None]:
    """Say which rows are each rank's, all in one round trip."""
    calls = []
    for rank, (part, marker) in enumerate(zip(parts, markers, strict=True)):
        plan = plan_objects(MARKER.format(rank, len(parts)), marker)
        rows = TargetRows(part.sole_partition, len(part), None, part.indexes.tobytes(), service=part.service_id)
        if plan.nbytes > m.INLINE_NBYTES:
            yield from store(session, plan, rows, None)
            continue
        payload = np.empty(plan.nbytes, np.uint8)
        plan.write(payload, session.mover)
        memory = memoryview(payload)  # type: ignore[arg-type]
        calls.append(commit(session, rows, plan.schema(), plan.layout(), 0, None, memory))
    yield Together(calls)
