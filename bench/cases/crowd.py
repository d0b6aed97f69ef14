"""Many processes at the same moment; cases 17 and 18."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from bench.cases.batches import LONG_S, dense_nbytes, dense_spec, loader
from bench.fleet import Pair
from bench.process import Agent
from bench.result import Row, Samples, ratio
from bench.rounds import Bench

PROCESSES = 8
THREADS = (1, 4, 16)
SECONDS = 2.0
CROWD_ROUNDS = 3
RANKS = 4
WARM_GETS = 8
"""One after another in a process, so that waking all at the same moment matters little."""
LEAD_NS = 500_000_000
"""From the command to the moment at which all begin."""


def together(agents: Sequence[Agent], op: str, arguments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let every agent do its part, the ones that take `begin_ns` at the same moment."""
    sent = [agent.send(op, **args) for agent, args in zip(agents, arguments, strict=True)]
    return [agent.receive(operation, LONG_S) for agent, operation in zip(agents, sent, strict=True)]


def clients(bench: Bench) -> list[Row]:
    """Case 17: 8, 32 and 128 clients of the same service: 8 processes of 1, 4 and 16 clients each."""
    crews: dict[str, list[Agent]] = {}
    with contextlib.ExitStack() as stack:

        def prepare(pair: Pair, system: str) -> None:
            del pair
            crews[system] = stack.enter_context(bench.fleet.crew(system, PROCESSES))

        def body(pair: Pair, system: str, number: int) -> dict[str, Any]:
            del pair
            metrics: dict[str, Any] = {}
            for threads in THREADS:
                for name, value in crowded(crews[system], threads, f"crowd-{number}").items():
                    metrics[f"{name}_{threads}"] = value
            return metrics

        samples = bench.rounds(body, systems=["ours", "tq"], prepare=prepare, at_most=CROWD_ROUNDS)
    return [row for threads in THREADS for row in crowd_rows(samples, threads)]


def crowded(agents: Sequence[Agent], threads: int, partition: str) -> dict[str, Any]:
    """Operations a second, failures and p99 of so many clients in every process."""
    together(agents, "crowd.open_clients", [{"num": threads}] * len(agents))
    begin = time.monotonic_ns() + LEAD_NS
    how = {"partition": partition, "num": threads, "begin_ns": begin, "seconds": SECONDS}
    found = together(agents, "crowd.mixed", [how] * len(agents))
    together(agents, "crowd.close_clients", [{}] * len(agents))
    elapsed = (max(one["end_ns"] for one in found) - begin) / 1e9
    taken = sorted(s for one in found for s in one["each_s"])
    reasons = [one["first_failure"] for one in found if one["first_failure"]]
    return {
        "ops": sum(one["ops"] for one in found) / elapsed,
        "failures": sum(one["failures"] for one in found),
        "cpu_s": sum(one["cpu_s"] for one in found) / max(1, sum(one["ops"] for one in found)),
        "p99": taken[int(0.99 * len(taken))],
        "reasons": reasons[:1],
    }


def crowd_rows(samples: Samples, threads: int) -> list[Row]:
    what = f"{PROCESSES * threads} clients, one-row put, get, list, clear"
    ops = samples.row(17, what, f"ops_{threads}", unit="ops/s").faster_than("tq", 10)
    ops.notes.append(f"{PROCESSES} processes of {threads} threads, each thread a client with a session of its own")
    for system in samples.by_system:
        if (spent := samples.quantile(system, f"cpu_s_{threads}")) is not None:
            ops.notes.append(f"{system}: {spent * 1e6:.0f} us of a client's processor time an operation")
    failed = samples.row(17, f"{what}: failures", f"failures_{threads}", unit="count", share=1.0).at_most("0", 0.0)
    for system in samples.by_system:
        failed.notes += [f"{system}: {reason}" for reason in samples.of(system, f"reasons_{threads}")[:1]]
    return [ops, failed, samples.row(17, f"{what}: p99", f"p99_{threads}")]


