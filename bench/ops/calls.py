"""Small operations, where the call is everything: one row, metadata, listings, waking."""

from __future__ import annotations

import asyncio
import gc
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from bench import digest
from bench.session import Session

FILL_CHUNK = 20_000
TOKENS = 64
TASK = "bench"
LISTINGS = 5


def row_fields(index: int) -> dict[str, Any]:
    """One row of three small fields, each a vector, as a rollout worker writes it."""
    import torch

    return {
        "tokens": torch.arange(index, index + TOKENS),
        "log_probs": torch.full((TOKENS,), float(index)),
        "reward": torch.tensor([float(index)]),
    }


def timed(calls: Iterable[Callable[[], Any]]) -> list[float]:
    """Seconds of each call; results are dropped at once."""
    gc.collect()
    seconds = []
    for call in calls:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def put_rows(session: Session, partition: str, num: int) -> dict[str, Any]:
    """Seconds of each of `num` one-row puts, one after another."""
    if session.name == "ray":
        return _ray_put_rows(session, partition, num)
    tq = session.tq
    rows = [row_fields(i) for i in range(num)]
    keys = session.keys(num)
    return {"each_s": timed(partial(tq.kv_put, keys[i], partition, rows[i]) for i in range(num))}


def get_rows(session: Session, partition: str, num: int) -> dict[str, Any]:
    """Seconds of each of `num` one-row gets; one more row is read and checked outside of the clock."""
    if session.name == "ray":
        return _ray_get_rows(session, partition, num)
    tq = session.tq
    keys = session.keys(num)
    seconds = timed(partial(tq.kv_batch_get, key, partition) for key in keys)
    _check_row(tq.kv_batch_get(keys[num - 1], partition), num - 1)
    return {"each_s": seconds}


def _check_row(row: Any, index: int) -> None:
    for name, value in row_fields(index).items():
        got = row[name][0]
        if got.dtype != value.dtype or not bool((got == value).all()):
            raise digest.WrongBytes(f"{name} of row {index} is {got}")


def _ray_put_rows(session: Session, partition: str, num: int) -> dict[str, Any]:
    import ray

    rows = [{name: value.numpy() for name, value in row_fields(i).items()} for i in range(num)]
    refs: list[Any] = []

    def put(row: dict[str, Any]) -> None:
        refs.append(ray.put(row))

    seconds = timed(partial(put, row) for row in rows)
    board = session.system._board  # type: ignore[attr-defined]
    ray.get(board.set.remote(partition, refs), timeout=30)
    return {"each_s": seconds}


def _ray_get_rows(session: Session, partition: str, num: int) -> dict[str, Any]:
    import ray

    board = session.system._board  # type: ignore[attr-defined]
    refs = ray.get(board.get.remote(partition), timeout=30)
    seconds = timed(partial(ray.get, ref) for ref in refs)
    if int(ray.get(refs[num - 1])["tokens"][0]) != num - 1:
        raise digest.WrongBytes(f"tokens of row {num - 1} differ")
    return {"each_s": seconds}


def async_rows(session: Session, partition: str, num: int, in_flight: int, write: bool) -> dict[str, Any]:
    """Operations a second with `in_flight` coroutines of one event loop putting, or getting, one row at a time; the
    last row is checked outside of the clock."""
    tq = session.tq
    found: dict[int, Any] = {}
    keys = session.keys(num)
    rows = [row_fields(i) for i in range(num)] if write else []

    def operation(i: int) -> Awaitable[Any]:
        answer: Awaitable[Any] = (
            tq.async_kv_put(keys[i], partition, rows[i]) if write else tq.async_kv_batch_get(keys[i], partition)
        )
        return answer

    async def worker(indexes: Iterable[int]) -> None:
        for i in indexes:
            answer = await operation(i)
            if i == num - 1:
                found[i] = answer

    async def run() -> float:
        await operation(0)
        shared = iter(range(num))
        start = time.perf_counter()
        await asyncio.gather(*(worker(shared) for _ in range(in_flight)))
        return time.perf_counter() - start

    gc.collect()
    rate = num / asyncio.run(run())
    _check_row(tq.kv_batch_get(keys[num - 1], partition) if write else found[num - 1], num - 1)
    return {"ops_per_s": rate}


def clear_keys(session: Session, partition: str, num: int) -> dict[str, Any]:
    """Clear the first `num` keys."""
    session.system.clear(partition, session.keys(num))
    return {}


def fill(session: Session, partition: str, num: int, keyed: bool, tagged: bool = False) -> dict[str, Any]:
    """Fill a partition with `num` rows of one field "x", in chunks; with keys, and with a tag a row, where asked."""
    import torch
    from tensordict import TensorDict

    tq = session.tq
    start = time.perf_counter()
    for first in range(0, num, FILL_CHUNK):
        size = min(FILL_CHUNK, num - first)
        batch = TensorDict({"x": torch.arange(first, first + size).float().unsqueeze(1)}, batch_size=size)
        if not keyed:
            tq.get_client().put(batch, partition_id=partition)
            continue
        keys = [f"row-{i:07d}" for i in range(first, first + size)]
        tags = [{"version": i % 5, "status": "done"} for i in range(size)] if tagged else None
        tq.kv_batch_put(keys=keys, partition_id=partition, fields=batch, tags=tags)
    return {"s": time.perf_counter() - start}


