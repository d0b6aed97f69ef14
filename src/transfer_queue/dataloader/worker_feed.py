"""What a loader shares with its worker processes: what to fetch next, whose turn it is to fetch, and to hand over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

from transfer_queue.client.client import TransferQueueClient
from transfer_queue.dataloader.feed import END, Batch, Calling, End, Key, Terms, take
from transfer_queue.errors import LeaseExpired

WAIT_S = 20.0
INDEX_BITS = 43  # of a word; the rest is the round
MAX_ROUNDS = (1 << 63 - INDEX_BITS) - 1


class LoaderPlan(NamedTuple):
    """One iteration over the loader: the first batch, rows of it that the consumer was done with before, `returned`
    ones among them (see `Terms`), who holds the leases.

    `ahead`: whether batches are fetched before the consumer asks for them.
    """

    round: int
    partition: str
    first: int
    skip: frozenset[int]
    holder: bytes
    ahead: bool = True
    returned: frozenset[int] = frozenset()


class Turn:
    """Workers fetch batch after batch in order, so that what the parent waits for is what came first; unless they may
    fetch ahead, none before the parent asked for it, whatever torch asks its workers for.

    Each word has one writer and no lock: a worker that is killed, wherever it is, keeps nobody waiting.
    """

    def __init__(self, context: BaseContext, num_workers: int) -> None:
        self._current: Any = context.RawArray("q", 2)  # the parent's: the round, and the last batch it asked for
        self._passed: Any = context.RawArray("q", num_workers)  # each worker's: the last batch it was done with
        self._handed: Any = context.RawArray("q", num_workers)  # each worker's: the last batch it has in shared memory
        self._ended: Any = context.RawArray("q", num_workers)  # each worker's: the round in which it saw the end
        self._wake = [context.Semaphore(0) for _ in range(num_workers)]
        self._first, self._ahead = 0, True

    # the parent's side

    def begin(self, first: int, ahead: bool = True) -> int:
        """A new round; whoever waits in an older one is told so."""
        started = int(self._current[0]) % MAX_ROUNDS + 1
        self._first, self._ahead = first, ahead
        self._current[1] = 0
        self._current[0] = started
        self._wake_all()
        return started

    def grant(self, batch_index: int) -> None:
        """The consumer asks for this batch."""
        asked = _word(self._current[0], batch_index)
        if not self._ahead and self._current[1] != asked:
            self._current[1] = asked
            self._wake[(batch_index - self._first) % len(self._wake)].release()

    # a worker's side

    def end(self, plan: LoaderPlan, batch_index: int) -> None:
        """Nothing is left: whoever waits for its turn or its grant ends as well."""
        self._ended[self._worker(plan, batch_index)] = plan.round
        self._wake_all()

    def is_mine(self, plan: LoaderPlan, batch_index: int) -> bool | None:
        """Whether to fetch this batch now; None when the round is over. Blocks for `WAIT_S` at most."""
        if self.is_over(plan) or plan.round in self._ended[:]:
            return None
        before = self._passed[self._worker(plan, batch_index - 1)]
        is_next = batch_index == plan.first or before == _word(plan.round, batch_index - 1)
        if is_next and (plan.ahead or self._current[1] >= _word(plan.round, batch_index)):
            return True
        self._wake[self._worker(plan, batch_index)].acquire(timeout=WAIT_S)
        return False

    def is_over(self, plan: LoaderPlan) -> bool:
        """The parent began another round, or wants no more batches."""
        return bool(self._current[0] != plan.round)

    def pass_on(self, plan: LoaderPlan, batch_index: int) -> None:
        """This batch was fetched, or there is none."""
        self._passed[self._worker(plan, batch_index)] = _word(plan.round, batch_index)
        self._wake[self._worker(plan, batch_index + 1)].release()

    def has_handed_before(self, plan: LoaderPlan, batch_index: int) -> bool:
        """Whether no batch before this one is still to come to shared memory; or the round is over. Blocks for
        `WAIT_S` at most."""
        if batch_index == plan.first or self.is_over(plan):
            return True
        before = self._worker(plan, batch_index - 1)
        if self._handed[before] >= _word(plan.round, batch_index - 1):
            return True
        self._wake[self._worker(plan, batch_index)].acquire(timeout=WAIT_S)
        return False

    def hand_over(self, plan: LoaderPlan, batch_index: int, is_last: bool = False) -> None:
        """This batch is in shared memory, or has nothing for it; with `is_last` this worker has no more for it."""
        self._handed[self._worker(plan, batch_index)] = _word(plan.round + is_last, 0 if is_last else batch_index)
        self._wake[self._worker(plan, batch_index + 1)].release()

    def _worker(self, plan: LoaderPlan, batch_index: int) -> int:
        return (batch_index - plan.first) % len(self._wake)

    def _wake_all(self) -> None:
        for wake in self._wake:
            wake.release()


def _word(current: int, batch_index: int) -> int:
    """A batch of a round as one number, which is written and read as a whole."""
    return current << INDEX_BITS | batch_index


class Links:
    """The loader's end and the workers' ends, for one set of workers. Travels to them only when they are started."""

    def __init__(self, context: BaseContext, num_workers: int) -> None:
        self.pid = os.getpid()  # the loader's
        self.num_workers = num_workers
        self.turn = Turn(context, num_workers)
        pipes = [context.Pipe(duplex=False) for _ in range(num_workers)]  # no locks, as a queue has
        self._plans = [receiver for receiver, _ in pipes]
        self._senders = [sender for _, sender in pipes]

    def begin(self, plan: LoaderPlan) -> None:
        """Tell every worker what to do in a new round; each has started to wait for it, or will."""
        plan = plan._replace(round=self.turn.begin(plan.first, plan.ahead))
        for sender in self._senders:
            sender.send(plan)

    def let_go(self) -> None:
        """Every worker waits for a plan that will not come: their iteration has no batches."""
        self.begin(LoaderPlan(0, "", 0, frozenset(), b"", ahead=False))
        self.turn.begin(0)

    def plan(self, worker: int) -> LoaderPlan:
        """The plan of a worker's next iteration, as soon as it is there; it may be over by then."""
        plan: LoaderPlan = self._plans[worker].recv()
        return plan


