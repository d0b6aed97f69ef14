"""The trainer's side: makes a version, puts it where receivers find it, and leads them through the four calls."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
import torch
from xxhash import xxh3_128_hexdigest

from transfer_queue.errors import (
    DeadlineExceeded,
    InvalidInput,
    StaleBase,
    StaleVersion,
    TransferQueueError,
    VersionGone,
    error_from_code,
)
from transfer_queue.weights.delta import DeltaSource
from transfer_queue.weights.engines.base import INIT_TIMEOUT_S, Info, Outcome, as_typed, parse
from transfer_queue.weights.engines.waiting import Call, Deadline
from transfer_queue.weights.manifest import Manifest
from transfer_queue.weights.packing import BUCKET_NBYTES, Plan, seal
from transfer_queue.weights.room import write
from transfer_queue.weights.sources import TensorMeta, WeightSource

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
    full one to the next; those between are differences, which takes a copy of the weights here."""

    epoch: str = ""
    bucket_nbytes: int = BUCKET_NBYTES
    anchor_every: int = 1
    timeout_s: float = INIT_TIMEOUT_S


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


class Follower(ABC):
    """A client that looks after its receivers: it judges what they report, and brings late ones up by itself."""

    @abstractmethod
    def follow(self, publisher: TrainerEngine) -> None:
        """The trainer engine whose versions these are."""


class Base:
    """An earlier version with its weights: for differences, and as a source for receivers that lack theirs."""

    def __init__(self, manifest: Manifest, source: WeightSource) -> None:
        self.manifest = manifest
        self.digests = {spec.name: spec.digest for spec in manifest.tensors}
        self.weights = {name: tensor.clone() for name, tensor in source.tensors()}
        self._specs = source.specs()
        self._aliases = source.aliases()

    def follow(self, manifest: Manifest, source: WeightSource) -> None:
        """These are the weights now. Copies what changed."""
        changed = {spec.name for spec in manifest.tensors}
        for name, tensor in source.tensors():
            if name in changed:
                write(self.weights[name], tensor.detach())
        self.manifest = manifest
        self.digests.update((spec.name, spec.digest) for spec in manifest.tensors)

    def specs(self) -> list[TensorMeta]:
        return self._specs

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()

    def aliases(self) -> dict[str, str]:
        return self._aliases


class Draft:
    """A version about to be packed."""

    def __init__(self, source: WeightSource, version: int, epoch: str, base: Base | None) -> None:
        self.version = version
        self.epoch = epoch
        self._base = base
        self._delta = DeltaSource(base.weights, base.manifest.root, source, base.digests) if base else None
        self.source: WeightSource = self._delta or source

    def seal(self, where: Plan, digests: Mapping[str, str]) -> Manifest:
        if self._delta is None or self._base is None:
            aliases = self.source.aliases()
            return seal(where, digests, version=self.version, epoch=self.epoch, aliases=aliases)
        base = self._base.manifest.version
        return self._delta.manifest(where, digests, version=self.version, epoch=self.epoch, base=base)


def key_of(manifest: Manifest) -> str:
    """Names the manifest: the content, its packing and what it is called."""
    return xxh3_128_hexdigest(manifest.encode())


