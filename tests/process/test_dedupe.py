"""Bytes that are the same are stored once, where a put asks for it: within it, and with what others put."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Child, freeze, until
from hosts import Host
from tensordict import NonTensorData

import transfer_queue as tq
from transfer_queue.client.drivers import run
from transfer_queue.client.effects import Call
from transfer_queue.client.operations import kv
from transfer_queue.errors import InvalidInput, SchemaConflict
from transfer_queue.wire import messages as m

ROWS = 16
PATCHES = 256  # 1.2 MB


def image(seed: int = 0) -> torch.Tensor:
    return torch.randn(PATCHES, 1176, generator=torch.Generator().manual_seed(seed))


NBYTES = image().nbytes


def used(client: tq.TransferQueueClient) -> int:
    return int(client.stats()["arena_nbytes_used"])


def columns() -> dict[str, Any]:
    one = image()
    clones = [one.clone() for _ in range(ROWS)]
    lengths = [PATCHES - 8 * (n % 2) for n in range(ROWS)]
    return {
        "clones in dicts": [{"pixel_values": each, "thw": torch.tensor([[1, 16, 16]])} for each in clones],
        "dicts and None": [None if n % 4 == 3 else {"pixel_values": each} for n, each in enumerate(clones)],
        "a dense tensor": torch.stack(clones),
        "a list of tensors": clones,
        "a dense array": torch.stack(clones).numpy(),
        "arrays": [each.numpy() for each in clones],
        "a jagged tensor": torch.nested.nested_tensor([one[:n] for n in lengths], layout=torch.jagged),
        "lists of numbers": [one.flatten().tolist()] * ROWS,
        "one text": ["a long text " * 10_000] * ROWS,
    }


def same(now: Any, was: Any) -> bool:
    if isinstance(was, dict):
        return now.keys() == was.keys() and all(same(now[name], was[name]) for name in was)
    if was is None or isinstance(was, str):
        return bool(now == was)
    return np.array_equal(np.asarray(now), np.asarray(was, np.float32 if isinstance(was, list) else None))


def rows(column: Any) -> list[Any]:
    found = column.unbind() if isinstance(column, torch.Tensor) else list(column)
    return [one.data if isinstance(one, NonTensorData) else one for one in found]


@pytest.mark.parametrize("kind", columns())
def test_equal_rows_of_one_put_are_stored_once_and_read_as_they_were(client: tq.TransferQueueClient, kind: str) -> None:
    column, before = columns()[kind], used(client)
    meta = client.put({"image": column, "n": list(range(ROWS))}, partition_id="p", dedupe=True)
    assert used(client) - before < 2.5 * NBYTES
    found = client.get_data(meta)
    assert found["n"].tolist() == list(range(ROWS))
    assert all(map(same, rows(found["image"]), rows(column)))
    scattered = client.get_data(meta.select_samples([7, 2, 11]))
    assert all(map(same, rows(scattered["image"]), [rows(column)[row] for row in (7, 2, 11)]))
    plain = client.get_data(client.put({"image": column}, partition_id="plain"))
    assert type(plain["image"]) is type(found["image"])


def test_what_was_put_before_is_not_stored_again(client: tq.TransferQueueClient) -> None:
    for number in range(ROWS):
        tq.kv_put(f"k{number}", "p", {"image": {"pixel_values": image()}, "n": number}, dedupe=True)
    assert used(client) < 1.2 * NBYTES
    found = tq.kv_batch_get([f"k{number}" for number in range(ROWS)], "p")
    images = [one["pixel_values"] for one in rows(found["image"])]
    assert all(torch.equal(one, image()) for one in images)
    assert len({one.data_ptr() for one in images}) == 1  # the reader has them once


def test_what_another_process_put_is_not_stored_again(
    client: tq.TransferQueueClient, child: Callable[[str], Child]
) -> None:
    tq.kv_put("mine", "p", {"image": image()}, dedupe=True)
    before = used(client)
    child("""
        import torch, transfer_queue as tq
        tq.init()
        for number in range(4):
            image = torch.randn(256, 1176, generator=torch.Generator().manual_seed(0))
            tq.kv_put(f"its{number}", "p", {"image": image}, dedupe=True)
        tq.close()
    """).finish()
    assert used(client) < before + NBYTES / 10
    assert torch.equal(tq.kv_batch_get("its3", "p")["image"][0], image())


def test_a_put_that_does_not_ask_shares_nothing(client: tq.TransferQueueClient) -> None:
    for number in range(3):
        tq.kv_put(f"k{number}", "p", {"image": image()})
    assert used(client) >= 3 * NBYTES


@pytest.mark.parametrize("is_asked", [True, False], ids=["by the call", "by the service"])
def test_siblings_of_a_group_have_one_image(service: Callable[..., tq.TransferQueueClient], is_asked: bool) -> None:
    client = service(controller={} if is_asked else {"dedupe": True})
    dedupe = True if is_asked else None
    pool = tq.group_pool("p", tq.GroupPolicy())
    pool.open("x", 5)
    attempts = pool.claim(5)
    pool.fail(attempts[1])
    again = pool.claim()
    for attempt in (attempts[0], *again):  # in puts of their own
        pool.finish(attempt, {"image": image()[None], "slot": torch.tensor([attempt.slot])}, reward=1.0, dedupe=dedupe)
    late = [attempts[2], attempts[1], attempts[3], attempts[4]]  # the second is nobody's any more
    images = [image(), image(7), image(), image()]
    found = pool.finish_batch(
        [one.result() for one in late], {"image": images, "slot": torch.tensor([one.slot for one in late])},
        dedupe=dedupe,
    )  # fmt: skip
    assert [one.attempt for one in found.refused] == [attempts[1]]
    until(lambda: used(client) < 1.2 * NBYTES, "one image in the service")
    data = client.get_data(pool.select(1).metadata)
    assert data["slot"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert all(torch.equal(one, image()) for one in data["image"])


def test_the_service_may_ask_for_all_puts(service: Callable[..., tq.TransferQueueClient]) -> None:
    client = service(controller={"dedupe": True})
    for number in range(3):
        tq.kv_put(f"k{number}", "p", {"image": image()})
    assert used(client) < 1.2 * NBYTES
    tq.kv_put("apart", "p", {"image": image()}, dedupe=False)
    assert used(client) >= 2 * NBYTES


def test_cells_that_differ_in_one_byte_that_no_print_sees_are_kept_apart(client: tq.TransferQueueClient) -> None:
    """Prints look at 64 bytes of 64 places."""
    one, other = image(), image()
    other.view(-1)[1000] += 1.0
    tq.kv_batch_put(["a", "b"], "p", {"image": [one, other]}, dedupe=True)
    tq.kv_put("c", "p", {"image": other.clone()}, dedupe=True)
    assert 2 * NBYTES <= used(client) < 2.2 * NBYTES
    found = tq.kv_batch_get(["a", "b", "c"], "p")["image"]
    assert [torch.equal(row, was) for row, was in zip(found, [one, other, other], strict=True)] == [True] * 3


def test_fields_share_nothing_with_each_other_nor_do_partitions(client: tq.TransferQueueClient) -> None:
    tq.kv_put("a", "p", {"x": image()}, dedupe=True)
    tq.kv_put("a", "p", {"y": image()}, dedupe=True)
    tq.kv_put("a", "q", {"x": image()}, dedupe=True)
    assert used(client) >= 3 * NBYTES
    tq.kv_clear("a", "p")
    assert torch.equal(tq.kv_batch_get("a", "q")["x"][0], image())


def test_a_shared_cell_lives_as_long_as_its_last_row(client: tq.TransferQueueClient) -> None:
    for key in "abc":
        tq.kv_put(key, "p", {"image": image()}, dedupe=True)
    tq.kv_clear("a", "p")
    tq.kv_put("b", "p", {"image": torch.zeros(4)})  # written anew
    assert torch.equal(tq.kv_batch_get("c", "p")["image"][0], image())
    tq.kv_clear("c", "p")
    until(lambda: used(client) < NBYTES / 10, "the end of the block")
    tq.kv_put("d", "p", {"image": image()}, dedupe=True)  # nobody has it any more
    assert torch.equal(tq.kv_batch_get("d", "p")["image"][0], image())


def test_rows_that_are_left_of_a_sparse_block_go_on_sharing(client: tq.TransferQueueClient) -> None:
    seeds = [n // 2 for n in range(16)]
    keys = [f"k{n}" for n in range(16)]
    tq.kv_batch_put(keys, "p", {"image": [image(seed) for seed in seeds]}, dedupe=True)
    assert used(client) < 8.5 * NBYTES
    tq.kv_clear(keys[:14], "p")
    until(lambda: used(client) < 1.5 * NBYTES, "compaction")
    tq.kv_put("new", "p", {"image": image(7)}, dedupe=True)
    assert used(client) < 1.5 * NBYTES
    found = tq.kv_batch_get(["k14", "new", "k15"], "p")["image"]
    assert all(torch.equal(row, image(7)) for row in found)


def test_what_is_cleared_between_the_look_and_the_commit_is_stored(
    client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transfer_queue.client.transfer import share

    tq.kv_put("a", "p", {"image": image()}, dedupe=True)
    store, cleared = share._store, []

    def clear_first(*args: Any) -> Any:
        if not cleared:
            cleared.append(True)
            yield from kv.kv_clear(client.session, "a", "p")
        return (yield from store(*args))

    monkeypatch.setattr(share, "_store", clear_first)
    tq.kv_put("b", "p", {"image": image(), "n": 1}, dedupe=True)
    assert torch.equal(tq.kv_batch_get("b", "p")["image"][0], image())
    assert NBYTES <= used(client) < 1.2 * NBYTES


def test_a_put_that_is_refused_keeps_no_block(client: tq.TransferQueueClient) -> None:
    tq.kv_put("a", "p", {"image": image(), "n": 1})
    before = used(client)
    with pytest.raises(SchemaConflict):
        tq.kv_put("b", "p", {"image": image().double(), "n": 1}, dedupe=True, strict_schema=True)
    until(lambda: used(client) <= before, "the end of what was filled")
    assert list(tq.kv_list("p")["p"]) == ["a"]


def test_a_task_gets_rows_whose_shared_cells_were_written(client: tq.TransferQueueClient) -> None:
    client.put({"image": [image()] * 4}, partition_id="p", dedupe=True)
    meta = client.get_meta(["image"], 4, "p", task_name="t", timeout_s=5)
    assert meta.size == 4
    assert all(torch.equal(row, image()) for row in client.get_data(meta)["image"])


def test_a_checkpoint_has_shared_cells_once(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    tq.kv_batch_put(["a", "b", "c"], "p", {"image": [image()] * 3, "n": [1, 2, 3]}, dedupe=True)
    tq.save_checkpoint(tmp_path / "saved")
    assert sum(file.stat().st_size for file in (tmp_path / "saved").rglob("*") if file.is_file()) < 1.2 * NBYTES
    tq.kv_clear(["a", "b", "c"], "p")
    tq.load_checkpoint(tmp_path / "saved")
    found = tq.kv_batch_get(["a", "b", "c"], "p")
    assert all(torch.equal(row, image()) for row in found["image"])
    assert found["n"].tolist() == [1, 2, 3]
    assert used(client) < 1.2 * NBYTES


def put(host: Host, key: str, seed: int) -> None:
    session = host.client.session
    run(session, kv.kv_batch_put(session, [key], "p", {"image": [{"pixel_values": image(seed)}]}, dedupe=True))


def test_hosts_share_what_has_the_same_digest(start_host: Callable[..., Host]) -> None:
    head = start_host()
    other = start_host(head.tcp)
    put(head, "a", 1)
    put(other, "b", 1)  # the head has it
    put(other, "c", 2)
    put(head, "d", 2)  # the other has it
    assert head.used() < 1.2 * NBYTES
    assert other.used() < 1.2 * NBYTES
    for host in (head, other):
        found = host.kv_get(["a", "b", "c", "d"], "p")["image"]
        assert [torch.equal(row["pixel_values"], image(1 + n // 2)) for n, row in enumerate(rows(found))] == [True] * 4


@pytest.mark.parametrize("state", ["frozen", "away"])
def test_a_put_does_not_need_the_host_that_has_the_same(start_host: Callable[..., Host], state: str) -> None:
    head = start_host()
    other = start_host(head.tcp)
    put(other, "a", 1)
    pid = int(other.client.stats()["pid"])
    freeze(pid)
    try:
        if state == "away":
            os.kill(pid, signal.SIGKILL)
            until(lambda: all(unit["away"] for unit in head.client.stats()["units"].values()), "its absence")
        put(head, "b", 1)
        put(head, "c", 1)
        (row,) = rows(head.kv_get(["c"], "p")["image"])
        assert torch.equal(row["pixel_values"], image(1))
        assert head.used() < 1.2 * NBYTES  # those two have one image
    finally:
        if state == "frozen":
            os.kill(pid, signal.SIGCONT)


def test_a_reader_on_another_host_receives_each_image_once(start_host: Callable[..., Host]) -> None:
    head = start_host()
    other = start_host(head.tcp)
    for number in range(ROWS):
        put(head, f"k{number}", 1)
    session = other.client.session
    moved: list[int] = []
    allocate = session.pool.allocate

    def counted(nbytes: int) -> Any:
        moved.append(nbytes)
        return allocate(nbytes)

    session.pool.allocate = counted  # type: ignore[method-assign]
    found = other.kv_get([f"k{number}" for number in range(ROWS)], "p")["image"]
    assert all(torch.equal(row["pixel_values"], image(1)) for row in rows(found))
    assert NBYTES <= sum(moved) < 1.1 * NBYTES


def test_shared_cells_come_back_from_the_journal(start_host: Callable[..., Host], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"host": "", "durability": "machine", "journal_dir": str(tmp_path / "journal")}
    host = start_host(**settings)
    for number in range(4):
        put(host, f"k{number}", 1)
    host.close()
    again = start_host(**settings)
    found = again.kv_get([f"k{number}" for number in range(4)], "p")["image"]
    assert all(torch.equal(row["pixel_values"], image(1)) for row in rows(found))
    assert again.used() < 1.2 * NBYTES


def test_digests_of_cells_that_are_not_there_are_empty(start_host: Callable[..., Host]) -> None:
    host = start_host()
    put(host, "a", 1)
    session = host.client.session

    def asked(field: str, blocks: list[int], places: list[int]) -> Any:
        packed = [np.array(numbers, np.int64).tobytes() for numbers in (blocks, places)]
        reply, _ = yield Call(m.DigestCells(session.next_rid(), field, *packed))
        return reply.digests

    found = run(session, asked("image", [1, 2, 3, -1, 1, 2], [0, 0, 0, 0, 1, -1]))
    assert sorted(map(len, found)) == [0] * 5 + [32]
    assert run(session, asked("other", [1, 2], [0, 0])) == [b"", b""]
    with pytest.raises(InvalidInput):
        run(session, asked("image", [1], [0, 0]))


def test_an_update_sees_that_another_wrote_a_shared_cell(client: tq.TransferQueueClient) -> None:
    """Equal cells lie in one block, so a cell that was written again may lie in the same block, in another row."""
    images = torch.stack([torch.full((100, 100), fill) for fill in (1, 2)])
    tq.kv_batch_put(["k1", "k2"], "p", {"image": images}, dedupe=True)
    seen: list[int] = []

    def parser(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        seen.append(int(old[0, 0]))
        if len(seen) == 1:
            tq.kv_put("k1", "p", {"image": images[1]}, dedupe=True)
        return new

    tq.kv_update("k1", "p", {"image": images[0] + 10}, parser=parser)
    assert seen == [1, 2]
