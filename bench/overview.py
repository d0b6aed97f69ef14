"""What it costs to look: an overview and a map as partitions grow, and one-row calls while a page is open.

    python -m bench.overview [--rows 100000,1000000] [--rounds 100]

Rows of four fields in blocks of 10,000, a task that has 100 of them on a lease. Milliseconds from the call to the
answer, one client, one service. Then, with all of these rows there and a browser's connection to `tq page` open: how
long after a put returned its row is in the map that the page sends, and how much of a core the server uses while
nothing changes, and while a row comes every half second. Then microseconds of `kv_put` and `kv_batch_get` of one row,
in turn for blocks of 200 calls with such a connection and without one.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import torch

import transfer_queue as tq
from bench.procfs import processor_s
from transfer_queue.page.printable import ident

BLOCK = 10_000
CALLS = 200
WATCHED_S = 20.0


def timed(rounds: int, call: Callable[[], Any]) -> list[float]:
    """Seconds, sorted."""
    found = []
    for _ in range(rounds + 3):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return sorted(found[3:])


def line(what: str, seconds: list[float], unit: float, name: str) -> None:
    p95 = seconds[int(0.95 * (len(seconds) - 1))]
    print(f"{what:44} median {unit * statistics.median(seconds):8.2f} {name}   p95 {unit * p95:8.2f}", flush=True)


def one_row(number: int) -> float:
    began = time.perf_counter()
    tq.kv_put(f"row {number}", "single", {"x": torch.ones(8)})
    tq.kv_batch_get(f"row {number}", "single")
    took = time.perf_counter() - began
    tq.kv_clear(f"row {number}", "single")
    return took


@contextlib.contextmanager
def page() -> Iterator[str]:
    """`tq page`; gives host and port."""
    code = "from transfer_queue.cli import main; main()"
    command = [sys.executable, "-c", code, "page", "--address", str(tq.address())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield urlsplit(process.stdout.readline().strip()).netloc
        finally:
            process.terminate()


class Viewer:
    """Reads the page's events until it is closed; `rows` are those of the latest map of the partition."""

    def __init__(self, place: str, partition: str = "") -> None:
        self.rows = 0
        self.told = threading.Condition()
        self._connection = http.client.HTTPConnection(place)
        self._connection.request("GET", f"/events?partition={ident(partition)}")
        answer = self._connection.getresponse()
        answer.read(1)
        self._thread = threading.Thread(target=self._read, args=(answer,), daemon=True)
        self._thread.start()

    def _read(self, answer: http.client.HTTPResponse) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, AttributeError, ValueError):
            while line := answer.readline():
                if line.startswith(b"event: map"):
                    found = json.loads(answer.readline().removeprefix(b"data: "))
                    with self.told:
                        self.rows = found["size"] if found else 0
                        self.told.notify()

    def await_rows(self, rows: int) -> None:
        with self.told:
            while self.rows < rows:
                if not self.told.wait(30):
                    raise TimeoutError(f"the map has {self.rows} of {rows} rows after 30 s")

    def close(self) -> None:
        if self._connection.sock is not None:
            self._connection.sock.shutdown(2)
        self._thread.join(5)
        self._connection.close()


def behind(place: str, rows: int, rounds: int) -> None:
    """Of a map of `rows` rows: how far it is behind, and what it costs the server."""
    client, server = tq.get_client(), int(tq.get_client().stats()["pid"])
    one = {name: torch.ones(1, 1) for name in ("tokens", "log_probs", "reward", "advantage")}
    viewer, seconds = Viewer(place, "train"), list[float]()
    viewer.await_rows(rows)
    began, spent = time.perf_counter(), processor_s(server)
    time.sleep(WATCHED_S)
    still = (processor_s(server) - spent) / (time.perf_counter() - began)
    began, spent = time.perf_counter(), processor_s(server)
    for number in range(1, rounds + 1):
        client.put(one, partition_id="train")
        put = time.perf_counter()
        viewer.await_rows(rows + number)
        seconds.append(time.perf_counter() - put)
        time.sleep(0.5 + number % 7 / 14)  # the page looks every half second: at another place between two looks
    busy = (processor_s(server) - spent) / (time.perf_counter() - began)
    viewer.close()
    line(f"a put is in the map, {rows:,} rows", sorted(seconds), 1e3, "ms")
    print(f"{'the slowest of them':44} {1e3 * max(seconds):15.2f} ms")
    print(f"server, one viewer: {still:.2%} of a core while nothing changes, {busy:.2%} meanwhile", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="100000,1000000")
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    tq.init()
    client, there = tq.get_client(), 0
    fields = {name: torch.ones(BLOCK, 1) for name in ("tokens", "log_probs", "reward", "advantage")}
    for rows in map(int, given.rows.split(",")):
        while there < rows:
            client.put(fields, partition_id="train")
            there += BLOCK
        client.get_meta(["tokens"], 100, "train", task_name="actor", lease_s=600)
        line(f"overview, {rows:,} rows", timed(given.rounds, client.overview), 1e3, "ms")
        line(f"map in 1,024 runs, {rows:,} rows", timed(given.rounds, lambda: client.partition_map("train")), 1e3, "ms")
    open_s, shut_s = list[float](), list[float]()
    with page() as place:
        behind(place, there, given.rounds)
        for number in range(10):
            viewer = Viewer(place)
            open_s += [one_row(CALLS * number + call) for call in range(CALLS)]
            viewer.close()
            time.sleep(6)  # the page stays attached for five
            shut_s += [one_row(CALLS * number + call) for call in range(CALLS)]
    line("put and get of one row, a page is open", sorted(open_s), 1e6, "us")
    line("the same, nobody looks", sorted(shut_s), 1e6, "us")
    tq.close()


if __name__ == "__main__":
    main()
