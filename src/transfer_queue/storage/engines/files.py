"""Blocks as files: of a directory that all hosts share, or of whatever else fsspec opens.

The slowest engine, which needs no server of its own and loses nothing when one ends.

A file beside them, `.tq-place`, names the directory. Where it is not there, or is another one, a mount may be away or a
store another one: then nothing is said to be missing, nothing is deleted, and nothing counts as written.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from glob import has_magic
from typing import Any

import numpy as np

from transfer_queue.errors import ConfigError, StoreFull
from transfer_queue.memory.bytes import Bytes
from transfer_queue.saved.filesystem import FULL, FileSystem
from transfer_queue.storage.engines.engine import BlocksMissing, ReadSpan, Room, StorageEngine

PART = ".part"
PLACE, PLACE_NBYTES = ".tq-place", 8
FEW = 16  # files that are looked for one after the other; more are looked up in a list of all


class Files(StorageEngine):
    """`settings.url` names the directory as fsspec does: "file:///mnt/shared/tq", "s3://bucket/tq". `place`: as which
    it is known (a server that opens it finds out)."""

    name = "Files"
    survives = "machine"

    def __init__(self, settings: Mapping[str, Any], serves: bool) -> None:
        url = settings.get("url")
        if not isinstance(url, str) or not url:
            raise ConfigError(
                "backend.Files.url: expected where the files go, as file:///mnt/shared/tq or s3://bucket/tq"
            )
        try:
            found = FileSystem(url)
        except ConfigError as error:
            raise ConfigError(f"backend.Files.url: {error}") from error
        self._system, self._files, self._root, self._url = found, found.files, found.root, found.absolute_url
        self._is_durable = bool(settings.get("durable"))
        self._place = str(settings.get("place", ""))
        if serves:
            try:
                self._files.makedirs(self._root, exist_ok=True)
                self._place = self._placed()
            except (OSError, ValueError) as error:
                raise ConfigError(f"backend.Files.url: {url!r}: {error}") from error

    def _placed(self) -> str:
        """What names the directory, which is given a name where it has none."""
        path = f"{self._root}/{PLACE}"
        name = secrets.token_hex(PLACE_NBYTES).encode()
        with contextlib.suppress(FileExistsError):
            self._system.create_whole(path, name, f"{path}-{name.decode()}{PART}")
        return self._named(path)

    def _named(self, path: str) -> str:
        return bytes(self._files.cat_file(path)).decode().strip()

    @property
    def where(self) -> str:
        return self._url

    @property
    def place(self) -> str:
        return self._place

    @property
    def for_clients(self) -> Mapping[str, Any]:
        return {"url": self._url, "durable": self._is_durable, "place": self._place}

    def reserve(self, key: str, nbytes: int) -> Room:
        return _FileRoom(self._system, self._path(key), nbytes, self._is_durable, self._check_place)

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
                    self._check_place()
                    raise BlocksMissing([span.key]) from None
                span.into[: len(data)] = np.frombuffer(data, np.uint8)

    def missing(self, keys: Sequence[str]) -> set[str]:
        self._check_place()
        if len(keys) > FEW:
            there = {path.rstrip("/").rpartition("/")[2] for path in self._files.ls(self._root, detail=False)}
            return {key for key in keys if _name(key) not in there}
        return {key for key in keys if not self._is_there(self._path(key))}

    def _is_there(self, path: str) -> bool:
        """Raises where that cannot be found out: `exists` says no then."""
        try:
            self._files.info(path)
        except FileNotFoundError:
            return False
        return True

    def _check_place(self) -> None:
        self._files.invalidate_cache()
        path = f"{self._root}/{PLACE}"
        try:
            found = self._named(path)
        except FileNotFoundError:
            found = ""
        if self._place and found != self._place:
            raise OSError(
                f"{path} says {found!r}, not {self._place!r}: is a mount away, or is this another place? Where the rows"
                f" are gone for good, write {self._place} into that file"
            )

    def drop(self, keys: Sequence[str]) -> None:
        self._check_place()
        paths = [path + end for path in map(self._path, keys) for end in ("", PART)]  # a killed writer may leave a part
        if getattr(self._files, "async_impl", False) and not has_magic(self._root):
            self._files.rm(paths)  # many in one request; those not there are no error, and names may be patterns
            return
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(path)

    def _path(self, key: str) -> str:
        return f"{self._root}/{_name(key)}"


def _name(key: str) -> str:
    return key.replace("/", "-")


class _FileRoom(Room):
    """Written under another name, then renamed: nobody reads half a file. One that `is_durable` is on the disk when it
    is sealed; nobody is told of it before. `check_place` raises where that is not the place it was to go to."""

    def __init__(
        self, system: FileSystem, path: str, nbytes: int, is_durable: bool, check_place: Callable[[], None]
    ) -> None:
        self.memory: Bytes = np.empty(nbytes, np.uint8)
        self._system, self._files, self._path, self._is_durable = system, system.files, path, is_durable
        self._check_place = check_place

    def seal(self) -> None:
        part = self._path + PART  # a key has one writer
        try:
            with self._files.open(part, "wb") as file:
                file.write(memoryview(self.memory))  # type: ignore[arg-type]
            self._system.move(part, self._path)
            if self._is_durable:
                self._system.sync(self._path)
            self._check_place()  # only now: a mount that goes away meanwhile leaves its mount point, which takes all
        except OSError as error:
            for path in (part, self._path):
                with contextlib.suppress(OSError):
                    self._files.rm_file(path)
            if error.errno in FULL:
                raise StoreFull(f"{len(self.memory)} bytes do not fit: {error}") from error
            raise

    def abandon(self) -> None:
        self.memory = np.empty(0, np.uint8)
