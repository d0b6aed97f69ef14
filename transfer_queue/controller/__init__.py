"""The one place that knows which cells are ready, where they are, and who consumed what.

    Controller.handle(message, ticket, session, now)
        └─ Table        one partition: rows, keys, tags, schema, cells and their locations (numpy, dense by slot)
             └─ Task    what one consumer group has consumed
                  └─ View   the rows ready for one field set, kept up to date by every commit
        └─ Ledger       how many live cells every block still holds
        └─ Staleness    which rows are too old for which task; Admissions: how many producers may start
        └─ Dealing      batches for data-parallel ranks; Leases: rows that are lent; Locks: names that are held
        └─ Remains      what cleared partitions leave, freed in slices
    checkpointing       the whole state as bytes; Restoring: putting one back, step by step

A state machine without I/O: a request is answered at once, or parked and answered by the event that completes it.
Answers to parked requests collect in `outbox`, blocks nobody needs any more in `freed`; the shell (`server`) sends and
frees them. What takes long is done in slices, by `tidy`, which the shell calls while `unfinished`. Nothing here sleeps,
reads a clock or knows a socket.
"""

import importlib
from typing import Any

from transfer_queue.controller.controller import Controller as Controller


def __getattr__(name: str) -> Any:
    if name == "TransferQueueController":  # TransferQueue has its actor here; ours is layers above, and not loaded yet
        return importlib.import_module("transfer_queue.controller_actor").TransferQueueController
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
