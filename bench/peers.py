"""An update of replicas on hosts of their own, behind links of a bounded speed: alone, each from the trainer, by peers.

    python -m bench.peers [--rounds 3] [--replicas 8] [--mbits 1000] [--mbytes 256] [--ways one,plain,peers,gloo,delta]

Hosts are network namespaces on one switch (root, iproute2), each with a link of its own, limited in both directions by
tc. The model is in bf16: an embedding and a head with a 16th of the bytes each, and matrices. `one` is one replica,
`plain` all of them without peers, `peers` with (the default), `gloo` a broadcast of the same bytes by
torch.distributed, in pieces of 4 MiB, which no receiver checks. `one-delta` and `delta` are `one` and `peers` where
every 100th element has changed and differences are sent. Ways take turns in each round; each has one update that does
not count. Printed are medians and p95 of the update (until every replica has verified) and the median of all of it
(from packing to the last commit), how often the trainer sent the model (by the counter of its link), and the share of
the processors that all of it took.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.fresh_memory import touch_memory
from tools.netns import Switch, allowed

WAYS = ("one", "plain", "peers", "gloo", "one-delta", "delta")
EVERY, ALL_DELTAS = 100, 1000
PIECE_NBYTES = 4 << 20
CLONE_NEWNET = 0x40000000
PORT = 7100
DEADLINE_S = 300.0


# in the hosts


def shapes(mbytes: int) -> dict[str, int]:
    """Elements of each tensor."""
    whole = mbytes << 19
    found = {"embed": whole // 16, "head": whole // 16}
    return found | {f"layer.{number}": whole * 14 // 16 // 112 for number in range(112)}


class Host:
    """What an agent can be asked to do: its public methods."""

    def __init__(self, ip: str, mbytes: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._ip = ip
        self._sizes = shapes(mbytes)
        self._engine: Any = None

    def weights(self) -> Any:
        import torch

        return {name: torch.zeros(num, dtype=torch.bfloat16) for name, num in self._sizes.items()}

    def receive(self) -> None:
        import torch

        from transfer_queue.weights import InPlace, Receiver
        from transfer_queue.weights.transport.tcp import TcpEngine

        self._module = torch.nn.Module()
        for name, tensor in self.weights().items():
            self._module.register_buffer(name.replace(".", "_"), tensor)
        self._engine = TcpEngine(Receiver(InPlace(self._module)))

    def call(self, name: str, *args: Any) -> None:
        getattr(self._engine, name)(*args)

    def lead(self, peers: bool | None, anchor_every: int) -> None:
        from transfer_queue.weights import StateDictSource
        from transfer_queue.weights.transport.tcp import TcpTrainer

        self._weights = {name.replace(".", "_"): tensor for name, tensor in self.weights().items()}
        told = {"host": self._ip, "peers": peers, "anchor_every": anchor_every}
        self._trainer = TcpTrainer.trainer_init(told, client=Calls(), source=StateDictSource(self._weights))  # type: ignore[arg-type]

    def send(self, every: int) -> dict[str, float]:
        for tensor in self._weights.values():
            tensor[::every] += 1
        report = self._trainer.send_weights(deadline_s=DEADLINE_S)
        return {"update_s": report.update_s, "pack_s": report.pack_s}

    def end(self) -> None:
        self._trainer.shutdown()

    def group(self, rank: int, world: int, port: int) -> None:
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        dist.init_process_group("gloo", init_method=f"tcp://10.77.0.1:{port}", rank=rank, world_size=world)
        self._flat: Any = None

    def broadcast(self) -> float:
        import torch
        import torch.distributed as dist

        if self._flat is None:
            self._flat = torch.zeros(sum(self._sizes.values()), dtype=torch.bfloat16)
        dist.barrier()
        begun = time.monotonic()
        for piece in self._flat.split(PIECE_NBYTES // 2):
            dist.broadcast(piece, 0)
        dist.barrier()
        return time.monotonic() - begun


class Calls:
    """The trainer's client: the program that started the hosts makes the calls."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> None:
            print(json.dumps({"call": name, "args": args}), flush=True)
            fault = json.loads(sys.stdin.readline())
            if fault:
                raise RuntimeError(fault)

        if name not in CALLS:
            raise AttributeError(name)
        return call


CALLS = {
    "init_weight_transfer_engine": "init_transfer_engine", "start_weight_update": "start_weight_update",
    "update_weights": "update_weights", "finish_weight_update": "finish_weight_update",
}  # fmt: skip


def agent(space: str, ip: str, mbytes: int) -> None:
    """Do what stdin says, in that namespace."""
    fd = os.open(f"/var/run/netns/{space}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns {space}")
    host = Host(ip, mbytes)
    for line in sys.stdin:
        name, *args = json.loads(line)
        print(json.dumps({"result": getattr(host, name)(*args)}), flush=True)


# around them


