"""What the workers of vLLM call: the methods of its `WeightTransferEngine` (0.26 and newer), and no other tie to it.

A call that raises in a worker leaves the answers of the other workers in their queues, and every later call gets the
answer of an earlier one: `workers.worker` has what raises nothing.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any, ClassVar

import torch

from transfer_queue.integrations.vllm.adapters import LabeledAdapters
from transfer_queue.integrations.vllm.model import LoadedModel
from transfer_queue.integrations.workers.lane import silent
from transfer_queue.integrations.workers.ranks import Ranks
from transfer_queue.integrations.workers.worker import FINISH_S, SilentWorker
from transfer_queue.weights.receive.update_session import timeout_of
from transfer_queue.weights.version.drafts import DRAFT
from transfer_queue.weights.version.manifest import Manifest

log = logging.getLogger("transfer_queue.weights")
WORKERS = ("vllm.v1.worker.gpu_worker",)  # those for other devices are its subclasses


class WorkerEngine(SilentWorker):
    """One for each worker. `transport` names the engine that brings the bytes."""

    transport: ClassVar[str] = "shm"
    target: LoadedModel
    supports_draft_weight_update: ClassVar[bool] = False
    defers_processing: ClassVar[bool] = False
    init_info_cls: ClassVar[type] = dict
    update_info_cls: ClassVar[type] = dict

    def __init__(self, config: Any, vllm_config: Any, device: Any = None, model: Any = None, **more: Any) -> None:
        del more  # of later releases
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config
        ranks = Ranks(_groups)
        target = LoadedModel(model, vllm_config, ranks.all)
        self._adapters = LabeledAdapters(model, target)
        self._has_looked = False
        sink = LabeledVersions(self._adapters, target)
        super().__init__(self.transport, target, ranks, _rank(self.parallel_config), sink)
        end_sessions_with_init()
        follow_sleep()

    @silent
    def find_draft(self, worker: Any) -> None:
        """Of vLLM's worker, which has it once both models are loaded: after this was made."""
        if not self._has_looked:
            self._has_looked = True
            self.target.find_draft(getattr(worker, "model_runner", None))

    @silent
    def fall_asleep(self, level: int) -> None:
        """Before vLLM's worker gives up the memory of the weights."""
        self.target.fall_asleep(level)

    @silent
    def wake_up(self, tags: Any) -> None:
        """Once it has that of these tags again; None: all."""
        if tags is None or "weights" in tags:
            self.target.asleep = False

    def parse_init_info(self, init_dict: Any) -> Any:
        """As it came: what is wrong with it is reported."""
        return init_dict

    def parse_update_info(self, update_dict: Any) -> Any:
        return update_dict

    def receive_weights(self, update_info: Any) -> None:
        self.update_weights(update_info)

    def drain_pending(self) -> None:
        """Nothing is pending after `finish`."""

    def set_weight_update_target(self, model: Any, model_config: Any) -> None:
        """vLLM's own way to a draft: ours are updated together with the model, or by the label `DRAFT`."""

    def reset_weight_update_target(self) -> None:
        """See above."""

    def _committed(self) -> None:
        self._adapters.unload()


def end_sessions_with_init() -> None:
    """vLLM's worker keeps for itself that an update is open, refuses the next one then, and has no call that ends it: a
    trainer that died in an update would lock out all others. So its `init` ends the session, as our receivers' does,
    unless it comes late, of a run that is over."""
    for module in WORKERS:
        worker: Any = getattr(sys.modules.get(module), "Worker", None)
        init: Any = getattr(worker, "init_weight_transfer_engine", None)
        if init is None or getattr(init, "ends_session", False):
            if worker is not None and init is None:
                log.warning("this vLLM's worker has no init_weight_transfer_engine: an update left open stays open")
            continue

        def wrapped(self: Any, init_info: Any, *args: Any, init: Any = init, **more: Any) -> Any:
            engine = getattr(self, "weight_transfer_engine", None)
            if isinstance(engine, WorkerEngine):
                if not engine.would_refuse(init_info):
                    self._weight_update_active = False
                engine.find_draft(self)
            return init(self, init_info, *args, **more)

        wrapped.ends_session = True  # type: ignore[attr-defined]
        worker.init_weight_transfer_engine = functools.wraps(init)(wrapped)


def follow_sleep() -> None:
    """vLLM tells its engines nothing of sleep, in which the weights have no memory: a commit would end the process."""
    for module in WORKERS:
        worker: Any = getattr(sys.modules.get(module), "Worker", None)
        sleep, wake_up = (getattr(worker, name, None) for name in ("sleep", "wake_up"))
        if sleep is None or wake_up is None or getattr(sleep, "is_followed", False):
            continue

        def falling(self: Any, level: int = 1, *args: Any, sleep: Any = sleep, **more: Any) -> Any:
            engine = getattr(self, "weight_transfer_engine", None)
            if isinstance(engine, WorkerEngine):
                engine.fall_asleep(level)
            return sleep(self, level, *args, **more)

        def waking(self: Any, tags: Any = None, *args: Any, wake_up: Any = wake_up, **more: Any) -> Any:
            found = wake_up(self, tags, *args, **more)
            engine = getattr(self, "weight_transfer_engine", None)
            if isinstance(engine, WorkerEngine):
                engine.wake_up(tags)
            return found

        falling.is_followed = True  # type: ignore[attr-defined]
        worker.sleep, worker.wake_up = functools.wraps(sleep)(falling), functools.wraps(wake_up)(waking)


class LabeledVersions:
    """What the receiver gives versions with a label to: a draft to its model, LoRA adapters to vLLM's manager."""

    def __init__(self, adapters: LabeledAdapters, target: LoadedModel) -> None:
        self._adapters, self._target = adapters, target

    def prepare(self, tensors: dict[str, torch.Tensor], manifest: Manifest) -> Any:
        if manifest.label == DRAFT:
            return self._target.prepare_draft(tensors, manifest)
        return self._adapters.prepare(tensors, manifest)

    def __call__(self, prepared: Any, manifest: Manifest) -> None:
        if manifest.label == DRAFT:
            self._target.commit_draft(prepared)
        else:
            self._adapters(prepared, manifest)


class ShmWorker(WorkerEngine):
    transport = "shm"


class TcpWorker(WorkerEngine):
    transport = "tcp"


class DiskWorker(WorkerEngine):
    transport = "disk"


class CollectiveWorker(WorkerEngine):
    transport = "collective"


class CudaIpcWorker(WorkerEngine):
    """The trainer writes a buffer again once the call that named it was answered, so calls wait here until the bucket
    is copied: the worker does not generate meanwhile."""

    transport = "cuda_ipc"

    @silent
    def update_weights(self, update_info: Any) -> None:
        super().update_weights(update_info)
        self._lane.ended(timeout_of(update_info, FINISH_S))


def _rank(parallel: Any) -> int:
    """Of this worker among all of its server, as vLLM counts."""
    return int(getattr(parallel, "data_parallel_index", 0)) * int(parallel.world_size) + int(parallel.rank)


def _groups() -> list[Any]:
    """Those of this worker's tensor and pipeline parallel parts. None outside of vLLM's workers."""
    from vllm.distributed import parallel_state

    found = []
    for name in ("get_tp_group", "get_pp_group"):
        try:
            found.append(getattr(parallel_state, name)())
        except (AttributeError, AssertionError):
            continue
    return found
