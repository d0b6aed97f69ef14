"""Counts of the service in the log of a training run, by writers that are known by their methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transfer_queue as tq
from transfer_queue.errors import InvalidInput, NotInitialized
from transfer_queue.integrations.loggers import log_metrics, metrics


class Run:
    """As a run of wandb."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))


class Board:
    """As a SummaryWriter of TensorBoard."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


@pytest.fixture
def rows(client: tq.TransferQueueClient) -> tq.TransferQueueClient:
    """A service with 4 rows, of which a task consumed 3 and has given up 1."""
    tq.kv_batch_put(["a", "b", "c", "d"], "train", {"x": torch.arange(4)})
    client.get_meta(["x"], 2, "train", task_name="actor")
    tried = client.get_meta(["x"], 1, "train", task_name="actor", lease_s=60, sampling_config={"max_deliver": 1})
    client.nack(tried)
    client.set_weight_version(7)
    return client


def test_a_run_gets_all_values_in_one_call(rows: tq.TransferQueueClient) -> None:
    run = Run()
    told = log_metrics(np.int64(3), run, tasks=["actor", "critic"])
    assert run.logged == [(told, 3)]
    assert type(run.logged[0][1]) is int
    assert all(type(value) is float for value in told.values())
    expected = {
        "rows": 4.0, "partitions": 1.0, "clients": 1.0, "waiting_requests": 0.0, "dead_letters": 1.0, "stale_rows": 0.0,
        "weight_version": 7.0, "partition/train/rows": 4.0, "partition/train/consumed_share/actor": 0.75,
        "partition/train/consumed_share/critic": 0.0,
    }  # fmt: skip
    assert {name: told[f"transfer_queue/{name}"] for name in expected} == expected
    assert told["transfer_queue/memory/used_bytes"] > 0
    assert 0 < told["transfer_queue/memory/used_share"] < 1


def test_a_board_gets_one_scalar_after_the_other(rows: tq.TransferQueueClient) -> None:
    board = Board()
    told = log_metrics(5, board, client=rows, prefix="queue/")
    assert board.scalars == [(name, value, 5) for name, value in told.items()]
    assert told["queue/rows"] == 4.0


def test_only_the_partitions_that_were_asked_for(rows: tq.TransferQueueClient) -> None:
    tq.kv_put("a", "other", {"x": torch.tensor(1)})
    names = metrics(partitions=["other", "cleared"]).keys()
    assert [name for name in names if name.startswith("partition/")] == ["partition/other/rows"]


def test_a_task_that_is_not_there_is_not_made(rows: tq.TransferQueueClient) -> None:
    assert metrics(tasks=["typo"])["partition/train/consumed_share/typo"] == 0.0
    (partition,) = rows.overview().partitions
    assert [task.name for task in partition.tasks] == ["actor"]


def test_before_a_version_is_announced_there_is_none(client: tq.TransferQueueClient) -> None:
    assert "weight_version" not in metrics()


@pytest.mark.parametrize(("step", "writer"), [(-1, Run()), (1.5, Run()), (True, Run()), (1, object()), (1, None)])
def test_another_step_or_writer_is_refused(step: Any, writer: Any) -> None:
    with pytest.raises(InvalidInput, match=r"step|writer"):
        log_metrics(step, writer)


def test_without_a_service_it_says_so() -> None:
    with pytest.raises(NotInitialized):
        log_metrics(1, Run())


def test_the_summary_writer_of_tensorboard_has_every_value(rows: tq.TransferQueueClient, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        told = [log_metrics(step, writer, tasks=["actor"]) for step in range(2)]
    read = EventAccumulator(str(tmp_path)).Reload()
    for name, value in told[1].items():
        assert [(one.step, one.value) for one in read.Scalars(name)][1] == (1, np.float32(value))


def test_an_offline_run_of_wandb_has_every_value(rows: tq.TransferQueueClient, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(project="p", mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True)) as run:
        for step in range(2):
            told = log_metrics(step, run, tasks=["actor"])
        assert {name: run.summary[name] for name in told} == told
    wandb.teardown()  # its process
