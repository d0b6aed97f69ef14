"""An overview as the page gets it: plain values, printable texts, and never more than so many of each."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from transfer_queue.client.operations.overview import PartitionMap
from transfer_queue.page.printable import ident, printable
from transfer_queue.page.rates import RateWindow
from transfer_queue.page.waits import short
from transfer_queue.schema import FieldSchema
from transfer_queue.wire.messages.overview import (
    PartitionOverview,
    ServiceOverview,
    SessionOverview,
    TaskOverview,
    WaitOverview,
)

MAX_PARTITIONS, MAX_FIELDS, MAX_TASKS, MAX_LISTED = 200, 64, 32, 100
Values = dict[str, Any]


def counts_of(overview: ServiceOverview) -> dict[Hashable, int]:
    """What rates are made of."""
    counts: dict[Hashable, int] = {"requests": int(overview.server.get("requests", 0))}
    for partition in overview.partitions[: 10 * MAX_PARTITIONS]:
        for field, written in zip(partition.fields[:MAX_FIELDS], partition.written_in_all, strict=False):
            counts["written", partition.name, partition.life, field.name] = written
        for task in partition.tasks[:MAX_TASKS]:
            counts["used", partition.name, partition.life, task.name] = task.consumed_in_all
    return counts


def service(overview: ServiceOverview, rates: RateWindow, own_pid: int) -> Values:
    """All of it but what belongs to one partition."""
    known = {one.name: one for one in overview.partitions}
    return {
        "server": _server(overview, rates),
        "num_partitions": len(known),
        "partitions": _partitions(overview),
        "num_waits": overview.num_waits,
        "waits": [_wait(one, known, overview) for one in overview.waits[:MAX_LISTED]],
        "num_leases": overview.num_leases,
        "leases": _leases(overview),
        "num_sessions": len(overview.sessions),
        "sessions": [_session(one, own_pid) for one in _heaviest(overview.sessions)],
        "num_replicas": sum(len(one.replicas) for one in overview.fleets),
        "replicas": _replicas(overview),
        "groups": [_pool(name, pool) for name, pool in list(overview.groups.items())[:MAX_LISTED]],
        "series": [_series(name, one) for name, one in list(overview.series.items())[:MAX_LISTED]],
    }


def _server(overview: ServiceOverview, rates: RateWindow) -> Values:
    """Of the server's counts those that are named here: nobody knows what a later one may hold."""
    server = overview.server
    names = (
        "pid", "standby", "takeovers", "rows", "clients", "waiting_requests", "stale_rows", "dead_letters",
        "arena_nbytes_used", "arena_nbytes_budget", "spill_nbytes_used", "spill_nbytes_budget",
    )  # fmt: skip
    found = {name: server[name] if isinstance(server.get(name), int) else None for name in names}
    engine, units = server.get("engine"), server.get("units", {}).values()
    told = [one for one in units if "arena_nbytes_used" in one]
    return {
        **found,
        "units": len(units),
        "units_away": sum(bool(one["away"]) for one in units),
        "units_nbytes_used": sum(one["arena_nbytes_used"] for one in told),
        "units_nbytes_budget": sum(one["arena_nbytes_budget"] for one in told),
        "engine": printable(engine) if isinstance(engine, str) else "",
        "weight_version": overview.weight_version,
        "run_id": printable(overview.run_id),
        "requests_per_s": rates.per_s("requests"),
    }


def _partitions(overview: ServiceOverview) -> list[Values]:
    """Those for which somebody waits first, when there are too many."""
    waits: dict[str, int] = {}
    for one in overview.waits:
        waits[one.partition] = waits.get(one.partition, 0) + 1
    found = list(overview.partitions)
    if len(found) > MAX_PARTITIONS:
        found.sort(key=lambda one: -waits.get(one.name, 0))
    return [
        {"id": ident(one.name), "name": printable(one.name), "lost": one.lost, "waits": waits.get(one.name, 0)}
        for one in found[:MAX_PARTITIONS]
    ]