class Agent:
    def __init__(self, switch: Switch, number: int, mbits: int, mbytes: int) -> None:
        space = switch.plug_in(number)
        switch.limit(number, mbits)
        command = [sys.executable, "-m", "bench.peers", "--agent", space, "--ip", f"10.77.0.{number}"]
        self._process = subprocess.Popen(
            [*command, "--mbytes", str(mbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def say(self, *what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n" if len(what) != 1 or what[0] else '""\n')
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def ask(self, *what: Any) -> Any:
        self.say(*what)
        return self.hear()["result"]

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Bench:
    """A trainer and replicas; `run` is one way of an update."""

    def __init__(self, replicas: int, mbits: int, mbytes: int) -> None:
        self.switch = Switch()
        self.trainer, *self.replicas = [Agent(self.switch, 1 + number, mbits, mbytes) for number in range(replicas + 1)]
        self._threads = ThreadPoolExecutor(replicas + 1)
        self._all(self.replicas, "receive")
        self._port = PORT
        self._has_group = False
        self.nbytes = 2 * sum(shapes(mbytes).values())

    def _all(self, agents: list[Agent], *what: Any) -> list[Any]:
        return list(self._threads.map(lambda one: one.ask(*what), agents))

    def lead(self, replicas: list[Agent], *what: Any) -> Any:
        """Have the trainer do something, and make the calls that it asks for."""
        self.trainer.say(*what)
        while "call" in (found := self.trainer.hear()):
            args = found["args"] if found["call"] in ("init_weight_transfer_engine", "update_weights") else []
            self._all(replicas, "call", CALLS[found["call"]], *args)
            self.trainer.say("")
        return found["result"]

    def run(self, way: str) -> dict[str, float]:
        if way == "gloo":
            return self._gloo()
        replicas = self.replicas[:1] if way.startswith("one") else self.replicas
        is_delta = way.endswith("delta")
        self.lead(replicas, "lead", False if way == "plain" else None, ALL_DELTAS if is_delta else 1)
        self.lead(replicas, "send", 1)
        before, busy, begun = self.switch.sent_nbytes(1), busy_s(), time.monotonic()
        report = self.lead(replicas, "send", EVERY if is_delta else 1)
        took_s = time.monotonic() - begun
        sent = self.switch.sent_nbytes(1) - before
        self.lead(replicas, "end")
        busy = (busy_s() - busy) / took_s
        return {"s": report["update_s"], "all": took_s, "sent": sent / self.nbytes, "busy": busy}

    def _gloo(self) -> dict[str, float]:
        agents = [self.trainer, *self.replicas]
        if not self._has_group:
            join = lambda one: one[1].ask("group", one[0], len(agents), self._port)  # noqa: E731
            list(self._threads.map(join, enumerate(agents)))
            self._has_group = True
            self._all(agents, "broadcast")
        before, busy, begun = self.switch.sent_nbytes(1), busy_s(), time.monotonic()
        took = max(self._all(agents, "broadcast"))
        sent = self.switch.sent_nbytes(1) - before
        busy = (busy_s() - busy) / (time.monotonic() - begun)
        return {"s": took, "all": took, "sent": sent / self.nbytes, "busy": busy}

    def close(self) -> None:
        for one in (self.trainer, *self.replicas):
            one.end()
        self.switch.close()


def busy_s() -> float:
    """Processor seconds of this machine so far, of everybody, that were not idle; over all processors."""
    with open("/proc/stat") as file:
        user, nice, system, idle, waiting, irq, softirq = map(int, file.readline().split()[1:8])
    del idle, waiting
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


def show(found: dict[str, list[dict[str, float]]], nbytes: int, asked: argparse.Namespace) -> None:
    ideal = nbytes * 8e-6 / asked.mbits
    print(
        f"{asked.replicas} replicas, {nbytes / 1e6:.0f} MB, links of {asked.mbits} Mbit/s "
        f"(a model takes {ideal:.2f} s), {os.cpu_count()} cores, {asked.rounds} rounds"
    )
    print(f"{'':10}{'median':>10}{'p95':>10}{'x one':>8}{'all':>10}{'sent':>8}{'busy':>8}")
    one = statistics.median(found["one"][i]["s"] for i in range(len(found["one"]))) if found.get("one") else None
    for way, runs in found.items():
        times = sorted(run["s"] for run in runs)
        middle, p95 = statistics.median(times), times[min(len(times) - 1, int(0.95 * len(times)))]
        ratio = f"{middle / one:8.2f}" if one else f"{'':8}"
        whole, sent, busy = (statistics.median(run[key] for run in runs) for key in ("all", "sent", "busy"))
        print(f"{way:10}{middle:8.2f} s{p95:8.2f} s{ratio}{whole:8.2f} s{sent:8.2f}{busy:8.2f}")
    print("sent: by the trainer, models (with headers); busy: share of all processors, of everything on this machine")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--mbits", type=int, default=1000)
    parser.add_argument("--mbytes", type=int, default=256)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--agent", help=argparse.SUPPRESS)
    parser.add_argument("--ip", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.agent:
        agent(asked.agent, asked.ip, asked.mbytes)
        return
    if not allowed():
        sys.exit("only root may make network namespaces")
    touch_memory()
    bench = Bench(asked.replicas, asked.mbits, asked.mbytes)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in asked.ways.split(",")}
    try:
        for _ in range(asked.rounds):
            for way, runs in found.items():
                runs.append(bench.run(way))
                print(way, {key: round(value, 3) for key, value in runs[-1].items()}, flush=True)
    finally:
        bench.close()
    show(found, bench.nbytes, asked)


if __name__ == "__main__":
    main()
