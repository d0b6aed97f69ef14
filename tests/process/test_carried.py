"""Small rows come along with the metadata of a fetch, by the rule of `transfer_queue.client.carried`."""

from __future__ import annotations

import asyncio
import copy
import itertools
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import until
from hosts import TOKEN, Host

import transfer_queue as tq
from transfer_queue.client import carried
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.session import Session
from transfer_queue.errors import DeadlineExceeded, ServiceUnavailable, StorageKeyNotFoundError
from transfer_queue.metadata import BatchMeta
from transfer_queue.wire import messages as m
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


def came(meta: BatchMeta) -> bool:
    """Whether the cells came along."""
    known: carried.CarriedCells = meta._carried  # type: ignore[assignment]
    return bool(known.cells)


def requests(client: TransferQueueClient) -> int:
    count: int = client.stats()["requests"]
    return count


def test_a_few_rows_of_a_large_put_come_along(part: str, shared: TransferQueueClient) -> None:
    count = 2000
    values = {
        "x": torch.arange(count * 128, dtype=torch.float64).view(count, 128),
        "r": torch.nested.nested_tensor([torch.arange(n % 7) for n in range(count)], layout=torch.jagged),
        "s": [f"text {n}" for n in range(count)],
        "o": [{"t": torch.arange(n % 3), "n": n} for n in range(count)],
    }
    shared.put(values, partition_id=part)
    fields = list(values)
    for turn, size in enumerate([1, 5, 1, 3, 200]):
        meta = shared.get_meta(fields, size, part, task_name="t")
        first = sum([1, 5, 1, 3, 200][:turn])
        if turn:  # the task reads what it fetches
            assert came(meta) == (size < 200), "200 rows of 1 KB are more than comes along"
        data = shared.get_data(meta)
        assert torch.equal(torch.stack(list(data["x"].unbind())), values["x"][first : first + size])
        assert [row.tolist() for row in data["r"].unbind()] == [list(range(n % 7)) for n in range(first, first + size)]
        assert data["s"].tolist() == values["s"][first : first + size]
        assert [one["n"] for one in data["o"].tolist()] == list(range(first, first + size))
        assert [len(one["t"]) for one in data["o"].tolist()] == [n % 3 for n in range(first, first + size)]


def test_fields_of_several_large_puts_come_along(part: str, shared: TransferQueueClient) -> None:
    keys = [f"k{n}" for n in range(500)]
    for name in "ab":
        tq.kv_batch_put(keys, part, {name: torch.arange(500.0)[:, None].expand(500, 200).contiguous()})
    shared.get_data(shared.get_meta(["a", "b"], 1, part, task_name="t"))
    meta = shared.get_meta(["a", "b"], 2, part, task_name="t")
    assert came(meta)
    data = shared.get_data(meta)
    assert [float(row[0]) for row in data["a"].unbind()] == [float(row[0]) for row in data["b"].unbind()] == [1.0, 2.0]


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
        before = (await shared.async_stats())["requests"]
        found: list[float] = (await shared.async_get_data(meta))["x"].values().tolist()
        assert (await shared.async_stats())["requests"] == before + 1
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
    assert came(fetched)
    shared.put({"x": torch.tensor([[2.0]])}, meta)
    assert xs(shared, fetched) == [2.0]


def test_a_client_does_not_read_what_it_cleared(shared: TransferQueueClient, part: str) -> None:
    reading(shared, part)
    put(shared, part, 1.0)
    fetched = fetch(shared, part)
    assert came(fetched)
    shared.clear_samples(fetched)
    with pytest.raises(StorageKeyNotFoundError):
        shared.get_data(fetched)


@pytest.mark.parametrize("end", ["ack", "remove", "advance", "filter", "select", "checkpoint"])
def test_a_client_does_not_read_what_it_cleared_of_a_pool(shared: TransferQueueClient, part: str, end: str) -> None:
    reading(shared, part)
    pool = tq.group_pool(part, tq.GroupPolicy.windowed(0))
    pool.open("g", 1)
    pool.finish(pool.claim(1)[0], {"x": torch.tensor([[1.0]])})
    batch = pool.select(1) if end == "ack" else None
    if end == "checkpoint":
        pool.checkpoint(0)
        pool.ack(pool.select(1), clear=True)
    fetched = fetch(shared, part)
    assert came(fetched)
    if batch is not None:
        pool.ack(batch, clear=True)
    elif end == "checkpoint":
        pool.checkpoint(1)
    elif end == "select":
        with pytest.raises(DeadlineExceeded):
            pool.select(1, version=9, timeout_s=0)
    elif end == "advance":
        pool.advance(9)
    elif end == "filter":
        pool.filter(["g"])
    else:
        pool.remove(discard=True)
    with pytest.raises(StorageKeyNotFoundError):
        shared.get_data(fetched)
    pool.remove(discard=True)


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
    assert came(fetched[0])
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
    assert not came(fetch(shared, part))
    shared.get_data(fetch(shared, part))
    sent = [came(fetch(shared, part)) for _ in range(40)]
    most = carried.MAX_UNUSED // carried.UNUSED
    assert sent == [True] * most + [False] * (40 - most)
    shared.get_data(fetch(shared, part))
    assert came(fetch(shared, part))
    assert not came(fetch(shared, part, task="another"))


