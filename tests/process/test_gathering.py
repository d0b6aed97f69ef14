"""Rows that were put alone become columns in the background. Nobody sees a difference, but that reads get cheaper."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from blocks import rows_of, same
from conftest import until
from hosts import Host

import transfer_queue as tq

Service = Callable[..., tq.TransferQueueClient]
P = "train"
COUNT = 200


def row(number: int, version: int = 0) -> dict[str, Any]:
    return {
        "x": torch.arange(number % 7 * 300) + version,
        "y": torch.full((2,), float(number + version)),
        "r": torch.tensor(float(number)),
        "s": f"text {number} {version}",
        "o": [number, {"a": version}],
    }


def put_alone(count: int = COUNT, first: int = 0, version: int = 0) -> list[str]:
    keys = [f"k{number}" for number in range(first, first + count)]
    for number, key in enumerate(keys, first):
        tq.kv_put(key, P, row(number, version), tag={"n": number})
    return keys


def is_what_was_put(keys: list[str], version: int = 0) -> None:
    found = tq.kv_batch_get(keys, P)
    expected = [row(int(key[1:]), version) for key in keys]
    for name in expected[0]:
        assert all(same(one, other[name]) for one, other in zip(rows_of(found[name]), expected, strict=True)), name


def gathered(client: tq.TransferQueueClient, blocks: int = 1) -> None:
    until(lambda: client.stats()["blocks"] <= blocks and not client.stats()["pinned_nbytes"], "rows as columns")


def test_rows_read_as_before_and_those_that_come_later_with_them(client: tq.TransferQueueClient) -> None:
    keys = put_alone()
    held = tq.kv_batch_get(keys, P)
    gathered(client)
    is_what_was_put(keys)
    assert same(rows_of(held["x"]), [row(number)["x"] for number in range(COUNT)])
    keys += put_alone(40, COUNT)
    random.Random(1).shuffle(keys)
    is_what_was_put(keys)
    assert tq.kv_list(P)[P]["k7"] == {"n": 7}
    meta = client.get_meta(["x", "s"], COUNT, P, mode="fetch", task_name="t")
    assert client.get_data(meta)["s"].tolist() == [row(number)["s"] for number in range(COUNT)]


def test_a_second_reader_gets_views(client: tq.TransferQueueClient) -> None:
    keys = [f"k{number}" for number in range(COUNT)]
    for key in keys:
        tq.kv_put(key, P, {"x": torch.ones(1000)})
    gathered(client)
    found = tq.kv_batch_get(keys, P)
    assert sum(client.stats()["pinned_nbytes"].values()) >= COUNT * 4000
    assert float(found["x"].values().sum()) == COUNT * 1000


def test_rows_are_overwritten_updated_and_cleared_while_they_are_gathered(client: tq.TransferQueueClient) -> None:
    versions = dict.fromkeys(put_alone(), 0)
    chance = random.Random(3)
    turns = 0
    while client.stats()["blocks"] > 130 and turns < 2000:
        turns += 1
        number = chance.randrange(COUNT)
        key = f"k{number}"
        if number % 5 == 0:
            tq.kv_clear(key, P)
            versions.pop(key, None)
        elif number % 5 == 1 and key in versions:
            versions[key] += 1
            tq.kv_put(key, P, row(number, versions[key]))
        elif number % 5 == 2 and key in versions:
            tq.kv_update(key, P, {"s": f"text {number} {versions[key]}"}, parser="replace")
        picks = chance.sample(sorted(versions), 20)
        found = tq.kv_batch_get(picks, P)
        expected = [row(int(key[1:]), versions[key]) for key in picks]
        assert same(rows_of(found["x"]), [one["x"] for one in expected])
        assert found["s"].tolist() == [one["s"] for one in expected]
    # Those that changed just now have yet to stay for a while.
    until(lambda: client.stats()["blocks"] <= 130, "the last rows' columns")
    tq.kv_clear(list(versions), P)
    del found
    until(lambda: client.stats()["arena_nbytes_used"] == 0, "an empty store")


def test_a_stream_that_runs_meanwhile_has_every_row_once(client: tq.TransferQueueClient) -> None:
    async def produce() -> None:
        for number in range(600):
            await tq.async_kv_put(f"k{number}", P, {"x": torch.full((50,), float(number))})
            await asyncio.sleep(0.004)

    async def consume() -> list[float]:
        found: list[float] = []
        while len(found) < 600:
            _, data = await client.async_take(P, ["x"], 4, "t", timeout_s=20)
            found += [float(one[0]) for one in data["x"].unbind()]
        return found

    async def both() -> list[float]:
        _, found = await asyncio.gather(produce(), consume())
        return found

    assert sorted(asyncio.run(both())) == [float(number) for number in range(600)]
    gathered(client, 600 - 128)


def test_a_copy_does_not_take_the_room_that_writers_need(service: Service) -> None:
    client = service(backend={"SimpleStorage": {"budget_nbytes": 4 << 20}})
    keys = [f"k{number}" for number in range(100)]
    for key in keys:
        tq.kv_put(key, P, {"x": torch.zeros(30_000, dtype=torch.uint8)})
    tq.kv_put("end", "q", {"x": torch.zeros(8, dtype=torch.uint8)})
    rounds = [0]

    def waited() -> bool:
        rounds[0] += 1
        tq.kv_put("full", "r", {"x": torch.zeros(1 << 19, dtype=torch.uint8)})
        return rounds[0] > 200

    until(waited, "puts into what is left")
    assert client.stats()["blocks"] == 102


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
    head = Host()
    hosts = [head, Host(join=head.tcp)]
    yield hosts
    for host in reversed(hosts):
        host.close()


def test_rows_are_gathered_on_the_host_that_has_them(two_hosts: list[Host]) -> None:
    head, other = two_hosts
    keys = [f"k{number}" for number in range(COUNT)]
    for number, key in enumerate(keys):
        other.kv_put([key], P, {"x": torch.full((1, 500), float(number)), "n": torch.tensor([number])})
    until(lambda: head.client.stats()["blocks"] == 1, "rows as columns")
    assert head.used() == 0
    for host in two_hosts:
        assert host.kv_get(keys[::-1], P)["n"].tolist() == list(range(COUNT))[::-1]
    head.client.clear_partition(P)
    until(lambda: other.used() == 0, "the end of the rows")
