"""StreamingDataLoader: torch's DataLoader over a StreamingDataset, with acknowledgements from the process that uses
the rows."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import BaseContext
from traceback import clear_frames
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader

from transfer_queue.dataloader import handing_over
from transfer_queue.dataloader.acks import Receipt, acknowledge
from transfer_queue.dataloader.lease_owner import LEAVE_S, LeaseOwner, renewal_s
from transfer_queue.dataloader.streaming_dataset import LEASE_S, StreamingDataset, StreamPlace
from transfer_queue.dataloader.work import check_process
from transfer_queue.dataloader.worker_feed import HandingOver, Links, LoaderPlan
from transfer_queue.errors import DeadlineExceeded, InvalidInput, TransferQueueError
from transfer_queue.sampler.base import whole_number
from transfer_queue.wire import messages as m


def identity(item: Any) -> Any:
    """The default `collate_fn`."""
    return item


class _CollateEach:
    """Runs in a worker: `collate` on every micro-batch of a batch, which is about to be handed over."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(
        self, batch: tuple[int, list[tuple[Any, Receipt]], HandingOver]
    ) -> tuple[int, list[tuple[Any, Receipt]]]:
        index, items, handing = batch
        collated = [(self._collate(item), receipt) for item, receipt in items]
        handing_over.share([item for item, _ in collated], handing.wait)
        handing.done()
        return index, collated


class StreamingDataLoader(DataLoader[Any]):
    """Iterates over the micro-batches of `dataset`; torch's DataLoader otherwise.

    With workers, each fetches, reads and splits every n-th batch, and the order is the same as without. A worker sends
    a whole batch at a time, so `prefetch_factor` counts batches; it says how many are fetched ahead where the dataset's
    `prefetch` allows that at all, and else each is fetched when it is asked for. Asking for the next micro-batch
    acknowledges the one before. When the iterator ends, in whatever way, all that was not acknowledged is offered
    again; a next one goes on there. `reset` and `step` end it, and count what was delivered as used.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        collate: Any = collate_fn or identity
        num_workers = whole_number(num_workers, "num_workers")  # torch takes NumPy's for a list of them
        if num_workers < 0:
            raise InvalidInput(f"num_workers is 0 or more, got {num_workers}")
        if num_workers:
            collate = _CollateEach(collate)
        device: dict[str, Any] = {"pin_memory_device": pin_memory_device} if pin_memory_device else {}
        self._deliveries: weakref.ref[_Deliveries] | None = None
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            **device,
        )
        self.stream = dataset
        self._links: Links | None = None  # to workers that go on from one iteration to the next

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_iterator": None, "_deliveries": None, "_links": None}  # a copy has workers of its own

    def __repr__(self) -> str:
        return f"StreamingDataLoader({self.stream!r}, num_workers={self.num_workers})"

    def __enter__(self) -> StreamingDataLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration: what was not acknowledged, the micro-batch in hand included, is offered again at once.
        A next iteration goes on there."""
        self._end()
        self.stream.close()

    def __iter__(self) -> Any:
        if not self.num_workers:
            return super().__iter__()
        self._end()
        links, self._links = self._links, None
        # Others also where an iteration could not begin, as workers wait for it, and where one of them has died.
        if links is None or links.pid != os.getpid() or not self._has_workers():
            self._iterator = None
            context: BaseContext = self.multiprocessing_context or torch.multiprocessing.get_context()
            with handing_over.told():
                links = Links(context, self.num_workers)
        start = super().__iter__
        with handing_over.told():
            deliveries = _Deliveries(self.stream, links, start)
        if self.persistent_workers:
            self._links = links
        self._deliveries = weakref.ref(deliveries)
        return deliveries

    def _has_workers(self) -> bool:
        """Whether all those of the iteration before are alive."""
        batches: Any = self._iterator
        return batches is not None and all(worker.is_alive() for worker in batches._workers)

    def _end(self) -> None:
        """End the iterator over the workers, if there is one."""
        deliveries = self._deliveries() if self._deliveries is not None else None
        if deliveries is not None:
            deliveries.close()

    def _confirm_pending(self) -> None:
        deliveries = self._deliveries() if self._deliveries is not None else None
        try:
            if deliveries is not None:
                deliveries.confirm_pending()
        finally:
            self._end()

    def reset(self) -> None:
        """Start over, see `StreamingDataset.reset`. With workers there is no buffer: batch numbers start over, and a
        sampler that remembers them gives the same rows again."""
        self._confirm_pending()
        self.stream.reset()

    def step(self, partition_id: str) -> None:
        """Go on with another partition, see `StreamingDataset.step`."""
        self._confirm_pending()
        self.stream.step(partition_id)

    def get_buffer(self) -> list[Any]:
        """The fetched batches, (TensorDict, BatchMeta) each; empty with workers."""
        return self.stream.buffer

    def state_dict(self) -> dict[str, Any]:
        """See `StreamingDataset.state_dict`."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `StreamingDataset.load_state_dict`; takes effect with the next iterator."""
        StreamPlace.of(state)
        self._confirm_pending()
        self.stream.load_state_dict(state)


