"""A step's rollout batch to data-parallel ranks and back (`transfer_queue.bridge`)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Child, until
from hosts import Host
from rollouts import SCHEMA, N, rollout

import transfer_queue as tq
from transfer_queue.bridge import (
    Fetched,
    Inferred,
    Numbers,
    Objects,
    Ragged,
    RolloutBridge,
    RolloutSchema,
    Schedule,
)
from transfer_queue.errors import DeadlineExceeded, InvalidInput, RowCleared, SchemaViolation, StoreFull


@pytest.fixture
def bridge(shared: tq.TransferQueueClient) -> RolloutBridge:
    return RolloutBridge(shared, SCHEMA)


@pytest.fixture
def step(bridge: RolloutBridge, request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.node.name
    bridge.clear(request.node.name)


def check(fetched: Fetched, batch: dict[str, Any], rows: list[int]) -> None:
    """The rank has these rows of every column, as tensors."""
    for name in ("tokens", "loss_masks", "log_probs"):
        assert [row.tolist() for row in fetched[name]] == [batch[name][row] for row in rows], name
    assert fetched["tokens"][0].dtype == torch.int64
    assert fetched["loss_masks"][0].dtype == torch.int32
    assert all(np.array_equal(got, batch["experts"][row]) for got, row in zip(fetched["experts"], rows, strict=True))
    assert fetched["experts"][0].dtype == torch.int32
    assert fetched["rewards"].tolist() == [batch["rewards"][row] for row in rows]
    assert fetched["done"].tolist() == [batch["done"][row] for row in rows]
    for got, row in zip(fetched["images"], rows, strict=True):
        was = batch["images"][row]
        assert got is None if was is None else torch.equal(got["pixels"], was["pixels"])


def test_every_rank_gets_its_rows_in_the_order_of_the_schedule(bridge: RolloutBridge, step: str) -> None:
    batch = rollout()
    parts = [[9, 0, 3], [8, 7, 6, 5, 4, 2, 1]]
    plan = Schedule(
        partitions=parts, micro_batch_indices=[[[0], [2, 1]], [[0, 1, 2], [3, 4, 5, 6]]], num_microbatches=[1, 1],
        global_batch_sizes=[5, 5], extra={"round": 7},
    )  # fmt: skip
    bridge.put(step, batch, schedule=plan)
    for rank, rows in enumerate(parts):
        fetched = bridge.fetch(step, "actor", rank, 2, timeout_s=5)
        check(fetched, batch, rows)
        said = {name: fetched.schedule[name] for name in ("partition", "micro_batch_indices", "round")}
        assert said == {"partition": rows, "micro_batch_indices": plan.micro_batch_indices[rank], "round": 7}  # type: ignore[index]
        assert fetched.schedule["num_microbatches"] == [1, 1]
        assert fetched.schedule["global_batch_sizes"] == [5, 5]


def test_a_schedule_may_count_rollouts_of_several_rows(bridge: RolloutBridge, step: str) -> None:
    plan = Schedule(
        partitions=[range(N)], num_microbatches=[1], micro_batch_indices=[[range(N)]], global_batch_sizes=[5]
    )
    bridge.put(step, rollout(), schedule=plan)
    assert bridge.fetch(step, "actor", timeout_s=5).schedule["global_batch_sizes"] == [5]


def test_without_a_schedule_ranks_get_as_many_rows_or_one_more(bridge: RolloutBridge, step: str) -> None:
    batch = rollout()
    metas = bridge.put(step, batch, dp_size=4)
    assert [len(meta) for meta in metas] == [2, 3, 2, 3]
    check(bridge.fetch(step, "actor", 1, 4, timeout_s=5), batch, [2, 3, 4])


@pytest.mark.parametrize("make", [torch.tensor, np.array, list], ids=["tensors", "arrays", "lists"])
def test_columns_may_be_lists_arrays_or_tensors(bridge: RolloutBridge, step: str, make: Callable[..., Any]) -> None:
    batch = rollout()
    given = {**batch, **{name: [make(row) for row in batch[name]] for name in ("tokens", "loss_masks", "log_probs")}}
    given["rewards"] = make(batch["rewards"])
    bridge.put(step, given)
    check(bridge.fetch(step, "actor", 0, timeout_s=5), batch, list(range(N)))


def test_numbers_may_be_scalars_of_numpy_and_torch(bridge: RolloutBridge, step: str) -> None:
    batch = rollout()
    mixed: list[Any] = list(batch["rewards"])
    mixed[1], mixed[2], mixed[3] = np.float64(1.0), torch.tensor(2.0), 3
    bridge.put(step, {**batch, "rewards": mixed})
    assert bridge.fetch(step, "actor", 0, timeout_s=5)["rewards"].tolist() == batch["rewards"]


def test_a_fetch_that_fails_takes_nothing(shared: tq.TransferQueueClient, step: str) -> None:
    schema = RolloutSchema({"t": Ragged(), "values": Ragged(dtype="float32", optional=True)})
    bridge = RolloutBridge(shared, schema)
    bridge.put(step, {"t": [[1, 2], [3]], "values": [[0.1, 0.2], [0.3]]})
    for slices in ({"values": tq.Slice.of_rank(0, 2, dim=3)}, {"t": tq.Slice.of_rank(0, 2, dim=3)}):
        with pytest.raises(InvalidInput):
            bridge.fetch(step, "actor", slices=slices, timeout_s=5)
    for name, part in (("typo", tq.Slice(0, 2)), ("t", slice(0, 2))):
        with pytest.raises(InvalidInput, match=name):
            bridge.fetch(step, "actor", slices={name: part}, timeout_s=5)  # type: ignore[dict-item]
    with pytest.raises(SchemaViolation):
        RolloutBridge(shared, RolloutSchema({"t": Ragged(dtype="int8")})).fetch(step, "actor", others=False)
    assert [row.tolist() for row in bridge.fetch(step, "actor", timeout_s=5)["t"]] == [[1, 2], [3]]
    with pytest.raises(DeadlineExceeded):
        bridge.fetch(step, "actor", timeout_s=0.05)


def test_columns_come_as_arrays_or_lists_where_asked(bridge: RolloutBridge, step: str) -> None:
    batch = rollout()
    bridge.put(step, batch)
    arrays = bridge.fetch(step, "a", 0, form="arrays", timeout_s=5)
    assert all(isinstance(row, np.ndarray) and row.dtype == np.int64 for row in arrays["tokens"])
    assert all(map(np.array_equal, arrays["experts"], batch["experts"]))
    lists = bridge.fetch(step, "b", 0, form="lists", timeout_s=5)
    assert lists["tokens"] == batch["tokens"]
    assert lists["rewards"] == batch["rewards"]
    assert lists["done"] == batch["done"]


def test_a_list_of_arrays_is_one_ragged_column_of_what_is_stored(bridge: RolloutBridge, step: str) -> None:
    (meta,) = bridge.put(step, rollout())
    stored = bridge.client.get_data(meta)
    assert stored["experts"].is_nested
    assert (stored["experts"].dtype, stored["tokens"].dtype) == (torch.uint8, torch.int32)


def test_derived_columns_reach_who_waits_for_them(bridge: RolloutBridge, step: str) -> None:
    batch = rollout()
    bridge.put(step, batch, dp_size=2)
    found: list[Fetched] = []
    actor = threading.Thread(
        target=lambda: found.append(bridge.fetch(step, "actor", 1, 2, columns=["tokens", "values"], timeout_s=10))
    )
    actor.start()
    critic = bridge.fetch(step, "critic", 1, 2, columns=["tokens"], timeout_s=5)
    values = [row.float() / 2 for row in critic["tokens"]]
    bridge.write_back(critic, {"values": values})
    actor.join(10)
    assert [row.tolist() for row in found[0]["values"]] == [row.tolist() for row in values]


def test_a_rank_reads_only_its_part_of_each_row(bridge: RolloutBridge, step: str) -> None:
    batch = rollout()
    bridge.put(step, batch)
    part = tq.Slice.of_rank(1, 2)
    fetched = bridge.fetch(step, "actor", 0, slices={"experts": part, "log_probs": part}, timeout_s=5)
    for row in range(N):
        assert np.array_equal(fetched["experts"][row], batch["experts"][row][row // 2 :])
        assert fetched["log_probs"][row].tolist() == batch["log_probs"][row][(row + 1) // 2 :]
        assert fetched["tokens"][row].tolist() == batch["tokens"][row]


def test_columns_that_a_batch_may_lack(bridge: RolloutBridge, step: str) -> None:
    batch = {name: column for name, column in rollout().items() if name not in ("experts", "images", "done")}
    bridge.put(step, {**batch, "images": None})
    fetched = bridge.fetch(step, "actor", 0, timeout_s=5)
    assert sorted(fetched.columns) == sorted(batch)


def test_a_task_has_each_row_once_and_another_task_has_it_too(bridge: RolloutBridge, step: str) -> None:
    bridge.put(step, rollout())
    bridge.fetch(step, "actor", 0, timeout_s=5)
    with pytest.raises(DeadlineExceeded, match=f"declared.*{N} were taken by the task before: `reset_consumption`"):
        bridge.fetch(step, "actor", 0, timeout_s=0.05)
    assert len(bridge.fetch(step, "critic", 0, timeout_s=5)) == N


def test_a_rank_that_dies_before_its_ack_leaves_its_rows_to_the_next(
    bridge: RolloutBridge, step: str, child: Callable[[str], Child]
) -> None:
    batch = rollout()
    bridge.put(step, batch, dp_size=2)
    dying = child(f"""
        import sys, time
        import transfer_queue as tq
        from transfer_queue.bridge import *
        tq.init()
        schema = RolloutSchema({{"tokens": Ragged(stored="int32")}})
        RolloutBridge(tq.get_client(), schema).fetch({step!r}, "actor", 1, 2, lease_s=60)
        print("has them", flush=True)
        sys.stdin.readline()
    """)
    assert dying.line() == "has them"
    with pytest.raises(DeadlineExceeded, match="5 are on lease"):
        bridge.fetch(step, "actor", 1, 2, timeout_s=0.05)
    dying.kill()
    fetched = bridge.fetch(step, "actor", 1, 2, lease_s=60, timeout_s=20)
    check(fetched, batch, [5, 6, 7, 8, 9])
    bridge.ack(fetched)


def test_the_step_of_a_driver_that_died_can_be_put_again(bridge: RolloutBridge, step: str) -> None:
    """It declared the step and died: nobody has rows of it."""
    bridge.client.set_partition(step, size=3, sizes={"__rank_0_of_1__": 3})
    batch = rollout()
    bridge.put(step, batch)
    check(bridge.fetch(step, "actor", 0, timeout_s=5), batch, list(range(N)))


def test_a_step_that_is_cleared_is_over_for_those_who_have_it(bridge: RolloutBridge, step: str) -> None:
    bridge.put(step, rollout())
    fetched = bridge.fetch(step, "critic", 0, timeout_s=5)
    bridge.clear(step)
    with pytest.raises(RowCleared):
        bridge.write_back(fetched, {"values": [[0.0]] * N})
    assert fetched["rewards"].tolist() == rollout()["rewards"]  # what was read stays


def test_a_step_without_room_leaves_nothing(start_host: Callable[..., Host]) -> None:
    client = start_host(max_rows=N - 1).client
    with pytest.raises(StoreFull):
        RolloutBridge(client, SCHEMA).put("step", rollout())
    assert client.get_partition_list() == []


def test_a_step_that_was_declared_alone_was_dealt_to_nobody(
    bridge: RolloutBridge, shared: tq.TransferQueueClient, step: str
) -> None:
    """So does a put that finds no room for its columns."""
    shared.set_partition(step, size=3, metadata={"dp_size": 2})
    with pytest.raises(DeadlineExceeded):
        bridge.fetch(step, "actor", 0, 3, timeout_s=0.05)
    with pytest.raises(InvalidInput, match="metadata: expected a dict"):
        bridge.put(step, rollout(), metadata=[1])  # type: ignore[arg-type]


def test_ranks_on_another_host(start_host: Callable[..., Host]) -> None:
    head = start_host()
    other = start_host(head.tcp)
    batch = rollout()
    RolloutBridge(head.client, SCHEMA).put("step", batch, dp_size=2)
    for rank, host in enumerate((other, head)):
        fetched = RolloutBridge(host.client, SCHEMA).fetch("step", "actor", rank, 2, timeout_s=5)
        check(fetched, batch, list(range(5 * rank, 5 * rank + 5)))


def test_images_of_one_prompt_are_stored_once(start_host: Callable[..., Host]) -> None:
    client = start_host().client
    schema = RolloutSchema({"images": Objects()})
    images = [{"pixels": torch.randn(64, 1176)} for _ in range(2)]
    batch = {"images": [{"pixels": images[row // 4]["pixels"].clone()} for row in range(8)]}
    RolloutBridge(client, schema, dedupe=True).put("step", batch, dp_size=4)
    assert client.stats()["arena_nbytes_used"] < 2.2 * images[0]["pixels"].nbytes
    fetched = RolloutBridge(client, schema).fetch("step", "actor", 2, 4, timeout_s=5)
    assert all(torch.equal(one["pixels"], images[1]["pixels"]) for one in fetched["images"])


def changed(name: str, row: int, value: Any) -> dict[str, Any]:
    batch = rollout()
    batch[name][row] = value
    return batch


VIOLATIONS: dict[str, tuple[dict[str, Any], int | None, str | None]] = {
    "a text among tokens": (changed("tokens", 3, [1, "x"]), 3, "tokens"),
    "None for tokens": (changed("tokens", 2, None), 2, "tokens"),
    "a float among tokens": (changed("tokens", 4, [1.5]), 4, "tokens"),
    "floats in an array of tokens": (changed("tokens", 4, np.array([1.5])), 4, "tokens"),
    "a token beyond what is stored": (changed("tokens", 1, [1 << 40]), 1, "tokens"),
    "a mask below what is stored": (changed("loss_masks", 5, [-1]), 5, "loss_masks"),
    "an expert beyond what is stored": (changed("experts", 6, np.full((1, 2, 3), 256)), 6, "experts"),
    "experts of another shape": (changed("experts", 7, np.zeros((4, 3, 2), np.int32)), 7, "experts"),
    "no reward": (changed("rewards", 8, None), 8, "rewards"),
    "a list for a reward": (changed("rewards", 8, [1.0]), 8, "rewards"),
    "a reward beyond float32": (changed("rewards", 9, 1e39), 9, "rewards"),
    "a float beyond float32 in a list": (changed("log_probs", 4, [0.0, -1e39]), 4, "log_probs"),
    "a float beyond float32 in an array": (changed("log_probs", 4, np.array([0.0, 1e39])), 4, "log_probs"),
    "a number for a truth": (changed("done", 1, 5), 1, "done"),
    "a float among tokens, though it is whole": (changed("tokens", 4, np.array([1.0])), 4, "tokens"),
    "an int that float32 rounds": (changed("rewards", 8, (1 << 24) + 1), 8, "rewards"),
    "an int that float32 rounds in a list": (changed("log_probs", 4, [0.5, (1 << 24) + 1]), 4, "log_probs"),
    "an int that float32 rounds in an array": (changed("log_probs", 4, np.array([0, (1 << 24) + 1])), 4, "log_probs"),
    "a tensor without rows": ({**rollout(), "rewards": torch.tensor(1.0)}, None, "rewards"),
    "a column that is missing": ({name: c for name, c in rollout().items() if name != "tokens"}, None, None),
    "a column that nobody declared": ({**rollout(), "extra": [1] * N}, None, None),
    "a number for a column": ({**rollout(), "rewards": 1.0}, None, "rewards"),
    "a column that is too short": ({**rollout(), "rewards": [1.0]}, None, None),
}


@pytest.mark.parametrize("why", VIOLATIONS)
def test_what_the_schema_does_not_say_is_refused_by_row_and_field(
    bridge: RolloutBridge, shared: tq.TransferQueueClient, why: str
) -> None:
    batch, row, field = VIOLATIONS[why]
    with pytest.raises(SchemaViolation) as caught:
        bridge.put("refused", batch)
    assert (caught.value.row, caught.value.field) == (row, field)
    if row is not None:
        assert f"row {row}, field {field!r}" in str(caught.value)
    assert "refused" not in shared.get_partition_list()


BAD_SCHEDULES = {
    "a row twice": Schedule(partitions=[[0, 1], [1]]),
    "a row of nobody": Schedule(partitions=[[0], [1]]),
    "a dropped row of a rank": Schedule(partitions=[[0], [1, 2]], dropped=[2]),
    "a row of nobody among others that are dropped": Schedule(partitions=[[0]], dropped=[1]),
    "a rank without rows": Schedule(partitions=[[0, 1, 2], []]),
    "no ranks": Schedule(partitions=[]),
    "a place twice": Schedule(partitions=[[0, 1, 2]], micro_batch_indices=[[[0, 1], [1, 2]]]),
    "micro-batches of too few ranks": Schedule(partitions=[[0], [1, 2]], micro_batch_indices=[[[0]]]),
    "another number of micro-batches": Schedule(
        partitions=[[0], [1, 2]], micro_batch_indices=[[[0]], [[0], [1]]], num_microbatches=[1]
    ),
    "a name of the schedule's own": Schedule(partitions=[[0, 1, 2]], extra={"partition": "mine"}),
    "a name of the bridge's own": Schedule(partitions=[[0, 1, 2]], extra={"columns": 5}),
    "more micro-batches for one rank": Schedule(partitions=[[0], [1, 2]], micro_batch_indices=[[[0]], [[0], [1]]]),
}


@pytest.mark.parametrize("why", BAD_SCHEDULES)
def test_a_schedule_that_is_none_is_refused(bridge: RolloutBridge, shared: tq.TransferQueueClient, why: str) -> None:
    with pytest.raises(InvalidInput):
        bridge.put("refused", rollout(3), schedule=BAD_SCHEDULES[why])
    assert "refused" not in shared.get_partition_list()


@pytest.mark.parametrize("name", ["__rank_0_of_1__", "__x__", "", 7])
def test_a_column_that_is_not_declared_has_a_name_that_a_declared_one_may_have(
    shared: tq.TransferQueueClient, name: Any
) -> None:
    bridge = RolloutBridge(shared, RolloutSchema({"u": Numbers()}, others=Inferred(optional=True)))
    with pytest.raises(SchemaViolation, match="a column's name"):
        bridge.put("refused", {"u": [1.0], name: [7]})
    assert "refused" not in shared.get_partition_list()
    with pytest.raises(InvalidInput, match="not in the schema"):
        bridge.fetch("refused", "actor", columns=["u", name], timeout_s=0.05)


@pytest.mark.parametrize(("rows", "ranks"), [(2, 3), (2, 1 << 70), (0, 1), ("x", 1), (2, 0)])
def test_rows_that_are_no_rows_or_too_few_are_dealt_to_nobody(rows: Any, ranks: int) -> None:
    with pytest.raises(InvalidInput, match=r"rows|rank"):
        Schedule.even(rows, ranks)


@pytest.mark.parametrize("told", [
    {"dp_size": 2}, {"dp_size": 2, "schedule": Schedule(partitions=[[0], [1, 2]])},
    {"schedule": Schedule(partitions=[[2, 1, 0]])}, {"metadata": {"dp_size": 4}},
], ids=str)  # fmt: skip
def test_what_a_put_of_a_prepared_batch_could_not_heed_is_refused(
    bridge: RolloutBridge, shared: tq.TransferQueueClient, told: dict[str, Any]
) -> None:
    ready = bridge.prepare(rollout(3))
    with pytest.raises(InvalidInput):
        bridge.put("refused", ready, **told)
    assert "refused" not in shared.get_partition_list()


def test_a_number_of_ranks_that_the_schedule_has_not_is_refused(
    bridge: RolloutBridge, shared: tq.TransferQueueClient, step: str
) -> None:
    plan = Schedule(partitions=[[0], [1, 2]])
    with pytest.raises(InvalidInput, match="dp_size=3, and a schedule for 2 ranks"):
        bridge.put("refused", rollout(3), dp_size=3, schedule=plan)
    assert "refused" not in shared.get_partition_list()
    bridge.put(step, bridge.prepare(rollout(3), dp_size=2, schedule=plan), dp_size=2, metadata={"run": 1})
    there = shared.get_partition(step)
    assert there is not None
    assert there["metadata"] == {"run": 1, "dp_size": 2}


def test_a_step_is_put_once(bridge: RolloutBridge, step: str) -> None:
    bridge.put(step, rollout())
    with pytest.raises(InvalidInput, match="put once"):
        bridge.put(step, rollout())
    assert len(bridge.fetch(step, "actor", 0, timeout_s=5)) == N


def test_of_two_that_put_a_step_at_once_one_does(bridge: RolloutBridge, step: str) -> None:
    ready = bridge.prepare({**rollout(), "rewards": [0.5] * N}, dp_size=2)
    start, ended = threading.Barrier(2), []

    def put() -> None:
        start.wait()
        try:
            bridge.put(step, ready)
            ended.append("put")
        except InvalidInput as error:
            ended.append(f"{error}")

    for number in range(5):
        threads = [threading.Thread(target=put) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted("put once" in text for text in ended) == [False, True], ended
        assert [len(bridge.fetch(step, f"{number}", rank, 2, timeout_s=5)) for rank in range(2)] == [5, 5]
        bridge.clear(step)
        ended.clear()


def test_a_put_that_fails_leaves_nothing_and_what_another_put_meanwhile(
    bridge: RolloutBridge, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, store = bridge.put, type(bridge.client).put

    def fails(*given: Any, **named: Any) -> None:
        monkeypatch.setattr(type(bridge.client), "put", store)
        raise StoreFull("no room")

    def fails_behind_another(*given: Any, **named: Any) -> None:
        monkeypatch.setattr(type(bridge.client), "put", store)
        bridge.clear(step)
        put(step, rollout())
        raise StoreFull("no room")

    for failing in (fails, fails_behind_another):
        monkeypatch.setattr(type(bridge.client), "put", failing)
        with pytest.raises(StoreFull):
            put(step, rollout(), dp_size=3)
        there = bridge.client.get_partition(step)
        assert (there["rows"] if there else 0) == (0 if failing is fails else N)
    check(bridge.fetch(step, "actor", 0, timeout_s=5), rollout(), list(range(N)))


@pytest.mark.parametrize("commits", [1, 2, 3])
def test_a_writer_that_is_killed_leaves_nothing_to_any_rank_and_the_step_is_put_again(
    shared: tq.TransferQueueClient, step: str, child: Callable[[str], Child], commits: int
) -> None:
    bridge = RolloutBridge(shared, RolloutSchema({"u": Numbers()}))
    batch = {"u": [float(number) for number in range(8)]}
    writer = child(f"""
        import itertools, os, signal, threading
        import transfer_queue as tq
        from transfer_queue.bridge import Numbers, RolloutBridge, RolloutSchema
        from transfer_queue.client.session import Session
        from transfer_queue.wire import messages as m
        tq.init()
        exchange, numbers, answered = Session._exchange, itertools.count(1), threading.Semaphore(0)
        def killed(self, effect, *given, **named):
            if type(effect.request) is not m.Commit:
                return exchange(self, effect, *given, **named)
            if next(numbers) == {commits}:
                for _ in range({commits} - 1):
                    answered.acquire(timeout=10)
                os.kill(os.getpid(), signal.SIGKILL)
            found = exchange(self, effect, *given, **named)
            answered.release()
            return found
        Session._exchange = killed
        bridge = RolloutBridge(tq.get_client(), RolloutSchema({{"u": Numbers()}}))
        bridge.put({step!r}, {batch!r}, dp_size=2)
    """)
    assert writer.process.wait(20) == -signal.SIGKILL
    until(lambda: (bridge.client.get_partition(step) or {"rows": 0})["rows"] == 0, "the end of its claim")
    for rank in range(2):
        with pytest.raises(DeadlineExceeded):
            bridge.fetch(step, "actor", rank, 2, timeout_s=0.05)
    bridge.put(step, batch, dp_size=2)
    assert [len(bridge.fetch(step, "actor", rank, 2, timeout_s=5)) for rank in range(2)] == [4, 4]


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 0), (0.0, 2), ("1", 2)])
def test_a_rank_that_nobody_can_be_is_refused_at_once(bridge: RolloutBridge, step: str, rank: Any, ranks: int) -> None:
    with pytest.raises(InvalidInput, match="dp_rank"):
        bridge.fetch(step, "actor", rank, ranks, timeout_s=60)


@pytest.mark.parametrize("fetched", [None, 5])
def test_what_was_not_fetched_gets_nothing_written_back(bridge: RolloutBridge, fetched: Any) -> None:
    with pytest.raises(InvalidInput, match="fetched is a BatchMeta"):
        bridge.write_back(fetched, {})


def test_ranks_that_the_step_was_not_dealt_to_are_told_and_take_nothing(bridge: RolloutBridge, step: str) -> None:
    bridge.put(step, rollout(), dp_size=2)
    with pytest.raises(InvalidInput, match="dealt to 2 ranks: there is no 0 of 4"):
        bridge.fetch(step, "actor", 0, 4, timeout_s=0.05)
    assert [len(bridge.fetch(step, "actor", one, 2, timeout_s=5)) for one in range(2)] == [5, 5]


def test_write_back_takes_one_item_for_each_fetched_row(bridge: RolloutBridge, step: str) -> None:
    bridge.put(step, rollout())
    fetched = bridge.fetch(step, "actor", 0, timeout_s=5)
    with pytest.raises(SchemaViolation, match="rows that were fetched"):
        bridge.write_back(fetched, {"values": [[0.0]] * (N - 1)})
    with pytest.raises(InvalidInput, match="not in the schema"):
        bridge.write_back(fetched, {"unknown": [0.0] * N})


@pytest.mark.parametrize("columns", [
    {}, {"x": int}, {"__x": Numbers()}, {"x": Numbers(dtype="text")}, {"x": Ragged(dtype="complex64")},
    {"x": Ragged(shape=(0,))}, {"x": Ragged(dtype="int8", stored="int64")},
    {"x": Ragged(dtype="float64", stored="int64")}, {"x": Ragged(dtype="int64", stored="float32")},
], ids=str)  # fmt: skip
def test_a_schema_of_what_is_no_column_is_refused(columns: Any) -> None:
    with pytest.raises(InvalidInput):
        RolloutSchema(columns)
