"""Rows and weights from GPU memory to GPU memory of one machine, with one GPU.

    python -m bench.gpu [--rounds 7] [--layers 12] [--parts samples,weights] [--ways WAY;WAY]

Rows go through a service with default settings. Beside it: what came before (`get` to the host, then `.to("cuda")`),
and what bounds it, a copy of the same bytes from pinned memory.

Weights (bf16, 12 layers and an embedding: 2.1 GB) go over HTTP control to a server of one module in a process of its
own. "1 %" is a version in which every hundredth element of each tensor differs. Medians: packing, the update (until the
server has verified it), the commit, the pause in which no forward pass could run; and how much more of the GPU's memory
than before the server used at most. Beside them, by hand and unverified: tensors shared through CUDA IPC by
torch.multiprocessing and copied into the parameters, and `torch.save`, `torch.load`, `load_state_dict` by way of
/dev/shm.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

HIDDEN, WIDE, WORDS = 2048, 8192, 128 * 1024
MB = 1 << 20
FOLDER = "/dev/shm/tq-bench-gpu"
DEADLINE_S = 120.0
WAYS = {  # engine, where a version waits for its commit, settings of the trainer
    "cuda_ipc": ("cuda_ipc", None, {}),
    "cuda_ipc, staged on the host": ("cuda_ipc", "host", {}),
    "shm": ("shm", None, {}),
    "shm, staged on the GPU": ("shm", "device", {}),
    "tcp": ("tcp", None, {}),
    "tcp, 8 streams": ("tcp", None, {"streams": 8}),
    "tcp, staged on the GPU": ("tcp", "device", {}),
    "tcp, 1 %": ("tcp", None, {"anchor_every": 1000}),
    "disk (/dev/shm)": ("disk", None, {"folder": FOLDER, "sync": False}),
}


class Model(torch.nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, HIDDEN)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(num_layers))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "qkvo":
            self.add_module(name, torch.nn.Linear(HIDDEN, HIDDEN, bias=False))
        self.gate, self.up = (torch.nn.Linear(HIDDEN, WIDE, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(WIDE, HIDDEN, bias=False)
        self.norm = torch.nn.RMSNorm(HIDDEN)


def model(num_layers: int) -> Model:
    with torch.device("cuda"):
        return Model(num_layers).to(torch.bfloat16).requires_grad_(False)


def timed(work: Callable[[], object], rounds: int) -> float:
    """The median of seconds, after one that does not count; with what is queued on the GPU."""
    found = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def samples(rounds: int) -> None:
    from tensordict import TensorDict

    import transfer_queue as tq

    tq.init()
    print(f"{'64 rows':>9} {'put':>9} {'get to GPU':>11} {'get, .to':>9} {'pinned copy':>12}   ms, GB/s")
    for mb in (1, 16, 128, 1024):
        rows = torch.randn(64, mb * MB // 256, device="cuda")
        keys = [f"{mb}-{number}" for number in range(64)]
        fields = TensorDict({"x": rows}, batch_size=64)
        pinned = torch.empty_like(rows, device="cpu", pin_memory=True)
        there = torch.empty_like(rows)
        found = [
            timed(lambda: tq.kv_batch_put(keys=keys, partition_id="p", fields=fields), rounds),  # noqa: B023
            timed(lambda: tq.kv_batch_get(keys=keys, partition_id="p", device="cuda"), rounds),  # noqa: B023
            timed(lambda: tq.kv_batch_get(keys=keys, partition_id="p").to("cuda"), rounds),  # noqa: B023
            timed(lambda: there.copy_(pinned, non_blocking=True), rounds),  # noqa: B023
        ]
        print(f"{mb:6} MB " + " ".join(f"{1e3 * s:7.2f} {mb * MB / s / 1e9:5.1f}" for s in found), flush=True)
        tq.kv_clear(keys, "p")
    tq.close()


def serve(engine: str, stage_on: Any, num_layers: int) -> None:
    """A server of one module, until its input ends; answers a line with what was used since the last one."""
    from transfer_queue.weights import Control, InPlace, Receiver
    from transfer_queue.weights.http import serve as serve_http
    from transfer_queue.weights.transport import registry

    class Timed(InPlace):
        pause_s = 0.0

        def commit(self, *given: Any) -> Any:
            found = super().commit(*given)
            self.pause_s = found.pause_s
            return found

    target = Timed(model(num_layers), stage_on=stage_on)
    receiver = Receiver(target)
    made = registry.engine(engine)(receiver)
    server = serve_http(Control(made, receiver), token="bench")
    print(server.url, flush=True)
    before = torch.cuda.memory_allocated()
    for _ in sys.stdin:
        print(json.dumps({"pause_s": target.pause_s, "gpu": torch.cuda.max_memory_allocated() - before}), flush=True)
        torch.cuda.reset_peak_memory_stats()
    server.close()
    made.shutdown()


class Server:
    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "bench.gpu", *arguments]
        environment = {**os.environ, "TQ_WEIGHTS_ROOT": "/dev/shm"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload]

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        found: dict[str, Any] = json.loads(self.line())
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def weights(rounds: int, num_layers: int, ways: list[str]) -> None:
    from transfer_queue.weights import ModuleSource
    from transfer_queue.weights.http import WeightSyncClient
    from transfer_queue.weights.transport import registry

    mine = model(num_layers)
    nbytes = sum(tensor.nbytes for tensor in mine.parameters())
    print(f"\n{nbytes / 1e9:.2f} GB in {len(list(mine.parameters()))} tensors")
    print(f"{'way':30} {'pack':>8} {'update':>8} {'commit':>8} {'pause':>8} {'sum':>8} ms {'GB/s':>6} {'GPU, MB':>8}")
    servers = {way: Server("--serve", json.dumps([*WAYS[way][:2], num_layers])) for way in ways}
    for way, server in servers.items():
        engine, _, info = WAYS[way]
        client = WeightSyncClient(server.line(), "bench", timeout_s=DEADLINE_S)
        trainer = registry.trainer(engine).trainer_init(info, client=client, source=ModuleSource(mine))
        found = []
        for turn in range(rounds + 1):
            for tensor in mine.parameters():
                if "1 %" in way:
                    tensor.view(-1)[::100] += 1
                else:
                    tensor.fill_(turn)
            torch.cuda.synchronize()
            start = time.perf_counter()
            report = trainer.send_weights(deadline_s=DEADLINE_S)
            took = time.perf_counter() - start
            told = server.ask()
            found.append((report.pack_s, report.update_s, report.commit_s, told["pause_s"], took, told["gpu"]))
        trainer.shutdown()
        server.close()
        shutil.rmtree(FOLDER, ignore_errors=True)
        *times, gpu = (statistics.median(column) for column in zip(*found[1:], strict=True))
        cells = " ".join(f"{1e3 * one:8.1f}" for one in times)
        print(f"{way:30} {cells}    {nbytes / times[-1] / 1e9:6.2f} {gpu / MB:8.0f}", flush=True)


def by_hand(rounds: int, num_layers: int) -> None:
    """What a user would otherwise write."""
    context = torch.multiprocessing.get_context("spawn")
    to, back = context.Queue(), context.Queue()
    other = context.Process(target=_follow, args=(to, back, num_layers), daemon=True)
    other.start()
    mine = model(num_layers)
    nbytes = sum(tensor.nbytes for tensor in mine.parameters())
    back.get()

    def share() -> None:
        to.put({name: tensor.detach() for name, tensor in mine.named_parameters()})
        back.get()

    path = f"{FOLDER}.pt"

    def save() -> None:
        torch.save(mine.state_dict(), path)
        to.put(path)
        back.get()

    for name, work in {"by hand: CUDA IPC": share, "by hand: torch.save": save}.items():
        took = timed(work, rounds)
        print(f"{name:30} {'':35} {1e3 * took:8.1f}    {nbytes / took / 1e9:6.2f}", flush=True)
    os.unlink(path)
    to.put(None)
    other.join(30)


def _follow(to: Any, back: Any, num_layers: int) -> None:
    mine = model(num_layers)
    back.put("ready")
    while (told := to.get()) is not None:
        if isinstance(told, str):
            mine.load_state_dict(torch.load(told))
        else:
            for name, tensor in mine.named_parameters():
                tensor.copy_(told[name])
        torch.cuda.synchronize()
        del told
        back.put("done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--parts", default="samples,weights")
    parser.add_argument("--ways", default="", help="; between them; all of them if it is empty")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(*json.loads(given.serve))
    if not torch.cuda.is_available():
        sys.exit("bench.gpu needs a GPU")
    print(f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores, torch {torch.__version__}, {given.rounds} rounds")
    if "samples" in given.parts:
        samples(given.rounds)
    if "weights" in given.parts:
        weights(given.rounds, given.layers, given.ways.split(";") if given.ways else list(WAYS))
        by_hand(given.rounds, given.layers)
    return None


if __name__ == "__main__":
    main()
