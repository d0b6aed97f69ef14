"""One line to stream: `for batch in tq.stream("train_0", ["response"], task="actor", batch_size=32)`."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias

from tensordict import TensorDict

from transfer_queue.arguments import flag, text
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.dense import Pad, check_pad, to_dense
from transfer_queue.client.drivers import all_ended, finished, run_async
from transfer_queue.client.effects import Call
from transfer_queue.client.operations.rows import field_list
from transfer_queue.client.recording import noting
from transfer_queue.codec.columns import rows_of
from transfer_queue.codec.plan import items_of
from transfer_queue.dataloader.acks import Receipt, with_receipts
from transfer_queue.dataloader.chunking import bounds, chunk_batch_fn
from transfer_queue.dataloader.feed import END, Batch, End, Key, Terms, taking
from transfer_queue.dataloader.lease_owner import LEAVE_S, LeaseOwner, client_for, renewal_s
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import LEASE_S, StreamingDataset
from transfer_queue.errors import DeadlineExceeded, InvalidInput, TransferQueueError
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler.base import whole_number
from transfer_queue.wire.messages import Lent

Row: TypeAlias = dict[str, Any]
Delivered: TypeAlias = "TensorDict | list[Row]"
WAIT_S = 20.0


def stream(
    partition_id: str,
    data_fields: Sequence[str],
    *,
    task: str,
    batch_size: int,
    micro_batch_size: int | None = None,
    dp_rank: int | None = None,
    dp_size: int | None = None,
    dense: bool = False,
    pad: Pad | None = None,
    rows: bool = False,
    lease_s: float = LEASE_S,
    max_staleness: int | None = None,
    prefetch: bool | None = None,
    num_workers: int = 0,
    multiprocessing_context: Any = None,
) -> Stream:
    """The rows of a partition for one task, as they become ready: an iterable of TensorDicts of `micro_batch_size` rows
    (default: `batch_size`).

    `batch_size` rows are fetched at once, for each of `dp_size` data-parallel ranks; every rank gets the same number of
    micro-batches (`StreamingDataset` says how, and where rank and size come from). Rows are on lease while the loop
    works on them: asking for the next ones acknowledges those before, and leaving the loop, in whatever way, gives the
    others back. It ends when the task has used all rows that the partition was declared to get (`set_partition`), or
    without a declared size all that there are at the moment, so declare one while others still write; and when the
    partition is cleared after a first batch. Until then it waits, also for a partition that is not there yet.

    `dense`, `pad`: plain tensors, see `TransferQueueClient.get_data`. `rows`: lists of dicts, one a row. `meta` of the
    stream names the rows of the batch in hand. Raises `InvalidInput` for arguments out of range.
    """
    sizes, rank, terms = (batch_size, micro_batch_size), (dp_rank, dp_size), (lease_s, max_staleness, prefetch)
    dataset = _dataset(partition_id, data_fields, task, sizes, rank, terms)
    return Stream(dataset, Form(dense, pad, rows), num_workers, multiprocessing_context)


def async_stream(
    partition_id: str,
    data_fields: Sequence[str],
    *,
    task: str,
    batch_size: int,
    micro_batch_size: int | None = None,
    dp_rank: int | None = None,
    dp_size: int | None = None,
    dense: bool = False,
    pad: Pad | None = None,
    rows: bool = False,
    lease_s: float = LEASE_S,
    max_staleness: int | None = None,
    prefetch: bool | None = None,
) -> AsyncStream:
    """As `stream`, for `async for`: nothing blocks the running loop, and cancellation gives the rows back."""
    sizes, rank, terms = (batch_size, micro_batch_size), (dp_rank, dp_size), (lease_s, max_staleness, prefetch)
    dataset = _dataset(partition_id, data_fields, task, sizes, rank, terms)
    return AsyncStream(dataset, Form(dense, pad, rows))


def _dataset(
    partition: str,
    fields: Sequence[str],
    task: str,
    sizes: tuple[int, int | None],
    rank: tuple[int | None, int | None],
    terms: tuple[float, int | None, bool | None],
) -> StreamingDataset:
    if not text(task, "task") or not text(partition, "partition_id"):
        raise InvalidInput(f"a stream needs a partition_id and a task, got {partition!r} and {task!r}")
    size, micro = sizes
    lease_s, max_staleness, prefetch = terms
    dataset = StreamingDataset(
        None, size, size if micro is None else micro, field_list(fields), partition, task, rank[0], True,
        lease_s=lease_s, prefetch=prefetch, max_staleness=max_staleness, dp_size=rank[1],
    )  # fmt: skip
    dataset.until_cleared, dataset.replays = True, False
    return dataset


class Form:
    """What a batch is delivered as."""

    def __init__(self, dense: bool, pad: Pad | None, rows: bool) -> None:
        check_pad(pad)  # before rows are taken for it
        self._dense = flag(dense, "dense") or pad is not None
        self._pad = pad
        self._rows = flag(rows, "rows")

    def of(self, data: TensorDict) -> Delivered:
        if self._dense:
            data = to_dense(data, self._pad)
        return as_dicts(data) if self._rows else data


def as_dicts(data: TensorDict) -> list[Row]:
    """One dict a row: tensors without the dimension of the rows, anything else as it was put."""
    columns = {name: _items(column) for name, column in items_of(data)}
    return [{name: items[row] for name, items in columns.items()} for row in range(len(data))]


def _items(column: Any) -> list[Any]:
    return as_dicts(column) if isinstance(column, TensorDict) else rows_of(column)


class _Streaming:
    """What both kinds of streams are: `meta` names the rows of the batch in hand."""

    def __init__(self, dataset: StreamingDataset, form: Form) -> None:
        self._dataset = dataset
        self._form = form
        self.meta = BatchMeta.empty()

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, see `StreamingDataset.state_dict`."""
        return self._dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there, see `StreamingDataset.load_state_dict`."""
        self._dataset.load_state_dict(state)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._dataset!r}>"


class Stream(_Streaming):
    """See `stream`. Each loop goes on where the one before was left, with the first rows not acknowledged; it ends that
    one where it still runs."""

    def __init__(
        self, dataset: StreamingDataset, form: Form, num_workers: int = 0, multiprocessing_context: Any = None
    ) -> None:
        super().__init__(dataset, form)
        self._running: object | None = None  # the loop that began last, until it ends
        self._loader: StreamingDataLoader | None = None
        if whole_number(num_workers, "num_workers"):
            context = multiprocessing_context
            self._loader = StreamingDataLoader(dataset, num_workers=num_workers, multiprocessing_context=context)

    def __iter__(self) -> Generator[Any, None, None]:
        if self._running is not None:
            self.close()
        running = self._running = object()
        source = iter(self._dataset if self._loader is None else self._loader)
        try:
            for data, self.meta in source:
                yield self._form.of(data)
                if self._running is not running:  # another loop began, and has what this one had
                    return
        finally:
            if self._running is running:
                self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_running": None}

    def close(self) -> None:
        """Give back what was not acknowledged; a next loop goes on there."""
        self._running = None
        if self._loader is not None:
            self._loader.close()
        self._dataset.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        """The number of micro-batches of the whole partition for this rank. Asks the service. Raises TypeError where
        that is not known: other consumers may take rows unless there is a `dp_size`, rows may be too old, the partition
        has no declared size, or its last batch would be smaller."""
        dataset = self._dataset
        found = dataset.client().get_partition(dataset.partition_id)
        size, batch = (found or {}).get("size"), dataset.batch_size * dataset.dp_size
        if not size or not batch or size % batch or "max_staleness" in dataset.sampling_config:
            raise TypeError(f"{self!r} has no len(): how many batches it will have is not known")
        return int(size // batch) * len(bounds(dataset.batch_size, dataset.batch_size, dataset.micro_batch_size))


class AsyncStream(_Streaming):
    """See `async_stream`. Each loop goes on where the one before was left, and ends that one, unless another task waits
    in it. `async with` gives rows back at its end; without, that happens soon after the loop was left."""

    def __init__(self, dataset: StreamingDataset, form: Form) -> None:
        super().__init__(dataset, form)
        # Weak: it refers to this object, and asyncio ends what was left once nobody refers to it.
        self._running: weakref.ref[AsyncGenerator[Any, None]] | None = None
        self._ended: asyncio.Future[None] | None = None  # of the loop that began last: it has given everything back

    def __aiter__(self) -> AsyncGenerator[Any, None]:
        older = self._running() if self._running is not None else None
        running = self._deliveries(older, self._ended if older is None else None)
        self._running = weakref.ref(running)
        return running

    async def aclose(self) -> None:
        """Give back what was not acknowledged; a next loop goes on there."""
        running = self._running() if self._running is not None else None
        self._running = None
        if running is not None:
            await running.aclose()
        else:
            await _all_given_back(self._ended)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _deliveries(
        self, older: AsyncGenerator[Any, None] | None, before: asyncio.Future[None] | None
    ) -> AsyncGenerator[Any, None]:
        dataset = self._dataset
        if older is not None:
            with contextlib.suppress(RuntimeError):  # another task waits in it just now: both go on
                await older.aclose()
            older = None
        await _all_given_back(before)
        client, holder = await asyncio.to_thread(_attached, dataset)
        ended = self._ended = asyncio.get_running_loop().create_future()
        terms = dataset._terms(holder.ident)
        helpers: list[asyncio.Task[Any]] = [asyncio.create_task(_renew(holder, terms.lease_s))]
        ahead: asyncio.Task[Batch | End] | None = None
        batch: Batch | End = END
        try:
            while True:
                batch = await (ahead or _take(client, terms, Key(dataset.partition_id, dataset.batch_index)))
                if isinstance(batch, End):
                    return
                if dataset.prefetch:
                    following = Key(dataset.partition_id, dataset.batch_index + 1)
                    ahead = asyncio.create_task(_take(client, terms, following))
                    helpers[1:] = [ahead]
                for item, receipt in self._micro_batches(batch):
                    self.meta = item[1]
                    yield self._form.of(item[0])
                    await _use(dataset, client, holder, receipt)
                dataset.begin(dataset.batch_index + 1)
        finally:
            for helper in helpers:
                helper.cancel()
            try:
                await all_ended(helpers)
                await _give_back(client, [batch, _found_by(ahead)])
            finally:
                try:
                    await _in_thread(holder.close)
                finally:
                    ended.set_result(None)

    def _micro_batches(self, batch: Batch) -> list[tuple[Any, Receipt]]:
        data, meta = batch
        if not len(meta):
            return []
        size = min(self._dataset.micro_batch_size, len(meta))
        return list(with_receipts(chunk_batch_fn(data, meta, size), meta, self._dataset.batch_index))


async def _all_given_back(ended: asyncio.Future[None] | None) -> None:
    """Wait for a loop that was left on this event loop, which is ending it."""
    if ended is not None and ended.get_loop() is asyncio.get_running_loop():
        await asyncio.wait([ended])


def _found_by(ahead: asyncio.Task[Batch | End] | None) -> Batch | End:
    """What was fetched ahead, END where nothing was."""
    is_there = ahead is not None and ahead.done() and not ahead.cancelled() and ahead.exception() is None
    return ahead.result() if is_there and ahead is not None else END


async def _give_back(client: TransferQueueClient, batches: Sequence[Batch | End]) -> None:
    """Offer what is left of these again, as rows that nobody tried; where the service does not answer soon, their
    holder's end does it."""
    for batch in batches:
        if not isinstance(batch, End) and batch[1].lease and len(batch[1]):
            with contextlib.suppress(TransferQueueError, OSError, asyncio.TimeoutError):
                await asyncio.wait_for(client.async_release(batch[1]), LEAVE_S)


