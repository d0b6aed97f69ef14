"""What the tests of drafts add to vLLM's workers (`worker_extension_cls`)."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import get_model

from vllm_tests.failing import fail


class DraftProbes:
    """Methods of every worker."""

    def break_model(self, which: str, num_times: int, rank: int) -> None:
        """The next loads of "model" or "draft" fail after half of the tensors, in one worker or (-1) in all."""
        if rank in (-1, self.rank):  # type: ignore[attr-defined]
            fail(self._live()[which], num_times)

    def sums(self) -> dict[str, dict[str, str]]:
        """Of what the layers of both models do, as far as it is each one's own."""
        found, shared = {}, set()
        for which, model in self._live().items():
            found[which] = _sums(model, shared)
            shared |= set(map(id, model.modules()))
        return found

    def sums_of(self, model: str, draft: str) -> dict[str, dict[str, str]]:
        """The same, of what vLLM itself makes of the checkpoints in these folders."""
        runner, settings = self.model_runner, self.vllm_config.speculative_config  # type: ignore[attr-defined]
        make = getattr(runner.drafter, "_create_draft_vllm_config", lambda: self.vllm_config)  # type: ignore[attr-defined]
        loaded = {
            "model": _loaded(self.vllm_config, self.vllm_config.model_config, model),  # type: ignore[attr-defined]
            "draft": _loaded(make(), settings.draft_model_config, draft),
        }
        own = self.sums()
        return {which: {name: one for name, one in _sums(found, set()).items() if name in own[which]}
                for which, found in loaded.items()}  # fmt: skip

    def _live(self) -> dict[str, torch.nn.Module]:
        runner = self.model_runner  # type: ignore[attr-defined]
        return {"model": runner.get_model(), "draft": runner.get_draft_model()}


def _loaded(vllm_config: Any, model_config: Any, folder: str) -> torch.nn.Module:
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}  # of the attention layers of live models
    other = copy.copy(model_config)
    other.model = folder
    config.model_config = other if vllm_config.model_config is model_config else vllm_config.model_config
    with set_current_vllm_config(config):
        return get_model(vllm_config=config, model_config=other)


@torch.no_grad()
def _sums(model: torch.nn.Module, without: set[int]) -> dict[str, str]:
    """By name: digests of parameters and buffers, and of what layers answer whose weights are packed elsewhere."""
    found = {}
    for path, module in model.named_modules():
        if id(module) in without:
            continue
        for name, one in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if one.numel():
                found[f"{path}.{name}"] = _digest(one)
        if hasattr(module, "cpu_linear"):
            sizes = (getattr(module, one, None) for one in ("input_size_per_partition", "input_size", "embedding_dim"))
            width = next(one for one in sizes if isinstance(one, int))
            given = torch.linspace(-1, 1, 3 * width).reshape(3, width)
            found[f"{path}()"] = _digest(module.quant_method.apply(module, given))  # type: ignore[operator]
    return found


def _digest(one: torch.Tensor) -> str:
    data = one.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()
