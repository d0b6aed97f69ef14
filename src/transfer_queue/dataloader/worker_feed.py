"""What a loader shares with its worker processes: what to fetch next, and whose turn it is to fetch."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

from transfer_queue.client.client import TransferQueueClient
from transfer_queue.dataloader.feed import END, Batch, Calling, End, Key, Terms, take
from transfer_queue.errors import LeaseExpired

WAIT_S = 20.0
UNBOUNDED, ENDED = 1 << 62, -1


class LoaderPlan(NamedTuple):
    """One iteration over the loader: the first batch, rows of it that were used before, who holds the leases.

    `ahead`: whether batches are fetched before the consumer asks for them.
    """

    round: int
    partition: str
    first: int
    skip: frozenset[int]
    holder: bytes
    ahead: bool = True


class Turn:
    """Workers fetch batch after batch in order, so that what the parent waits for is what came first; unless they may
    fetch ahead, none before the parent asked for it, whatever torch asks its workers for."""

    def __init__(self, context: BaseContext, num_workers: int) -> None:
        # round, its first batch, the batch to fetch next, the first one that must not be fetched yet
        self._state: Any = context.Array("q", 4)
        self._wake = [context.Semaphore(0) for _ in range(num_workers)]

    def begin(self, first: int, ahead: bool = True) -> int:
        """A new round; whoever waits in an older one is told so."""
        with self._state.get_lock():
            self._state[:] = [self._state[0] + 1, first, first, UNBOUNDED if ahead else first]
            started: int = self._state[0]
        self._wake_all()
        return started

    def _wake_all(self) -> None:
        for wake in self._wake:
            wake.release()

    def grant(self, batch_index: int) -> None:
        """The consumer asks for this batch."""
        with self._state.get_lock():
            first, bound = self._state[1], self._state[3]
            if batch_index < bound:
                return
            self._state[3] = batch_index + 1
        self._wake[(batch_index - first) % len(self._wake)].release()

    def end(self, plan: LoaderPlan) -> None:
        """Nothing is left: whoever waits for its turn or its grant ends as well."""
        with self._state.get_lock():
            if self._state[0] != plan.round:
                return
            self._state[2] = ENDED
        self._wake_all()

    def is_over(self, plan: LoaderPlan) -> bool:
        with self._state.get_lock():
            return bool(self._state[0] != plan.round)

    def is_mine(self, plan: LoaderPlan, batch_index: int) -> bool | None:
        """Whether to fetch this batch now; None when the round is over. Blocks for `WAIT_S` at most."""
        with self._state.get_lock():
            current, first, following, bound = self._state[:]
        if current != plan.round or following == ENDED:
            return None
        if following == batch_index < bound:
            return True
        self._wake[(batch_index - first) % len(self._wake)].acquire(timeout=WAIT_S)
        return False

    def pass_on(self, plan: LoaderPlan, batch_index: int) -> None:
        """This batch was fetched, or there is none."""
        with self._state.get_lock():
            current, first, following, _ = self._state[:]
            if current != plan.round or following == ENDED:
                return
            self._state[2] = batch_index + 1
        self._wake[(batch_index + 1 - first) % len(self._wake)].release()


class Links:
    """The loader's end and the workers' ends. Travels to a worker only when it is started."""

    def __init__(self, context: BaseContext, num_workers: int) -> None:
        self.num_workers = num_workers
        self.turn = Turn(context, num_workers)
        self._plans = [context.SimpleQueue() for _ in range(num_workers)]

    def begin(self, partition: str, first: int, skip: frozenset[int], holder: bytes, ahead: bool) -> None:
        """Tell every worker what to do; each has started to wait for it."""
        plan = LoaderPlan(self.turn.begin(first, ahead), partition, first, skip, holder, ahead)
        for queue in self._plans:
            queue.put(plan)

    def plan(self, worker: int) -> LoaderPlan:
        """The plan of the current iteration, as soon as it is there; one whose iterator ended early is passed over."""
        plan: LoaderPlan = self._plans[worker].get()
        while self.turn.is_over(plan):
            plan = self._plans[worker].get()
        return plan


class WorkerFeed:
    """A worker's share of the batches. The parent's holder keeps their leases; when it ends, so does the feed."""

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
                    found = END
                except BaseException:
                    self._turn.pass_on(self._plan, key.batch_index)  # who waits for it finds out as well
                    raise
            if found is END:
                self._turn.end(self._plan)
            elif found is not None:
                self._turn.pass_on(self._plan, key.batch_index)
            if found is not None:
                return found


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
            self._turn.end(self._plan)
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
