"""A folder that fsspec opens: an object store, a network file system, another host.

    metadata.json                                the list; it says below which name its files lie
    files-1764093000000-5f0c9a21/blocks.msgpack  they do, by when they were begun (milliseconds since 1970)

Stores have no renames: files come first, and the list last, in one step. Its draft lies with the files. Files that no
list names are deleted by the next one that is written, those that somebody else may be writing once they are a day old.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from transfer_queue.errors import CheckpointMissing, InvalidInput, TransferQueueError
from transfer_queue.saved.files import Metadata, listed_by
from transfer_queue.saved.filesystem import FileSystem
from transfer_queue.saved.folder import Draft, Folder

log = logging.getLogger("transfer_queue")
ANSWER_S = 120.0  # for each call: a store that takes longer is not there
BLOCK_NBYTES = 16 << 20  # that a store is sent, or asked for, at a time
ABANDONED_S = 86400.0
PREFIX = "files-"


class RemoteFolder(Folder):
    """`ConfigError` for a URL that fsspec cannot open. Everything else raises `ServiceUnavailable`, `StoreFull` or
    `DeadlineExceeded` when the store does."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._system = FileSystem(url)

    def __str__(self) -> str:
        return self._url

    def is_there(self) -> bool:
        return bool(self._names())

    def has(self, name: str) -> bool:
        self._system.files.invalidate_cache()
        return bool(self._timed("looking for a file", self._system.files.exists, self._at(name)))

    def open(self, name: str) -> _RemoteOpenFile:
        self._system.files.invalidate_cache()  # a list that was replaced has another size
        try:
            return _RemoteOpenFile(self._system, self._at(name))
        except FileNotFoundError:
            raise CheckpointMissing(f"{self.path(name)} is missing") from None

    def repair(self, name: str) -> None:
        """A list is replaced in one step."""

    def refuse_other(self, name: str) -> None:
        found = [one for one in self._names() if not one.startswith(PREFIX)]
        if found and (name not in found or self._listed(name) is None):
            text = f"{self} holds something else than a checkpoint, which would be lost: {sorted(found)[:4]}"
            raise InvalidInput(f"{text}; move it away, or save to another place")

    def refuse_any(self) -> None:
        if any(not one.startswith(PREFIX) for one in self._names()):
            raise FileExistsError(f"{self} exists: what is there is never replaced")

    def replacing(self, name: str) -> contextlib.AbstractContextManager[Draft]:
        return self._drafting(name, self._system.write_whole)

    @contextlib.contextmanager
    def _drafting(self, name: str, write: Callable[[str, bytes, str], None]) -> Iterator[Draft]:
        below = f"{PREFIX}{int(time.time() * 1e3):013}-{secrets.token_hex(4)}"
        draft = _RemoteDraft(self._system, below)
        try:
            yield draft
            before = self._listed(name)
            draft.is_seen = True  # perhaps, from here on
            own = self._at(f"{below}/{name}")
            made = (write, self._at(name), draft.list, own)
            self._system.timed("writing the list of files", ANSWER_S, *made, passes=FileExistsError)
        except BaseException as error:
            if isinstance(error, FileExistsError):  # another's is
                draft.is_seen = False
            if not draft.is_seen:
                self._delete(below)
            raise
        now = time.time()
        replaced = set() if before is None else {before.folder} if before.folder else set(before.files)
        for one in self._names():
            begun = one.removeprefix(PREFIX).partition("-")[0]
            is_old = one.startswith(PREFIX) and begun.isdecimal() and int(begun) / 1e3 < now - ABANDONED_S
            if one != below and (one in replaced or is_old):
                self._delete(one)

    @contextlib.contextmanager
    def creating(self, name: str) -> Iterator[Draft]:
        self.refuse_any()
        with self._drafting(name, self._system.create_whole) as draft:
            yield draft
            self.refuse_any()

    def _listed(self, name: str) -> Metadata | None:
        """The list that is there; None where there is none, or something else."""
        try:
            content = self._timed("reading the list of files", self._system.files.cat_file, self._at(name))
        except FileNotFoundError:
            return None
        return listed_by(content)

    def _delete(self, name: str) -> None:
        """Nobody needs it; what is not deleted now is later."""
        with contextlib.suppress(FileNotFoundError):
            try:
                self._timed("deleting files", self._system.remove, self._at(name))
            except TransferQueueError as error:
                log.warning("%s stays: %s", self.path(name), error)

    def _names(self) -> list[str]:
        return self._timed("listing", self._system.names, self._system.root)

    def _at(self, name: str) -> str:
        return f"{self._system.root.rstrip('/')}/{name}"

    def _timed(self, what: str, function: Any, *args: Any) -> Any:
        return self._system.timed(what, ANSWER_S, function, *args)


class _RemoteFile:
    """`mode` "rb" or "wb"."""

    def __init__(self, system: FileSystem, path: str, mode: str) -> None:
        self._system, self._path = system, path
        self._file: Any = self._timed("opening", system.files.open, path, mode, BLOCK_NBYTES)

    def _timed(self, what: str, function: Any, *args: Any) -> Any:
        return self._system.timed(f"{what} {self._path}", ANSWER_S, function, *args)


class _RemoteOpenFile(_RemoteFile):
    def __init__(self, system: FileSystem, path: str) -> None:
        super().__init__(system, path, "rb")
        self.nbytes = int(self._timed("looking at", system.files.size, path))

    def readinto(self, into: memoryview) -> int:
        try:  # not into `into`, which may be another's when a call is late
            data = self._timed("reading", self._file.read, len(into))
        except FileNotFoundError:  # it was replaced meanwhile
            raise CheckpointMissing(f"{self._path} in {self._system.url} is not there any more") from None
        into[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._timed("closing", self._file.close)


class _RemoteNewFile(_RemoteFile):
    def __init__(self, system: FileSystem, path: str) -> None:
        super().__init__(system, path, "wb")

    def write(self, data: bytes | memoryview) -> None:
        self._timed("writing", self._file.write, bytes(data))  # what it lies in may be another's when a call is late

    def finish(self) -> None:
        self._timed("writing", self._file.close)
        self._timed("writing", self._system.sync, self._path)

    def discard(self) -> None:
        """Files that are never closed are never there, or are deleted with their folder."""
        discard = getattr(self._file, "discard", None)
        if discard is not None and not self._file.closed:
            with contextlib.suppress(TransferQueueError, FileNotFoundError):
                self._timed("giving up", discard)


class _RemoteDraft(Draft):
    """`is_seen`: its list may be there."""

    def __init__(self, system: FileSystem, below: str) -> None:
        super().__init__(below)
        self.is_seen = False
        self.list = b""
        self._system = system

    def _create(self, name: str) -> _RemoteNewFile:
        path = f"{self._system.root.rstrip('/')}/{self.below}/{name}"
        self._system.timed("making a folder", ANSWER_S, self._make, path.rpartition("/")[0])
        return _RemoteNewFile(self._system, path)

    def _make(self, path: str) -> None:
        self._system.files.makedirs(path, exist_ok=True)

    def _write_list(self, name: str, data: bytes) -> None:
        self.list = data
