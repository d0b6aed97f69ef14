"""What a killed server costs: seconds of generation that have to be spent again, in the manner of verl's RFC 7579.

    python -m bench.generation [--crashes 5] [--workers 64] [--steps-before 3]

Rollout workers finish trajectories that took so many seconds to generate (log-normal, median 60 s; time runs 100 times
as fast here, only the seconds count) and put them; a trainer takes batches of 32 on lease and acknowledges them after a
step of 30 s. At a random moment the server is killed with kill -9. Lost are the seconds of trajectories whose put had
returned, that the trainer had not acknowledged, and that are not there afterwards; `again` are rows that the trainer
had acknowledged and would get once more. Arms: nothing kept; a checkpoint every 120 s, loaded into a new service;
`durability: process`; and a journal, where the standby is killed as well and a new service begins with it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch

from bench.durability import CLIENT
from transfer_queue import checkpoint
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.drivers import run
from transfer_queue.client.operations import kv
from transfer_queue.client.session import Session
from transfer_queue.errors import TransferQueueError
from transfer_queue.launch import local
from transfer_queue.server.settings import Durability, ServerConfig
from transfer_queue.wire.address import parse_address

ARMS = ("nothing kept", "checkpoint", "process", "machine")
SPEED = 100.0
MEDIAN_S, SPREAD, STEP_S, SAVE_S = 60.0, 0.6, 30.0, 120.0
BATCH, TOKENS = 32, 4096
PARTITION, TASK = "train", "actor"


class Crash(NamedTuple):
    """In seconds of generation, and rows. `away_s`: of real time, until the trainer's next call was answered."""

    finished: float
    lost: float
    again: int
    away_s: float


def started(durability: Durability, folder: Path) -> tuple[local.LocalServer, TransferQueueClient]:
    journal_dir = str(folder / "journal") if durability == "machine" else None
    config = ServerConfig(
        run_dir="", owner_pid=os.getpid(), client=CLIENT, durability=durability, journal_dir=journal_dir,
        sampler={"class": "SequentialSampler"},
    )  # fmt: skip
    server = local.start(config)
    return server, TransferQueueClient.of(Session(parse_address(server.address)))


class Job:
    """Rollout workers and a trainer, until the server is killed."""

    def __init__(self, arm: str, folder: Path, rng: random.Random) -> None:
        self._arm = arm
        self._folder = folder
        self._rng = rng
        self._over = threading.Event()
        self._durability: Durability = "process" if arm == "process" else "machine" if arm == "machine" else "none"
        self.server, self.client = started(self._durability, folder)
        self.finished: dict[str, float] = {}  # seconds of generation by key, once the put has returned
        self.used: set[str] = set()

    def roll_out(self, number: int, seed: int) -> None:
        rng, count = random.Random(seed), 0
        with contextlib.suppress(TransferQueueError):
            while True:
                cost_s = rng.lognormvariate(0.0, SPREAD) * MEDIAN_S
                if self._over.wait(cost_s / SPEED):
                    return
                count += 1
                key = f"{number}-{count}"
                fields = {"tokens": torch.full((TOKENS,), count)}
                run(self.client.session, kv.kv_put(self.client.session, key, PARTITION, fields))
                self.finished[key] = cost_s

    def train(self) -> None:
        with contextlib.suppress(TransferQueueError):
            while not self._over.is_set():
                meta = self.client.get_meta(["tokens"], BATCH, PARTITION, task_name=TASK, lease_s=600.0)
                keys = self.client.kv_retrieve_keys(meta.global_indexes, PARTITION)
                if self._over.wait(STEP_S / SPEED):
                    return
                self.client.ack(meta)
                self.used.update(key for key in keys if key is not None)

    def save(self) -> None:
        with contextlib.suppress(TransferQueueError):
            while not self._over.wait(SAVE_S / SPEED):
                checkpoint.save(self.client.session, self._folder / "saved")

    def run(self, workers: int, steps_before: int) -> Crash:
        work = [threading.Thread(target=self.roll_out, args=(n, self._rng.randrange(1 << 30))) for n in range(workers)]
        work.append(threading.Thread(target=self.train))
        if self._arm == "checkpoint":
            work.append(threading.Thread(target=self.save))
        for thread in work:
            thread.start()
        while len(self.used) < steps_before * BATCH:
            time.sleep(0.01)
        time.sleep(self._rng.random() * (STEP_S + SAVE_S) / SPEED)
        self._over.set()
        while self._arm == "process" and not self.client.stats()["standby"]:
            time.sleep(0.001)
        if self._arm == "machine":
            os.killpg(self.server._process.pid, signal.SIGKILL)
        else:
            os.kill(self.client.stats()["pid"], signal.SIGKILL)
        began = time.monotonic()
        after = self._recovered()
        away_s = time.monotonic() - began
        for thread in work:
            thread.join()
        there = set(after.kv_list(PARTITION).get(PARTITION, {}))
        lost = [cost for key, cost in self.finished.items() if key not in there and key not in self.used]
        again = self.used & self._unconsumed(after)
        if after is not self.client:
            after.close()
        return Crash(sum(self.finished.values()), sum(lost), len(again), away_s)

    def _recovered(self) -> TransferQueueClient:
        """A client of what is there after the crash."""
        if self._arm == "process":
            self.client.stats()
            return self.client
        self.server.wait()
        self.server, after = started(self._durability, self._folder)
        if self._arm == "checkpoint" and (self._folder / "saved").exists():
            checkpoint.load(after.session, self._folder / "saved")
        return after

    def _unconsumed(self, client: TransferQueueClient) -> set[str]:
        """The keys of rows that the trainer would get."""
        rows, consumed = client.get_consumption_status(TASK, PARTITION)
        if rows is None or consumed is None:
            return set()
        left = rows[consumed == 0].tolist()
        return {key for key in client.kv_retrieve_keys(left, PARTITION) if key is not None} if left else set()

    def close(self) -> None:
        self.client.close()
        self.server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crashes", type=int, default=5)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--steps-before", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[Crash]] = {arm: [] for arm in ARMS}
    for crash in range(options.crashes):
        for arm in ARMS:
            with tempfile.TemporaryDirectory() as folder:
                job = Job(arm, Path(folder), random.Random(crash))
                found[arm].append(job.run(options.workers, options.steps_before))
                job.close()
    for arm, crashes in found.items():
        lost = [crash.lost for crash in crashes]
        print(
            f"{arm}: {statistics.median(lost):,.0f} s of generation lost for each crash ({min(lost):,.0f} to "
            f"{max(lost):,.0f}, of {statistics.median(crash.finished for crash in crashes):,.0f} s), "
            f"{statistics.median(crash.again for crash in crashes):.0f} rows trained on again, answers after "
            f"{statistics.median(crash.away_s for crash in crashes) * 1e3:,.0f} ms"
        )


if __name__ == "__main__":
    main()
