"""A rank of a trainer that does not lead: it packs what it holds, and gives it to receivers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import msgspec
import torch

from transfer_queue.errors import (
    InvalidInput,
    NotOpen,
    ServiceUnavailable,
    StaleBase,
    TransferQueueError,
    error_from_code,
)
from transfer_queue.trace.switch import start_as_told
from transfer_queue.weights.transport import protocol as p
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.transport.faults import as_typed, system_faults
from transfer_queue.weights.transport.group_meeting import FIRST_S, LONGEST_S, pauses
from transfer_queue.weights.transport.info import checked_version
from transfer_queue.weights.transport.pending import SyncReport
from transfer_queue.weights.transport.ranks import (
    GIVE_WHOLE,
    DecidedUpdate,
    Planned,
    RankFault,
    RankLink,
    RankOffer,
    Sealed,
)
from transfer_queue.weights.transport.serving import WeightServer, gone, listen_tcp
from transfer_queue.weights.transport.ticket import SHUT_DOWN, PublishTicket
from transfer_queue.weights.transport.version_store import LastAsked
from transfer_queue.weights.version.anchor import CellChanges, VersionAnchor
from transfer_queue.weights.version.sealing import PackedCells
from transfer_queue.weights.version.shard_table import ShardTable
from transfer_queue.weights.version.sources import WeightSource, check_source, parts_of, table_of


class HeldBuckets:
    """This rank's buckets of the newest versions, by the numbers that manifests give them. Thread-safe."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._held: dict[str, tuple[int, list[torch.Tensor]]] = {}  # by key, oldest first
        self._asked = LastAsked()

    def add(self, key: str, first: int, buckets: list[torch.Tensor]) -> None:
        """Also anew, once an update with it has ended: who asks from then on is a late one."""
        with self._lock:
            self._held[key] = (first, buckets)
            self._asked.forget(key)

    def take_back(self, key: str) -> bool:
        """See `VersionStore.take_back`."""
        with self._lock:
            if self._asked.lately(key):
                return False
            self._held.pop(key, None)
            return True

    def retain(self) -> None:
        """The last one that was added was committed: let go of what is beyond as much as is kept."""
        with self._lock:
            for key in list(self._held)[: -self._keep]:
                del self._held[key]

    def withdraw(self, key: str) -> None:
        with self._lock:
            self._held.pop(key, None)

    def manifest(self, key: str) -> bytes:
        raise gone(key)

    def holders(self, key: str) -> list[str]:
        raise gone(key)

    def bucket(self, key: str, index: int) -> torch.Tensor:
        with self._lock:
            if key not in self._held:
                raise gone(key)
            self._asked.note(key)
            first, buckets = self._held[key]
        if not first <= index < first + len(buckets):
            raise InvalidInput(f"bucket {index} is not held here: {first} to {first + len(buckets) - 1} are")
        return buckets[index - first]

    def lend(self, key: str) -> tuple[int, Callable[[], None]]:
        raise InvalidInput("memory is not lent over TCP")


class HeldBase(NamedTuple):
    """The version that all receivers have, as this rank packed it: its cells, and as `Sealed` has it."""

    anchor: VersionAnchor
    key: str
    first: int


class HeldDraft(NamedTuple):
    """What this rank has packed of a version: all of it, or what changed in the base's cells."""

    version: int
    turn: str
    sealed: Sealed
    anchor: VersionAnchor
    changes: CellChanges | None


