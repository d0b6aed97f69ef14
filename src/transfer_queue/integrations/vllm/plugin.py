"""The entry point, which vLLM calls in its server, its core and every worker. Imports nothing heavy."""

from __future__ import annotations

import logging
from typing import Any

from transfer_queue.errors import attempt

log = logging.getLogger("transfer_queue.weights")
_HOME = "transfer_queue.integrations.vllm.engine"
_TRAINER = ("transfer_queue.integrations.vllm.trainer", "FactoryTrainer")
ENGINES = {
    "transfer_queue": "ShmWorker",
    "tq_shm": "ShmWorker",
    "tq_tcp": "TcpWorker",
    "tq_disk": "DiskWorker",
    "tq_collective": "CollectiveWorker",
    "tq_cuda_ipc": "CudaIpcWorker",
}


def register() -> None:
    """Make the engines known to vLLM, for `--weight-transfer-config '{"backend": "transfer_queue"}'`, and the trainers
    to its factory for them (0.32). Repeatable; never raises: a vLLM without weight transfer serves as before."""
    attempt("registering weight-transfer engines with this vLLM", _register_all, log)


def _register_all() -> None:
    try:
        from vllm.distributed.weight_transfer import factory
    except ImportError as error:
        log.warning("this vLLM takes no weight-transfer engines: %r", error)
        return
    trainers = getattr(factory, "WeightTransferTrainerFactory", None)
    for name, attribute in ENGINES.items():
        _register(factory.WeightTransferEngineFactory, name, _HOME, attribute)
        if trainers is not None:
            _register(trainers, name, *_TRAINER)


def _register(factory: Any, name: str, module: str, attribute: str) -> None:
    if name in getattr(factory, "_registry", {}):
        return
    try:
        factory.register_engine(name, module, attribute)
    except ValueError:
        log.debug("there is an engine %s already", name)
