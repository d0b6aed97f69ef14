"""The directory into which Mooncake's store moves objects for which its memory has no room.

Facts behind it, of mooncake-transfer-engine 0.3.13:

- A master with `offload_on_evict` takes out of memory only what is on the disk. What is hard-pinned is never moved.
- Files are written by the client that lends the memory, which here is the server. Nobody tells it what was deleted:
  files stay, and its count of their bytes only grows. So it may delete none by itself (`none`), may count as far as it
  likes, and has one object in a file, which is deleted here.
- With its files named by keys (`file_per_key_storage_backend`) and without deleting by itself, it does not start.
- A part of an object cannot be read from the disk, and nothing that its buffer for that has no room for. A read for
  which that room is held too short fails (-706; 5 s, where nothing is said).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transfer_queue.errors import ConfigError

SECTION = "backend.MooncakeStore.offload"
PREFIX = "tq-offload-"
NO_LIMIT = 1 << 60
KEEP_S = 600.0  # how long after its deletion a file may still appear: it was being written then
LONE_S = 60.0  # after its last byte a file without its description is what is left of an attempt that failed
META, BYTES = ".meta", ".bucket"
KEY = re.compile(rb"tq/[0-9a-f]+/[0-9]+")
LEAST_BUFFER = 1 << 20
READ_MS = 60_000  # that one reader may take


class OffloadSettings(NamedTuple):
    """As TransferQueue names them; its `client_port` is of a process that there is not here."""

    file_storage_path: str = "/tmp/mooncake_offload"
    local_buffer_size_bytes: int = 2 << 30
    use_uring: bool = False
    heartbeat_interval_seconds: int = 2
    eviction_high_watermark_ratio: float = 0.9
    eviction_ratio: float = 0.1

    @property
    def max_nbytes(self) -> int:
        """Of an object that is moved: larger ones stay in memory. Two of them can be read at the same time."""
        return self.local_buffer_size_bytes // 2

    def master_arguments(self) -> list[str]:
        return [
            "--enable_offload=true", "--offload_on_evict=true",
            f"--eviction_high_watermark_ratio={self.eviction_high_watermark_ratio}",
            f"--eviction_ratio={self.eviction_ratio}",
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Of the process that lends the memory."""
        found = {
            "STORAGE_BACKEND_DESCRIPTOR": "bucket_storage_backend", "BUCKET_KEYS_LIMIT": 1,
            "BUCKET_EVICTION_POLICY": "none", "ENABLE_DISK_WATERMARK_EVICTION": "false",
            "BUCKET_MAX_TOTAL_SIZE": NO_LIMIT, "TOTAL_SIZE_LIMIT_BYTES": NO_LIMIT, "TOTAL_KEYS_LIMIT": NO_LIMIT,
            "LOCAL_BUFFER_SIZE_BYTES": self.local_buffer_size_bytes, "USE_URING": str(self.use_uring).lower(),
            "HEARTBEAT_INTERVAL_SECONDS": self.heartbeat_interval_seconds, "CLIENT_BUFFER_GC_TTL_MS": READ_MS,
        }  # fmt: skip
        return {f"MOONCAKE_OFFLOAD_{name}": str(value) for name, value in found.items()}


