"""A partition as it changes: `tq tail`, of keys and tags, or of all that happens to rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from transfer_queue.cli.attaching import Address, session
from transfer_queue.cli.listing import changes_of, num_unnamed
from transfer_queue.cli.looking import names_of
from transfer_queue.cli.tables import harmless, print_json, shown

if TYPE_CHECKING:
    from transfer_queue.client.session import Session
    from transfer_queue.wire import messages as m

WATCH_S = 30.0  # how long one request waits; then the next one does
LOOK_EVERY_S = 0.5  # events are asked for: the service tells nobody of them, so that they cost it nothing


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
        changes = changes_of(self._session, self._partition, self._known)
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


class FollowedEvents:
    """What happens to the rows of one partition from now on, those without a key included."""

    def __init__(self, found: Session, partition: str) -> None:
        self._session = found
        self._partition = partition
        self._place = (0, 0)  # number and memory of the service's that come next
        self._names: dict[bytes, str] = {}
        list(self.news())

    def news(self) -> Iterator[tuple[m.RowsEvent, str]]:
        """Since the last time, and who did each. Says on the error stream what nobody can tell any more."""
        from transfer_queue.client.effects import Call
        from transfer_queue.wire import messages as m

        is_behind = True
        while is_behind:
            request = m.FollowEvents(self._session.next_rid(), self._partition, *self._place)
            seen: m.EventsSeen = self._session.call(Call(request))[0]
            if self._place[1] not in (0, seen.memory):
                print("another server took over: what happened meanwhile is not shown", file=sys.stderr, flush=True)
            if seen.missed:
                print(f"{seen.missed:,} events came too fast to be shown", file=sys.stderr, flush=True)
            self._place = (seen.since, seen.memory)
            is_behind = len(seen.events) == request.most
            for one in seen.events:
                yield one, self._whose(one.session)

    def _whose(self, one: bytes) -> str:
        """Its process, as `tq leases` has it."""
        from transfer_queue.client.effects import Call
        from transfer_queue.wire import messages as m

        if one and one not in self._names:
            seen: m.ServiceOverview = self._session.call(Call(m.DescribeService(self._session.next_rid(), 0)))[0]
            self._names[one] = names_of(seen)(one)
        return self._names.get(one, "")


def tail(
    partition: str,
    events: Annotated[
        bool, typer.Option("--events", help="All that happens to rows, those without a key included.")
    ] = False,
    for_s: Annotated[float | None, typer.Option("--for", min=0, help="End after so many seconds.")] = None,
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="An object for each change, a line each.")] = False,
) -> None:
    """Follow keys and tags, or all rows, as they change.

    Ends with Ctrl-C. The partition need not exist yet. With --events all rows are followed, as they are written and
    used. Of keys nothing is asked while nothing changes: the service answers a change.
    """
    end = None if for_s is None else time.monotonic() + for_s
    with session(address) as found:
        try:
            if events:
                _follow_events(found, partition, end, as_json)
            else:
                _follow_keys(found, partition, end, as_json)
        except KeyboardInterrupt:
            pass


def _follow_keys(found: Session, partition: str, end: float | None, as_json: bool) -> None:
    followed = FollowedKeys(found, partition)
    state = "" if followed.exists else ", which does not exist yet"
    unnamed = num_unnamed(found, partition, followed.num_keys)
    if unnamed:
        state += f"; {unnamed:,} of its rows have no key, and such rows are not followed: --events has them"
    print(harmless(f"following partition {partition!r}{state}"), file=sys.stderr, flush=True)
    while (left_s := _left_s(end, WATCH_S)) > 0:
        for change in followed.wait(left_s):
            _tell(change, as_json)
        sys.stdout.flush()


def _left_s(end: float | None, most_s: float) -> float:
    return most_s if end is None else min(most_s, end - time.monotonic())


def _follow_events(found: Session, partition: str, end: float | None, as_json: bool) -> None:
    followed = FollowedEvents(found, partition)
    print(harmless(f"following events of partition {partition!r}"), file=sys.stderr, flush=True)
    while (left_s := _left_s(end, LOOK_EVERY_S)) > 0:
        time.sleep(left_s)
        for one, whose in followed.news():
            _tell_event(one, whose, as_json)
        sys.stdout.flush()


def _tell_event(one: m.RowsEvent, whose: str, as_json: bool) -> None:
    at = time.time() - one.ago_s
    if as_json:
        event = {"what": one.what, "rows": one.rows, "first": one.first, "last": one.last, "task": one.task}
        print_json({"at": at, **event, "detail": one.detail, "of": whose})
        return
    rows = f"row {one.first}" if one.rows == 1 else f"{one.rows:,} rows from {one.first} to {one.last}"
    about = " ".join(filter(None, (one.task, one.detail)))
    clock = time.strftime("%H:%M:%S", time.localtime(at))
    print(harmless(f"{clock} {one.what:12} {rows:24} {about}{f' ({whose})' if whose else ''}").rstrip())


def _tell(change: KeyChange, as_json: bool) -> None:
    if as_json:
        print_json(change._asdict())
    else:
        print(f"{time.strftime('%H:%M:%S')} {change.what:4} {shown(change.key)} {shown(change.tags)}".rstrip())
