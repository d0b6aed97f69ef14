"""How versions lie in the folder of an archive.

    1764093000000-RUN/                     the runs, in order, by when they began (milliseconds since 1970)
        000000000007-full-0-KEY.json       the manifest of version 7, by its key
        000000000007-full-0-KEY.00000      its buckets
        000000000008-delta-7-KEY.json      of version 8: what differs from version 7

A manifest is written when all buckets of its version are there, and carries its own digest as a name: who lists the
folder sees whole versions only, on stores without renames, too. What is not listed any more is deleted after it.
A run that is new comes after those that are there, also where its trainer's clock is behind theirs.
Whatever is not called as these are is somebody else's, and is left alone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import numpy as np
import torch

from transfer_queue.errors import DigestMismatch, ServiceUnavailable, StoreFull, TransferQueueError, VersionGone
from transfer_queue.memory.bytes import Bytes
from transfer_queue.saved.filesystem import FileSystem
from transfer_queue.weights.transport.deadline import Deadline
from transfer_queue.weights.version.manifest import Manifest

_MANIFEST = ".json"
CLEAN_S = 60.0  # to delete what there is of a version that could not be written
_FOLDER = re.compile(r"(\d{13,})-([\w.~%-]*)", re.ASCII)
_FILE = re.compile(r"(\d{12,})-([a-z]+)-(\d+)-(\w+)(\.json|\.json\.part|\.\d{5,})", re.ASCII)


class ArchivedVersion(NamedTuple):
    """A version that is there. `base`: the version it is a difference to; 0 for a full one. Entries are ordered: by
    when their run began, then by version."""

    begun_ms: int
    run_id: str
    version: int
    kind: str
    base: int
    key: str

    @staticmethod
    def of(manifest: Manifest, begun: float) -> ArchivedVersion:
        """`begun`: of the run, in seconds since 1970."""
        base = manifest.base or 0
        return ArchivedVersion(int(begun * 1e3), manifest.epoch, manifest.version, manifest.kind, base, manifest.key)

    @staticmethod
    def parse(folder: str, name: str) -> ArchivedVersion | None:
        """The entry with this manifest; None for what is none."""
        run, file = _FOLDER.fullmatch(folder), _FILE.fullmatch(name)
        if run is None or file is None or file[5] != _MANIFEST:
            return None
        return ArchivedVersion(int(run[1]), unquote(run[2]), int(file[1]), file[2], int(file[3]), file[4])

    @property
    def folder(self) -> str:
        return f"{self.begun_ms:013}-{quote(self.run_id, safe='')}"

    @property
    def stem(self) -> str:
        return f"{self.folder}/{self.version:012}-{self.kind}-{self.base}-{self.key}"


class Archive:
    """The folder at `url`, as fsspec names it (`s3://bucket/weights`, `file:///mnt/shared/weights`); `options` are
    those of its file system. Every call takes `timeout_s` at most, and raises `ServiceUnavailable`, `DeadlineExceeded`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url
        self._system = FileSystem(url, **options)
        self._files, self._root = self._system.files, self._system.root

    def entries(self, *, timeout_s: float) -> list[ArchivedVersion]:
        """All versions that are there, in their order."""
        return self._system.timed("listing", timeout_s, self._entries)

    def manifest(self, entry: ArchivedVersion, *, timeout_s: float) -> Manifest:
        """`VersionGone` when it was deleted meanwhile, or is still being written."""
        data = self._system.timed("reading a manifest", timeout_s, self._read, entry.stem + _MANIFEST)
        found = Manifest.decode(data)
        if found.key != entry.key:
            raise DigestMismatch(f"{entry.stem}{_MANIFEST} in {self.url} is not the manifest that it is named after")
        return found

    def bucket(self, entry: ArchivedVersion, index: int, *, timeout_s: float) -> Bytes:
        """The bytes as they are there. `VersionGone` when it was deleted meanwhile."""
        data = self._system.timed("reading a bucket", timeout_s, self._read, f"{entry.stem}.{index:05}")
        return np.frombuffer(data, np.uint8)

    def put(
        self, manifest: Manifest, buckets: Mapping[int, torch.Tensor], begun: float, *, timeout_s: float
    ) -> ArchivedVersion:
        """Write a version of the run that `begun` then; one that is there already stays. `StoreFull`. Where the
        place takes no more of it nothing of it stays, as far as it can be deleted."""
        deadline = Deadline(timeout_s)
        there = self.entries(timeout_s=deadline.left("listing"))
        entry = in_order(ArchivedVersion.of(manifest, begun), there)
        if entry in there:
            return entry
        path = f"{self._root}/{entry.stem}{_MANIFEST}"
        whole = self._system.write_whole
        try:
            for index, bucket in buckets.items():
                data = bucket.numpy().tobytes()
                self._system.timed("writing a bucket", deadline.left(), self._write, f"{entry.stem}.{index:05}", data)
            self._system.timed("writing a manifest", deadline.left(), whole, path, manifest.encode(), path + ".part")
        except (StoreFull, ServiceUnavailable):  # one that is late may have a successor, which writes the same by now
            with contextlib.suppress(TransferQueueError):  # otherwise a later full version deletes it
                self._system.timed("deleting", CLEAN_S, self._clean, entry)
            raise
        return entry

    def retain(self, keep: int, *, timeout_s: float) -> None:
        """Delete what is older than the newest `keep` full versions, also what was not written to its end. Nothing else
        that lies there."""
        self._system.timed("deleting", timeout_s, self._retain, keep)

    def _entries(self) -> list[ArchivedVersion]:
        found = (ArchivedVersion.parse(folder, name) for folder, names in self._listed() for name in names)
        return sorted(one for one in found if one is not None)

    def _listed(self) -> Iterator[tuple[str, list[str]]]:
        """The folders of runs, in their order, with the names in each."""
        for folder in sorted(filter(_FOLDER.fullmatch, self._system.names(self._root))):
            yield folder, self._system.names(f"{self._root}/{folder}")

    def _read(self, name: str) -> bytes:
        try:
            data: bytes = self._files.cat_file(f"{self._root}/{name}")
        except FileNotFoundError:
            raise VersionGone(f"{name} is not in {self.url} (any more)") from None
        return data

    def _write(self, name: str, data: bytes) -> None:
        path = f"{self._root}/{name}"
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(path, data)
        self._system.sync(path)  # a manifest that outlasts a loss of power has its buckets

    def _clean(self, entry: ArchivedVersion) -> None:
        """What there is of a version that could not be written, and that nobody reads: it may have filled a disk, which
        the next version, another archive and everybody else would find full."""
        folder, name = f"{self._root}/{entry.folder}", entry.stem.rpartition("/")[2]
        names = self._system.names(folder)
        if name + _MANIFEST in names:  # it is there, if only just
            return
        mine = [one for one in names if one.startswith(f"{name}.")]
        for one in mine:
            self._files.rm_file(f"{folder}/{one}")
        if len(mine) == len(names):
            with contextlib.suppress(OSError):  # as below
                self._files.rmdir(folder)

    def _retain(self, keep: int) -> None:
        full = [one for one in self._entries() if one.kind == "full"]
        if len(full) <= keep:
            return
        oldest = full[-keep]
        for folder, names in list(self._listed()):
            if folder > oldest.folder:
                break
            mine = [found for found in map(_FILE.fullmatch, names) if found is not None]
            old = [one[0] for one in mine if folder < oldest.folder or int(one[1]) < oldest.version]
            for name in sorted(old, key=lambda one: not one.endswith(_MANIFEST)):  # manifests first
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(f"{self._root}/{folder}/{name}")
            if len(old) == len(names):
                with contextlib.suppress(OSError):  # a store without folders, or somebody writes there
                    self._files.rmdir(f"{self._root}/{folder}")


