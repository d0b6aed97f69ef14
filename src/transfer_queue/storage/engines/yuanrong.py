"""openYuanrong's datasystem: one object for a block, in memory that its worker on this host shares with its clients.

Writers fill that memory and readers copy out of it, so the worker moves no bytes between processes of one host. A
reader on another host has its own worker fetch the whole object, also where it wants a part.

Facts behind it, of openyuanrong-datasystem 0.8.1:

- Objects written as NONE_L2_CACHE are not evicted, nor spilled where no directory for that is set: a worker of 256 MiB
  took ten objects of 20 MiB, refused the next with "Out of memory", and kept all ten. A worker that ends loses them.
- Sizes are rounded up to quarters between powers of two (900 MiB take 1 GiB), and room that objects of other sizes left
  is not joined: a worker may say that it is full although less is stored than it has.
- Every call holds Python's interpreter lock until it returns, and a refusal for want of room is retried for the whole
  request timeout. That timeout is therefore short, a full worker is not asked again at once, and none is called before
  something listens at its port.
- Room that a worker allots after its caller gave up is not free before that process ends. So no object is larger than
  what a worker allots well within the timeout: 2 GiB of pages that nobody has touched took 0.6 s.
- Its range reads copy inside the worker: a quarter of 302 MB took 69 ms, views of the whole 2.5 ms.
- Two workers can listen at one port, and then neither works.
- The worker takes 5.6 s to start. It keeps nothing that a slow end would save, so it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from transfer_queue.errors import ConfigError, ServiceUnavailable, StoreFull
from transfer_queue.memory.bytes import Anchor, Bytes, address_of
from transfer_queue.memory.copy import Mover
from transfer_queue.storage.engines.engine import BlocksMissing, ReadSpan, Room, StorageEngine
from transfer_queue.storage.engines.started import Started, free_port, is_listening

HOST = "127.0.0.1"
CONNECT_MS = 2000
REQUEST_MS = 1000  # how long one call may hold the interpreter lock
FULL_S = 0.5  # a worker that was full is taken to be so for this long
THERE_S = 0.2  # a worker that was there is taken to be so for this long; every look takes a port for a minute
START_S = 60.0
BUSY_S = 5.0  # for so long a call that got no answer is made again: frozen and busy look the same
PAUSE_S = 0.1
REPEATABLE = frozenset({"get_buffers", "exist", "delete"})  # made twice they do no harm; room that came late is lost
AT_ONCE = 1000  # keys in one call; the library takes 10000
SECTION = "backend.Yuanrong"
LOG = {"DATASYSTEM_CLIENT_LOG_DIR": "", "DATASYSTEM_MIN_LOG_LEVEL": "2", "DATASYSTEM_LOG_MONITOR_ENABLE": "false"}
# Kills the worker and removes its directory when `Started` lets go, as it also does when the server was killed.
KEEPER = (
    'dir=$1; shift; "$@" & child=$!; trap "kill -9 $child 2>/dev/null" TERM; '
    'wait $child; code=$?; rm -rf "$dir"; exit $code'
)
_starting = threading.Lock()  # of a client: its library takes the place of its log from the environment


class Yuanrong(StorageEngine):
    """Settings as TransferQueue names them. With `auto_init` the server starts a worker at `worker_port` and the
    metastore that it needs at `metastore_port`, both for this host alone, unless something listens at `worker_port`;
    port 0 is any free one. `worker_args` are more flags for the worker, as `dscli start -w` takes them.

    Clients use the worker of their own host at 127.0.0.1:`worker_port`. For clients on several hosts, start a worker on
    each with `dscli start -w`, all with one `--metastore_address`, the same port, and `--bind_address 0.0.0.0:PORT`;
    then set `auto_init` to false.
    """

    name = "Yuanrong"
    max_nbytes = 2 << 30

    def __init__(self, settings: Mapping[str, Any], serves: bool) -> None:
        self._settings = _checked(settings)
        from yr.datasystem.kv_client import KVClient

        self._worker: _Worker | None = None
        if serves and self._settings["auto_init"] and not _answers(self._settings["worker_port"]):
            self._worker = _Worker(self._settings)
        self._port = int(self._settings["worker_port"])
        self._client: Any = None
        self._mover = Mover()
        self._full = _Full()
        self._is_there_until = 0.0
        try:
            self._client = self._opened(KVClient)
        except BaseException:
            self.close()
            raise

    @property
    def where(self) -> str:
        return f"{HOST}:{self._port}"

    @property
    def for_clients(self) -> Mapping[str, Any]:
        return self._settings | {"auto_init": False}

    def reserve(self, key: str, nbytes: int) -> Room:
        self._full.check(nbytes)
        try:
            buffer = self._ask("mcreate", [_named(key)], [nbytes])[0]
        except StoreFull:
            self._full.note(nbytes)
            raise
        return _SharedRoom(self, key, buffer, nbytes)

    def publish(self, buffer: Any) -> None:
        """Raises `StoreFull` for small objects, which get their room only now."""
        self._ask("mset_buffer", [buffer])

    def read(self, spans: Sequence[ReadSpan]) -> None:
        for keys in _in_parts(list(dict.fromkeys(span.key for span in spans))):
            views = self._views(keys)
            moves = []
            for span in spans:
                if span.key not in views:
                    continue
                view = views[span.key]
                if span.offset + len(span.into) > len(view):
                    raise OSError(f"{span.key} has {len(view)} bytes, not {span.offset + len(span.into)}")
                moves.append((address_of(span.into), address_of(view) + span.offset, len(span.into)))
            self._mover.move(moves)

    def missing(self, keys: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for part in _in_parts(keys):
            there = self._ask("exist", [_named(key) for key in part])
            found |= {key for key, is_there in zip(part, there, strict=True) if not is_there}
        return found

    def drop(self, keys: Sequence[str]) -> None:
        for part in _in_parts(keys):
            failed = self._ask("delete", [_named(key) for key in part])
            self._full.forget()
            if failed:
                raise OSError(f"{len(failed)} of {len(part)} keys were not deleted, such as {failed[0]}")

    def close(self) -> None:
        """Memory of rooms and of objects being read must not be used any more."""
        client, self._client = self._client, None
        if client is not None and not is_listening(HOST, self._port):
            # Taking it apart would wait up to ten seconds for the worker's answer, with the interpreter lock.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
        del client
        self._mover.close()
        if self._worker is not None:
            self._worker.stop()

    def _views(self, keys: Sequence[str]) -> dict[str, Bytes]:
        """What lies under the keys, in the worker's memory; it stays as it is while a view is there."""
        try:
            buffers = self._ask("get_buffers", [_named(key) for key in keys])
        except _NoneFound:
            raise BlocksMissing(keys) from None
        missing = [key for key, buffer in zip(keys, buffers, strict=True) if buffer is None]
        if missing:
            raise BlocksMissing(missing)
        return {key: np.frombuffer(buffer, np.uint8) for key, buffer in zip(keys, buffers, strict=True)}

    def _ask(self, name: str, *arguments: Any) -> Any:
        """What the client's call of that name returns."""
        client = self._client
        if client is None:
            raise OSError("it is closed")
        if time.monotonic() >= self._is_there_until:
            if not is_listening(HOST, self._port):
                raise OSError("no worker listens there")
            self._is_there_until = time.monotonic() + THERE_S
        until = time.monotonic() + (BUSY_S if name in REPEATABLE else 0.0)
        while True:
            try:
                return getattr(client, name)(*arguments)
            except RuntimeError as error:
                said = " ".join(str(error).split())
                if "[RPC unavailable]" not in said or time.monotonic() > until:
                    raise self._meant(said) from error
            time.sleep(PAUSE_S)  # a worker that has much to do

    def _meant(self, said: str) -> Exception:
        """What an error of the library is to those who use an engine."""
        if "Out of memory" in said:
            return StoreFull(f"its worker has no room (shared_memory_size_mb): {said}")
        if said.startswith("code: [Key not found]"):
            return _NoneFound(said)
        return OSError(said)

    def _opened(self, kind: Callable[..., Any]) -> Any:
        if not is_listening(HOST, self._port):
            raise ServiceUnavailable(f"{self.name}: no worker listens at {self.where}")
        with _starting, _quiet():
            try:
                client = kind(HOST, self._port, connect_timeout_ms=CONNECT_MS, req_timeout_ms=REQUEST_MS)
                client.init()
            except RuntimeError as error:
                said = " ".join(str(error).split())
                raise ServiceUnavailable(
                    f"{self.name}: no access through {self.where}: is what listens there a worker of Yuanrong? With"
                    f" worker_port 0 one is started at a free port: {said}"
                ) from error
        return client