def partition(found: PartitionOverview, rates: RateWindow) -> Values:
    """One partition: its fields, and its tasks as lanes."""
    fields = list(zip(found.fields, found.written, strict=True))[:MAX_FIELDS]
    return {
        "id": ident(found.name), "name": printable(found.name), "rows": found.rows, "declared": found.declared,
        "lost": found.lost, "metadata": tags(found.metadata),
        "num_fields": len(found.fields), "num_tasks": len(found.tasks),
        "fields": [
            {
                "name": printable(field.name), "type": type_of(field), "written": written,
                "per_s": rates.per_s(("written", found.name, found.life, field.name)),
            }
            for field, written in fields
        ],
        "tasks": [_task(found, one, rates) for one in found.tasks[:MAX_TASKS]],
    }  # fmt: skip


def _task(found: PartitionOverview, task: TaskOverview, rates: RateWindow) -> Values:
    views = task.views
    oldest = [view.oldest_s for view in views if view.oldest_s is not None]
    return {
        "id": ident(task.name), "name": printable(task.name), "leased": task.leased, "kept": task.kept,
        "consumed": task.consumed, "returned": task.returned, "dead": task.dead, "max_age": task.max_age,
        "stale": task.stale, "ready": max((view.ready for view in views), default=0),
        "oldest_s": max(oldest, default=None), "per_s": rates.per_s(("used", found.name, found.life, task.name)),
    }  # fmt: skip


def rates_of(found: PartitionOverview, rates: RateWindow) -> tuple[float, float]:
    """Cells written and rows consumed per second, in all."""
    written = sum(rates.per_s(("written", found.name, found.life, field.name)) for field in found.fields[:MAX_FIELDS])
    return written, sum(rates.per_s(("used", found.name, found.life, task.name)) for task in found.tasks[:MAX_TASKS])


def lanes(fields: Sequence[str], tasks: Sequence[str], found: Values | None) -> Values:
    """What stands beside each line of a map; `found`: its `partition` as it is now, and so perhaps without the line."""
    known_fields = {one["name"]: one for one in found["fields"]} if found else {}
    known_tasks = {one["name"]: one for one in found["tasks"]} if found else {}
    gone = {"type": "", "written": None, "per_s": 0.0, "consumed": None}
    return {
        "fields": [{"name": name, **known_fields.get(name, gone)} for name in fields],
        "tasks": [{"name": name, **known_tasks.get(name, gone)} for name in tasks],
    }


def map_of(found: PartitionMap) -> Values:
    """The map; shares are bytes, which JSON has as base64."""
    return {
        "size": found.size, "each": found.rows_each, "runs": found.num_runs,
        "fields": [printable(name) for name in found.fields[:MAX_FIELDS]],
        "tasks": [printable(name) for name in found.tasks[:MAX_TASKS]],
        "written": [line.tobytes() for line in found.written[:MAX_FIELDS]],
        "consumed": [line.tobytes() for line in found.consumed[:MAX_TASKS]],
        "leased": [line.tobytes() for line in found.leased[:MAX_TASKS]],
        "first_rows": found.first_rows.tolist(),
    }  # fmt: skip


def type_of(field: FieldSchema) -> str:
    """A field's dtype and shape: "int64 [?]"."""
    if not field.dtype:
        return field.kind
    shape = "×".join("?" if size < 0 else str(size) for size in field.shape)
    return f"{field.dtype} [{shape}]" if shape else field.dtype


