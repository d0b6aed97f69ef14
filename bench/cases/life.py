"""Starting, and what a gigabyte weighs; cases 11 and 12."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from bench import procfs
from bench.cases.batches import LONG_S, dense_nbytes, dense_spec, loader
from bench.fleet import CONFIG, Pair
from bench.process import Agent
from bench.result import Row, Samples
from bench.rounds import Bench

GIGABYTE = dense_spec(8, 32768)
SMALL = dense_spec(8, 64)
RETURN_DEADLINE_S = 20.0
RETURNED = 0.02
TRIM_AFTER_S = 1
COLD_PEER_ROUNDS = 2


def cold_start(bench: Bench) -> list[Row]:
    """Case 11: fresh processes, while no other system of ours runs that `init()` could join."""
    bench.fleet.discard("ours")
    samples = Samples()
    peer_rounds = 1 if bench.options.quick else COLD_PEER_ROUNDS
    for number in range(bench.options.repeat):
        for system in bench.systems(["ours", "tq"]):
            if system in samples.failures or (system == "tq" and number >= peer_rounds):
                continue
            metrics = bench.guard(samples, system, partial(one_cold_start, bench, system))
            if metrics is not None:
                samples.add(system, metrics)
    init = samples.row(11, "tq.init() in a fresh process", "init_s").at_most("<= 1 s", 1.0)
    if (cluster := samples.quantile("tq", "cluster_s")) is not None:
        init.notes.append(f"tq: starting Ray before it takes another {cluster:.1f} s")
    imports = samples.row(11, "import transfer_queue after torch and tensordict", "import_s").at_most("<= 0.3 s", 0.3)
    if (bare := samples.quantile("ours", "bare_import_s")) is not None:
        imports.notes.append(f"ours: {bare * 1e3:.0f} ms of it before the first name is touched")
    return [init, imports]


def one_cold_start(bench: Bench, system: str) -> dict[str, Any]:
    """Times of one fresh process."""
    agent = bench.fleet.agent(f"{system}-cold", system)
    try:
        return agent.call("life.cold_start", LONG_S)
    finally:
        agent.end()


def memory(bench: Bench) -> list[Row]:
    """Case 12: growth by a batch of 1 GiB, as a share of it, in systems that were freshly started."""
    samples = Samples()
    config = copy.deepcopy(CONFIG)
    config["backend"] = {"SimpleStorage": {"trim_after_s": TRIM_AFTER_S}}
    for system in bench.systems(["ours", "tq"]):

        def measure(system: str = system) -> dict[str, float]:
            with bench.fleet.fresh(system, config if system == "ours" else CONFIG) as pair:
                return Weighing(bench, pair, system).run()

        metrics = bench.guard(samples, system, measure)
        if metrics is not None:
            samples.add(system, metrics)

    def row(what: str, metric: str, tq: str = "") -> Row:
        return samples.row(12, f"1.07 GB: {what}", metric, unit="x", tq=tq or metric)

    held = row("growth of the store", "store").at_most("<= 1.05", 1.05)
    held.notes.append(
        "ours: resident arena pages and the server's anonymous memory; tq: its cluster's anonymous memory"
    )
    returned = row("left in the store after clear", "left").at_most("<= 0.05", 0.05)
    if (wait := samples.quantile("ours", "left_after_s")) is not None:
        returned.notes.append(f"ours: {wait:.1f} s after the clear, with trim_after_s {TRIM_AFTER_S}")
    return [
        held,
        row("growth of the reader, get", "view").at_most("<= 0.02", 0.02),
        row("growth of the reader, get copy=True", "copied", tq="view").at_most("<= 1.05", 1.05),
        row("growth of the writer", "writer"),
        returned,
        samples.row(12, "1.07 GB: get", "get_s").at_most("<= 1 ms", 1e-3),
    ]


class Weighing:
    """One system's memory before, during and after a batch; bytes are Anonymous in smaps_rollup, and ours' arenas."""

    def __init__(self, bench: Bench, pair: Pair, system: str) -> None:
        self._bench = bench
        self._pair = pair
        self._system = system
        self._payload = dense_nbytes(GIGABYTE)

    def run(self) -> dict[str, float]:
        """Shares of the payload by which everything grew."""
        writer, reader = self._pair.writer, self._pair.reader
        for spec in (SMALL, GIGABYTE):
            loader(spec)(self._pair, self._system)
        with self._batch(SMALL):
            self._held(SMALL, copy=False)
            self._held(SMALL, copy=True)
        stored, wrote, rest = self._store(before=True), anonymous(writer), anonymous(reader)
        shares: dict[str, float] = {}
        with self._batch(GIGABYTE):
            shares["store"] = (self._store() - stored) / self._payload
            shares["writer"] = (anonymous(writer) - wrote) / self._payload
            shares["view"] = (self._held(GIGABYTE, copy=False) - rest) / self._payload
            if self._system == "ours":
                shares["copied"] = (self._held(GIGABYTE, copy=True) - rest) / self._payload
            shares["get_s"] = statistics.median(self._get(GIGABYTE, times=5, pause_s=0.3)["each_s"])
        shares["left_after_s"], shares["left"] = self._wait_for_return(stored)
        return shares

    @contextlib.contextmanager
    def _batch(self, spec: dict[str, Any]) -> Iterator[None]:
        where = {"spec": spec, "partition": "weighed"}
        self._pair.writer.call("bulk.put", LONG_S, **where)
        yield
        self._pair.writer.call("bulk.clear", LONG_S, **where)

    def _held(self, spec: dict[str, Any], copy: bool) -> int:
        """The reader's anonymous memory while it holds the batch and has read all its bytes."""
        self._get(spec, copy=copy, hold=True)
        held = anonymous(self._pair.reader)
        self._pair.reader.call("bulk.drop")
        return held

    def _get(self, spec: dict[str, Any], **how: Any) -> dict[str, Any]:
        return self._pair.reader.call("bulk.get", LONG_S, spec=spec, partition="weighed", **how)

    def _store(self, before: bool = False) -> int:
        """Bytes that the system's own processes hold. An arena's pages always count, also those touched `before`."""
        if self._system == "ours":
            answer = self._pair.writer.call("life.store_memory")
            return int(answer["server"] if before else answer["arena"] + answer["server"])
        return procfs.anonymous_nbytes(procfs.descendants(self._bench.fleet.cluster_pid()))

    def _wait_for_return(self, before: int) -> tuple[float, float]:
        """Seconds until the store is as small as before, or the deadline, and the share that is left."""
        start = time.monotonic()
        while True:
            left, waited = (self._store() - before) / self._payload, time.monotonic() - start
            if left <= RETURNED or waited > RETURN_DEADLINE_S:
                return waited, left
            time.sleep(0.1)


def anonymous(agent: Agent) -> int:
    """An agent's private anonymous bytes."""
    return int(agent.call("life.own_memory")["Anonymous"])
