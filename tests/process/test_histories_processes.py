"""Histories of real client processes, killed and frozen on the way, are possible ones; a client that lies is found.

TQ_HISTORY_SECONDS sets how long they work (6 by default), TQ_HISTORY_SEED what they do.
"""

from __future__ import annotations

import os
import random
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import until
from histories import Record, check_keys
from histories_rows import End, check_rows
from history_workers import TASKS, Recorder, drain, read_records
from paths import SOURCES_AND_HELPERS
from zygote import CHILDREN

import transfer_queue as tq

SECONDS = float(os.environ.get("TQ_HISTORY_SECONDS", "6"))
SEED = int(os.environ.get("TQ_HISTORY_SEED", "1"))
WORKERS = 5


class Nursery:
    """Starts workers (`history_workers`), kills and freezes them. It holds a descriptor of each: numbers are reused."""

    def __init__(self, folder: Path, first: int = 0, address: str = "") -> None:
        """Their numbers begin after `first`, which differs where there are several nurseries. `address`: of the server
        that they attach to, where there are several."""
        self.folder = folder
        environment = {**os.environ, "PYTHONPATH": SOURCES_AND_HELPERS}
        if address:
            environment["TQ_ADDRESS"] = address
        self._process = CHILDREN.start(["-m", "history_workers", str(folder), str(first)], environment)
        self.living: dict[str, int] = {}
        self.ends: list[Record] = []
        self._count = first
        assert self._line() == "ready"

    def _line(self) -> str:
        return self._process.stdout.readline().decode().strip()

    def start(self, until: float, stale: bool = False) -> None:
        self._count += 1
        name = f"worker-{self._count}"
        line = f"{name} {self._count} {SEED * 1000 + self._count} {until} {int(stale)}\n"
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()
        self.living[name] = os.pidfd_open(int(self._line()))

    def kill(self, name: str) -> None:
        descriptor, started = self.living.pop(name), time.monotonic()
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        self._ended(descriptor)
        self.ends.append(End(process=name, started=started, ended=time.monotonic(), outcome="ok"))

    def freeze(self, name: str, seconds: float) -> None:
        signal.pidfd_send_signal(self.living[name], signal.SIGSTOP)
        threading.Event().wait(seconds)
        signal.pidfd_send_signal(self.living[name], signal.SIGCONT)

    def wait(self) -> None:
        while self.living:
            self._ended(self.living.popitem()[1])

    def _ended(self, descriptor: int) -> None:
        ready, _, _ = select.select([descriptor], [], [], 30)
        os.close(descriptor)
        assert ready, "a worker did not end"

    def close(self) -> None:
        for descriptor in self.living.values():
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@pytest.fixture
def nursery(client: tq.TransferQueueClient, tmp_path: Path) -> Iterator[Nursery]:
    made = Nursery(tmp_path)
    yield made
    made.close()


def checked(nursery: Nursery, client: tq.TransferQueueClient) -> list[str]:
    """What is wrong with everything that the workers did, all of whom have ended."""
    nursery.wait()
    until(lambda: client.stats()["clients"] == 1, "the end of the workers' sessions")
    drain(Recorder(nursery.folder, "drain"))
    history = [*read_records(nursery.folder), *nursery.ends]
    counts = Counter((type(record).__name__, record.outcome) for record in history)
    print(*(f"{kind} {outcome}: {count}" for (kind, outcome), count in sorted(counts.items())), sep=", ")
    assert counts["Get", "ok"] > 50
    assert counts["Fetch", "ok"] > 50
    return [str(violation) for violation in (*check_keys(history), *check_rows(history, TASKS))]


@pytest.mark.timeout(SECONDS * 3 + 110)
def test_clients_that_are_killed_and_frozen_leave_a_possible_history(
    nursery: Nursery, client: tq.TransferQueueClient
) -> None:
    rng, over = random.Random(SEED), time.monotonic() + SECONDS + 1
    for _ in range(WORKERS):
        nursery.start(over)
    while time.monotonic() < over - 0.5:
        threading.Event().wait(rng.uniform(0.02, 0.2))
        name = rng.choice(sorted(nursery.living))
        if rng.random() < 0.5:
            nursery.freeze(name, rng.uniform(0.01, 0.4))
        else:
            nursery.kill(name)
            nursery.start(over)
    assert checked(nursery, client) == []


def test_a_client_that_reads_from_an_old_cache_is_found(nursery: Nursery, client: tq.TransferQueueClient) -> None:
    over = time.monotonic() + 3
    for number in range(3):
        nursery.start(over, stale=number == 0)
    found = checked(nursery, client)
    assert found
    assert {text.partition(",")[0] for text in found} <= {"stale read", "lost write"}, found