def tags(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values as text."""
    return [(printable(str(name)), printable(str(value))) for name, value in list(given.items())[:MAX_FIELDS]]


def who(session: bytes, sessions: Mapping[bytes, int]) -> str:
    """A client, by its process where that is known."""
    if not session:
        return "the service"
    pid = sessions.get(session, 0)
    return f"pid {pid}" if pid else f"client {session.hex()[:8]}"


def pids(overview: ServiceOverview) -> dict[bytes, int]:
    """Those that ended lately are known as well: rows say what came back from them."""
    ended = {one.session: one.pid for one in overview.departures}
    return ended | {one.session: one.pid for one in overview.sessions}


def _wait(one: WaitOverview, known: Mapping[str, PartitionOverview], overview: ServiceOverview) -> Values:
    return {
        "short": short(one, known), "lacks": printable(one.lacks, 300), "task": ident(one.task) if one.task else "",
        "partition": ident(one.partition) if one.partition else "", "call": printable(one.call),
        "where": printable(one.partition), "who": who(one.session, pids(overview)), "waited_s": one.waited_s,
        "left_s": one.left_s,
    }  # fmt: skip


def _leases(overview: ServiceOverview) -> list[Values]:
    """Those that end first come first."""
    found = sorted(overview.leases, key=lambda one: one.left_s)[:MAX_LISTED]
    known = pids(overview)
    return [
        {
            "number": one.number, "partition": printable(one.partition), "task": printable(one.task), "rows": one.rows,
            "groups": [printable(name) for name in one.groups[:8]], "num_groups": len(one.groups),
            "holders": [who(session, known) for session in one.holders[:4]], "left_s": one.left_s,
        }
        for one in found
    ]  # fmt: skip


def _heaviest(sessions: list[SessionOverview]) -> list[SessionOverview]:
    return sorted(sessions, key=lambda one: -one.pinned_nbytes)[:MAX_LISTED]


def _session(one: SessionOverview, own_pid: int) -> Values:
    return {
        "id": one.session.hex()[:8], "pid": one.pid, "local": one.local, "connections": one.connections,
        "pinned": one.pinned_nbytes, "host": printable(one.host), "own": one.local and one.pid == own_pid,
    }  # fmt: skip


def _replicas(overview: ServiceOverview) -> list[Values]:
    """Those that are not ready come first."""
    known = pids(overview)
    found = [(replica, one) for one in overview.fleets for replica in one.replicas]
    found.sort(key=lambda pair: (pair[0].ready, pair[0].name))
    return [
        {
            "name": printable(replica.name), "ready": replica.ready, "version": replica.version,
            "label": printable(replica.label), "reason": printable(replica.reason), "since_s": replica.since_s,
            "heard_s": replica.heard_s, "said_s": one.said_s, "of": who(one.session, known),
        }
        for replica, one in found[:MAX_LISTED]
    ]  # fmt: skip


POOL = ("version", "open", "running", "sealed", "lent", "eligible", "waiting", "ended")


def _pool(name: str, pool: Mapping[str, Any]) -> Values:
    sources = pool.get("sources", {})
    return {
        "partition": printable(name),
        **{key: pool.get(key) for key in POOL},
        "oldest": _oldest(pool.get("oldest_open") or {}),
        "sources": [
            {"name": printable(str(source)), **{key: _number(value) for key, value in list(counts.items())[:24]}}
            for source, counts in list(sources.items())[:MAX_LISTED]
        ],
    }


def _oldest(group: Mapping[str, Any]) -> str:
    """The open group that came first, in words; "" where there is none."""
    if not group:
        return ""
    slots = f"{group['done']} of {group['size']} siblings done, {group['running']} under way"
    return f"oldest open: {printable(str(group['group']), 60)} ({slots})"


def _number(value: Any) -> Any:
    return value if value is None or type(value) in (int, float, bool) else printable(str(value))


def _series(name: str, one: Mapping[str, Any]) -> Values:
    members = list(one.get("open", {}).items())[:MAX_LISTED]
    return {
        "name": printable(name),
        "open": [
            {
                "name": printable(member),
                "left": [printable(task) for task in about["left"][:8]],
            }
            for member, about in members
        ],
        "waiting": [printable(member) for member in one.get("waiting", [])[:MAX_LISTED]],
    }
