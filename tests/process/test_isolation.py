"""A reader's writes are its own, and what a reader holds never changes: in threads, processes and over time."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import until
from tensordict import TensorDict

import transfer_queue as tq

Spawn = Callable[[str], Any]
SMALL, VIEWED, LARGE = 16, 40_000, 600_000  # float32 elements per row; blocks of VIEWED and LARGE rows are views


def put(keys: list[str], value: float, width: int, partition: str = "p") -> None:
    tq.kv_batch_put(keys, partition, TensorDict({"x": torch.full((len(keys), width), value)}, batch_size=[len(keys)]))


def get(keys: list[str], copy: bool = False, partition: str = "p") -> torch.Tensor:
    return tq.kv_batch_get(keys, partition, copy=copy)["x"].values()


def holds(values: torch.Tensor, expected: float) -> bool:
    return bool((values == expected).all())


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("width", [SMALL, VIEWED, LARGE])
def test_writes_into_a_result_reach_no_other_get(client: tq.TransferQueueClient, width: int, copy: bool) -> None:
    keys = ["a", "b", "c", "d"]
    put(keys, 1.0, width)
    first, second = get(keys, copy), get(keys, copy)
    first.fill_(2.0)
    assert holds(second, 1.0)
    second[::2] = 3.0
    third = get(keys, copy)
    assert holds(third, 1.0)
    assert holds(first, 2.0)
    del first, second, third
    gc.collect()
    for _ in range(3):
        again = get(keys, copy)
        assert holds(again, 1.0)
        again.fill_(9.0)
        del again


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_writes_reach_no_other_thread(client: tq.TransferQueueClient, width: int) -> None:
    put(["a", "b"], 1.0, width)
    failed: list[float] = []

    def read_and_write(mine: float) -> None:
        for _ in range(10):
            values = get(["a", "b"])
            if not holds(values, 1.0):
                failed.append(mine)
            values.fill_(mine)
            if not holds(values, mine):
                failed.append(mine)

    threads = [threading.Thread(target=read_and_write, args=(float(n),)) for n in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_writes_reach_no_other_process(client: tq.TransferQueueClient, child: Spawn, width: int) -> None:
    put(["a", "b"], 1.0, width)
    other = child(
        """
        import transfer_queue as tq
        x = tq.kv_batch_get(["a", "b"], "p")["x"].values()
        x.fill_(5.0)
        print("written", flush=True)
        input()
        assert bool((x == 5.0).all())
        """
    )
    assert other.line() == "written"
    mine = get(["a", "b"])
    assert holds(mine, 1.0)
    mine.fill_(6.0)
    other.say()
    other.finish()
    assert holds(get(["a", "b"]), 1.0)


@pytest.mark.parametrize("width", [SMALL, VIEWED, LARGE])
def test_a_reader_never_sees_its_old_bytes_in_recycled_memory(client: tq.TransferQueueClient, width: int) -> None:
    keys = ["a", "b", "c"]
    for version in range(12):
        put(keys, float(version), width)
        values = get(keys)
        assert holds(values, float(version))
        values.fill_(-1.0)  # dirties the pages of this block in this process
        if version % 3 == 0:
            values[1:].mul_(2)
        del values
        tq.kv_clear(keys, "p")
    until(lambda: client.stats()["arena_nbytes_used"] == 0, "an empty store")


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("width", [SMALL, VIEWED, LARGE])
def test_results_outlive_overwrite_and_clear(client: tq.TransferQueueClient, width: int, copy: bool) -> None:
    keys = ["a", "b"]
    held = []
    for version in range(6):
        put(keys, float(version), width)
        held.append(get(keys, copy))
        if version % 2:
            tq.kv_clear(keys, "p")
    put(keys, 77.0, width)
    for version, values in enumerate(held):
        assert holds(values, float(version))
    held[3].fill_(3.5)
    assert holds(held[3], 3.5)
    assert holds(get(keys), 77.0)


def test_results_outlive_detaching(client: tq.TransferQueueClient, child: Spawn) -> None:
    put(["a", "b"], 1.0, LARGE)
    reader = child(
        """
        import transfer_queue as tq
        x = tq.kv_batch_get(["a", "b"], "p")["x"].values()
        tq.close()
        print("closed", flush=True)
        input()
        assert bool((x == 1.0).all()), x.unique()
        del x
        print("dropped", flush=True)
        input()
        """
    )
    assert reader.line() == "closed"
    tq.kv_clear(["a", "b"], "p")
    for _ in range(3):
        put(["c", "d"], 2.0, LARGE)
    reader.say()
    assert reader.line() == "dropped"
    tq.kv_clear(["c", "d"], "p")
    until(lambda: client.stats()["arena_nbytes_used"] == 0, "the release of the reader's pins")
    reader.say()
    reader.finish()


def test_results_outlive_a_broken_connection(client: tq.TransferQueueClient) -> None:
    put(["a", "b"], 1.0, LARGE)
    held = get(["a", "b"])
    for connection in client.session._idle[""]:
        connection._frames.socket.shutdown(2)
    tq.kv_clear(["a", "b"], "p")
    for _ in range(3):
        put(["c", "d"], 2.0, LARGE)
    assert holds(held, 1.0)


@pytest.mark.parametrize("nbytes", [65_472, 65_536, 65_600, 69_632])
def test_blocks_around_the_limit_of_small_ones(client: tq.TransferQueueClient, nbytes: int) -> None:
    width = nbytes // 8
    for version in range(4):
        for field in ("x", "y", "z"):
            value = float(version * 10 + ord(field))
            tq.kv_batch_put(["a", "b"], "p", {field: torch.full((2, width), value)})
        first, second = tq.kv_batch_get(["a", "b"], "p"), tq.kv_batch_get(["a", "b"], "p")
        for field in ("x", "y", "z"):
            assert holds(first[field].values(), float(version * 10 + ord(field)))
            first[field].values().fill_(-5.0)
            assert holds(second[field].values(), float(version * 10 + ord(field)))
        del first, second
        if version % 2:
            tq.kv_clear(["a", "b"], "p")


def test_objects_with_large_tensors_are_isolated(client: tq.TransferQueueClient) -> None:
    images = [{"pixels": torch.full((200_000,), float(i)), "grid": [i]} for i in range(3)]
    tq.kv_batch_put(["a", "b", "c"], "p", {"img": images})
    first, second = (list(tq.kv_batch_get(["a", "b", "c"], "p")["img"]) for _ in range(2))
    first[1]["pixels"].fill_(9.0)
    assert holds(second[1]["pixels"], 1.0)
    tq.kv_clear(["a", "b", "c"], "p")
    tq.kv_batch_put(["d"], "p", {"img": [{"pixels": torch.full((600_000,), 4.0)}]})
    assert [holds(second[i]["pixels"], float(i)) for i in range(3)] == [True] * 3
    assert next(iter(tq.kv_batch_get("d", "p")["img"]))["pixels"].unique().tolist() == [4.0]


def test_random_holds_writes_and_clears_in_one_process(client: tq.TransferQueueClient) -> None:
    for seed in range(2):
        random_walk(random.Random(seed))
        tq.get_client().clear_partition("p")
    gc.collect()
    until(lambda: client.stats()["arena_nbytes_used"] == 0, "an empty store")
    assert client.stats()["pinned_nbytes"] == {}


def random_walk(rng: random.Random) -> None:
    """Any order of put, get, hold, scribble, drop and clear; every row tells which key and version it is."""
    stored: dict[str, tuple[float, int]] = {}
    held: list[list[Any]] = []
    for step in range(100):
        keys = rng.sample("abcdef", rng.randint(1, 3))
        width = rng.choice((SMALL, VIEWED, 150_000))
        action = rng.random()
        if action < 0.35:
            values = torch.tensor([float(step * 100 + ord(key)) for key in keys])[:, None].expand(-1, width)
            tq.kv_batch_put(keys, "p", TensorDict({"x": values}, batch_size=[len(keys)]))
            stored.update({key: (float(step * 100 + ord(key)), width) for key in keys})
        elif action < 0.75 and stored:
            wanted = [key for key in keys if key in stored] or [next(iter(stored))]
            rows = tq.kv_batch_get(wanted, "p", copy=rng.random() < 0.3)["x"].unbind()
            for key, row in zip(wanted, rows, strict=True):
                value, size = stored[key]
                assert row.numel() == size
                assert holds(row, value)
                held.append([row, value])
        elif action < 0.85 and held:
            entry = rng.choice(held)
            entry[1] = -float(step)
            entry[0].fill_(entry[1])
        elif action < 0.93:
            tq.kv_clear(keys, "p")
            for key in keys:
                stored.pop(key, None)
        if len(held) > 12:
            rng.shuffle(held)
            del held[6:]
        if step % 10 == 0:
            assert all(holds(row, value) for row, value in held)


WORKER = """
import random, sys, time
import torch
import transfer_queue as tq
from transfer_queue.errors import CallerError

