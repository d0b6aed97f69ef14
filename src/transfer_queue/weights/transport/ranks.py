"""The ranks of one trainer: each packs what it holds, rank 0 leads, the others hold (`holder`).

In an update every rank brings something to rank 0 three times, and waits for what it is told then:

    offer    its shards                  ->  the version's number, and where each cell is to lie
    packed   digests of what it packed   ->  the manifest's key, once it is made
    served   (it may be fetched)         ->  the report of the update, or what came after it was decided

Where all ranks have the version before, packed alike, only what differs from it is packed. If receivers turn out to
lack that version, ranks are told `GIVE_WHOLE` in place of a report, and come to `served` once more. An error in an
update that was decided is told as a `DecidedUpdate`: late receivers are given that version, by all ranks.

Connections are ours, with deadlines, no process group: of a rank that is dead, or late, all others are told in time.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from transfer_queue.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidInput,
    ProtocolError,
    ServiceUnavailable,
    TransferQueueError,
    WrongEpoch,
    error_from_code,
    kept,
)
from transfer_queue.structs import decodable
from transfer_queue.weights.transport import protocol as p
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.faults import cut_text
from transfer_queue.weights.transport.pending import SyncReport
from transfer_queue.weights.version.plans import ShardPlan
from transfer_queue.weights.version.shard_table import ShardTable
from transfer_queue.wire.address import Address
from transfer_queue.wire.blocking import at_most

MAX_NBYTES = 1 << 30  # of a table, or a plan
GIVE_WHOLE = b""  # in place of an outcome
LEFT = "rank 0 has left"
BEYOND_S = 1.0  # that a rank waits longer than it says: for the reason


@decodable
class RankFault(msgspec.Struct, frozen=True):
    code: str
    text: str

    @staticmethod
    def of(error: TransferQueueError) -> RankFault:
        return RankFault(error.code, cut_text(str(error)))


@decodable
class RankOffer(msgspec.Struct, frozen=True):
    """What a rank comes with. `table` is left out when it is the one that was sent over this connection before. `base`:
    the manifest's key of the version that it could pack differences to. `fault`: why it cannot take part, in place of
    all of this."""

    version: int | None = None
    address: str = ""
    key: str = ""
    table: ShardTable | None = None
    base: str = ""
    fault: RankFault | None = None


@decodable
class Planned(msgspec.Struct, frozen=True):
    """What rank 0 answers: `turn` names this update. `compares`: what differs from the base is to be packed. `newest`:
    the manifest's key of the version that late receivers are given until then."""

    turn: str
    version: int
    plan: ShardPlan
    compares: bool = False
    newest: str = ""


@decodable
class Sealed(msgspec.Struct, frozen=True):
    """The manifest's key, and the number that it gives to this rank's first bucket; and those of the manifest of all of
    the version, where this one is a difference."""

    key: str
    first: int
    whole_key: str
    whole_first: int


@decodable
class DecidedUpdate(msgspec.Struct, frozen=True):
    """How an update ended whose version late receivers are given."""

    report: SyncReport | None = None
    fault: RankFault | None = None


class _Brought:
    """What a rank has brought to a step, and what it is told."""

    def __init__(self, step: str, body: bytes, timeout_s: float, is_lost: Callable[[], bool]) -> None:
        self.step, self.body, self.is_lost = step, body, is_lost
        self.until = time.monotonic() + timeout_s  # it waits
        self.is_next = False  # an offer of a rank for which this turn is over: it waits for the next one
        self.answer: bytes | None = None
        self.error: TransferQueueError | None = None

    @property
    def is_open(self) -> bool:
        return self.answer is None and self.error is None


