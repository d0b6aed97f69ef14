"""Two hosts and more, as network namespaces of this machine; cases 19 and 20."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.cases.batches import LONG_S, dense_nbytes, dense_spec
from bench.fleet import CONFIG, Fleet
from bench.process import Agent
from bench.result import Row, Samples, ratio
from bench.rounds import Bench
from tools.netns import Switch, allowed

STREAMS = (1, 4)
LEAST_ROUNDS = 5
RELAYED = 250


@dataclass
class Hosts:
    """An agent on each of three hosts: 1 has the controller, 2 a unit that joined, 3 only a client."""

    agents: dict[int, Agent] = field(default_factory=dict)
    ports: dict[int, int] = field(default_factory=dict)
    """Of plain sockets, by host."""


def address(host: int) -> str:
    return f"10.77.0.{host}"


def _tokens() -> dict[str, str]:
    return {"TQ_TOKEN": secrets.token_hex(16), "TQ_UNIT_TOKEN": secrets.token_hex(16)}


@contextlib.contextmanager
def hosts(fleet: Fleet) -> Iterator[Hosts]:
    """Three hosts and a service over them; all of it is gone afterwards."""
    found, tokens = Hosts(), _tokens()
    with contextlib.ExitStack() as stack:
        switch = Switch()
        stack.callback(switch.close)
        for host in (1, 2, 3):
            prefix = ("ip", "netns", "exec", switch.plug_in(host))
            found.agents[host] = fleet.agent(f"host-{host}", "ours", prefix, tokens)
            stack.callback(found.agents[host].end)
            found.ports[host] = found.agents[host].call("network.serve_raw", host=address(host))["port"]
        config: dict[str, Any] = {**CONFIG, "server": {"host": address(1)}}
        tcp = found.agents[1].call("life.serve", options={"config": config})["tcp"]
        joining = {**CONFIG, "server": {"join": f"tcp:{tcp}"}}
        found.agents[2].call("life.serve", options={"config": joining})
        found.agents[3].call("network.attach", address=f"tcp:{tcp}")
        yield found


def two_hosts(bench: Bench) -> list[Row]:
    """Case 19: what a host gets from another, and puts there, beside plain sockets between the same two."""
    spec = dense_spec(9, 2048 if bench.options.quick else 8192)
    nbytes = dense_nbytes(spec)
    if not allowed():
        return [Row(case=19, what="two hosts", skipped="making network namespaces needs root and iproute2")]
    samples = Samples()
    with hosts(bench.fleet) as found:
        bench.guard(samples, "ours", partial(load, found, spec))
        tasks = list(steps(found, spec, nbytes).items()) if not samples.failures else []
        for number in range(-1, max(LEAST_ROUNDS, bench.options.repeat)):
            turn = number % max(1, len(tasks))
            for name, step in tasks[turn:] + tasks[:turn]:
                metrics = bench.guard(samples, "ours", partial(measured, name, step)) if not samples.failures else None
                if metrics is not None and number >= 0:
                    samples.add("ours", metrics)
    return [network_row(samples, metric, what, raw, nbytes) for metric, what, raw in DIRECTIONS]


DIRECTIONS = (
    ("get_12", "get: controller's host -> joined host", "12"),
    ("get_21", "get: joined host -> controller's host", "21"),
    ("get_13", "get: controller's host -> host without a unit", "13"),
    ("put_31", "put: host without a unit -> controller's host", "31"),
)


def load(found: Hosts, spec: dict[str, Any]) -> None:
    """Have the batch of each host in a partition of its name, and its sums where it is read."""
    for agent in found.agents.values():
        agent.call("bulk.load", LONG_S, spec=spec)
        agent.call("bulk.expect", LONG_S, spec=spec)
    for host in (1, 2):
        found.agents[host].call("bulk.put", LONG_S, spec=spec, partition=f"on-{host}")


def steps(found: Hosts, spec: dict[str, Any], nbytes: int) -> dict[str, Callable[[], float]]:
    """By metric, what returns its seconds."""
    agents = found.agents

    def get(source: int, target: int) -> float:
        answer = agents[target].call("bulk.get", LONG_S, spec=spec, partition=f"on-{source}")
        return float(answer["each_s"][0])

    def put() -> float:
        seconds = agents[3].call("bulk.put", LONG_S, spec=spec, partition="from-3")["each_s"][0]
        agents[1].call("bulk.get", LONG_S, spec=spec, partition="from-3")
        agents[3].call("bulk.clear", LONG_S, spec=spec, partition="from-3")
        return float(seconds)

    def raw(source: int, target: int, streams: int) -> float:
        where = {"host": address(source), "port": found.ports[source], "nbytes": nbytes, "streams": streams}
        return float(agents[target].call("network.receive_raw", LONG_S, **where)["s"])

    made: dict[str, Callable[[], float]] = {"put_31": put}
    for source, target in ((1, 2), (2, 1), (1, 3), (3, 1)):
        for streams in STREAMS:
            made[f"raw{streams}_{source}{target}"] = partial(raw, source, target, streams)
        if source != 3:
            made[f"get_{source}{target}"] = partial(get, source, target)
    return made


def measured(name: str, step: Callable[[], float]) -> dict[str, float]:
    return {name: step()}


def network_row(samples: Samples, metric: str, what: str, direction: str, nbytes: int) -> Row:
    """Our bytes a second, and the best that plain sockets did in the same direction."""
    seconds = samples.quantile("ours", metric)
    row = Row(case=19, what=f"{nbytes / 1e6:.0f} MB, {what}", unit="B/s", failures=dict(samples.failures))
    if seconds is None:
        row.failures.setdefault("ours", "not measured")
        return row
    row.values["ours"] = nbytes / seconds
    row.samples["ours"] = [nbytes / one for one in samples.of("ours", metric)]
    raw = {n: samples.quantile("ours", f"raw{n}_{direction}") for n in STREAMS}
    rates = {n: nbytes / one for n, one in raw.items() if one is not None}
    row.notes.append(", ".join(f"plain sockets, {n} streams: {rate / 1e9:.2f} GB/s" for n, rate in rates.items()))
    return row.against(">= 0.8 x sockets", ratio(row.values["ours"], max(rates.values(), default=None)), 0.8)


def relay(bench: Bench) -> list[Row]:
    """Case 20: one-row operations at the controller's host, and at a host whose own server passes them on over TCP."""
    tokens, samples = _tokens(), Samples()
    with contextlib.ExitStack() as stack:
        agents: dict[str, Agent] = {}

        def start() -> None:
            for name in ("here", "there"):
                agents[name] = bench.fleet.agent(f"relay-{name}", "ours", environment=tokens)
                stack.callback(agents[name].end)
            config = {**CONFIG, "server": {"host": "127.0.0.1"}}
            tcp = agents["here"].call("life.serve", options={"config": config})["tcp"]
            agents["there"].call("life.serve", options={"config": {**CONFIG, "server": {"join": f"tcp:{tcp}"}}})

        def turn(name: str, number: int) -> dict[str, Any]:
            where: dict[str, Any] = {"partition": f"relay-{name}-{number}", "num": RELAYED}
            metrics = {f"put_{name}": agents[name].call("calls.put_rows", **where)["each_s"]}
            metrics[f"get_{name}"] = agents[name].call("calls.get_rows", **where)["each_s"]
            agents[name].call("calls.clear_keys", **where)
            return metrics

        bench.guard(samples, "ours", start)
        for number in range(-1, bench.options.repeat):
            for name in ("here", "there") if number % 2 else ("there", "here"):
                if not samples.failures:
                    metrics = bench.guard(samples, "ours", partial(turn, name, number))
                    samples.add("ours", metrics if number >= 0 and metrics else {})
    places = {"here": "on the controller's host", "there": "through a unit that joined over loopback TCP"}
    return [
        samples.row(20, f"one-row {call}, {place}: p50", f"{metric}_{name}")
        for metric, call in (("put", "kv_put"), ("get", "kv_batch_get"))
        for name, place in places.items()
    ]
