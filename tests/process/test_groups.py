"""Groups of siblings through a real service, by producers and consumers that die."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import until
from hosts import Host
from test_cli import tq as tq_run
from test_metrics import Scrape
from test_standby import DURABLE, kill, replaced, server_of, standby_of

import transfer_queue as tq
from transfer_queue.client.drivers import run
from transfer_queue.client.groups import GroupPool, SlotAttempt, open_pool
from transfer_queue.errors import (
    DeadlineExceeded,
    GroupEnded,
    GroupsShort,
    InvalidInput,
    LeaseExpired,
    RowCleared,
    StaleAttempt,
)

Spawn = Callable[[str], Any]
POLICY = tq.GroupPolicy.windowed(1)


@pytest.fixture
def pool(client: tq.TransferQueueClient) -> GroupPool:
    """A pool of the test's service, for partition "train"."""
    return tq.group_pool("train", POLICY)


def answer(pool: GroupPool, attempt: SlotAttempt, **more: Any) -> tq.BatchMeta:
    """One row that says which sibling it is of."""
    number = 100 * int(attempt.prompt.get("number", 0)) + attempt.slot
    return pool.finish(attempt, {"x": torch.tensor([number])}, reward=float(attempt.slot), tokens=3, **more)


def made(pool: GroupPool, number: int, size: int = 2, **more: Any) -> None:
    pool.open(f"g{number}", size, prompt={"number": number}, **more)
    for attempt in pool.claim(size, f"g{number}"):
        answer(pool, attempt)


def test_one_text_names_one_group_and_what_is_no_batch_is_refused(pool: GroupPool) -> None:
    made(pool, 1)
    for other in "g1":  # whose ids are the letters of the first one's
        pool.open(other, 1)
        answer(pool, pool.claim(1, other)[0])
    with pytest.raises(InvalidInput, match="batch is a GroupBatch, as select returned it, got BatchMeta"):
        pool.ack(tq.BatchMeta.empty())  # type: ignore[arg-type]
    batch = pool.select(3)
    pool.ack(batch, "g1")
    pool.release(batch)
    assert sorted(group.group_id for group in pool.select(2).groups) == ["1", "g"]


def test_fields_of_groups_are_named_by_a_list(pool: GroupPool) -> None:
    with pytest.raises(InvalidInput, match="a list of names"):
        pool.select(1, fields="advantage")


def test_a_reward_is_any_number(pool: GroupPool) -> None:
    rewards: list[Any] = [True, 1, np.float32(1.0), np.array(1.0), torch.tensor(1.0)]
    pool.open("x", len(rewards))
    attempts = pool.claim(len(rewards))
    with pytest.raises(InvalidInput, match="a reward is a number"):
        pool.finish(attempts[0], {"x": torch.zeros(1)}, reward=torch.zeros(2))  # type: ignore[arg-type]
    for attempt, reward in zip(attempts, rewards, strict=True):
        pool.finish(attempt, {"x": torch.zeros(1)}, reward=reward)
    assert pool.select(1).groups[0].rewards == [1.0] * len(rewards)


def test_groups_come_whole_with_rewards_and_rows(pool: GroupPool) -> None:
    made(pool, 1), made(pool, 2, 3)
    batch = pool.select(2)
    assert [one.group_id for one in batch.groups] == ["g1", "g2"]
    found = tq.get_client().get_data(batch.metadata)["x"].flatten().tolist()
    for group in batch.groups:
        assert group.rewards == [float(member.slot) for member in group.members]
        for member in group.members:
            assert [found[at] for at in member.rows] == [100 * group.prompt["number"] + member.slot]
    pool.ack(batch, clear=True)
    assert tq.get_client().stats()["rows"] == 0
    with pytest.raises(GroupEnded):
        pool.open("g1", 2)


def test_who_selects_is_answered_within_moments_of_the_last_result(pool: GroupPool) -> None:
    for number in range(127):
        made(pool, number, 1)
    pool.open("last", 1)
    (attempt,) = pool.claim()
    found: list[tuple[float, int]] = []
    waiter = threading.Thread(
        target=lambda: found.append((len(pool.select(128, timeout_s=60)), time.perf_counter()))  # type: ignore[arg-type]
    )
    waiter.start()
    until(lambda: pool.status()["waiting"] == 1, "the wait")
    answer(pool, attempt)
    said = time.perf_counter()
    waiter.join()
    assert found[0][0] == 128
    assert found[0][1] - said < 1.0  # the figure is measured in bench; here: no poll


