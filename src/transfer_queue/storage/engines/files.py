"""Blocks as files: of a directory that all hosts share, or of whatever else fsspec opens.

The slowest engine, which needs no server of its own and loses nothing when one ends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fsspec.implementations.local import LocalFileSystem

from transfer_queue.errors import ConfigError, StoreFull
from transfer_queue.memory.bytes import Bytes
from transfer_queue.memory.memfd import sync_directory
from transfer_queue.saved.filesystem import FileSystem
from transfer_queue.storage.engines.engine import BlocksMissing, ReadSpan, Room, StorageEngine

NO_SPACE = 28  # errno.ENOSPC
PART = ".part"


class Files(StorageEngine):
    """`settings.url` names the directory as fsspec does: "file:///mnt/shared/tq", "s3://bucket/tq"."""

    name = "Files"
    survives = "machine"

    def __init__(self, settings: Mapping[str, Any], serves: bool) -> None:
        url = settings.get("url")
        if not isinstance(url, str) or not url:
            raise ConfigError(
                "backend.Files.url: expected where the files go, as file:///mnt/shared/tq or s3://bucket/tq"
            )
        self._url = url
        try:
            found = FileSystem(url)
        except ConfigError as error:
            raise ConfigError(f"backend.Files.url: {error}") from error
        self._files, self._root = found.files, found.root
        self._is_local = isinstance(self._files, LocalFileSystem)
        self._syncs = bool(settings.get("durable")) and self._is_local
        if serves:
            try:
                self._files.makedirs(self._root, exist_ok=True)
            except (OSError, ValueError) as error:
                raise ConfigError(f"backend.Files.url: {url!r}: {error}") from error

    @property
    def where(self) -> str:
        return self._url

    @property
    def for_clients(self) -> Mapping[str, Any]:
        return {"url": self._url, "durable": self._syncs}

    def reserve(self, key: str, nbytes: int) -> Room:
        return _FileRoom(self._files, self._path(key), nbytes, self._syncs)

    def read(self, spans: Sequence[ReadSpan]) -> None:
        opened: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            for span in spans:
                try:
                    if span.key not in opened:
                        opened[span.key] = stack.enter_context(self._files.open(self._path(span.key), "rb"))
                    file = opened[span.key]
                    file.seek(span.offset)
                    data = file.read(len(span.into))
                except FileNotFoundError:
                    raise BlocksMissing([span.key]) from None
                span.into[: len(data)] = np.frombuffer(data, np.uint8)

    def missing(self, keys: Sequence[str]) -> set[str]:
        self._files.invalidate_cache()
        if self._is_local and not self._files.isdir(self._root):  # perhaps a mount that is away for a while
            raise NotADirectoryError(f"{self._root} is not there")
        return {key for key in keys if not self._files.exists(self._path(key))}

    def drop(self, keys: Sequence[str]) -> None:
        for path in map(self._path, keys):
            for name in (path, path + PART):  # a writer that was killed may have left the one or the other
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(name)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key.replace('/', '-')}"


class _FileRoom(Room):
    """Written under another name, then renamed: nobody reads half a file. It `syncs` where the bytes would else be in
    this host's memory for a while; an object store has them when it says so."""

    def __init__(self, files: Any, path: str, nbytes: int, syncs: bool) -> None:
        self.memory: Bytes = np.empty(nbytes, np.uint8)
        self._files, self._path, self._syncs = files, path, syncs

    def seal(self) -> None:
        part = self._path + PART  # a key has one writer
        try:
            with self._files.open(part, "wb") as file:
                file.write(memoryview(self.memory))  # type: ignore[arg-type]
                if self._syncs:
                    file.flush()
                    os.fsync(file.fileno())
            self._files.mv(part, self._path)
            if self._syncs:
                sync_directory(os.path.dirname(self._path))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._files.rm_file(part)
            if error.errno == NO_SPACE:
                raise StoreFull(f"{len(self.memory)} bytes do not fit: {error}") from error
            raise

    def abandon(self) -> None:
        self.memory = np.empty(0, np.uint8)