class _NoneFound(OSError):
    """There is nothing under any of the keys."""


class _Full:
    """That a worker lately had no room for so many bytes. For many threads: what is lost by a race is asked again."""

    def __init__(self) -> None:
        self._refused = (0, 0.0)  # bytes, until when

    def check(self, nbytes: int) -> None:
        """Raises `StoreFull` where the same was refused a moment ago."""
        least, until = self._refused
        if nbytes >= least and time.monotonic() < until:
            raise StoreFull(f"its worker had no room for {least} bytes (shared_memory_size_mb)")

    def note(self, nbytes: int) -> None:
        self._refused = nbytes, time.monotonic() + FULL_S

    def forget(self) -> None:
        self._refused = 0, 0.0


class _SharedRoom(Room):
    """Memory of the worker."""

    def __init__(self, engine: Yuanrong, key: str, buffer: Any, nbytes: int) -> None:
        # The array keeps the buffer, whose end gives the memory back.
        self.memory = Anchor(address_of(np.frombuffer(buffer.MutableData(), np.uint8)), nbytes, buffer).array()
        self._engine, self._key = engine, key
        self._buffer: Any = buffer
        self._is_tried = False

    def seal(self) -> None:
        self._is_tried = True
        self._engine.publish(self._buffer)

    def abandon(self) -> None:
        """The worker has its memory back once no array is over it."""
        self.memory, self._buffer = np.empty(0, np.uint8), None
        if self._is_tried:  # it may be there, though the answer was an error
            with contextlib.suppress(OSError):
                self._engine.drop([self._key])


