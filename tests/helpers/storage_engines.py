"""Storage engines for tests: each a service's settings, and what can happen to the engine itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import psutil
from s3 import object_store

from transfer_queue.errors import ServiceUnavailable
from transfer_queue.storage.engines import ReadSpan, engine_class
from transfer_queue.storage.engines.deadline import GuardedEngine
from transfer_queue.storage.engines.sealed import key_prefix
from transfer_queue.storage.engines.started import is_listening

WITHIN_S = 20.0
CHOSEN = ["Files", *os.environ.get("TQ_ENGINES", "").split()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Running:
    """An engine that runs before the service begins, so that it can be frozen, killed and started again."""

    name: str
    can_freeze = True

    def settings(self) -> dict[str, Any]:
        raise NotImplementedError

    def conf(self, **more: Any) -> dict[str, Any]:
        return {"backend": {"storage_backend": self.name, self.name: self.settings()}, **more}

    def restart(self) -> None:
        """Killed, and there again with nothing in it."""
        raise NotImplementedError

    def freeze(self) -> None:
        raise NotImplementedError

    def thaw(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    @classmethod
    def end(cls) -> None:
        """The last one was closed."""


class FilesRunning(Running):
    name, can_freeze = "Files", False

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "engine"
        self.directory.mkdir()

    def settings(self) -> dict[str, Any]:
        return {"url": f"file://{self.directory}"}

    def restart(self) -> None:
        for path in self.directory.glob("tq-*"):
            path.unlink()

    def close(self) -> None:
        pass


class StoreRunning(Running):
    """`Files` in an object store. Its options are in the environment, for servers and clients of other processes."""

    name, can_freeze = "Files", False

    def __init__(self, directory: Path) -> None:
        self._context = object_store(directory / "store")
        options = self._context.__enter__()
        fsspec.config.conf["s3"] = options
        os.environ["FSSPEC_S3"] = json.dumps(options)

    def settings(self) -> dict[str, Any]:
        return {"url": "s3://bucket/tq"}

    def restart(self) -> None:
        store = fsspec.filesystem("s3")
        store.invalidate_cache()
        blocks = store.glob("bucket/tq/tq-*")
        if blocks:
            store.rm(blocks)

    def close(self) -> None:
        del os.environ["FSSPEC_S3"], fsspec.config.conf["s3"]
        self._context.__exit__(None, None, None)


class MooncakeRunning(Running):
    name = "MooncakeStore"

    def __init__(self, directory: Path) -> None:
        self.port, self._metrics_port = free_port(), free_port()
        self._start()

    def _start(self) -> None:
        program = Path(sys.executable).with_name("mooncake_master")
        command = [program, f"--rpc_port={self.port}", f"--metrics_port={self._metrics_port}"]
        command.append("--enable_metric_reporting=false")
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + WITHIN_S
        while not is_listening("127.0.0.1", self.port):
            if self.process.poll() is not None:  # as where a library of the system is missing
                said = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False)
                raise AssertionError(f"the master ended with {self.process.returncode}: {said.stderr[-500:]}")
            assert time.monotonic() < deadline, "the master is not up"
            time.sleep(0.05)

    def settings(self) -> dict[str, Any]:
        return {
            "auto_init": False, "metadata_server": "P2PHANDSHAKE", "global_segment_size": 256 << 20,
            "master_server_address": f"127.0.0.1:{self.port}",
        }  # fmt: skip

    def restart(self) -> None:
        self.close()
        self._start()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class YuanrongRunning(Running):
    name = "Yuanrong"

    def __init__(self, directory: Path) -> None:
        self._wanted = {"worker_port": 0, "metastore_port": 0, "worker_args": "--shared_memory_size_mb 512"}
        self._start()

    def _start(self) -> None:
        before = set(psutil.Process().children(recursive=True))
        for _ in range(5):  # a worker that has just begun in place of another does not answer everybody at once
            with contextlib.suppress(ServiceUnavailable):
                self._engine = engine_class(self.name)(self._wanted, True)
                break
        started = set(psutil.Process().children(recursive=True)) - before
        self._worker = next(one for one in started if one.name().startswith("datasystem"))
        self._wanted = {**self._wanted, **self._engine.for_clients, "auto_init": True}

    def settings(self) -> dict[str, Any]:
        return {**self._engine.for_clients}

    def restart(self) -> None:
        self.close()
        self._start()

    def freeze(self) -> None:
        self._worker.suspend()

    def thaw(self) -> None:
        self._worker.resume()

    def close(self) -> None:
        self._engine.close()


RAY_CLUSTER = """
import os, sys
from ray.cluster_utils import Cluster
head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 512 << 20}
cluster = Cluster(initialize_head=True, head_node_args=head)
# Each at an address of its own: a driver may join any node that has its host's, and the keeper is where its driver is.
more = {"num_cpus": 1, "resources": {SECOND: 8}, "object_store_memory": 256 << 20}
nodes = [cluster.add_node(node_ip_address=f"127.0.0.{2 + one}", **more) for one in range(OTHERS)]
print("started", cluster.address, os.getpid(), flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    print("killed", flush=True)
cluster.shutdown()
"""
SECOND = "second"  # what nodes besides the head have, for actors that are to run there


class RayRunning(Running):
    """One cluster for all tests of a module, and their process is in it, as those of a job are; other processes join.
    What fails is the keeper of the service that runs there."""

    name = "RayStore"
    others = 0  # nodes besides the head
    _leash: subprocess.Popen[str] | None = None
    _address, _pid = "", 0

    def __init__(self, directory: Path) -> None:
        cls = type(self)
        if cls._leash is None:
            # Its defaults write a token into the home directory, and give workers little of the processors.
            os.environ.update(RAY_AUTH_MODE="disabled", RAY_worker_niceness="0")
            # Not our child: Ray starts and ends workers as it likes, and they would count as leaks of a test.
            code = f"SECOND, OTHERS = {SECOND!r}, {cls.others}{RAY_CLUSTER}"
            command = ["/bin/sh", "-c", 'exec 3<&0; "$@" <&3 &', "sh", sys.executable, "-c", code]
            cls._leash = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            assert cls._leash.stdout is not None
            started = next(line.split() for line in cls._leash.stdout if line.startswith("started"))
            cls._address, cls._pid = started[1], int(started[2])
            import ray

            ray.init(cls._address, log_to_driver=False)

    def settings(self) -> dict[str, Any]:
        return {"address": self._address, "durable": True}

    def restart(self) -> None:
        self._keeper().kill()

    def freeze(self) -> None:
        self._keeper().suspend()

    def thaw(self) -> None:
        self._keeper().resume()

    def _keeper(self) -> psutil.Process:
        all_of_it = psutil.Process(self._pid).children(recursive=True)
        found = [one for one in all_of_it if _title(one) == "ray::ObjectKeeper"]
        assert len(found) == 1, found
        return found[0]

    def close(self) -> None:
        pass

    @classmethod
    def end(cls) -> None:
        leash, cls._leash = cls._leash, None
        if leash is not None:
            import ray

            ray.shutdown()
            cluster = psutil.Process(cls._pid)
            leash.communicate()
            cluster.wait(WITHIN_S)


class RayNodesRunning(RayRunning):
    """With a second node, on this host, which has an object store of its own. Rows stay where they are written."""

    others = 1

    def settings(self) -> dict[str, Any]:
        return {"address": self._address, "durable": False}

    @classmethod
    def kill_second(cls) -> None:
        assert cls._leash is not None
        assert cls._leash.stdin is not None
        assert cls._leash.stdout is not None
        cls._leash.stdin.write("kill\n")
        cls._leash.stdin.flush()
        assert cls._leash.stdout.readline().startswith("killed")


def _title(process: psutil.Process) -> str:
    try:
        return process.cmdline()[0]
    except (psutil.Error, IndexError):
        return ""


KINDS: dict[str, type[Running]] = {
    "Files": FilesRunning, "ObjectStore": StoreRunning, "MooncakeStore": MooncakeRunning,
    "Yuanrong": YuanrongRunning, "RayStore": RayRunning,
}  # fmt: skip


def at_port(name: str, port: int) -> dict[str, Any]:
    """The settings of an engine that its server starts, or finds, at that port of this host."""
    settings: dict[str, dict[str, Any]] = {
        "MooncakeStore": {"pool": True, "master_server_address": f"127.0.0.1:{port}", "global_segment_size": 64 << 20},
        "Yuanrong": {"worker_port": port, "metastore_port": 0, "worker_args": "--shared_memory_size_mb 256"},
    }
    return {"backend": {"storage_backend": name, name: settings[name]}}


class Intruder:
    """Somebody with access to the engine of a service, as a client has it."""

    def __init__(self, told: dict[str, Any], service: bytes) -> None:
        self.engine = GuardedEngine(told["name"], told["settings"], False, WITHIN_S)
        assert self.engine.name == engine_class(told["name"]).name
        self._service = service

    def has(self, block: int) -> bool:
        return not self.engine.missing([self._key(block)], WITHIN_S)

    def drop(self, block: int) -> None:
        self.engine.drop([self._key(block)], WITHIN_S)

    def content(self, block: int, nbytes: int) -> np.ndarray:
        found = np.empty(nbytes, np.uint8)
        self.engine.read([ReadSpan(self._key(block), 0, found)], WITHIN_S)
        return found

    def put(self, block: int, content: np.ndarray) -> None:
        room = self.engine.reserve(self._key(block), len(content), WITHIN_S)
        room.memory[:] = content
        self.engine.seal(room, self._key(block), WITHIN_S)

    def replace(self, block: int, content: np.ndarray) -> None:
        self.drop(block)
        self.put(block, content)

    def close(self) -> None:
        self.engine.close(WITHIN_S)

    def _key(self, block: int) -> str:
        return f"{key_prefix(self._service)}{block}"
