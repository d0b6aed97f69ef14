"""What the tests add to vLLM's workers (`--worker-extension-cls`): rehearsals of models other than the server's."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

from transfer_queue.integrations.vllm.rehearsal import Rehearsal
from transfer_queue.weights.receive import lazy
from vllm_tests.faults import Faults

KERNELS = "vllm.model_executor.layers.quantization.fp8.init_fp8_linear_kernel"  # there are none for every CPU


class Rehearsals(Faults):
    """Methods of every worker."""

    def rehearse(self, folder: str, tensors: dict[str, Any], expert_parallel: bool) -> dict[str, Any]:
        """What this worker would take of such a checkpoint: `boxes` ((start, lengths) by name), and how often it took
        what is no box (`num_odd`)."""
        config = self._config_of(folder, expert_parallel)
        return _rehearsed(config, config.model_config, tensors, is_whole=True)

    def rehearse_draft(
        self, folder: str, draft: str | None, settings: dict[str, Any], tensors: dict[str, Any]
    ) -> dict[str, Any]:
        """The same, of the draft of a server that speculates with these settings. `draft` None: its layers lie in the
        checkpoint of the model; then also `left`, the tensors that the model's loader leaves alone."""
        from vllm.config import SpeculativeConfig

        config = self._config_of(folder, False)
        given = {**settings, **({"model": draft} if draft else {})}
        config.speculative_config = SpeculativeConfig(
            target_model_config=config.model_config, target_parallel_config=config.parallel_config, **given
        )
        found = _rehearsed(config, config.speculative_config.draft_model_config, tensors)
        if draft is None:
            taken = _rehearsed(config, config.model_config, tensors)["boxes"]
            found["left"] = [name for name in tensors if not taken.get(name)]
        return found

    def _config_of(self, folder: str, expert_parallel: bool) -> Any:
        """The server's, with another model."""
        from vllm.config import ModelConfig

        config = copy.copy(self.vllm_config)  # type: ignore[attr-defined]
        config.model_config = ModelConfig(model=folder, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=128)
        config.quant_config = type(config)._get_quantization_config(config.model_config, config.load_config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.enable_expert_parallel = expert_parallel
        return config


def _rehearsed(config: Any, model_config: Any, tensors: dict[str, Any], is_whole: bool = False) -> dict[str, Any]:
    metas = {name: (dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()}
    found: list[Any] = []

    def box_of_view(*view: Any, real: Any = lazy.box_of_view) -> Any:
        found.append(real(*view))
        return found[-1]

    with mock.patch.object(lazy, "box_of_view", box_of_view), mock.patch(KERNELS):
        rehearsal = Rehearsal(config, model_config)
        wants = rehearsal.wants(metas) if is_whole else rehearsal.taken(metas)
    boxes = {name: [[list(box.start), list(box.lengths)] for box in some] for name, some in wants.items()}
    return {"boxes": boxes, "num_odd": sum(box is None for box in found)}