def clear_partition(session: Session, partition: str) -> dict[str, Any]:
    """Clear a whole partition."""
    session.tq.get_client().clear_partition(partition)
    return {}


def get_meta(session: Session, partition: str, num_ops: int, rows: int, task: str) -> dict[str, Any]:
    """Seconds of `num_ops` fetches of `rows` rows each; the first, that may have to set the task up, is apart."""
    client = session.tq.get_client()
    metas: list[Any] = []

    def call() -> None:
        metas.append(client.get_meta(["x"], rows, partition, task_name=task))

    first = timed([call])
    seconds = timed(itertools.repeat(call, num_ops))
    indexes = [index for meta in metas for index in meta.global_indexes]
    if len(set(indexes)) != (num_ops + 1) * rows:
        raise digest.WrongBytes(f"{len(set(indexes))} different rows came in {num_ops + 1} fetches of {rows}")
    return {"first_s": first[0], "each_s": seconds}


def listings(session: Session, partition: str, num: int, tagged: bool) -> dict[str, Any]:
    """Median seconds of a few calls each: both statuses of the partition, and kv_list; sizes are checked.

    A listing may be decoded lazily: `kv_list_read` is the call and a look at every key and tag.
    """
    tq = session.tq
    client = tq.get_client()
    client.get_meta(["x"], 1, partition, task_name=TASK)
    kept: dict[str, Any] = {}
    calls = {
        "consumption": lambda: kept.update(consumption=client.get_consumption_status(TASK, partition)[0]),
        "production": lambda: kept.update(production=client.get_production_status(["x"], partition)[0]),
        "kv_list": lambda: kept.update(kv_list=tq.kv_list(partition)[partition]),
        "kv_list_read": lambda: kept.update(
            read=[(k, t.get("version")) for k, t in tq.kv_list(partition)[partition].items()]
        ),
    }
    seconds = {name: statistics.median(timed([call] * LISTINGS)) for name, call in calls.items()}
    sizes = {name: len(value) for name, value in kept.items()}
    if sizes["kv_list"] != num or min(sizes.values()) < num:
        raise digest.WrongBytes(f"{num} rows were put, listed are {sizes}")
    if tagged and kept["kv_list"]["row-0000007"].get("version") != 7 % 5:
        raise digest.WrongBytes("kv_list has another tag for row 7 than was put")
    return seconds


def wake_prepare(session: Session, partition: str, num: int) -> dict[str, Any]:
    """Write every field but the last of `num` rows."""
    import torch
    from tensordict import TensorDict

    tq = session.tq
    batch = TensorDict({"tokens": torch.arange(num * TOKENS).reshape(num, TOKENS)}, batch_size=num)
    tq.kv_batch_put(keys=session.keys(num), partition_id=partition, fields=batch)
    return {}


def wake_write(session: Session, partition: str, num: int, pace_s: float) -> dict[str, Any]:
    """Write the missing field of one row after another, `pace_s` apart; monotonic nanoseconds before and after each."""
    import torch

    tq = session.tq
    keys = session.keys(num)
    begun, done = [], []
    for i in range(num):
        time.sleep(pace_s)
        value = {"reward": torch.tensor([float(i)])}
        begun.append(time.monotonic_ns())
        tq.kv_put(keys[i], partition, value)
        done.append(time.monotonic_ns())
    return {"begun_ns": begun, "done_ns": done}


def wake_wait(session: Session, partition: str, num: int, deadline_s: float) -> dict[str, Any]:
    """Hold the data of `num` rows one by one as they become ready; monotonic nanoseconds at which each was held.

    Ours blocks in get_meta; TransferQueue 0.1.11 can't, so it is polled every millisecond.
    """
    client = session.tq.get_client()
    end = time.monotonic() + deadline_s
    held = []
    for i in range(num):
        if session.name == "ours":
            left = max(0.1, end - time.monotonic())
            meta = client.get_meta(["tokens", "reward"], 1, partition, task_name=TASK, timeout_s=left)
        else:
            while not len(meta := client.get_meta(["tokens", "reward"], 1, partition, task_name=TASK)):
                if time.monotonic() > end:
                    raise TimeoutError(f"row {i} did not come")
                time.sleep(0.001)
        data = client.get_data(meta)
        held.append(time.monotonic_ns())
        if int(data["reward"][0].reshape(-1)[0]) != i or int(data["tokens"][0][0]) != i * TOKENS:
            raise digest.WrongBytes(f"row {i} came with the data of another")
    return {"held_ns": held}
