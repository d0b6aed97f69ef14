"""Ray's object store: one object for a block, in memory that Ray shares between the processes of a node.

Writers copy a block into it, readers copy out of it; Ray moves whole objects between nodes, and spills to disks what
its memory does not hold. An actor of the service, the keeper, holds on to the objects. An object of Ray dies with the
process that owns it, its writer, whoever refers to it: with `durable` the keeper owns a copy instead.

The server has no part in the cluster, for Ray kills each process that has one when its cluster was gone for a minute.
A process of its own has it, which owns the keeper: keeper, books and rows have one life. Facts: `ray_objects`.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transfer_queue.errors import ConfigError, ServiceUnavailable
from transfer_queue.memory.bytes import address_of
from transfer_queue.memory.copy import Mover
from transfer_queue.memory.pool import Pool
from transfer_queue.storage.engines.engine import ReadSpan, Room, StagedRoom, StorageEngine

if TYPE_CHECKING:
    from transfer_queue.storage.engines.ray_objects import ObjectsOfRay

SECTION = "backend.RayStore"
POOL_NBYTES = 1 << 30  # staging memory that is kept: fresh pages cost more than the copy
AGAIN_S = 1.0  # between two starts of the keeper's process
STOP_S = 10.0


class RayStore(StorageEngine):
    """`settings.address` is that of the cluster ("", null: that of the process that starts the service, else
    RAY_ADDRESS or the one of this host). `settings.durable`: rows outlive their writers, for a second copy of each
    while it is written.

    Processes that are in the cluster use it as they are; others join it with their first large put or get, and leave
    with `close`.
    """

    name = "RayStore"
    can_fork = False

    def __init__(self, settings: Mapping[str, Any], serves: bool) -> None:
        from importlib.util import find_spec

        if find_spec("ray") is None:
            raise ImportError("pip install transfer-queue[ray]")
        self._settings = _checked(settings)
        self._kept = KeeperProcess(self._settings["address"]) if serves else None
        if self._kept is not None:
            self._settings |= {"address": self._kept.address, "keeper": self._kept.name}
        self._objects: ObjectsOfRay | None = None
        self._lock = threading.Lock()
        self._mover = Mover()
        self._pool = Pool(POOL_NBYTES)

    @property
    def where(self) -> str:
        return str(self._settings["address"])

    @property
    def for_clients(self) -> Mapping[str, Any]:
        return self._settings

    @property
    def objects(self) -> ObjectsOfRay:
        with self._lock:
            if self._objects is None:
                from transfer_queue.storage.engines.ray_objects import ObjectsOfRay

                self._objects = ObjectsOfRay(**self._settings)
            return self._objects

    def reserve(self, key: str, nbytes: int) -> Room:
        memory = self._pool.allocate(nbytes)
        return StagedRoom(memory, lambda content: self.objects.write(key, content), lambda: self.drop([key]))

    def read(self, spans: Sequence[ReadSpan]) -> None:
        views = self.objects.views(list(dict.fromkeys(span.key for span in spans)))
        moves = []
        for span in spans:
            view = views[span.key]
            if span.offset + len(span.into) > len(view):
                raise OSError(f"{span.key} has {len(view)} bytes, not {span.offset + len(span.into)}")
            moves.append((address_of(span.into), address_of(view) + span.offset, len(span.into)))
        self._mover.move(moves)

    def missing(self, keys: Sequence[str]) -> set[str]:
        if self._kept is not None:
            return set(self._kept.ask("missing", keys))
        return self.objects.missing(keys)

    def drop(self, keys: Sequence[str]) -> None:
        if self._kept is not None:
            self._kept.ask("drop", keys)
        else:
            self.objects.drop(keys)

    def close(self) -> None:
        objects, self._objects = self._objects, None
        if objects is not None:
            objects.close()
        self._mover.close()
        self._pool.clear()
        if self._kept is not None:
            self._kept.stop()


class KeeperProcess:
    """The process that owns the keeper, and asks it. Started anew when it ends; its keeper has nothing then, and the
    same name. `address`: of the cluster. Raises `ServiceUnavailable` when the first one does not start."""

    def __init__(self, address: str) -> None:
        self.name, self.address = f"TransferQueueKeeper-{secrets.token_hex(6)}", address
        self._lock = threading.Lock()  # one question at a time
        self._is_closing = threading.Event()
        self._process = self._next = _opened()
        self._greet(self._process)
        self._watch = threading.Thread(target=self._start_again, name="tq-ray-keeper", daemon=True)
        self._watch.start()

    def ask(self, name: str, keys: Sequence[str]) -> list[str]:
        """Raises OSError. Does not return before the process answers or ends."""
        with self._lock:
            found = _answer(self._process, [name, list(keys)])
        if "error" in found:
            raise OSError(found["error"])
        return list(found["found"])

    def stop(self) -> None:
        self._is_closing.set()
        for process in (self._process, self._next):
            _end(process)
        self._watch.join()

    def _greet(self, process: subprocess.Popen[str]) -> None:
        """Wait until its keeper is there. Ends it, and raises `ServiceUnavailable`, when that fails."""
        try:
            found = _answer(process, {"address": self.address, "keeper": self.name})
        except OSError as error:
            found = {"error": str(error)}
        if "error" in found:
            _end(process)
            raise ServiceUnavailable(f"{RayStore.name}: {found['error']}")
        self.address = str(found["address"])

    def _start_again(self) -> None:
        while self._process.wait() is not None and not self._is_closing.wait(AGAIN_S):
            self._next = _opened()
            with contextlib.suppress(ServiceUnavailable):
                self._greet(self._next)
                with self._lock:
                    ended, self._process = self._process, self._next
                _end(ended)
        _end(self._next)


def _opened() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "transfer_queue.storage.engines.ray_objects"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip


def _answer(process: subprocess.Popen[str], said: Any) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(said) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise OSError("the process that owns its keeper has ended")
    return dict(json.loads(line))


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = {"address": "", "durable": False, "keeper": "", **settings}
    found["address"] = found["address"] or ""
    if not isinstance(found["address"], str):
        raise ConfigError(f"{SECTION}.address: expected that of a Ray cluster, got {found['address']!r}")
    if not isinstance(found["durable"], bool):
        raise ConfigError(f"{SECTION}.durable: expected true or false, got {found['durable']!r}")
    return found
