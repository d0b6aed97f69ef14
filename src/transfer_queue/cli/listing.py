"""Partitions, keys and tags as they are: `tq ls`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfer_queue.cli.attaching import Address, AsJson, session
from transfer_queue.cli.looking import overview_of
from transfer_queue.cli.tables import print_json, print_table
from transfer_queue.errors import UnknownRows
from transfer_queue.names import unknown_partition

if TYPE_CHECKING:
    from transfer_queue.client.session import Session
    from transfer_queue.wire import messages as m


def ls(
    partition: Annotated[str | None, typer.Argument(help="Whose keys; without: the partitions.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="How many keys to show.")] = 100,
    skip: Annotated[int, typer.Option(min=0, help="How many keys to leave out before.")] = 0,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """The partitions, or the keys of one with their tags.

    Keys come in the order in which they were put.
    """
    if partition is None:
        _list_partitions(address, as_json)
    else:
        _list_keys(partition, slice(skip, skip + limit), address, as_json)


def _list_partitions(address: str | None, as_json: bool) -> None:
    found = overview_of(address).partitions
    if as_json:
        print_json([_partition(one) for one in found])
        return
    lines = [
        (one.name, one.rows, one.declared, _fields(one), ", ".join(task.name for task in one.tasks), one.metadata)
        for one in found
    ]
    print_table(("partition", "rows", "declared", "fields", "tasks", "metadata"), lines)


def _partition(one: m.PartitionOverview) -> dict[str, Any]:
    """`fields`: on how many rows each of them is written."""
    fields = {field.name: num for field, num in zip(one.fields, one.written, strict=True)}
    tasks = [task.name for task in one.tasks]
    return {
        "partition": one.name, "rows": one.rows, "declared": one.declared, "fields": fields, "tasks": tasks,
        "lost": one.lost, "metadata": one.metadata,
    }  # fmt: skip


def _fields(one: m.PartitionOverview) -> str:
    """Each field, and on how many rows it is where that is not all of them."""
    written = zip(one.fields, one.written, strict=True)
    return ", ".join(field.name if num == one.rows else f"{field.name} ({num:,})" for field, num in written)


def _list_keys(partition: str, part: slice, address: str | None, as_json: bool) -> None:
    with session(address) as found:
        changes = changes_of(found, partition, {})
        if changes is None:
            raise UnknownRows(unknown_partition(partition, ()))
        unnamed = num_unnamed(found, partition, len(changes.keys))
    tags = changes.tags or [{}] * len(changes.keys)
    lines = list(zip(changes.keys[part], tags[part], strict=True))
    if as_json:
        keys = [{"key": key, "tags": tag} for key, tag in lines]
        print_json({"partition": partition, "num_keys": len(changes.keys), "num_unnamed": unnamed, "keys": keys})
        return
    print_table(("key", "tags"), lines)
    if len(lines) < len(changes.keys):
        text = f"{len(lines):,} of {len(changes.keys):,} keys"
        print(f"{text}; --skip {part.stop} shows the next" if part.stop < len(changes.keys) else text)
    if unnamed:
        print(f"{unnamed:,} {'row' if unnamed == 1 else 'rows'} without a key")


def num_unnamed(found: Session, partition: str, num_keys: int) -> int:
    """How many rows of a partition have no key."""
    from transfer_queue.client.effects import Call
    from transfer_queue.wire import messages as m

    return max(0, found.call(Call(m.GetPartition(found.next_rid(), partition)))[0].rows - num_keys)


def changes_of(found: Session, partition: str, known: dict[str, tuple[int, int]]) -> m.Changes | None:
    """What is new since `known` of the keys and tags of a partition, or all of them; None where it does not exist."""
    from transfer_queue.client.effects import Call
    from transfer_queue.wire import messages as m

    reply: m.Listing = found.call(Call(m.ListKeys(found.next_rid(), partition, known)))[0]
    return reply.partitions.get(partition)
