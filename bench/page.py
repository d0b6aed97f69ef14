"""What a page that somebody looks at costs, and how soon it shows what is.

    python -m bench.page [--rows 1000000] [--rounds 20] [--calls | --viewers 50]

A service with so many rows of four fields, and `tq page`. With a browser's connection to it: how long after a put
returned its row is in the map that the page sends, and how much of a core the server uses while nothing changes and
while a row comes twice in three seconds; with `--viewers` the same with one viewer and with so many. In a headless
Chromium: the first paint of each opening, when it says "live", and how long after a put returned the count of rows
has changed on the screen. Last microseconds of `kv_put` and `kv_batch_get` of one row: a second while the page works
for a viewer, one while it is stopped, and one more, in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import torch

import transfer_queue as tq
from bench.overview import FIELDS, fill, line
from bench.procfs import processor_s
from tools import browser
from transfer_queue.page.printable import ident

WATCHED_S, ARM_S = 20.0, 1.0
ARMS = ("open", "still", "again")
SHOWN = """new Promise(found => {
    const look = () => document.querySelector('#lanes').innerText.includes(%r) ? found(Date.now()) : setTimeout(look, 1)
    look()
})"""
LIVE = """new Promise(found => {
    const look = () => document.querySelector('#status')?.innerText.includes('live')
        ? found(performance.now()) : setTimeout(look, 1)
    look()
})"""
PAINTED = """new Promise(found => {
    const look = () => {
        const entry = performance.getEntriesByName('first-contentful-paint')[0]
        entry ? found(entry.startTime) : setTimeout(look, 1)
    }
    look()
})"""


def between(number: int) -> None:
    """Wait: the page looks every half second, each time at another place between two looks."""
    time.sleep(0.5 + number % 7 / 14)


def put_one() -> float:
    """Put a row into the partition "train"; gives when that had returned, as `time.time`."""
    tq.get_client().put({name: torch.ones(1, 1) for name in FIELDS}, partition_id="train")
    return time.time()


@contextlib.contextmanager
def page() -> Iterator[tuple[str, int]]:
    """`tq page`; gives its address and process."""
    code = "from transfer_queue.cli import main; main()"
    command = [sys.executable, "-c", code, "page", "--address", str(tq.address())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.terminate()


class Viewer:
    """Reads the page's events until it is closed; `rows` are those of the latest map of the partition."""

    def __init__(self, url: str, partition: str = "") -> None:
        self.rows = 0
        self.told = threading.Condition()
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc)
        self._connection.request("GET", f"/events?partition={ident(partition)}")
        self._socket = self._connection.sock  # which the connection lets go of, for the page answers once
        answer = self._connection.getresponse()
        answer.read(1)
        self._thread = threading.Thread(target=self._read, args=(answer,), daemon=True)
        self._thread.start()

    def _read(self, answer: http.client.HTTPResponse) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, AttributeError, ValueError):
            while said := answer.readline():
                if said.startswith(b"event: map"):
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
        with contextlib.suppress(OSError):
            self._socket.shutdown(2)
        self._thread.join(5)
        self._connection.close()


def watched(url: str, pid: int, rows: int, rounds: int, others: int = 0) -> None:
    """How far the map of `rows` rows is behind, and what it costs the server and the page `pid`."""
    both = int(tq.get_client().stats()["pid"]), pid
    viewer, seconds = Viewer(url, "train"), list[float]()
    viewer.await_rows(rows)
    with contextlib.ExitStack() as stack:
        if others:
            stack.enter_context(looking(url, others))
        began, spent = time.perf_counter(), [processor_s(one) for one in both]
        time.sleep(WATCHED_S)
        still = shares(both, began, spent)
        began, spent = time.perf_counter(), [processor_s(one) for one in both]
        for number in range(1, rounds + 1):
            put = put_one()
            viewer.await_rows(rows + number)
            seconds.append(time.time() - put)
            between(number)
        busy = shares(both, began, spent)
    viewer.close()
    line(f"a put is in the map, {rows:,} rows", sorted(seconds), 1e3, "ms")
    print(f"{'the slowest of them':44} {1e3 * max(seconds):15.2f} ms")
    for name, at_rest, at_work in zip(("server", "page"), still, busy, strict=True):
        print(
            f"{name}, {others + 1} viewers: {at_rest:.2%} of a core while nothing changes, {at_work:.2%} meanwhile",
            flush=True,
        )