class WorkerFeed:
    """A worker's share of the batches. The parent's holder keeps their leases. The feed ends with the round; where the
    holder ended within it, `get` raises `LeaseExpired`."""

    def __init__(self, client: TransferQueueClient, terms: Terms, plan: LoaderPlan, turn: Turn) -> None:
        self._client = client
        self._terms = terms
        self._plan = plan
        self._turn = turn

    def get(self, key: Key) -> Batch | End:
        """The batch of `key` once it is its turn, or the end. Raises what fetching it raised."""
        waited_s = 0.0
        while True:
            mine = self._turn.is_mine(self._plan, key.batch_index)
            if mine is None:
                return END
            found: Batch | End | None = None
            if mine:
                try:
                    found = take(self._client, self._terms, key, WAIT_S, waited_s=waited_s)
                    waited_s += WAIT_S
                except LeaseExpired:
                    # The holder is gone: the parent left the iteration, or the service is another one than the
                    # holder's, which a worker that has just been started cannot know. Only the first is an end.
                    if not self._turn.is_over(self._plan):
                        self._turn.pass_on(self._plan, key.batch_index)
                        raise
                    found = END
                except BaseException:
                    self._turn.pass_on(self._plan, key.batch_index)  # who waits for it finds out as well
                    raise
            if found is END:
                self._turn.end(self._plan, key.batch_index)
            elif found is not None:
                self._turn.pass_on(self._plan, key.batch_index)
            if found is not None:
                return found


class HandingOver(NamedTuple):
    """A worker's place in the order in which batches come to shared memory. Where there is room for few, one that the
    parent asks for later must not take that of the one it waits for."""

    turn: Turn
    plan: LoaderPlan
    batch_index: int

    def wait(self) -> None:
        """Block until all batches before have come, or the round is over."""
        while not self.turn.has_handed_before(self.plan, self.batch_index):
            pass

    def done(self) -> None:
        self.turn.hand_over(self.plan, self.batch_index)


class GrantedFeed:
    """A user's own function, which is called for a batch once the consumer asked for it."""

    def __init__(self, calling: Calling, plan: LoaderPlan, turn: Turn) -> None:
        self._calling = calling
        self._plan = plan
        self._turn = turn

    def get(self, key: Key) -> Batch | End:
        while not (mine := self._turn.is_mine(self._plan, key.batch_index)):
            if mine is None:
                return END
        found = self._calling.get(key)
        if found is END:
            self._turn.end(self._plan, key.batch_index)
        else:
            self._turn.pass_on(self._plan, key.batch_index)
        return found


def batches(
    feed: WorkerFeed | Calling | GrantedFeed, plan: LoaderPlan, worker: int, num_workers: int
) -> Iterator[tuple[int, Batch]]:
    """(number, batch) of every batch of one worker."""
    index = plan.first + worker
    while (found := feed.get(Key(plan.partition, index))) is not END:
        assert not isinstance(found, End)
        yield index, found
        index += num_workers
