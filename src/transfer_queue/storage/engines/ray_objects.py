"""Objects of Ray and the actor that keeps them: everything of the engine `RayStore` that imports ray.

`python -m transfer_queue.storage.engines.ray_objects` is the process that a server starts (`ray_store.KeeperProcess`).
It owns the keeper, which therefore ends with it, and asks the keeper what the server wants to know: a request and an
answer are a line of JSON each, and the end of its input is its own.

Facts behind it, of Ray 2.60: `ray.get_object_locations` has no entry for an object whose owner is dead, and `ray.wait`
calls it ready; a process is killed by its own Ray library when the head of its cluster was gone for 60 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectFetchTimedOutError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from transfer_queue.errors import ServiceUnavailable, StoreFull
from transfer_queue.memory.bytes import Bytes
from transfer_queue.storage.engines.engine import BlocksMissing

NAMESPACE = "transfer_queue"
PATIENCE_S = 60.0  # a caller has given up long before; its thread should end at some time
LOOK_MS = 2000
AT_ONCE = 32  # calls that a keeper carries out side by side


class ObjectKeeper:
    """What lies under which key. One that Ray starts anew has nothing."""

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}

    def hold(self, key: str, wrapped: Sequence[Any]) -> None:
        """Keep the writer's object alive, for as long as the writer lives."""
        self._held[key] = wrapped[0]

    def copy(self, key: str, content: Bytes) -> None:
        """Keep an object of this process's own. Raises `StoreFull`."""
        self._held[key] = put(content)

    def find(self, keys: Sequence[str]) -> list[Any]:
        """A reference to each, or None."""
        return [self._held.get(key) for key in keys]

    def missing(self, keys: Sequence[str]) -> list[str]:
        held = {key: self._held[key] for key in keys if key in self._held}
        places = ray.experimental.get_object_locations(list(held.values()), LOOK_MS) if held else {}
        lost = _lost([one for one in held.values() if not _is_somewhere(places.get(one))])
        return [key for key in keys if key not in held or held[key] in lost]

    def drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._held.pop(key, None)


def _is_somewhere(place: dict[str, Any] | None) -> bool:
    return place is not None and bool(place["node_ids"] or place["did_spill"])


def _lost(suspects: list[Any]) -> set[Any]:
    """Those of which Ray says that they are lost when they are to be had: that it did not say where an object lies is
    no proof. What nobody can say now is not given up."""
    lost = set()
    known, _ = ray.wait(suspects, num_returns=len(suspects), timeout=LOOK_MS / 1e3) if suspects else ([], [])
    for one in known:
        try:
            ray.get(one, timeout=LOOK_MS / 1e3)
        except (ObjectFetchTimedOutError, GetTimeoutError):
            continue
        except ObjectLostError:
            lost.add(one)
    return lost


def put(content: Bytes) -> Any:
    """A reference to a new object of this process. Raises `StoreFull`."""
    try:
        return ray.put(content)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise StoreFull(f"{len(content)} bytes do not fit into Ray's object store: {_short(error)}") from error


class Cluster:
    """This process's place in a Ray cluster: the one that it has, or else a new one, until the last user leaves."""

    _lock = threading.Lock()
    _users = 0  # of a place that this class took
    _is_forked = False

    @classmethod
    def join(cls, address: str) -> bool:
        """Whether `leave` is to be called. Raises `ServiceUnavailable`."""
        if cls._is_forked:
            raise ServiceUnavailable(
                "RayStore does not work in a process that was forked from one that was connected to Ray: start it anew"
                " (spawn, forkserver)"
            )
        with cls._lock:
            if ray.is_initialized() and not cls._users:
                return False
            if not cls._users:
                try:
                    ray.init(
                        address=address or "auto", namespace=NAMESPACE, log_to_driver=False, configure_logging=False
                    )
                except (ConnectionError, RayError, RuntimeError, ValueError) as error:
                    where = f"at {address}" if address else "on this host, nor at RAY_ADDRESS"
                    raise ServiceUnavailable(f"RayStore: there is no Ray cluster {where}: {_short(error)}") from error
            cls._users += 1
            return True

    @classmethod
    def leave(cls) -> None:
        with cls._lock:
            cls._users -= 1
            if not cls._users:
                ray.shutdown()

    @classmethod
    def forked(cls) -> None:
        cls._is_forked = cls._is_forked or ray.is_initialized()
        cls._lock, cls._users = threading.Lock(), 0