def shares(pids: tuple[int, int], began: float, spent: list[float]) -> list[float]:
    """Of a core, that each used since it had spent so many seconds."""
    span_s = time.perf_counter() - began
    return [(processor_s(pid) - before) / span_s for pid, before in zip(pids, spent, strict=True)]


def looked_at(url: str, rows: int, rounds: int) -> None:
    """What a person sees of `rows` rows, and when."""
    path = browser.found()
    if path is None:
        print("no chromium is installed here")
        return
    painted, live, behind = list[float](), list[float](), list[float]()
    with browser.browser(path) as tab:
        for _ in range(rounds):
            tab.open("about:blank")
            tab.open(url)
            live.append(tab.evaluate(LIVE) / 1e3)
            painted.append(tab.evaluate(PAINTED) / 1e3)
        tab.evaluate(SHOWN % f"{rows:,}")
        for number in range(1, rounds + 1):
            put = put_one()
            behind.append(tab.evaluate(SHOWN % f"{rows + number:,}") / 1e3 - put)
            between(number)
    for what, seconds in (("first paint", painted), ("it says live", live), ("a put is on the screen", behind)):
        line(f"browser, {what}", sorted(seconds), 1e3, "ms")
        print(f"{'the slowest of them':44} {1e3 * max(seconds):15.2f} ms", flush=True)


def calls_for(seconds: float) -> list[float]:
    """Seconds of a put and get of one row, again and again for so long."""
    found, number, ends = list[float](), 0, time.perf_counter() + seconds
    while (began := time.perf_counter()) < ends:
        number += 1
        tq.kv_put(f"row {number}", "single", {"x": torch.ones(8)})
        tq.kv_batch_get(f"row {number}", "single")
        found.append(time.perf_counter() - began)
        tq.kv_clear(f"row {number}", "single")
    return found


@contextlib.contextmanager
def looking(url: str, viewers: int = 1) -> Iterator[None]:
    """So many, in a process of their own, look at the page."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=look, args=(url, viewers, theirs), daemon=True)
    process.start()
    ours.recv()
    yield
    ours.send(None)
    process.join()


def look(url: str, viewers: int, said: Connection) -> None:
    found = [Viewer(url, "train") for _ in range(viewers)]
    said.send(None)
    said.recv()
    for viewer in found:
        viewer.close()


def beside(url: str, pid: int, rounds: int) -> None:
    """One-row calls while the page `pid` works for a viewer, and while it is stopped and asks the service nothing."""
    found: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    with looking(url):
        for number in range(rounds):
            for arm in ARMS[number % 3 :] + ARMS[: number % 3]:
                os.kill(pid, signal.SIGCONT if arm == "open" else signal.SIGSTOP)
                found[arm].append(calls_for(ARM_S))
        os.kill(pid, signal.SIGCONT)
    for arm, blocks in found.items():
        line(f"put and get of one row, {arm}", sorted(itertools.chain.from_iterable(blocks)), 1e6, "us")
    medians = {arm: [statistics.median(block) for block in blocks] for arm, blocks in found.items()}
    for arm in ("open", "again"):
        changes = sorted(100 * (one / off - 1) for one, off in zip(medians[arm], medians["still"], strict=True))
        print(f"{arm} beside still, by round: median {statistics.median(changes):+.1f} %", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", action="store_true", help="only the calls of one row")
    parser.add_argument("--viewers", type=int, default=0, help="only what so many viewers cost, beside one")
    given = parser.parse_args()
    tq.init()
    fill(given.rows)
    tq.get_client().get_meta(["tokens"], 100, "train", task_name="actor", lease_s=3600)
    with page() as (url, pid):
        if given.viewers:
            watched(url, pid, given.rows, given.rounds)
            watched(url, pid, given.rows + given.rounds, given.rounds, given.viewers - 1)
        elif not given.calls:
            watched(url, pid, given.rows, given.rounds)
            looked_at(url, given.rows + given.rounds, given.rounds)
        if not given.viewers:
            beside(url, pid, 5 * given.rounds)
    tq.close()


if __name__ == "__main__":
    main()