def ranks(bench: Bench) -> list[Row]:
    """Case 18: 4 processes get a quarter of 302 MB each at the same moment, and one process gets all of it."""
    spec = dense_spec(9, 2048 if bench.options.quick else 8192)
    nbytes, crews = dense_nbytes(spec), {}
    load = loader(spec)
    with contextlib.ExitStack() as stack:

        def prepare(pair: Pair, system: str) -> None:
            load(pair, system)
            pair.writer.call("bulk.put", LONG_S, spec=spec, partition="ranks")
            crews[system] = stack.enter_context(bench.fleet.crew(system, RANKS))
            together(crews[system], "bulk.load", [{"spec": spec}] * RANKS)

        def body(pair: Pair, system: str, number: int) -> dict[str, Any]:
            del pair, number
            metrics = rank_metrics(crews[system], system, spec)
            if system == "ours":
                for threads in (1, 2):
                    copied = bench.fleet.plain().call("crowd.memcpy", nbytes=nbytes, threads=threads)
                    metrics[f"memcpy_{threads}"] = nbytes / copied["s"]
            return metrics

        def cleanup(pair: Pair, system: str) -> None:
            del system
            pair.writer.call("bulk.clear", LONG_S, spec=spec, partition="ranks")

        samples = bench.rounds(body, systems=["ours", "tq"], prepare=prepare, cleanup=cleanup, at_most=5)
    return rank_rows(samples, f"{nbytes / 1e6:.0f} MB, get copy=True")


def rank_metrics(agents: Sequence[Agent], system: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Bytes a second of one reader, and of all at once.

    Ours also in sessions that have mapped nothing yet ("_first"), and with one thread ("single"): a copying get uses
    several threads by default.
    """
    metrics, times = {}, 1
    if system == "ours":
        together(agents[:1], "crowd.rejoin", [{"threads": 1}])
        shared(agents[:1], spec)
        metrics["single"] = shared(agents[:1], spec, WARM_GETS)
        together(agents, "crowd.rejoin", [{}] * len(agents))
        metrics["all_first"] = shared(agents, spec)
        together(agents[:1], "crowd.rejoin", [{}])
        metrics["one_first"] = shared(agents[:1], spec)
        shared(agents, spec)
        times = WARM_GETS
    return metrics | {"one": shared(agents[:1], spec, times), "all": shared(agents, spec, times)}


def shared(agents: Sequence[Agent], spec: dict[str, Any], times: int = 1) -> float:
    """Bytes a second of all agents together, each getting its share."""
    begin = time.monotonic_ns() + LEAD_NS
    common = {"spec": spec, "partition": "ranks", "parts": len(agents), "begin_ns": begin, "times": times}
    found = together(agents, "crowd.share", [{**common, "part": part} for part in range(len(agents))])
    elapsed_ns = int(max(one["end_ns"] for one in found) - min(one["begin_ns"] for one in found))
    return times * dense_nbytes(spec) / (elapsed_ns / 1e9)


def rank_rows(samples: Samples, what: str) -> list[Row]:
    rows = []
    for suffix, when in (("", "warm"), ("_first", "first touch")):
        one = samples.row(18, f"{what}, {when}: one reader", f"one{suffix}", unit="B/s")
        every = samples.row(18, f"{what}, {when}: {RANKS} readers of a quarter each", f"all{suffix}", unit="B/s")
        every.against(">= 1.6 x one reader", ratio(every.values.get("ours"), one.values.get("ours")), 1.6)
        rows += [one, every]
    single = samples.row(18, f"{what}, warm: one reader with one thread", "single", unit="B/s")
    copied = [samples.quantile("ours", f"memcpy_{threads}") or 0.0 for threads in (1, 2)]
    rows[1].notes.append(
        f"memcpy in the same rounds: {copied[0] / 1e9:.1f} GB/s with one thread, {copied[1] / 1e9:.1f} GB/s with two; "
        "one reader copies with several threads by default, so this bounds both"
    )
    return [*rows, single]
