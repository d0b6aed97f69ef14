"""What it costs to look: an overview and a map as partitions grow, and one-row calls while a page is open.

    python -m bench.overview [--rows 100000,1000000] [--rounds 100]

Rows of four fields in blocks of 10,000, a task that has 100 of them on a lease. Milliseconds from the call to the
answer, one client, one service. Then, with all of these rows there: microseconds of `kv_put` and `kv_batch_get` of one
row, in turn for blocks of 200 calls with a browser's connection to `tq page` open and without one.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
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

BLOCK = 10_000
CALLS = 200


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
    """Reads the page's events until it is closed."""

    def __init__(self, place: str) -> None:
        self._connection = http.client.HTTPConnection(place)
        self._connection.request("GET", "/events")
        answer = self._connection.getresponse()
        answer.read(1)
        self._thread = threading.Thread(target=self._read, args=(answer,), daemon=True)
        self._thread.start()

    def _read(self, answer: http.client.HTTPResponse) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, AttributeError, ValueError):
            while answer.read1():
                pass

    def close(self) -> None:
        if self._connection.sock is not None:
            self._connection.sock.shutdown(2)
        self._thread.join(5)
        self._connection.close()


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
