"""vime's bridge: its names, methods and flags, driven by processes that look like its own, with Megatron's groups."""

from __future__ import annotations

import argparse
import json
import pickle
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vime_ranks
import vime_schedule
from conftest import Child
from vime_ranks import ROWS, STEPS, rollout, schedule

import transfer_queue as tq
from transfer_queue.bridge import RolloutBridge, Schedule
from transfer_queue.errors import InvalidInput, NotSupported, SchemaViolation
from transfer_queue.integrations.vime import TransferQueueBridge, add_arguments, validate_arguments
from transfer_queue.integrations.vime.fields import SCHEMA, as_rollout_batch


def arguments(*flags: str, **more: Any) -> Namespace:
    """What vime's driver has parsed, as far as the bridge looks at it."""
    args = add_arguments(argparse.ArgumentParser()).parse_args(["--enable-vime-transfer-queue", *flags])
    run = {
        "rollout_batch_size": 2, "n_samples_per_prompt": 4, "actor_num_nodes": 1, "actor_num_gpus_per_node": 4,
        "tensor_model_parallel_size": 2, "use_rollout_logprobs": True, "use_rollout_routing_replay": True,
        "multimodal_keys": {"image": "images"},
    }  # fmt: skip
    return Namespace(**{**vars(args), **run, **more})


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """Of a run whose service was started by `initialize`."""
    for name in ("TQ_ADDRESS", "TQ_PRE_ALLOC_SAMPLE_NUM", "TQ_ZERO_COPY_SERIALIZATION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    found = arguments()
    TransferQueueBridge.initialize(found)
    yield found
    tq.close()


def test_samples_of_several_rows_have_room(args: Namespace) -> None:
    """8 samples are 24 rows where each has several turns; nobody has cleared the rollout before."""
    client = tq.get_client()
    for rollout_id in range(2):
        client.put({"x": torch.zeros(24)}, partition_id=f"p{rollout_id}")
    assert client.stats()["rows"] == 48


def plan(step: int) -> Schedule:
    return Schedule(**schedule(step))


def start(child: Callable[[str], Child], store: Path, args: Namespace, call: str) -> Child:
    told = pickle.dumps(args)  # as Ray brings it to actors
    helpers = str(Path(vime_ranks.__file__).parent)
    return child(f"""
        import pickle, sys
        sys.path.insert(0, {helpers!r})
        import vime_ranks
        args, store = pickle.loads({told!r}), {str(store)!r}
        vime_ranks.{call}
    """)


def training(child: Callable[[str], Child], store: Path, args: Namespace, way: str) -> list[Child]:
    return [start(child, store, args, f"main({rank}, store, args, {way!r})") for rank in range(4)]


def asking(child: Callable[[str], Child], store: Path, args: Namespace, world: int = 1, tp: int = 1) -> list[Child]:
    return [start(child, store, args, f"ask({rank}, store, args, {world}, {tp})") for rank in range(world)]


def asked(ranks: list[Child], rollout_id: int, fields: list[str] | None = None, timeout_s: float = 20) -> list[Any]:
    """What `get_data` gives each of them."""
    for one in ranks:
        one.say(json.dumps([rollout_id, fields, timeout_s]))
    return [json.loads(one.line()) for one in ranks]


@pytest.mark.timeout(120)
def test_losses_are_those_of_a_plain_list_to_the_bit(
    args: Namespace, child: Callable[[str], Child], tmp_path: Path
) -> None:
    """A rollout manager writes three steps, each when the one before is cleared, and four ranks train on them."""
    manager = TransferQueueBridge.connect(args)
    ranks = training(child, tmp_path / "queue", args, "queue")
    for step in range(STEPS):
        manager.transfer_rollout_data(step, rollout(step), schedule=plan(step))
    found = [json.loads(one.finish(60)) for one in ranks]
    wanted = [json.loads(one.finish(60)) for one in training(child, tmp_path / "plain", args, "plain")]
    assert found == wanted
    assert len(set(found[0])) == STEPS
    assert tq.get_client().get_partition_list() == []


def fetched(args: Namespace, step: int, dp_rank: int, task: str = "actor_train", **more: Any) -> Any:
    """What `get_data` does on the first rank of its group."""
    bridge = RolloutBridge(tq.get_client(), SCHEMA)
    found = bridge.fetch(TransferQueueBridge.partition_id(step), task, dp_rank, 2, others=True, timeout_s=5, **more)
    return as_rollout_batch(found.columns), found


def test_every_column_that_was_written_comes_back(args: Namespace) -> None:
    data = rollout(0)
    bridge = TransferQueueBridge.connect(args)
    bridge.transfer_rollout_data(0, {**data, "my_extra": [0.5 * n for n in range(ROWS)]}, schedule=plan(0))
    for dp_rank, part in enumerate(plan(0).partitions):
        batch, _ = fetched(args, 0, dp_rank, columns=TransferQueueBridge.default_train_data_fields(args))
        for name in ("response_lengths", "rewards", "rollout_ids", "rollout_mask_sums"):
            assert batch[name] == [data[name][row] for row in part], name
        assert [row.tolist() for row in batch["tokens"]] == [data["tokens"][row] for row in part]
        assert all(
            isinstance(got, np.ndarray) and np.array_equal(got, data["rollout_routed_experts"][row])
            for got, row in zip(batch["rollout_routed_experts"], part, strict=True)
        )
        assert [image is None for image in batch["multimodal_train_inputs"]] == [row % 2 == 1 for row in part]
        assert batch["my_extra"] == [0.5 * row for row in part]
        assert batch["truncated"] == [0] * len(part)
        assert batch["sample_indices"] == list(part)


def test_ranks_get_no_objects_that_vime_keeps_from_them_unless_they_name_them(
    args: Namespace, child: Callable[[str], Child], tmp_path: Path
) -> None:
    """vime's log adds up every column that it does not know."""
    told = {"metadata": [{"source": "math"}] * ROWS, "notes": ["a"] * ROWS, "prompt": ["b"] * ROWS, "turns": [3] * ROWS}
    args.max_staleness = 1
    manager = TransferQueueBridge.connect(args)
    for rollout_id in range(2):
        manager.transfer_rollout_data(rollout_id, {**rollout(0), **told}, schedule=Schedule.even(ROWS, 1))
    ranks = asking(child, tmp_path / "store", args)
    fields = TransferQueueBridge.actor_train_data_fields(args)
    (found,) = asked(ranks, 0, fields)
    assert {name for name in told if name in found} == {"prompt", "turns"}
    assert found["multimodal_train_inputs"] == [None if row % 2 else {"pixels": [[row] * 3] * 2} for row in range(ROWS)]
    (found,) = asked(ranks, 1, [*fields, "metadata"])
    assert found["metadata"] == told["metadata"]
    assert "notes" not in found
    ranks[0].finish()


def test_ranks_get_the_rewards_and_lengths_of_all_rows_as_vime_has_them(
    args: Namespace, child: Callable[[str], Child], tmp_path: Path
) -> None:
    data = {**rollout(0), "raw_reward": [float(row) for row in range(ROWS)]}
    TransferQueueBridge.connect(args).transfer_rollout_data(0, data, schedule=plan(0))
    lengths = [len(tokens) for tokens in data["tokens"]]
    ranks = asking(child, tmp_path / "store", args, 2)
    for found, part in zip(asked(ranks, 0), plan(0).partitions, strict=True):
        assert found["partition"] == part
        assert (found["raw_reward"], found["seq_lens"]) == (data["raw_reward"], lengths)
        assert found["total_lengths"] == [lengths[row] for row in part]
    for one in ranks:
        one.finish()


def test_a_rank_that_is_started_again_gets_its_rollout_once_more(
    args: Namespace, child: Callable[[str], Child], tmp_path: Path
) -> None:
    TransferQueueBridge.connect(args).transfer_rollout_data(0, rollout(0), schedule=Schedule.even(ROWS, 1))
    first = asking(child, tmp_path / "first", args)
    found = asked(first, 0)
    assert asked(first, 0) == found  # also where the rank asks again
    first[0].kill()
    second = asking(child, tmp_path / "second", args)
    assert asked(second, 0) == found
    second[0].finish()


def test_a_rollout_is_used_when_the_rank_asks_for_the_next(
    args: Namespace, child: Callable[[str], Child], tmp_path: Path
) -> None:
    args.max_staleness = 2
    manager = TransferQueueBridge.connect(args)
    for rollout_id in range(3):
        manager.transfer_rollout_data(rollout_id, rollout(rollout_id), schedule=Schedule.even(ROWS, 1))
    ranks = asking(child, tmp_path / "store", args)
    asked(ranks, 0)
    client = tq.get_client()
    assert not client.check_consumption_status("actor_train", "train_0")
    asked(ranks, 1)
    assert client.check_consumption_status("actor_train", "train_0")
    manager.clear_partition(1)  # as the driver does before it asks for the next
    assert asked(ranks, 2) != [None]
    assert asked(ranks, 0, timeout_s=0.1) == [None]
    ranks[0].finish()


def test_all_ranks_of_a_group_hear_of_it_when_the_first_cannot_end_the_rollout_before(
    args: Namespace, child: Callable[[str], Child], tmp_path: Path
) -> None:
    TransferQueueBridge.connect(args).transfer_rollout_data(0, rollout(0), schedule=Schedule.even(ROWS, 1))
    ranks = asking(child, tmp_path / "store", args, world=2, tp=2)
    assert len(asked(ranks, 0)) == 2
    tq.close()  # the service ends
    assert asked(ranks, 1) == ["ServiceUnavailable"] * 2


def test_the_actor_gets_the_critics_values_when_they_are_written(args: Namespace) -> None:
    args.use_critic = True
    bridge = TransferQueueBridge.connect(args)
    bridge.transfer_rollout_data(0, rollout(0), schedule=plan(0))
    wanted = TransferQueueBridge.actor_train_data_fields(args)
    assert "values" in wanted
    found: list[Any] = []
    actor = threading.Thread(target=lambda: found.append(fetched(args, 0, 1, columns=wanted)[0]))
    actor.start()
    batch, critic = fetched(args, 0, 1, task="critic_train")
    values = [np.full(length, 0.5, np.float32) for length in batch["response_lengths"]]
    bridge.put_data(0, {"values": values}, data_fields=["values"], batch_meta=critic.meta)
    actor.join(10)
    assert [row.tolist() for row in found[0]["values"]] == [row.tolist() for row in values]


def test_a_rollout_waits_for_earlier_ones_to_be_cleared(args: Namespace) -> None:
    bridge = TransferQueueBridge.connect(args)
    bridge.transfer_rollout_data(0, rollout(0), schedule=plan(0))
    later = threading.Thread(target=lambda: bridge.transfer_rollout_data(1, rollout(1), schedule=plan(1)))
    later.start()
    client = tq.get_client()
    while not client.stats()["waiting_requests"]:
        pass
    assert client.get_partition_list() == ["train_0"]
    bridge.clear_partition(0)
    later.join(10)
    assert client.get_partition_list() == ["train_1"]


@pytest.mark.parametrize("framework", ["vime", "slime"])
@pytest.mark.parametrize("argument", ["group_indices", "rollout_indices"])
@pytest.mark.parametrize("column", ["group_ids", "rollout_ids"])
def test_the_frameworks_function_makes_the_schedule(
    args: Namespace, monkeypatch: pytest.MonkeyPatch, framework: str, argument: str, column: str
) -> None:
    """Groups of 2 rows that do not lie side by side: 2 groups for each step, one row for each micro-batch."""
    vime_schedule.install(monkeypatch, framework, argument)
    args.global_batch_size, args.micro_batch_size = 2, 1
    data = rollout(0)
    data[column] = [row % 4 for row in range(ROWS)]
    if column == "group_ids":
        del data["rollout_ids"]
    TransferQueueBridge.connect(args).transfer_rollout_data(0, data, train_parallel_config=vime_schedule.CONFIG)
    found = [fetched(args, 0, rank)[1].schedule for rank in range(2)]
    assert [one["partition"] for one in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [one["num_microbatches"] for one in found] == [[2, 2]] * 2
    assert [one["global_batch_sizes"] for one in found] == [[2, 2]] * 2


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda ids: list(torch.tensor(ids))])
def test_groups_are_told_apart_whatever_their_ids_come_as(
    args: Namespace, monkeypatch: pytest.MonkeyPatch, kind: Callable[[list[int]], Any]
) -> None:
    vime_schedule.install(monkeypatch)
    args.global_batch_size, args.micro_batch_size = None, 1
    data = {**rollout(0), "rollout_ids": kind([row // 4 for row in range(ROWS)])}
    TransferQueueBridge.connect(args).transfer_rollout_data(0, data, train_parallel_config=vime_schedule.CONFIG)
    assert fetched(args, 0, 0)[1].schedule["global_batch_sizes"] == [2]


def test_rows_that_make_no_whole_step_are_dropped_as_vime_does(
    args: Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vime_schedule.install(monkeypatch, argument="rollout_indices")
    args.global_batch_size, args.micro_batch_size = 3, 1
    data = {**rollout(0), "rollout_ids": [0, 0, 1, 2, 3, 3, 4, 4]}  # 4 rows in the step of 3 groups
    bridge = TransferQueueBridge.connect(args)
    with caplog.at_level("INFO", "transfer_queue"):
        bridge.transfer_rollout_data(0, data, train_parallel_config=vime_schedule.CONFIG)
    assert "4 of 8 rows" in caplog.text
    for rank, part in enumerate([[0, 2], [1, 3]]):
        batch, found = fetched(args, 0, rank)
        assert (found.schedule["partition"], batch["sample_indices"]) == (part, part)
        assert [row.tolist() for row in batch["tokens"]] == [data["tokens"][row] for row in part]
    assert tq.get_client().stats()["rows"] == 4


@pytest.mark.parametrize("framework", ["none", "vime"], ids=["not installed", "of another version"])
def test_without_a_function_that_is_known_a_schedule_is_asked_for(
    args: Namespace, monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    vime_schedule.install(monkeypatch, framework, "other")
    bridge = TransferQueueBridge.connect(args)
    with pytest.raises(NotSupported, match="pass schedule="):
        bridge.transfer_rollout_data(0, rollout(0), train_parallel_config=vime_schedule.CONFIG)
    assert tq.get_client().get_partition_list() == []


def test_without_a_schedule_ranks_get_the_frameworks_by_the_flags_of_the_run(
    args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `train_actor` reads first is there, and as many micro-batches for each rank."""
    vime_schedule.install(monkeypatch)
    args.global_batch_size, args.micro_batch_size, args.balance_data = 2, 2, True
    TransferQueueBridge.connect(args).transfer_rollout_data(0, rollout(0))
    found = [fetched(args, 0, rank)[1].schedule for rank in range(2)]
    assert [one["num_microbatches"] for one in found] == [[2]] * 2
    assert [one["global_batch_sizes"] for one in found] == [[2]] * 2
    assert [one["micro_batch_indices"] for one in found] == [[[0, 1], [2, 3]]] * 2


@pytest.mark.parametrize(("flags", "why"), [
    ({"virtual_pipeline_model_parallel_size": 2}, "pass train_parallel_config"),
    ({"global_batch_size": 3}, "num_groups"), ({"micro_batch_size": 3}, "micro-batches of 3"),
], ids=str)  # fmt: skip
def test_flags_that_make_no_schedule_are_refused(
    args: Namespace, monkeypatch: pytest.MonkeyPatch, flags: dict[str, int], why: str
) -> None:
    vime_schedule.install(monkeypatch)
    sizes = {"global_batch_size": 2, "micro_batch_size": 1}
    bridge = TransferQueueBridge(Namespace(**{**vars(args), **sizes, **flags}), tq.get_client())
    with pytest.raises(InvalidInput, match=why):
        bridge.transfer_rollout_data(0, rollout(0))
    assert tq.get_client().get_partition_list() == []


def test_bad_rollouts_are_refused_before_anything_waits_or_is_stored(args: Namespace) -> None:
    bridge = TransferQueueBridge.connect(args)
    data = rollout(0)
    with pytest.raises(ValueError, match="missing required fields"):
        bridge.transfer_rollout_data(0, {name: data[name] for name in data if name != "rewards"})
    masks = [*data["loss_masks"][:2], None, *data["loss_masks"][3:]]
    with pytest.raises(SchemaViolation, match="row 2, field 'loss_masks'"):
        bridge.transfer_rollout_data(0, {**data, "loss_masks": masks}, schedule=plan(0))
    with pytest.raises(ValueError, match="do not have each"):
        bridge.transfer_rollout_data(0, data, schedule=Schedule(partitions=[[0], [1]]))
    assert tq.get_client().get_partition_list() == []


def test_the_flags_are_those_of_the_pull_request() -> None:
    flags = "--num-data-storage-units 2 --max-staleness 1 --no-polling-mode --transfer-queue-extra-data-fields a b"
    flags += " --transfer-queue-staleness-poll-interval 0.5"
    args = arguments(*flags.split())
    validate_arguments(args)
    assert (args.enable_vime_transfer_queue, args.num_data_storage_units, args.max_staleness) == (True, 2, 1)
    assert (args.polling_mode, args.transfer_queue_staleness_poll_interval) == (False, 0.5)
    assert TransferQueueBridge.default_train_data_fields(args)[-2:] == ["a", "b"]
    assert TransferQueueBridge.env_vars(args) == {
        "TQ_PRE_ALLOC_SAMPLE_NUM": "8", "TQ_ZERO_COPY_SERIALIZATION": "true",
    }  # fmt: skip


@pytest.mark.parametrize("wrong", [
    {"max_staleness": -1}, {"num_data_storage_units": 0}, {"debug_train_only": True}, {"load_debug_rollout_data": "x"},
], ids=str)  # fmt: skip
def test_flags_that_do_not_fit_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        validate_arguments(arguments(**wrong))


def test_without_its_flag_the_bridge_does_nothing() -> None:
    args = arguments(enable_vime_transfer_queue=False)
    validate_arguments(args)
    TransferQueueBridge.initialize(args)
    bridge = TransferQueueBridge.connect(args)
    assert args.tq_config is None
    assert bridge.client is None
    assert TransferQueueBridge.env_vars(args) == {}
    bridge.clear_partition(0)
    bridge.put_data(0, {}, data_fields=[])
    bridge.close()


def test_actors_that_start_before_the_driver_initialises_are_told() -> None:
    with pytest.raises(ValueError, match="before actors start"):
        TransferQueueBridge.connect(arguments())
    with pytest.raises(ValueError, match="not divisible"):
        TransferQueueBridge.data_parallel_size(arguments(actor_num_gpus_per_node=3))
    assert TransferQueueBridge.data_parallel_size(arguments()) == 2
