"""Batches for one iterator: fetched ahead in one thread, which also keeps their leases alive."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from tensordict import TensorDict

from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.drivers import run
from transfer_queue.client.effects import GRACE_S, Call, Operation
from transfer_queue.client.operations import rows as ops
from transfer_queue.client.operations.tasks import handed
from transfer_queue.client.recording import noting
from transfer_queue.client.session import Interrupted, Session
from transfer_queue.dataloader.lease_owner import LEAVE_S, renewal_s
from transfer_queue.errors import InternalError, InvalidInput, TransferQueueError
from transfer_queue.metadata import BatchMeta
from transfer_queue.wire import messages as m

log = logging.getLogger("transfer_queue")

Batch: TypeAlias = tuple[TensorDict, BatchMeta]
RETRY_S = 0.05


class End(Enum):
    """Nothing is left to wait for."""

    END = 0


END = End.END


class Key(NamedTuple):
    partition: str
    batch_index: int


class LeftOut(NamedTuple):
    """Rows that are not delivered: `used` ones are acknowledged, `returned` ones given back again."""

    used: frozenset[int] = frozenset()
    returned: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What is fetched. `until_done`: the end comes when the task has used the whole partition. `until_cleared`: and
    when the partition was cleared, once there was a batch of it. `dp_size`: of how many ranks this is one (0: of none).
    `skip`: rows of batch `skip_in` that were in the consumer's hands before, which are left out of it; it gave some of
    them back, the `returned`."""

    data_fields: list[str]
    batch_size: int
    task_name: str
    sampling_config: dict[str, Any]
    lease_s: float
    until_done: bool
    holder: bytes
    skip: frozenset[int] = frozenset()
    skip_in: int = 0
    returned: frozenset[int] = frozenset()
    dp_size: int = 0
    until_cleared: bool = False

    def request(self, session: Session, key: Key, wait_s: float, waited_s: float) -> m.Fetch:
        """What asks for a batch. Of one of several ranks it names the whole batch, of which the server knows this
        rank's share; else only as many rows as were not used."""
        skip, size = self.skipped(key), self.batch_size
        if not self.dp_size and len(skip) < size:
            size -= len(skip)
        sampling = {**self.sampling_config, "batch_index": key.batch_index, "partition_id": key.partition}
        return m.Fetch(
            session.next_rid(), key.partition, list(self.data_fields), size, self.task_name,
            ops.checked_sampling(sampling), wait_s, True, self.lease_s, self.until_done, self.holder, True, waited_s,
            self.dp_size, min(len(skip), size - 1) if self.dp_size else 0, self.until_cleared and key.batch_index > 0,
        )  # fmt: skip

    def skipped(self, key: Key) -> frozenset[int]:
        return self.skip if key.batch_index == self.skip_in else frozenset()

    def left_out(self, key: Key) -> LeftOut:
        """What a batch is without. Rows that were given back come again, but not to one of several ranks, which would
        get more micro-batches than the others."""
        skip = self.skipped(key)
        return LeftOut(skip - self.returned, skip & self.returned if self.dp_size else frozenset())


def take(
    client: TransferQueueClient,
    terms: Terms,
    key: Key,
    wait_s: float,
    waited_s: float = 0.0,
    asking: Callable[[Session, int], None] = lambda session, rid: None,
) -> Batch | End | None:
    """The rows and data of one batch, on lease; None when there were none within `wait_s`.

    Of a batch that was begun before, the rest is asked for; a sampler that remembers it gives all of it, and then the
    rows to skip are acknowledged. A batch of which nothing is left has no rows. `waited_s`: for how long it was waited
    for already. `asking` is told the request's number before it is sent. When this raises, nothing was taken.
    """
    session = client.session
    session.hold()
    request = terms.request(session, key, wait_s, waited_s)
    asking(session, request.rid)
    return run(session, taking(session, request, terms.left_out(key)), noting(session, "stream"))


