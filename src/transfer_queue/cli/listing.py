"""Partitions, keys and tags: `tq ls` as they are, `tq tail` as they change."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from transfer_queue.cli.attaching import Address, AsJson, session
from transfer_queue.cli.looking import overview_of
from transfer_queue.cli.tables import harmless, print_json, print_table, shown
from transfer_queue.errors import UnknownRows

if TYPE_CHECKING:
    from transfer_queue.client.session import Session
    from transfer_queue.wire import messages as m

WATCH_S = 30.0  # how long one request waits; then the next one does


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
        changes = _changes(found, partition, {})
        if changes is None:
            raise UnknownRows(f"partition {partition!r} does not exist: `tq ls` shows those that do")
        unnamed = _num_unnamed(found, partition, len(changes.keys))
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


def _num_unnamed(found: Session, partition: str, num_keys: int) -> int:
    """How many rows of a partition have no key."""
    from transfer_queue.client.effects import Call
    from transfer_queue.wire import messages as m

    return max(0, found.call(Call(m.GetPartition(found.next_rid(), partition)))[0].rows - num_keys)


def _changes(found: Session, partition: str, known: dict[str, tuple[int, int]]) -> m.Changes | None:
    """What is new since `known` of the keys and tags of a partition, or all of them; None where it does not exist."""
    from transfer_queue.client.effects import Call
    from transfer_queue.wire import messages as m

    reply: m.Listing = found.call(Call(m.ListKeys(found.next_rid(), partition, known)))[0]
    return reply.partitions.get(partition)


class KeyChange(NamedTuple):
    """`what`: "new", "tags" or "gone"."""

    what: str
    key: str
    tags: dict[str, Any]


class FollowedKeys:
    """The keys of one partition, as they change from now on. It need not exist yet, and may come back."""

    def __init__(self, found: Session, partition: str) -> None:
        self._session = found
        self._partition = partition
        self._keys: dict[str, dict[str, Any]] = {}
        self._known: dict[str, tuple[int, int]] = {}
        self.exists = False
        for _ in self._news():  # what is there already is no news
            pass

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    def wait(self, timeout_s: float) -> Iterator[KeyChange]:
        """The next changes, nothing after `timeout_s`. Waits in the service."""
        from transfer_queue.client.effects import Call
        from transfer_queue.wire import messages as m

        request = m.WatchKeys(self._session.next_rid(), self._partition, self._known, timeout_s)
        reply: m.KeyVersions = self._session.call(Call(request, wait_s=timeout_s))[0]
        return self._news() if reply.versions != self._known else iter(())

    def _news(self) -> Iterator[KeyChange]:
        changes = _changes(self._session, self._partition, self._known)
        self.exists = changes is not None
        before, self._known = self._keys, {}
        if changes is None:
            self._keys = {}
            yield from (KeyChange("gone", key, {}) for key in before)
            return
        self._known = {self._partition: (changes.table, changes.version)}
        new = dict(zip(changes.keys, changes.tags or [{} for _ in changes.keys], strict=True))
        gone = [key for key in before if key not in new] if changes.full else changes.removed
        self._keys = {} if changes.full else before
        for key in gone:
            self._keys.pop(key, None)
            yield KeyChange("gone", key, {})
        for key, tags in new.items():
            known = before.get(key)  # `before` may be what it is written to
            self._keys[key] = tags
            if known is None:
                yield KeyChange("new", key, tags)
            elif not changes.full or known != tags:
                yield KeyChange("tags", key, tags)


def tail(
    partition: str,
    for_s: Annotated[float | None, typer.Option("--for", min=0, help="End after so many seconds.")] = None,
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="An object for each change, a line each.")] = False,
) -> None:
    """Follow keys and tags as they change, until Ctrl-C.

    The partition need not exist yet. Nothing is asked while nothing changes: the service answers a change.
    """
    end = None if for_s is None else time.monotonic() + for_s
    with session(address) as found:
        followed = FollowedKeys(found, partition)
        state = "" if followed.exists else ", which does not exist yet"
        unnamed = _num_unnamed(found, partition, followed.num_keys)
        if unnamed:
            state += f"; {unnamed:,} of its rows have no key, and such rows are not followed: `tq top` counts them"
        print(harmless(f"following partition {partition!r}{state}"), file=sys.stderr, flush=True)
        try:
            while (left_s := WATCH_S if end is None else min(WATCH_S, end - time.monotonic())) > 0:
                for change in followed.wait(left_s):
                    _tell(change, as_json)
                sys.stdout.flush()
        except KeyboardInterrupt:
            pass


def _tell(change: KeyChange, as_json: bool) -> None:
    if as_json:
        print_json(change._asdict())
    else:
        print(f"{time.strftime('%H:%M:%S')} {change.what:4} {shown(change.key)} {shown(change.tags)}".rstrip())