class Holder:
    """Takes part in the updates that rank 0 leads, by one thread at a time.

    `info` is that of a `TcpTrainerInfo` with a rank other than 0; `meet` and `token` are known.
    """

    def __init__(self, info: Any, meet: str, token: str, source: WeightSource) -> None:
        check_source(source)
        start_as_told()
        self.info = info
        self._source = source
        self._busy = threading.Lock()
        self._ticket: PublishTicket | None = None
        self._is_over = False
        self._base: HeldBase | None = None
        self._unsure: HeldDraft | None = None  # whose update failed here: rank 0 may have decided it nevertheless
        self.store = HeldBuckets(info.keep)
        self._link = RankLink(p.address_of(meet, token), info.rank, info.run_id)
        listening, self.address = listen_tcp(info.host, info.port)
        self._server = WeightServer(listening, token, self.store)

    @system_faults()
    def meet(self) -> None:
        """Make sure that rank 0 is there. Where ranks are told its address, it may come after this one."""
        end = time.monotonic() + self.info.timeout_s
        try:
            for pause_s in pauses():
                if self._has_met(end - time.monotonic()):
                    break
                time.sleep(pause_s)
        except BaseException:  # an interrupt must not leave the server
            self.shutdown()
            raise

    def _has_met(self, left_s: float) -> bool:
        """`ServiceUnavailable` once there is no time to try again."""
        try:
            self._link.meet(max(left_s, FIRST_S))
            return True
        except ServiceUnavailable:
            if left_s <= LONGEST_S:
                raise
            return False

    def send_weights(self, version: int | None = None, *, deadline_s: float, full: bool = False) -> SyncReport:
        """This rank's part of the update that rank 0 leads, and its report. Every rank has to call it.

        Raises what ended the update, on every rank, at most 2 s after `deadline_s` (packing is not interrupted). What
        was packed may be fetched until it is followed by `keep` others; after an error, until rank 0 says in the next
        update that nobody has it.
        """
        deadline = Deadline(deadline_s)
        with self._busy:
            self._settle(deadline)
            return self._serve(self._pack(version, deadline, full=full), deadline)

    def publish(self, version: int | None = None, *, deadline_s: float) -> PublishTicket:
        """This rank's part of the `publish` that rank 0 leads: returns when all ranks have packed."""
        deadline = Deadline(deadline_s)
        with self._busy:
            self._settle(deadline)
            draft = self._pack(version, deadline, full=False)
            ticket = PublishTicket(draft.version)
            try:
                self._ticket = ticket.start(lambda: self._serve(draft, deadline))
            except RuntimeError as error:  # no thread is to be had, and the others are waiting
                self.store.withdraw(draft.sealed.key)
                self._tell(draft.turn, RankFault.of(as_typed(error)), deadline)
                raise
            return self._ticket

    def _settle(self, deadline: Deadline) -> None:
        """What was published before has ended."""
        if self._is_over:
            raise NotOpen(SHUT_DOWN)
        if self._ticket is not None:
            self._ticket.settle(deadline)

    @system_faults()
    def _pack(self, version: int | None, deadline: Deadline, *, full: bool) -> HeldDraft:
        version = None if version is None else checked_version(version)
        with self._telling(lambda fault: self._offer_fault(fault, deadline)):
            table = table_of(self._source)
        key = table.key
        self._link.meet(deadline.left())
        base = self._base
        offer = RankOffer(
            version, self.address, key, None if self._link.known == key else table,
            "" if full or base is None else base.key,
        )  # fmt: skip
        planned = msgspec.json.decode(self._link.bring("offer", "", msgspec.json.encode(offer), deadline), type=Planned)
        self._link.known = key
        self._find_out(planned.newest)
        with self._telling(lambda fault: self._tell(planned.turn, fault, deadline)):
            planned.plan.check(len(table))
            anchor, packed, changes = self._read(table, planned)
        body = self._link.bring("packed", planned.turn, msgspec.json.encode(packed), deadline)
        sealed = msgspec.json.decode(body, type=Sealed)
        self.store.add(sealed.key, sealed.first, anchor.buckets if changes is None else changes.buckets)
        return HeldDraft(planned.version, planned.turn, sealed, anchor, changes)

    def _read(self, table: ShardTable, planned: Planned) -> tuple[VersionAnchor, PackedCells, CellChanges | None]:
        parts = parts_of(self._source)
        if planned.compares:
            if self._base is None or not self._base.anchor.fits(table, planned.plan):
                raise StaleBase("this rank has no version before with these shards and this plan")
            changes = self._base.anchor.compare(parts)
            return self._base.anchor, PackedCells(changes.digests, changes.stored), changes
        anchor, digests = VersionAnchor.pack(table, parts, planned.plan)
        return anchor, PackedCells(digests), None

    @system_faults()
    def _serve(self, draft: HeldDraft, deadline: Deadline) -> SyncReport:
        """Have it fetched until the update has ended."""
        self._unsure = draft
        told = self._link.bring("served", draft.turn, b"", deadline)
        if told == GIVE_WHOLE:
            self._follow(draft)
            draft = self._unsure = draft._replace(changes=None)
            told = self._link.bring("served", draft.turn, b"", deadline)
        self._unsure = None
        self._keep(draft)
        decided = msgspec.json.decode(told, type=DecidedUpdate)
        if decided.report is None:
            assert decided.fault is not None
            raise error_from_code(decided.fault.code, decided.fault.text)
        return decided.report

    def _keep(self, draft: HeldDraft) -> None:
        """It was decided."""
        sealed = draft.sealed
        if draft.changes is not None:
            self._follow(draft)
        elif self.info.anchor_every > 1:
            self._base = HeldBase(draft.anchor, sealed.whole_key, sealed.whole_first)
            self.store.add(sealed.whole_key, sealed.whole_first, draft.anchor.buckets)
        self.store.retain()

    def _find_out(self, newest: str) -> None:
        """What became of the version before, which may be fetched until then: rank 0 may give it to late receivers,
        also where this rank heard of an error, or of nothing. No more memory is held than in any update."""
        draft, self._unsure = self._unsure, None
        if draft is None:
            return
        if draft.sealed.whole_key == newest:
            self._keep(draft)
        else:
            self.store.withdraw(draft.sealed.key)
            self.store.withdraw(draft.sealed.whole_key)

    def _follow(self, draft: HeldDraft) -> None:
        """The anchor has the changes of the draft, and is given as all of its version."""
        sealed, base = draft.sealed, self._base
        assert base is not None
        assert draft.changes is not None
        self._base = None  # in between it is of no version
        draft.anchor.follow(draft.changes, copy=not self.store.take_back(base.key))
        self.store.withdraw(sealed.key)
        self.store.add(sealed.whole_key, sealed.whole_first, draft.anchor.buckets)
        self._base = HeldBase(draft.anchor, sealed.whole_key, sealed.whole_first)

    @contextmanager
    def _telling(self, tell: Callable[[RankFault], None]) -> Iterator[None]:
        """What ends this rank's part within: the others are waiting."""
        try:
            yield
        except Exception as error:
            tell(RankFault.of(as_typed(error)))
            raise

    def _tell(self, turn: str, fault: RankFault, deadline: Deadline) -> None:
        try:
            self._link.bring("failed", turn, msgspec.json.encode(fault), deadline)
        except TransferQueueError:
            self._link.close()  # says it too

    def _offer_fault(self, fault: RankFault, deadline: Deadline) -> None:
        """This rank does not know the turn yet. Returns once rank 0 has ended the update with this."""
        with suppress(TransferQueueError):
            self._link.bring("offer", "", msgspec.json.encode(RankOffer(fault=fault)), deadline)

    @property
    def num_served_nbytes(self) -> int:
        """Bytes of buckets that receivers have fetched here."""
        return self._server.num_served_nbytes

    def shutdown(self) -> None:
        """Leave, once what is on its way has ended. Receivers keep their weights. Repeatable."""
        self._is_over = True
        if self._ticket is not None:
            self._ticket.wait()
        self._link.close()
        self._server.close()