def test_all_of_it_awaits_on_an_event_loop(client: tq.TransferQueueClient) -> None:
    pool = tq.group_pool("async", tq.GroupPolicy.in_order(0, 1))

    async def producer() -> None:
        for number in range(3):
            (ticket,) = await pool.async_tickets(1, timeout_s=60)
            assert ticket.target == number
            await pool.async_open(f"g{number}", 1, ticket=ticket)
            (attempt,) = await pool.async_claim()
            await pool.async_finish(attempt, {"x": torch.ones(1)})
        await pool.async_end()

    async def trainer() -> list[str]:
        seen = []
        for version in range(3):
            batch = await pool.async_select(1, version=version, timeout_s=60)
            seen += [one.group_id for one in batch.groups]
            await pool.async_ack(batch)
        return seen

    async def both() -> list[str]:
        return (await asyncio.gather(trainer(), producer()))[0]

    assert asyncio.run(both()) == ["g0", "g1", "g2"]


def test_a_cancelled_wait_takes_nothing(pool: GroupPool) -> None:
    async def cancelled() -> None:
        asking = asyncio.ensure_future(pool.async_select(1, timeout_s=60))
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(cancelled())
    made(pool, 1)
    assert len(pool.select(1)) == 1


def test_a_worker_that_is_killed_fails_its_attempts_only(pool: GroupPool, fresh_child: Spawn) -> None:
    pool.open("g", 4, prompt={"number": 0})
    worker = fresh_child(f"""
        import os, sys, torch
        os.environ["TQ_ADDRESS"] = {str(tq.get_client().address)!r}
        import transfer_queue as tq
        tq.init()
        pool = tq.group_pool("train")
        for attempt in pool.claim(4):
            if attempt.slot != 2:
                pool.finish(attempt, {{"x": torch.tensor([attempt.slot])}})
        print("ready", flush=True)
        sys.stdin.readline()
    """)
    assert worker.line() == "ready"
    os.kill(worker.pid, signal.SIGKILL)
    (attempt,) = pool.claim(4, timeout_s=30)
    assert attempt.slot == 2
    late = attempt._replace(attempt=attempt.attempt - 1)
    before = tq.get_client().stats()["rows"]
    with pytest.raises(StaleAttempt):
        answer(pool, late)
    assert tq.get_client().stats()["rows"] == before
    answer(pool, attempt)
    assert len(pool.select(1).metadata) == 4
    assert pool.status()["sources"][""]["failed_attempts"] == {"infra": 1}


def test_a_worker_that_is_frozen_keeps_its_siblings_for_the_time_of_an_attempt(pool: GroupPool, child: Spawn) -> None:
    pool.open("g", 1)
    worker = child(f"""
        import os, sys, torch
        os.environ["TQ_ADDRESS"] = {str(tq.get_client().address)!r}
        import transfer_queue as tq
        from transfer_queue.errors import StaleAttempt
        tq.init()
        pool = tq.group_pool("train")
        (attempt,) = pool.claim(attempt_s=0.5)
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            pool.finish(attempt, {{"x": torch.tensor([1])}})
        except StaleAttempt:
            print("stale", flush=True)
    """)
    assert worker.line() == "ready"
    worker.freeze()
    (attempt,) = pool.claim(timeout_s=30)
    answer(pool, attempt)
    os.kill(worker.pid, signal.SIGCONT)
    worker.say()
    assert worker.line() == "stale"
    worker.finish()
    assert len(pool.select(1).metadata) == 1


def test_a_batch_of_results_is_one_put_and_what_nobody_wants_of_it_is_named(pool: GroupPool) -> None:
    pool.open("g", 4)
    attempts = pool.claim(4)
    pool.fail(attempts[1])
    (again,) = pool.claim(4)
    results = [one.result(reward=float(one.slot), tokens=3, num_rows=2 if one.slot == 2 else 1) for one in attempts]
    jagged = torch.nested.nested_tensor([torch.full((size,), size) for size in range(1, 6)], layout=torch.jagged)
    found = pool.finish_batch(results, {"x": jagged, "text": [f"row {row}" for row in range(5)]})
    assert [one.attempt for one in found.refused] == [attempts[1]]
    with pytest.raises(StaleAttempt, match=r"attempt \d+ at slot 1 of group 'g': attempt \d+ took its place"):
        raise found.refused[0].error
    assert tq.get_client().stats()["rows"] == len(found.metadata) == 4
    answer(pool, again)
    batch = pool.select(1)
    assert [[*member.rows] for member in batch.groups[0].members] == [[0], [1], [2, 3], [4]]
    assert batch.groups[0].rewards == [0.0, 1.0, 2.0, 3.0]
    rows = tq.get_client().get_data(found.metadata)
    assert [len(row) for row in rows["x"].unbind()] == [1, 3, 4, 5]
    assert list(rows["text"]) == ["row 0", "row 2", "row 3", "row 4"]