def taking(session: Session, request: m.Fetch, out: LeftOut) -> Operation[Batch | End | None]:
    """`take` as an operation. A service that stands still, or is cut off, is waited for as in calls without a deadline:
    how long it parks the request is no deadline of the loop's."""
    started = time.perf_counter()
    answer = yield from handed(session, request, max(GRACE_S, session.timeout_s))
    rows = answer.rows
    if rows.lease == m.DONE:
        return END
    if rows.lease == m.PASSED:
        return TensorDict({}, batch_size=[0]), answer.meta
    if not rows.rows:
        return None
    if log.isEnabledFor(logging.DEBUG):
        num_rows, elapsed_ms = len(rows.rows) // 8, 1e3 * (time.perf_counter() - started)
        text = "stream %r, batch %s: %d rows x %s, %.2f ms"
        where = (request.partition, request.sampling.get("batch_index"))
        log.debug(text, *where, num_rows, request.fields, elapsed_ms)
    meta = yield from _without(session, answer.meta, out)
    if not len(meta):
        return TensorDict({}, batch_size=[0]), meta
    return (yield from answer.data(meta)), meta


def _without(session: Session, meta: BatchMeta, out: LeftOut) -> Operation[BatchMeta]:
    """The rest of the rows."""
    for rows, kind in ((out.used, m.Ack), (out.returned, m.Release)):
        named = np.isin(meta.indexes, list(rows))
        if not named.any():
            continue
        if meta.lease:
            yield Call(kind(session.next_rid(), *ops.leased(meta.select_samples(np.flatnonzero(named)))))
        meta = meta.select_samples(np.flatnonzero(~named))
    return meta


def give_back(client: TransferQueueClient, meta: BatchMeta) -> None:
    """Offer the rows again. A service that does not answer soon reads of it later; where it cannot be told, their lease
    ends by itself."""
    if meta.lease and len(meta):
        session = client.session
        request = m.Release(session.next_rid(), *ops.leased(meta))
        note = noting(session, "release")
        with contextlib.suppress(TransferQueueError, OSError):
            session.call(Call(request, wait_s=LEAVE_S, grace_s=0.0))
            if note is not None:
                note.posted(request)


