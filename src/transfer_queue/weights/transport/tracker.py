"""Who gives which bucket to whom, while the receivers of one update give them to each other.

The trainer's rank 0 knows who has which bucket. A receiver that takes part listens, at its own end of the connection to
the trainer, and joins the update with its address and the buckets that it wants. Each of its streams then asks for one
bucket after another, and says with each question how the last one went:

- What nobody has comes from the rank that packed it, to each receiver another bucket: so a rank sends about one model.
  It gives `uploads` at once, and to one receiver one at a time as soon as there are others.
- What somebody has comes from there: the rarest first, from whoever gives the least, two at once at most.
- When neither is possible and nothing is left that only the trainer has, it gives once more; else the asker waits, and
  is answered as soon as there is something.

Nobody is trusted: a receiver checks what it is given. A giver that was late or lost is not asked for until it asks for
something itself, and never after `MAX_FAULTS`; one that gave damage has not got that bucket any more. Receivers that
are cut off fetch the rest from the trainer, as those do that never ask. All of this ends with the update, whose
manifest's key is its name.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from transfer_queue.errors import InvalidInput, VersionGone
from transfer_queue.structs import decodable
from transfer_queue.weights.transport.fetching import MAX_FAULTS
from transfer_queue.weights.transport.info import key_of
from transfer_queue.weights.transport.protocol import Came
from transfer_queue.weights.version.manifest import Manifest
from transfer_queue.wire.blocking import SLOWEST

UPLOADS = 2  # of a rank: one keeps its link busy while the other begins or ends; more delay the first whole bucket
PEER_UPLOADS = 2  # of a receiver
MAX_LOOKED = 64  # buckets of which the rarest is taken
MAX_UPDATES = 8
MAX_WAIT_S = 10.0
GRACE_S = 1.0  # a receiver is to say itself that something was late


@decodable
class Assignment(msgspec.Struct, frozen=True):
    """Fetch `bucket` from `peer` ("": from the trainer's rank that has it). -1: ask again; `is_done`: no more."""

    bucket: int = -1
    peer: str = ""
    is_done: bool = False


class Transfer(NamedTuple):
    """One that is under way, until then at most. `peer` gives it, "" for a rank."""

    taker: str
    bucket: int
    peer: str
    until: float


class Participant:
    """A receiver that takes part. Sets of buckets are integers, a bit each."""

    def __init__(self, lacking: int, stall_s: float) -> None:
        self.lacking = lacking
        self.stall_s = stall_s
        self.held = 0
        self.coming = 0
        self.avoids: set[str] = set()
        self.num_uploads = 0
        self.num_faults = 0
        self.is_silent = False  # late or lost, and not heard of since

    @property
    def gives(self) -> bool:
        return not self.is_silent and self.num_faults < MAX_FAULTS

    @property
    def is_free(self) -> bool:
        return self.gives and self.num_uploads < PEER_UPLOADS


class Swarm:
    """The receivers of one update. Without locks, threads or a clock of its own; streams are named by the caller.

    `sizes` of the buckets, and the rank that `holders` gives for each. A bucket's bit is its place among all by size:
    of equally rare ones the largest goes first, as it takes longest to go round."""

    def __init__(self, sizes: Sequence[int], holders: Sequence[int], uploads: int = UPLOADS) -> None:
        self._buckets = sorted(range(len(sizes)), key=lambda bucket: -sizes[bucket])  # by bit
        self._places = {bucket: place for place, bucket in enumerate(self._buckets)}
        self._sizes, self._holders = sizes, holders
        self._limit = uploads
        self._ranks: dict[int, int] = {}
        for bucket, rank in enumerate(holders):
            self._ranks[rank] = self._ranks.get(rank, 0) | 1 << self._places[bucket]
        self._takers: dict[str, Participant] = {}
        self._under_way: dict[Hashable, Transfer] = {}
        self._uploads: Counter[int] = Counter()  # of the ranks
        self._copies = [0] * len(sizes)  # by bit: with receivers that give
        self._rarity = [0] * len(sizes)  # the same with those that are coming
        self._alone = (1 << len(sizes)) - 1  # what no receiver gives
        self._sent = 0  # what is on its way from a rank
        self._offered: int | None = 0  # what receivers would give now; None: to be looked up

    def join(self, name: str, wanted: Iterable[int], stall_s: float) -> None:
        """A receiver that lacks these. One that was here before begins anew."""
        self.leave(name)
        lacking = 0
        for bucket in wanted:
            if bucket not in self._places:
                raise InvalidInput(f"bucket {bucket} of {len(self._sizes)}")
            lacking |= 1 << self._places[bucket]
        self._takers[name] = Participant(lacking, stall_s)

    def leave(self, name: str) -> None:
        """It neither takes nor gives any more."""
        taker = self._takers.get(name)
        if taker is None:
            return
        for stream in [stream for stream, one in self._under_way.items() if one.taker == name]:
            self.settle(stream, "")
        self._silence(taker)
        del self._takers[name]

    def settle(self, stream: Hashable, came: Came) -> None:
        """How the stream's transfer went ("": nobody knows). Nothing when none is under way."""
        transfer = self._under_way.pop(stream, None)
        if transfer is None:
            return
        bucket, place = transfer.bucket, self._places[transfer.bucket]
        bit = 1 << place
        taker, giver = self._takers[transfer.taker], self._takers.get(transfer.peer)
        taker.coming &= ~bit
        self._rarity[place] -= 1
        if not transfer.peer:
            self._uploads[self._holders[bucket]] -= 1
            if not any(one.bucket == bucket and not one.peer for one in self._under_way.values()):
                self._sent &= ~bit
        elif giver is not None:
            giver.num_uploads = max(0, giver.num_uploads - 1)  # it may have begun anew
            self._offered = None
        if came == "staged":
            self._add(taker, bit)
        elif came and giver is not None:
            self._blame(taker, transfer.peer, giver, bit, came)

    def hear(self, name: str) -> None:
        """It is there, as it asks. `VersionGone` for one that takes no part."""
        taker = self._takers.get(name)
        if taker is None:
            raise VersionGone(f"{name} takes no part in this update")
        if taker.is_silent:
            taker.is_silent = False
            if taker.gives:
                self._count(taker.held, 1)

    def expire(self, now: float) -> None:
        """Give up what is late: those that should have said so are silent, and are not sent there again."""
        for stream, late in [(stream, one) for stream, one in self._under_way.items() if one.until <= now]:
            taker = self._takers[late.taker]
            self.settle(stream, "")
            taker.avoids |= {late.peer} - {""}
            self._silence(taker)

    def next_end(self) -> float | None:
        """When something will be late."""
        return min((one.until for one in self._under_way.values()), default=None)

    def pick(self, stream: Hashable, name: str, now: float) -> Assignment | None:
        """What this stream of a receiver is to fetch, which is under way then; None: wait."""
        taker = self._takers[name]
        wanted = taker.lacking & ~taker.coming
        if not wanted:
            return Assignment(is_done=True)
        if taker.is_silent:
            return None
        unsent = wanted & self._alone & ~self._sent
        found = (
            self._from_rank(name, unsent)
            or self._from_peer(name, taker, wanted)
            or (None if unsent else self._from_rank(name, wanted))
        )
        if found is not None:
            self._begin(stream, name, taker, found, now)
        return found

    # steps

    def _from_rank(self, name: str, wanted: int) -> Assignment | None:
        for rank in sorted(self._ranks, key=self._uploads.__getitem__):
            here = wanted & self._ranks[rank]
            if here and self._uploads[rank] < self._limit and not self._is_busy(rank, name):
                return Assignment(self._buckets[self._rarest(here)])
        return None

    def _is_busy(self, rank: int, name: str) -> bool:
        """Whether the rank gives this receiver something, and others may want to be given something, too."""
        mine = (one for one in self._under_way.values() if one.taker == name and not one.peer)
        return len(self._takers) > 1 and any(self._holders[one.bucket] == rank for one in mine)

    def _from_peer(self, name: str, taker: Participant, wanted: int) -> Assignment | None:
        if self._offered is None:
            self._offered = _all(one.held for one in self._takers.values() if one.is_free)
        if not self._offered & wanted:
            return None
        able = {
            other: one
            for other, one in self._takers.items()
            if one.is_free and one.held & wanted and other not in taker.avoids and other != name
        }
        if not able:
            return None
        place = self._rarest(_all(one.held for one in able.values()) & wanted)
        have_it = (other for other, one in able.items() if one.held >> place & 1)
        return Assignment(self._buckets[place], min(have_it, key=lambda other: able[other].num_uploads))

    def _rarest(self, buckets: int) -> int:
        looked = [place for place, _ in zip(_bits(buckets), range(MAX_LOOKED), strict=False)]
        return min(looked, key=self._rarity.__getitem__)

    def _begin(self, stream: Hashable, name: str, taker: Participant, found: Assignment, now: float) -> None:
        bucket, place = found.bucket, self._places[found.bucket]
        until = now + taker.stall_s + self._sizes[bucket] / SLOWEST + GRACE_S
        self._under_way[stream] = Transfer(name, bucket, found.peer, until)
        taker.coming |= 1 << place
        self._rarity[place] += 1
        if found.peer:
            self._takers[found.peer].num_uploads += 1
            self._offered = None
        else:
            self._uploads[self._holders[bucket]] += 1
            self._sent |= 1 << place

    def _add(self, taker: Participant, bit: int) -> None:
        """It has this bucket."""
        if not taker.held & bit:
            taker.held |= bit
            taker.lacking &= ~bit
            if taker.gives:
                self._count(bit, 1)

    def _blame(self, taker: Participant, peer: str, giver: Participant, bit: int, came: Came) -> None:
        if came == "damaged":
            if giver.gives:
                self._count(giver.held & bit, -1)
            giver.held &= ~bit
        else:
            taker.avoids.add(peer)
            self._silence(giver)
        if giver.gives and giver.num_faults + 1 >= MAX_FAULTS:
            self._count(giver.held, -1)
        giver.num_faults += 1

    def _silence(self, taker: Participant) -> None:
        if taker.gives:
            self._count(taker.held, -1)
        taker.is_silent = True

    def _count(self, buckets: int, by: int) -> None:
        self._offered = None
        for place in _bits(buckets):
            self._copies[place] += by
            self._rarity[place] += by
            self._alone = self._alone & ~(1 << place) | (self._copies[place] == 0) << place


class WaitingStream:
    """A stream that has asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.answered = threading.Event()
        self.answer: Assignment | None = None
        self.is_over = False


class OpenSwarm:
    """One update at the tracker."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.waiting: dict[Hashable, WaitingStream] = {}  # by stream, first come first


class Tracker:
    """The updates that are on their way, by the keys of their manifests. Thread-safe.

    Whoever asks is an object of the caller (a connection), and what it has under way is given up when it has `left`."""

    def __init__(self, uploads: int = UPLOADS, clock: Callable[[], float] = time.monotonic) -> None:
        if uploads < 1:
            raise InvalidInput(f"{uploads} uploads at once")
        self._uploads = uploads
        self._clock = clock
        self._lock = threading.Lock()
        self._swarms: dict[str, OpenSwarm] = {}  # oldest first
        self._joined: dict[Hashable, tuple[str, str]] = {}  # by who joined: key and name

    def begin(self, manifest: Manifest) -> None:
        """Receivers may join the update with this version."""
        holders = [manifest.holder(bucket) for bucket in range(len(manifest.buckets))]
        with self._lock:
            self._swarms[key_of(manifest)] = OpenSwarm(Swarm(manifest.buckets, holders, self._uploads))
            for key in list(self._swarms)[:-MAX_UPDATES]:
                self._end(key)

    def end(self, manifest: Manifest) -> None:
        """The update is over; who asks is told so (`VersionGone`). Repeatable."""
        with self._lock:
            self._end(key_of(manifest))

    def close(self) -> None:
        """All are over."""
        with self._lock:
            for key in list(self._swarms):
                self._end(key)

    def join(self, owner: Hashable, key: str, name: str, wanted: Iterable[int], stall_s: float) -> None:
        """A receiver that listens at `name` takes part until `owner` has left, or joins another update. `VersionGone`,
        `InvalidInput`."""
        if not name.startswith("tcp:"):
            raise InvalidInput(f"receivers give buckets at tcp addresses, not at {name!r}")
        if not 0 < stall_s < math.inf:
            raise InvalidInput(f"buckets that stall for {stall_s} s")
        with self._lock:
            self._leave(owner)
            self._find(key).swarm.join(name, wanted, stall_s)
            self._joined[owner] = (key, name)

    def ask(self, stream: Hashable, key: str, name: str, came: Came, timeout_s: float) -> Assignment:
        """What the stream is to fetch next. Waits for something, at most `timeout_s`."""
        end = self._clock() + min(timeout_s, MAX_WAIT_S)
        waiting = WaitingStream(name)
        with self._lock:
            found = self._find(key)
            found.swarm.hear(name)
            found.swarm.settle(stream, came)
            found.waiting[stream] = waiting
            left_s = self._match(found, end)
        while left_s > 0 and not waiting.answered.wait(left_s):
            with self._lock:
                left_s = self._match(found, end)
        with self._lock:
            found.waiting.pop(stream, None)
        if waiting.is_over:
            raise _over(key)
        return waiting.answer or Assignment()

    def left(self, owner: Hashable) -> None:
        """Nothing comes from there any more."""
        with self._lock:
            self._leave(owner)
            for found in self._swarms.values():
                found.waiting.pop(owner, None)
                found.swarm.settle(owner, "")
                self._match(found, 0.0)

    def _find(self, key: str) -> OpenSwarm:
        if key not in self._swarms:
            raise _over(key)
        return self._swarms[key]

    def _leave(self, owner: Hashable) -> None:
        key, name = self._joined.pop(owner, ("", ""))
        if key in self._swarms and (key, name) not in self._joined.values():  # it may have come back otherwise
            self._swarms[key].swarm.leave(name)
            for one in [one for one in self._swarms[key].waiting.values() if one.name == name]:
                one.is_over = True
                one.answered.set()

    def _end(self, key: str) -> None:
        found = self._swarms.pop(key, None)
        for one in () if found is None else found.waiting.values():
            one.is_over = True
            one.answered.set()

    def _match(self, found: OpenSwarm, end: float) -> float:
        """Answer those that wait, as far as there is something. How long to wait until `end`, or the next look."""
        now = self._clock()
        found.swarm.expire(now)
        for stream, one in list(found.waiting.items()):
            if one.answer is None and not one.is_over:
                one.answer = found.swarm.pick(stream, one.name, now)
                if one.answer is not None:
                    one.answered.set()
        late = found.swarm.next_end()
        return min(end, end if late is None else late) - now


def _over(key: str) -> VersionGone:
    return VersionGone(f"no update with manifest {key} is on its way")


def _all(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)


def _bits(buckets: int) -> Iterator[int]:
    while buckets:
        lowest = buckets & -buckets
        yield lowest.bit_length() - 1
        buckets ^= lowest
