"""What monitoring sees: families in Prometheus' terms, read from the live service when they are asked for.

Names and labels are those of 0.1.11 where they mean something here (docs/compatibility.md has the list), the others
start with `tq_` as well. A scrape costs one pass over partitions and tasks, with numpy reductions over their rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from time import monotonic
from typing import Protocol

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from transfer_queue.controller import Controller
from transfer_queue.controller.notices import CALLED, called
from transfer_queue.controller.readiness import Task
from transfer_queue.controller.table import Table
from transfer_queue.server.compaction import Compactor
from transfer_queue.server.gathering import Gatherer
from transfer_queue.server.metrics.counters import BOUNDS, CONTROLLER, STORAGE, Histogram, MeteredService
from transfer_queue.server.spilling import Spiller

PART = 64  # partitions per part of a family
_LIMITS = [*map(floatToGoString, BOUNDS), "+Inf"]
Rows = Iterable[tuple[Sequence[str], float]]  # label values and a number
Names = tuple[str, str]  # label values


class Movers(Protocol):
    """Who moves blocks in a server."""

    compactor: Compactor
    gatherer: Gatherer
    spiller: Spiller


class ServerCollector(Collector):
    """All families of one server. Use it on the thread of the server's loop.

    A family with many samples comes in several parts, one after the other, so that requests can be answered in between.
    """

    def __init__(self, service: MeteredService, movers: Movers) -> None:
        self._service = service
        self._unit = service.unit
        self._controller = service.controller if isinstance(service.controller, Controller) else None
        self._movers = movers

    def collect(self) -> Iterator[Metric]:
        if self._controller is not None:
            yield from self._controller_sizes(self._controller)
            yield from self._groups(self._controller)
            yield from self._partitions(self._controller)
            yield from self._fetch_waits(self._controller)
        yield from self._sizes()
        yield from self._unit_sizes()
        yield from self._unit_requests()
        for role in (CONTROLLER, STORAGE):
            yield from self._requests(role)
        yield from self._waits()

    def _controller_sizes(self, controller: Controller) -> Iterator[Metric]:
        service = self._service
        yield _gauge("tq_controller_uptime_seconds", "Since the server started.", monotonic() - service.started)
        yield _gauge("tq_controller_memory_rss_bytes", "Resident memory of the server process.", resident_nbytes())
        yield _gauge("tq_partitions_total", "Partitions.", len(controller.tables))
        in_use = sum(table.num_alive for table in controller.tables.values())
        yield _gauge("tq_global_index_allocated_total", "Row indexes in use, reserved ones included.", in_use)
        yield _gauge("tq_global_index_reusable_total", "Always 0: an index is never used again.", 0)
        yield _gauge("tq_blocks", "Blocks with live cells.", len(controller.block_index.entries))
        away = sum(unit["away"] for unit in service.members.statistics().values())
        yield _gauge("tq_units", "Storage units of other hosts.", len(service.members.statistics()))
        yield _gauge("tq_units_away", "Storage units whose connection is lost.", away)
        count = controller.staleness.admissions.versions.count
        yield _counter("tq_weight_announcements", "Versions of the weights that were announced.", count)
        stale = CounterMetricFamily("tq_stale_rows", "Rows that became too old for a task.", labels=["task_name"])
        for task, number in controller.staleness.num_stale.items():
            stale.add_metric([task], number)
        yield stale
        yield self._stale_by_partition(controller)
        dead = controller.state.fetching.redelivery.num_dead
        yield _gauge("tq_dead_letters", "Rows that a task tried as often as it may.", dead)
        rows, capacity = controller.num_rows, controller.max_rows
        if capacity is not None:
            yield self._of_unit("tq_storage_capacity_total", "Rows the store takes.", capacity)
            yield self._of_unit("tq_storage_utilization_ratio", "Rows stored per row of capacity.", rows / capacity)
        yield self._of_unit("tq_storage_active_keys_total", "Rows in the store.", rows)

    def _stale_by_partition(self, controller: Controller) -> Metric:
        stale = GaugeMetricFamily(
            "tq_partition_stale_rows", "Rows of a partition that became too old for a task, cleared ones too.",
            labels=["partition_id", "task_name"],
        )  # fmt: skip
        for table in controller.tables.values():
            for name, task in table.tasks.items():
                stale.add_metric([table.name, name], task.num_stale)
        return stale

    def _groups(self, controller: Controller) -> Iterator[Metric]:
        groups = GaugeMetricFamily("tq_groups", "Groups of siblings.", labels=["partition_id", "state"])
        fates = CounterMetricFamily(
            "tq_group_fates", "What became of groups.", labels=["partition_id", "source", "fate"]
        )
        evicted = CounterMetricFamily(
            "tq_groups_evicted", "Why groups were evicted.", labels=["partition_id", "source", "reason"]
        )
        for partition, counts in controller.groups.statistics().items():
            for state, number in counts.items():
                groups.add_metric([partition, state], number)
            for source, one in controller.groups.pools[partition].state.sources.items():
                for fate in ("opened", "sealed", "selected", "consumed", "evicted"):
                    fates.add_metric([partition, source, fate], getattr(one, fate))
                for reason, number in one.evicted_for.items():
                    evicted.add_metric([partition, source, reason], number)
        yield from (groups, fates, evicted, self._starved(controller), self._group_waits(controller))
        series = GaugeMetricFamily("tq_series", "Partitions of series, and who waits.", labels=["series", "state"])
        for name, counts in controller.series.statistics().items():
            for state, number in counts.items():
                series.add_metric([name, state], number)
        yield series

    def _starved(self, controller: Controller) -> Metric:
        """0 where a source has no group that could be used, so that an alert ends with its groups."""
        starved = GaugeMetricFamily(
            "tq_group_source_starved_seconds", "Since a group of a source was used that has some, 0 where it has none.",
            labels=["partition_id", "source"],
        )  # fmt: skip
        now = monotonic()
        for partition, pool in controller.groups.pools.items():
            for source, one in pool.state.sources.items():
                since = controller.groups.uses.at.get((partition, source), now)
                starved.add_metric([partition, source], max(0.0, now - since) if one.num_live else 0.0)
        return starved

    def _group_waits(self, controller: Controller) -> Metric:
        """Of every pool that is there, so that an alert ends with the wait."""
        known = [(partition, call) for partition in controller.groups.pools for call in CALLED.values()]
        waits = [((one.message.partition, called(one.message)), one.since) for one in controller.groups.parked]
        text = "For how long the oldest call of a pool waits, 0 where none does."
        return _gauges("tq_oldest_group_wait_seconds", text, ["partition_id", "call"], _oldest(known, waits))

    def _fetch_waits(self, controller: Controller) -> Iterator[Metric]:
        """Of every task that is there, so that an alert ends with the wait."""
        known = [(table.name, task) for table in controller.tables.values() for task in table.tasks]
        waits = [((one.message.partition, one.message.task), one.since) for one in controller.state.fetching.parked]
        text = "For how long a task's oldest request for rows waits, 0 where none does."
        yield _gauges("tq_oldest_fetch_wait_seconds", text, ["partition_id", "task_name"], _oldest(known, waits))

    def _sizes(self) -> Iterator[Metric]:
        service, unit = self._service, self._unit
        waiting = [
            ((CONTROLLER,), service.controller.statistics()["waiting_requests"]),
            ((STORAGE,), unit.num_waiting),
        ]
        yield _gauges(
            "tq_waiting_requests", "Requests that wait for rows or room (storage: for bytes).", "role", waiting
        )
        yield _gauge("tq_sessions", "Attached client processes.", len(service.sessions.by_ident))
        yield _gauge("tq_arena_used_bytes", "Bytes of all blocks.", unit.used_nbytes)
        yield _gauge("tq_arena_resident_bytes", "Bytes of the arenas that occupy memory.", unit.shm.resident_nbytes())
        yield _gauge("tq_arena_budget_bytes", "Bytes that all blocks may have.", unit.budget_nbytes)
        yield _gauge("tq_pinned_bytes", "Bytes clients are reading, per reader.", sum(unit.pinned_nbytes().values()))
        yield _counter("tq_written_bytes", "Bytes of published blocks.", service.nbytes_in)
        yield _counter("tq_read_bytes", "Bytes of blocks handed to readers.", service.nbytes_out)
        yield _counter("tq_compactions", "Blocks rewritten without their dead cells.", self._movers.compactor.num_moved)
        yield _counter("tq_gathered_rows", "Rows put alone that became columns.", self._movers.gatherer.num_rows)
        yield _counter("tq_spilled_blocks", "Blocks moved to a disk.", self._movers.spiller.num_moved)
        if service.journal is not None:
            told = service.journal.statistics()
            nbytes = told["journal_nbytes"] + told["journal_blocks_nbytes"]
            yield _gauge(
                "tq_journal_lag_seconds", "How long the first event waits for the disk.", told["journal_lag_s"]
            )
            yield _gauge("tq_journal_bytes", "Bytes of the journal: log, snapshot and blocks.", nbytes)
        yield from self._elsewhere()

    def _elsewhere(self) -> Iterator[Metric]:
        unit, blocks = self._unit, self._service.blocks
        if blocks.engine is not None:
            yield _gauge("tq_engine_bytes", "Bytes of blocks in the storage engine.", unit.engine_nbytes)
            yield _gauge("tq_engine_blocks_to_delete", "Blocks that it still has in vain.", len(unit.left_in_engine))
        if blocks.registered is not None:
            told = blocks.registered.statistics()
            offered, pulled = told["transport_blocks_offered"], told["transport_blocks_pulled"]
            yield _counter("tq_transport_blocks_offered", "Blocks for readers of other hosts.", offered)
            yield _counter("tq_transport_blocks_pulled", "Blocks of writers whose host has no unit.", pulled)

    def _unit_sizes(self) -> Iterator[Metric]:
        yield self._of_unit("tq_storage_memory_rss_bytes", "Resident memory of the server process.", resident_nbytes())
        unit = self._unit
        enabled = float(unit.spill.budget_nbytes > 0)
        yield self._of_unit("tq_storage_ssd_offload_enabled", "Whether rows without room go to a disk.", enabled)
        yield self._of_unit("tq_storage_ssd_active_values", "Blocks on the disk.", unit.num_spilled)
        yield self._of_unit("tq_storage_ssd_active_bytes", "Bytes of these.", unit.spilled_nbytes)
        yield self._of_unit("tq_storage_ssd_fallback_values_total", "Always 0.", 0)

    def _unit_requests(self) -> Iterator[Metric]:
        meters, unit = self._service.meters(STORAGE), str(self._unit.number)
        labels = ("storage_unit_id", "op_type")
        counts = [((unit, op), meter.busy.count) for op, meter in meters.items()]
        arrived = sum(count for _, count in counts)
        yield self._of_unit("tq_storage_requests_arrived", "Storage requests.", arrived)
        yield _gauges("tq_storage_arrivals_by_op", "Storage requests.", labels, counts)
        yield _gauges("tq_storage_request_ops", "Storage requests.", labels, counts)
        averages = [((unit, op), meter.busy.seconds / meter.busy.count) for op, meter in meters.items()]
        yield _gauges("tq_storage_request_latency_avg", "Seconds at work on a request.", labels, averages)
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            found = [((unit, op), meter.busy.quantile(share)) for op, meter in meters.items()]
            yield _gauges(f"tq_storage_request_latency_{name}", "Seconds, estimated from the histogram.", labels, found)

    def _partitions(self, controller: Controller) -> Iterator[Metric]:
        labels = ("partition_id", "task_name")
        for part in _parts(controller):
            rows = [((table.name,), table.num_rows) for table in part]
            yield _gauges("tq_partition_samples_total", "Rows of a partition.", "partition_id", rows)
        text = "Share of the rows (of the declared size) with all fields that a task asks for; all: with at least one."
        for part in _parts(controller):
            yield _gauges("tq_partition_production_progress", text, labels, _production(part))
        for part in _parts(controller):
            text = "Share of the rows a task consumed."
            yield _gauges("tq_partition_consumption_progress", text, labels, _consumption(part))

    def _of_unit(self, name: str, text: str, value: float) -> Metric:
        return _gauges(name, text, "storage_unit_id", [((str(self._unit.number),), value)])

    def _requests(self, role: str) -> Iterator[Metric]:
        meters, name = self._service.meters(role), f"tq_{role}_request"
        text = "Time the server was at work on a request; waiting for rows or room is not in it."
        for op, meter in meters.items():
            yield _histogram(f"{name}_duration_seconds", text, op, meter.busy)
        yield _counters(name, "Requests.", [((op,), meter.busy.count) for op, meter in meters.items()])
        errors = [((op,), meter.errors) for op, meter in meters.items()]
        yield _counters(f"{name}_errors", "Requests answered with an error.", errors)
        samples = [((op,), meter.samples) for op, meter in meters.items()]
        yield _counters(f"{name}_samples", "Rows written, found, handed out or cleared.", samples)

    def _waits(self) -> Iterator[Metric]:
        meters = {**self._service.meters(STORAGE), **self._service.meters(CONTROLLER)}
        parked = {op: meter for op, meter in meters.items() if meter.parked}
        yield _counters(
            "tq_parked_requests", "Requests that had to wait.", [((o,), x.parked) for o, x in parked.items()]
        )
        woken = [((op,), meter.waits.count) for op, meter in parked.items()]
        yield _counters("tq_wakeups", "Waiting requests that were answered, also by their deadline.", woken)
        for op, meter in parked.items():
            yield _histogram(
                "tq_wait_seconds", "From asking to the answer, of those that had to wait.", op, meter.waits
            )


def _parts(controller: Controller) -> Iterator[list[Table]]:
    """At least one part, so that a family is seen before there are partitions."""
    tables = list(controller.tables.values())
    for at in range(0, max(1, len(tables)), PART):
        yield tables[at : at + PART]


def _production(tables: list[Table]) -> Rows:
    for table in tables:
        expected = (table.num_rows if table.declared is None else table.declared) or 1
        counts: dict[frozenset[str], int] = {}  # tasks often ask for the same fields
        asked = {"all": frozenset[str](), **{name: _asked_for(task) for name, task in table.tasks.items()}}
        for name, fields in asked.items():
            if fields not in counts:
                counts[fields] = _num_written(table, fields)
            yield (table.name, name), min(1.0, counts[fields] / expected)


def _asked_for(task: Task) -> frozenset[str]:
    """The fields that any of its fetches asked for."""
    return frozenset().union(*task.views)


def _num_written(table: Table, fields: frozenset[str]) -> int:
    """Rows with all of `fields`, with any field where there are none to ask for."""
    if not fields:
        return int(np.count_nonzero(np.bitwise_or.reduce(table.cells[: len(table.fields), : table.size], axis=0)))
    if not fields <= table.fields.keys():
        return 0
    written = [table.cells[table.fields[name].number, : table.size] != 0 for name in fields]
    return int(np.count_nonzero(np.logical_and.reduce(written, axis=0)))


def _consumption(tables: list[Table]) -> Rows:
    for table in tables:
        alive = table.alive[: table.size]
        for name, task in table.tasks.items():
            consumed = int(np.count_nonzero(task.consumed[: table.size] & alive))
            yield (table.name, name), consumed / (table.num_rows or 1)


def resident_nbytes() -> int:
    """Memory of this process, from the second number of /proc/self/statm (proc(5))."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _oldest(known: Iterable[Names], waits: Iterable[tuple[Names, float | None]]) -> Rows:
    """For how long the oldest wait of each name lasts, from (name, since when); 0 for the `known` ones without any."""
    now, oldest = monotonic(), dict.fromkeys(known, 0.0)
    for names, since in waits:
        oldest[names] = max(oldest.get(names, 0.0), 0.0 if since is None else now - since)
    return oldest.items()


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauges(name: str, text: str, labels: str | Sequence[str], rows: Rows) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[labels] if isinstance(labels, str) else labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _counters(name: str, text: str, rows: Rows) -> Metric:
    family = CounterMetricFamily(name, text, labels=["op_type"])
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _histogram(name: str, text: str, op: str, values: Histogram) -> Metric:
    family = HistogramMetricFamily(name, text, labels=["op_type"])
    family.add_metric([op], list(zip(_LIMITS, accumulate(values.buckets), strict=True)), values.seconds)
    return family