class _Worker:
    """A worker with its metastore, up. Their ports are in `settings` then. All that it writes is in one directory."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import yr.datasystem

        home = os.path.dirname(yr.datasystem.__file__)
        program = os.path.join(home, "datasystem_worker")
        if not os.path.exists(program):
            raise ConfigError(f"{SECTION}: datasystem_worker is not installed on this host")
        more = _flags(str(settings["worker_args"] or ""))
        for name in ("worker_port", "metastore_port"):
            settings[name] = int(settings[name]) or free_port(HOST)
        libraries = os.pathsep.join(filter(None, [f"{home}/lib", os.environ.get("LD_LIBRARY_PATH")]))
        variables = {"LD_LIBRARY_PATH": libraries, **(settings["ucx_env_vars"] or {})}
        self._directory = tempfile.mkdtemp(prefix="tq-yr-")
        ready = f"{self._directory}/ready"
        command = [
            "/bin/sh", "-c", KEEPER, "sh", self._directory, "env",
            *[f"{name}={value}" for name, value in variables.items()], program, *_places(self._directory),
            "--arena_per_tenant=1", f"--enable_rdma={str(bool(settings['enable_rdma'])).lower()}", *more,
            f"--worker_address={HOST}:{settings['worker_port']}", "--start_metastore_service=true",
            f"--metastore_address={HOST}:{settings['metastore_port']}", f"--ready_check_path={ready}",
        ]  # fmt: skip
        try:
            self._started = Started(command, lambda: os.path.exists(ready), START_S)
        except BaseException as error:
            shutil.rmtree(self._directory, ignore_errors=True)
            if isinstance(error, ServiceUnavailable):
                raise ServiceUnavailable(f"{Yuanrong.name}: its worker did not start: {error}") from error
            raise

    def stop(self) -> None:
        self._started.stop()
        shutil.rmtree(self._directory, ignore_errors=True)


def _places(directory: str) -> list[str]:
    """Flags that keep what a worker writes out of the home and the current directory."""
    return [
        f"--log_dir={directory}/log", f"--unix_domain_socket_dir={directory}/uds",
        f"--rocksdb_store_dir={directory}/rocksdb", "--rocksdb_write_mode=none",
        f"--monitor_config_file={directory}/config", f"--health_check_path={directory}/healthy",
    ]  # fmt: skip


def _flags(text: str) -> list[str]:
    """`--name value` and `--name=value` as the worker reads them."""
    found: list[str] = []
    for word in shlex.split(text):
        if word.startswith("--"):
            found.append(word)
        elif found and "=" not in found[-1]:
            found[-1] += f"={word}"
        else:
            raise ConfigError(f"{SECTION}.worker_args: expected --name value, got {word!r}")
    return found


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "auto_init": True, "worker_port": 31501, "metastore_port": 2379, "enable_yr_npu_transport": False,
        "enable_rdma": False, "ucx_env_vars": {}, "worker_args": "--shared_memory_size_mb 8192", **settings,
    }  # fmt: skip
    if found["enable_yr_npu_transport"]:
        raise ConfigError(f"{SECTION}.enable_yr_npu_transport: tensors are copied to the host first; expected false")
    for name in ("worker_port", "metastore_port"):
        if not str(found[name]).isdecimal() or int(found[name]) > 65535:
            raise ConfigError(f"{SECTION}.{name}: expected a port, got {found[name]!r}")
    return found


def _answers(port: Any) -> bool:
    return int(port) != 0 and is_listening(HOST, int(port))


def _named(key: str) -> str:
    """Its keys have no slashes."""
    return key.replace("/", ":")


def _in_parts(keys: Sequence[str]) -> list[Sequence[str]]:
    return [keys[at : at + AT_ONCE] for at in range(0, len(keys), AT_ONCE)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A client that begins meanwhile logs errors only, to files of a directory that is gone once it has opened them:
    else it writes a line a call below the home. What the environment says about its log goes before."""
    with tempfile.TemporaryDirectory(prefix="tq-yr-log-", ignore_cleanup_errors=True) as directory:
        ours = {name: value or directory for name, value in LOG.items() if name not in os.environ}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name in ours:
                del os.environ[name]