def test_a_batch_of_rows_that_are_there_keeps_those_that_somebody_wants(pool: GroupPool) -> None:
    pool.open("g", 3)
    attempts = pool.claim(3)
    pool.fail(attempts[0])
    (again,) = pool.claim(3)
    client = tq.get_client()
    tq.kv_batch_put(["a", "b", "c"], "train", {"x": torch.arange(3)})
    keyed = tq.KVBatchMeta(keys=["a", "b", "c"], tags=[{}] * 3, partition_id="train")
    found = pool.finish_batch([attempts[0].result(num_rows=2), attempts[1].result()], keyed)
    assert (len(found.refused), found.metadata.keys) == (1, ["c"])  # type: ignore[union-attr]
    assert list(tq.kv_list("train")["train"]) == ["c"]
    rows = client.put({"x": torch.arange(2)}, partition_id="train")
    late = pool.finish_batch([attempts[0].result(), attempts[2].result()], rows)
    assert (len(late.refused), late.metadata) == (1, rows[1])
    lost = pool.finish_batch([again.result(), attempts[2].result()], rows)
    assert [type(one.error) for one in lost.refused] == [RowCleared]
    answer(pool, again)
    assert len(pool.select(1).metadata) == 3


def test_nothing_of_a_batch_is_stored_where_nothing_of_it_is_wanted(pool: GroupPool) -> None:
    made(pool, 1), made(pool, 2)
    first = [SlotAttempt("g1", 0, 0, "", 0, None, {}), SlotAttempt("g2", 0, 0, "", 0, None, {})]
    pool.ack(pool.select(2), clear=True)
    large = {"x": torch.zeros(2, 100_000)}  # a block of its own
    found = asyncio.run(pool.async_finish_batch([one.result() for one in first], large))
    assert [(one.attempt, type(one.error)) for one in found.refused] == [(one, GroupEnded) for one in first]
    assert (len(found.metadata), tq.get_client().stats()["rows"]) == (0, 0)
    until(lambda: tq.get_client().stats()["arena_nbytes_used"] == 0, "the block to be free")


def test_a_worker_that_is_killed_between_two_batches_loses_only_what_it_had_not_finished(
    pool: GroupPool, fresh_child: Spawn
) -> None:
    for number in range(2):
        pool.open(f"g{number}", 4, prompt={"number": number})
    worker = fresh_child(f"""
        import os, sys, torch
        os.environ["TQ_ADDRESS"] = {str(tq.get_client().address)!r}
        import transfer_queue as tq
        tq.init()
        pool = tq.group_pool("train")
        attempts = pool.claim(8)
        done = [one for one in attempts if one.slot < 2]
        rows = torch.tensor([100 * one.prompt["number"] + one.slot for one in done])
        assert not pool.finish_batch([one.result(tokens=3) for one in done], {{"x": rows}}).refused
        print("ready", flush=True)
        sys.stdin.readline()
    """)
    assert worker.line() == "ready"
    os.kill(worker.pid, signal.SIGKILL)
    mine: list[SlotAttempt] = []
    while len(mine) < 4:
        mine += pool.claim(8, timeout_s=30)
    assert sorted((one.group_id, one.slot) for one in mine) == [("g0", 2), ("g0", 3), ("g1", 2), ("g1", 3)]
    late = [one._replace(attempt=one.attempt - 1) for one in mine[:2]]
    rows = torch.tensor([100 * one.prompt["number"] + one.slot for one in [*mine, *late]])
    found = pool.finish_batch([one.result(tokens=3) for one in [*mine, *late]], {"x": rows})
    assert [one.attempt for one in found.refused] == late
    values = tq.get_client().get_data(pool.select(2).metadata)["x"].flatten().tolist()
    assert values == [0, 1, 2, 3, 100, 101, 102, 103]


