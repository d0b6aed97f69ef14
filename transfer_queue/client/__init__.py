"""The library inside a worker's process.

    client             what users call; `interface` has the functions without a client
     └─ operations     every operation once, as a generator that yields effects (Call, Notify, Offload)
         ├─ transfer   the bytes: written, read, mapped, fetched from other hosts
         └─ drivers    run a generator: blocking, or on an asyncio event loop
             └─ session    connections, mapped arenas, memory; one server, many threads and event loops
                 └─ connection    one blocking socket; `retry`: how long a call is sent again

    effects            what an operation may ask its driver to do
    listing            keys and tags at the cost of what changed
    locks, local_locks locks of the service, and of this process
    dense              plain tensors of what a get returned
    describing         from the server's view of rows to metadata
    remarks, tracing   what the service remarks on a call; one line of the debug log for every operation

`TransferQueueClient` and `AsyncTransferQueueClient` are importable from here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if not hasattr(sys.modules["transfer_queue"], "_HOME_OF"):  # TransferQueue's __init__ lies over ours, and imports this
    from transfer_queue_doctor import explanation

    raise ImportError(explanation() or "transfer_queue/__init__.py is not the one of transfer-queue: run `tq doctor`")

if TYPE_CHECKING:
    from transfer_queue.client.client import AsyncTransferQueueClient as AsyncTransferQueueClient
    from transfer_queue.client.client import TransferQueueClient as TransferQueueClient


def __getattr__(name: str) -> Any:  # the server imports nothing of this package, and must not load torch if it did
    if name in ("TransferQueueClient", "AsyncTransferQueueClient"):
        from transfer_queue.client import client

        return getattr(client, name)
    raise AttributeError(name)
