"""Calls that contradict themselves, and wrong names: an error or a warning, never something else in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.errors import InvalidInput, UnknownRows


@pytest.fixture
def part(request: pytest.FixtureRequest, shared: tq.TransferQueueClient) -> Iterator[str]:
    """A name for partitions of the test's own; all that begin with it are removed."""
    name = request.node.name
    yield name
    for one in shared.get_partition_list():
        if one.startswith(name):
            shared.clear_partition(one)


def batch(n: int, *fields: str) -> TensorDict:
    return TensorDict({field: torch.zeros(n) for field in fields or ("x",)}, batch_size=[n])


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged as a warning since the last call."""

    def lines() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == "transfer_queue"]
        caplog.clear()
        return found

    return lines


# ---- put ----


def test_put_to_metadata_of_another_partition_is_refused_and_stores_nothing(
    shared: tq.TransferQueueClient, part: str
) -> None:
    meta = shared.put(batch(2), partition_id=part)
    with pytest.raises(InvalidInput, match=f"'other'.*'{part}'"):
        shared.put(batch(2, "y"), metadata=meta, partition_id="other")
    assert meta.field_names == ["x"]
    assert shared.get_partition_list() == [part]
    assert shared.get_production_status(["y"], part) == (None, None)


def test_put_to_metadata_of_two_partitions_is_refused_for_one_of_them(
    shared: tq.TransferQueueClient, part: str
) -> None:
    both = tq.BatchMeta.concat([shared.put(batch(1), partition_id=part + end) for end in "ab"])
    with pytest.raises(InvalidInput, match=f"{part}b"):
        shared.put(batch(2, "y"), metadata=both, partition_id=part + "a")
    assert shared.get_production_status(["y"], part + "a") == (None, None)


def test_put_to_metadata_may_repeat_its_partition(shared: tq.TransferQueueClient, part: str) -> None:
    meta = shared.put(batch(2), partition_id=part)
    assert shared.put(batch(2, "y"), metadata=meta, partition_id=part).field_names == ["x", "y"]


# ---- wrong names of partitions and tasks ----


def calls_that_name(partition: str) -> dict[str, Callable[[tq.TransferQueueClient], Any]]:
    return {
        "clear_partition": lambda client: client.clear_partition(partition),
        "reset_consumption": lambda client: client.reset_consumption(partition),
        "kv_clear": lambda _: tq.kv_clear(["k"], partition),
    }


@pytest.mark.parametrize("name", ["clear_partition", "reset_consumption", "kv_clear"])
def test_an_unknown_partition_is_named_with_the_nearest_one(
    shared: tq.TransferQueueClient, said: Callable[[], list[str]], name: str
) -> None:
    shared.put(batch(2), partition_id=f"training_of_{name}_1")
    assert calls_that_name(f"trainign_of_{name}_1")[name](shared) in (None, True)  # as in 0.1.11
    expected = f"{name}: there is no partition 'trainign_of_{name}_1'; the nearest is 'training_of_{name}_1'"
    assert said() == [expected]
    assert f"training_of_{name}_1" in shared.get_partition_list()
    shared.clear_partition(f"training_of_{name}_1")


@pytest.mark.parametrize("name", ["clear_partition", "reset_consumption", "kv_clear"])
def test_calls_for_partitions_that_are_gone_are_quiet(
    shared: tq.TransferQueueClient, part: str, said: Callable[[], list[str]], name: str
) -> None:
    shared.put(batch(2), partition_id=f"{part}_2")
    calls_that_name(f"{part}_1")[name](shared)
    calls_that_name("something_else")[name](shared)
    assert said() == []


def test_a_coroutine_warns_as_well(shared: tq.TransferQueueClient, part: str, said: Callable[[], list[str]]) -> None:
    shared.put(batch(1), partition_id=part)
    asyncio.run(shared.async_clear_partition(part[:-1]))
    assert len(said()) == 1


def test_a_task_that_took_nothing_is_named_with_the_nearest_one(
    shared: tq.TransferQueueClient, part: str, said: Callable[[], list[str]]
) -> None:
    shared.put(batch(2), partition_id=part)
    shared.get_meta(["x"], 2, part, task_name="actor_train")
    assert shared.reset_consumption(part, "actor_trian") is True
    assert said() == ["reset_consumption: there is no task 'actor_trian'; the nearest is 'actor_train'"]
    assert shared.check_consumption_status("actor_train", part)
    shared.reset_consumption(part, "critic_train")
    shared.reset_consumption(part, "actor_train")
    assert said() == []


def test_a_partition_created_beside_one_of_nearly_that_name_is_remarked_once(
    shared: tq.TransferQueueClient, part: str, said: Callable[[], list[str]]
) -> None:
    shared.set_partition(f"{part}_1", size=2)
    shared.set_partition(f"{part}_2", size=2)
    assert said() == []
    shared.set_partition(f"{part}s_1", size=4)
    assert said() == [f"set_partition: partition '{part}s_1' is new, and there was '{part}_1' before"]
    shared.set_partition(f"{part}s_1", size=5)
    assert said() == []
    assert shared.get_partition(f"{part}s_1") == {"size": 5, "metadata": {}, "rows": 0}


# ---- wrong names of fields and keys ----


def put_two(part: str) -> None:
    tq.kv_batch_put(["first", "second"], part, batch(2, "tokens", "reward"))


def test_a_field_that_no_row_has_is_left_out_with_a_warning(
    shared: tq.TransferQueueClient, part: str, said: Callable[[], list[str]]
) -> None:
    put_two(part)
    td = tq.kv_batch_get(["first"], part, select_fields=["tokens", "rewrad"])
    assert list(td.keys()) == ["tokens"]
    what = f"kv_batch_get of '{part}': left out the fields ['rewrad'], which no row has; the nearest is 'reward'"
    assert said() == [what]
    tq.kv_batch_get(["first"], part, select_fields=["tokens", "rewrad"])
    assert said() == []  # said once
    assert tq.kv_batch_get(["first"], part, select_fields="unheard_of").batch_size[0] == 0
    assert said() == [f"kv_batch_get of '{part}': left out the fields ['unheard_of'], which no row has"]


def test_a_field_that_is_not_written_on_every_row_is_left_out_with_a_warning(
    shared: tq.TransferQueueClient, part: str, said: Callable[[], list[str]]
) -> None:
    put_two(part)
    tq.kv_put("first", part, {"partly": torch.zeros(1)})
    assert list(tq.kv_batch_get(["first", "second"], part, select_fields=["reward", "partly"]).keys()) == ["reward"]
    assert said() == [f"kv_batch_get of '{part}': left out the fields ['partly'], which are not written on every row"]
    tq.kv_batch_get(["first"], part, select_fields=["reward", "partly"])
    assert said() == []


def test_missing_keys_are_left_out_with_a_warning(
    shared: tq.TransferQueueClient, part: str, said: Callable[[], list[str]]
) -> None:
    put_two(part)
    assert len(tq.kv_batch_get(["first", "secnod", "other"], part)) == 1
    what = "left out 2 of 3 keys, unknown are ['secnod', 'other']; the nearest is 'second'"
    assert said() == [f"kv_batch_get of '{part}': {what}"]
    asyncio.run(tq.async_kv_batch_get(["first", "third"], part, select_fields=["tokens"]))
    assert said() == [f"kv_batch_get of '{part}': left out 1 of 2 keys, unknown are ['third']"]


def test_what_is_all_there_is_quiet(shared: tq.TransferQueueClient, part: str, said: Callable[[], list[str]]) -> None:
    put_two(part)
    tq.kv_batch_get(["first", "second", "first"], part)
    tq.kv_batch_get("first", part, select_fields=["reward"])
    shared.get_data(shared.get_meta(["tokens"], 2, part, task_name="t"))
    assert said() == []


def test_an_error_over_unknown_keys_names_the_nearest_partition_or_key(
    shared: tq.TransferQueueClient, part: str
) -> None:
    put_two(part)
    with pytest.raises(UnknownRows, match=f"the nearest is '{part}'"):
        tq.kv_batch_get("first", part[1:])
    with pytest.raises(UnknownRows, match="the nearest is 'first'"):
        tq.kv_batch_get("frist", part)
