"""The library inside a worker's process.

    kv, api            what users call
     └─ operations     every operation once, as a generator that yields effects (Call, Notify, Offload)
         └─ drivers    run a generator: blocking, or on an asyncio event loop
             └─ Session    connections, mapped arenas, memory; one server, many threads and event loops
                 ├─ connection, aio    one socket each
                 └─ views              zero-copy reads: private mappings, pins, the reaper that undoes them
    snapshots          everything at once, for `transfer_queue.checkpoint`: one instant out, one atomic step in

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