def offload_settings(section: Mapping[str, Any] | None) -> OffloadSettings | None:
    """None where it is not enabled. Raises `ConfigError`."""
    given = dict(section or {})
    is_enabled = given.pop("enabled", False)
    if not isinstance(is_enabled, bool):
        raise ConfigError(f"{SECTION}.enabled: expected true or false, got {is_enabled!r}")
    found = OffloadSettings(**{name: given[name] for name in OffloadSettings._fields if name in given})
    if not isinstance(found.file_storage_path, str) or not os.path.isabs(found.file_storage_path):
        raise ConfigError(f"{SECTION}.file_storage_path: expected an absolute path, got {found.file_storage_path!r}")
    if not isinstance(found.use_uring, bool):
        raise ConfigError(f"{SECTION}.use_uring: expected true or false, got {found.use_uring!r}")
    for name, least in (("local_buffer_size_bytes", LEAST_BUFFER), ("heartbeat_interval_seconds", 1)):
        value = getattr(found, name)
        if type(value) is not int or value < least:
            raise ConfigError(f"{SECTION}.{name}: expected a whole number from {least}, got {value!r}")
    for name in ("eviction_high_watermark_ratio", "eviction_ratio"):
        value = getattr(found, name)
        if type(value) not in (int, float) or not 0 < value <= 1:
            raise ConfigError(f"{SECTION}.{name}: expected a number above 0, 1 at most, got {value!r}")
    return found if is_enabled else None


class OffloadFolder:
    """A directory of this process below `parent`, which goes with it. What killed processes left there is deleted
    first. For many threads.

    Raises `ConfigError` where there can be none.
    """

    def __init__(self, parent: str) -> None:
        self._files: dict[str, str] = {}  # of a key: its file, without the ending
        self._seen: set[str] = set()
        self._deleted: dict[str, float] = {}  # keys, and when
        self._mutex = threading.Lock()
        try:
            os.makedirs(parent, exist_ok=True)
            place = os.path.realpath(parent)  # Mooncake takes no path with links
            with _locked(place):  # another process makes its own, or looks for what is nobody's
                _delete_what_is_nobodys(place)
                self.path = tempfile.mkdtemp(prefix=PREFIX, dir=place)
                self._lock = contextlib.ExitStack()
                self._lock.enter_context(_locked(self.path))
        except OSError as error:
            raise ConfigError(f"{SECTION}.file_storage_path: {parent}: {error}") from error

    def has(self, key: str, nbytes: int) -> bool:
        """Whether there is a file of `nbytes` or more of it."""
        with self._mutex:
            self._look()
            name = self._files.get(key)
        with contextlib.suppress(FileNotFoundError):
            return name is not None and os.stat(name + BYTES).st_size >= nbytes
        return False

    def delete(self, keys: Sequence[str]) -> None:
        """Also those files that are being written now: with a later call."""
        now = time.monotonic()
        with self._mutex:
            self._deleted.update(dict.fromkeys(keys, now))
            self._look()
            for key in self._deleted.keys() & self._files.keys():
                _remove(self._files.pop(key))
            for key in [key for key, when in self._deleted.items() if when < now - KEEP_S]:
                del self._deleted[key]

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def _look(self) -> None:
        """For files that are new."""
        names: dict[str, set[str]] = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                name, ending = os.path.splitext(entry.path)
                names.setdefault(name, set()).add(ending)
        self._seen &= names.keys()
        for name in names.keys() - self._seen:
            key = _key_of(name) if META in names[name] else None
            if key is not None:
                self._files[key] = name
                self._seen.add(name)
            elif META not in names[name] and _is_lone(name):
                _remove(name)


def _key_of(name: str) -> str | None:
    """Of the object in this file, once its description is whole."""
    try:
        with open(name + META, "rb") as file:
            found = KEY.search(file.read())
    except FileNotFoundError:
        return None
    return found and found.group().decode()


def _is_lone(name: str) -> bool:
    try:
        return os.stat(name + BYTES).st_mtime < time.time() - LONE_S
    except FileNotFoundError:
        return False


def _remove(name: str) -> None:
    for ending in (META, BYTES):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name + ending)


@contextlib.contextmanager
def _locked(path: str, how: int = fcntl.LOCK_EX) -> Any:
    """Nobody else has it meanwhile. The lock ends with this process, too."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, how)
        yield
    finally:
        os.close(lock)


def _delete_what_is_nobodys(place: str) -> None:
    for name in os.listdir(place):
        path = os.path.join(place, name)
        if name.startswith(PREFIX):
            with contextlib.suppress(OSError), _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(path)
