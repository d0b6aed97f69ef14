"""A trainer on a pool of groups that goes back to its checkpoint, through a real service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_groups import POLICY, Spawn, made
from test_standby import replaced

import transfer_queue as tq
from transfer_queue.client.groups import GroupPool
from transfer_queue.errors import InvalidInput, LeaseExpired


@pytest.fixture
def pool(client: tq.TransferQueueClient) -> GroupPool:
    """A pool of the test's service, for partition "train"."""
    return tq.group_pool("train", POLICY)


TRAINER = """
import time
import transfer_queue as tq
tq.init()
pool = tq.group_pool("train")
def learn():
    batch = pool.select(2)
    found = tq.get_client().get_data(batch.metadata)["x"].flatten().tolist()
    pool.ack(batch, clear=True)
    return found
"""


@pytest.mark.parametrize("server_too", [False, True])
def test_a_trainer_that_is_killed_goes_on_from_its_checkpoint(
    server_too: bool, client: tq.TransferQueueClient, pool: GroupPool, child: Spawn
) -> None:
    for number in range(8):
        made(pool, number)
    trainer = child(
        TRAINER
        + "print(learn(), flush=True)\n"
        + "pool.checkpoint(1)\n"
        + "print(learn(), learn(), pool.select(2).groups[0].group_id, flush=True)\n"
        + "time.sleep(600)\n"
    )
    assert trainer.line() == "[0, 1, 100, 101]"
    assert trainer.line() == "[200, 201, 300, 301] [400, 401, 500, 501] g6"
    trainer.kill()
    if server_too:
        replaced(client)
    assert pool.status()["steps"] == [1]
    again = child(TRAINER + "print(pool.resume(1), learn(), learn(), learn())\npool.checkpoint(2)")
    assert again.finish() == (
        "ResumedGroups(batches=2, groups=4, lost=0) [200, 201, 300, 301] [400, 401, 500, 501] [600, 601, 700, 701]"
    )
    assert client.stats()["rows"] == 0


def test_a_journal_brings_the_steps_of_a_pool_back(service: Any, tmp_path: Path) -> None:
    settings = {"server": {"journal_dir": str(tmp_path)}}
    service(**settings)
    pool = tq.group_pool("train", POLICY)
    made(pool, 1), made(pool, 2)
    pool.checkpoint(7)
    pool.ack(pool.select(1), clear=True)
    tq.close()
    tq.init(settings)
    pool = tq.group_pool("train")
    assert pool.resume(7) == (1, 1, 0)
    batch = pool.select(1)
    assert tq.get_client().get_data(batch.metadata)["x"].flatten().tolist() == [100, 101]


def test_who_had_groups_when_a_step_was_gone_back_to_has_none(pool: GroupPool) -> None:
    made(pool, 1)
    pool.checkpoint(0)
    batch = pool.select(1)
    assert pool.resume(0) == (1, 1, 0)
    with pytest.raises(LeaseExpired):
        pool.ack(batch)
    with pytest.raises(InvalidInput, match="step 3 of the pool"):
        pool.resume(3)
    with pytest.raises(InvalidInput, match="whole number"):
        pool.checkpoint(-1)


def test_rows_of_a_task_and_groups_of_a_pool_go_back_together(client: tq.TransferQueueClient, pool: GroupPool) -> None:
    made(pool, 1), made(pool, 2)
    tq.kv_batch_put(["a", "b"], "rows", {"x": [1, 2]})

    def learn() -> tuple[list[int], str]:
        batch = pool.select(1)
        pool.ack(batch)
        return client.get_meta(["x"], 1, "rows", task_name="t").global_indexes, batch.groups[0].group_id

    client.checkpoint(0, ["t"], pools=["train"])
    taken = learn()
    assert client.resume(0, ["t"], ["train"]) == (1, 1, 0, {"train": (1, 1, 0)})
    assert learn() == taken
    with pytest.raises(InvalidInput, match="has no pool"):
        client.checkpoint(1, ["t"], pools=["rows"])
    assert client.list_steps("t") == [0]