def test_a_trainer_that_is_killed_gives_its_groups_back(pool: GroupPool, fresh_child: Spawn) -> None:
    made(pool, 1)
    trainer = fresh_child(f"""
        import os, sys
        os.environ["TQ_ADDRESS"] = {str(tq.get_client().address)!r}
        import transfer_queue as tq
        tq.init()
        batch = tq.group_pool("train").select(1)
        print("ready", flush=True)
        sys.stdin.readline()
    """)
    assert trainer.line() == "ready"
    with pytest.raises(DeadlineExceeded, match="1 lent"):
        pool.select(1, timeout_s=0)
    os.kill(trainer.pid, signal.SIGKILL)
    assert len(pool.select(1, timeout_s=30)) == 1


def test_a_new_version_evicts_what_nobody_has_and_pays_for_it(pool: GroupPool) -> None:
    made(pool, 1), made(pool, 2, start_version=3)
    tq.set_weight_version(3, "run")
    assert pool.refills(8) == 1
    made(pool, 3, refills=True)
    batch = pool.select(2)
    assert [one.group_id for one in batch.groups] == ["g2", "g3"]
    status = pool.status()
    assert (status["version"], status["owed"]) == (3, 0)
    assert status["sources"][""]["evicted_for"] == {"stale": 1}


def test_a_version_below_its_floor_is_an_error_for_who_waits(client: tq.TransferQueueClient) -> None:
    pool = tq.group_pool("train", tq.GroupPolicy.in_order(0, 2, shrink=True))
    for number, ticket in enumerate(pool.tickets(2)):
        pool.open(f"g{number}", 1, ticket=ticket)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            pool.select(2, timeout_s=60)
        except GroupsShort as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    until(lambda: pool.status()["waiting"] == 1, "the wait")
    for _ in range(3):
        pool.fail(pool.claim(1, "g0"), "data")
    waiter.join()
    assert len(errors) == 1


def test_a_job_with_a_pool_for_every_step_leaves_nothing_behind(client: tq.TransferQueueClient) -> None:
    for step in range(3):
        pool = tq.group_pool(f"step_{step}", POLICY)
        made(pool, 1)
        pool.end()
        batch = pool.select(1)
        assert batch.ended
        pool.ack(batch, clear=True)
        pool.remove()
        with pytest.raises(InvalidInput, match="has no pool of groups"):
            pool.claim()
    assert client.overview().groups == {}


def test_whoever_waits_for_a_pool_hears_that_it_was_removed(pool: GroupPool) -> None:
    pool.open("half", 2)
    errors: list[BaseException] = []

    def select() -> None:
        try:
            pool.select(1)
        except InvalidInput as error:
            errors.append(error)

    waiter = threading.Thread(target=select)
    waiter.start()
    until(lambda: pool.status()["waiting"] == 1, "the wait")
    pool.remove(discard=True)
    waiter.join()
    assert "was removed" in str(errors[0])


def test_groups_outlive_the_server(service: Any) -> None:
    client = service(**DURABLE)
    pool = tq.group_pool("train", POLICY)
    made(pool, 1)
    pool.open("half", 2, prompt={"number": 5})
    first, second = pool.claim(2)
    pool.fail(first)
    (again,) = pool.claim(2)
    held = pool.select(1)
    standby_of(client)
    replaced(client)
    results = [one.result() for one in (first, again, second)]
    assert [one.attempt for one in pool.finish_batch(results, {"x": torch.tensor([7, 500, 501])}).refused] == [first]
    batch = pool.select(1)
    assert [one.group_id for one in batch.groups] == ["half"], "what was lent still is"
    assert client.get_data(batch.metadata)["x"].flatten().tolist() == [500, 501]
    pool.ack(held)
    pool.ack(batch)
    assert pool.status()["sources"][""]["consumed"] == 2


