"""The engines' own batch calls, for `bench.engines`: one object for each field, written from and read into memory that
is there. The engine's memory belongs to another process, as it does with a service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

HOLDER = """
import json, sys
from transfer_queue.storage.engines import engine_class
engine = engine_class(sys.argv[1])(json.loads(sys.argv[2]), True)
print("ready " + json.dumps(dict(engine.for_clients)), flush=True)
sys.stdin.read()
engine.close()
"""
Calls = dict[str, Callable[[str], None]]


def _held(engine: str, settings: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
    """How to reach an engine that another process has, and what ends it."""
    command = [sys.executable, "-c", HOLDER, engine, json.dumps(settings)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = next(line for line in process.stdout if line.startswith("ready "))
    return json.loads(told.removeprefix("ready ")), lambda: process.communicate() and None


class _Sizes:
    """Memory by size, and the keys of the last put."""

    def __init__(self, sizes: Mapping[str, int], fields: int) -> None:
        self.fields = fields
        self.source = {size: [np.full(nbytes, 7, np.uint8) for _ in range(fields)] for size, nbytes in sizes.items()}
        self.target = {size: [np.ones(nbytes, np.uint8) for _ in range(fields)] for size, nbytes in sizes.items()}
        self.keys: dict[str, list[str]] = {}
        self._turn = 0

    def verify(self, size: str, get: Callable[[str], None]) -> None:
        """What was put came back, all of it."""
        for array in self.target[size]:
            array[:] = 1
        get(size)
        assert all(map(np.array_equal, self.source[size], self.target[size])), "other bytes than were put"

    def new_keys(self, size: str) -> list[str]:
        self._turn += 1
        self.keys[size] = [f"raw-{self._turn}-{field}" for field in range(self.fields)]
        return self.keys[size]


def _mooncake(settings: dict[str, Any], sizes: Mapping[str, int], fields: int) -> Calls:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    told, end = _held("MooncakeStore", settings)
    store: Any = MooncakeDistributedStore()
    address = told["master_server_address"]
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", address) == 0
    pinned = ReplicateConfig()
    pinned.with_hard_pin = True
    memory = _Sizes(sizes, fields)
    for arrays in (*memory.source.values(), *memory.target.values()):
        for array in arrays:
            store.register_buffer(array.ctypes.data, array.nbytes)

    def put(size: str) -> None:
        source = memory.source[size]
        pointers, lengths = [one.ctypes.data for one in source], [one.nbytes for one in source]
        assert not any(store.batch_put_from(memory.new_keys(size), pointers, lengths, pinned))

    def get(size: str) -> None:
        target = memory.target[size]
        pointers, lengths = [one.ctypes.data for one in target], [one.nbytes for one in target]
        assert store.batch_get_into(memory.keys[size], pointers, lengths) == lengths

    def few(size: str) -> None:
        target = memory.target[size]
        nbytes = target[0].nbytes // 4
        places = [[[0]]] * fields
        store.get_into_ranges(
            [one.ctypes.data for one in target], [[key] for key in memory.keys[size]], places, places,
            [[[nbytes]]] * fields,
        )  # fmt: skip

    def clear(size: str) -> None:
        store.batch_remove(memory.keys[size], True)

    def close(size: str) -> None:
        store.close()
        end()

    return {
        "put": put, "get": get, "few": few, "verify": lambda size: memory.verify(size, get), "clear": clear,
        "end": close,
    }  # fmt: skip


def _yuanrong(settings: dict[str, Any], sizes: Mapping[str, int], fields: int) -> Calls:
    from yr.datasystem.kv_client import KVClient

    told, end = _held("Yuanrong", settings)
    client: Any = KVClient("127.0.0.1", int(told["worker_port"]))
    client.init()
    memory = _Sizes(sizes, fields)

    def put(size: str) -> None:
        source = memory.source[size]
        buffers = client.mcreate(memory.new_keys(size), [one.nbytes for one in source])
        for buffer, array in zip(buffers, source, strict=True):
            np.copyto(np.frombuffer(buffer.MutableData(), np.uint8)[: array.nbytes], array)
        client.mset_buffer(buffers)

    def read(size: str, share: int) -> None:
        for buffer, array in zip(client.get_buffers(memory.keys[size]), memory.target[size], strict=True):
            nbytes = array.nbytes // share
            np.copyto(array[:nbytes], np.frombuffer(buffer, np.uint8)[:nbytes])

    def clear(size: str) -> None:
        client.delete(memory.keys[size])

    return {
        "put": put, "get": lambda size: read(size, 1), "few": lambda size: read(size, 4),
        "verify": lambda size: memory.verify(size, lambda one: read(one, 1)), "clear": clear, "end": lambda size: end(),
    }  # fmt: skip


def ray_here() -> None:
    """A cluster of this process's own, as that of a job is which it is in."""
    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"  # else it writes a token into the home directory
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=3 << 30, log_to_driver=False,
        configure_logging=False,
    )  # fmt: skip


def _ray(settings: dict[str, Any], sizes: Mapping[str, int], fields: int) -> Calls:
    import ray

    ray_here()
    memory = _Sizes(sizes, fields)
    held: dict[str, list[Any]] = {}

    def put(size: str) -> None:
        held[size] = [ray.put(array) for array in memory.source[size]]

    def read(size: str, share: int) -> None:
        for found, array in zip(ray.get(held[size]), memory.target[size], strict=True):
            nbytes = array.nbytes // share
            np.copyto(array[:nbytes], found[:nbytes])

    return {
        "put": put, "get": lambda size: read(size, 1), "few": lambda size: read(size, 4),
        "verify": lambda size: memory.verify(size, lambda one: read(one, 1)), "clear": lambda size: held[size].clear(),
        "end": lambda size: ray.shutdown(),
    }  # fmt: skip


RAW: dict[str, Callable[[dict[str, Any], Mapping[str, int], int], Calls]] = {
    "MooncakeStore": _mooncake, "Yuanrong": _yuanrong, "RayStore": _ray,
}  # fmt: skip
