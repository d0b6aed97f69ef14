"""Ranks of a trainer, each in a process of its own, that do as a test says, line by line.

    python -c "... weights_ranks.run(RANK)"   reads what it is from its first line (`Setting`)

Then each line is a command: `send SECONDS` and `publish SECONDS` print the report or the error, `train SEED` changes
the weights, `nudge N` one element of them (`nudged`), `drift` those of this rank alone, `hang STEP` and `die STEP` stop
it in that step of the next update. `last SECONDS` sends, and leaves at once. `number N` is the version that is sent
next, `widen` gives this rank a model with other shapes, `starve` no thread for what it publishes next.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from transfer_queue.errors import TransferQueueError
from transfer_queue.integrations.vllm.trainer import FactoryInfo, FactoryTrainer
from transfer_queue.weights import ModuleSource
from transfer_queue.weights.fleet import Fleet
from transfer_queue.weights.http import WeightSyncClient
from transfer_queue.weights.transport import registry
from transfer_queue.weights.version.sources import TensorMeta

WORLD = 4
CODE = "import sys; sys.path.insert(0, 'tests/helpers'); import weights_ranks; weights_ranks.run({})"


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width)


class Model(nn.Module):
    """Dimensions that four ranks do not divide, a buffer without dimensions, and a head tied to the embeddings."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.norm = nn.LayerNorm(width, dtype=torch.bfloat16)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def drawn(seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape))
        model.steps.fill_(seed)
    return model


def nudged(model: Model, number: int) -> Model:
    """With another element in one of its tensors, and that element alone."""
    with torch.no_grad():
        model.layers[0].up.weight[number, number] = 100 + number
    return model


def sharded(model: Model, kind: str, device: str = "cpu") -> Model:
    """As FSDP2, HSDP and tensor parallelism leave it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    more: dict[str, Any] = {}
    world = dist.get_world_size()
    if kind == "hsdp":
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
    elif kind == "fsdp_tp":
        both = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
        for layer in model.layers:
            parallelize_module(layer, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = both["dp"]
    else:
        mesh = init_device_mesh(device, (world,))
        if kind == "dim1":
            more = {"shard_placement_fn": lambda one: Shard(1) if one.ndim > 1 and one.shape[1] % world == 0 else None}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **more)
    fully_shard(model, mesh=mesh, **more)
    return model


class Gathering:
    """Has the methods of vLLM's sources: what it gives takes all ranks."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def metadata(self) -> list[TensorMeta]:
        return [TensorMeta(name, one.dtype, tuple(one.shape)) for name, one in self._model.state_dict().items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, one in self._model.state_dict().items():
            yield name, getattr(one, "full_tensor", lambda one=one: one)()


def beside(model: Model, other: Model) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What this rank holds, box by box, and the same of a model that is not sharded."""
    from transfer_queue.weights.version.boxes import whole, within
    from transfer_queue.weights.version.sharded import held_of, is_sharded, local_of

    new = dict(other.state_dict())
    for name, tensor in model.state_dict(keep_vars=True).items():
        local = local_of(tensor) if is_sharded(tensor) else tensor.detach()
        for shard, place in held_of(name, tensor):
            yield local[place], new[name][within(shard.box, whole(shard.shape))]


def set_weights(model: Model, other: Model) -> None:
    """Those of a model that is not sharded, each rank its part."""
    with torch.no_grad():
        for mine, new in beside(model, other):
            mine.copy_(new)


def run(rank: int) -> None:
    setting = json.loads(input())
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(setting["port"]))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    now = drawn(0)
    device = setting.get("device", "cpu")
    model = sharded(drawn(0).to(device), setting["mesh"], device)
    client = client_of(setting) if rank == 0 else None
    info = {"timeout_s": 20.0, **setting.get("info", {})}
    trainer: Any
    number: int | None = None
    if setting.get("gathers"):
        factory_info = FactoryInfo(rank=rank, backend="tq_tcp", options=info)
        trainer = FactoryTrainer.trainer_init(factory_info, client=client, source=Gathering(model))
    else:
        told = {"rank": rank, "world": WORLD, **info}
        trainer = registry.trainer("tcp").trainer_init(told, client=client, source=ModuleSource(model))
    print("ready", flush=True)
    for line in sys.stdin:
        what, _, how = line.strip().partition(" ")
        if what in ("train", "nudge"):
            now = drawn(int(how)) if what == "train" else nudged(now, int(how))
            set_weights(model, now)
        elif what == "drift":
            with torch.no_grad():
                local = next(iter(model.layers.parameters()))
                getattr(local, "_local_tensor", local).add_(1)
        elif what == "number":
            number = int(how)
        elif what == "widen":
            trainer._source = ModuleSource(Model(12))
        elif what == "starve":
            refuse_a_thread()
        elif what in ("hang", "die"):
            stop_in(trainer, how, signal.SIGSTOP if what == "hang" else signal.SIGKILL)
        elif what == "last":
            found = send(trainer, float(how), None, publishes=False)
            trainer.shutdown()
            print(json.dumps(found), flush=True)
            break
        else:
            print(json.dumps(send(trainer, float(how), number, publishes=what == "publish")), flush=True)
            number = None
    trainer.shutdown()
    dist.destroy_process_group()


def client_of(setting: dict[str, Any]) -> Any:
    if not setting.get("fleet"):
        return WeightSyncClient(setting["urls"], setting["token"], timeout_s=20)
    return Fleet({name: WeightSyncClient(url, setting["token"]) for name, url in setting["fleet"].items()})


def send(trainer: Any, deadline_s: float, number: int | None, publishes: bool) -> dict[str, Any]:
    start = time.monotonic()
    try:
        if publishes:
            report = trainer.publish(number, deadline_s=deadline_s).result(60)
        else:
            report = trainer.send_weights(number, deadline_s=deadline_s)
    except (TransferQueueError, RuntimeError) as error:
        return {"error": type(error).__name__, "text": str(error), "took_s": time.monotonic() - start}
    return {"version": report.version, "root": report.root, "nbytes": report.nbytes, "kind": report.kind}


def refuse_a_thread() -> None:
    """The next version that is published here gets none."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "tq-weights-publish":
            threading.Thread.start = start
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refused


def stop_in(trainer: Any, step: str, number: int) -> None:
    """Stop this process, or kill it, when it comes to a step of the next update, or has done the one before."""
    if hasattr(trainer, "_link"):
        before = trainer._link.bring

        def bring(at: str, *args: Any) -> bytes:
            if at == step:
                trainer._link.bring = before
                os.kill(os.getpid(), number)
            return before(at, *args)

        trainer._link.bring = bring
        return
    before_gather = trainer._ranks.gather

    def gather(at: str, *args: Any) -> Any:
        if at == step:
            os.kill(os.getpid(), number)
        return before_gather(at, *args)

    trainer._ranks.gather = gather
