"""A wait that lasts says what is missing: in the log of whoever waits, and the request waits on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import until
from hosts import Host, rows
from tables import Box
from units import BUDGET, Shell

import transfer_queue as tq
from transfer_queue.controller import Controller
from transfer_queue.errors import ConfigError, DeadlineExceeded, InvalidInput, StoreFull
from transfer_queue.sampler import GRPOGroupNSampler, SequentialSampler
from transfer_queue.schema import FieldSchema
from transfer_queue.server.service import Service
from transfer_queue.storage.blocks import Unit
from transfer_queue.wait_queue import AT_ONCE
from transfer_queue.wire import messages as m


def told(box: Box) -> list[tuple[Any, str]]:
    """(ticket, text) of what was said since the last call, and nothing else was."""
    found = [(ticket, reply.text) for ticket, reply in box.controller.outbox if isinstance(reply, m.Waiting)]
    assert len(found) == len(box.controller.outbox)
    box.controller.outbox.clear()
    return found


# ---- the controller, by its own clock ----


def test_a_fetch_that_waits_says_what_is_missing_after_10_s_1_min_and_5_min() -> None:
    box = Box()
    box.handle(m.SetPartition(1, "p", 64, {}))
    box.put(16, ["tokens"])
    box.put([0, 1, 2, 3], ["reward"])
    box.fetch(2, ["tokens", "reward"], "actor")
    box.fetch(8, ["tokens", "reward"], "actor", wait_s=400, ticket="w")
    assert box.controller.next_deadline() == 10
    box.expire(9.9)
    assert told(box) == []
    for now in (10, 60, 300):
        box.expire(now)
        assert told(box) == [
            (
                "w",
                f"get_meta waits for {now} s: 8 rows with ['tokens', 'reward'] in partition 'p' for task 'actor': "
                "16 rows of 64 declared, 'tokens' written on 16, 'reward' written on 4; 2 taken, 0 on lease, 2 ready",
            )
        ]
    assert box.controller.next_deadline() == 400
    box.put(list(range(4, 10)), ["reward"])
    assert box.answers() == [("w", list(range(2, 10)))]
    assert box.controller.next_deadline() is None


def test_a_wait_that_ends_before_is_quiet() -> None:
    box = Box()
    box.fetch(1, wait_s=400, ticket="served")
    box.fetch(1, wait_s=9, ticket="late", task="u", partition="q")
    box.fetch(1, wait_s=400, ticket="gone", task="u", partition="q")
    box.put(1)
    box.forget("gone")
    box.expire(9)
    assert [ticket for ticket, _ in box.answers()] == ["served", "late"]
    assert box.controller.next_deadline() is None


def test_names_that_do_not_exist_come_with_the_nearest_that_do() -> None:
    box = Box()
    box.put(1, ["reward"], partition="train_1")
    box.fetch(1, ["reward"], wait_s=20, ticket="w", partition="trian_1")
    box.fetch(1, ["rewrad"], wait_s=20, ticket="v", partition="train_1")
    box.expire(10)
    partition, field = (text for _, text in told(box))
    assert partition.endswith("there is no such partition; the nearest is 'train_1'")
    assert "1 rows, 'rewrad' written on none; the nearest is 'reward'; 0 taken" in field


def test_rows_on_lease_are_counted_and_a_sampler_that_does_not_take_what_is_ready_is_named() -> None:
    box = Box(GRPOGroupNSampler(2))
    box.put(4, tags=[{"group_id": group} for group in "aabc"])
    box.lend(2, 1000.0)
    box.fetch(2, wait_s=20, ticket="w")
    box.expire(10)
    ((_, text),) = told(box)
    assert text.endswith("0 taken, 2 on lease, 2 ready, but not what GRPOGroupNSampler takes")


def test_of_many_that_wait_only_some_are_told_at_once() -> None:
    box = Box()
    for ticket in range(AT_ONCE + 1):
        box.fetch(1, wait_s=20, ticket=ticket)
    box.expire(10)
    assert [ticket for ticket, _ in told(box)] == list(range(AT_ONCE))
    assert box.controller.next_deadline() == 10
    box.expire(10)
    assert [ticket for ticket, _ in told(box)] == [AT_ONCE]
    assert box.controller.next_deadline() == 20


def test_a_request_goes_on_where_the_one_before_ended() -> None:
    """A loader asks again every few seconds."""
    box = Box()
    heard = []
    for number in range(24):
        fetch = m.Fetch(number, "p", ["a"], 1, "t", {}, 3.0, True, waited_s=3.0 * number)
        assert box.handle(fetch, number) is None
        box.expire(box.now + 3.0)
        heard += [reply.text.partition(":")[0] for _, reply in box.controller.outbox if isinstance(reply, m.Waiting)]
        box.controller.outbox.clear()
    assert heard == ["get_meta waits for 10 s", "get_meta waits for 60 s"]


@pytest.mark.parametrize("waited_s", [-1.0, float("nan"), float("inf")])
def test_a_time_that_nobody_can_have_waited_is_refused(waited_s: float) -> None:
    with pytest.raises(InvalidInput, match="waited_s"):
        Box().handle(m.Fetch(1, "p", ["a"], 1, "t", {}, 3.0, True, waited_s=waited_s), "w")


def test_a_put_that_waits_for_rows_to_go_says_how_many_there_are() -> None:
    box = Box(max_rows=4)
    box.put(4)
    box.put(1, timeout_s=20, ticket="w")
    box.expire(10)
    expected = "put waits for 10 s: 4 of total_storage_size=4 rows are in use; clear what was used"
    assert told(box) == [("w", expected)]
    box.clear()
    assert [ticket for ticket, _ in box.answers()] == ["w"]


def test_producers_that_wait_for_a_version_are_told() -> None:
    box = Box()
    box.announce(1)
    box.admit(8)
    assert not box.admit(1, wait_s=20, ticket="w")
    box.expire(10)
    ((ticket, text),) = told(box)
    assert ticket == "w"
    assert text.startswith("admit waits for 10 s: 1 more rows for task 't' would be more than 1 versions old: 8 are")


def test_an_allocation_that_waits_says_who_has_the_memory() -> None:
    shell = Shell()
    shell.unit.pin(shell.published(BUDGET - 4096), b"reader")
    shell.allocate(BUDGET // 2, ticket="w", wait_s=20)
    assert shell.unit.next_deadline() == 10
    shell.unit.expire(10)
    ((ticket, reply),) = shell.unit.outbox
    assert isinstance(reply, m.Waiting)
    used = "524288 bytes do not fit: 1044480 of 1048576 bytes are in use, readers hold 1044480 of them"
    assert (ticket, reply.text) == ("w", f"put waits for 10 s: {used}")
    assert shell.unit.next_deadline() == 20
    shell.unit.close()


# ---- the service ----


def test_a_commit_that_waits_keeps_its_block() -> None:
    unit = Unit(1 << 20)
    service = Service(Controller(SequentialSampler(), max_rows=1, reserved_rows=0), unit)
    session = service.sessions.attach(b"client", local=True)

    def commit(rid: int) -> Any:
        field = FieldSchema("x", "dense", "uint8", ())
        message = m.Commit(rid, "p", 1, None, None, [field], 0, b"layout", None, 100.0)
        return service.handle(message, memoryview(b"abcd"), session, ("link", rid), 0.0)

    assert commit(1) is not None
    assert commit(2) is None
    service.expire(10.0)
    ((ticket, (reply, _)),) = service.answered(10.0)
    assert (ticket, type(reply)) == (("link", 2), m.Waiting)
    assert 2 in session.parked
    service.handle(m.Clear(3, "p", None, None), memoryview(b""), session, ("link", 3), 11.0)
    service.apply_outcomes()
    ((ticket, (reply, _)),) = service.answered(11.0)
    assert (ticket, type(reply)) == (("link", 2), m.Committed)
    service.check_invariants()
    unit.close()


# ---- real processes ----


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged as a warning so far."""
    return lambda: [record.getMessage() for record in caplog.records if record.name == "transfer_queue"]


