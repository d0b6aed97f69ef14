"""StreamingDataset: an iterable over a partition that others are still filling."""

from __future__ import annotations

import inspect
import multiprocessing.context
import numbers
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tensordict import TensorDict
from torch.utils.data import IterableDataset, get_worker_info

from transfer_queue.arguments import flag, text
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.effects import Call
from transfer_queue.client.operations.rows import field_list, is_over
from transfer_queue.dataloader.acks import Receipt, rows_in, split, unused
from transfer_queue.dataloader.chunking import chunk_batch_fn
from transfer_queue.dataloader.feed import Batch, Calling, End, Feed, Key, Terms, give_back
from transfer_queue.dataloader.lease_owner import LeaseOwner, client_for
from transfer_queue.dataloader.parent import end_with_parent
from transfer_queue.dataloader.ranks import rank_of
from transfer_queue.dataloader.work import Work
from transfer_queue.dataloader.worker_feed import GrantedFeed, HandingOver, Links, LoaderPlan, WorkerFeed, batches
from transfer_queue.errors import DataLost, InvalidInput, LeaseExpired, ServiceError, UnknownRows
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler.base import whole_number
from transfer_queue.wire import messages as m

__all__ = ["StreamingDataset", "chunk_batch_fn", "default_fetch_batch_fn"]

LEASE_S = 60.0


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: dict[str, Any],
    batch_index: int,
) -> tuple[TensorDict | None, BatchMeta]:
    """(data, metadata) of a batch that counts as used at once; (None, empty) under `polling_mode` without rows.

    For functions of your own to call. A dataset without one fetches on lease instead.
    """
    config = {**sampling_config, "batch_index": batch_index, "partition_id": partition_id}
    meta = tq_client.get_meta(data_fields, batch_size, partition_id, task_name=task_name, sampling_config=config)
    return (tq_client.get_data(meta) if len(meta) else None), meta


def _size(value: object, name: str) -> int:
    found = whole_number(value, name)
    if found < 1:
        raise InvalidInput(f"{name} must be >= 1, got {found}")
    return found


def _function(given: Any, name: str) -> Any:
    """`given`, or `InvalidInput` where it is neither None nor can be called."""
    if given is not None and not callable(given):
        raise InvalidInput(f"{name} is a function, got {given!r:.200}")
    return given


class StreamPlace(NamedTuple):
    """Where a stream is: what `StreamingDataset.state_dict` returns."""

    partition_id: str
    batch_index: int
    used_rows: list[int]
    returned_rows: list[int]
    service: bytes  # the life that the rows are of, b"" where it is not known

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> StreamPlace:
        """Raises `InvalidInput` for what is no such state."""
        names = ("partition_id", "batch_index", "used_rows")
        if not isinstance(state, Mapping) or not all(name in state for name in names):
            raise InvalidInput(f"a state has {list(names)}, as state_dict returns it; got {state!r:.200}")
        partition, index, used = (state[name] for name in names)
        given_back = state.get("returned_rows", ())
        if not isinstance(partition, str) or not all(isinstance(rows, Iterable) for rows in (used, given_back)):
            raise InvalidInput(f"a state has a name of a partition and lists of rows, got {state!r:.200}")
        used, given_back = ([whole_number(row, "a row of a state") for row in part] for part in (used, given_back))
        number = whole_number(index, "batch_index of a state")
        if not 0 <= number < 1 << 63:
            raise InvalidInput(f"batch_index of a state is the number of a batch, got {number}")
        try:
            service = bytes.fromhex(state.get("service", ""))
        except (TypeError, ValueError):
            raise InvalidInput(f"service of a state is what state_dict says, got {state['service']!r:.200}") from None
        return cls(str(partition), number, used, given_back, service)


