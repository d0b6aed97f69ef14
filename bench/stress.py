"""Thousands of clients of one service, whose server and clients are killed in turn; every row is compared.

    python -m bench.stress [--clients 8192] [--processes 16] [--seconds 180] [--kill-every 30] [--picture FILE]

Each client has a session of its own over TCP, with a token. It puts rows of random size whose tag is their digest,
reads rows that it put before and compares them, and clears old ones. Every `--kill-every` seconds the server is killed
(kill -9; a standby takes over), and half way between a process with its clients, which is started anew. In the end
every row that was acknowledged and not cleared is read and compared. A line of JSON on standard output sums it up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from xxhash import xxh3_64_hexdigest

from bench.durability import CLIENT
from bench.procfs import memory
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.drivers import run, run_async
from transfer_queue.client.operations import kv
from transfer_queue.client.session import Session
from transfer_queue.errors import TransferQueueError
from transfer_queue.launch import local
from transfer_queue.server.settings import ServerConfig
from transfer_queue.wire.address import parse_address

KEPT = 4  # rows of each client
CALLS_PER_S = 1500.0  # of all clients together, or as many as the machine gives
PUT, CLEARED, FAILED, CALL = "put", "cleared", "failed", "call"


def content(rng: random.Random) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(rng.randbytes(rng.choice([100, 1000, 10_000])), np.uint8).copy())


def digest(row: torch.Tensor) -> str:
    return xxh3_64_hexdigest(row.numpy().tobytes())


# a process with clients


class Log:
    """What clients did, a line each, written before the next step: whoever is killed leaves all of it."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, kind: str, *what: Any) -> None:
        self._file.write(json.dumps([kind, *what]) + "\n")
        self._file.flush()


class Client:
    def __init__(self, name: str, address: str, token: str, log: Log, seed: int) -> None:
        self._name = name
        self._session = Session(parse_address(address, token), 60.0)
        self._log = log
        self._rng = random.Random(seed)
        self._rows: list[tuple[str, str]] = []
        self._count = 0

    async def work(self, pause_s: float) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / pause_s))
            began = time.monotonic()
            try:
                kind = await self._call()
            except TransferQueueError as error:
                self._log.write(FAILED, self._name, f"{type(error).__name__}: {error}"[:200])
                continue
            self._log.write(CALL, kind, round(began, 3), round(time.monotonic() - began, 4))

    async def _call(self) -> str:
        partition = self._name.partition(".")[0]
        if len(self._rows) > KEPT:
            key, _ = self._rows.pop(0)
            self._log.write(CLEARED, key, partition)
            await run_async(self._session, kv.kv_clear(self._session, [key], partition))
            return "clear"
        if self._rows and self._rng.random() < 0.5:
            key, expected = self._rng.choice(self._rows)
            found = await run_async(self._session, kv.kv_batch_get(self._session, [key], partition, strict=True))
            if digest(found["x"][0]) != expected:
                self._log.write(FAILED, self._name, f"{key} is not what was put")
            return "get"
        self._count += 1
        key, row = f"{self._name}-{self._count}", content(self._rng)
        tag = {"digest": digest(row)}
        await run_async(self._session, kv.kv_put(self._session, key, partition, {"x": row}, tag))
        self._rows.append((key, tag["digest"]))
        self._log.write(PUT, key, partition, tag["digest"])
        return "put"


async def work(options: argparse.Namespace) -> None:
    with open(options.log, "a") as file:
        log = Log(file)
        token = os.environ["TQ_STRESS_TOKEN"]
        names = [f"{options.name}.{os.getpid()}.{number}" for number in range(options.clients)]
        clients = []
        for number, name in enumerate(names):
            clients.append(Client(name, options.address, token, log, hash((name, number)) & 0xFFFF))
        print("ready", flush=True)
        await asyncio.gather(*(client.work(options.pause) for client in clients))


# the whole of it


class Workers:
    """Processes with clients, by name."""

    def __init__(self, folder: Path, address: str, token: str, clients: int, pause_s: float) -> None:
        self._folder = folder
        self._address = address
        self._environment = {**os.environ, "TQ_STRESS_TOKEN": token}
        self._clients = clients
        self._pause_s = pause_s
        self.living: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str) -> None:
        given = {"name": name, "log": self._folder / name, "address": self._address, "clients": self._clients,
                 "pause": self._pause_s}  # fmt: skip
        command = [sys.executable, "-m", "bench.stress", "--work"]
        command += [f"--{option}={value}" for option, value in given.items()]
        self.living[name] = subprocess.Popen(command, env=self._environment, stdout=subprocess.PIPE, text=True)

    def wait_until_ready(self, name: str) -> None:
        output = self.living[name].stdout
        assert output is not None
        assert output.readline() == "ready\n", f"{name} did not start"

    def kill(self, name: str) -> None:
        process = self.living.pop(name)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def records(folder: Path) -> Iterator[list[Any]]:
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # the last line of one that was killed
                yield json.loads(line)