def encode(key, version):
    return float(ord(key) * 1_000_000 + version)  # exact in float64

torch.set_num_threads(1)
rng = random.Random({seed})
width, lane = {width}, {lane}
keys, version, held, reads = "abcdef", lane, [], 0
tq.kv_list()  # imports and attaches
end = time.monotonic() + {seconds}
while time.monotonic() < end or reads <= 5:  # a busy machine takes longer
    version += 2  # writers never use the same version
    some = rng.sample(keys, rng.randint(1, 4))
    action = rng.random()
    if action < 0.4:
        rows = [torch.full((width + ord(key) % 3,), encode(key, version), dtype=torch.float64) for key in some]
        tq.kv_batch_put(some, "p", {{"x": rows, "v": torch.full((len(some),), version)}})
    elif action < 0.5:
        tq.kv_clear(some, "p")
    else:
        try:
            td = tq.kv_batch_get(some, "p", strict=True, copy=rng.random() < 0.3)
        except CallerError:
            continue  # somebody cleared them
        reads += 1
        for key, row, v in zip(some, td["x"].unbind(), td["v"].tolist()):
            assert row.numel() == width + ord(key) % 3, f"foreign row under {{key}}"
            low, high = float(row.min()), float(row.max())
            assert low == high == encode(key, v), f"torn or foreign row {{key}} {{v}}: {{low}} {{high}}"
            held.append([row, low])
    if held and rng.random() < 0.3:
        entry = rng.choice(held)
        entry[1] = -float(version)
        entry[0].fill_(entry[1])
    if len(held) > 8:
        for row, value in held:
            assert bool((row == value).all()), "a held row changed"
        rng.shuffle(held)
        del held[4:]
print(reads)
"""


@pytest.mark.parametrize(("width", "seed"), [(64, 1), (30_000, 2), (400_000, 3)])
def test_two_processes_writing_the_same_rows_never_tear_them(
    client: tq.TransferQueueClient, child: Spawn, width: int, seed: int
) -> None:
    workers = [child(WORKER.format(seed=seed * 10 + lane, lane=lane, width=width, seconds=2)) for lane in (0, 1)]
    assert all(int(worker.finish()) > 5 for worker in workers)
    client.clear_partition("p")
    until(lambda: client.stats()["arena_nbytes_used"] == 0, "an empty store")
