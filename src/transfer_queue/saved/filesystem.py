"""Whatever fsspec opens. Its calls may never be answered: each one is given its time here."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from glob import has_magic
from typing import Any, TypeVar

from transfer_queue.background_call import BackgroundCall
from transfer_queue.errors import ConfigError, DeadlineExceeded, ServiceUnavailable, StoreFull, TransferQueueError
from transfer_queue.memory.memfd import sync_directory

T = TypeVar("T")
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS}  # of a disk that has none
ABSENT = FileNotFoundError
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # of a disk, of a share of it, of a file system's largest file


class FileSystem:
    """`root` is the path that `url` leads to in `files`; `options` are those of its file system."""

    def __init__(self, url: str, **options: Any) -> None:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        self.url = url
        try:
            self.files, self.root = url_to_fs(url, **options)
        except (ImportError, OSError, ValueError) as error:
            raise ConfigError(f"{url!r} cannot be opened: {error}") from error
        self._is_disk = isinstance(self.files, LocalFileSystem)

    @property
    def absolute_url(self) -> str:
        """The same for every process, whatever its current directory is."""
        return f"file://{self.root}" if self._is_disk else self.url

    def names(self, path: str) -> list[str]:
        """What lies there, without folders before it; nothing where there is no such folder."""
        self.files.invalidate_cache()
        try:
            return [one.rstrip("/").rpartition("/")[2] for one in self.files.ls(path, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def write_whole(self, path: str, data: bytes, draft: str) -> None:
        """Nobody reads a half of it, on file systems either. It is `draft` before, which only one writes at a time."""
        self.files.makedirs(draft.rpartition("/")[0], exist_ok=True)
        self.files.pipe_file(draft, data)
        self.sync(draft)
        self.move(draft, path)
        self.sync(path)

    def move(self, source: str, target: str) -> None:
        """Rename a file, whatever its name. fsspec's own `mv` takes one with `[`, `*` or `?` for a pattern."""
        from fsspec.spec import AbstractFileSystem

        if type(self.files).mv is AbstractFileSystem.mv:
            self.files.cp_file(source, target)
            self.files.rm_file(source)
        else:
            self.files.mv(source, target)

    def remove(self, folder: str) -> None:
        """With all that is in it, whatever its name: `rm` takes patterns, too."""
        if self._is_disk or not has_magic(folder):
            self.files.rm(folder, recursive=True)
            return
        for path, found in sorted(self.files.find(folder, withdirs=True, detail=True).items(), reverse=True):
            if found["type"] != "directory":
                self.files.rm_file(path)
                continue
            with contextlib.suppress(OSError):  # a store has no folders
                self.files.rmdir(path)

    def create_whole(self, path: str, data: bytes, draft: str) -> None:
        """As `write_whole`, where no file is: of several that do so one does, and `FileExistsError` for the others.
        Of those within one round trip, where a store cannot refuse to replace a file, the last one does."""
        if self._is_disk and self._is_linked(path, data, draft):
            return
        self.files.invalidate_cache()
        if self.files.exists(path):
            raise FileExistsError(f"{path} exists")
        try:
            if not self._has_modes():
                raise NotImplementedError
            self.files.pipe_file(path, data, mode="create")
        except (TypeError, NotImplementedError):
            self.write_whole(path, data, draft)
        if self.files.cat_file(path) != data:
            raise FileExistsError(f"{path} was written by another at the same time")

    def _is_linked(self, path: str, data: bytes, draft: str) -> bool:
        """Whether it is there now; not on a disk without links."""
        self.files.makedirs(draft.rpartition("/")[0], exist_ok=True)
        self.files.pipe_file(draft, data)
        try:
            self.sync(draft)
            os.link(draft, path)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            return False
        finally:
            os.unlink(draft)
        self.sync(path)
        return True

    def _has_modes(self) -> bool:
        """Whether it creates a file in one call of its own; fsspec's looks, opens the file in its place and writes."""
        from fsspec.asyn import AsyncFileSystem
        from fsspec.spec import AbstractFileSystem

        kind = type(self.files)
        if issubclass(kind, AsyncFileSystem) and kind._pipe_file is not AsyncFileSystem._pipe_file:
            return True
        return kind.pipe_file is not AbstractFileSystem.pipe_file

    def sync(self, path: str) -> None:
        """Blocks until a file and its name are on the disk, where it lies on one of this machine. A store has what it
        was given."""
        if not self._is_disk:
            return
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        sync_directory(os.path.dirname(path))

    def timed(
        self, what: str, timeout_s: float, function: Callable[..., T], *args: Any, passes: type[OSError] = ABSENT
    ) -> T:
        """`DeadlineExceeded` when it takes longer; `StoreFull`; `ServiceUnavailable` for whatever else a store raises,
        but what it `passes`."""
        call = BackgroundCall("tq-files", function, *args)
        if not call.ended(timeout_s):
            raise DeadlineExceeded(f"{what} in {self.url} did not end within {timeout_s:.0f} s")
        try:
            return call.outcome()
        except (TransferQueueError, passes):
            raise
        except Exception as error:  # each store has errors of its own
            if isinstance(error, OSError) and error.errno in FULL:
                raise StoreFull(f"{what} in {self.url}: {error}") from error
            raise ServiceUnavailable(f"{what} in {self.url}: {error!r}") from error