def lost(folder: Path, client: TransferQueueClient) -> tuple[int, int]:
    """(rows that have to be there, those that are not or are others)."""
    expected: dict[str, dict[str, str]] = {}
    cleared: set[str] = set()
    for record in records(folder):
        if record[0] == PUT:
            expected.setdefault(record[2], {})[record[1]] = record[3]
        elif record[0] == CLEARED:
            cleared.add(record[1])
    count = wrong = 0
    for partition, rows in expected.items():
        keys = [key for key in rows if key not in cleared]
        there = client.kv_list(partition).get(partition, {})
        for key in keys:
            count += 1
            if key not in there:
                wrong += 1
                print(f"{key} is lost", file=sys.stderr)
                continue
            found = run(client.session, kv.kv_batch_get(client.session, [key], partition, strict=True))
            wrong += digest(found["x"][0]) != rows[key]
    return count, wrong


def picture(path: Path, folder: Path, kills: list[tuple[float, str]], began: float) -> None:
    """Calls and their longest times by second."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    by_second: dict[int, list[float]] = {}
    for record in records(folder):
        if record[0] == CALL:
            by_second.setdefault(int(record[2] + record[3] - began), []).append(record[3])
    seconds = sorted(second for second in by_second if second >= 0)
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(9, 5), layout="constrained")
    upper.plot(seconds, [len(by_second[second]) for second in seconds], color="#2563eb")
    upper.set_ylabel("calls answered per second")
    for share, color in ((50, "#2f9e58"), (99, "#d97706"), (100, "#b91c1c")):
        label = "longest" if share == 100 else f"{share} %"
        lower.plot(seconds, [np.percentile(by_second[one], share) * 1e3 for one in seconds], color=color, label=label)
    lower.set(ylabel="time of a call, ms", xlabel="seconds", yscale="log")
    lower.legend(loc="upper right", ncols=3)
    for at, what in kills:
        for axes in (upper, lower):
            axes.axvline(at - began, color="#7a8494" if what == "server" else "#c5ccd6", linestyle="--", linewidth=1)
    figure.savefig(path)


def kill_server(client: TransferQueueClient) -> float:
    """Kill it, and return how long it took until this client was answered again."""
    while not client.stats()["standby"]:
        time.sleep(0.01)
    pid = client.stats()["pid"]
    watch = os.pidfd_open(pid)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    select.select([watch], [], [])
    os.close(watch)
    client.stats()
    return time.monotonic() - began


def stress(options: argparse.Namespace) -> dict[str, Any]:
    token = secrets.token_hex(16)
    config = ServerConfig(
        run_dir="", owner_pid=os.getpid(), host="127.0.0.1", token=token, durability="process", client=CLIENT,
        sampler={"class": "SequentialSampler"},
    )  # fmt: skip
    server = local.start(config)
    client = TransferQueueClient.of(Session(parse_address(server.address)))
    rng, kills, takeovers = random.Random(options.seed), [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        each = options.clients // options.processes
        workers = Workers(folder, f"tcp:{server.tcp}", token, each, options.clients / CALLS_PER_S)
        for number in range(options.processes):
            workers.start(f"w{number}")
        for one in list(workers.living):
            workers.wait_until_ready(one)
        descriptors = len(os.listdir(f"/proc/{client.stats()['pid']}/fd"))
        print(f"{client.stats()['clients'] - 1} clients are attached", file=sys.stderr)
        began = time.monotonic()
        turn = 0
        while (now := time.monotonic()) < began + options.seconds:
            turn += 1
            time.sleep(max(0.0, min(began + turn * options.kill_every / 2, began + options.seconds) - now))
            if time.monotonic() >= began + options.seconds:
                break
            kills.append((time.monotonic(), "clients" if turn % 2 else "server"))
            if turn % 2:
                victim = rng.choice(sorted(workers.living))
                workers.kill(victim)
                workers.start(victim)
                workers.wait_until_ready(victim)
            else:
                takeovers.append(kill_server(client))
                print(f"the server was replaced within {takeovers[-1]:.3f} s", file=sys.stderr)
        lasted_s = time.monotonic() - began
        rss = memory(client.stats()["pid"])
        for one in list(workers.living):
            workers.kill(one)
        while client.stats()["clients"] > 1:
            time.sleep(0.1)
        count, wrong = lost(folder, client)
        times = np.array([record[3] for record in records(folder) if record[0] == CALL])
        failures = [record[2] for record in records(folder) if record[0] == FAILED]
        for text in sorted(set(failures))[:10]:
            print(f"failed, {failures.count(text)} times: {text}", file=sys.stderr)
        if options.picture:
            picture(Path(options.picture), folder, kills, began)
        left = len(os.listdir(f"/proc/{client.stats()['pid']}/fd"))
    found = {
        "clients": each * options.processes, "seconds": round(lasted_s),
        "servers_killed": len(takeovers), "processes_killed": len(kills) - len(takeovers),
        "replaced_within_s": [round(one, 3) for one in takeovers], "calls": len(times), "failed_calls": len(failures),
        "call_ms": {str(share): round(float(np.percentile(times, share)) * 1e3, 1) for share in (50, 95, 99, 100)},
        "rows_checked": count, "rows_lost_or_changed": wrong, "server_anonymous_mb": rss.get("Anonymous", 0) >> 20,
        "descriptors": {"with_clients": descriptors, "after": left},
    }  # fmt: skip
    client.close()
    server.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=8192)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--kill-every", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", default="")
    for name in ("--name", "--log", "--address"):  # of a process with clients
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pause", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        asyncio.run(work(options))
        return
    found = stress(options)
    print(json.dumps(found))
    sys.exit(bool(found["rows_lost_or_changed"] or found["failed_calls"]))


if __name__ == "__main__":
    main()
