"""A model in a worker of SGLang as a target: versions go through its `load_weights`. Addresses stay (CUDA graphs).

SGLang makes loadable what it repacked, and repacks it again, around each of our calls.
"""

from __future__ import annotations

from typing import Any

import torch

from transfer_queue.errors import NotSupported
from transfer_queue.integrations.workers.reloading import Named, ReloadTarget
from transfer_queue.weights.version.manifest import Contents


class ServedModel(ReloadTarget):
    def check(self, contents: Contents) -> None:
        """SGLang's loaders leave out what they do not know, and keep what is missing, without a word: only the headers
        of the checkpoint tell whether a version is whole."""
        if self._checkpoint.source is None:
            raise NotSupported("the checkpoint of this model is no folder of safetensors on the worker's host")
        super().check(contents)

    def _load(self, tensors: Named) -> None:
        _wait_for_kernels(self._model)  # those of the batch before may read what is written
        load: Any = self._model.load_weights
        load(iter(tensors))
        _wait_for_kernels(self._model)


def _wait_for_kernels(model: torch.nn.Module) -> None:
    if any(tensor.device.type != "cpu" for tensor in model.parameters()):
        torch.accelerator.synchronize()
