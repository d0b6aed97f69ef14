"""Whether a storage engine works on this host: it is opened as a server does, written to, and read by another process.

`python -m transfer_queue.storage.engines.probe` is that other process.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from transfer_queue.errors import ServiceUnavailable, TransferQueueError
from transfer_queue.storage.engines import sealed
from transfer_queue.storage.engines.deadline import GuardedEngine
from transfer_queue.storage.engines.engine import BlocksMissing, ReadSpan
from transfer_queue.storage.host_facts import free_nbytes, rdma_devices

NBYTES = 32 << 20
BLOCK = 1


def probe(name: str, settings: Mapping[str, Any], timeout_s: float) -> Iterator[str]:
    """A line for each thing that works, in order. Raises `ConfigError` or `ServiceUnavailable` with what does not.

    Starts the engine where the server would; it ends again. What was written is deleted.
    """
    yield from host_lines()
    began = time.monotonic()
    engine = GuardedEngine(name, settings, True, timeout_s)
    try:
        yield f"opened{engine.where} in {time.monotonic() - began:.1f} s"
        service = secrets.token_bytes(16)
        key = f"{sealed.key_prefix(service)}{BLOCK}"
        try:
            began = time.monotonic()
            room = engine.reserve(key, sealed.sealed_nbytes(NBYTES), timeout_s)
            room.memory[:NBYTES] = np.arange(NBYTES, dtype=np.uint8)
            sealed.seal(room.memory, NBYTES, BLOCK)
            engine.seal(room, key, timeout_s)
            yield f"written: {NBYTES >> 20} MiB in {time.monotonic() - began:.2f} s"
            del room
            yield f"read by another process, and compared: {_read_elsewhere(engine, key, timeout_s)}"
        finally:
            engine.drop([key], timeout_s)
        if engine.missing([key], timeout_s):
            yield "deleted"
    finally:
        engine.close(timeout_s)


def host_lines() -> Iterator[str]:
    """What this host has that an engine or a transport may use."""
    yield f"RDMA devices: {', '.join(rdma_devices()) or 'none'}"
    yield f"memory: {free_nbytes() >> 20} MiB free"


def _read_elsewhere(engine: GuardedEngine, key: str, timeout_s: float) -> str:
    told = {"name": engine.name, "settings": dict(engine.for_clients), "key": key, "timeout_s": timeout_s}
    return said_elsewhere(__name__, told, timeout_s)


def said_elsewhere(module: str, told: Mapping[str, Any], timeout_s: float) -> str:
    """What another process says that runs `module` and is `told` this. Raises `ServiceUnavailable`."""
    name = told["name"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", module], input=json.dumps(told), capture_output=True, text=True,
            timeout=3 * timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ServiceUnavailable(f"{name}: another process did not end within {error.timeout:g} s") from error
    if done.returncode:
        raise ServiceUnavailable(f"{name}: another process could not read: {done.stderr.strip()[-500:]}")
    return done.stdout.strip().splitlines()[-1]


def main() -> None:
    """Read what the request on standard input names, and print how long that took."""
    told = json.load(sys.stdin)
    timeout_s = float(told["timeout_s"])
    engine = GuardedEngine(told["name"], told["settings"], False, timeout_s)
    memory = np.empty(sealed.sealed_nbytes(NBYTES), np.uint8)
    began = time.monotonic()
    engine.read([ReadSpan(told["key"], 0, memory)], timeout_s)
    seconds = time.monotonic() - began
    if not sealed.is_right(memory, NBYTES, [(0, NBYTES)], BLOCK):
        raise ServiceUnavailable(f"{engine.name} gives other bytes than were written")
    print(f"{NBYTES >> 20} MiB in {seconds:.2f} s")
    engine.close(timeout_s)


if __name__ == "__main__":
    try:
        main()
    except (TransferQueueError, BlocksMissing) as error:
        sys.exit(str(error))
