"""Who waits for what, in few words."""

from __future__ import annotations

from collections.abc import Mapping

from transfer_queue.page.printable import printable
from transfer_queue.wire.messages.overview import PartitionOverview, WaitOverview

GROUP_CALLS = ("tickets", "claim", "select", "wait", "refills")  # what these lack begins with what they want
OTHERS = {"put": "room", "open_partition": "its turn", "kv_watch": "a change", "kv_global_lock": "a lock"}


def short(wait: WaitOverview, partitions: Mapping[str, PartitionOverview]) -> str:
    """ "actor waits for 12 x reward": the field that is missing on most rows, and how many rows with it are needed. Of
    other calls what they want."""
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
    return f"{who} waits for {_lacking(partition, wait)}"


def _lacking(partition: PartitionOverview, wait: WaitOverview) -> str:
    if not wait.fields:
        return "rows"
    needed = wait.wanted - _num_ready(partition, wait)  # not above 0: all are wanted, or the sampler wants others
    written = {field.name: count for field, count in zip(partition.fields, partition.written, strict=True)}
    least = min(wait.fields, key=lambda name: (written.get(name, 0), name))
    missing = partition.rows - written.get(least, 0)
    if missing > 0:
        more = f" and {_more(needed - missing)}" if needed > missing else ""
        return f"{min(missing, needed) if needed > 0 else missing:,} × {printable(least)}{more}"
    if needed > 0:
        return _more(needed)
    to_come = 0 if partition.declared is None else partition.declared - partition.rows - partition.cleared
    return _more(to_come) if to_come > 0 else "more rows"


def _more(count: int) -> str:
    return f"{count:,} more {'row' if count == 1 else 'rows'}"


def _num_ready(partition: PartitionOverview, wait: WaitOverview) -> int:
    """Of the rows that have what the request asks for, those that its task may take."""
    views = [view for task in partition.tasks if task.name == wait.task for view in task.views]
    return next((view.ready for view in views if sorted(view.fields) == sorted(wait.fields)), 0)
