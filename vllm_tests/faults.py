"""What the tests add to vLLM's workers (`--worker-extension-cls`): loads that fail, and an engine that is naive."""

from __future__ import annotations

import contextlib
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from vllm_tests.failing import fail


class Faults:
    """Methods of every worker."""

    def break_loader(self, num_times: int, rank: int) -> None:
        """The next loads fail after half of the tensors."""
        if rank in (-1, self.rank):  # type: ignore[attr-defined]
            fail(self.model_runner.get_model(), num_times)  # type: ignore[attr-defined]


class Naive:
    """The life cycle of vLLM's own engines (layerwise reload from start to finish), and a file as the transport."""

    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.model, self.model_config = model, vllm_config.model_config

    def parse_init_info(self, info: Any) -> Any:
        return info

    def init_transfer_engine(self, info: Any) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, info: Any) -> None:
        self.model.load_weights(load_file(info["file"]).items())

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def reset_weight_update_target(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


with contextlib.suppress(ValueError):
    WeightTransferEngineFactory.register_engine("naive", Naive)
