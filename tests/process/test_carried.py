"""Small rows come along with the metadata of a fetch, by the rule of `transfer_queue.client.carried`."""

from __future__ import annotations

import asyncio
import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import until
from hosts import TOKEN, Host

import transfer_queue as tq
from transfer_queue.client import carried
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.session import Session
from transfer_queue.errors import ServiceUnavailable, StorageKeyNotFoundError
from transfer_queue.metadata import BatchMeta
from transfer_queue.wire.address import parse_address

numbers = itertools.count()


@pytest.fixture(autouse=True)
def for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came along stays fresh, however slow the machine."""
    monkeypatch.setattr(carried, "FRESH_S", 3600.0)


@pytest.fixture
def part(shared: TransferQueueClient) -> Iterator[str]:
    name = f"carried-{next(numbers)}"
    yield name
    shared.clear_partition(name)


@pytest.fixture
def other(shared: TransferQueueClient) -> Iterator[TransferQueueClient]:
    """Another client, as independent as another process."""
    found = TransferQueueClient.of(Session(shared.session.address))
    yield found
    found.close()


def put(client: TransferQueueClient, part: str, *values: float) -> BatchMeta:
    return client.put({"x": torch.tensor(values).view(-1, 1)}, partition_id=part)


def fetch(client: TransferQueueClient, part: str, count: int = 1, task: str = "") -> BatchMeta:
    return client.get_meta(["x"], count, part, task_name=task or f"task of {part}")


def xs(client: TransferQueueClient, meta: BatchMeta) -> list[float]:
    values: list[float] = client.get_data(meta)["x"].values().tolist()
    return values


def reading(client: TransferQueueClient, part: str) -> None:
    """The client has read what it fetched for this task."""
    put(client, part, -1.0)
    assert xs(client, fetch(client, part)) == [-1.0]


def requests(client: TransferQueueClient) -> int:
    count: int = client.stats()["requests"]
    return count


def test_a_read_after_a_fetch_asks_nobody(shared: TransferQueueClient, part: str) -> None:
    reading(shared, part)
    put(shared, part, 1.0, 2.0)
    meta = fetch(shared, part, 2)
    before = requests(shared)
    assert xs(shared, meta) == [1.0, 2.0]
    assert requests(shared) == before + 1, "that of the question alone"


def test_who_waits_is_woken_with_the_rows(shared: TransferQueueClient, other: TransferQueueClient, part: str) -> None:
    reading(other, part)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fetch, other, part)
        until(lambda: shared.stats()["waiting_requests"] == 1, "the fetch waits")
        put(shared, part, 5.0)
        meta = waiting.result()
    before = requests(other)
    assert xs(other, meta) == [5.0]
    assert requests(other) == before + 1


def test_it_is_so_on_an_event_loop(shared: TransferQueueClient, part: str) -> None:
    reading(shared, part)
    put(shared, part, 1.0)

    async def take() -> list[float]:
        meta = await shared.async_get_meta(["x"], 1, part, task_name=f"task of {part}")
        assert meta._carried.cells is not None  # type: ignore[attr-defined]
        found: list[float] = (await shared.async_get_data(meta))["x"].values().tolist()
        return found

    assert asyncio.run(take()) == [1.0]


def test_a_second_read_asks_the_service(shared: TransferQueueClient, other: TransferQueueClient, part: str) -> None:
    reading(shared, part)
    meta = put(shared, part, 1.0)
    fetched = fetch(shared, part)
    other.put({"x": torch.tensor([[2.0]])}, meta)
    assert xs(shared, fetched) == [1.0], "as it was handed out"
    assert xs(shared, fetched) == [2.0]


def test_a_client_reads_what_it_wrote(shared: TransferQueueClient, part: str) -> None:
    reading(shared, part)
    meta = put(shared, part, 1.0)
    fetched = fetch(shared, part)
    shared.put({"x": torch.tensor([[2.0]])}, meta)
    assert xs(shared, fetched) == [2.0]


def test_a_client_does_not_read_what_it_cleared(shared: TransferQueueClient, part: str) -> None:
    reading(shared, part)
    put(shared, part, 1.0)
    fetched = fetch(shared, part)
    shared.clear_samples(fetched)
    with pytest.raises(StorageKeyNotFoundError):
        shared.get_data(fetched)


def test_a_write_that_began_before_the_fetch_and_ended_after_it_is_read(
    shared: TransferQueueClient, other: TransferQueueClient, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading(shared, part)
    meta = put(shared, part, 1.0)
    sent = shared.session.call
    fetched: list[BatchMeta] = []

    def call(effect: Any) -> Any:
        if type(effect.request).__name__ == "Commit":
            monkeypatch.undo()
            monkeypatch.setattr(carried, "FRESH_S", 3600.0)
            fetched.append(fetch(shared, part))
        return sent(effect)

    monkeypatch.setattr(shared.session, "call", call)
    shared.put({"x": torch.tensor([[2.0]])}, meta)
    assert xs(shared, fetched[0]) == [2.0]


@pytest.mark.parametrize("fresh", [True, False])
def test_what_another_client_changes_is_read_after_a_moment(
    shared: TransferQueueClient, other: TransferQueueClient, part: str, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carried, "FRESH_S", 3600.0 if fresh else 0.0)
    reading(shared, part)
    meta = put(shared, part, 1.0, 2.0)
    first, second = fetch(shared, part), fetch(shared, part)
    other.put({"x": torch.tensor([[3.0], [4.0]])}, meta)
    assert xs(shared, first) == ([1.0] if fresh else [3.0])
    other.clear_samples(meta)
    if fresh:
        assert xs(shared, second) == [2.0]
    else:
        with pytest.raises(StorageKeyNotFoundError):
            shared.get_data(second)


def test_only_the_metadata_of_the_fetch_itself_has_them(
    shared: TransferQueueClient, other: TransferQueueClient, part: str
) -> None:
    reading(shared, part)
    put(shared, part, 1.0, 2.0)
    fetched = fetch(shared, part, 2)
    derived = [fetched[:1], fetched.select_samples([1]), copy.copy(fetched), pickle.loads(pickle.dumps(fetched))]  # noqa: S301
    assert all(one._carried is None for one in derived)
    assert xs(other, fetched) == [1.0, 2.0], "another client asks"
    put(shared, part, 3.0)
    changed = fetch(shared, part)
    changed.global_indexes = fetched.global_indexes[1:]
    assert xs(shared, changed) == [2.0]


def test_who_does_not_read_is_not_sent_them(shared: TransferQueueClient, part: str) -> None:
    put(shared, part, *map(float, range(60)))
    assert fetch(shared, part)._carried.cells is None  # type: ignore[attr-defined]
    shared.get_data(fetch(shared, part))
    sent = [fetch(shared, part)._carried.cells is not None for _ in range(40)]  # type: ignore[attr-defined]
    assert sent == [True] * carried.MAX_UNREAD + [False] * (40 - carried.MAX_UNREAD)
    shared.get_data(fetch(shared, part))
    assert fetch(shared, part)._carried.cells is not None  # type: ignore[attr-defined]
    assert fetch(shared, part, task="another")._carried.cells is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(("rows", "width"), [(1, 40_000), (257, 1)], ids=["many bytes", "many rows"])
def test_what_is_much_does_not_come_along_and_is_not_pinned(
    shared: TransferQueueClient, part: str, rows: int, width: int
) -> None:
    reading(shared, part)
    shared.put({"x": torch.ones(rows, width)}, partition_id=part)
    fetched = fetch(shared, part, rows)
    assert fetched._carried.cells is None  # type: ignore[attr-defined]
    assert not shared.stats()["pinned_nbytes"]
    assert len(xs(shared, fetched)) == rows * width


def test_what_the_reader_writes_reaches_nobody(shared: TransferQueueClient, part: str) -> None:
    reading(shared, part)
    put(shared, part, 1.0)
    fetched = fetch(shared, part)
    shared.get_data(fetched)["x"].values().fill_(9.0)
    assert xs(shared, fetched) == [1.0]


def test_a_closed_client_reads_nothing(service: Callable[..., TransferQueueClient]) -> None:
    client = service()
    reading(client, "p")
    put(client, "p", 1.0)
    fetched = fetch(client, "p")
    tq.close()
    with pytest.raises(ServiceUnavailable):
        client.get_data(fetched)


def test_rows_of_other_hosts_are_read_as_ever(start_host: Callable[..., Host]) -> None:
    head = start_host()
    joined = start_host(join=head.tcp)
    afar = TransferQueueClient.of(Session(parse_address(head.tcp, TOKEN)))
    for reader in (head.client, joined.client, afar):
        for writer in (head.client, joined.client):
            part = f"p{next(numbers)}"
            reading(reader, part)
            put(writer, part, 1.0)
            assert xs(reader, fetch(reader, part)) == [1.0]
            put(head.client, part, 2.0)
            put(joined.client, part, 3.0)
            assert sorted(xs(reader, fetch(reader, part, 2))) == [2.0, 3.0]
    afar.close()