os.register_at_fork(after_in_child=Cluster.forked)


class ObjectsOfRay:
    """A process's access to the objects that the keeper of that name has. Raises `ServiceUnavailable` where there is
    no cluster; calls raise OSError when the keeper does not answer."""

    def __init__(self, address: str, keeper: str, durable: bool) -> None:
        self._name, self._durable = keeper, durable
        self._found: Any = None
        self._is_guest = Cluster.join(address)

    def close(self) -> None:
        is_guest, self._is_guest, self._found = self._is_guest, False, None
        if is_guest:
            Cluster.leave()

    def write(self, key: str, content: Bytes) -> None:
        reference = put(content)
        if self._durable:
            self._ask("copy", key, reference)
        else:
            self._ask("hold", key, [reference])

    def views(self, keys: Sequence[str]) -> dict[str, Bytes]:
        """The bytes of each, in Ray's memory on this node, which they hold; read-only."""
        references = dict(zip(keys, self._ask("find", list(keys)), strict=True))
        absent = [key for key, reference in references.items() if reference is None]
        if absent:
            raise BlocksMissing(absent)
        try:
            found = ray.get(list(references.values()), timeout=PATIENCE_S)
        except ObjectLostError as error:
            lost = self.missing(keys)
            if lost:
                raise BlocksMissing(lost) from error
            raise OSError(_short(error)) from error
        except RayError as error:
            raise OSError(_short(error)) from error
        return dict(zip(keys, found, strict=True))

    def missing(self, keys: Sequence[str]) -> set[str]:
        return set(self._ask("missing", list(keys)))

    def drop(self, keys: Sequence[str]) -> None:
        self._ask("drop", list(keys))

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            if self._found is None:
                self._found = ray.get_actor(self._name, namespace=NAMESPACE)
            return ray.get(getattr(self._found, name).remote(*arguments), timeout=PATIENCE_S)
        except ValueError as error:
            where = ray.get_runtime_context().gcs_address
            raise OSError(f"the cluster at {where}, where this process is, has no keeper {self._name}") from error
        except RayTaskError as error:
            if isinstance(error.cause, StoreFull):
                raise error.cause from None
            raise OSError(_short(error)) from error
        except RayError as error:
            self._found = None
            raise OSError(f"its keeper does not answer: {_short(error)}") from error


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


@contextlib.contextmanager
def kept(address: str, keeper: str) -> Iterator[str]:
    """The address of a cluster with a new keeper of that name, on this node: it ends with this process anyway."""
    Cluster.join(address)
    context = ray.get_runtime_context()
    here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)  # a soft one Ray puts on any node
    actor = (
        ray.remote(ObjectKeeper)
        .options(
            name=keeper, namespace=NAMESPACE, num_cpus=0, max_restarts=-1, max_concurrency=AT_ONCE,
            scheduling_strategy=here,
        )
        .remote()
    )  # fmt: skip
    ray.get(actor.find.remote([]), timeout=PATIENCE_S)
    yield context.gcs_address
    ray.kill(actor)
    Cluster.leave()


def main() -> None:
    said = sys.stdout
    sys.stdout = sys.stderr  # Ray writes what it likes
    settings = json.loads(sys.stdin.readline())
    try:
        with kept(settings["address"], settings["keeper"]) as address:
            objects = ObjectsOfRay(address, settings["keeper"], False)
            print(json.dumps({"address": address}), file=said, flush=True)
            for line in sys.stdin:
                name, keys = json.loads(line)
                found: dict[str, Any]
                try:
                    found = {"found": sorted(getattr(objects, name)(keys) or ())}
                except OSError as error:
                    found = {"error": str(error)}
                print(json.dumps(found), file=said, flush=True)
    except (ServiceUnavailable, RayError) as error:
        print(json.dumps({"error": _short(error)}), file=said, flush=True)


if __name__ == "__main__":
    main()
