"""A member of a trainer's updates that keeps no model: it writes every version to an archive."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from transfer_queue.background_call import BackgroundCall
from transfer_queue.errors import DeadlineExceeded, InvalidInput, NotSupported, TransferQueueError
from transfer_queue.weights.archive.folder import Archive
from transfer_queue.weights.receive.receiver import Receiver, VersionInfo
from transfer_queue.weights.receive.targets import Live, Pause, Target
from transfer_queue.weights.receive.update_session import OpenVersion
from transfer_queue.weights.transport.faults import as_typed
from transfer_queue.weights.version.manifest import Contents, Manifest

log = logging.getLogger("transfer_queue.weights")
UPLOAD_S = 3600.0  # of one version
LEAVE_S = 600.0  # that a program which ends waits for it


class _Came(NamedTuple):
    """A version as it came, every byte checked."""

    manifest: Manifest
    buckets: dict[int, torch.Tensor]


class _Writing(Target):
    """Hands versions to a thread that writes them: the next one waits for it (`settle`). When that fails nothing is
    installed any more, so that the trainer sends a full version next."""

    takes_pieces = True

    def __init__(self, archive: Archive, keep: int, begun: Callable[[], float]) -> None:
        self._archive, self._keep, self._begun = archive, keep, begun
        self._upload: BackgroundCall[None] | None = None
        self._lock = threading.Lock()  # who sees a version here can wait for its upload; its failure comes after it

    def settle(self, timeout_s: float) -> None:
        """Wait for the version before, and raise what went wrong with it."""
        with self._lock:
            upload = self._upload
        if upload is None:
            return
        if not upload.ended(timeout_s):
            raise DeadlineExceeded(f"the version before is still being written to {self._archive.url}")
        with self._lock:
            self._upload = None if self._upload is upload else self._upload
        upload.outcome()

    def commit(self, prepared: _Came, tag: Any, timeout_s: float) -> Pause:
        with self._lock:
            self._upload = BackgroundCall("tq-archive", self._write, prepared, self._begun())
            self._upload.outlast(LEAVE_S)
            self.tag = tag
        return Pause(0.0, 0.0)

    def _write(self, came: _Came, begun: float) -> None:
        try:
            self._archive.put(came.manifest, came.buckets, begun, timeout_s=UPLOAD_S)
        except Exception as error:
            with self._lock:
                self.tag = VersionInfo()  # differences to what is not there would be of no use
            log.error("version %s could not be written to %s: %s", came.manifest.version, self._archive.url, error)
            raise as_typed(error) from error
        if came.manifest.kind == "full":
            try:
                self._archive.retain(self._keep, timeout_s=UPLOAD_S)
            except TransferQueueError as error:  # the version is there: the next full one tries again
                log.error("older versions in %s could not be deleted: %s", self._archive.url, error)

    def check(self, contents: Contents) -> None:
        """Whatever it is."""

    def bases(self) -> Mapping[str, Any]:
        return {}

    def prepare(self, staged: Mapping[str, Any]) -> Any:
        raise NotSupported("an archive is given versions as they came")

    def reading(self, timeout_s: float) -> AbstractContextManager[Live]:
        raise NotSupported("an archive has no model to run")

    def exclusive(self, timeout_s: float) -> AbstractContextManager[float]:
        return nullcontext(0.0)

    def scramble(self, timeout_s: float) -> None:
        raise NotSupported("an archive has no live weights")

    def inspecting(self, timeout_s: float) -> AbstractContextManager[torch.nn.Module]:
        raise NotSupported("an archive has no model to look at")


class ArchiveReceiver(Receiver):
    """The receiver of an engine (`registry.engine("tcp")(ArchiveReceiver(archive))`) whose versions go to `archive`.

    `commit` returns once all is here and checked; a thread writes it, and the next update waits for that before it is
    verified, so at most two versions are in memory. `keep`: full versions that stay, with the differences to them.
    The last one is there after `flush`, or the engine's `shutdown`. After a write that failed, the next update raises
    what it was; the one after it is full. Adapters are refused.
    """

    answers = False

    def __init__(self, archive: Archive, *, keep: int = 2) -> None:
        if keep < 1:
            raise InvalidInput(f"{keep} full versions to keep")
        self._writing = _Writing(archive, keep, lambda: self._begun)
        super().__init__(self._writing)

    def flush(self, timeout_s: float) -> None:
        """Return once all that was committed is in the archive; raises what went wrong, or `DeadlineExceeded`."""
        self._writing.settle(timeout_s)

    def _prepare(self, opened: OpenVersion) -> _Came:
        session = self.session
        self._writing.settle(session.left_s() if session is not None else 0.0)
        staging = opened.staging
        buckets = ((index, staging.bucket(index)) for index in range(len(opened.manifest.buckets)))
        return _Came(opened.manifest, {index: bucket for index, bucket in buckets if bucket is not None})