_RUNNING: weakref.WeakSet[Any] = weakref.WeakSet()  # torch's iterators over workers
_OF_PARENTS: list[Any] = []


def _leave_to_parent() -> None:
    """A forked child ends no worker of its parent: neither torch's iterators do that, which are collected never there,
    nor does multiprocessing at the child's exit."""
    _OF_PARENTS.extend(_RUNNING)
    for batches in _OF_PARENTS:
        multiprocessing.process._children.difference_update(batches._workers)  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_leave_to_parent)


class _Deliveries(Iterator[Any]):
    """The parent's side of one iteration with workers. Its holder has all leases, also of what workers fetch ahead."""

    def __init__(self, dataset: StreamingDataset, links: Links, start: Callable[[], Any]) -> None:
        """`start` gives torch's iterator over the workers, which are started for it or wait for a plan."""
        self._pid = os.getpid()
        self._dataset = dataset
        self._client = dataset.client()
        self._links = links
        self._items: deque[tuple[Any, Receipt]] = deque()
        self._in_hand: Receipt | None = None
        self._ack: m.Ack | None = None
        self._is_asked = False  # whether `_ack`, that of what is in hand, is to be answered
        self._closed = threading.Event()
        self._ended = self._told = False
        self._batches: Any = None
        self._renewer: threading.Thread | None = None
        dataset.leave_ended_life(self._client)
        place = dataset.state_dict()
        self._following: int = place["batch_index"]
        self._holder = LeaseOwner(self._client)  # what can fail comes before there are workers; forks leave it alone
        try:
            self._begin(start, place)
        except BaseException:
            self.close()
            raise

    def _begin(self, start: Callable[[], Any], place: Mapping[str, Any]) -> None:
        dataset = self._dataset
        dataset.links = self._links  # for workers that are started now
        try:
            self._batches = start()
            _RUNNING.add(self._batches)
        finally:
            dataset.links = None
        terms = (self._holder, dataset.lease_s or LEASE_S, self._closed)
        renewer = threading.Thread(target=_renew, args=terms, name="tq-renew", daemon=True)  # after the forks
        renewer.start()
        self._renewer = renewer
        returned = frozenset(place.get("returned_rows", ()))
        skip = returned.union(place["used_rows"])
        plan = LoaderPlan(
            0, place["partition_id"], self._following, skip, self._holder.ident, dataset.prefetch, returned
        )
        self._links.begin(plan)
        self._told = True

    def __next__(self) -> Any:
        check_process(self._pid)
        if self._closed.is_set():
            raise StopIteration
        try:
            self.confirm_pending()
            while not self._items:
                self._links.turn.grant(self._following)
                index, items = next(self._batches)
                self._following = index + 1
                self._items.extend(items)
                if not items:
                    self._dataset.begin(index + 1)
            item, self._in_hand = self._items.popleft()
            return item
        except BaseException as error:  # torch raises anywhere when it learns that a worker died, also within `close`
            try:
                self.close()
            finally:
                self.close()
            # A worker's error is a local of the frame that raises it, so torch's iterator would be garbage of a cycle:
            # collected in one, its queues are closed before it is, and it waits 5 s for each worker.
            clear_frames(error.__traceback__)
            raise

    def confirm_pending(self, within_s: float | None = None) -> None:
        """The micro-batch that was delivered last was used. Raises `LeaseExpired`."""
        receipt = self._in_hand
        if receipt is None or self._pid != os.getpid():
            return
        try:
            if not self._is_asked:
                self._ack, self._is_asked = receipt.ack(self._client.session), True
            returned = acknowledge(self._client, self._ack, within_s)
        except TransferQueueError as error:
            if isinstance(error, DeadlineExceeded):
                self._holder.leave_after(self._ack)
            self._in_hand, self._is_asked = None, False
            raise
        self._dataset.begin(receipt.batch_index)
        self._dataset.note_used(receipt, returned)
        if receipt.is_last:
            self._dataset.begin(receipt.batch_index + 1)
        self._in_hand, self._is_asked = None, False

    def close(self) -> None:
        """End: the holder goes before the workers, so that those that wait for rows do so no longer.

        Where a signal handler raised in the midst of it, the next call does all of it again. In a forked child it is
        the parent's, and goes on.
        """
        if self._ended or self._pid != os.getpid():
            return
        self._closed.set()
        if self._renewer is not None and self._renewer is not threading.current_thread():
            self._renewer.join()
        if self._is_asked:  # the question was interrupted: what became of the rows is known nowhere else
            with contextlib.suppress(TransferQueueError):
                self.confirm_pending(LEAVE_S)
        self._in_hand = None  # it is offered again, or was acknowledged
        if self._told:  # before the holder ends: a worker takes that for the end only where the round is over
            self._links.turn.begin(0)
        self._holder.close()
        if not self._told:
            self._links.let_go()
        self._batches = None
        self._ended = True

    def __del__(self) -> None:
        if hasattr(self, "_holder"):
            self.close()


def _renew(holder: LeaseOwner, lease_s: float, closed: threading.Event) -> None:
    while not closed.wait(renewal_s(lease_s)):
        holder.keep(lease_s)