def notices(*seconds: float) -> dict[str, Any]:
    return {"server": {"notice_after_s": list(seconds)}}


@pytest.mark.parametrize("coroutine", [False, True])
def test_a_client_logs_what_it_waits_for_and_keeps_its_deadline(
    service: Callable[..., tq.TransferQueueClient], lines: Callable[[], list[str]], coroutine: bool
) -> None:
    client = service(**notices(0.05, 0.2))
    client.put({"x": [1]}, partition_id="p")
    asked: Any = (["x"], 4, "p", "fetch", "t", None, 0.5)
    with pytest.raises(DeadlineExceeded, match=r"within 0.5 s"):
        asyncio.run(client.async_get_meta(*asked)) if coroutine else client.get_meta(*asked)
    missing = "4 rows with ['x'] in partition 'p' for task 't': 1 rows, 'x' written on 1; 0 taken, 0 on lease, 1 ready"
    assert lines() == [f"get_meta waits for {seconds:g} s: {missing}" for seconds in (0.05, 0.2)]
    assert len(client.get_meta(["x"], 1, "p", task_name="t")) == 1


@pytest.mark.parametrize("coroutine", [False, True])
def test_what_was_waited_for_comes_after_the_notice(
    service: Callable[..., tq.TransferQueueClient],
    child: Callable[[str], Any],
    lines: Callable[[], list[str]],
    coroutine: bool,
) -> None:
    client = service(**notices(0.05))
    writer = child("""
        import transfer_queue as tq
        tq.init()
        print("there", flush=True)
        input()
        tq.get_client().put({"x": [1, 2]}, partition_id="p")
        tq.close()
    """)
    assert writer.line() == "there"

    async def fetch() -> tq.BatchMeta:
        waiting = asyncio.ensure_future(client.async_get_meta(["x"], 2, "p", task_name="t", timeout_s=30))
        while not lines():
            await asyncio.sleep(0)
        writer.say()
        return await waiting

    if coroutine:
        meta = asyncio.run(fetch())
    else:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(client.get_meta, ["x"], 2, "p", task_name="t", timeout_s=30)
            until(lambda: bool(lines()), "a notice")
            writer.say()
            meta = waiting.result()
    assert client.get_data(meta)["x"].tolist() == [1, 2]
    assert lines() == ["get_meta waits for 0.05 s: 2 rows with ['x'] in partition 'p' for task 't': "
                       "there is no such partition"]  # fmt: skip
    writer.finish()