class Feed:
    """`get` is for one thread. Between `get`s the thread fetches the batch it was told to `expect`.

    `renew` is called as often as `renewal_s` says, also while a fetch waits or the consumer works.
    """

    def __init__(self, client: TransferQueueClient, terms: Terms, renew: Callable[[], None]) -> None:
        self._client = client
        self._terms = terms
        self._renew = renew
        self._every_s = renewal_s(terms.lease_s)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._key: Key | None = None  # what to fetch, or what `_found` is
        self._found: Batch | End | BaseException | None = None
        self._working: Key | None = None  # what the thread fetches now
        self._asking: tuple[Session, int] | None = None  # its request
        self._waited: tuple[Key | None, float] = (None, 0.0)  # for which batch, and for how long
        self._closed = False
        self._ended_by: BaseException | None = None  # what the thread died of
        self._thread = threading.Thread(target=self._run, name="tq-prefetch", daemon=True)
        self._thread.start()

    # the consumer's side

    def get(self, key: Key) -> Batch | End:
        """The batch of `key`, or the end. Blocks until there is one; raises what fetching it raised."""
        if self._key not in (None, key):
            self.give_back()
        self.expect(key)
        with self._changed:
            while self._found is None:
                if self._closed:
                    return END
                if self._ended_by is not None:
                    raise InternalError("the thread that fetches batches has died") from self._ended_by
                stale = self._working not in (None, key)
                self._changed.wait(RETRY_S if stale else None)
                if stale:
                    self._interrupt()
            found, self._found, self._key = self._found, None, None
        if isinstance(found, BaseException):
            raise found
        return found

    def expect(self, key: Key) -> None:
        """Fetch this batch as soon as possible, unless one is being fetched or waits to be taken."""
        with self._changed:
            if self._key is None:
                self._key = key
                self._changed.notify_all()

    def give_back(self) -> None:
        """Whatever was fetched ahead is offered again."""
        with self._changed:
            found, self._found, self._key = self._found, None, None
            self._interrupt()
        if isinstance(found, tuple):
            give_back(self._client, found[1])

    def stop(self) -> None:
        """The thread renews nothing any more, and ends by itself. Waits for nothing."""
        self._closed = True

    def end(self) -> None:
        """As `stop`; who waits in `get`, in another thread, is told of the end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and give back what nobody took."""
        if self._pid != os.getpid():
            return  # the thread stayed in the parent
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        while self._thread.is_alive() and self._thread is not threading.current_thread():
            self._interrupt()
            self._thread.join(RETRY_S)
        self.give_back()

    def _interrupt(self) -> None:
        if self._asking is not None:
            session, rid = self._asking
            session.interrupt(rid)

    # the thread's side

    def _run(self) -> None:
        try:
            self._work()
        finally:  # whatever ends it, the consumer does not wait for it
            with self._changed:
                self._ended_by = sys.exc_info()[1]
                self._changed.notify_all()

    def _work(self) -> None:
        renewal = time.monotonic() + self._every_s
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, max(0.0, renewal - time.monotonic()))
                if self._closed:
                    return
                key = self._working = self._key if self._found is None else None
            if time.monotonic() >= renewal:
                renewal = time.monotonic() + self._every_s
                self._renew()
            if key is not None:
                self._deliver(key, self._fetch(key, max(RETRY_S, renewal - time.monotonic())))

    def _has_work(self) -> bool:
        return self._closed or (self._key is not None and self._found is None)

    def _fetch(self, key: Key, wait_s: float) -> Batch | End | BaseException | None:
        def asking(session: Session, rid: int) -> None:
            self._asking = (session, rid)

        waited_s = self._waited[1] if self._waited[0] == key else 0.0
        self._waited = (None, 0.0)
        try:
            found = take(self._client, self._terms, key, wait_s, waited_s, asking)
        except Interrupted:
            return None
        except BaseException as error:  # noqa: BLE001  it is raised in the consumer's thread
            return error
        if found is None:
            self._waited = (key, waited_s + wait_s)
        return found

    def _deliver(self, key: Key, found: Batch | End | BaseException | None) -> None:
        with self._changed:
            self._working = None
            if self._key == key and not self._closed:
                self._found = found
                self._changed.notify_all()
                return
        if isinstance(found, tuple):
            give_back(self._client, found[1])


class Calling:
    """The feed over a user's own function: it runs in the consumer's thread, and nothing is fetched ahead.

    The function may talk to other ranks, so it must be called where they expect it.
    """

    def __init__(
        self, fetch: Callable[[Key], tuple[TensorDict | None, BatchMeta]], done: Callable[[Key], bool]
    ) -> None:
        self._fetch = fetch
        self._done = done
        self._closed = False

    def get(self, key: Key) -> Batch | End:
        while not self._closed and not self._done(key):
            data, meta = _pair(self._fetch(key))
            if data is not None:
                return data, meta
            time.sleep(RETRY_S / 5)  # only the function knows what it waits for
        return END

    def expect(self, key: Key) -> None: ...

    def give_back(self) -> None: ...

    def stop(self) -> None: ...

    def end(self) -> None:
        self._closed = True

    def close(self) -> None: ...


def _pair(answer: Any) -> tuple[Any, BatchMeta]:
    """What a user's own function answered, or `InvalidInput`."""
    is_pair = isinstance(answer, (tuple, list)) and len(answer) == 2
    if not is_pair or not (answer[0] is None or isinstance(answer[1], BatchMeta)):
        raise InvalidInput(f"fetch_batch_fn returns (data, BatchMeta), or (None, anything); got {answer!r:.200}")
    return answer[0], answer[1]
