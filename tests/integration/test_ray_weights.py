"""Weights to Ray actors with vLLM's methods, over a real Ray: `RayActorClient` in the place of vLLM's Ray client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import Child, _children, until
from paths import HELPERS

LIMIT_S = 240.0
pytestmark = pytest.mark.timeout(600)

DRIVER = f"""
import os
import sys
from types import SimpleNamespace
os.environ["PYTHONPATH"] += os.pathsep + {str(HELPERS)!r}
os.environ["RAY_enable_worker_prestart"] = "0"
os.environ["RAY_worker_niceness"] = "0"
sys.path.insert(0, {str(HELPERS)!r})
import ray
import torch
import vllm_actors
from vllm_actors import Neither, Plain, RayVLLMWeightSyncClient, Workers
from transfer_queue.errors import InvalidInput, ServiceUnavailable, UnknownTensor
from transfer_queue.integrations.vllm.ray_client import RayActorClient
from transfer_queue.integrations.vllm.trainer import FactoryInfo, FactoryTrainer, client_for
from transfer_queue.weights import StateDictSource
vllm_actors.pretend_vllm()
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)

def said(kind, call):
    try:
        call()
    except kind as found:
        return found
    raise AssertionError(f"no {{kind}}")

class Source:
    def __init__(self, *names, value=0.0):
        self.names, self.value = names, value
    def metadata(self):
        return [SimpleNamespace(name=name, dtype=one.dtype, shape=one.shape) for name, one in self]
    def __iter__(self):
        for name in self.names:
            yield name, torch.full((4,) if name == "bias" else (4, 4), self.value)

actors = [ray.remote(num_cpus=0)(Plain).remote() for _ in range(2)]
theirs = RayVLLMWeightSyncClient(actors)

def trainer_of(source):
    info = FactoryInfo(rank=0, backend="tq_tcp", deadline_s=60)
    return FactoryTrainer.trainer_init(info, client=theirs, source=source)

source = Source("weight", "bias")
trainer = trainer_of(source)
for source.value in (1.0, 2.0):
    trainer.send_weights()
    assert ray.get([one.weight.remote() for one in actors]) == [source.value] * 2
assert client_for(theirs, {{}}).get_weight_version() == "2"
trainer.shutdown()

odd = trainer_of(Source("weight", "bias", "surplus", value=3.0))
assert type(said(UnknownTensor, odd.send_weights)) is UnknownTensor  # without Ray's class around it
odd.shutdown()
trainer = trainer_of(Source("weight", "bias", value=4.0))
assert ray.get([one.weight.remote() for one in actors]) == [2.0] * 2
trainer.send_weights()
assert ray.get([one.weight.remote() for one in actors]) == [4.0] * 2

workers, neither = ray.remote(num_cpus=0)(Workers).remote(), ray.remote(num_cpus=0)(Neither).remote()
assert client_for(RayVLLMWeightSyncClient([workers, *actors]), {{}}).silent_workers() == 2
said(InvalidInput, client_for(RayVLLMWeightSyncClient(neither), {{}}).silent_workers)
said(InvalidInput, lambda: RayActorClient([], dict, dict))

ray.kill(actors[1])
said(ServiceUnavailable, trainer.send_weights)
trainer.shutdown()
print("all is well", flush=True)
ray.shutdown()
"""


@pytest.fixture
def driver() -> Iterator[Child]:
    before = _children()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # its default writes a token into the home directory
        process = Child(DRIVER)
        yield process
    process.finish(LIMIT_S)
    until(lambda: _children() <= before, "the end of Ray", 15)


def test_actors_take_versions_and_raise_what_is_wrong(driver: Child) -> None:
    assert driver.line().strip() == "all is well"