def test_groups_outlive_the_machine(service: Any, tmp_path: Path) -> None:
    """Of what is in a journal on a disk nobody holds anything: leases are over, and attempts are to be made again."""
    settings = {"server": {"journal_dir": str(tmp_path), "durability": "machine"}}
    client = service(**settings)
    pool = tq.group_pool("train", POLICY)
    made(pool, 1)
    pool.open("half", 2, prompt={"number": 5})
    first, second = pool.claim(2)
    pool.fail(first)
    (first,) = pool.claim(1)
    results = [first._replace(attempt=first.attempt - 1).result(), first.result()]
    assert len(pool.finish_batch(results, {"x": torch.tensor([7, 500])}).refused) == 1
    held = pool.select(1)
    kill(server_of(client))
    tq.close()
    tq.init(settings)
    pool = tq.group_pool("train")
    with pytest.raises(LeaseExpired):
        pool.ack(held)
    (again,) = pool.claim(9)
    assert (again.slot, again.attempt) == (second.slot, second.attempt + 1)
    with pytest.raises(StaleAttempt):
        answer(pool, second)
    answer(pool, again)
    batch = pool.select(2)
    assert tq.get_client().get_data(batch.metadata)["x"].flatten().tolist() == [100, 101, 500, 501]


def test_a_pool_is_as_good_from_another_host(start_host: Callable[..., Host]) -> None:
    head = start_host()
    other = start_host(join=head.tcp)
    run(head.client.session, open_pool(head.client.session, "train", POLICY, None))
    here, there = GroupPool(head.client, "train"), GroupPool(other.client, "train")
    here.open("g", 2)
    attempts = there.claim(2)
    for attempt in attempts:
        answer(there, attempt)
    batch = here.select(1, timeout_s=30)
    assert head.client.get_data(batch.metadata)["x"].flatten().tolist() == [0, 1]
    here.ack(batch, clear=True)
    here.open("h", 2)
    more = there.claim(2)
    results = [one.result() for one in (attempts[0], *more, attempts[1])]
    large = torch.arange(4)[:, None].expand(4, 50_000)  # a block of the other host's own
    assert [one.attempt for one in there.finish_batch(results, {"x": large}).refused] == attempts
    again = there.finish_batch([one.result() for one in attempts], {"x": large[:2]})
    assert [type(one.error) for one in again.refused] == [GroupEnded] * 2
    batch = here.select(1, timeout_s=30)
    assert [int(row[0]) for row in head.client.get_data(batch.metadata)["x"].unbind()] == [1, 2]
    here.ack(batch, clear=True)
    until(lambda: head.used() == other.used() == 0, "all blocks to be free")


def test_groups_are_drawn_by_priority_and_offered_again_until_they_are_used_up(client: Any) -> None:
    pool = tq.group_pool("replay", tq.GroupPolicy.prioritized(8, max_times_sampled=2, seed=1))
    for name, priority in (("rare", 0.0), ("often", 3.0), ("seldom", 1.0)):
        pool.open(name, 1, priority=priority)
        (attempt,) = pool.claim(group_id=name)
        pool.finish(attempt, {"x": torch.full((1, 2), priority)})
    batch = pool.select(1, 8)
    found = {group.group_id: group for group in batch.groups}
    assert {name: group.probability for name, group in found.items()} == {"often": 0.75, "seldom": 0.25}
    assert (batch.num_sealed, found["often"].times_sampled, found["often"].priority) == (3, 1, 3.0)
    pool.ack(batch, clear=True)
    pool.set_priorities({"rare": 1e9, "seldom": 0.0})
    again = pool.select(2)
    assert {group.group_id: group.times_sampled for group in again.groups} == {"rare": 1, "often": 2}
    pool.ack(again, clear=True)
    assert pool.status()["sources"][""]["consumed"] == 1  # often: its rows are gone, the others' are there
    seldom = [group.group_id for group in batch.groups].index("seldom")
    assert tq.get_client().get_data(batch.metadata.select_samples([seldom]))["x"][0].tolist() == [1.0, 1.0]


def test_producers_wait_for_a_consumer_that_is_killed_and_its_samples_do_not_count(
    client: Any, fresh_child: Spawn
) -> None:
    pool = tq.group_pool("replay", tq.GroupPolicy.prioritized(8, samples_per_insert=1.0))
    for number in range(2):
        (ticket,) = pool.tickets(1)
        pool.open(f"g{number}", 1, ticket=ticket)
        (attempt,) = pool.claim()
        pool.finish(attempt, {"x": torch.ones(1, 2)})
    with pytest.raises(DeadlineExceeded):
        pool.tickets(1, timeout_s=0)
    trainer = fresh_child("""
        import time
        import transfer_queue as tq
        tq.init()
        batch = tq.group_pool("replay").select(1)
        print(len(batch), flush=True)
        time.sleep(600)
    """)
    assert trainer.line() == "1"
    (ticket,) = pool.tickets(1)  # what it took lets one more in
    pool.return_tickets([ticket])
    trainer.kill()
    until(lambda: pool.status()["sampled"] == 0, "the return of what the trainer had")
    with pytest.raises(DeadlineExceeded):
        pool.tickets(1, timeout_s=0)
    pool.ack(pool.select(1))
    assert len(pool.tickets(1)) == 1


