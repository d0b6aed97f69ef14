"""Who waits for what, in few words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transfer_queue.page.printable import printable
from transfer_queue.wire.messages.overview import PartitionOverview, WaitOverview

GROUP_CALLS = ("tickets", "claim", "select", "wait", "refills")  # what these lack begins with what they want
OTHERS = {"put": "room", "open_partition": "its turn", "kv_watch": "a change", "kv_global_lock": "a lock"}


def short(wait: WaitOverview, partitions: Mapping[str, PartitionOverview]) -> str:
    """ "actor waits for 12 x reward": the field that is missing on most rows. Of other calls what they want."""
    who = printable(wait.task or wait.call)
    if wait.call in GROUP_CALLS:
        return f"{who} waits for {printable(wait.lacks.partition(': ')[0])}"
    if wait.call in OTHERS:
        return f"{who} waits for {OTHERS[wait.call]}"
    if wait.call != "get_meta":
        return f"{who} waits in {printable(wait.call)}" if wait.task else f"{who} waits"
    partition = partitions.get(wait.partition)
    if partition is None:
        return f"{who} waits for partition {printable(wait.partition)}"
    return f"{who} waits for {_lacking(partition, wait.fields)}"


def _lacking(partition: PartitionOverview, wanted: Sequence[str]) -> str:
    if not wanted:
        return "rows"
    written = {field.name: count for field, count in zip(partition.fields, partition.written, strict=True)}
    least = min(wanted, key=lambda name: (written.get(name, 0), name))
    missing = partition.rows - written.get(least, 0)
    if missing > 0:
        return f"{missing:,} × {printable(least)}"
    to_come = 0 if partition.declared is None else partition.declared - partition.rows - partition.cleared
    return f"{to_come:,} more rows" if to_come > 0 else "more rows"
