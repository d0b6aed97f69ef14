"""TRL's asynchronous trainer on versions: what it sends is verified at the servers and committed whole.

from transfer_queue.integrations.trl_weights import TrlTransfer
trainer = AsyncGRPOTrainer(..., weight_transfer=TrlTransfer(model, WeightSyncClient(url, token)))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from transfer_queue.errors import NotOpen
from transfer_queue.integrations.refit import read_along
from transfer_queue.weights.http import WeightSyncClient
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.clients import takes_owner
from transfer_queue.weights.transport.trainer import TrainerEngine
from transfer_queue.weights.version.sources import TensorMeta

DEADLINE_S = 600.0


class TrlTransfer:
    """The five methods of TRL 1.16's `weight_transfer`, in the place of its own over NCCL, on the main process. It is a
    source of weights, too: a version is what TRL's iterator gives, read once, in TRL's thread.

    The servers keep their weights, paused, when a sync fails; it raises what `TrainerEngine.send_weights` raises.
    """

    def __init__(
        self, model: torch.nn.Module, client: WeightSyncClient, *, deadline_s: float = DEADLINE_S, **init_info: Any
    ) -> None:
        """`model`: the one that TRL trains, without adapters; names, dtypes and shapes of its trainable parameters are
        what the iterator has to give (`ShapeMismatch`). `init_info`: of the transport tcp, as `host`."""
        self._client, self._deadline_s = client, deadline_s
        self._init_info = init_info
        self._specs = [
            TensorMeta(_sent_as(name), one.dtype, tuple(one.shape))
            for name, one in model.named_parameters()
            if one.requires_grad
        ]
        self._given: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._trainer: TrainerEngine | None = None
        self._run_id = ""  # of the trainer that was there last: its are the pauses

    def init_weight_transfer(self) -> None:
        self._trainer = registry.trainer("tcp").trainer_init(self._init_info, client=self._client, source=self)
        self._run_id = self._trainer.run_id

    def pause(self) -> None:
        """In the name of the run: it ends once another one takes over."""
        self._client.pause_generation("keep", **self._named(self._client.pause_generation))

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Returns when every server has committed the version."""
        if self._trainer is None:
            raise NotOpen("init_weight_transfer was not called")
        self._given = iterator
        try:
            self._trainer.send_weights(deadline_s=self._deadline_s)
        finally:
            read_along(iterator)  # after a fault the other ranks are still in its collectives

    def resume(self) -> None:
        """End that pause, and nobody else's."""
        self._client.resume_generation(**self._named(self._client.resume_generation))

    def _named(self, call: Callable[..., object]) -> dict[str, Any]:
        """What tells the client whose pause it is, where it can be told."""
        return {"owner": self._run_id} if self._run_id and takes_owner(call) else {}

    def destroy(self) -> None:
        """Leave the servers, which keep their weights. Repeatable."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.shutdown()

    # a source of weights

    def specs(self) -> list[TensorMeta]:
        return list(self._specs)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._given:
            yield name, tensor.detach().contiguous()

    def aliases(self) -> dict[str, str]:
        return {}


def _sent_as(name: str) -> str:
    """What TRL calls a parameter when it sends it."""
    return name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")
