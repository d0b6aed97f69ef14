"""`tq dead-letters`, the rows that a task gave up, and `tq replay`, what it took in a step."""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from transfer_queue.cli.attaching import Address, AsJson, attached
from transfer_queue.cli.progress import bar
from transfer_queue.cli.tables import Number, print_json, print_table
from transfer_queue.errors import InvalidInput

if TYPE_CHECKING:
    from transfer_queue.bundles.bundle import SavedRow
    from transfer_queue.client.client import TransferQueueClient
    from transfer_queue.wire.messages import TakenBatch


def dead_letters(
    partition: str,
    task: str,
    requeue: Annotated[bool, typer.Option(help="Offer them to the task again, as if it had never had them.")] = False,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Rows that a task tried as often as it may, and why in vain."""
    with attached(address) as client:
        found = client.list_dead_letters(partition, task)
        if not len(found):
            _check_task(client, partition, task)
        if requeue:
            client.requeue_dead_letters(partition, task, found)
    rows = [
        {"row": Number(row), "attempts": one.attempts, "reason": one.reason, "tags": tag}
        for (row, one), tag in zip(found.redelivered.items(), found.custom_meta, strict=True)
    ]
    if as_json:
        print_json(rows)
    else:
        print_table(("row", "attempts", "reason", "tags"), [list(row.values()) for row in rows])
        if requeue:
            print(f"{len(rows)} queued again")


def _check_task(client: TransferQueueClient, partition: str, task: str) -> None:
    """Raises `InvalidInput` for a task that never asked for a row of a partition."""
    known = next((one.tasks for one in client.overview(0).partitions if one.name == partition), None)
    names = [one.name for one in known or ()]
    if known is not None and task not in names:
        tasks = ", ".join(map(repr, names)) or "none"
        raise InvalidInput(
            f"task {task!r} never asked for rows of partition {partition!r}; the tasks that did: {tasks}"
        )


def replay(
    step: int,
    task: str = typer.Option(help="Whose step."),
    source: Annotated[str | None, typer.Option("--from", help="What --save wrote; no service then.")] = None,
    save: Annotated[
        str | None, typer.Option(help="Write the step to this new directory, or below this URL of fsspec's.")
    ] = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """What a task took in a step of its loop.

    Batches, rows in order, keys, versions of the weights.
    """
    if source is not None and save is not None:
        raise InvalidInput("--save writes a step of a running service; --from has one already: copy that directory")
    found = _taken(step, task, save, address) if source is None else _saved(source, step, task)
    _remark(sum(row.retagged for row in found), "have tags that changed since they were taken")
    rows = [
        {
            "batch": row.batch,
            "partition": row.partition,
            "row": Number(row.global_index),
            "key": row.key,
            "tags": row.tags,
        }
        for row in found
    ]
    if as_json:
        print_json(rows)
    else:
        print_table(("batch", "partition", "row", "key", "tags"), [list(row.values()) for row in rows])


def _saved(source: str, step: int, task: str) -> list[SavedRow]:
    """The rows of a bundle, all of which is verified. Raises `InvalidInput` for that of another step."""
    from transfer_queue.bundles import Bundle

    bundle = Bundle(source)
    if (bundle.step, bundle.task) != (step, task):
        raise InvalidInput(f"{source} has step {bundle.step} of task {bundle.task!r}")
    for number in range(len(bundle)):
        with bar(f"batch {number} of {len(bundle)}"):
            bundle.verify(number)
        print(f"batch {number}: xxh3-128 {bundle.digest(number)}, verified", file=sys.stderr)
    return bundle.rows


def _taken(step: int, task: str, save: str | None, address: str | None) -> list[SavedRow]:
    """The rows of a running service that were not cleared; saved where they are to be."""
    from transfer_queue import bundles

    with attached(address) as client:
        batches = bundles.taken(client.session, step, task)
        rows = list(bundles.rows_of(batches))
        if save is not None:
            with bar(f"saving {len(rows)} rows"):
                written = bundles.save(client.session, save, step, task)
            text = f"{written['batches']} batches, {written['rows']} rows, {written['bytes']:,} bytes"
            print(f"{save}: {text}", file=sys.stderr)
    _remark(sum(len(batch.rows) // 8 for batch in batches) - len(rows), "were cleared, and are not shown")
    _remark(sum(map(_num_rewritten, batches)), "have fields that were written anew since they were taken")
    return rows


def _num_rewritten(batch: TakenBatch) -> int:
    return len({row for rows in batch.rewritten.values() for (row,) in struct.iter_unpack("q", rows)})


def _remark(number: int, what: str) -> None:
    if number:
        print(f"{number} rows {what}", file=sys.stderr)