def test_many_tasks_that_wait_for_the_same_are_one_line(
    service: Callable[..., tq.TransferQueueClient], lines: Callable[[], list[str]]
) -> None:
    client = service(**notices(0.2))
    client.put({"x": [1]}, partition_id="p")

    async def fetch(task: str) -> None:
        with pytest.raises(DeadlineExceeded):
            await client.async_get_meta(["x"], 4, "p", task_name=task, timeout_s=0.6)

    async def all_of_them() -> None:
        await asyncio.gather(*(fetch("t") for _ in range(16)), fetch("u"))

    asyncio.run(all_of_them())
    assert sorted(line.partition("for task ")[2][:3] for line in lines()) == ["'t'", "'u'"]


def test_a_put_that_waits_for_memory_logs_it(
    service: Callable[..., tq.TransferQueueClient], lines: Callable[[], list[str]]
) -> None:
    budget = {"SimpleStorage": {"budget_nbytes": 1 << 20}}
    client = service(backend=budget, client={"timeout_s": 0.5}, **notices(0.05))
    client.put({"x": torch.zeros(1, 200_000)}, partition_id="p")
    with pytest.raises(StoreFull):
        client.put({"x": torch.zeros(1, 200_000)}, partition_id="p")
    (line,) = lines()
    assert line.startswith("put waits for 0.05 s: 800000 bytes do not fit: ")


def test_a_stream_logs_what_it_waits_for_although_it_asks_again_and_again(
    service: Callable[..., tq.TransferQueueClient], lines: Callable[[], list[str]]
) -> None:
    client = service(**notices(0.45))
    stream = iter(tq.StreamingDataset(None, 2, 2, ["x"], "p", "t", 0, lease_s=0.6, prefetch=True))  # asks every 0.2 s
    client.put({"x": [1, 2]}, partition_id="p")
    assert next(stream)[0]["x"].tolist() == [1, 2]  # and now it looks for the next two
    until(lambda: bool(lines()), "a notice")
    client.put({"x": [3, 4]}, partition_id="p")
    assert next(stream)[0]["x"].tolist() == [3, 4]
    (line,) = {line.partition(":")[0] for line in lines()}
    assert line == "get_meta waits for 0.45 s"
    stream.close()


def test_a_client_of_a_unit_of_another_host_logs_what_the_controller_says(
    start_host: Callable[..., Host], lines: Callable[[], list[str]]
) -> None:
    head = start_host(notice_after_s=(0.05,))
    client = start_host(head.tcp).client
    head.kv_put(["k"], "p", rows(1.0, 1))
    with pytest.raises(DeadlineExceeded):
        client.get_meta(["x"], 2, "p", task_name="t", timeout_s=0.4)
    (line,) = lines()
    assert line.startswith("get_meta waits for 0.05 s: 2 rows with ['x'] in partition 'p' for task 't': 1 rows")
    assert len(client.get_meta(["x"], 1, "p", task_name="t", timeout_s=5)) == 1


def test_the_times_are_a_setting(
    service: Callable[..., tq.TransferQueueClient], lines: Callable[[], list[str]]
) -> None:
    for wrong in (5, [0], ["a"], [True], None):
        with pytest.raises(ConfigError, match=r"server\.notice_after_s"):
            service(server={"notice_after_s": wrong})
    client = service(**notices())
    with pytest.raises(DeadlineExceeded):
        client.get_meta(["x"], 4, "p", task_name="t", timeout_s=0.1)
    assert lines() == []
