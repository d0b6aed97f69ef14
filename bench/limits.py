"""What others wait for while somebody does much at once, and what confirming a fetch costs: `python -m bench.limits`.

A second process calls `get_partition` in a loop; the longest of its calls is what others wait for. Beside it stands the
longest call of an idle spell just before: the machine's own share.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import transfer_queue as tq
from transfer_queue.wire import messages as m

ROWS_CLEARED, ROWS_LOADED, PUTS, FETCHES = 1_000_000, 300_000, 64, 3000


def probe() -> None:
    """The second process: from each line on standard input to the next, how long its calls took."""
    tq.init()
    client = tq.get_client()
    print("ready", flush=True)
    stop = threading.Event()
    for _ in iter(sys.stdin.readline, ""):
        found: list[float] = []
        stop.clear()
        runner = threading.Thread(target=_loop, args=(client, stop, found))
        runner.start()
        sys.stdin.readline()
        stop.set()
        runner.join()
        found.sort()
        print(found[-1], found[int(len(found) * 0.99)], flush=True)


def _loop(client: tq.TransferQueueClient, stop: threading.Event, found: list[float]) -> None:
    while not stop.is_set():
        started = time.perf_counter()
        client.get_partition("probe")
        found.append(time.perf_counter() - started)


class Prober:
    def __init__(self) -> None:
        command = [sys.executable, "-c", "from bench.limits import probe; probe()"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._say_and_read("")

    def _say_and_read(self, text: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def during(self, work: Callable[[], object]) -> tuple[float, float, float]:
        """(longest call, 99th percentile, seconds that `work` took), in seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        time.sleep(0.3)
        started = time.perf_counter()
        work()
        took = time.perf_counter() - started
        time.sleep(0.3)
        longest, p99 = map(float, self._say_and_read("stop\n").split())
        return longest, p99, took

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def prober() -> Iterator[Prober]:
    made = Prober()
    try:
        yield made
    finally:
        made.close()


def report(what: str, other: Prober, work: Callable[[], object]) -> None:
    idle, _, _ = other.during(lambda: time.sleep(1.0))
    longest, p99, took = other.during(work)
    print(
        f"{what}: {took * 1e3:.1f} ms; others' longest call {longest * 1e3:.1f} ms, p99 {p99 * 1e3:.2f} ms "
        f"(idle just before: {idle * 1e3:.1f} ms)",
        flush=True,
    )


def fill(rows: int, partition: str) -> None:
    """Rows with keys and tags, a thousand in a put."""
    for start in range(0, rows, 1000):
        keys = [f"{partition}-{number}" for number in range(start, start + 1000)]
        tags = [{"number": number, "text": "some text"} for number in range(start, start + 1000)]
        tq.kv_batch_put(keys, partition, {"x": torch.zeros(1000, 4)}, tags)


def confirmation(client: tq.TransferQueueClient) -> None:
    """What a client spends on saying that a fetch was received, and what a whole fetch takes."""
    client.put({"x": torch.zeros(FETCHES)}, partition_id="fetched")
    session, told, whole = client.session, [], []
    notify = session.notify

    def timed(message: m.Message, to: str = "") -> None:
        started = time.perf_counter()
        notify(message, to)
        told.append(time.perf_counter() - started)

    session.notify = timed  # type: ignore[method-assign]
    for _ in range(FETCHES):
        started = time.perf_counter()
        client.get_meta(["x"], 1, "fetched", task_name="t")
        whole.append(time.perf_counter() - started)
    session.notify = notify  # type: ignore[method-assign]
    print(f"confirmation of a fetch: {statistics.median(told) * 1e6:.1f} us of {statistics.median(whole) * 1e6:.0f} us")


def many_puts(client: tq.TransferQueueClient) -> None:
    """How long an event loop stands still at most while 64 puts of 16 MB run on it."""
    data = {"x": torch.zeros(4, 1 << 20)}

    async def ticks(gaps: list[float]) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    async def work() -> tuple[float, float]:
        gaps: list[float] = []
        ticking = asyncio.create_task(ticks(gaps))
        started = time.perf_counter()
        await asyncio.gather(*(client.async_put(data, partition_id="wide") for _ in range(PUTS)))
        took = time.perf_counter() - started
        ticking.cancel()
        return max(gaps), took

    longest, took = asyncio.run(work())
    client.clear_partition("wide")
    print(
        f"{PUTS} asynchronous puts of 16 MB: loop still for {longest * 1e3:.1f} ms at most, {took * 1e3:.0f} ms in all"
    )


def main() -> None:
    tq.init()
    client = tq.get_client()
    client.set_partition("probe", 1)
    confirmation(client)
    many_puts(client)
    many_puts(client)
    with prober() as other, tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            fill(ROWS_CLEARED, "cleared")
            report(f"clear_partition of {ROWS_CLEARED:,} rows", other, lambda: client.clear_partition("cleared"))
        fill(ROWS_LOADED, "loaded")
        report(f"save_checkpoint of {ROWS_LOADED:,} rows", other, lambda: tq.save_checkpoint(folder))
        for _ in range(3):
            report(f"load_checkpoint of {ROWS_LOADED:,} rows", other, lambda: tq.load_checkpoint(folder))
    tq.close()


if __name__ == "__main__":
    main()
