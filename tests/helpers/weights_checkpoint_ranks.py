"""Ranks that save their parts of a model as a checkpoint, and load into them, as a test says.

    python -c "... weights_checkpoint_ranks.run(RANK)"   reads what it is from its first line

Then each line is a command, as JSON: `save` (the weights of `seed`, as `writer` says; `die` kills this rank while it
writes) or `load` (into the weights of `before`, as `reader` says). What it answers is in `Answer`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from weights_ranks import Model, beside, drawn, set_weights, sharded

CODE = "import sys; sys.path.insert(0, 'tests/helpers'); import weights_checkpoint_ranks as r; r.run({})"


class Answer(TypedDict):
    """`has`: which of the weights that were asked for are here, bit for bit. `errors`: of all ranks, by class."""

    has: list[int]
    errors: list[str]
    text: str


def has(model: Model, seed: int) -> bool:
    """Whether all that is here of the model is of `drawn(seed)`."""
    return all(torch.equal(mine, wanted) for mine, wanted in beside(model, drawn(seed)))


def strided() -> Any:
    """Of the seven rows of the embeddings, those that a rank of two has: 0, 1, 4, 5 or 2, 3, 6."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, local = init_device_mesh("cpu", (2,)), torch.zeros(4 - dist.get_rank(), 10)
    return DTensor.from_local(
        local, mesh, [_StridedShard(0, split_factor=2)], shape=torch.Size([7, 10]), stride=(10, 1)
    )


def save(model: Model, command: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import DefaultSavePlanner

    from transfer_queue.weights.dcp import VersionWriter

    class Dying(DefaultSavePlanner):
        num_resolved = 0

        def resolve_data(self, write_item: Any) -> Any:
            self.num_resolved += 1
            if command.get("die") and self.num_resolved == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().resolve_data(write_item)

    set_weights(model, drawn(command["seed"]))
    state = {**model.state_dict(), **command.get("more", {})}
    dcp.save(state, storage_writer=VersionWriter(**command["writer"]), planner=Dying())


def load(model: Model, command: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp

    from transfer_queue.weights.dcp import VersionReader

    set_weights(model, drawn(command["before"]))
    state = {"embed.weight": strided()} if command.get("strided") else model.state_dict()
    dcp.load(state, storage_reader=VersionReader(**command["reader"]))


def run(rank: int) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    setting = json.loads(input())
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(setting["port"]))
    dist.init_process_group("gloo", rank=rank, world_size=setting["world"])
    model = sharded(drawn(0), setting["mesh"])
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = Answer(has=[], errors=[], text="")
        try:
            {"save": save, "load": load}[command["do"]](model, command)
        except CheckpointException as error:
            faults = [fault for fault, _ in error.failures.values()]
            answer["errors"] = sorted({type(fault).__name__ for fault in faults})
            answer["text"] = "; ".join(map(str, faults))
        except RuntimeError as error:  # of gloo, when another rank is gone
            answer["errors"], answer["text"] = [type(error).__name__], str(error)
        answer["has"] = [seed for seed in command.get("asked", []) if has(model, seed)]
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()