class RankMeeting:
    """At rank 0: who has brought what. Connections call `bring` and `left`, the thread that sends calls the rest.

    An update is named by its `turn`, from `begin` to `end`. Who brings something to another one is told so. A rank
    that was in it and comes with another offer waits for the next one, and hears nothing of this one any more.
    """

    def __init__(self, world: int, run_id: str = "") -> None:
        self.world = world
        self._run_id = run_id
        self.turn = ""
        self._changed = threading.Condition()
        self._brought: dict[int, _Brought] = {}
        self._taking: set[int] = set()  # ranks that are in this turn, or were: a further offer is for the next one
        self._visits: dict[int, object] = {}  # the connection over which a rank came last
        self._untold: set[object] = set()  # connections whose ranks have brought something, and have no answer yet
        self._fault: TransferQueueError | None = None  # why this turn cannot end well
        self._tables: dict[int, tuple[str, ShardTable]] = {}
        self._is_closed = False

    # for connections

    def enter(self, asked: p.EnterRank) -> str:
        """This run. `WrongEpoch` for a rank of another one: of a job before, that woke up, or of rank 0's life before.
        What it would give is not of this run's version."""
        if asked.run_id not in ("", self._run_id):
            raise WrongEpoch(f"rank {asked.rank} is of run {asked.run_id!r}, rank 0 of {self._run_id!r}: trainer_init")
        return self._run_id

    def bring(
        self, asked: p.RankMessage, body: bytes, visit: object, is_lost: Callable[[], bool] = lambda: False
    ) -> bytes:
        """What the rank is told, once that is known. Blocks, the rank's `timeout_s` at most. `is_lost`: whether the
        connection is: nobody reads from it meanwhile."""
        rank, step, turn = asked.rank, asked.step, asked.turn
        if not 0 < rank < self.world:
            raise InvalidInput(f"rank {rank} of {self.world}: others than 0 come here")
        mine = _Brought(step, body, asked.timeout_s, is_lost)
        with self._changed:
            if self._is_closed:
                raise ServiceUnavailable(LEFT)
            self._visits[rank] = visit
            self._untold.add(visit)
            if step != "offer" and turn != self.turn:
                raise Aborted("that update is over")
            if step == "failed":
                found = msgspec.json.decode(body, type=RankFault)
                self._spoil(error_from_code(found.code, f"rank {rank}: {found.text}"))
                return b""
            before = self._brought.get(rank)
            if before is not None and before.is_open:
                before.error = Aborted("the rank has come again")
            if step == "offer" and rank in self._taking:
                mine.is_next = True
                self._spoil(Aborted(f"rank {rank} has given up the update"))
            self._brought[rank] = mine
            self._changed.notify_all()
            self._changed.wait_for(lambda: not mine.is_open, asked.timeout_s)
            if self._brought.get(rank) is mine:
                del self._brought[rank]
            if mine.error is not None:
                raise mine.error
            if mine.answer is None:
                late = self._fault or self._late(step, besides=rank)  # who gave up is no longer there, but not late
                if self.turn:  # the others would wait for this one in vain
                    self._spoil(late)
                    self._taking.add(rank)
                raise late
            return mine.answer

    def told(self, visit: object) -> None:
        """What `bring` returned, or raised, was sent."""
        with self._changed:
            self._untold.discard(visit)
            self._changed.notify_all()

    def left(self, rank: int, visit: object) -> None:
        """This connection of it is lost; it may have come over another one since."""
        self.told(visit)
        with self._changed:
            if self._visits.get(rank) is not visit:
                return
            self._tables.pop(rank, None)
            if rank in self._taking:
                self._spoil(ServiceUnavailable(f"rank {rank} has left in the update"))

    # for the thread that sends

    def begin(self) -> None:
        with self._changed:
            self.turn = secrets.token_hex(8)
            self._taking, self._fault = set(), None

    def gather(self, step: p.Step, deadline: Deadline) -> list[bytes]:
        """What the other ranks bring to this step, in their order, once all have. Raises what one of them reports.

        An update ends, for all, by the earliest of their deadlines: it must not go on without one of them.
        """
        others = range(1, self.world)

        def have_come() -> bool:
            return self._fault is not None or all(self._is_at(rank, step) for rank in others)

        with self._changed:
            came = self._changed.wait_for(have_come, deadline.left(f"waiting for the ranks ({step})"))
            while came and self._fault is None and self._let_go(step):
                came = self._changed.wait_for(have_come, deadline.left(f"waiting for the ranks ({step})"))
            if not came:
                self._spoil(self._late(step))
            if self._fault is not None:
                raise self._fault
            self._taking |= set(others)
            brought = [self._brought[rank] for rank in others]
            deadline.end_within(min(one.until for one in brought) - time.monotonic())
            return [one.body for one in brought]

    def _let_go(self, step: str) -> bool:
        """Whether some have left since they came to this step, with the lock. An offer of one that has given up, or was
        killed, is no more than if it had not come: it may come again."""
        lost = [rank for rank in range(1, self.world) if self._brought[rank].is_lost()]
        for rank in lost:
            error = ServiceUnavailable(f"rank {rank} has left in the update")
            self._brought.pop(rank).error = error
            if step != "offer":
                self._spoil(kept(error))
        self._changed.notify_all()
        return bool(lost)

    def answer(self, bodies: Sequence[bytes]) -> None:
        """Tell the ranks that are in this turn, in their order."""
        with self._changed:
            for rank, body in enumerate(bodies, 1):
                found = self._brought.get(rank)
                if found is not None and not found.is_next:
                    found.answer = body
            self._changed.notify_all()

    def end(self, error: TransferQueueError | None = None) -> None:
        """The update is over; who waits for it is told why. Who waits for the next one goes on waiting."""
        with self._changed:
            self.turn, self._taking, self._fault = "", set(), None
            for one in self._brought.values():
                if one.is_open and error is not None and not one.is_next:
                    one.error = kept(error)  # each is raised by another thread
                one.is_next = False
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Nobody leads any more: who waits is told so. Returns when all were told, within that time."""
        with self._changed:
            self._is_closed = True
        self.end()  # there is no next one
        self.end(ServiceUnavailable(LEFT))
        with self._changed:
            self._changed.wait_for(lambda: not self._untold, timeout_s)

    def table(self, rank: int, offer: RankOffer) -> ShardTable:
        """The shards of a rank, which sends them when they change."""
        if offer.table is not None:
            found = offer.table
            found.check()
            with self._changed:
                self._tables[rank] = (offer.key, found)
            return found
        key, found = self._tables.get(rank, ("", ShardTable([], [], b"")))
        if key != offer.key:
            raise ServiceUnavailable(f"the shards of rank {rank} are not known here: it has to come again")
        return found

    def _late(self, step: str, besides: int = 0) -> DeadlineExceeded:
        """Whom the others waited for."""
        late = [rank for rank in range(1, self.world) if rank != besides and not self._is_at(rank, step)]
        if not late or (not self.turn and besides):
            return DeadlineExceeded(f"rank 0 did not go on with the update in time ({step})")
        return DeadlineExceeded(f"rank {late[0]} did not come to the update in time ({step}); {len(late)} such ranks")

    def _is_at(self, rank: int, step: str) -> bool:
        found = self._brought.get(rank)
        return found is not None and found.is_open and found.step == step and not found.is_next

    def _spoil(self, error: TransferQueueError) -> None:
        self._fault = self._fault or error
        self._changed.notify_all()


class RankLink:
    """The connection of another rank to rank 0; made anew after it broke. It stays with the run of the first one."""

    def __init__(self, address: Address, rank: int, run_id: str = "") -> None:
        self._address, self._rank, self._run_id = address, rank, run_id
        self._peer: p.Peer | None = None
        self.known = ""  # the table that rank 0 has had over this connection

    def meet(self, timeout_s: float) -> None:
        """Have a connection. One that broke since the last answer came is made anew."""
        if self._peer is not None and self._peer.stream.is_lost:
            self.close()
        if self._peer is not None:
            return
        peer = p.Peer(self._address, timeout_s)
        try:
            told = peer.ask(p.EnterRank(self._rank, self._run_id), timeout_s, at_most(p.MAX_HEADER_NBYTES))
        except BaseException:  # an interrupt must not leave the connection
            peer.close()
            raise
        self._run_id, self._peer, self.known = str(told, "utf-8"), peer, ""

    def bring(self, step: p.Step, turn: str, body: bytes, deadline: Deadline) -> bytes:
        """See `RankMeeting.bring`. `ServiceUnavailable` when rank 0 is gone."""
        left_s = deadline.left(step)
        self.meet(left_s)
        assert self._peer is not None
        message = p.RankMessage(self._rank, step, turn, left_s)
        try:
            return bytes(self._peer.ask(message, left_s + BEYOND_S, at_most(MAX_NBYTES), body))
        except (ServiceUnavailable, DeadlineExceeded, ProtocolError) as error:
            self.close()
            raise type(error)(f"rank {self._rank}: {error}") from error
        except TransferQueueError:  # the answer
            raise
        except BaseException:  # an interrupt: the next step would get the answer to this one
            self.close()
            raise

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer = None
