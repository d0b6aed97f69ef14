"""An update of a real vLLM at TP 2: whole tensors to every worker, slices from one sender, slices from four ranks.

    python -m bench.shards [--rounds 7] [--sizes small|large] [--ways whole,slices,ranks]

Needs the environment of `make test-vllm`, which is made where it is missing. `large` is a Llama with 414 MB in bf16.
Each way has a server of its own; `whole` is this package's engine as it is for receivers that report no wants.
Printed are medians: packing, the update (fetched and verified by both workers), the commit (vLLM's reload, the pause),
bytes sent, and a worker's anonymous memory above what it had before any update: at most while an update goes on, and
after it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.fresh_memory import touch_memory

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("whole", "slices", "ranks")
POLL_S = 0.01


class Memory:
    """What a server's workers have of their own, watched, but for what the kernel may take at once."""

    def __init__(self, workers: list[int]) -> None:
        self._workers = workers
        self.before = self.now()
        self._most = 0
        self._stop = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def now(self) -> int:
        from bench.procfs import memory

        found = [memory(pid) for pid in self._workers]
        return max(one.get("Anonymous", 0) - one.get("LazyFree", 0) for one in found)

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self._most = max(self._most, self.now())

    def most(self) -> int:
        """Since it was asked last."""
        found, self._most = self._most, 0
        return found

    def close(self) -> None:
        self._stop.set()
        self._watching.join()


@contextlib.contextmanager
def one_sender(url: str, token: str, model: Any, takes_wants: bool) -> Iterator[Callable[[], dict[str, Any]]]:
    import msgspec
    import torch

    from transfer_queue.weights import ModuleSource
    from transfer_queue.weights.http import WeightSyncClient
    from transfer_queue.weights.transport.tcp import TcpTrainer

    class Whole(TcpTrainer):
        def receivers_info(self) -> dict[str, Any]:
            return {**super().receivers_info(), "specs": ""}

    kind = TcpTrainer if takes_wants else Whole
    client = WeightSyncClient(url, token, timeout_s=60)
    trainer = kind.trainer_init({}, client=client, source=ModuleSource(model))

    def send() -> dict[str, Any]:
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.mul_(1.01)
        before = trainer.num_served_nbytes
        report = trainer.send_weights(deadline_s=60)
        return {**msgspec.structs.asdict(report), "sent": trainer.num_served_nbytes - before}

    yield send
    trainer.shutdown()


@contextlib.contextmanager
def four_ranks(url: str, token: str, given: dict[str, Any]) -> Iterator[Callable[[], dict[str, Any]]]:
    from vllm_tests.ranks import started

    with started({**given, "url": url, "token": token, "tied": False}) as tell:
        served = 0

        def send() -> dict[str, Any]:
            nonlocal served
            reports = tell("again")
            before, served = served, sum(one["served"] for one in reports)
            return {**reports[0], "sent": served - before}

        yield send


def run(rounds: int, sizes: str, ways: list[str]) -> None:
    import psutil
    import torch

    from vllm_tests.models import LARGE, drawn, save
    from vllm_tests.servers import Server

    torch.set_num_threads(1)
    given = {"sizes": LARGE if sizes == "large" else {}, "dtype": "bfloat16"}
    model = drawn(0, **given["sizes"]).to(torch.bfloat16)  # type: ignore[arg-type]
    nbytes = sum(tensor.nbytes for tensor in model.parameters())
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="tq-") as folder:
        saved = save(model, Path(folder, "model"))
        for way in ways:
            server = Server(saved, "tq_tcp", Path(folder, way), 2, "--dtype", "bfloat16")
            try:
                server.wait()
                family = psutil.Process(server._process.pid).children(recursive=True)
                memory = Memory([one.pid for one in family if "Worker" in " ".join(one.cmdline())])
                made = (
                    four_ranks(server.url, server.token, given)
                    if way == "ranks"
                    else one_sender(server.url, server.token, model, way == "slices")
                )
                with made as send:
                    for number in range(rounds + 1):
                        memory.most()
                        report = send()
                        if number:  # the first one has memory to touch
                            use = {"most": memory.most() - memory.before, "after": memory.now() - memory.before}
                            found[way].append({**report, **use})
                memory.close()
            finally:
                server.stop()
    show(found, nbytes)


def show(found: dict[str, list[dict[str, Any]]], nbytes: int) -> None:
    num = max(map(len, found.values()))
    print(f"a model of {nbytes / 1e6:.1f} MB, TP 2, {num} updates each, {os.cpu_count()} cores; medians")
    print(f"{'':8}{'pack':>9}{'update':>9}{'p95':>9}{'commit':>9}{'sent':>8}{'most':>8}{'after':>8}")
    for way, reports in found.items():

        def middle(key: str) -> float:
            return statistics.median(one[key] for one in reports)  # noqa: B023 called at once

        updates = sorted(one["update_s"] for one in reports)
        p95 = updates[min(len(updates) - 1, int(0.95 * len(updates)))]
        times = [middle("pack_s"), middle("update_s"), p95, middle("commit_s")]
        shares = [middle("sent") / nbytes, middle("most") / nbytes * 2, middle("after") / nbytes * 2]
        print(f"{way:8}" + "".join(f"{1e3 * one:6.0f} ms" for one in times) + "".join(f"{one:8.2f}" for one in shares))
        print(f"{'':8}after: {middle('after') / 1e6:.0f} MB")
    print("sent: models; most and after: shares of a worker (half a model)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", choices=["small", "large"], default="large")
    parser.add_argument("--ways", default=",".join(WAYS))
    asked = parser.parse_args()
    if "vllm" in os.environ.get("TQ_BENCH_SHARDS", ""):
        touch_memory()
        run(asked.rounds, asked.sizes, asked.ways.split(","))
        return
    from vllm_tests.environment import made

    command = [made(), "-m", "bench.shards", *sys.argv[1:]]
    sys.exit(subprocess.run(command, cwd=ROOT, env={**os.environ, "TQ_BENCH_SHARDS": "vllm"}, check=False).returncode)


if __name__ == "__main__":
    main()
