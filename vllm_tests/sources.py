"""Sources and trainers with something wrong."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from transfer_queue.weights import ModuleSource
from transfer_queue.weights.transport.info import key_of
from transfer_queue.weights.transport.shm import ShmTrainer
from transfer_queue.weights.transport.tcp import TcpTrainer
from transfer_queue.weights.version.sources import TensorMeta

NORM = "model.layers.1.input_layernorm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


class Odd(ModuleSource):
    """The model's weights, with one made odd: `unknown`, `missing`, `larger`, `smaller`, `integers`. "" for none."""

    odd = ""

    def specs(self) -> list[TensorMeta]:
        return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().tensors():
            if name == NORM and self.odd == "unknown":
                yield "model.layers.1.surplus.weight", tensor
            if name == NORM and self.odd == "missing":
                continue
            if name == QUERY and self.odd == "larger":
                yield name, torch.cat([tensor, tensor])
            elif name == QUERY and self.odd == "smaller":
                yield name, tensor[:-1].contiguous()
            elif name == QUERY and self.odd == "integers":
                yield name, tensor.to(torch.int32)
            else:
                yield name, tensor


class CorruptShm(ShmTrainer):
    """Changes a byte after the manifest was made, when told to; receivers read everything again."""

    corrupt = False

    def receivers_info(self):  # type: ignore[no-untyped-def]
        return {**super().receivers_info(), "recheck": True}

    def _publish(self, draft, deadline):  # type: ignore[no-untyped-def]
        manifest = super()._publish(draft, deadline)
        if self.corrupt:
            self.store.content(key_of(manifest)).data[1000] ^= 1
        return manifest


class CorruptTcp(TcpTrainer):
    """The same."""

    corrupt = False

    def _publish(self, draft, deadline):  # type: ignore[no-untyped-def]
        manifest = super()._publish(draft, deadline)
        if self.corrupt:
            self.store.content(key_of(manifest))[0][1000] ^= 1
        return manifest


CORRUPT = {"shm": CorruptShm, "tcp": CorruptTcp}


class Nobody:
    """A client for no servers."""

    def init_weight_transfer_engine(self, init_info: object) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: object) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
