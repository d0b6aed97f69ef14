"""The library inside a worker's process.

    client                      what users call
     └─ operations              every operation once, as a generator that yields effects
         ├─ effects             what it may ask for: Call, HoldSession, Notify, Offload, Together, Trying
         ├─ tracing             a line of the debug log for each
         ├─ recording           a span of a trace for each
         └─ drivers             run it: blocking, or on an asyncio event loop
             ├─ session         connections, arenas, memory; one server, many threads and event loops
             │   ├─ connection  one blocking connection: one request at a time
             │   ├─ loops       the connections of event loops, one for each loop and server
             │   ├─ holding     what keeps the session alive: a connection for no calls, and who is at work
             │   ├─ endings     what a lost server means, in words
             │   ├─ arenas      the server's shared memory in this process
             │   ├─ forks       a forked child goes on as a client of its own
             │   ├─ spilled     whether a disk gives back what was written
             │   └─ views       zero-copy reads: pins, and what undoes them
             ├─ transfer        the bytes of rows, between the caller and where they lie
             ├─ retry           how long a lost call is sent again
             └─ one_way         what is said again to a server that may not have read it
    describing, remarks         from the server's view of rows to metadata; what it remarks on a call
    listing                     keys and tags at the cost of what changed
    carried                     small rows that came along with the metadata of a fetch
    groups                      groups of siblings: what producers and consumers call
    locks, local_locks          names that this process holds: of the service, or within it
    engine                      large blocks in the service's storage engine, written and read by this process
    transport                   memory of other hosts that the job's transport reads, and this process's that they do
    images                      which of a block's bytes both of them read
    dense                       plain tensors of what a get returned

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
