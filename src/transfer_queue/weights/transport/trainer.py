"""The trainer's side: makes a version, puts it where receivers find it, and leads them through the four calls."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from msgspec.structs import replace

from transfer_queue.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidInput,
    NotInitialized,
    NotSupported,
    StaleBase,
    StaleVersion,
    TransferQueueError,
    UnsupportedValue,
    UpdateInProgress,
    VersionGone,
    WrongEpoch,
)
from transfer_queue.trace.activity import activity
from transfer_queue.trace.switch import start_as_told
from transfer_queue.weights.transport.adapter_calls import AdapterCalls
from transfer_queue.weights.transport.clients import Client, Follower, Partial, check_client, missed_by
from transfer_queue.weights.transport.deadline import Deadline, TimedCall, TimedCalls
from transfer_queue.weights.transport.faults import as_typed, system_faults
from transfer_queue.weights.transport.info import INIT_TIMEOUT_S, Info, checked_version, describe, key_of, settings_of
from transfer_queue.weights.transport.info import TrainerInfo as TrainerInfo
from transfer_queue.weights.transport.pending import Base, PendingAdapter, PendingVersion, SyncReport, label_of
from transfer_queue.weights.transport.reports import (
    UNKNOWN,
    Reports,
    count_silent,
    expect_not_silent,
    forget_caches,
    shown_label,
    silent_workers,
    take_back_label,
)
from transfer_queue.weights.transport.ticket import PackedVersion, PublishTicket, UpdateTurns
from transfer_queue.weights.version.manifest import Manifest
from transfer_queue.weights.version.plans import ShardPlan, plan_pieces
from transfer_queue.weights.version.shard_table import ShardTable
from transfer_queue.weights.version.sources import SHARDED, WeightSource, check_source

log = logging.getLogger("transfer_queue.weights")
ABORT_S = 2.0  # how long telling receivers that an update is off may take beyond its deadline
Self = TypeVar("Self", bound="TrainerEngine")


class TrainerEngine(AdapterCalls):
    """Sends the versions of one source, by one thread at a time."""

    init_form: ClassVar[type[TrainerInfo]] = TrainerInfo
    _can_join: ClassVar[bool] = True  # one server may be met without the others
    _can_publish: ClassVar[bool] = True  # once it is packed, the weights may change

    def __init__(self, info: Any, client: Client, source: WeightSource) -> None:
        check_source(source)
        if info.anchor_every < 1:
            raise InvalidInput(f"a full version every {info.anchor_every}")
        if getattr(source, "is_sharded", False) and getattr(info, "world", 1) == 1:
            raise UnsupportedValue(f"only parts of the tensors are here: {SHARDED}")
        start_as_told()
        self.info = info
        self.run_id: str = info.run_id or secrets.token_hex(8)
        self._begun = time.time()
        self._numbers: dict[str, int] = {}  # the last versions of the weights ("") and of adapters, taken or not
        self._taken: dict[str, int] = {}  # of those, the last that somebody may have
        self._adapters: dict[str, str | None] = {}  # label -> base_root, of those that all receivers have
        self._client = client
        self._source = source
        self._turns = UpdateTurns(in_turn=info.anchor_every > 1)
        self._packing = threading.Lock()  # one version at a time, also while another one is on its way
        self._base: Base | None = None
        self._newest: dict[str, Manifest] = {}  # that was decided, by `label_of`
        self._num_deltas = self._num_silent = 0
        self.reports = Reports(info.report_host)
        self._label = ""  # of silent servers, as far as it is known
        self._estranged = False  # somebody may have an update open that could not be called off, or not know this run
        self._is_anew = False  # a server that is not called by name may lack what the others have
        self._is_torn = False  # such a one may lack the newest weights, which were decided
        self._lacking: set[str] = set()  # servers of a plain client that missed something
        self._calls = TimedCalls()  # to the client

    @classmethod
    @system_faults()
    def trainer_init(cls: type[Self], init_info: Info, *, client: Client, source: WeightSource) -> Self:
        """Open the transport and introduce the receivers to it, within the `timeout_s` of `init_info`."""
        made = cls(settings_of(init_info, cls.init_form), client, source)
        try:
            check_client(client)
            deadline = Deadline(made.info.timeout_s)
            if isinstance(client, Follower):
                client.follow(made)
            else:
                made._num_silent = made._count_silent(deadline)
            made._allow(deadline)
            made._meet(deadline)
            made._lacking |= set(missed_by(client))
            made._allow(None)
            made._hear(None, deadline)
            made._is_anew, made._label = False, made._shown_label(deadline)
        except BaseException:  # an interrupt must not leave its sockets
            made.shutdown()
            raise
        return made

    def send_weights(self, version: int | None = None, *, deadline_s: float, full: bool = False) -> SyncReport:
        """Bring the weights as they are now to every receiver, as `version` (default: the next number).

        Returns once all have committed; raises what went wrong, at most 2 s after `deadline_s` (packing is not
        interrupted), and then none has unless `finish` itself failed: `version` may be sent again. Receivers without
        the base of a difference are sent a full version. One that was started anew is introduced again. Of several
        servers of ours behind a `WeightSyncClient`, those that do not answer keep nobody: see `SyncReport.missed`.
        """
        deadline = Deadline(deadline_s)
        self._turns.prepare(deadline)
        with self._turns.turn(deadline), self._concluding():
            draft = self._drafted(version, full)
            report = self._send_to_all(draft, deadline)
            self._conclude(report)
            return report

    def _drafted(self, version: int | None, full: bool = False) -> PendingVersion:
        full = full or (isinstance(self._client, Follower) and self._client.lacks_base())
        base = None if full or self._num_deltas + 1 >= self.info.anchor_every else self._base
        number, keeps = self._number("", version), self.info.anchor_every > 1
        return PendingVersion(self._source, number, self.run_id, base, keeps=keeps)

    def _send_to_all(self, draft: PendingVersion, deadline: Deadline, packed: Manifest | None = None) -> SyncReport:
        """Where receivers lack the base of a difference, they get all of the version."""
        try:
            return self._sent(*self._send(draft, deadline, packed))
        except StaleBase:
            if draft.changes is None:
                raise
            return self._sent(*self._send(draft, deadline, whole=True))

    def publish(self, version: int | None = None, *, deadline_s: float) -> PublishTicket:
        """Pack the weights as they are now, as `version`, and have a thread bring them to every receiver.

        Returns when they are packed: then they may change. One version is on its way at a time. The next one waits
        for it, packed; when yet another is published meanwhile, it is let go of before that is packed, and its ticket
        raises `StaleVersion`: there are at most two. With differences (`anchor_every`) the next one is packed only
        then, for what receivers lack is not known before; nor do several ranks, each of which has to call it, go ahead.
        Raises what packing raises. `NotSupported` where the weights themselves are sent (collective, cuda_ipc).
        """
        if not self._can_publish:
            raise NotSupported("published versions are packed before they are sent: send_weights")
        deadline = Deadline(deadline_s)
        self._turns.prepare(deadline)
        with self._concluding(), self._packing:
            draft = self._drafted(version)
            if self._turns.is_on_its_way(draft.version):
                raise StaleVersion(f"version {draft.version} is on its way")
            self._give_way()
            ticket = PublishTicket(draft.version, PackedVersion(draft, self._pack(draft, deadline)))
            del draft  # the ticket has it, until another one is packed
            try:
                return self._turns.begin(ticket, lambda: self._bring_ticket(ticket, deadline))
            except BaseException:  # no thread is to be had, or an interrupt
                self._give_way()
                raise

    def _give_way(self) -> None:
        """Let go of what waits: with what is on its way, and another one, there would be three."""
        for packed in self._turns.waiting():
            self._withdraw(packed.manifest)

    def _bring_ticket(self, ticket: PublishTicket, deadline: Deadline) -> SyncReport:
        packed: PackedVersion | None = None
        with self._concluding():
            try:
                with self._turns.turn(deadline, ticket):
                    packed = ticket.take()
                    if packed is None or ticket.version <= self._taken.get("", 0):
                        raise ticket.given_way()
                    report = self._send_to_all(packed.draft, deadline, packed.manifest)
            except BaseException:  # an interrupt must not keep its memory
                packed = packed or ticket.take()
                if packed is not None and self._newest.get("") is not packed.manifest:
                    self._withdraw(packed.manifest)
                raise
            self._conclude(report)
            return report

    @contextmanager
    def _concluding(self) -> Iterator[None]:
        """Whatever ends an update within is told to whoever takes part."""
        try:
            yield
        except BaseException as error:
            self._conclude(as_typed(error) if isinstance(error, Exception) else Aborted("the trainer was interrupted"))
            raise

    def catch_up_infos(self, timeout_s: float) -> list[dict[str, Any]]:
        """The `update_info`s, to be gone through in order, with which a receiver that has other weights or none comes
        to the newest version, and to the adapters that are there.

        Waits for a version that is being sent. `VersionGone` when there is none; `DeadlineExceeded`.
        """
        deadline = Deadline(timeout_s)
        with self._turns.turn(deadline):
            return self._infos(deadline)

    def _infos(self, deadline: Deadline, removed: bool = False) -> list[dict[str, Any]]:
        newest = self._newest.get("")
        if newest is None:
            raise VersionGone("no version was sent yet")
        if newest.kind == "delta":
            if self._base is None:
                raise VersionGone("the newest version is a difference: wait for the next one")
            newest = self._base.manifest
            self._give(newest, self._base.anchor.buckets)
            self._decide(newest)
            self._newest[""] = newest
        return [self.update_info(newest, deadline), *self._adapter_infos(newest, deadline, removed)]

    def _adapter_infos(self, newest: Manifest, deadline: Deadline, removed: bool = False) -> list[dict[str, Any]]:
        adapters = [one for label, one in self._newest.items() if label and (one.tensors or removed)]
        return [self.update_info(one, deadline) for one in adapters if one.base_root in (None, newest.root)]

    def join(self, client: Client, *, deadline_s: float) -> int:
        """Bring the newest version, and its adapters, to one server that comes late; the number. `VersionGone` before
        the first one. Raises what went wrong there."""
        deadline = Deadline(deadline_s)
        silent = TimedCall(silent_workers, client).result(deadline)
        infos = self.catch_up_infos(deadline.left())
        told = {**self.introduction(silent, deadline), "replica": (name := secrets.token_hex(8))}
        self._call(client.init_weight_transfer_engine, deadline, told)
        self.reports.hear(name, None, "", silent, deadline)
        self._bring(client, name, silent, infos, deadline)
        if silent:
            self.reports.adopt(name)
            self._call(forget_caches, deadline, client)
        return int(infos[0]["version"])

    def _bring(self, client: Client, name: str, silent: int, infos: list[dict[str, Any]], deadline: Deadline) -> None:
        """Have one server install these, one after the other."""
        call = self._calls.ask if client is self._client else self._call
        for info in infos:
            step = (name, info["version"], info["key"], silent, deadline)
            call(client.start_weight_update, deadline)
            call(client.update_weights, deadline, info)
            self.reports.hear(*step)
            call(client.finish_weight_update, deadline, *([] if info["label"] else [str(info["version"])]))
            self.reports.hear(*step, installed=True)

    def shutdown(self) -> None:
        """Free what the transport holds, once what is on its way ended. Receivers keep their weights, and nothing can
        be sent any more (`NotOpen`). Repeatable."""
        self._turns.end()
        self._base = None
        self._close()
        self.reports.close()

    # for transports

    @abstractmethod
    def receivers_info(self) -> dict[str, Any]:
        """The `init_info` of receivers: also for those that come later."""

    @abstractmethod
    def _publish(self, draft: PendingVersion, deadline: Deadline) -> Manifest:
        """Put it where receivers can fetch it."""

    def _planned(self, tables: list[ShardTable]) -> list[ShardPlan]:
        """Where the cells of each rank are to lie."""
        return plan_pieces(tables, bucket_nbytes=self.info.bucket_nbytes)

    def _publish_cells(self, draft: PendingVersion) -> Manifest:
        """As `_publish`, of one rank, in cells."""
        manifest = draft.read_alone(self._planned)
        self._give(manifest, draft.buckets)
        return manifest

    def _give(self, manifest: Manifest, buckets: list[torch.Tensor]) -> None:
        """Put what this rank has packed by `PendingVersion.read` where receivers can fetch it."""
        raise NotSupported("this transport gives versions only as they are read")

    def _follow(self, draft: PendingVersion) -> Base | None:
        """The version was taken, or is to be sent whole: what is the base of the next ones."""
        return draft.settled()

    @abstractmethod
    def _close(self) -> None: ...

    def _conclude(self, outcome: SyncReport | TransferQueueError) -> None:
        """An update of the weights has ended like this. Repeatable."""
        return

    def _decide(self, manifest: Manifest) -> None:
        """The receivers have verified it: from now on it is what late ones get."""
        return

    def _withdraw(self, manifest: Manifest) -> None:
        """It was given up: nobody is to get it."""
        return

    def _meet(self, deadline: Deadline) -> None:
        """Introduce this run, which ends what is open there, and wakes up calls of updates before, which do not say
        whose they are: once they are over, a second one ends what they may have opened. A server that was started anew
        does not say so any more then; fleets ask theirs."""
        self._is_anew |= self._can_join and not isinstance(self._client, Follower)
        late = self._calls.late()
        for _ in range(2 if late else 1):
            self._introduce(self.introduction(self._num_silent, deadline), deadline)
            for call in late:
                if not call.ended(deadline.left()):
                    raise DeadlineExceeded("a call of an update before has not ended")

    def _introduce(self, told: dict[str, Any], deadline: Deadline) -> None:
        self._calls.ask(self._client.init_weight_transfer_engine, deadline, told)

    def introduction(self, silent: int, deadline: Deadline | None = None) -> dict[str, Any]:
        """`receivers_info`, whose updates they are, and where to report, for servers with `silent` workers."""
        told = {**self.receivers_info(), "run_id": self.run_id, "begun": self._begun, **self.reports.info(silent)}
        return told if deadline is None else {**told, "timeout_s": min(deadline.left(), INIT_TIMEOUT_S)}

    def _lead(self, manifest: Manifest, info: dict[str, Any], deadline: Deadline) -> None:
        """Have every receiver fetch and verify it."""
        self._calls.ask(self._client.update_weights, deadline, info)

    # steps

    @property
    def version(self) -> int:
        """The last number that was given to weights."""
        return self._numbers.get("", 0)

    @property
    def epoch(self) -> str:
        """The run, by its older name."""
        return self.run_id

    def _number(self, label: str, asked: int | None) -> int:
        """A number that was given up may be asked for again: nobody has that version."""
        last = self._taken.get(label, 0)
        found = checked_version(self._numbers.get(label, 0) + 1 if asked is None else asked)
        if found <= last:
            raise StaleVersion(f"version {found} after {last}")
        return found

    def _sent(self, report: SyncReport, manifest: Manifest) -> SyncReport:
        self._num_deltas = self._num_deltas + 1 if manifest.kind == "delta" else 0
        outdated = [label for label, root in self._adapters.items() if root not in (None, manifest.root)]
        return replace(report, outdated=tuple(outdated))

    def _send_adapter(
        self, source: WeightSource, adapter: PendingAdapter, for_base: bool, version: int | None, deadline_s: float
    ) -> SyncReport:
        label, deadline = adapter.label, Deadline(deadline_s)
        if for_base:  # what was published before is what it is for
            self._turns.settle(deadline)
        with self._turns.turn(deadline):
            newest = self._newest.get("")
            if for_base and newest is None:
                raise InvalidInput("no weights were sent that the adapter could be for: for_base=False")
            adapter = adapter._replace(base_root=newest.root if for_base and newest is not None else None)
            draft = PendingVersion(source, self._number(label, version), self.run_id, adapter=adapter)
            report, manifest = self._send(draft, deadline)
            self._adapters.pop(label, None)
            if manifest.tensors:
                self._adapters[label] = adapter.base_root
            return report

    @system_faults()
    def _send(
        self, draft: PendingVersion, deadline: Deadline, packed: Manifest | None = None, *, whole: bool = False
    ) -> tuple[SyncReport, Manifest]:
        """`packed`: what was packed of it before. `whole`: after receivers did not have the base of its difference,
        which is not read again for it."""
        with activity("send_weights") as about:
            self._ready(draft, deadline)
            if packed is None:
                with self._packing:
                    packed = (self._pack_again if whole else self._pack)(draft, deadline)
            report = self._deliver(draft, packed, deadline)
            describe(about, packed)
            return report, packed

    def _ready(self, draft: PendingVersion, deadline: Deadline) -> None:
        """Before an update: nothing of an earlier one may be left at the receivers, or be lacking that this is for."""
        self._allow(deadline)
        self._estranged |= self._is_torn and draft.adapter is not None and draft.adapter.base_root is not None
        label = self._shown_label(deadline)
        if label != self._label:  # a silent server that was started anew does not refuse an update
            self._label, self._estranged = label, True
            self._num_silent = self._count_silent(deadline)
        if self._estranged or self._calls.late():
            self._meet(deadline)
            self._hear(None, deadline)
            self._estranged = False
        self.reports.forget("")

    def _count_silent(self, deadline: Deadline) -> int:
        found, unknown = count_silent(self._client, self.info.silent, deadline)
        self._lacking |= unknown
        return found

    def _shown_label(self, deadline: Deadline) -> str:
        return str(self._call(shown_label, deadline, self._client, self._label)) if self._num_silent else self._label

    def _pack(self, draft: PendingVersion, deadline: Deadline) -> Manifest:
        begun = time.monotonic()
        with activity("pack_weights") as about:
            manifest = self._publish(draft, deadline)
            describe(about, manifest)
        draft.pack_s = time.monotonic() - begun
        self._numbers[draft.label] = max(draft.version, self._numbers.get(draft.label, 0))
        return manifest

    def _pack_again(self, draft: PendingVersion, deadline: Deadline) -> Manifest:
        """All of a version of which the difference was packed. Nobody has its base any more."""
        self._base = None
        packed = self._follow(draft)
        assert packed is not None
        self._give(packed.manifest, packed.anchor.buckets)
        return packed.manifest

    def _deliver(self, draft: PendingVersion, manifest: Manifest, deadline: Deadline) -> SyncReport:
        """Have every receiver fetch, verify and commit it."""
        times, number = [time.monotonic()], draft.version
        earlier, self._base = self._base, (self._base if draft.adapter else None)  # until all have it
        is_open: bool | None = None  # at the receivers; None when only they know
        try:
            rejoined = self._start(draft, deadline)
            self._lead(manifest, self.update_info(manifest, deadline), deadline)
            is_open = True
            self._hear(manifest, deadline)
            self._decide(manifest)  # where this fails nobody has the version
            # From here on somebody may have it: the number is taken, and late ones are given this version.
            self._newest[draft.label] = manifest
            self._taken[draft.label] = number
            times.append(time.monotonic())
            is_open = None
            self._calls.ask(self._client.finish_weight_update, deadline, *([] if draft.adapter else [str(number)]))
            is_open = False
            self._hear(manifest, deadline, installed=True)
        except BaseException as error:  # an interrupt must not leave it open at the receivers
            self._retreat(draft, manifest, earlier, is_open)
            self._estranged |= self._num_silent > 0 and isinstance(error, DeadlineExceeded)  # who reports nothing
            self._estranged |= isinstance(error, NotInitialized)  # another run was introduced to who was started anew
            raise
        times.append(time.monotonic())
        if draft.adapter is None:
            self._keep(draft)
            self._label, self._is_torn = str(number), False
            self._bring_adapters(rejoined, manifest, deadline)
        if self.info.caches == "clear" and self._num_silent:
            self._call(forget_caches, deadline, self._client)
        self._lacking = set(missed := missed_by(self._client))
        self._allow(None)
        update_s, commit_s = (after - before for before, after in itertools.pairwise(times))
        told = (number, self.run_id, manifest.root, manifest.kind, manifest.nbytes)
        return SyncReport(*told, draft.pack_s, update_s, commit_s, missed=missed)

    # servers of a plain client that were away

    def _allow(self, deadline: Deadline | None) -> None:
        """Tell the client how long its calls have together; None: the update is over."""
        if isinstance(self._client, Follower) or (isinstance(self._client, Partial) and not self._num_silent):
            self._client.allow(None if deadline is None else deadline.left())

    def _start(self, draft: PendingVersion, deadline: Deadline) -> list[str]:
        """Start the update everywhere. A server that was started anew, or has an update open that was left there, is
        introduced again, and sent what it lacks. Returns the names of those that may lack adapters."""
        try:
            self._bring_lost(draft, deadline)
            self._calls.ask(self._client.start_weight_update, deadline)
        except (NotInitialized, UpdateInProgress):
            if not isinstance(self._client, Partial):
                self._meet(deadline)
                self._bring_lost(draft, deadline)
                self._calls.ask(self._client.start_weight_update, deadline)
                return []
            unmet = self._client.unmet()
            if not unmet:
                raise
        else:
            unmet = self._client.unmet() if isinstance(self._client, Partial) else []
        if not isinstance(self._client, Partial):
            return []
        again = list(dict.fromkeys([*unmet, *self._lacking]))
        again = [name for name in again if name not in self._client.missed()]
        if again and not self._can_join:
            self._meet(deadline)
            self._calls.ask(self._client.start_weight_update, deadline)
            return []
        found = [name for name in again if self._rejoin(self._client, name, draft, deadline)]
        self._lacking |= set(found)  # until an update has brought them what they lack
        return found

    def _bring_lost(self, draft: PendingVersion, deadline: Deadline) -> None:
        """An adapter is for servers that have the rest."""
        if self._is_anew and draft.adapter is not None and "" in self._newest:
            self._bring(self._client, "", self._num_silent, self._infos(deadline), deadline)
            self._label, self._is_anew, self._is_torn = str(self._newest[""].version), False, False

    def _rejoin(self, client: Partial, name: str, draft: PendingVersion, deadline: Deadline) -> bool:
        """Whether that server takes part in this update again."""
        one = client.member(name)
        try:
            self._call(expect_not_silent, deadline, one)  # it may not have answered as they were counted
            self._call(one.init_weight_transfer_engine, deadline, self.introduction(0, deadline))
            if draft.adapter is not None and "" in self._newest:
                self._bring(one, "", 0, self._infos(deadline, True), deadline)
            self._call(one.start_weight_update, deadline)
        except WrongEpoch:
            raise
        except TransferQueueError as error:
            client.leave_out(name, error)
            return False
        return True

    def _bring_adapters(self, names: list[str], newest: Manifest, deadline: Deadline) -> None:
        """Servers that lost what they had, or missed it, have the new weights now, and no adapters, or removed ones."""
        try:
            if self._is_anew:
                self._bring(self._client, "", self._num_silent, self._adapter_infos(newest, deadline), deadline)
            self._is_anew = False
        except TransferQueueError as error:
            log.warning("a server that was started anew lacks adapters until the next version: %s", error)
            self._estranged = True
        for name in names:
            assert isinstance(self._client, Partial)
            try:
                self._bring(self._client.member(name), "", 0, self._adapter_infos(newest, deadline, True), deadline)
            except TransferQueueError as error:
                self._client.leave_out(name, error)

    def _retreat(self, draft: PendingVersion, manifest: Manifest, earlier: Base | None, is_open: bool | None) -> None:
        """Nobody is to commit it later, or to be given it; unless it was decided."""
        self._estranged = not self._call_off(draft.version, is_open)
        self._allow(None)
        if self._num_silent and not is_open and draft.adapter is None and self._newest.get("") is manifest:
            before = self._label or UNKNOWN
            take_back_label(self._client, self._calls, self.reports, self._num_silent, before, ABORT_S)
        if self._newest.get(draft.label) is not manifest:
            self._withdraw(manifest)
            self._base = earlier
        elif draft.adapter is None:
            self._keep(draft)
            self._is_torn = self._can_join and not isinstance(self._client, Follower)

    def update_info(self, manifest: Manifest, deadline: Deadline) -> dict[str, Any]:
        """What receivers are told of a version."""
        return {
            "version": manifest.version, "run_id": manifest.epoch, "epoch": manifest.epoch, "label": label_of(manifest),
            "for_base": manifest.base_root is not None,
            "removed": manifest.kind == "adapter" and not manifest.tensors, "key": key_of(manifest),
            "root": manifest.root, "timeout_s": deadline.left(),
        }  # fmt: skip

    def _keep(self, draft: PendingVersion) -> None:
        self._base = self._follow(draft)

    def _hear(self, manifest: Manifest | None, deadline: Deadline, *, installed: bool = False) -> None:
        """Raise what a receiver reported, once all silent ones have. A fleet hears its replicas itself. Of a meeting
        only silent ones have something to say: what others report then is of a call before it, that ended late."""
        if not isinstance(self._client, Follower) and (manifest is not None or self._num_silent):
            version, key = (manifest.version, key_of(manifest)) if manifest is not None else (None, "")
            self.reports.hear("", version, key, self._num_silent, deadline, installed)

    def _call(self, function: Callable[..., object], deadline: Deadline, *args: Any) -> object:
        return TimedCall(function, *args).result(deadline)

    def _call_off(self, version: int, is_open: bool | None) -> bool:
        """Make sure that nobody commits it later; whether all could be told.

        vLLM refuses these calls when no update is open there, which puts several workers of one server out of step:
        when that is not certain it is told by `init`, before the next update.
        """
        if self._num_silent and not is_open:
            return is_open is False
        deadline = Deadline(ABORT_S)
        try:
            given_up = {"version": version, "run_id": self.run_id, "abort": True}
            self._calls.ask(self._client.update_weights, deadline, given_up)
            self._calls.ask(self._client.finish_weight_update, deadline)
        except (TransferQueueError, OSError, RuntimeError) as error:  # the fault that led here is the one to raise
            log.info("version %s could not be called off: %s", version, error)
            return not self._num_silent
        return True
