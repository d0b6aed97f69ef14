"""What it costs that a standby could take over (`server.durability: process`), and how long that takes.

    python -m bench.durability [--rounds 5] [--million] [--units]

Two services at the same time, one with a standby; every call is made to the one and then to the other, in turn with who
is first. Server time is processor time of the server's process. `--million` also kills a server that holds a million
rows that were put one by one; that takes minutes to prepare. `--units` measures a storage unit that joined a service,
whose server is another process of this machine: the client is the unit's, and its server is the one that is killed.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from bench.saturation import Line, drive, processor_s
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.session import Session
from transfer_queue.launch import local
from transfer_queue.server.settings import Durability, ServerConfig
from transfer_queue.wire.address import parse_address

KINDS: tuple[Durability, Durability] = ("none", "process")
CLIENT = {
    "polling_mode": False, "timeout_s": 60.0, "spin_s": 80e-6, "copy_threads": None, "pool_nbytes": 1 << 30,
}  # fmt: skip
AT_SATURATION = [(1, 1), (16, 1), (64, 8)]
WARM = 20
GIB = 1 << 30


class Head:
    """A service without a standby, which units can join."""

    def __init__(self) -> None:
        self.reached = {"host": "127.0.0.1", "token": secrets.token_hex(), "unit_token": secrets.token_hex()}
        sampler = {"class": "SequentialSampler"}
        config = ServerConfig(run_dir="", owner_pid=os.getpid(), client=CLIENT, sampler=sampler, **self.reached)
        self.server = local.start(config)


class Place:
    """A service and a client of it; or, with a `head`, a unit that joined that, and a client of the unit."""

    def __init__(
        self,
        durability: Durability,
        budget_nbytes: int = 4 * GIB,
        journal_dir: str | None = None,
        head: Head | None = None,
    ) -> None:
        config = ServerConfig(
            run_dir="", owner_pid=os.getpid(), budget_nbytes=budget_nbytes, client=CLIENT, durability=durability,
            sampler={"class": "SequentialSampler"}, journal_dir=journal_dir,
        )  # fmt: skip
        self.head = head
        if head is not None:
            config = msgspec.structs.replace(config, join=f"tcp:{head.server.tcp}", **head.reached)
        self.server = local.start(config)
        self.path = self.server.address.removeprefix("unix:")
        self.client = TransferQueueClient.of(Session(parse_address(self.server.address)))
        self.number = 0
        self.meta: Any = None

    @property
    def pid(self) -> int:
        found: int = self.client.stats()["pid"]
        return found

    def close(self) -> None:
        self.client.close()
        self.server.stop()
        if self.head is not None:
            self.head.server.stop()


SMALL = {"ids": torch.arange(128), "logp": torch.randn(128), "reward": torch.ones(1)}
ONE = {name: value[None] for name, value in SMALL.items()}
MANY = {name: value.expand(1024, -1).clone() for name, value in SMALL.items()}
LARGE = {f"f{number}": torch.rand(1024, 8192) for number in range(9)}


def put_one(place: Place) -> None:
    place.meta = place.client.put(ONE, partition_id="one")


def get_one(place: Place) -> None:
    place.client.get_data(place.client.get_meta(["ids"], 1, "one", task_name="t"))


def put_many(place: Place) -> None:
    place.client.clear_partition("many")
    place.meta = place.client.put(MANY, partition_id="many")


def take_many(place: Place) -> None:
    place.client.reset_consumption("many", "t")
    meta = place.client.get_meta(["ids"], 1024, "many", task_name="t", lease_s=60)
    place.client.get_data(meta)
    place.client.ack(meta)


def put_large(place: Place) -> None:
    place.client.clear_partition("large")
    place.meta = place.client.put(LARGE, partition_id="large")


def get_large(place: Place) -> None:
    place.client.get_data(place.meta)


CASES: list[tuple[str, Callable[[Place], None], int]] = [
    ("put one row, 3 fields, 1 KB", put_one, 2000),
    ("get_meta and get_data of one row", get_one, 2000),
    ("clear, put 1024 rows, 1 MB", put_many, 200),
    ("reset, lease, get, ack 1024 rows", take_many, 200),
    ("clear, put 302 MB", put_large, 12),
    ("get 302 MB", get_large, 50),
]


def calls(rounds: int, are_units: bool) -> None:
    places = [Place(kind, head=Head() if are_units else None) for kind in KINDS]
    for name, call, count in CASES:
        seconds: list[list[float]] = [[], []]
        ratios: list[float] = []
        server_us: list[list[float]] = [[], []]
        for place in places:
            for _ in range(min(WARM, count)):
                call(place)
        for number in range(rounds):
            spent = [0.0, 0.0]
            begun = [processor_s([place.pid]) for place in places]
            for turn in range(count // rounds):
                for which in (0, 1) if (turn + number) % 2 else (1, 0):
                    start = time.perf_counter()
                    call(places[which])
                    seconds[which].append(time.perf_counter() - start)
                    spent[which] += seconds[which][-1]
            ratios.append(spent[1] / spent[0])
            for which, place in enumerate(places):
                server_us[which].append(1e6 * (processor_s([place.pid]) - begun[which]) / (count // rounds))
        without, with_it = (statistics.median(found) * 1e6 for found in seconds)
        late = [statistics.quantiles(found, n=20)[-1] * 1e6 for found in seconds]
        busy = [statistics.median(found) for found in server_us]
        print(
            f"{name:34} none {without:8,.0f} us (p95 {late[0]:8,.0f})  process {with_it:8,.0f} us (p95 {late[1]:8,.0f})"
            f"  medians {with_it / without:4.2f}x, rounds {statistics.median(ratios):4.2f}x"
            f"  server {busy[0]:6.1f} and {busy[1]:6.1f} us",
            flush=True,
        )
    for place in places:
        place.close()


def saturation(rounds: int) -> None:
    for connections, depth in AT_SATURATION:
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for number in range(rounds):
            for kind in KINDS if number % 2 else KINDS[::-1]:
                place = Place(kind)
                rate = drive([place.path], [place.pid], connections, depth, 2.0, True)
                found[kind].append((rate.puts, rate.servers_us))
                place.close()
        text = f"saturation, {connections:2} x {depth}:"
        for kind, rates in found.items():
            puts, busy = (statistics.median(one) for one in zip(*rates, strict=True))
            text += f"  {kind} {puts:7,.0f} puts/s, server {busy:5.1f} us"
        print(text, flush=True)


def take_over(count: int, one_by_one: bool, place: Place) -> None:
    """Kill a server with so many rows, under load; until the next call is answered."""
    if one_by_one:
        line = Line(place.path, 0, True)
        line.socket.setblocking(True)
        for _ in range(count // 500):
            line.send(500)
            left = 500
            while left:
                left -= line.answers()
        line.socket.close()
    else:
        for _ in range(count // 1024 + 1):
            place.client.put(MANY, partition_id="many")
    rows, pauses = place.client.stats().get("rows", count), []  # a unit knows only how many bytes
    for _ in range(5):
        put_one(place)
        time.sleep(0.3)  # a standby is there again
        pid = place.pid
        begun = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        put_one(place)
        pauses.append(time.perf_counter() - begun)
    assert (place.head is not None) or place.client.stats()["rows"] == rows + 10
    how = "one by one" if one_by_one else "1024 at once"
    print(
        f"{rows:9,} rows, put {how}: killed, and the next put answered after"
        f" {statistics.median(pauses) * 1e3:.0f} ms (median of 5), {max(pauses) * 1e3:.0f} ms at most",
        flush=True,
    )
    place.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--million", action="store_true")
    parser.add_argument("--units", action="store_true")
    options = parser.parse_args()
    calls(options.rounds, options.units)
    if options.units:
        take_over(10_000, True, Place("process", 16 * GIB, head=Head()))
        return
    saturation(options.rounds)
    take_over(10_000, False, Place("process", 16 * GIB))
    take_over(10_000, True, Place("process", 16 * GIB))
    if options.million:
        take_over(1_000_000, True, Place("process", 16 * GIB))


if __name__ == "__main__":
    main()
