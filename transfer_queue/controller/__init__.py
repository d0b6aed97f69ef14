"""The one place that knows which cells are ready, where they are, and who consumed what.

    Controller.handle(message, ticket, session, now)
        └─ Table        one partition: rows, keys, tags, schema, cells and their locations (numpy, dense by slot)
             └─ Task    what one consumer group has consumed
                  └─ View   the rows ready for one field set, kept up to date by every commit
        └─ BlockIndex   how many live cells every block still holds
        └─ Staleness    which rows are too old for which task; Admissions: how many producers may start
        └─ Dealing      batches for data-parallel ranks; Leases: rows that are lent; Locks: names that are held
        └─ ClearedPartitions   what they leave, freed in slices

    controller          one method for every request
    fetch               ready rows handed to tasks: the sampler is called, requests wait and are woken
    table, readiness    a partition; what each task has used, and which rows are ready for it
    queries, locate     requests that change nothing; from rows to the blocks that hold them
    status, changes     readiness and consumption as reported; which keys changed since a version
    leases, deadlines   rows on lease; when the first of many terms ends
    dealing             batches of data-parallel ranks
    locks               locks on names
    staleness           ages and limits; `admission`: how many rows may be started; `row_versions`: which version made
                        each row; `weight_versions`: what trainers announced
    unreceived          what requests took whose askers do not have the answer yet
    expected_cells      writes that count only where nobody else wrote
    block_index         live cells by block; `cleared_partitions`: blocks of what is gone
    lineage             whose numbers of rows mean the same rows here
    notices, hints      what is missing, in words, for who waits; remarks on names that do not exist
    snapshot, restore   the whole state as bytes, and back; `saved_state`: what the bytes hold

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
