"""The newest version of an archive, in this host's memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from transfer_queue.background_call import Helpers
from transfer_queue.errors import StaleBase, TransferQueueError, VersionGone, kept
from transfer_queue.weights.archive.folder import Archive, ArchivedVersion, missing_version, path_to_newest
from transfer_queue.weights.receive.staging import Staging
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.version.delta import Patch
from transfer_queue.weights.version.manifest import Contents, Manifest, expand, root_of
from transfer_queue.weights.version.sources import TensorMeta

NUM_STREAMS = 4  # buckets that are fetched at a time: what is far away answers late, and one does not fill the link


class _Held:
    """As much of a target as staging asks: these tensors, which differences are applied to in place."""

    takes_patches, takes_pieces = True, False

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def bases(self) -> Mapping[str, torch.Tensor]:
        return self._tensors


class ArchiveSource:
    """A source of weights (`WeightSource`) that is what `advance` came to last: `version` of `run_id`, with `root`. For
    one thread. It holds the model once, and while a full version comes, that one, too.

    Every byte is checked as a receiver checks it. What fails leaves it as it was, or, after an interrupt in the middle
    of a change, without a version: then the next `advance` begins with a full one.
    """

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self.version: int | None = None
        self.run_id = ""
        self.root = ""
        self.num_fetched_nbytes = 0  # of buckets
        self._key = ""  # of its manifest
        self._contents: Contents = {}
        self._aliases: dict[str, str] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def advance(self, *, timeout_s: float, wait_s: float = 0.0, every_s: float = 1.0) -> bool:
        """Come to the newest version that is in the archive; whether that is another one than before. Until there is
        one it looks again after `every_s`, for `wait_s` in all (0: once).

        What is deleted while it is being read is left for what is newer. Where a version is missing that the newest one
        is a difference from, it comes to the newest that can be reached. `VersionGone` where there is none to come to,
        or a file of it is missing; `DeadlineExceeded`, `ServiceUnavailable`, `DigestMismatch` (bytes that were damaged
        there).
        """
        deadline, give_up = Deadline(timeout_s), time.monotonic() + wait_s
        tried: list[ArchivedVersion] = []
        fault: TransferQueueError | None = None
        while True:
            entries = self._archive.entries(timeout_s=deadline.left("listing"))
            path = self._path(entries)
            if path and path != tried:
                fault, tried = self._take(path, deadline), path
                if fault is None:
                    return True
                continue  # what was deleted meanwhile is not listed any more
            if time.monotonic() >= give_up:
                if path and fault is not None:
                    raise fault
                if self.version is None and not entries:
                    raise VersionGone(f"no version in {self._archive.url}")
                self._expect_reached(entries)
                return False
            # A store tells nobody what comes.
            time.sleep(min(every_s, max(0.0, give_up - time.monotonic()), deadline.left("waiting for a version")))
            tried = []

    def specs(self) -> list[TensorMeta]:
        return [TensorMeta(name, one.dtype, tuple(one.shape)) for name, one in self._tensors.items()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.version is None:
            raise VersionGone("no version was fetched so far: advance")
        yield from self._tensors.items()

    def aliases(self) -> dict[str, str]:
        return dict(self._aliases)

    def _path(self, entries: list[ArchivedVersion]) -> list[ArchivedVersion]:
        keys = {one.key for one in entries if one[:3] == entries[-1][:3]}
        has_number = bool(entries) and (entries[-1].run_id, entries[-1].version) == (self.run_id, self.version)
        if has_number and self._key not in keys:  # of a trainer that was started anew under the name that it had
            return path_to_newest(entries, "", None)
        return path_to_newest(entries, self.run_id, self.version)

    def _expect_reached(self, entries: list[ArchivedVersion]) -> None:
        """Nothing leads on from here: `VersionGone` unless this is the newest version."""
        is_run = bool(entries) and entries[-1].run_id == self.run_id
        missing = missing_version(entries, self.version if is_run else None)
        if missing is not None:
            newest = entries[-1]
            raise VersionGone(
                f"version {missing} of run {newest.run_id!r} is missing in {self._archive.url}, and version "
                f"{newest.version} is a difference that needs it: have the trainer send a full one (full=True)"
            )

    def _take(self, path: list[ArchivedVersion], deadline: Deadline) -> TransferQueueError | None:
        """Go along; why it does not lead to its end, if it does not."""
        for entry in path:
            try:
                manifest = self._archive.manifest(entry, timeout_s=deadline.left("reading a manifest"))
                staging = self._staged(entry, manifest, deadline)
            except VersionGone as error:
                return kept(error)
            try:
                self._install(manifest, staging)
            except StaleBase as error:
                self.version = None  # what is here is not what was fetched: begin anew
                return kept(error)
        return None

    def _staged(self, entry: ArchivedVersion, manifest: Manifest, deadline: Deadline) -> Staging:
        staging = Staging(manifest)

        def fetch(index: int) -> None:
            data = self._archive.bucket(entry, index, timeout_s=deadline.left("reading a bucket"))
            staging.stage(index, data, lend=False, vouched=False)
            self.num_fetched_nbytes += data.nbytes

        with Helpers(NUM_STREAMS, "tq-archive") as helpers:
            list(helpers.map(fetch, staging.missing))
        return staging

    def _install(self, manifest: Manifest, staging: Staging) -> None:
        target: Any = _Held(self._tensors)
        found = staging.tensors(target)
        changed = {spec.name: spec.entry for spec in manifest.tensors}
        is_full = manifest.kind == "full"
        contents = changed if is_full else {**self._contents, **changed}
        aliases = manifest.aliases if is_full else self._aliases
        if root_of(expand(contents, aliases)) != manifest.root:
            raise StaleBase(f"version {manifest.version} does not lead to its root from here")
        self.version = None
        tensors = {} if is_full else self._tensors
        for name in changed:
            value = found[name]
            if isinstance(value, Patch):
                value.apply(tensors[name])
            else:
                assert isinstance(value, torch.Tensor)
                tensors[name] = value
        self._tensors, self._contents, self._aliases = tensors, contents, dict(aliases)
        self.version, self.run_id, self.root = manifest.version, manifest.epoch, manifest.root
        self._key = manifest.key
