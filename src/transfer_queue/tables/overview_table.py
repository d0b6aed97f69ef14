"""A look at a service as tables of Arrow: one for each kind of thing that an overview lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import pyarrow as pa

from transfer_queue.arguments import text
from transfer_queue.client.drivers import run
from transfer_queue.client.operations.overview import overview
from transfer_queue.client.session import Session
from transfer_queue.errors import InvalidInput
from transfer_queue.names import hint
from transfer_queue.tables import texts
from transfer_queue.wire import messages as m

MOST = 1 << 14  # waits and leases
TEXT, COUNT, TIME, FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()
Lines: TypeAlias = Iterator[tuple[Any, ...]]
Columns: TypeAlias = dict[str, pa.DataType]


def _partitions(seen: m.ServiceOverview) -> Lines:
    for one in seen.partitions:
        told = texts.text_of(one.metadata, None) if one.metadata else None
        yield one.name, one.rows, one.declared, one.cleared, one.lost, told


def _fields(seen: m.ServiceOverview) -> Lines:
    for one in seen.partitions:
        for field, written in zip(one.fields, one.written, strict=True):
            yield one.name, field.name, field.kind, field.dtype, list(field.shape), written


def _tasks(seen: m.ServiceOverview) -> Lines:
    for one in seen.partitions:
        for task in one.tasks:
            view = task.views[0] if task.views else None
            yield (
                one.name, task.name, view.ready if view else 0, view.oldest_s if view else None, task.leased, task.kept,
                task.consumed, task.returned, task.dead, task.stale, task.max_age,
            )  # fmt: skip


def _waits(seen: m.ServiceOverview) -> Lines:
    for one in seen.waits:
        yield one.call, one.partition, one.task, one.session.hex(), one.waited_s, one.left_s, one.lacks


def _leases(seen: m.ServiceOverview) -> Lines:
    for one in seen.leases:
        yield one.number, one.partition, one.task, one.rows, one.groups, [who.hex() for who in one.holders], one.left_s


def _sessions(seen: m.ServiceOverview) -> Lines:
    for one in seen.sessions:
        yield one.session.hex(), one.pid or None, one.host or None, one.local, one.connections, one.pinned_nbytes


def _sources(seen: m.ServiceOverview) -> Lines:
    for partition, pool in seen.groups.items():
        for source, one in pool["sources"].items():
            yield partition, source, *(one[name] for name in SOURCE)


def _replicas(seen: m.ServiceOverview) -> Lines:
    for fleet in seen.fleets:
        for one in fleet.replicas:
            yield (
                one.name, one.ready, one.version, one.label, one.reason, one.since_s, one.heard_s, fleet.session.hex(),
                fleet.said_s,
            )  # fmt: skip


SOURCE: Columns = {
    **dict.fromkeys(("opened", "sealed", "selected", "consumed", "evicted", "withheld", "refilled"), COUNT),
    "discarded_tokens": COUNT, "starved_s": TIME,
}  # fmt: skip
KINDS: dict[str, tuple[Columns, Callable[[m.ServiceOverview], Iterable[tuple[Any, ...]]]]] = {
    "partitions": (
        {"partition": TEXT, **dict.fromkeys(("rows", "declared", "cleared", "lost"), COUNT), "metadata": TEXT},
        _partitions,
    ),
    "fields": (
        {
            "partition": TEXT, "field": TEXT, "kind": TEXT, "dtype": TEXT, "shape": pa.list_(COUNT), "written": COUNT,
        },
        _fields,
    ),
    "tasks": (
        {
            "partition": TEXT, "task": TEXT, "ready": COUNT, "oldest_s": TIME,
            **dict.fromkeys(("leased", "kept", "consumed", "returned", "dead", "stale", "max_age"), COUNT),
        },
        _tasks,
    ),
    "waits": (
        {
            "call": TEXT, "partition": TEXT, "task": TEXT, "session": TEXT, "waited_s": TIME, "left_s": TIME,
            "lacks": TEXT,
        },
        _waits,
    ),
    "leases": (
        {
            "lease": COUNT, "partition": TEXT, "task": TEXT, "rows": COUNT, "groups": pa.list_(TEXT),
            "holders": pa.list_(TEXT), "left_s": TIME,
        },
        _leases,
    ),
    "sessions": (
        {
            "session": TEXT, "pid": COUNT, "host": TEXT, "local": FLAG, "connections": COUNT, "pinned_nbytes": COUNT,
        },
        _sessions,
    ),
    "sources": ({"partition": TEXT, "source": TEXT, **SOURCE}, _sources),
    "replicas": (
        {
            "replica": TEXT, "ready": FLAG, "version": COUNT, "label": TEXT, "reason": TEXT, "since_s": TIME,
            "heard_s": TIME, "trainer": TEXT, "said_s": TIME,
        },
        _replicas,
    ),
}  # fmt: skip


def overview_table(session: Session, what: str) -> pa.Table:
    """See `transfer_queue.overview_table`."""
    if text(what, "what") not in KINDS:
        raise InvalidInput(f"a look at {what!r}: expected one of {', '.join(KINDS)}{hint(what, KINDS)}")
    columns, lines_of = KINDS[what]
    lines = list(lines_of(run(session, overview(session, MOST))))
    values = zip(*lines, strict=True) if lines else ([] for _ in columns)
    arrays = [pa.array(column, kind) for column, kind in zip(values, columns.values(), strict=True)]
    return pa.table(dict(zip(columns, arrays, strict=True)))
