"""Data-parallel ranks over one partition, as real processes of a gloo group: they take the same number of steps."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import until
from paths import HELPERS, SOURCES
from streams import put, used

import transfer_queue as tq

Client = tq.TransferQueueClient


class Group:
    """Ranks of one process group; each scenario reuses them."""

    def __init__(self, size: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environment = {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "error", str(HELPERS / "ddp_ranks.py"), str(rank), str(size), port],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        assert [self.line(rank) for rank in range(size)] == ["ready"] * size

    def line(self, rank: int) -> str:
        out = self.ranks[rank].stdout
        assert out is not None
        return out.readline().strip()

    def say(self, rank: int, text: str) -> None:
        into = self.ranks[rank].stdin
        assert into is not None
        into.write(text + "\n")
        into.flush()

    def start(self, ranks: Iterator[int] | range | None = None, **scenario: Any) -> None:
        terms = {"workers": 0, "batch": 4, "micro": 2, **scenario}
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            self.say(rank, json.dumps(terms))

    def results(self) -> list[dict[str, Any]]:
        """What every rank got; blocks until all streams have ended."""
        return [json.loads(self.line(rank)) for rank in range(len(self.ranks))]

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


@pytest.fixture
def group(client: Client) -> Iterator[Callable[[int], Group]]:
    started: list[Group] = []

    def start(size: int) -> Group:
        started.append(Group(size))
        return started[-1]

    yield start
    for one in started:
        one.close()


def check(found: list[dict[str, Any]], rows: int, repeated: int = 0) -> None:
    """Every row is in one share, and all ranks took the same number of steps."""
    everything = [row for rank in found for part in rank["rows"] for row in part]
    assert set(everything) == set(range(rows))
    assert len(everything) == rows + repeated
    assert len({len(rank["rows"]) for rank in found}) == 1
    assert all(rank["sums"] == found[0]["sums"] for rank in found)


def fetched(client: Client, partition: str, rows: int) -> bool:
    """Whether fewer than `rows` rows are on offer any more."""
    try:
        meta = client.get_meta(["x"], rows, partition, task_name="t", timeout_s=0, lease_s=60)
    except tq.errors.DeadlineExceeded:
        return True
    client.release(meta)
    return False


def go_late(client: Client, ranks: Group, partition: str, late: int) -> None:
    """Let the late rank begin, once another one has its first batch."""
    until(lambda: fetched(client, partition, 1), "the first batches were dealt")
    ranks.say(late, "go")


def late_rank(client: Client, ranks: Group, workers: int) -> None:
    """64 rows, 2 ranks, batches of 32, rank 1 late; all defaults, rank and size from torch.distributed."""
    name = f"late{workers}"
    put(client, 64, name)
    ranks.start(partition=name, batch=32, micro=8, workers=workers, late=1)
    go_late(client, ranks, name, 1)
    found = ranks.results()
    check(found, 64)
    assert [sorted(itertools.chain(*rank["rows"])) for rank in found] == [list(range(32)), list(range(32, 64))]


def started_again(client: Client, ranks: Group) -> None:
    """Streams that were left within a batch go on in other processes."""
    put(client, 16, "again")
    client.set_partition("again", size=16)
    streams = [tq.StreamingDataset(None, 4, 1, ["x"], "again", "t", rank, True, dp_size=2) for rank in (0, 1)]
    loops = [iter(stream) for stream in streams]
    for _ in range(3):
        for loop in loops:
            next(loop)
    state = [stream.state_dict() for stream in streams]
    for stream in streams:
        stream.close()
    ranks.start(partition="again", state=state, micro=1)
    assert [len(rank["rows"]) for rank in ranks.results()] == [6, 6]
    assert used(client, "again") == 16


def test_two_ranks_get_their_batches_however_late_they_are(client: Client, group: Callable[[int], Group]) -> None:
    ranks = group(2)
    late_rank(client, ranks, workers=0)
    late_rank(client, ranks, workers=2)
    started_again(client, ranks)


def same_steps(client: Client, ranks: Group) -> None:
    """With any number of workers, ahead or not, with one rank slow and rows that come later."""
    seen = set()
    for workers, prefetch in ((0, None), (0, False), (2, None), (2, False)):
        name = f"p{workers}{prefetch}"
        client.set_partition(name, size=29)
        ranks.start(partition=name, workers=workers, prefetch=prefetch, slow=2, named=4)
        put(client, 15, name)
        put(client, 14, name, start=15)
        found = ranks.results()
        check(found, 29, repeated=0)
        assert used(client, name) == 29
        seen.add(json.dumps([rank["rows"] for rank in found]))
    assert len(seen) == 1, "and the same rows"
    put(client, 2, "few")
    client.set_partition("few", size=2)
    ranks.start(partition="few", micro=1)
    check(ranks.results(), 2, repeated=2)


def killed(client: Client, ranks: Group, workers: int, size: int) -> None:
    """The last of `size` ranks dies in its fourth micro-batch; the others get what they would have got."""
    name, last = f"killed{workers}", size - 1
    put(client, 12 * size, name)
    client.set_partition(name, size=12 * size)
    terms = {"partition": name, "workers": workers, "named": size}
    ranks.start(range(size), late=last, dies=[last, 3], **terms)
    assert [ranks.line(rank) for rank in range(last)] == ["begun"] * last
    ranks.say(last, "go")
    ranks.ranks[last].wait()
    for rank in range(last):
        ranks.say(rank, "go")
    assert [len(json.loads(ranks.line(rank))["rows"]) for rank in range(last)] == [6] * last
    assert used(client, name) == 12 * last + 6, "three micro-batches were used by the one that died"
    assert client.get_meta(["x"], 6, name, task_name="t", timeout_s=20).size == 6


def test_four_ranks_take_the_same_steps_and_one_that_is_killed_gives_its_share_back(
    client: Client, group: Callable[[int], Group]
) -> None:
    ranks = group(4)
    same_steps(client, ranks)
    killed(client, ranks, workers=0, size=4)
    killed(client, ranks, workers=2, size=3)
