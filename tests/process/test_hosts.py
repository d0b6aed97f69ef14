"""Several storage units: rows lie where they were written, everybody reads them, and losses are told."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import until
from hosts import LARGE, TOKEN, Host, firsts, rows

import transfer_queue as tq
from transfer_queue import StreamingDataset, checkpoint
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.drivers import run, run_async
from transfer_queue.client.effects import Call
from transfer_queue.client.operations import kv, partitions
from transfer_queue.client.session import Session
from transfer_queue.errors import (
    AccessDenied,
    DeadlineExceeded,
    NotReady,
    StorageKeyNotFoundError,
)
from transfer_queue.page import journey
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Host]]:
    """A controller's server and two units, for tests that use partitions of their own."""
    os.environ.pop("TQ_ADDRESS", None)
    head = Host()
    hosts = [head, Host(join=head.tcp), Host(join=head.tcp)]
    yield hosts
    for host in reversed(hosts):
        host.close()
    assert not {host.server.pid for host in hosts} & {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("width", [4, LARGE], ids=["small", "large"])
def test_every_host_reads_the_rows_of_all_hosts_in_the_order_asked_for(cluster: list[Host], width: int) -> None:
    partition = f"all-{width}"
    for number, host in enumerate(cluster):
        host.kv_put([f"{number}-{row}" for row in range(4)], partition, rows(number, 4, width))
    keys = ["2-0", "0-3", "1-1", "1-2", "2-3", "0-0", "1-1"]
    for host in cluster:
        data = host.kv_get(keys, partition)
        assert firsts(data) == [2, 0, 1, 1, 2, 0, 1]
        assert data["n"].tolist() == [2000, 3, 1001, 1002, 2003, 0, 1001]
        assert data["x"].unbind()[0].shape == (width,)
    cluster[0].client.clear_partition(partition)


def test_rows_are_stored_on_the_host_of_their_writer_and_freed_there(cluster: list[Host]) -> None:
    nbytes = 8 * LARGE * 4
    for writer in cluster:
        before = [host.used() for host in cluster]
        writer.kv_put([f"k{row}" for row in range(8)], "placed", {"x": torch.zeros(8, LARGE)})
        grown = [host.used() - used for host, used in zip(cluster, before, strict=True)]
        assert [growth >= nbytes for growth in grown] == [host is writer for host in cluster]
        cluster[0].client.clear_partition("placed")
        until(lambda before=before: [host.used() for host in cluster] == before, "the end of the rows")


def test_rows_that_lie_here_are_read_without_a_copy(cluster: list[Host]) -> None:
    cluster[1].kv_put(["a"], "mapped", {"x": torch.zeros(1, LARGE)})
    data = cluster[1].kv_get(["a"], "mapped")
    assert sum(cluster[1].client.stats()["pinned_nbytes"].values()) >= 4 * LARGE
    del data
    until(lambda: not cluster[1].client.stats()["pinned_nbytes"], "the release of the view")
    assert not cluster[0].client.stats()["pinned_nbytes"]
    cluster[1].client.clear_partition("mapped")


def test_a_reader_elsewhere_holds_nothing_once_it_has_its_rows(cluster: list[Host]) -> None:
    cluster[1].kv_put(["a", "b"], "taken", {"x": torch.zeros(2, LARGE)})
    used = cluster[1].used()
    data = cluster[2].kv_get(["a"], "taken")
    until(lambda: cluster[1].used() == used, "the release of the cut")
    assert not cluster[1].client.stats()["pinned_nbytes"]
    cluster[0].client.clear_partition("taken")
    assert data["x"].unbind()[0].sum() == 0, "what was received stays"


def test_only_the_rows_and_fields_asked_for_cross_the_network(cluster: list[Host]) -> None:
    batch = {"x": torch.arange(64.0).repeat(LARGE, 1).T.contiguous(), "y": torch.zeros(64, LARGE)}
    cluster[1].kv_put([str(row) for row in range(64)], "part", batch)

    def carried() -> int:
        before = socket_nbytes()
        assert firsts(cluster[0].kv_get(["5", "60"], "part", ["x"])) == [5, 60]
        return socket_nbytes() - before

    until(lambda: carried() < 3 * LARGE * 4, "a read while no other test uses the interface")
    cluster[0].client.clear_partition("part")


def socket_nbytes() -> int:
    """Bytes that the loopback interface carried."""
    with open("/proc/net/dev", encoding="ascii") as file:
        line = next(line for line in file if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def test_fields_of_one_row_may_lie_on_different_hosts(cluster: list[Host]) -> None:
    meta = cluster[1].client.put({"a": torch.arange(6.0).view(3, 2)}, partition_id="spread")
    cluster[2].client.put({"b": torch.arange(3)}, metadata=meta)
    cluster[0].client.put({"a": torch.full((1, 2), 9.0)}, metadata=meta[1:2].select_fields(["a"]))
    for host in cluster:
        data = host.client.get_data(host.client.get_meta(["a", "b"], 3, "spread", task_name=f"t{id(host)}"))
        assert [row.tolist() for row in data["a"].unbind()] == [[0, 1], [9, 9], [4, 5]]
        assert data["b"].tolist() == [0, 1, 2]
    cluster[0].client.clear_partition("spread")


def test_objects_and_ragged_rows_cross_hosts(cluster: list[Host]) -> None:
    values = [{"image": torch.rand(3, 64, 64), "name": "α"}, None, ["text", 3]]
    ragged = torch.nested.nested_tensor([torch.rand(n) for n in (5, 0, 40_000)], layout=torch.jagged)
    cluster[2].kv_put(["a", "b", "c"], "kinds", {"o": values, "r": ragged})
    data = cluster[0].kv_get(["c", "a"], "kinds")
    assert data[1]["o"]["name"] == "α"
    assert torch.equal(data[1]["o"]["image"], values[0]["image"])  # type: ignore[index]
    assert torch.equal(data["r"].unbind()[0], ragged.unbind()[2])
    cluster[0].client.clear_partition("kinds")


def test_asyncio_reads_from_several_hosts(cluster: list[Host]) -> None:
    for number, host in enumerate(cluster):
        host.kv_put([str(number)], "aio", rows(number, 1, LARGE))
    meta = cluster[0].client.kv_retrieve_meta(["0", "1", "2"], "aio")

    async def read() -> list[float]:
        many = await asyncio.gather(*(cluster[1].client.async_get_data(meta) for _ in range(4)))
        assert all(firsts(data) == firsts(many[0]) for data in many)
        return firsts(many[0])

    assert asyncio.run(read()) == [0, 1, 2]
    cluster[0].client.clear_partition("aio")


def test_a_wait_on_one_host_is_ended_by_a_put_on_another(cluster: list[Host]) -> None:
    async def both() -> list[int]:
        waiting = asyncio.ensure_future(
            cluster[1].client.async_get_meta(["x"], 2, "woken", task_name="t", timeout_s=10.0)
        )
        while not cluster[0].client.stats()["waiting_requests"]:
            await asyncio.sleep(0.005)
        await cluster[2].client.async_put(rows(1, 2), partition_id="woken")
        return (await waiting).global_indexes

    assert len(asyncio.run(both())) == 2
    cluster[0].client.clear_partition("woken")


@pytest.mark.parametrize("width", [4, LARGE], ids=["small", "large"])
def test_a_stream_on_one_host_has_the_rows_of_all(cluster: list[Host], width: int) -> None:
    partition = f"streamed-{width}"
    for number, host in enumerate(cluster):
        host.kv_put([f"{number}-{row}" for row in range(2)], partition, rows(number, 2, width))
    dataset = StreamingDataset(
        {"address": cluster[1].server.address},
        6,
        3,
        ["x", "n"],
        partition,
        "t",
        0,
        should_check_consumption_status=True,
    )
    cluster[0].client.set_partition(partition, size=6)
    found = [(firsts(data), data["n"].tolist()) for data, _ in dataset]
    assert found == [([0, 0, 1], [0, 1, 1000]), ([1, 2, 2], [1001, 2000, 2001])]
    assert cluster[2].client.check_consumption_status("t", partition)
    del dataset
    tq.close()
    cluster[0].client.clear_partition(partition)
    until(lambda: not cluster[1].client.stats()["pinned_nbytes"], "the release of what was read")


def test_a_client_without_a_unit_of_its_own_reads_and_writes_over_tcp(cluster: list[Host]) -> None:
    host, _, port = cluster[0].server.tcp.rpartition(":")
    client = TransferQueueClient.of(Session(Address(host=host, port=int(port), token=TOKEN)))
    meta = client.put({"x": torch.arange(3.0 * LARGE).view(3, LARGE)}, partition_id="far")
    cluster[2].client.put({"y": torch.ones(3, LARGE)}, metadata=meta)
    data = client.get_data(meta)
    assert firsts(data) == [0, LARGE, 2 * LARGE]
    assert data["y"].unbind()[2].sum() == LARGE
    client.close()
    cluster[0].client.clear_partition("far")


def test_thin_blocks_are_rewritten_on_their_unit(cluster: list[Host]) -> None:
    cluster[1].kv_put([f"{row}" for row in range(64)], "thin", rows(7, 64, 20_000))
    before = cluster[1].used()
    cluster[0].client.clear_samples(
        cluster[0].client.kv_retrieve_meta([f"{row}" for row in range(64) if row != 9], "thin")
    )
    until(lambda: cluster[1].used() < before - (4 << 20), "the rewritten block")
    assert cluster[2].kv_get(["9"], "thin")["n"].tolist() == [7009]
    cluster[0].client.clear_partition("thin")


def test_readers_elsewhere_find_rows_that_move_while_they_look(cluster: list[Host]) -> None:
    keys = [f"{row}" for row in range(64)]
    for turn in range(5):
        cluster[1].kv_put(keys, "moving", rows(turn, 64, 20_000))
        cluster[0].client.clear_samples(cluster[0].client.kv_retrieve_meta(keys[:-2], "moving"))
        for _ in range(20):
            assert firsts(cluster[2].kv_get(keys[-2:], "moving")) == [turn, turn]
    cluster[0].client.clear_partition("moving")


@pytest.mark.parametrize("place", [0, 1, 2], ids=["the controller's host", "its own host", "another host"])
def test_a_row_that_is_written_anew_all_the_time_is_found(cluster: list[Host], place: int) -> None:
    writer, reader, is_over = cluster[1], cluster[place], threading.Event()

    def write() -> None:
        while not is_over.is_set():
            writer.kv_put(["a"], "anew", rows(5, 1))

    writer.kv_put(["a"], "anew", rows(5, 1))
    writers = [threading.Thread(target=write) for _ in range(2)]
    for one in writers:
        one.start()
    try:
        for _ in range(500):
            assert firsts(reader.kv_get(["a"], "anew")) == [5]
    finally:
        is_over.set()
        for one in writers:
            one.join()
    reader.client.clear_partition("anew")


@pytest.mark.parametrize("times", [5, 1_000_000])
def test_a_read_looks_as_often_as_the_rows_are_written_anew_until_its_deadline(
    cluster: list[Host], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    reader, writer, _ = cluster
    writer.kv_put(["a"], "anew", rows(0, 1))
    session, left = reader.client.session, iter(range(times))
    call = session.call

    def write_before(effect: Call) -> Any:
        if isinstance(effect.request, m.Take) and next(left, None) is not None:
            writer.kv_put(["a"], "anew", rows(7, 1))
        return call(effect)

    monkeypatch.setattr(session, "call", write_before)
    monkeypatch.setitem(session.config, "timeout_s", 1.0)
    if times == 5:
        assert firsts(reader.kv_get(["a"], "anew")) == [7]
    else:
        with pytest.raises(DeadlineExceeded, match="lay elsewhere each time"):
            reader.kv_get(["a"], "anew")
    reader.client.clear_partition("anew")


@pytest.mark.parametrize("way", ["kv_get", "async_kv_get"])
def test_a_read_that_looks_again_leaves_nothing_pinned_of_its_first_look(
    cluster: list[Host], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A row of one host is written anew once the other has pinned its own."""
    reader, one, other = cluster
    before = [host.used() for host in cluster]
    one.kv_put(["a"], "again", rows(1, 1, LARGE))
    other.kv_put(["b"], "again", rows(2, 1, LARGE))
    session = reader.client.session
    call, call_async = session.call, session.call_async
    to_change = ["a"]

    def change(effect: Call) -> None:
        if isinstance(effect.request, m.Take) and effect.to == one.server.tcp and to_change:
            one.kv_put([to_change.pop()], "again", rows(3, 1, LARGE))

    def blocking(effect: Call) -> Any:
        change(effect)
        return call(effect)

    async def awaited(effect: Call) -> Any:
        await asyncio.to_thread(change, effect)
        return await call_async(effect)

    monkeypatch.setattr(session, "call", blocking)
    monkeypatch.setattr(session, "call_async", awaited)
    if way == "kv_get":
        data = reader.kv_get(["a", "b"], "again")
    else:
        data = asyncio.run(run_async(session, kv.kv_batch_get(session, ["a", "b"], "again")))
    assert (firsts(data), to_change) == ([3, 2], [])
    del data
    reader.client.clear_partition("again")
    until(lambda: [host.used() for host in cluster] == before, "the end of the rows", 10)


def test_a_snapshot_without_shapes_leaves_nothing_pinned(cluster: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, other, _ = cluster
    for host, length in ((reader, LARGE), (other, LARGE + 1)):
        host.kv_put([str(length)], "shapes", {"x": torch.zeros(1, length)})
    before = sum(reader.client.stats()["pinned_nbytes"].values())

    def cleared(calls: Any) -> Any:
        raise StorageKeyNotFoundError("cleared meanwhile")

    session = reader.client.session
    monkeypatch.setattr(session, "call_together", cleared)
    found = run(session, partitions.partition_snapshot(session, "shapes"))
    assert found is not None
    assert not found.field_metadata["x"].per_sample_shapes
    assert sum(reader.client.stats()["pinned_nbytes"].values()) == before
    reader.client.clear_partition("shapes")


def test_the_page_reads_a_bounded_part_of_what_lies_on_another_host(
    cluster: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journey, "MAX_SENT_NBYTES", 1 << 20)
    long, small = torch.arange(1 << 20), {"image": torch.zeros(1 << 16)}
    values = {"long": long[None], "object": [{"image": torch.zeros(1 << 20)}], "small": [small]}
    cluster[1].kv_put(["k"], "looks", values)
    here, there = (
        {one["name"]: one["text"] for one in journey.journey(cluster[number].client, "looks", "k", None)["fields"]}
        for number in (1, 0)
    )
    assert there["long"] == here["long"].removesuffix(" (1,048,576 numbers)")
    assert there["small"] == here["small"]
    assert "tensor" in here["object"]
    assert re.fullmatch(r"4,19\d,\d+ bytes lie on another host.*; at most 1,048,576 are .*", there["object"])
    assert not cluster[1].client.stats()["pinned_nbytes"]
    cluster[0].client.clear_partition("looks")


def test_cleared_rows_are_reported_as_cleared_on_every_host(cluster: list[Host]) -> None:
    meta = cluster[1].client.put(rows(1, 2, LARGE), partition_id="gone")
    cluster[2].client.clear_samples(meta)
    for host in cluster:
        with pytest.raises(StorageKeyNotFoundError):
            host.client.get_data(meta)
    cluster[0].client.clear_partition("gone")


def test_a_unit_with_a_wrong_token_does_not_join(cluster: list[Host]) -> None:
    with pytest.raises(AccessDenied):
        Host(join=cluster[0].tcp, token="wrong")


def test_a_service_over_ipv6(start_host: Callable[..., Host]) -> None:
    head = start_host(host="::1")
    unit = start_host(join=head.tcp, host="::1")
    unit.kv_put(["a"], "p", rows(3, 1, LARGE))
    assert head.server.tcp.startswith("[::1]:")
    assert firsts(head.kv_get(["a"], "p")) == [3]


def test_a_unit_that_listens_everywhere_is_reached_where_it_comes_from(
    start_host: Callable[..., Host],
) -> None:
    head = start_host()
    unit = start_host(join=head.tcp, host="0.0.0.0")
    assert head.client.stats()["units"]["1"]["address"].startswith("127.0.0.1:")
    unit.kv_put(["a"], "p", rows(3, 1, LARGE))
    assert firsts(head.kv_get(["a"], "p")) == [3]


def test_a_client_killed_between_allocation_and_commit_leaves_nothing(cluster: list[Host], child: Any) -> None:
    used = cluster[1].used()
    writer = child(f"""
        import torch
        from transfer_queue.client.client import TransferQueueClient
        from transfer_queue.client.session import Session
        from transfer_queue.wire.address import parse_address
        client = TransferQueueClient.of(Session(parse_address({cluster[1].server.address!r})))
        held = client.allocate({{"x": ((8, {LARGE}), torch.float32)}})
        print("held")
        input()
    """)
    assert writer.line() == "held"
    assert cluster[1].used() > used
    writer.kill()
    until(lambda: cluster[1].used() == used, "the release of the block")


def test_fields_that_are_not_written_are_not_lost(cluster: list[Host]) -> None:
    meta = cluster[1].client.get_meta(["x"], 1, "empty", mode="insert")
    with pytest.raises(NotReady):
        cluster[2].client.get_data(meta)
    cluster[0].client.clear_partition("empty")


def test_a_checkpoint_has_the_rows_of_all_hosts_and_loads_where_there_is_one(
    start_host: Callable[..., Host], tmp_path: Path
) -> None:
    head = start_host()
    units = [start_host(join=head.tcp), start_host(join=head.tcp)]
    for number, host in enumerate((head, *units)):
        host.kv_put([f"{number}"], "p", rows(number, 1, LARGE), [{"host": number}])
    checkpoint.save(units[0].client.session, tmp_path / "all")
    head.client.clear_partition("p")
    for host in (head, *units):
        until(lambda host=host: host.used() == 0, "the release of everything")
    alone = start_host()
    checkpoint.load(alone.client.session, tmp_path / "all")
    assert firsts(alone.kv_get(["0", "1", "2"], "p")) == [0, 1, 2]


def test_a_checkpoint_loads_from_a_host_without_the_controller(start_host: Callable[..., Host], tmp_path: Path) -> None:
    head = start_host()
    unit = start_host(join=head.tcp)
    head.kv_put(["a"], "p", rows(1, 1, LARGE))
    unit.kv_put(["b"], "p", rows(2, 1, 4))
    checkpoint.save(head.client.session, tmp_path / "saved")
    unit.kv_put(["c"], "p", rows(3, 1, LARGE))
    checkpoint.load(unit.client.session, tmp_path / "saved")
    assert list(head.client.kv_list("p")["p"]) == ["a", "b"]
    assert head.kv_get(["a", "b"], "p", ["n"])["n"].tolist() == [1000, 2000]
    until(lambda: head.used() == 0, "the release of what was replaced")
    head.client.clear_partition("p")
    until(lambda: unit.used() == 0, "the release of what was loaded")
