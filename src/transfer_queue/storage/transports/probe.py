"""Whether a transport works on this host: another process reads memory of this one, as readers of other hosts do.

`python -m transfer_queue.storage.transports.probe` is that other process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from transfer_queue.errors import ServiceUnavailable, TransferQueueError
from transfer_queue.storage.engines.probe import host_lines, said_elsewhere
from transfer_queue.storage.transports.guarded import GuardedTransport
from transfer_queue.storage.transports.transport import RemoteSpan
from transfer_queue.wire.address import advertised

NBYTES = 32 << 20
EVERYWHERE = "0.0.0.0"


def probe(name: str, settings: Mapping[str, Any], timeout_s: float) -> Iterator[str]:
    """A line for each thing that works, in order. Raises `ConfigError` or `ServiceUnavailable` with what does not."""
    yield from host_lines()
    began = time.monotonic()
    transport = GuardedTransport(name, settings, advertised(EVERYWHERE), timeout_s)
    try:
        yield f"opened at {transport.endpoint} in {time.monotonic() - began:.1f} s"
        memory = np.arange(NBYTES, dtype=np.uint8)
        with transport.lent(memory, timeout_s) as address:
            told = {
                "name": name, "settings": dict(settings), "endpoint": transport.endpoint, "address": address,
                "timeout_s": timeout_s,
            }  # fmt: skip
            yield f"read by another process, and compared: {said_elsewhere(__name__, told, timeout_s)}"
    finally:
        transport.close(timeout_s)


def main() -> None:
    """Read what the request on standard input names, and print how long that took."""
    told = json.load(sys.stdin)
    timeout_s = float(told["timeout_s"])
    transport = GuardedTransport(told["name"], told["settings"], advertised(EVERYWHERE), timeout_s)
    memory = np.zeros(NBYTES, np.uint8)
    began = time.monotonic()
    transport.read(told["endpoint"], [RemoteSpan(told["address"], memory)], [memory], timeout_s)
    seconds = time.monotonic() - began
    if not np.array_equal(memory, np.arange(NBYTES, dtype=np.uint8)):
        raise ServiceUnavailable(f"{told['name']} gives other bytes than were lent")
    print(f"{NBYTES >> 20} MiB in {seconds:.2f} s")
    transport.close(timeout_s)


if __name__ == "__main__":
    try:
        main()
    except TransferQueueError as error:
        sys.exit(str(error))
