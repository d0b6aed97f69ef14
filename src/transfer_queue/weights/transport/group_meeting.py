"""How the ranks of one trainer find its rank 0 where torch's process group is all that they have in common.

They meet in the group's store. A collective that somebody gave up could not be taken back: the training job's next one
would get what was meant for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
import torch

from transfer_queue.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidInput,
    ServiceUnavailable,
    TransferQueueError,
    error_from_code,
)
from transfer_queue.structs import decodable
from transfer_queue.weights.transport.deadline import Deadline, TimedCall
from transfer_queue.weights.transport.faults import as_typed
from transfer_queue.weights.transport.ranks import BEYOND_S, RankFault

PREFIX = "transfer_queue/weights/meeting"
T = TypeVar("T")
GIVEN_UP = "-"
FIRST_S, LONGEST_S = 0.002, 0.25  # between two looks
LATE = "did not come to `trainer_init` in time: `timeout_s` has to cover the slowest rank"


@decodable
class MeetingPlace(msgspec.Struct, frozen=True):
    """Where the other ranks find rank 0, or why they do not."""

    address: str = ""
    token: str = ""
    fault: RankFault | None = None

    @property
    def text(self) -> str:
        return msgspec.json.encode(self).decode()


class GroupMeeting:
    """One call of `trainer_init` on every rank of torch's process group. `InvalidInput`: see `check_group`.

    The calls of another rank have numbers, and rank 0 answers each once, in their order. The first value under a call's
    key counts: the answer, or that the rank has given it up. So both know whether they have met. A store whose host is
    frozen answers nobody, and has no deadlines of ours: threads ask it, and end when it answers. Where torch has no
    store, a broadcast waits for as long as the group does.
    """

    def __init__(self, rank: int, world: int) -> None:
        check_group(rank, world)
        self._rank = rank
        self._store = _group_store()
        self._untold = list(range(1, world))
        self._gave_up = set[int]()  # ranks that came, and did not wait until they were answered
        self._is_over = threading.Event()  # nobody waits for the store any more

    # rank 0

    def tell(self, place: MeetingPlace, deadline: Deadline) -> None:
        """Once all have come. Raises `DeadlineExceeded` where one does not, which is not led then."""
        with _torch_faults():
            if self._store is None:
                self._untold = []
                _broadcast(place.text)
                return
            self._asked(self._tell, deadline.left("meeting the ranks"), place.text, deadline)

    def _tell(self, text: str, deadline: Deadline) -> None:
        for rank in self._untold:  # before any is told
            self._await(rank, deadline)
        while self._untold:
            if self._answer(self._untold[0], text):
                self._untold.pop(0)
            else:
                self._await(self._untold[0], deadline)

    def tell_fault(self, error: BaseException) -> None:
        """Have those that were told nothing raise what ended rank 0, also if they come later; those that gave up know
        that they have not met, and come to the next meeting. Does not wait for them."""
        typed = as_typed(error) if isinstance(error, Exception) else Aborted("rank 0 was interrupted")
        text = MeetingPlace(fault=RankFault.of(typed)).text
        with suppress(TransferQueueError), _torch_faults():  # the fault that led here is the one to raise
            if self._store is None and self._untold:
                _broadcast(text)
                return
            self._asked(self._answer_all, BEYOND_S, text)

    def _answer_all(self, text: str) -> None:
        for rank in self._untold:
            while (self._waits(rank) or rank not in self._gave_up) and not self._answer(rank, text):
                pass

    def _await(self, rank: int, deadline: Deadline) -> None:
        if not self._until(lambda: self._waits(rank), deadline.left(f"meeting rank {rank}")):
            raise DeadlineExceeded(f"rank {rank} {LATE}")

    def _waits(self, rank: int) -> bool:
        """Whether a call of it has no answer yet. Those that it gave up are passed over."""
        while (number := self._store.add(f"{rank}/answered", 0) + 1) <= self._store.add(f"{rank}/calls", 0):
            if not self._store.check([f"{rank}/{number}"]):
                return True
            self._gave_up.add(rank)
            self._store.add(f"{rank}/answered", 1)
        return False

    def _answer(self, rank: int, text: str) -> bool:
        """Whether its next call has this answer now, and was not given up before."""
        number = self._store.add(f"{rank}/answered", 1)
        is_told = bool(self._store.compare_set(f"{rank}/{number}", "", text).decode() == text)
        self._gave_up |= set() if is_told else {rank}
        return is_told

    # the others

    def find(self, timeout_s: float) -> MeetingPlace:
        """What rank 0 tells. Raises its fault; `DeadlineExceeded`, `ServiceUnavailable` when the group is gone."""
        with _torch_faults():
            text = _broadcast("") if self._store is None else self._asked(self._told, timeout_s, timeout_s)
        found = msgspec.json.decode(text, type=MeetingPlace)
        if found.fault is not None:
            raise error_from_code(found.fault.code, f"rank 0: {found.fault.text}")
        return found

    def _told(self, timeout_s: float) -> str:
        key = f"{self._rank}/{self._store.add(f'{self._rank}/calls', 1)}"
        try:
            self._until(lambda: self._store.check([key]), timeout_s)
        finally:  # an interrupt too: rank 0 is not to count on this call
            told = self._store.compare_set(key, "", GIVEN_UP).decode()
        if told == GIVEN_UP:
            raise DeadlineExceeded(f"rank 0 {LATE}")
        self._store.delete_key(key)  # it has the token
        return str(told)

    # both

    def _asked(self, function: Callable[..., T], timeout_s: float, *args: Any) -> T:
        """What this returns of the store, which has little more than that time. An interrupt ends the asking, too."""
        try:
            call = TimedCall(function, *args)
            return call.result(Deadline(timeout_s + BEYOND_S), "the store of torch's process group")
        finally:
            self._is_over.set()

    def _until(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Whether it is within that time. The store's own `wait` keeps the store from all other threads."""
        end = time.monotonic() + timeout_s
        for pause_s in pauses():
            if is_so():
                return True
            left_s = end - time.monotonic()
            if left_s <= 0 or self._is_over.wait(min(pause_s, left_s)):
                break
        return False


def pauses() -> Iterator[float]:
    """Seconds between two looks at what somebody else has to do: soon at first, and without end."""
    pause_s = FIRST_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_S)


def check_group(rank: int, world: int) -> None:
    """`InvalidInput` when this is not `rank` of a process group of `world` ranks, over which they could meet."""
    group = torch.distributed
    if not (group.is_available() and group.is_initialized() and group.get_world_size() == world):
        raise InvalidInput(f"no process group of {world} ranks: give `meet`, the address of rank 0, and a `token`")
    if group.get_rank() != rank:
        raise InvalidInput(f"rank {rank} is rank {group.get_rank()} of the process group")


def _group_store() -> Any:
    """The store of torch's process group; None where this torch does not give it."""
    distributed: Any = torch.distributed
    get = getattr(distributed.distributed_c10d, "_get_default_store", None)
    return None if get is None else distributed.PrefixStore(PREFIX, get())


def _broadcast(text: str) -> str:
    """What rank 0 gives, on every rank."""
    told = [text]
    torch.distributed.broadcast_object_list(told, 0)
    return told[0]


@contextmanager
def _torch_faults() -> Iterator[None]:
    """What torch raises, of any kind of group or store, as one of our errors."""
    try:
        yield
    except TransferQueueError:
        raise
    except RuntimeError as error:
        raise ServiceUnavailable(f"the ranks could not meet over torch's process group: {error}") from error
