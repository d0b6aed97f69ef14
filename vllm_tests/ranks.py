"""A trainer of four ranks (FSDP2 and tensor parallelism on gloo): `python -m vllm_tests.ranks`, once for each rank.

The first line says what it is, as JSON; with `draft` there is a draft with the model's weights. Each further line is
the seed of other weights (`SEED ROW`: with one row of them changed, see `altered`), or "again" for ones that differ a
little, which it sends; it prints the report then, and how many bytes it has served. `join URL` brings another server to
the newest version, which is then in all that follow.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from transfer_queue.errors import TransferQueueError
from transfer_queue.integrations.vllm import plugin
from transfer_queue.integrations.vllm.trainer import FactoryInfo
from transfer_queue.weights import ModuleSource, with_draft
from transfer_queue.weights.fleet import Fleet
from transfer_queue.weights.http import WeightSyncClient
from transfer_queue.weights.transport import registry
from transfer_queue.weights.version.boxes import whole, within
from transfer_queue.weights.version.sharded import held_of, is_sharded, local_of
from vllm_tests.models import drawn
from vllm_tests.processes import ROOT

WORLD = 4


def sharded(model: Any) -> Any:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    for layer in model.model.layers:
        plan: Any = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
        parallelize_module(layer, both["tp"], plan)
        fully_shard(layer, mesh=both["dp"])
    fully_shard(model, mesh=both["dp"])
    return model


def take(model: Any, new: dict[str, torch.Tensor]) -> None:
    """Each rank its part of these."""
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            local = local_of(tensor) if is_sharded(tensor) else tensor.detach()
            for shard, place in held_of(name, tensor):
                local[place].copy_(new[name][within(shard.box, whole(shard.shape))])


def altered(seed: int, tied: bool, row: int) -> Any:
    """The weights of this seed, but for one row of a matrix that two workers divide by columns, and one by rows."""
    model = drawn(seed, tied)
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight[row] *= 3
        model.model.layers[1].self_attn.o_proj.weight[row] *= 3
    return model


def nudge(model: Any) -> None:
    with torch.no_grad():
        for tensor in model.parameters():
            (local_of(tensor) if is_sharded(tensor) else tensor).mul_(1.01)


def of_ours(given: dict[str, Any], model: Any, draft: Any) -> tuple[Any, Any]:
    """Each rank gives its shards."""
    source: Any = ModuleSource(model) if draft is None else with_draft(ModuleSource(model), ModuleSource(draft))
    rank = given["rank"]
    client: Any = WeightSyncClient(given["url"], given["token"], timeout_s=60) if rank == 0 else None
    if client is not None and given.get("fleet"):
        client = Fleet({"first": client})
    info = {"rank": rank, "world": WORLD, **given.get("info", {})}
    made: Any = registry.trainer("tcp").trainer_init(info, client=client, source=source)
    return made, made


def from_factory(given: dict[str, Any], model: Any) -> tuple[Any, Any]:
    """All of it is vLLM's, but the engine: its source gathers, and each rank gives some of the tensors."""
    from vllm.distributed import weight_transfer as theirs

    plugin.register()
    made = theirs.WeightTransferTrainerFactory.trainer_init(
        FactoryInfo(rank=given["rank"], backend="tq_tcp"),
        client=theirs.HTTPVLLMWeightSyncClient(given["url"]), source=theirs.ModuleSource(model),
    )  # fmt: skip
    return made, made.engine


@contextlib.contextmanager
def started(given: dict[str, Any]) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """All ranks, in processes of their own: tells each of them the same line, and returns what they print."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "vllm_tests.ranks"]
        ranks: list[Any] = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(WORLD)]
        for one in ranks:
            stack.callback(one.kill)

        def tell(texts: list[str]) -> list[str]:
            for one, text in zip(ranks, texts, strict=True):
                one.stdin.write(text + "\n")
                one.stdin.flush()
            return [one.stdout.readline() for one in ranks]

        first = [json.dumps({**given, "port": port, "rank": rank}) for rank in range(WORLD)]
        assert tell(first) == ["ready\n"] * WORLD
        yield lambda text: [json.loads(line) for line in tell([text] * WORLD)]
        for one in ranks:
            one.stdin.close()
            one.wait(60)


def main() -> None:
    given = json.loads(input())
    rank, tied = given["rank"], given["tied"]
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(given["port"]))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    model = sharded(drawn(0, tied, **given.get("sizes", {})).to(getattr(torch, given.get("dtype", "float32"))))
    draft = sharded(drawn(0)) if given.get("draft") else None
    trainer, engine = from_factory(given, model) if given.get("factory") else of_ours(given, model, draft)
    print("ready", flush=True)
    for line in sys.stdin:
        if line.startswith("join"):
            if rank == 0:
                joining = WeightSyncClient(line.split()[1], given["token"], timeout_s=60)
                trainer._client.join("late", joining, wait_s=60)
            print("{}", flush=True)
            continue
        if line.strip() == "again":
            nudge(model)
        else:
            seed, *row = map(int, line.split())
            new = dict((altered(seed, tied, *row) if row else drawn(seed, tied)).state_dict())
            for one in (model, draft) if draft is not None else (model,):
                take(one, new)
        try:
            told = msgspec.structs.asdict(trainer.send_weights(deadline_s=60))
        except TransferQueueError as error:
            told = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps({**told, "served": engine.num_served_nbytes}), flush=True)
    trainer.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
