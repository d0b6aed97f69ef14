"""The trainer's side: makes a version, puts it where receivers find it, and leads them through the four calls."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import msgspec
import torch

from transfer_queue.errors import (
    InvalidInput,
    StaleBase,
    StaleVersion,
    TransferQueueError,
    VersionGone,
    error_from_code,
)
from transfer_queue.weights.delta import DeltaSource
from transfer_queue.weights.engines.base import INIT_TIMEOUT_S, Info, Outcome, as_typed, key_of, parse
from transfer_queue.weights.engines.waiting import Call, Deadline
from transfer_queue.weights.manifest import Manifest
from transfer_queue.weights.packing import BUCKET_NBYTES, Plan, seal
from transfer_queue.weights.sources import TensorMeta, WeightSource

if TYPE_CHECKING:
    from transfer_queue.weights.engines.serving import Server

log = logging.getLogger("transfer_queue.weights")

ABORT_S = 2.0  # how long telling receivers that an update is off may take beyond its deadline
Self = TypeVar("Self", bound="TrainerEngine")


class Client(Protocol):
    """The way to the receivers (vLLM's `VLLMWeightSyncClient`). Each call goes to all of them; infos are JSON."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> object: ...

    def start_weight_update(self) -> object: ...

    def update_weights(self, update_info: dict[str, Any]) -> object: ...

    def finish_weight_update(self, weight_version: str | None = None) -> object: ...


class TrainerInfo(msgspec.Struct, kw_only=True):
    """`epoch`: a name for this life of the trainer (made up when empty). `anchor_every`: how many versions from one
    full one to the next; those between are differences, which takes a copy of the weights here.

    `silent`: how many workers record faults instead of raising them (vLLM's do); each has to report every step.
    Default: what the client's `silent_workers()` says, or none. `report_host`: where transports without a way of their
    own for reports listen for them. `caches`: whether servers forget, after a commit, what they cached with the weights
    before (vLLM's prefixes; running requests are computed anew then); with "keep" that is left to a pause."""

    epoch: str = ""
    bucket_nbytes: int = BUCKET_NBYTES
    anchor_every: int = 1
    timeout_s: float = INIT_TIMEOUT_S
    silent: int | None = None
    report_host: str = "127.0.0.1"
    caches: Literal["clear", "keep"] = "clear"


class SyncReport(msgspec.Struct, frozen=True):
    """A version that every receiver committed. `pack_s`: until it could be fetched; `update_s`: until all had verified
    it; `commit_s`: until all had committed."""

    version: int
    epoch: str
    root: str
    kind: str
    nbytes: int
    pack_s: float
    update_s: float
    commit_s: float


class Base:
    """An earlier version with its weights, for differences."""

    def __init__(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self.manifest = manifest
        self.tensors = tensors


class Copy:
    """A source of tensors that do not change."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], aliases: dict[str, str]) -> None:
        self._tensors = tensors
        self._aliases = aliases

    def specs(self) -> list[TensorMeta]:
        return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()

    def aliases(self) -> dict[str, str]:
        return self._aliases


class Draft:
    """A version about to be packed."""

    def __init__(self, source: WeightSource, version: int, epoch: str, base: Base | None) -> None:
        self.version = version
        self.epoch = epoch
        self._base = base
        self._delta = DeltaSource(base.tensors, base.manifest.root, source) if base else None
        self.source: WeightSource = self._delta or source

    def seal(self, where: Plan, digests: Mapping[str, str]) -> Manifest:
        if self._delta is None or self._base is None:
            aliases = self.source.aliases()
            return seal(where, digests, version=self.version, epoch=self.epoch, aliases=aliases)
        base = self._base.manifest.version
        return self._delta.manifest(where, digests, version=self.version, epoch=self.epoch, base=base)


class TrainerEngine(ABC):
    """Sends the versions of one source, by one thread at a time."""

    init_form: ClassVar[type[TrainerInfo]] = TrainerInfo
    takes_reports: ClassVar[bool] = False  # by a server of the transport's own

    def __init__(self, info: Any, client: Client, source: WeightSource) -> None:
        if info.anchor_every < 1:
            raise InvalidInput(f"a full version every {info.anchor_every}")
        self.info = info
        self.epoch: str = info.epoch or secrets.token_hex(8)
        self.version = 0
        self._client = client
        self._source = source
        self._busy = threading.Lock()
        self._base: Base | None = None
        self._num_deltas = 0
        self._newest: Manifest | None = None  # that all have committed
        self._label = ""  # of the servers, as far as it is known
        self._estranged = False  # somebody may have an update open that could not be called off
        self._num_silent = 0
        self._mixed = False  # somebody reported to have committed the update
        self._reports: Server | None = None

    @classmethod
    def trainer_init(cls: type[Self], init_info: Info, *, client: Client, source: WeightSource) -> Self:
        """Open the transport and introduce the receivers to it, within the `timeout_s` of `init_info`."""
        try:
            made = cls(parse(init_info, cls.init_form), client, source)
        except OSError as error:
            raise as_typed(error) from error
        try:
            deadline = Deadline(made.info.timeout_s)
            made._num_silent = made.info.silent if made.info.silent is not None else silent_workers(client)
            made._meet(deadline)
            made._hear(None, made._num_silent, deadline)
            if made._num_silent:
                made._label = made._shown_label()
        except BaseException as error:
            made.shutdown()
            if isinstance(error, OSError) and not isinstance(error, TransferQueueError):
                raise as_typed(error) from error
            raise
        return made

    def send_weights(self, version: int | None = None, *, deadline_s: float, full: bool = False) -> SyncReport:
        """Bring the weights as they are now to every receiver, as `version` (default: the next number).

        Returns once all have committed; raises what went wrong, at most 2 s after `deadline_s` (packing is not
        interrupted), and then none has unless `finish` itself failed. Receivers without the base of a difference are
        sent a full version.
        """
        with self._busy:
            deadline = Deadline(deadline_s)
            number = self.version + 1 if version is None else version
            if number <= self.version:
                raise StaleVersion(f"version {number} after {self.version}")
            base = None if full or self._num_deltas + 1 >= self.info.anchor_every else self._base
            try:
                return self._send(number, base, deadline)
            except StaleBase:
                if base is None:
                    raise
                return self._send(number, None, deadline)

    def join(self, client: Client, *, deadline_s: float) -> int:
        """Bring what was committed last to a server that comes late, through a client for it alone; the number. Other
        servers are left alone. `VersionGone` before the first commit. Raises what went wrong there."""
        with self._busy:
            deadline = Deadline(deadline_s)
            if self._newest is None:
                raise VersionGone("no version was committed yet")
            silent = silent_workers(client)
            self._call(client.init_weight_transfer_engine, deadline, self.introduction(silent))
            self._hear(None, silent, deadline)
            manifest = self._newest
            if manifest.kind == "delta" and self._base is not None:
                whole = Copy(self._base.tensors, self._source.aliases())
                manifest = self._publish(Draft(whole, self.version, self.epoch, None), deadline)
            is_open = None
            try:
                self._call(client.start_weight_update, deadline)
                self._call(client.update_weights, deadline, self.update_info(manifest, deadline))
                is_open = True
                self._hear(manifest, silent, deadline)
                is_open = None
                self._call(client.finish_weight_update, deadline, str(manifest.version))
                is_open = False
                self._hear(manifest, silent, deadline, installed=True)
            except BaseException:
                self._call_off(manifest.version, client, is_open, silent)
                raise
            self._clear_caches(client, deadline)
            return manifest.version

    def shutdown(self) -> None:
        """Free what the transport holds. Receivers keep their weights. Repeatable."""
        self._base = None
        if self._reports is not None:
            self._reports.close()
            self._reports = None
        self._close()

    # for transports

    @abstractmethod
    def receivers_info(self) -> dict[str, Any]:
        """The `init_info` of receivers: also for those that come later."""

    @abstractmethod
    def _publish(self, draft: Draft, deadline: Deadline) -> Manifest:
        """Put it where receivers can fetch it."""

    @abstractmethod
    def _close(self) -> None: ...

    def _outcomes(self, version: int | None, timeout_s: float = 0.0) -> list[Outcome]:
        """What receivers reported of this version, or of none, since this was asked last. Waits `timeout_s` for one."""
        return self._reports.outcomes(version, timeout_s) if self._reports is not None else []

    def _meet(self, deadline: Deadline) -> None:
        self._call(self._client.init_weight_transfer_engine, deadline, self.introduction(self._num_silent))

    def introduction(self, silent: int) -> dict[str, Any]:
        """`receivers_info`, and where to report, for servers with `silent` workers."""
        if silent and not self.takes_reports and self._reports is None:
            from transfer_queue.weights.engines.serving import Empty, Server, listen_tcp

            self._report_token = secrets.token_urlsafe(24)
            listening, self._report_to = listen_tcp(self.info.report_host, 0)
            self._reports = Server(listening, self._report_token, Empty())
        if self._reports is None:
            return self.receivers_info()
        return {**self.receivers_info(), "report_to": self._report_to, "report_token": self._report_token}

    def _lead(self, manifest: Manifest, info: dict[str, Any], deadline: Deadline) -> None:
        """Have every receiver fetch and verify it."""
        self._call(self._client.update_weights, deadline, info)

    # steps

    def _send(self, number: int, base: Base | None, deadline: Deadline) -> SyncReport:
        times = [time.monotonic()]
        if self._estranged:
            self._meet(deadline)
            self._hear(None, self._num_silent, deadline)
            self._estranged = False
        self._outcomes(None)  # older ones
        draft = Draft(self._source, number, self.epoch, base)
        manifest = self._publish(draft, deadline)
        self.version = number
        times.append(time.monotonic())
        self._base = None  # until all have it
        self._mixed = False
        is_open: bool | None = None  # at the receivers; None when only they know
        try:
            self._call(self._client.start_weight_update, deadline)
            self._lead(manifest, self.update_info(manifest, deadline), deadline)
            is_open = True
            self._hear(manifest, self._num_silent, deadline)
            times.append(time.monotonic())
            is_open = None
            self._call(self._client.finish_weight_update, deadline, str(number))
            is_open = False
            self._hear(manifest, self._num_silent, deadline, installed=True)
        except BaseException as error:
            self._estranged = not self._call_off(number, self._client, is_open, self._num_silent)
            if is_open is False and self._num_silent:
                self._relabel()
            if isinstance(error, OSError) and not isinstance(error, TransferQueueError):
                raise as_typed(error) from error
            raise
        times.append(time.monotonic())
        self._num_deltas = self._num_deltas + 1 if base else 0
        self._keep(manifest)
        self._newest, self._label = manifest, str(number)
        self._clear_caches(self._client, deadline)
        spans = [after - before for before, after in itertools.pairwise(times)]
        return SyncReport(number, self.epoch, manifest.root, manifest.kind, manifest.nbytes, *spans)

    def update_info(self, manifest: Manifest, deadline: Deadline) -> dict[str, Any]:
        """What receivers are told of a version."""
        return {
            "version": manifest.version, "epoch": manifest.epoch, "key": key_of(manifest), "timeout_s": deadline.left()
        }  # fmt: skip

    def _keep(self, manifest: Manifest) -> None:
        if self.info.anchor_every > 1:
            self._base = Base(manifest, {name: tensor.clone() for name, tensor in self._source.tensors()})

    def _hear(self, manifest: Manifest | None, silent: int, deadline: Deadline, *, installed: bool = False) -> None:
        """Raise what a receiver reported; otherwise wait until all `silent` workers have reported this step."""
        version, key = (manifest.version, key_of(manifest)) if manifest else (None, "")
        well: set[tuple[str, int]] = set()
        wait_s = 0.0
        while True:
            came = [one for one in self._outcomes(version, wait_s) if one.key in ("", key)]  # others were given up
            self._mixed |= any(outcome.installed for outcome in came)
            for outcome in came:
                if outcome.code:
                    raise error_from_code(outcome.code, f"rank {outcome.rank}: {outcome.text}")
                if outcome.silent and (outcome.version, outcome.installed) == (version, installed):
                    well.add((outcome.who, outcome.rank))
            if len(well) >= silent:
                return
            wait_s = deadline.left(f"waiting for the reports of {silent - len(well)} of {silent} workers")

    def _shown_label(self) -> str:
        return str(self._client.get_weight_version()) if _has(self._client, "get_weight_version") else ""  # type: ignore[attr-defined]

    def _clear_caches(self, client: Client, deadline: Deadline) -> None:
        reset: Any = getattr(client, "reset_prefix_cache", None)
        if self.info.caches == "clear" and _has(client, "reset_prefix_cache"):
            try:
                self._call(reset, deadline)
            except TransferQueueError as error:  # the version is committed all the same
                log.warning("caches of the weights before may be in use still: %s", error)

    def _relabel(self) -> None:
        """Silent workers took the label and may not have taken the weights."""
        rename: Any = getattr(self._client, "update_weight_version", None)
        if rename is not None:
            with contextlib.suppress(Exception):
                self._call(rename, Deadline(ABORT_S), "unknown" if self._mixed else self._label or "unknown")

    def _call(self, function: Callable[..., object], deadline: Deadline, *args: Any) -> object:
        what = getattr(function, "__name__", "the call")
        return Call(function, *args).result(deadline, what)

    def _call_off(self, version: int, client: Client, is_open: bool | None, silent: int) -> bool:
        """Make sure that nobody commits it later; whether all could be told.

        vLLM refuses these calls when no update is open there, which puts several workers of one server out of step:
        when that is not certain it is told by `init`, before the next update.
        """
        if silent and not is_open:
            return is_open is False
        deadline = Deadline(ABORT_S)
        try:
            self._call(client.update_weights, deadline, {"version": version, "abort": True})
            self._call(client.finish_weight_update, deadline)
        except Exception as error:  # noqa: BLE001 the fault that led here is the one to raise
            log.info("version %s could not be called off: %s", version, error)
            return False
        return True


def silent_workers(client: Client) -> int:
    """How many workers behind it never raise."""
    return int(client.silent_workers()) if _has(client, "silent_workers") else 0  # type: ignore[attr-defined]


def _has(client: object, method: str) -> bool:
    """Whether its class has it: proxies answer to every name."""
    return callable(getattr(type(client), method, None))
