"""Weights to running servers, beside the usual other ways; cases 22 to 26, and 29."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.process import Agent
from bench.result import Row, Samples, ratio
from bench.rounds import Bench

LONG_S = 600.0
SIZES = (100_000_000, 500_000_000, 1_000_000_000, 2_000_000_000)
FANOUT = (1, 2, 4, 8)
FANOUT_NBYTES = 1_000_000_000
TOGETHER_NBYTES = 500_000_000
PUBLISHED_NBYTES = 400_000_000
STEPS = ("total", "pack", "update", "commit")
MEMORY = Path("/dev/shm")
ROUNDS = 5
Way = Callable[[], dict[str, float]]
OURS = {"swap": ("shm", "swap"), "in place": ("shm", "in place"), "tcp": ("tcp", "in place")}
PEERS = {
    "tensors": "gloo broadcast of each tensor",
    "packed": "gloo broadcast, packed in two buffers",
    "files": "safetensors file in memory, reloaded",
    "pickle": "torch.save over HTTP",
}


@contextlib.contextmanager
def agents(bench: Bench, *names: str) -> Iterator[list[Agent]]:
    made: list[Agent] = []
    try:
        for name in names:
            made.append(bench.fleet.agent(f"weights-{name}", "plain"))
        yield made
    finally:
        for agent in made:
            agent.end()


def same(trainer: Agent, server: Agent) -> None:
    """Fails when the server's weights are not the trainer's."""
    expected = trainer.call("weights.root", LONG_S)["root"]
    assert server.call("weights.root", LONG_S)["root"] == expected, "the weights differ"


def updates(bench: Bench) -> list[Row]:
    """Case 22: a full update of one server on the same host, by size and way."""
    rows: list[Row] = []
    bench.fleet.rest()  # the largest models need all memory
    for nbytes in SIZES[:2] if bench.options.quick else SIZES:
        bench.say(f"weights of {nbytes / 1e9:.1f} GB")
        rows += update_rows(measured(bench, nbytes), nbytes)
    return rows


def measured(bench: Bench, nbytes: int) -> Samples:
    """Rounds of every way and a memcpy of as many bytes, in turn; of large models, which do not fit into memory so many
    times, all rounds of one way after those of another."""
    samples = Samples()
    opened: list[Callable[[], contextlib.AbstractContextManager[dict[str, Way]]]] = [
        partial(our_way, bench, nbytes, name) for name in OURS
    ]
    are_together = nbytes <= TOGETHER_NBYTES
    if bench.options.peers:
        names = list(PEERS)
        opened += [partial(other_ways, bench, nbytes, some) for some in ([names] if are_together else zip(names))]
    for group in [opened] if are_together else [[one] for one in opened]:
        bench.guard(samples, "ours", partial(rounds, bench, samples, nbytes, group))
    return samples


def rounds(bench: Bench, samples: Samples, nbytes: int, opened: list[Any]) -> None:
    with contextlib.ExitStack() as stack:
        ways: dict[str, Way] = {}
        for one in opened:
            ways |= stack.enter_context(one())
        (copier,) = stack.enter_context(agents(bench, "memcpy"))
        ways["plain"] = lambda: {"memcpy": copier.call("bulk.memcpy", LONG_S, nbytes=nbytes)["s"]}
        names = list(ways)
        for number in range(-3, min(ROUNDS, bench.options.repeat)):  # three warm up: memory is used in turn
            for name in names[number % len(names) :] + names[: number % len(names)]:
                found = bench.guard(samples, name, ways[name]) if name not in samples.failures else None
                if found is not None and number >= 0:
                    samples.add(name, found)


@contextlib.contextmanager
def our_way(bench: Bench, nbytes: int, name: str) -> Iterator[dict[str, Way]]:
    engine, target = OURS[name]
    with agents(bench, f"{engine}-trainer", f"{engine}-server") as (trainer, server):
        for seed, agent in enumerate((trainer, server)):
            agent.call("weights.build", LONG_S, nbytes=nbytes, seed=seed)
        url = server.call("weights.receive", engine=engine, target=target)["url"]
        trainer.call("weights.train", engine=engine, urls=[url], info={})

        def update() -> dict[str, float]:
            trainer.call("weights.change", LONG_S, every=1)
            server.call("weights.seen")
            sent = trainer.call("weights.send", LONG_S)
            seen = server.call("weights.seen")
            return {step: sent[step] for step in STEPS} | seen

        update()
        same(trainer, server)
        yield {name: update}
        same(trainer, server)
        trainer.call("weights.stop_training")
        server.call("weights.stop_receiving")


@contextlib.contextmanager
def other_ways(bench: Bench, nbytes: int, names: Sequence[str]) -> Iterator[dict[str, Way]]:
    folder = tempfile.mkdtemp(prefix="tqb-weights-", dir=MEMORY)
    try:
        with agents(bench, "peer-trainer", "peer-server") as (trainer, server):
            for seed, agent in enumerate((trainer, server)):
                agent.call("weights.build", LONG_S, nbytes=nbytes, seed=seed)
            both(trainer, server, "weights_peers.meet", port=free_port())
            port = server.call("weights_peers.serve")["port"]
            ways: dict[str, Way] = {
                "tensors": partial(collective, trainer, server, "weights_peers.broadcast"),
                "packed": partial(collective, trainer, server, "weights_peers.broadcast_packed"),
                "files": partial(reloaded, trainer, server, folder),
                "pickle": partial(posted, trainer, port),
            }
            yield {name: ways[name] for name in names}
            same(trainer, server)
            server.call("weights_peers.stop_serving")
            both(trainer, server, "weights_peers.part")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def both(trainer: Agent, server: Agent, op: str, **more: Any) -> float:
    """The operation in both at once, with `rank` where it is to be given; the longer time."""
    ranks = [{"rank": number} if op.endswith("meet") else {} for number in (0, 1)]
    asked = [(agent, agent.send(op, **more, **rank)) for agent, rank in zip((trainer, server), ranks, strict=True)]
    return max(agent.receive(number, LONG_S).get("s", 0.0) for agent, number in asked)


def collective(trainer: Agent, server: Agent, op: str) -> dict[str, float]:
    """The live weights are written all along, so requests are held off for all of it."""
    seconds = both(trainer, server, op)
    return {"total": seconds, "pause": seconds}


def reloaded(trainer: Agent, server: Agent, folder: str) -> dict[str, float]:
    saved = trainer.call("weights_peers.save", LONG_S, folder=folder)["s"]
    loaded = server.call("weights_peers.reload", LONG_S, folder=folder)["s"]
    return {"total": saved + loaded, "pause": loaded}


def posted(trainer: Agent, port: int) -> dict[str, float]:
    found = trainer.call("weights_peers.post", LONG_S, port=port)
    return {"total": found["s"], "pause": found["pause"]}


def update_rows(samples: Samples, nbytes: int) -> list[Row]:
    what, memcpy = f"weights, {nbytes / 1e9:.2g} GB", samples.quantile("plain", "memcpy")
    rows: list[Row] = []
    for metric in ("total", "pause"):
        for way, (engine, target) in OURS.items():
            row = Row(case=22, what=f"{what}: {metric}, {engine}, {target}", memcpy=memcpy)
            value = samples.quantile(way, metric)
            if value is None:
                row.failures["ours"] = samples.failures.get(way, "not measured")
            else:
                row.values["ours"], row.samples["ours"] = value, samples.of(way, metric)
            rows.append(row)
        others = {way: samples.quantile(way, metric) for way in PEERS}
        rows[-1].notes.append(
            "; ".join(
                f"{text} {value * 1e3:.0f} ms of {len(samples.of(way, metric))}"
                for (way, text), value in zip(PEERS.items(), others.values(), strict=True)
                if value is not None
            )
        )
    rows[0].of_memcpy(0.667)
    rows[3].at_most("<= 5 ms", 0.005)
    rows[4].of_memcpy(0.833)
    for row, way in zip(rows[:3], OURS, strict=True):
        row.notes.append(said(samples, way))
    for row, way in zip(rows[3:], OURS, strict=True):
        waited = samples.quantile(way, "wait", 1.0) or 0.0
        row.notes.append(f"longest wait of a request, one a millisecond, during any update: {waited * 1e3:.1f} ms")
    return rows


def said(samples: Samples, way: str) -> str:
    """Medians of the steps."""
    return ", ".join(f"{step} {(samples.quantile(way, step) or 0.0) * 1e3:.1f} ms" for step in STEPS[1:])


def fan_out(bench: Bench) -> list[Row]:
    """Case 23: one version to 1, 2, 4 and 8 servers of this host."""
    found, nbytes = Samples(), (FANOUT_NBYTES // 10 if bench.options.quick else FANOUT_NBYTES)
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(agents(bench, *(f"server-{number}" for number in range(max(FANOUT)))))
        urls = []
        for server in servers:
            server.call("weights.build", LONG_S, nbytes=nbytes, seed=1)
            urls.append(server.call("weights.receive", engine="shm", target="swap", every_s=0.02)["url"])
        for num in FANOUT:
            # Servers follow one trainer at a time, so the sizes are not interleaved.
            with agents(bench, f"trainer-{num}") as (trainer,):
                trainer.call("weights.build", LONG_S, nbytes=nbytes, seed=num)
                trainer.call("weights.train", LONG_S, engine="shm", urls=urls[:num], info={})
                for number in range(-3, max(ROUNDS, bench.options.repeat)):
                    trainer.call("weights.change", LONG_S, every=1)
                    sent = bench.guard(found, str(num), partial(trainer.call, "weights.send", LONG_S))
                    if sent is not None and number >= 0:
                        found.add(str(num), {step: sent[step] for step in STEPS})
                same(trainer, servers[num - 1])
                trainer.call("weights.stop_training")
        for server in servers:
            server.call("weights.stop_receiving")
    one = found.quantile("1", "total")
    rows = []
    for num in FANOUT:
        row = Row(case=23, what=f"weights, {nbytes / 1e9:.2g} GB to {num} servers, shm, swap: total")
        value = found.quantile(str(num), "total")
        if value is None:
            row.failures["ours"] = found.failures.get(str(num), "not measured")
        else:
            row.values["ours"], row.samples["ours"] = value, found.of(str(num), "total")
        row.notes.append(said(found, str(num)))
        if num > 1:
            row.within("<= 1.3 x of one", ratio(value, one), 1.3)
        rows.append(row)
    return rows


def late(bench: Bench) -> list[Row]:
    """Case 24: a server that comes late, from the trainer and, when that is dead, from two other servers."""
    nbytes, samples = (100_000_000 if bench.options.quick else 500_000_000), Samples()
    with agents(bench, "trainer", "a", "b", "late", "source") as (trainer, a, b, newcomer, source):
        for seed, agent in enumerate((trainer, a, b, newcomer)):
            agent.call("weights.build", LONG_S, nbytes=nbytes, seed=seed)
        urls = [one.call("weights.receive", engine="tcp", target="in place")["url"] for one in (a, b)]
        newcomer.call("weights.receive", engine="tcp", target="in place")
        told = trainer.call("weights.train", engine="tcp", urls=urls, info={})["init_info"]
        port = source.call("network.serve_raw", host="127.0.0.1")["port"]
        raw = {"host": "127.0.0.1", "port": port, "nbytes": nbytes, "streams": 1}
        peers = [one.call("weights.lend", token=told["token"])["address"] for one in (a, b)]
        for number in range(-2, min(ROUNDS, bench.options.repeat)):
            trainer.call("weights.change", LONG_S, every=1)
            trainer.call("weights.send", LONG_S)
            seconds = {"trainer": newcomer.call("weights.join", LONG_S, info=told, peers=[])["s"]}
            trainer.call("weights.change", LONG_S, every=1)
            trainer.call("weights.send", LONG_S)
            alone = {**told, "address": ""}
            seconds["peers"] = newcomer.call("weights.join", LONG_S, info=alone, peers=peers)["s"]
            seconds["raw"] = newcomer.call("network.receive_raw", LONG_S, **raw)["s"]
            if number >= 0:
                samples.add("ours", seconds)
        same(trainer, newcomer)
        trainer.kill()
        dead = newcomer.call("weights.join", LONG_S, info={**told, "address": ""}, peers=peers)["s"]
        assert dead < LONG_S
    rows = []
    for metric, text in (("trainer", "the trainer"), ("peers", "two servers (the trainer need not live)")):
        row = samples.row(24, f"weights, {nbytes / 1e9:.2g} GB: a late server, from {text}", metric)
        plain = samples.quantile("ours", "raw")
        row.notes.append(f"a plain socket over loopback: {(plain or 0) * 1e3:.0f} ms")
        row.within("<= 1.5 x socket", ratio(row.values.get("ours"), plain), 1.5)
        rows.append(row)
    return rows


def difference(bench: Bench) -> list[Row]:
    """Case 25: 1 % of the elements changed; the difference against all of it, over TCP."""
    nbytes, samples = (100_000_000 if bench.options.quick else 500_000_000), Samples()
    with agents(bench, "trainer", "server") as (trainer, server):
        for seed, agent in enumerate((trainer, server)):
            agent.call("weights.build", LONG_S, nbytes=nbytes, seed=seed)
        url = server.call("weights.receive", engine="tcp", target="in place")["url"]
        trainer.call("weights.train", engine="tcp", urls=[url], info={"anchor_every": 1000})
        for number in range(-2, bench.options.repeat):
            found: dict[str, float] = {}
            for name, full in (("full", True), ("delta", False)):
                trainer.call("weights.change", LONG_S, every=100)
                sent = trainer.call("weights.send", LONG_S, full=full)
                assert sent["full"] == float(full)
                found |= {name: sent["total"], f"{name}_nbytes": sent["nbytes"]}
                found |= {f"{name}_pause": server.call("weights.seen")["pause"]}
            if number >= 0:
                samples.add("ours", found)
        same(trainer, server)
    what, whole = f"weights, {nbytes / 1e9:.2g} GB, 1 % changed, tcp, in place", samples.quantile("ours", "full")
    time = samples.row(25, f"{what}: total", "delta")
    time.notes.append(f"all of it: {(whole or 0) * 1e3:.0f} ms")
    time.within("<= 1/3 full", ratio(time.values.get("ours"), whole), 1 / 3)
    size = samples.row(25, f"{what}: bytes", "delta_nbytes", unit="count")
    share = ratio(size.values.get("ours"), samples.quantile("ours", "full_nbytes"))
    size.within("<= 1/20 full", share, 1 / 20)
    pause = samples.row(25, f"{what}: pause", "delta_pause")
    pause.notes.append(f"all of it: {(samples.quantile('ours', 'full_pause') or 0) * 1e3:.1f} ms")
    return [time, size, pause]


def recovery(bench: Bench) -> list[Row]:
    """Case 26: after an update that no server can take, until all serve and take the next one."""
    samples = Samples()
    with agents(bench, "trainer", "server") as (trainer, server):
        for seed, agent in enumerate((trainer, server)):
            agent.call("weights.build", LONG_S, nbytes=SIZES[1], seed=seed)
        url = server.call("weights.receive", engine="shm", target="swap")["url"]
        trainer.call("weights.train", engine="shm", urls=[url], info={})
        for number in range(-1, bench.options.repeat):
            trainer.call("weights.send", LONG_S)
            found = trainer.call("weights.fail_and_recover", LONG_S)
            if number >= 0:
                samples.add("ours", {"s": found["s"]})
            trainer.call("weights.send", LONG_S)
        same(trainer, server)
    return [samples.row(26, "recovery after a failed update", "s").at_most("<= 0.1 s", 0.1)]


def published(bench: Bench) -> list[Row]:
    """Case 29: `publish` until it returns, when nothing and when a version is on its way, beside packing alone; of all
    of the weights, and of what changed in them."""
    rows: list[Row] = []
    for engine, changed, every in (("shm", "", 1), ("tcp", "", 1), ("tcp", ", 1 % changed", 100)):
        samples, what = Samples(), f"weights, {PUBLISHED_NBYTES / 1e9:.2g} GB{changed}, {engine}: publish returned"
        info = {"anchor_every": 1000} if changed else {}
        with agents(bench, "trainer", "server") as (trainer, server):
            for seed, agent in enumerate((trainer, server)):
                agent.call("weights.build", LONG_S, nbytes=PUBLISHED_NBYTES, seed=seed)
            url = server.call("weights.receive", engine=engine, target="swap", every_s=0.02)["url"]
            trainer.call("weights.train", engine=engine, urls=[url], info=info)
            bench.guard(samples, "ours", partial(publish_rounds, bench, samples, trainer, every))
            trainer.call("weights.publish", LONG_S)
            same(trainer, server)
            trainer.call("weights.stop_training")
            server.call("weights.stop_receiving")
        packing = samples.quantile("ours", "pack")
        for metric, when in (("idle", ""), ("busy", ", another version on its way")):
            row = samples.row(29, what + when, metric)
            row.within("<= 1.3 x packing", ratio(row.values.get("ours"), packing), 1.3)
            row.notes.append(f"packing alone: {(packing or 0) * 1e3:.1f} ms")
            rows.append(row)
        rows.append(samples.row(29, what.replace("returned", "served by all"), "served"))
    return rows


def publish_rounds(bench: Bench, samples: Samples, trainer: Agent, every: int) -> None:
    ways: dict[str, Callable[[], dict[str, float]]] = {
        "pack": lambda: {"pack": trainer.call("weights.pack", LONG_S)["s"]},
        "idle": lambda: _named(trainer.call("weights.publish", LONG_S), returned="idle", total="served", full="full"),
        "busy": lambda: _named(trainer.call("weights.publish", LONG_S, count=2), returned="busy"),
    }
    names = list(ways)
    for number in range(-3, bench.options.repeat):
        found = dict[str, float]()
        for name in names[number % 3 :] + names[: number % 3]:
            trainer.call("weights.change", LONG_S, every=every)
            found |= ways[name]()
        assert number < 0 or found["full"] == float(every == 1)
        if number >= 0:
            samples.add("ours", found)


def _named(found: Mapping[str, float], **names: str) -> dict[str, float]:
    return {name: found[key] for key, name in names.items()}