def _attached(dataset: StreamingDataset) -> tuple[TransferQueueClient, LeaseOwner]:
    client = client_for(dataset.config, dataset)
    client.session.hold()
    dataset.leave_ended_life(client)
    return client, LeaseOwner(client)


async def _renew(holder: LeaseOwner, lease_s: float) -> None:
    while True:
        await asyncio.sleep(renewal_s(lease_s))
        await _in_thread(holder.keep, lease_s)


async def _in_thread(work: Callable[..., object], *args: Any) -> None:
    """Ends when the thread is done with the connection, however often it is cancelled. The end of a loop cancels all
    tasks, and this is none."""
    await finished(asyncio.get_running_loop().run_in_executor(None, work, *args))


async def _take(client: TransferQueueClient, terms: Terms, key: Key) -> Batch | End:
    waited_s = 0.0
    while True:
        session = client.session
        request = terms.request(session, key, WAIT_S, waited_s)
        operation = taking(session, request, terms.left_out(key))
        found = await run_async(session, operation, noting(session, "stream"))
        if found is not None:
            return found
        waited_s += WAIT_S


async def _use(dataset: StreamingDataset, client: TransferQueueClient, holder: LeaseOwner, receipt: Receipt) -> None:
    """Acknowledge, and note what was: also where this is cancelled meanwhile, as far as the service answers soon.

    Raises `LeaseExpired` when the rows went to somebody else meanwhile.
    """
    acking = asyncio.ensure_future(_acknowledge(client, receipt))
    try:
        await asyncio.shield(acking)
    except asyncio.CancelledError:
        await asyncio.wait([acking], timeout=LEAVE_S)
        raise
    finally:
        error = acking.exception() if acking.done() and not acking.cancelled() else None
        if not acking.done() or isinstance(error, DeadlineExceeded):  # the service may still read it
            acking.cancel()
            holder.leave_after(receipt.ack(client.session))
        elif error is None and not acking.cancelled():
            dataset.note_used(receipt, acking.result())


async def _acknowledge(client: TransferQueueClient, receipt: Receipt) -> bytes:
    """Those of the rows that had been given back. Raises `LeaseExpired` when they went to somebody else meanwhile."""
    session = client.session
    ack = receipt.ack(session)
    if ack is None:
        return b""
    note = noting(session, "ack")
    reply: Lent = (await session.call_async(Call(ack)))[0]
    if note is not None:
        note.posted(ack)
    return reply.returned