@pytest.mark.parametrize(("rows", "width"), [(1, 40_000), (257, 1)], ids=["many bytes", "many rows"])
def test_what_is_much_does_not_come_along_and_is_not_pinned(
    shared: TransferQueueClient, part: str, rows: int, width: int
) -> None:
    reading(shared, part)
    shared.put({"x": torch.ones(rows, width)}, partition_id=part)
    fetched = fetch(shared, part, rows)
    assert not came(fetched)
    assert not shared.stats()["pinned_nbytes"]
    assert len(xs(shared, fetched)) == rows * width


def test_what_the_reader_writes_reaches_nobody(shared: TransferQueueClient, part: str) -> None:
    reading(shared, part)
    put(shared, part, 1.0)
    fetched = fetch(shared, part)
    shared.get_data(fetched)["x"].values().fill_(9.0)
    assert xs(shared, fetched) == [1.0]


def test_rows_of_other_hosts_are_read_as_ever(start_host: Callable[..., Host]) -> None:
    head = start_host()
    joined = start_host(join=head.tcp)
    afar = TransferQueueClient.of(Session(parse_address(head.tcp, TOKEN)))
    for reader in (head.client, joined.client, afar):
        for writer in (head.client, joined.client):
            part = f"p{next(numbers)}"
            reading(reader, part)
            put(writer, part, 1.0)
            fetched = fetch(reader, part)
            assert came(fetched) == (writer is head.client), "what lies with the controller comes along"
            assert xs(reader, fetched) == [1.0]
            put(head.client, part, 2.0)
            put(joined.client, part, 3.0)
            assert sorted(xs(reader, fetch(reader, part, 2))) == [2.0, 3.0]
    afar.close()


def test_the_order_of_the_fields_does_not_matter(shared: TransferQueueClient, part: str) -> None:
    def fetched() -> BatchMeta:
        return shared.get_meta(["z", "a"], 1, part, task_name=f"task of {part}")

    shared.put({"a": torch.ones(2, 1), "z": torch.zeros(2, 1)}, partition_id=part)
    first = shared.get_data(fetched())
    meta = fetched()
    assert came(meta)
    before = requests(shared)
    second = shared.get_data(meta)
    assert requests(shared) == before + 1
    assert list(second.keys()) == list(first.keys())
    assert second["z"].values().tolist() == [0.0]


def test_the_age_counts_from_when_they_were_handed_out(
    shared: TransferQueueClient, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that lay in the socket for long is old when its asker looks at it."""
    monkeypatch.setattr(carried, "FRESH_S", 30.0)
    reading(shared, part)
    put(shared, part, 1.0)
    late_s = 0.0
    monkeypatch.setattr(carried, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late_s))
    sent = shared.session.call

    def call(effect: Any) -> Any:
        nonlocal late_s
        found = sent(effect)
        late_s = 60.0 if type(effect.request).__name__ == "Fetch" else late_s
        return found

    with monkeypatch.context() as patch:
        patch.setattr(shared.session, "call", call)
        fetched = fetch(shared, part)
        assert came(fetched)
        before = requests(shared)
        assert xs(shared, fetched) == [1.0]
        assert requests(shared) == before + 2, "the read asked"


def test_who_waited_long_has_them_fresh(
    shared: TransferQueueClient, other: TransferQueueClient, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carried, "FRESH_S", 0.0)
    reading(shared, part)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fetch, shared, part)
        until(lambda: other.stats()["waiting_requests"] == 1, "the fetch waits")
        asked_at = time.monotonic()
        put(other, part, 1.0)
        known: carried.CarriedCells = waiting.result()._carried  # type: ignore[assignment]
    assert known.asked.at < asked_at < known.until + 0.1


def test_the_cells_are_given_out_once(shared: TransferQueueClient, part: str) -> None:
    reading(shared, part)
    put(shared, part, 1.0)
    fetched = fetch(shared, part)
    get = [shared.session.carrying.read(fetched, _gets(fetched), shared.session.changes) for _ in range(2)]
    assert [found is not None for found in get] == [True, False]


def _gets(meta: BatchMeta) -> list[Any]:
    return [m.Get(1, meta.partition_ids[0], None, meta.indexes.tobytes(), meta.field_names, True)]


def test_a_change_that_was_given_up_counts(shared: TransferQueueClient, other: TransferQueueClient, part: str) -> None:
    """It was made, and its answer was not read."""
    reading(shared, part)
    meta = put(shared, part, 1.0)

    async def fetch_and_write() -> BatchMeta:
        fetched = await shared.async_get_meta(["x"], 1, part, task_name=f"task of {part}")
        assert came(fetched)
        writing = asyncio.ensure_future(shared.async_put({"x": torch.tensor([[2.0]])}, meta))
        await asyncio.sleep(0)  # it is sent
        until(lambda: xs(other, meta) == [2.0], "it is made")
        writing.cancel()
        await asyncio.wait([writing])
        assert writing.cancelled()
        return fetched

    assert xs(shared, asyncio.run(fetch_and_write())) == [2.0]


def test_a_closed_client_reads_nothing(service: Callable[..., TransferQueueClient]) -> None:
    client = service()
    reading(client, "p")
    put(client, "p", 1.0)
    fetched = fetch(client, "p")
    tq.close()
    with pytest.raises(ServiceUnavailable):
        client.get_data(fetched)