class StreamingDataset(IterableDataset[Any]):
    """(TensorDict, BatchMeta) micro-batches of one task, as their rows become ready.

    A batch of `batch_size` rows is fetched when all of them are ready, then split by `process_batch_fn(td, meta,
    micro_batch_size=)`. The stream is endless, or ends once the task has used the whole partition
    (`should_check_consumption_status`); where the partition's size is declared, its last batch may be smaller. Fetched
    batches stay in `buffer` until `step`.

    Data-parallel ranks that say `dp_rank` and `dp_size` (else those of torch.distributed where it is initialised) get
    the same number of micro-batches of every batch, whatever their timing: `batch_size` rows for each are taken at
    once, and no rank gets the share of another. The rows of a last, smaller batch are divided as evenly as it goes, in
    parts of fewer rows where that keeps the number equal; only where a rank has fewer rows than parts some are repeated
    (`meta.extra_info["repeated"]`, the number of such rows at the end). An own `process_batch_fn` gets the same number
    of rows in every rank, with repeated ones at the end. A `dp_rank` without `dp_size` deals nothing: ranks compete.

    Rows are on lease while they are worked on: asking for the next micro-batch acknowledges the one before, and so do
    `step` and `reset`. What was not acknowledged is offered again when the process ends, when the dataset is collected,
    or when the consumer was frozen for `lease_s`; then its next call raises `LeaseExpired`. `lease_s=None` takes rows
    for good as soon as their batch is started. With `prefetch` the next batch is fetched meanwhile; by default only
    where batches are dealt, since elsewhere it would take rows that other consumers may need. One thread at a time may
    iterate. Rows more than `max_staleness` versions old when their batch is fetched are left out, as if they
    had been used. An own `fetch_batch_fn` decides itself how it takes rows; it runs in the iterating thread.

    `config` is what `transfer_queue.init` returned, or anything: without an `address` in it, this process's client or
    the service at TQ_ADDRESS is used. Processes that get a copy make clients of their own.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        micro_batch_size: int,
        data_fields: list[str],
        partition_id: str,
        task_name: str,
        dp_rank: int | None = None,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Callable[..., Any] | None = None,
        process_batch_fn: Callable[..., Iterable[Any]] | None = None,
        *,
        lease_s: float | None = LEASE_S,
        prefetch: bool | None = None,
        max_staleness: int | None = None,
        dp_size: int | None = None,
    ) -> None:
        """Raises `InvalidInput` (a ValueError) for a size, rank or lease out of range, or no fields."""
        batch_size = _size(batch_size, "batch_size")
        micro_batch_size = _size(micro_batch_size, "micro_batch_size")
        if len(field_list(data_fields)) < 1:
            raise InvalidInput(f"data_fields must be a list with at least one field name, got {data_fields}")
        rank = rank_of(dp_rank, dp_size)
        given: object = lease_s
        if lease_s is not None and not (isinstance(given, numbers.Real) and 0 < lease_s < float("inf")):
            raise InvalidInput(f"lease_s must be above 0 seconds, got {lease_s}")
        self.config = config
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = data_fields
        self.partition_id = text(partition_id, "partition_id")
        self.task_name = text(task_name, "task_name")
        self.dp_rank = rank.number
        self.dp_size = rank.size  # 0: batches are not dealt
        checks = should_check_consumption_status
        self.should_check_consumption_status = checks is not None and flag(checks, "should_check_consumption_status")
        self.fetch_batch_fn = _function(fetch_batch_fn, "fetch_batch_fn") or default_fetch_batch_fn
        self.process_batch_fn = _function(process_batch_fn, "process_batch_fn") or chunk_batch_fn
        self.sampling_config: dict[str, Any] = {"task_name": task_name}
        if rank.number is not None:
            self.sampling_config["dp_rank"] = rank.number
        if rank.size:
            self.sampling_config["dp_size"] = rank.size
        if max_staleness is not None:
            self.sampling_config["max_staleness"] = whole_number(max_staleness, "max_staleness")
        self.lease_s = None if lease_s is None else float(lease_s)
        self.prefetch = bool(rank.size) if prefetch is None else flag(prefetch, "prefetch")
        self.until_cleared = False  # whether the stream also ends when its partition is cleared
        self.replays = True  # whether batches stay in `buffer`
        self.buffer: list[Any] = []
        self.batch_index = 0  # the batch that is started next; the first in `buffer` is number `_first`
        self._first = 0
        self._stride = 1
        self._used: list[int] = []  # rows of the batch being worked on, or started next, that the consumer is done with
        self._returned: set[int] = set()  # of these, those that it gave back; and maybe some of the batch before
        self._life = b""  # of the service whose rows were used last: another one gives other rows the same numbers
        self.links: Links | None = None  # set by a loader while it starts workers
        self._work: Work | None = None

    def __getstate__(self) -> dict[str, Any]:
        kept = dict(vars(self))
        if multiprocessing.context.get_spawning_popen() is None:
            kept["links"] = None  # these reach other processes only when they are started
        return {**kept, "_work": None, "buffer": [], "_first": self.batch_index}

    def client(self) -> TransferQueueClient:
        """The client of this process; a forked copy leaves what its parent works on alone."""
        return self._begin_work().client

    def _begin_work(self) -> Work:
        work = self._own_work()
        if work is None:
            work = self._work = Work(client_for(self.config, self), self._returned)
        return work

    def _own_work(self) -> Work | None:
        """What this process has of the stream. A forked copy has nothing at first: its parent works on the rows."""
        work = self._work
        if work is not None and not work.is_mine:
            work.end_acks()
            self._work, self.buffer, self._first = None, [], self.batch_index
        return self._work

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None:
            end_with_parent()
        work = self._begin_work()
        if worker is not None and self.links is not None:
            return self._worker_batches(work.client, worker.id, self.links)
        try:
            self.leave_ended_life(work.client)
        except ServiceError:
            work.holder = None  # it ended with the life, or is made anew
            raise
        if worker is not None and self._stride == 1:  # a plain DataLoader: workers share the batches between them
            self._stride = worker.num_workers
            self._first = self.batch_index = self.batch_index + worker.id
        running = self._stream(work)
        work.running = weakref.ref(running)
        return running

    def leave_ended_life(self, client: TransferQueueClient) -> None:
        """Before a loop goes on: where the service has begun anew, without the rows that the stream was at, none of
        those that are there now was used. Raises `ServiceError`."""
        if not self._life:
            return
        session = client.session
        rows = b"".join(row.to_bytes(8, "little") for row in self._used)
        try:
            session.call(Call(m.NameRows(session.next_rid(), self.partition_id, rows, self._life)))
        except DataLost:
            self._forget_used()
            self._life = b""
            if not self.replays:  # else batches are in `buffer`, under their numbers
                self.buffer, self.batch_index, self._first = [], 0, 0
        except UnknownRows:  # the partition was cleared, or is still to come
            pass

    def _worker_batches(self, client: TransferQueueClient, worker: int, links: Links) -> Iterator[Any]:
        """(number, (micro-batch, receipt) of each, its place in the order of handing over) of one worker's batches;
        the loader's iterator acknowledges."""
        plan = links.plan(worker)
        self.partition_id, self.batch_index, self._used = plan.partition, plan.first, list(plan.skip)
        self._returned = set(plan.returned)
        return self._delegated(client, plan, worker, links)

    def _delegated(self, client: TransferQueueClient, plan: LoaderPlan, worker: int, links: Links) -> Iterator[Any]:
        feed: WorkerFeed | Calling | GrantedFeed = WorkerFeed(client, self._terms(plan.holder), plan, links.turn)
        if self.fetch_batch_fn is not default_fetch_batch_fn:
            feed = self._calling(client)
            if not plan.ahead:
                feed = GrantedFeed(feed, plan, links.turn)
        try:
            for index, batch in batches(feed, plan, worker, links.num_workers):
                handing = HandingOver(links.turn, plan, index)
                if self._keep(client, batch[1]):
                    size = min(self.micro_batch_size, max(1, len(batch[1])))
                    yield index, list(split(client, self.process_batch_fn, batch, size, index)), handing
                else:
                    handing.done()
        finally:
            links.turn.hand_over(plan, plan.first + worker, is_last=True)

    def _stream(self, work: Work) -> Generator[Any, None, None]:
        feed = work.feed = self._open(work)
        is_cut_off = False
        try:
            while (found := self._next(work, feed)) is not None:
                yield found[0]
                work.check_mine()
        except ServiceError:
            is_cut_off = True  # the holder may be gone, with what it held
            raise
        finally:
            work.leave(feed, ends_leases=is_cut_off)

    def _open(self, work: Work) -> Feed | Calling:
        if self.fetch_batch_fn is not default_fetch_batch_fn:
            return self._calling(work.client)
        if work.holder is None:
            work.holder = LeaseOwner(work.client)
        holder, terms = work.holder, self._terms(work.holder.ident)
        return Feed(work.client, terms, lambda: holder.keep(terms.lease_s))

    def _terms(self, holder: bytes) -> Terms:
        return Terms(
            data_fields=self.data_fields,
            batch_size=self.batch_size,
            task_name=self.task_name,
            sampling_config={name: value for name, value in self.sampling_config.items() if name != "dp_size"},
            lease_s=self.lease_s or LEASE_S,
            until_done=self.should_check_consumption_status,
            holder=holder,
            skip=frozenset(self._used),
            skip_in=self.batch_index,
            returned=frozenset(self._returned),
            dp_size=self.dp_size,
            until_cleared=self.until_cleared,
        )

    def _calling(self, client: TransferQueueClient) -> Calling:
        def fetch(key: Key) -> Any:
            return self.fetch_batch_fn(
                tq_client=client,
                data_fields=self.data_fields,
                batch_size=self.batch_size,
                partition_id=key.partition,
                task_name=self.task_name,
                sampling_config=self.sampling_config,
                batch_index=key.batch_index,
            )

        def done(key: Key) -> bool:
            if not self.should_check_consumption_status:
                return False
            session = client.session
            request = m.Consumption(session.next_rid(), key.partition, self.task_name)
            return is_over(session.call(Call(request))[0], has_begun=key.batch_index > 0)

        return Calling(fetch, done)

    def _next(self, work: Work, feed: Feed | Calling) -> tuple[Any, Receipt] | None:
        """The next micro-batch; the one before was used. None at the end."""
        self._confirm_pending(work)
        while True:
            if work.items is not None:
                try:
                    for found in work.items:
                        work.handed_at = time.monotonic()
                        work.in_hand = found[1]
                        return found
                finally:
                    if work.in_hand is None:  # whatever struck ended the iterator as well: the batch is split anew
                        work.items = None
                self.begin(self.batch_index + self._stride)
            batch = self._started(work.client, feed)
            if isinstance(batch, End):
                work.end_acks()
                return None
            size = min(self.micro_batch_size, max(1, len(batch[1])))  # fewer rows: the rest of a batch or partition
            items = split(work.client, self.process_batch_fn, batch, size, self.batch_index)
            work.items = unused(items, frozenset(self._used) - self._returned)  # what was given back comes again

    def _started(self, client: TransferQueueClient, feed: Feed | Calling) -> Batch | End:
        """The batch `batch_index`, from the buffer or the service."""
        position = (self.batch_index - self._first) // self._stride
        if position == len(self.buffer):
            if not self.replays:
                self.buffer, self._first, position = [], self.batch_index, 0
            found = feed.get(Key(self.partition_id, self.batch_index))
            while not isinstance(found, End) and not self._keep(client, found[1]):
                found = feed.get(Key(self.partition_id, self.batch_index))
            if isinstance(found, End):
                return found
            self.buffer.append(found)
        if self.prefetch and position + 1 == len(self.buffer):
            feed.expect(Key(self.partition_id, self.batch_index + self._stride))
        batch: Batch = self.buffer[position]
        return batch

    def _keep(self, client: TransferQueueClient, meta: BatchMeta) -> bool:
        """Without leases, rows are taken for good when their batch starts; False when they are lost to others."""
        if self.lease_s is None and meta.lease and len(meta):
            try:
                client.ack(meta)
            except LeaseExpired:
                return False
            meta.lease = 0
        return True

    def _confirm_pending(self, work: Work) -> None:
        """The micro-batch in the consumer's hands was used."""
        receipt = work.in_hand
        if receipt is None:
            return
        rows = rows_in(receipt.rows)
        try:
            acks, ack = work.acks(), receipt.ack(work.client.session)
            acks.confirm_pending()
            self._returned.difference_update(rows)
            acks.begin(ack)  # no interrupt comes between this and the next two
            work.in_hand = None
            self._used += rows
            self._life = receipt.service_id
            self._end_lease_in_buffer(receipt)
            acks.send()
            if time.monotonic() - work.handed_at > (self.lease_s or LEASE_S) / 3:
                acks.confirm_pending()  # after so long it may be refused: know before going on
        except LeaseExpired:
            if work.in_hand is None:
                del self._used[len(self._used) - len(rows) :]
            work.items, work.in_hand = iter(()), None  # the rest of the batch is lost as well
            raise
        except ServiceError:
            work.in_hand = None  # its lease may be gone, with the service that gave it
            raise

    def _end_lease_in_buffer(self, receipt: Receipt) -> None:
        """A batch that was used comes from the buffer without a lease, which the service does not know for ever."""
        position = (receipt.batch_index - self._first) // self._stride
        if receipt.is_last and receipt.lease and position < len(self.buffer):
            data, meta = self.buffer[position]
            kept = meta[:]
            kept.lease = 0
            self.buffer[position] = data, kept

    def begin(self, batch_index: int) -> None:
        """Deliver from this batch now."""
        if batch_index != self.batch_index:
            self.batch_index, self._used = batch_index, []  # at once: they are rows of this batch
            self._returned.clear()

    def _forget_used(self) -> None:
        self._used = []
        self._returned.clear()

    def note_used(self, receipt: Receipt, returned: bytes = b"") -> None:
        """Follow what was acknowledged, here or by the loader's iterator, and what of it had been given back."""
        rows = rows_in(receipt.rows)
        self._used += rows
        self._life = receipt.service_id
        self._returned.difference_update(rows)
        self._returned.update(rows_in(returned))

    def reset(self) -> None:
        """Start over: the batches in `buffer` come again, then new ones. What was delivered counts as used.

        A batch that was fetched ahead is offered again.
        """
        try:
            self._leave()
        finally:
            self.batch_index = self._first
            self._forget_used()

    def step(self, partition_id: str) -> None:
        """Go on with another partition, with an empty buffer. What was delivered counts as used, the rest of the
        batch and what was fetched ahead are offered again."""
        text(partition_id, "partition_id")
        current = self._begun()
        try:
            self._leave()
        finally:
            self.partition_id = partition_id
            self.buffer = []
            self.batch_index = self._first = 0
            self._life = b""
            self._forget_used()
        for _, meta in current:
            give_back(self.client(), meta)

    def _begun(self) -> list[Any]:
        """The batch of which micro-batches were delivered and others maybe not."""
        position = (self.batch_index - self._first) // self._stride
        work = self._own_work()
        return self.buffer[position : position + 1] if work is not None and work.items is not None else []

    def _leave(self) -> None:
        """The consumer is done with what it was given, and wants nothing that was fetched ahead."""
        work = self._own_work()
        if work is None:
            return
        work.items = None
        if work.feed is not None:
            work.feed.give_back()
        if work.in_hand is not None:
            self._confirm_pending(work)
            work.items = None
        work.end_acks()

    def close(self) -> None:
        """End the iteration: what was not acknowledged, the micro-batch in hand included, is offered again at once.

        A next iteration goes on there, with an empty buffer. What an own `fetch_batch_fn` took stays taken. A loop that
        waits for rows in another thread ends.
        """
        work, begun = self._own_work(), self._begun()
        if work is not None:
            work.items = work.in_hand = None
            running = work.running() if work.running is not None else None
            try:
                if running is not None and inspect.getgeneratorstate(running) != inspect.GEN_RUNNING:
                    running.close()
                elif running is not None and work.feed is not None:
                    work.feed.end()
                if not work.is_stalled:
                    for _, meta in begun:
                        give_back(work.client, meta)
            finally:  # an interrupt leaves the leases to nobody
                holder, work.holder = work.holder, None
                if holder is not None:
                    holder.close()
        self.buffer, self._first = [], self.batch_index

    def __repr__(self) -> str:
        rank = "" if self.dp_rank is None else f", dp_rank={self.dp_rank}"
        size = f", dp_size={self.dp_size}" if self.dp_size else ""
        return (
            f"StreamingDataset(partition_id={self.partition_id!r}, task_name={self.task_name!r}, "
            f"data_fields={self.data_fields}, batch_size={self.batch_size}, micro_batch_size={self.micro_batch_size}"
            f"{rank}{size}, batch_index={self.batch_index})"
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, as plain data: the batch being worked on, and which of its rows were acknowledged; where
        the consumer gave some back, also which; and the service that they are of, by its name in hexadecimal."""
        work = self._own_work()
        if work is not None:
            work.confirm_pending()
        used, returned = ([row for row in self._used if (row in self._returned) is back] for back in (False, True))
        place = {"partition_id": self.partition_id, "batch_index": self.batch_index, "used_rows": used}
        if returned:
            place["returned_rows"] = returned
        return {**place, "service": self._life.hex()} if self._life else place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the first micro-batch that was not acknowledged when `state` was made. Raises `InvalidInput`, and
        nothing has changed, for what `state_dict` did not return."""
        place = StreamPlace.of(state)
        self.step(place.partition_id)
        self.batch_index = self._first = place.batch_index
        self._used = [*place.used_rows, *place.returned_rows]
        self._returned.update(place.returned_rows)
        self._life = place.service
