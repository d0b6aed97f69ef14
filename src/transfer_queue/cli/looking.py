"""A service at one instant: `tq status`, `tasks`, `leases`, `groups`, `waits`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfer_queue.cli.attaching import Address, AsJson, answer, session
from transfer_queue.cli.tables import Number, print_json, print_table, seconds

if TYPE_CHECKING:
    from transfer_queue.wire import messages as m

TASK = (
    "partition", "task", "ready", "oldest", "leased", "kept", "consumed", "returned", "dead", "stale", "max_age",
)  # fmt: skip
POOL = (
    "pool", "version", "open", "running", "sealed", "lent", "eligible", "tickets_out", "owed", "waiting", "ended",
    "sampled",
)  # fmt: skip
OPEN = ("source", "version", "slots", "done", "running", "idle", "failed")  # of the open group that came first
NAMED_BY = ("pid", "standby", "unit", "weight_version")  # of what `status` prints, numbers that count nothing
Limit = Annotated[int, typer.Option(min=0, max=16384, help="How many to show.")]


def overview_of(address: str | None, most: int = 0) -> m.ServiceOverview:
    """An overview of the service that was chosen, with at most so many waiting requests and leases."""
    from transfer_queue.client.operations.overview import overview

    with session(address) as found:
        return answer(found, overview(found, most))


def status(address: Address = None, as_json: AsJson = False) -> None:
    """Counts and sizes of a running service, and its partitions."""
    seen = overview_of(address)
    partitions = {
        one.name: {
            "size": one.declared, "metadata": one.metadata, "rows": one.rows,
            "stale": {task.name: task.stale for task in one.tasks},
        }
        for one in seen.partitions
    }  # fmt: skip
    if as_json:
        print_json({**seen.server, "partition": partitions})
        return
    counts = {name: value for name, value in seen.server.items() if name not in ("groups", "series")}
    print_table(("what", "value"), [(name, _count(name, value)) for name, value in counts.items()])
    lines = [(one.name, one.rows, one.declared, _stale(one), one.metadata) for one in seen.partitions]
    print_table(("partition", "rows", "declared", "too old", "metadata"), lines)
    for title, counted in (("groups of", seen.server["groups"]), ("series", seen.server["series"])):
        if counted:
            print_table(
                (title, *next(iter(counted.values()))), [(name, *one.values()) for name, one in counted.items()]
            )


def _stale(partition: m.PartitionOverview) -> str:
    return ", ".join(f"{task.name} {task.stale:,}" for task in partition.tasks if task.stale)


def _count(name: str, value: Any) -> Any:
    """As a text: it stands in a column with others."""
    if not isinstance(value, int):
        return value
    return str(value) if name in NAMED_BY else f"{value:,}"


def tasks(address: Address = None, as_json: AsJson = False) -> None:
    """What each task may take, has on lease, used and gave up."""
    seen = overview_of(address)
    found = [{"partition": part.name, **_task(task)} for part in seen.partitions for task in part.tasks]
    if as_json:
        print_json(found)
        return
    lines = [
        {**one, "ready": ready_of(one["views"]), "oldest": seconds(one["views"][0]["oldest_s"]) if one["views"] else ""}
        for one in found
    ]
    print_table(TASK, [[line[name] for name in TASK] for line in lines])


def _task(task: m.TaskOverview) -> dict[str, Any]:
    views = [{"fields": view.fields, "ready": view.ready, "oldest_s": view.oldest_s} for view in task.views]
    values = {name: getattr(task, name) for name in task.__struct_fields__ if name not in ("name", "views")}
    return {"task": task.name, **values, "views": views}


def ready_of(views: Iterable[Mapping[str, Any]]) -> int | None:
    """Rows that a task may take: with the most fields that it ever asked for. None where it never asked."""
    return next((one["ready"] for one in views), None)


def leases(limit: Limit = 256, address: Address = None, as_json: AsJson = False) -> None:
    """Rows and groups that are lent, and what came back of late."""
    seen = overview_of(address, limit)
    if as_json:
        print_json({"num_leases": seen.num_leases, "leases": seen.leases, "departures": seen.departures})
        return
    whose = names_of(seen)
    lines = [
        (
            Number(one.number), one.partition, one.task, one.rows, one.groups or "",
            ", ".join(map(whose, one.holders)), seconds(one.left_s),
        )
        for one in seen.leases
    ]  # fmt: skip
    print_table(("lease", "partition", "task", "rows", "groups", "held by", "left"), lines)
    _tell_of_more(len(seen.leases), seen.num_leases)
    if seen.departures:
        ended = [
            (whose(one.session), seconds(one.ago_s), back.partition, back.task, back.rows, back.groups or "")
            for one in reversed(seen.departures)
            for back in one.given_back
        ]
        print()
        print_table(("ended", "ago", "partition", "task", "rows", "groups"), ended)


def waits(limit: Limit = 256, address: Address = None, as_json: AsJson = False) -> None:
    """Who waits for what, and what each request lacks."""
    seen = overview_of(address, limit)
    if as_json:
        print_json({"num_waits": seen.num_waits, "waits": seen.waits})
        return
    whose = names_of(seen)
    lines = [
        (one.call, one.partition, one.task, whose(one.session), seconds(one.waited_s), seconds(one.left_s), one.lacks)
        for one in seen.waits
    ]
    print_table(("call", "partition", "task", "of", "waited", "left", "lacks"), lines)
    _tell_of_more(len(seen.waits), seen.num_waits)


def replicas(address: Address = None, as_json: AsJson = False) -> None:
    """Who serves which weights, and why some are behind."""
    seen = overview_of(address)
    found = [(fleet, one) for fleet in seen.fleets for one in fleet.replicas]
    if as_json:
        values = [{name: getattr(one, name) for name in one.__struct_fields__} for _, one in found]
        said = [{"trainer": fleet.session, "said_s": fleet.said_s} for fleet, _ in found]
        print_json([{**one, **about} for one, about in zip(values, said, strict=True)])
        return
    whose = names_of(seen)
    lines = [
        (
            one.name, one.version, one.label, "ready" if one.ready else one.reason, seconds(one.since_s),
            seconds(one.heard_s), whose(fleet.session), seconds(fleet.said_s),
        )
        for fleet, one in found
    ]  # fmt: skip
    print_table(("replica", "version", "label", "state", "since", "heard", "of", "said"), lines)


def names_of(seen: m.ServiceOverview) -> Any:
    """What to call a session: its process where that is known, else the beginning of its name, and its host."""
    hosts = {one.session: one.host for one in seen.sessions}
    pids = {one.session: one.pid for one in seen.departures} | {one.session: one.pid for one in seen.sessions}

    def name(one: bytes) -> str:
        if pids.get(one):
            return f"pid {pids[one]}"
        return f"{one.hex()[:8]} on {hosts[one]}" if hosts.get(one) else one.hex()[:8]

    return name


def _tell_of_more(shown: int, there: int) -> None:
    if shown < there:
        print(f"{shown:,} of {there:,}; --limit shows more")


def groups(address: Address = None, as_json: AsJson = False) -> None:
    """Pools of groups, their sources, and series of partitions."""
    seen = overview_of(address)
    if as_json:
        print_json({"pools": seen.groups, "series": seen.series})
        return
    print_table(POOL, [(name, *(pool.get(one) for one in POOL[1:])) for name, pool in seen.groups.items()])
    sources = [(name, source, one) for name, pool in seen.groups.items() for source, one in pool["sources"].items()]
    if sources:
        fields = [field for field in sources[0][2] if field != "starved_s"]
        lines = [
            (name, source, *(one[field] for field in fields), seconds(one["starved_s"]))
            for name, source, one in sources
        ]
        print_table(("pool", "source", *fields, "starved"), lines)
    whose = names_of(seen)
    workers = [
        (name, whose(bytes.fromhex(one["session"])), one["attempts"])
        for name, pool in seen.groups.items()
        for one in pool["workers"]
    ]
    if workers:
        print_table(("pool", "worked on by", "attempts"), workers)
    oldest = [(name, *pool["oldest_open"].values()) for name, pool in seen.groups.items() if pool["oldest_open"]]
    if oldest:
        print_table(("pool", "oldest open group", *OPEN), oldest)
    open_ones = [
        (series, name, ", ".join(one["consumers"]), ", ".join(one["left"]), "yes" if one["clears"] else "no")
        for series, found in seen.series.items()
        for name, one in found["open"].items()
    ]
    waiting = [
        (series, name, "waits to open", "", "") for series, found in seen.series.items() for name in found["waiting"]
    ]
    if seen.series:
        print_table(("series", "partition", "consumers", "not finished by", "clears"), open_ones + waiting)
