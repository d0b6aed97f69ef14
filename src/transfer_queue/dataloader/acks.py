"""Which rows are used once a micro-batch is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.connection import Connection
from transfer_queue.client.describing import warn_repeated
from transfer_queue.client.effects import Call
from transfer_queue.client.recording import noting
from transfer_queue.client.session import Session
from transfer_queue.dataloader.chunking import chunk_batch_fn
from transfer_queue.dataloader.feed import Batch
from transfer_queue.errors import DeadlineExceeded, ServiceUnavailable, TransferQueueError, error_from_code
from transfer_queue.metadata import BatchMeta
from transfer_queue.wire import messages as m


class Receipt(NamedTuple):
    """What to acknowledge when a micro-batch was used: `rows` (int64 bytes) of `lease`, which the service `service_id`
    gave, of the batch `batch_index`."""

    service_id: bytes
    lease: int
    rows: bytes
    batch_index: int
    is_last: bool

    def ack(self, session: Session) -> m.Ack | None:
        """The acknowledgement; None where there is nothing to acknowledge. What the loop itself refused or released of
        the micro-batch stays so."""
        if not self.lease or not self.rows:
            return None
        return m.Ack(session.next_rid(), self.lease, self.rows, self.service_id, but_returned=True)


def rows_in(data: bytes) -> list[int]:
    """Global indexes that travelled as int64."""
    rows: list[int] = memoryview(data).cast("q").tolist()
    return rows


def with_receipts(items: Iterable[Any], meta: BatchMeta, batch_index: int) -> Iterator[tuple[Any, Receipt]]:
    """Each item with its receipt. `meta` is that of the whole batch.

    An item that is a pair whose second part is metadata of the batch's lease stands for those rows. The last item
    stands for all that no other stood for.
    """
    left = meta.indexes
    held: list[Any] = []  # one item: the last is known only when there is no other
    for item in items:
        if held:
            rows = _rows_of(held[0], meta.lease)
            left = np.setdiff1d(left, rows)
            yield held.pop(), Receipt(meta.service_id, meta.lease, rows.tobytes(), batch_index, False)
        held.append(item)
    if held:
        yield held.pop(), Receipt(meta.service_id, meta.lease, left.tobytes(), batch_index, True)


def split(
    client: TransferQueueClient, process: Callable[..., Iterable[Any]], batch: Batch, size: int, batch_index: int
) -> Iterator[tuple[Any, Receipt]]:
    """The micro-batches of a batch with their receipts; a batch that `process` makes nothing of counts as used."""
    data, meta = batch
    empty = True
    if process is not chunk_batch_fn:
        warn_repeated(meta)
    if len(meta):
        for found in with_receipts(process(data, meta, micro_batch_size=size), meta, batch_index):
            empty = False
            yield found
    if empty:
        whole = Receipt(meta.service_id, meta.lease, meta.indexes.tobytes(), batch_index, True)
        acknowledge(client, whole.ack(client.session))


def unused(items: Iterable[tuple[Any, Receipt]], used: frozenset[int]) -> Iterator[tuple[Any, Receipt]]:
    """Without those whose rows were all used: a batch is split once more after an interrupt."""
    for found in items:
        rows = rows_in(found[1].rows)
        if not rows or not used.issuperset(rows):
            yield found


def _rows_of(item: Any, lease: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    part = item[1] if isinstance(item, (tuple, list)) and len(item) > 1 else None
    if isinstance(part, BatchMeta) and part.lease == lease:
        return part.indexes
    return np.empty(0, np.int64)


def acknowledge(client: TransferQueueClient, ack: m.Ack | None, within_s: float | None = None) -> bytes:
    """Those of the rows that had been given back. The same `ack` may be sent again: it has one outcome.

    Raises `LeaseExpired` when they went to somebody else meanwhile, `DeadlineExceeded` after `within_s` (None: as any
    call).
    """
    if ack is None:
        return b""
    note = noting(client.session, "ack")
    reply = _asked(client.session, ack, within_s)
    if note is not None:
        note.posted(ack)
    return reply.returned


def _asked(session: Session, ack: m.Ack, within_s: float | None) -> m.Lent:
    call = Call(ack) if within_s is None else Call(ack, wait_s=within_s, grace_s=0.0)
    reply: m.Lent = session.call(call)[0]
    return reply


class Acks:
    """Acknowledgements of one stream: the answer to one is looked at before the next is sent, so that none is waited
    for. Has a connection of its own; for one thread. Rows that had been given back are added to `returned`.

    An interrupt anywhere in it loses nothing: `confirm_pending` goes on with what `begin` was given.
    """

    def __init__(self, session: Session, returned: set[int]) -> None:
        self._session = session
        self._returned = returned
        self._connection: Connection | None = None
        self.begun: m.Ack | None = None  # that of which the outcome is not known
        self._is_sent = False

    def begin(self, ack: m.Ack | None) -> None:
        """From here on it is to be sent, or was; the one before is confirmed."""
        self.begun = ack

    def send(self) -> None:
        """Send what was begun, and do not wait for the answer."""
        ack, session = self.begun, self._session
        if ack is None:
            return
        with contextlib.suppress(ServiceUnavailable):  # `confirm_pending` sends it again
            if self._connection is None:
                self._connection = session.connect()
            note = noting(session, "ack")
            self._connection.post(ack, None, session.timeout_s)
            self._is_sent = True
            if note is not None:
                note.posted(ack)

    def confirm_pending(self, within_s: float | None = None) -> None:
        """Wait for the answer to the last one, for `within_s` at most (None: as any call). Raises `LeaseExpired` when
        its rows went to somebody else, and `DeadlineExceeded`, after which it may be called again."""
        ack = self.begun
        if ack is None:
            return
        try:
            reply = self._outcome(ack, within_s)
        except DeadlineExceeded:
            raise
        except TransferQueueError:
            self.begun = None
            raise
        self.begun = None
        if isinstance(reply, m.Failed):
            raise error_from_code(reply.code, reply.text)
        self._returned.update(rows_in(reply.returned))

    def _outcome(self, ack: m.Ack, within_s: float | None) -> Any:
        is_sent, self._is_sent = self._is_sent, False  # where an interrupt strikes, part of the answer may be read
        if is_sent and self._connection is not None:
            try:
                return self._connection.answer(ack, self._session.timeout_s if within_s is None else within_s)[0]
            except ServiceUnavailable:
                pass
            except DeadlineExceeded:
                if within_s is not None:
                    raise
        self.close()
        return _asked(self._session, ack, within_s)  # under its number: it has one outcome

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
