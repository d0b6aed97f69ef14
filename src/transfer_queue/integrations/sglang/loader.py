"""What SGLang calls in every tensor-parallel worker: `--custom-weight-loader` names `load`.

A loader that raises ends the scheduler, and with it the server. So nothing raises here: faults are reported to the
trainer (`workers.worker`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from transfer_queue.errors import NotInitialized, attempt
from transfer_queue.integrations.sglang.model import ServedModel
from transfer_queue.integrations.sglang.payload import WorkerCall, from_tensor
from transfer_queue.integrations.workers.headers import Headers, checkpoint_of
from transfer_queue.integrations.workers.ranks import Ranks
from transfer_queue.integrations.workers.reloading import ReloadTarget
from transfer_queue.integrations.workers.worker import SilentWorker

log = logging.getLogger("transfer_queue.weights")
_PLACE = "_transfer_queue_worker"  # where a model keeps its worker, so that the two end together


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Do the call that the tensor is. Nothing is loaded but by `finish`."""
    attempt("a call of the trainer's", lambda: _do(model, from_tensor(next(iter(named_tensors))[1])), log)


def _do(model: torch.nn.Module, call: WorkerCall) -> None:
    worker: SGLangWorker | None = model.__dict__.get(_PLACE)
    if call.method == "init" and (worker is None or worker.transport != call.transport):
        if worker is not None:
            worker.shutdown()
        before = worker.target if worker is not None else None
        worker = model.__dict__[_PLACE] = SGLangWorker(model, call.transport, before)
    if worker is None:
        raise NotInitialized("no trainer was introduced to this worker")
    if call.method == "init":
        worker.init_transfer_engine(call.info)
    elif call.method == "start":
        worker.start_weight_update()
    elif call.method == "update":
        worker.update_weights(call.info)
    else:
        worker.finish_weight_update()


class SGLangWorker(SilentWorker):
    """`before`: the target of the worker that this one follows: a load that fails goes back to what that installed."""

    def __init__(self, model: torch.nn.Module, transport: str, before: ReloadTarget | None = None) -> None:
        from sglang.srt import runtime_context

        self.transport = transport
        options: Any = runtime_context.get_server_args()
        group: Any = runtime_context.get_parallel().tp_group
        ranks = Ranks(lambda: [group])
        checkpoint = Headers(
            checkpoint_of(str(options.model_path), options.revision),
            loaded=str(options.load_format) != "dummy",
            tied=bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False)),
        )
        target = before or ServedModel(model, checkpoint, ranks.all)
        super().__init__(transport, target, ranks, int(group.rank_in_group))