def test_status_and_metrics_show_pools_and_series(service: Any) -> None:
    client = service(metrics={"enabled": True})
    pool = tq.group_pool("train", tq.GroupPolicy.drop(1))
    made(pool, 1, source="math"), made(pool, 2, source="code")
    pool.open("open", 3)
    pool.filter("g2")
    tq.open_partition("step", "steps", 0)
    assert client.stats()["groups"] == {"train": {"open": 1, "sealed": 1, "lent": 0, "due": 0}}
    assert client.stats()["series"] == {"steps": {"open": 1, "waiting": 0}}
    shown = " ".join(tq_run("status", "--address", str(client.address)).stdout.split())
    assert "groups of open sealed lent due train 1 1 0 0" in shown
    assert "series open waiting steps 1 0" in shown
    scrape = Scrape(tq.get_metrics_endpoint() or "")
    assert scrape.value("tq_groups", partition_id="train", state="open") == 1
    assert scrape.value("tq_group_fates_total", partition_id="train", source="math", fate="sealed") == 1
    assert scrape.value("tq_groups_evicted_total", partition_id="train", source="code", reason="filtered") == 1
    assert scrape.value("tq_series", series="steps", state="open") == 1


def test_metrics_tell_who_waits_for_groups_and_which_source_is_not_used(service: Any, child: Spawn) -> None:
    client = service(metrics={"enabled": True})
    pool = tq.group_pool("train", tq.GroupPolicy())
    trainer = child("""
        import time
        import transfer_queue as tq
        tq.init()
        print("in", flush=True)
        print(len(tq.group_pool("train").select(2, timeout_s=60)), flush=True)
        time.sleep(600)
    """)
    assert trainer.line() == "in"
    select = {"partition_id": "train", "call": "select"}
    name, starved = "tq_oldest_group_wait_seconds", "tq_group_source_starved_seconds"

    def told(metric: str, **labels: str) -> float | None:
        return Scrape(tq.get_metrics_endpoint() or "").value(metric, **labels)

    until(lambda: (told(name, **select) or 0) > 0, "the wait")
    assert told(name, partition_id="train", call="tickets") == 0
    made(pool, 1, source="math"), made(pool, 2, source="code")
    assert trainer.line() == "2"
    assert told(name, **select) == 0
    assert (told(starved, partition_id="train", source="math") or 0) > 0
    trainer.kill()
    until(lambda: client.stats()["groups"]["train"]["sealed"] == 2, "the return of what it had")
    pool.ack(pool.select(2))
    assert told(starved, partition_id="train", source="math") == 0


def test_bad_calls_are_refused_before_anything_is_stored(pool: GroupPool) -> None:
    pool.open("g", 1)
    (attempt,) = pool.claim()
    with pytest.raises(InvalidInput, match="expected one of"):
        pool.fail(attempt, "other")
    with pytest.raises(InvalidInput, match="has no pool of groups"):
        tq.group_pool("elsewhere").status()
    with pytest.raises(InvalidInput, match=r"another policy .* and is in use"):
        tq.group_pool("train", tq.GroupPolicy.drop(3))
    elsewhere = tq.get_client().put({"x": torch.ones(1)}, partition_id="other")
    with pytest.raises(InvalidInput, match="not in 'train'"):
        pool.finish(attempt, elsewhere)
    with pytest.raises(InvalidInput):
        pool.select(0)
    answer(pool, attempt)
    assert len(pool.select(1)) == 1


def test_a_call_that_is_broken_off_leaves_groups_and_attempts_with_their_process(pool: GroupPool) -> None:
    made(pool, 1)
    pool.open("g2", 1)
    (attempt,) = pool.claim(1, "g2")
    batch = pool.select(1)

    def alarm(*given: object) -> None:
        raise RuntimeError("the loop's own")

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(RuntimeError, match="own"):
            pool.wait(5, timeout_s=60)
    finally:
        signal.signal(signal.SIGALRM, before)
    answer(pool, attempt)
    pool.ack(batch)
    assert pool.status()["sealed"] == 1
