"""Who hands over single rows in `bench.singles`. Each of them is a server, and ends that put, take and remove."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import SpawnContext
from typing import Any, NamedTuple, Protocol


class NotInstalled(Exception):
    """This system can't be measured here; the text says why."""


class End(Protocol):
    """What one process holds. A row is an array of float64."""

    def put(self, row: Any) -> None: ...

    def take(self) -> Any:
        """The next row, which nobody else gets; waits for one."""

    def remove(self) -> None:
        """The row that was taken last is not needed any more."""

    def close(self) -> None: ...


class System(NamedTuple):
    """`serve` gives what `join` needs in any process, with the number of rows that this one will put or take."""

    serve: Callable[[SpawnContext, int], contextlib.AbstractContextManager[Any]]
    join: Callable[[Any, int], End]


class QueueEnd:
    """The `transfer_queue` that this interpreter finds, by the calls that every version has."""

    def __init__(self, _address: Any, _num_rows: int) -> None:
        import torch

        import transfer_queue as tq

        tq.init()
        self._tq, self._torch, self._client, self._number = tq, torch, tq.get_client(), 0
        self._meta: Any = None

    def put(self, row: Any) -> None:
        self._number += 1
        fields = {"x": self._torch.from_numpy(row)}
        self._tq.kv_put(key=f"{os.getpid()}-{self._number}", partition_id="p", fields=fields)

    def take(self) -> Any:
        client = self._client
        while True:
            self._meta = client.get_meta(["x"], 1, "p", mode="fetch", task_name="t")
            if len(self._meta):
                return client.get_data(self._meta)["x"][0]

    def remove(self) -> None:
        self._client.clear_samples(self._meta)

    def close(self) -> None:
        self._tq.close()


class TakeEnd(QueueEnd):
    """Ours, by `take`: metadata and data in one call."""

    def take(self) -> Any:
        self._meta, found = self._client.take("p", ["x"], 1, "t")
        return found["x"][0]


@contextlib.contextmanager
def queue_service(_context: SpawnContext, _num_rows: int) -> Iterator[None]:
    import transfer_queue as tq

    tq.init()
    yield
    tq.close()


class RedisEnd:
    """A stream and a consumer group, as the documentation of Redis has it."""

    def __init__(self, path: str, _num_rows: int) -> None:
        import redis

        self._redis = redis.Redis(unix_socket_path=path)
        self._name = str(os.getpid())
        with contextlib.suppress(redis.ResponseError):  # somebody else made it
            self._redis.xgroup_create("s", "t", "0", mkstream=True)
        self._taken: Any = None

    def put(self, row: Any) -> None:
        self._redis.xadd("s", {b"x": row.tobytes()})

    def take(self) -> Any:
        import numpy as np

        found: Any = self._redis.xreadgroup("t", self._name, {"s": ">"}, count=1, block=60_000)
        self._taken, fields = found[0][1][0]
        return np.frombuffer(fields[b"x"])

    def remove(self) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.xack("s", "t", self._taken)
        pipeline.xdel("s", self._taken)
        pipeline.execute()

    def close(self) -> None:
        self._redis.close()


@contextlib.contextmanager
def redis_service(_context: SpawnContext, _num_rows: int) -> Iterator[str]:
    program = shutil.which("redis-server")
    if program is None:
        raise NotInstalled("there is no redis-server on the PATH")
    with tempfile.TemporaryDirectory(prefix="bench-redis-") as folder:
        path = f"{folder}/s"
        options = ["--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", folder]
        with subprocess.Popen([program, *options], stdout=subprocess.DEVNULL) as server:
            try:
                _until_listening(path)
                yield path
            finally:
                server.terminate()


def _until_listening(path: str, limit_s: float = 30.0) -> None:
    began = time.monotonic()
    while True:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            return
        if time.monotonic() - began > limit_s:
            raise NotInstalled("redis-server did not listen")
        time.sleep(0.01)


class ReverbEnd:
    """A table that is a queue: first in, first out, each row taken once, which removes it. All rows of a process come
    from one sampler, whose stream stays open; it fetches ahead, so it must not want more than its share."""

    def __init__(self, address: str, num_rows: int) -> None:
        import reverb

        self._client, self._num_rows = reverb.Client(address), num_rows
        self._samples: Any = None

    def put(self, row: Any) -> None:
        self._client.insert([row], priorities={"t": 1.0})

    def take(self) -> Any:
        if self._samples is None:  # a producer has none
            self._samples = self._client.sample("t", num_samples=self._num_rows)
        return next(self._samples)[0].data[0]

    def remove(self) -> None:
        """Taking it did."""

    def close(self) -> None: ...


@contextlib.contextmanager
def reverb_service(_context: SpawnContext, num_rows: int) -> Iterator[str]:
    import reverb

    server = reverb.Server([reverb.Table.queue("t", num_rows)], port=None)
    yield f"localhost:{server.port}"
    server.stop()


class PipeEnd:
    """`multiprocessing.Queue` of arrays."""

    def __init__(self, queue: Any, _num_rows: int) -> None:
        self._queue = queue

    def put(self, row: Any) -> None:
        self._queue.put(row)

    def take(self) -> Any:
        return self._queue.get()

    def remove(self) -> None:
        """Taking it did."""

    def close(self) -> None:
        self._queue.close()


@contextlib.contextmanager
def pipe(context: SpawnContext, _num_rows: int) -> Iterator[Any]:
    yield context.Queue()


SYSTEMS = {
    "queue": System(queue_service, QueueEnd),
    "take": System(queue_service, TakeEnd),
    "redis": System(redis_service, RedisEnd),
    "reverb": System(reverb_service, ReverbEnd),
    "pipe": System(pipe, PipeEnd),
}
