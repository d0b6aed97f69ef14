"""RayStore on a cluster of two nodes, each with an object store of its own: where TQ_ENGINES names RayStore."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from paths import SOURCES_AND_HELPERS
from ray_workers import KEYS, WIDTH, NodeWorker, got, rows
from storage_engines import SECOND, RayNodesRunning

import transfer_queue as tq
from transfer_queue.errors import DataLost

pytestmark = pytest.mark.keeps_sockets  # Ray has one to every process that it has spoken with


def firsts(value: float, keys: list[str]) -> list[list[float]]:
    return [[int(key) + value, int(key) + value, float(WIDTH)] for key in keys]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodesRunning]:
    if "RayStore" not in os.environ.get("TQ_ENGINES", ""):
        pytest.skip("make test-engines runs it")
    running = RayNodesRunning(tmp_path_factory.mktemp("nodes"))
    yield running
    RayNodesRunning.end()


@pytest.fixture
def client(cluster: RayNodesRunning, service: Callable[..., tq.TransferQueueClient]) -> tq.TransferQueueClient:
    return service(**cluster.conf())


@pytest.fixture
def worker(client: tq.TransferQueueClient) -> Iterator[Any]:
    import ray

    environment = {"env_vars": {"PYTHONPATH": SOURCES_AND_HELPERS}}
    kind = ray.remote(NodeWorker).options(resources={SECOND: 1}, num_cpus=0, runtime_env=environment)
    actor = kind.remote(str(client.session.address))
    yield actor
    ray.kill(actor)


def of(call: Any) -> Any:
    import ray

    return ray.get(call, timeout=60)


def keeper(client: tq.TransferQueueClient) -> Any:
    import ray

    return ray.get_actor(client.session.config["engine"]["settings"]["keeper"], namespace="transfer_queue")


def places(client: tq.TransferQueueClient, block: int) -> list[str]:
    """The nodes in whose object stores a block lies."""
    import ray

    [held] = of(keeper(client).find.remote([f"tq/{client.session.service_id.hex()}/{block}"]))
    return list(ray.experimental.get_object_locations([held])[held]["node_ids"])


def test_rows_are_read_on_the_other_node_than_the_one_that_wrote_them(
    client: tq.TransferQueueClient, worker: Any
) -> None:
    import ray

    here, there = ray.get_runtime_context().get_node_id(), of(worker.node.remote())
    assert here != there
    of(worker.put.remote("theirs", 10.0))
    assert places(client, 1) == [there]
    assert got("theirs", KEYS) == firsts(10.0, KEYS)
    assert got("theirs", KEYS[3:5]) == firsts(10.0, KEYS[3:5])
    tq.kv_batch_put(keys=KEYS, partition_id="ours", fields={"x": rows(20.0)})
    assert places(client, 2) == [here]
    assert of(worker.get.remote("ours", KEYS)) == firsts(20.0, KEYS)
    of(worker.close.remote())


def test_a_node_that_is_killed_loses_its_rows_and_no_others(client: tq.TransferQueueClient, worker: Any) -> None:
    import ray

    here = ray.get_runtime_context().get_node_id()
    assert of(keeper(client).__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())) == here
    assert of(worker.node.remote()) != here
    of(worker.put.remote("theirs", 10.0))
    tq.kv_batch_put(keys=KEYS, partition_id="ours", fields={"x": rows(20.0)})
    RayNodesRunning.kill_second()
    with pytest.raises(DataLost, match="theirs"):
        got("theirs", KEYS)
    assert got("ours", KEYS) == firsts(20.0, KEYS)
