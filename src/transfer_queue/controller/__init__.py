"""The one place that knows which cells are ready, where they are, and who consumed what.

    controller                  Controller.handle(message, ticket, session, now): a method for each request
     ├─ state                   everything that outlives a request, as one object: what is saved and loaded
     ├─ table                   one partition: rows, keys, tags, schema, cells, their locations (numpy, dense by slot)
     │   ├─ readiness           what each task has consumed; the rows ready for a field set, kept up to date by commits
     │   ├─ row_versions        which version of the weights made each row
     │   ├─ single_rows         what is asked of one row alone
     │   ├─ rewrites            which cells and tags are others than a task took for a step
     │   └─ changes             which keys and tags changed since a listing
     ├─ fetch                   ready rows to tasks: the sampler is asked, what it cannot satisfy waits
     │   ├─ sampler_calls       the one who calls the sampler; what it answered, for a standby
     │   ├─ sampler_view        what a sampler is told of a partition
     │   ├─ dealing             batches of data-parallel ranks
     │   ├─ sharing             what the sampler picks for them
     │   ├─ endings             when a loop over a partition has come to its end
     │   ├─ leases              rows that are lent, until when
     │   ├─ redelivery          rows that came back: attempts, delays, dead letters
     │   ├─ steps, taken        what tasks took in each step of a loop, to be handed out once more
     │   └─ unreceived          what was handed to askers who have not said that they have it
     ├─ shared_cells            cells of which many rows have one
     ├─ content_index           where cells lie that were put to be shared, by what they hold
     ├─ block_index             how many live cells every block still holds
     ├─ lone_blocks             rows that were put alone and stay
     ├─ staleness               which rows are too old for which task
     ├─ admission               how many rows producers may start
     ├─ weight_versions         versions of the weights, as they were announced
     ├─ groups                  groups of siblings: who waits for them, works on them, has them
     │   ├─ group_changes       what requests change in a pool alone
     │   ├─ group_checks        what requests may ask for
     │   ├─ group_holdings      what a session has of them
     │   ├─ group_reports       what is told of them
     │   ├─ group_waits         what requests wait for
     │   ├─ group_results       results of attempts, several at a time: which are wanted, and which rows are theirs
     │   ├─ source_uses         when groups of a data source were used last
     │   └─ wait_lines          who waits for the same, one behind the other
     ├─ series                  partitions of which only so many may be open
     ├─ watching                those who wait until keys or tags change
     ├─ reported_fleets         which replicas the weights of trainers go to, as they say
     ├─ departures              who ended lately with something on lease
     ├─ locks                   names that are held
     ├─ recent                  what happened to rows lately, and when they came
     ├─ deadlines               when the first of many terms ends
     ├─ cleared_cells           how many of each field are gone
     └─ cleared_partitions      what they leave, freed in slices
    queries, status             requests that change nothing
    overview                    all of it at one instant, a map of a partition, one row: for people
    locate                      from rows and fields to runs of blocks
    marks                   a step of tasks and pools, as one
    expected_cells, lineage     writes that count only on what was read; whose row numbers mean the same rows
    moving                      cells that lie elsewhere from now on
    hints, notices              what to remark on unknown names, and to those who have waited for long
    snapshot, saved_state       the whole state as bytes
    restore                     putting one back, step by step
    facts, ledger               what lasts of what happens, as typed entries; writing them down
    recovery                    carrying them out on the state that they began with

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