class TrainerEngine(ABC):
    """Sends the versions of one source, by one thread at a time."""

    init_form: ClassVar[type[TrainerInfo]] = TrainerInfo
    hears: ClassVar[bool] = False  # whether receivers report outcomes

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
        self._newest: Manifest | None = None  # that was decided
        self._num_deltas = 0

    @classmethod
    def trainer_init(cls: type[Self], init_info: Info, *, client: Client, source: WeightSource) -> Self:
        """Open the transport and introduce the receivers to it, within the `timeout_s` of `init_info`."""
        try:
            made = cls(parse(init_info, cls.init_form), client, source)
        except OSError as error:
            raise as_typed(error) from error
        try:
            if isinstance(client, Follower):
                client.follow(made)
            made._meet(Deadline(made.info.timeout_s))
        except BaseException:
            made.shutdown()
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

    def catch_up_info(self, timeout_s: float) -> dict[str, Any]:
        """The `update_info` of the newest version as a full one, for a receiver that has another or none.

        Waits for a version that is being sent. `VersionGone` when there is none; `DeadlineExceeded`.
        """
        deadline = Deadline(timeout_s)
        if not self._busy.acquire(timeout=timeout_s):
            raise DeadlineExceeded(f"another version was being sent for {timeout_s} s")
        try:
            if self._newest is None:
                raise VersionGone("no version was sent yet")
            if self._newest.kind == "delta":
                assert self._base is not None
                whole = self._publish(Draft(self._base, self._newest.version, self.epoch, None), deadline)
                self._decide(whole)
                self._newest = whole
            return self.update_info(self._newest, deadline)
        finally:
            self._busy.release()

    def take_outcomes(self, replica: str) -> list[Outcome]:
        """What a replica's ranks reported since this was asked last, once each. Without a fleet its name is ""."""
        return []

    def shutdown(self) -> None:
        """Free what the transport holds. Receivers keep their weights. Repeatable."""
        self._base = None
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

    def _decide(self, manifest: Manifest) -> None:
        """The receivers have verified it: from now on it is what late ones get."""
        return

    def _withdraw(self, manifest: Manifest) -> None:
        """It was given up: nobody is to get it."""
        return

    def _meet(self, deadline: Deadline) -> None:
        self._call(self._client.init_weight_transfer_engine, deadline, self.receivers_info())

    def _lead(self, manifest: Manifest, info: dict[str, Any], deadline: Deadline) -> None:
        """Have every receiver fetch and verify it."""
        self._call(self._client.update_weights, deadline, info)

    # steps

    def _send(self, number: int, base: Base | None, deadline: Deadline) -> SyncReport:
        times = [time.monotonic()]
        draft = Draft(self._source, number, self.epoch, base)
        manifest = self._publish(draft, deadline)
        self.version = number
        times.append(time.monotonic())
        earlier, self._base = self._base, None  # until all have it
        try:
            self._call(self._client.start_weight_update, deadline)
            self._lead(manifest, self.update_info(manifest, deadline), deadline)
            self._check_outcomes(number)
            self._newest = manifest
            self._decide(manifest)
            times.append(time.monotonic())
            self._call(self._client.finish_weight_update, deadline, str(number))
            self._check_outcomes(number)
        except BaseException as error:
            self._call_off(number)
            if self._newest is manifest:
                self._keep(manifest, earlier)
            else:
                self._withdraw(manifest)
                self._base = earlier
            if isinstance(error, OSError) and not isinstance(error, TransferQueueError):
                raise as_typed(error) from error
            raise
        times.append(time.monotonic())
        self._num_deltas = self._num_deltas + 1 if base else 0
        self._keep(manifest, earlier)
        spans = [after - before for before, after in itertools.pairwise(times)]
        return SyncReport(number, self.epoch, manifest.root, manifest.kind, manifest.nbytes, *spans)

    def update_info(self, manifest: Manifest, deadline: Deadline) -> dict[str, Any]:
        """What receivers are told of a version."""
        return {
            "version": manifest.version, "epoch": manifest.epoch, "key": key_of(manifest), "timeout_s": deadline.left()
        }  # fmt: skip

    def _keep(self, manifest: Manifest, earlier: Base | None) -> None:
        if self.info.anchor_every <= 1:
            return
        if earlier is None:
            earlier = Base(manifest, self._source)
        else:
            earlier.follow(manifest, self._source)
        self._base = earlier

    def _check_outcomes(self, version: int) -> None:
        if isinstance(self._client, Follower):
            return
        for outcome in self.take_outcomes(""):
            if outcome.code and outcome.version == version:
                raise error_from_code(outcome.code, f"rank {outcome.rank}: {outcome.text}")

    def _call(self, function: Callable[..., object], deadline: Deadline, *args: Any) -> object:
        what = getattr(function, "__name__", "the call")
        return Call(function, *args).result(deadline, what)

    def _call_off(self, version: int) -> None:
        """Make sure that nobody commits it later."""
        deadline = Deadline(ABORT_S)
        with contextlib.suppress(Exception):
            self._call(self._client.update_weights, deadline, {"version": version, "abort": True})
            self._call(self._client.finish_weight_update, deadline)