def in_order(entry: ArchivedVersion, there: Sequence[ArchivedVersion]) -> ArchivedVersion:
    """The entry as it is to be written beside those that are `there`. A clock may be behind that of the run before: a
    version that is newer would be taken for an older one, which nobody comes to, and which is deleted first."""
    newest = there[-1] if there else entry
    if entry.folder >= newest.folder or any(one.folder == entry.folder for one in there):
        return entry
    beside = entry._replace(begun_ms=newest.begun_ms)
    goes_on = entry.run_id == newest.run_id and (entry.version > newest.version or beside in there)
    return beside if goes_on else entry._replace(begun_ms=newest.begun_ms + 1)


def path_to_newest(entries: Sequence[ArchivedVersion], run_id: str, version: int | None) -> list[ArchivedVersion]:
    """What leads a reader that has this version of this run (None: none) to the newest version, in order: differences
    from where it is, or the newest full version from which they lead there. Where something is missing on every way
    (`missing_version`): to the newest of those that can be reached. Empty when it is there already."""
    if not entries:
        return []
    of_run = [one for one in entries if one[:2] == entries[-1][:2]]
    newest = of_run[-1].version
    here = version if version is not None and run_id == of_run[-1].run_id else None
    if here == newest:
        return []
    next_of = {one.base: one for one in of_run if one.kind == "delta" and one.base < one.version}

    def steps(at: int) -> list[ArchivedVersion]:
        found = []
        while at != newest and at in next_of:
            found.append(next_of[at])
            at = next_of[at].version
        return found

    ways = [] if here is None else [steps(here)]
    ways += [[one, *steps(one.version)] for one in reversed(of_run) if one.kind == "full"]
    best = max(ways, key=lambda way: way[-1].version if way else 0, default=[])
    return best if best and (here is None or best[-1].version == newest or best[-1].version > here) else []


def missing_version(entries: Sequence[ArchivedVersion], version: int | None) -> int | None:
    """The version without which nobody who has this one comes to the newest; None where that is not so."""
    if not entries:
        return None
    of_run = [one for one in entries if one[:2] == entries[-1][:2]]
    at, full = of_run[-1].version, {one.version for one in of_run if one.kind == "full"}
    bases = {one.version: one.base for one in of_run if one.kind == "delta" and one.base < one.version}
    while at not in full and at != version:
        if at not in bases:
            return at
        at = bases[at]
    return None
