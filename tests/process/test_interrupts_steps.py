"""Interrupts of the calls that a training loop makes now and then: steps, series, tickets, and what goes to a disk."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from leftovers import left, opens_again
from strikes import UNCLEAN, every, strikes

import transfer_queue as tq
from transfer_queue.dataloader import StreamingDataLoader, StreamingDataset
from transfer_queue.errors import InvalidInput, UnknownRows

ROWS = {"x": torch.arange(400.0).reshape(4, 100), "y": torch.arange(4)}
STEP = 7  # files are struck at every seventh place, for seconds: each costs a sync of the disk
pytestmark = UNCLEAN


@pytest.fixture
def client(service: Callable[..., tq.TransferQueueClient]) -> tq.TransferQueueClient:
    """One that does not look for answers before it sleeps: its calls have the same places each time."""
    return service(client={"spin_us": 0})


def test_a_partition_that_was_opened_for_nobody_is_opened_again(client: tq.TransferQueueClient) -> None:
    assert len(list(every(lambda: tq.open_partition("p", "series", 0, timeout_s=5), lambda: opens_again(client)))) > 30


def test_a_consumer_that_has_finished_says_so_again(client: tq.TransferQueueClient) -> None:
    def prepare() -> None:
        tq.open_partition("p", "series", 0, ["actor"], clear=True, timeout_s=5)
        client.put({"x": torch.zeros(1)}, partition_id="p")

    def finish() -> bool:
        tq.finish_partition("p", "actor")
        return True

    def is_clean() -> bool:
        try:
            finish()
        except UnknownRows:  # the struck one was whole: it cleared the partition
            assert not tq.series_status("series")["open"]
        prepare()
        return True

    prepare()
    assert len(list(every(finish, is_clean))) > 30


def test_tickets_that_nobody_got_let_others_in(client: tq.TransferQueueClient) -> None:
    pool = tq.group_pool("p", tq.GroupPolicy.ready_first(gate=1, groups_per_version=2))

    def is_clean() -> bool:
        pool.return_tickets(pool.tickets(4, timeout_s=5))
        return True

    assert len(list(every(lambda: pool.tickets(4, timeout_s=5), is_clean))) > 30


def test_refills_that_nobody_got_are_offered_to_others(client: tq.TransferQueueClient) -> None:
    pool = tq.group_pool("p", tq.GroupPolicy.windowed(1))
    groups = (f"g{number}" for number in itertools.count())

    def prepare(refills: bool = False) -> None:
        name = next(groups)
        pool.open(name, 1, refills=refills)
        pool.finish(pool.claim(timeout_s=5)[0], {"x": torch.zeros(1, 3)})
        pool.filter(name)

    def is_clean() -> bool:
        assert pool.refills(8, timeout_s=5) == 1
        prepare(refills=True)
        return True

    prepare()
    assert len(list(every(lambda: pool.refills(8, timeout_s=5), is_clean))) > 30


def test_results_are_there_once_when_they_are_sent_again(client: tq.TransferQueueClient) -> None:
    pool = tq.group_pool("p", tq.GroupPolicy())
    attempts: list[Any] = []
    num_groups = 0

    def prepare() -> None:
        nonlocal num_groups
        pool.open(f"g{num_groups}", 2)
        num_groups += 1
        attempts[:] = pool.claim(max_slots=2, timeout_s=5)

    def finish() -> Any:
        return pool.finish_batch([one.result(reward=1.0) for one in attempts], {"x": torch.zeros(2, 3)})

    def is_clean() -> bool:
        try:
            assert not finish().refused
        except InvalidInput as error:  # the struck one was whole
            if "has another result already" not in str(error):
                raise
        assert pool.status()["sealed"] == num_groups
        assert [one.written for one in client.overview().partitions if one.name == "p"] == [[2 * num_groups]]
        prepare()
        return True

    prepare()
    assert len(list(every(finish, is_clean))) > 50


def test_a_step_is_marked_with_its_acknowledgement_or_not_at_all(client: tq.TransferQueueClient) -> None:
    client.put(ROWS, partition_id="p")
    client.checkpoint(0, ["t"])

    def lend() -> tq.BatchMeta:
        return client.get_meta(["x"], 4, "p", task_name="t", lease_s=600)

    lent = [lend()]

    def mark() -> bool:
        client.checkpoint(1, ["t"], lent[0])
        return True

    def is_clean() -> bool:
        marked = client.list_steps("t")
        assert marked in ([0], [0, 1])
        if marked == [0]:
            assert [one.rows for one in client.overview().leases] == [4]
            return True
        assert [len(meta) for meta in client.get_step("t", 1)] == [4]
        assert not client.overview().leases
        client.resume(0, ["t"])
        lent[0] = lend()
        return True

    assert len(list(every(mark, is_clean))) > 30


def test_a_loop_goes_back_to_a_mark_however_often(client: tq.TransferQueueClient) -> None:
    client.put(ROWS, partition_id="p")
    client.checkpoint(0, ["t"])
    client.get_meta(["x"], 2, "p", task_name="t")

    def is_clean() -> bool:
        assert left(client) in (2, 4)
        assert client.resume(0, ["t"])[1:3] == (2, 0)
        client.get_meta(["x"], 2, "p", task_name="t")
        return left(client) == 2

    assert len(list(every(lambda: client.resume(0, ["t"]), is_clean))) > 30


def test_a_checkpoint_is_the_one_before_or_the_new_one(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    client.put(ROWS, partition_id="p")
    target = tmp_path / "checkpoint"
    tq.save_checkpoint(target, metadata={"number": 0})
    number = 0

    def save() -> bool:
        tq.save_checkpoint(target, metadata={"number": number})
        return True

    def is_clean() -> bool:
        nonlocal number
        tq.load_checkpoint(target)
        assert json.loads((target / "metadata.json").read_text())["user_metadata"] in (
            {"number": number},
            {"number": number - 1},
        )
        if client.stats()["pinned_nbytes"]:
            return False
        number += 1
        tq.save_checkpoint(target, metadata={"number": number - 1})
        return sorted(one.name for one in tmp_path.iterdir()) == ["checkpoint"]

    assert len(list(every(save, is_clean, step=STEP))) > 30


def test_a_service_is_as_it_was_or_as_its_checkpoint(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    client.put(ROWS, partition_id="saved")
    tq.save_checkpoint(tmp_path / "checkpoint")
    client.clear_partition("saved")
    client.put(ROWS, partition_id="now")
    used = client.stats()["arena_nbytes_used"]

    def load() -> bool:
        tq.load_checkpoint(tmp_path / "checkpoint")
        return True

    def is_clean() -> bool:
        partitions = client.get_partition_list()
        assert partitions in (["now"], ["saved"])
        if partitions == ["saved"]:
            client.clear_partition("saved")
            client.put(ROWS, partition_id="now")
        return client.stats()["arena_nbytes_used"] == used

    assert len(list(every(load, is_clean, step=STEP))) > 30


@pytest.mark.parametrize("way", ["save_step", "dump_data_by_key"])
def test_a_directory_appears_whole_or_not_at_all(client: tq.TransferQueueClient, tmp_path: Path, way: str) -> None:
    tq.kv_batch_put(list("abcd"), "p", fields=ROWS)
    client.checkpoint(0, ["t"])
    client.get_meta(["x", "y"], 4, "p", task_name="t")
    client.checkpoint(1, ["t"])
    names = (f"made-{number}" for number in itertools.count())
    made = [next(names)]

    def save() -> Any:
        if way == "save_step":
            return tq.save_step(tmp_path / made[0], 1, "t")
        return tq.dump_data_by_key(tmp_path / made[0], list("abcd"), "p")

    def is_clean() -> bool:
        found = [one.name for one in tmp_path.iterdir() if one.name.startswith(made[0])]
        if found:
            assert found == made
            if way == "save_step":
                assert sum(len(batch) for batch in tq.replay(tmp_path / made[0])) == 4
            else:
                assert set(tq.load_data_by_key(tmp_path / made[0])) == set("abcd")
            made[0] = next(names)
        return not client.stats()["pinned_nbytes"]

    assert len(list(every(save, is_clean, step=STEP))) > 30


def test_rows_of_a_dump_are_there_once_when_they_are_loaded_again(
    client: tq.TransferQueueClient, tmp_path: Path
) -> None:
    tq.kv_batch_put(list("abcd"), "p", fields=ROWS)
    tq.dump_data_by_key(tmp_path / "dump", list("abcd"), "p")
    used = client.stats()["arena_nbytes_used"]
    tq.kv_clear(list("abcd"), "p")

    def load() -> Any:
        return tq.load_data_by_key(tmp_path / "dump")

    def is_clean() -> bool:
        load()
        assert tq.kv_batch_get(list("abcd"), "p")["y"].tolist() == [0, 1, 2, 3]
        is_whole = client.stats()["arena_nbytes_used"] == used
        tq.kv_clear(list("abcd"), "p")
        return is_whole

    assert len(list(every(load, is_clean, step=STEP))) > 30


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loop_that_goes_on_has_the_batches_that_it_would_have_had(
    client: tq.TransferQueueClient, num_workers: int
) -> None:
    """As the next micro-batch is asked for, which acknowledges the one before. Of a batch that was begun only the rest
    is asked for: with rows that were acknowledged and not noted, the last batch would wait for more."""
    client.put({"x": torch.arange(8)}, partition_id="p")
    loader: Any = None

    def begin() -> Iterator[Any]:
        nonlocal loader
        client.reset_consumption("p", "t")
        dataset = StreamingDataset({}, 4, 2, ["x"], "p", "t")
        loader = StreamingDataLoader(dataset, num_workers)
        running = iter(loader)
        assert rows(next(running)) == [0, 1]
        return running

    def rest() -> list[list[int]]:
        found: list[list[int]] = []
        for item in loader:
            found.append(rows(item))
            if found[-1] == [6, 7]:
                break
        return found

    def rows(item: Any) -> list[int]:
        return item[0]["x"].tolist()

    def following() -> Any:
        return next(running)

    running, num_places = begin(), 0
    for strike in strikes(following, threading.__file__, only="transfer_queue", step=3):
        del running
        if strike.result is None:
            assert rest()[-3:] == [[2, 3], [4, 5], [6, 7]], strike.place
        loader.close()
        num_places += 1
        running = begin()
    loader.close()
    assert num_places > 20
