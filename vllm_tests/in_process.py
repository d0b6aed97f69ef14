"""A trainer and vLLM's `LLM` in one process, over a process group: `python -m vllm_tests.in_process FOLDER`."""

from __future__ import annotations

import sys
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

from transfer_queue.errors import UnknownTensor
from transfer_queue.weights.transport.collective import CollectiveTrainer
from vllm_tests.models import NUM_TOKENS, PROMPT, answer, drawn
from vllm_tests.sources import Odd


class Client:
    """`LLM` for a trainer: the methods have the same names, and take the bodies of the HTTP routes."""

    def __init__(self, llm: LLM) -> None:
        self._llm: Any = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)

    def update_weight_version(self, new_version: str) -> None:
        self._llm.update_weight_version(new_version)

    def get_weight_version(self) -> str:
        return str(self._llm.get_weight_version())

    def silent_workers(self) -> int:
        return 1


def main(folder: str) -> None:
    model = drawn(6)
    llm = LLM(
        model=folder, dtype="float32", enforce_eager=True, max_model_len=512,
        weight_transfer_config=WeightTransferConfig(backend="tq_collective"),
    )  # fmt: skip
    wanted = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

    def says() -> list[int]:
        found: Any = llm.generate([{"prompt_token_ids": PROMPT}], wanted, use_tqdm=False)
        return list(found[0].outputs[0].token_ids)

    assert says() == answer(model)
    source = Odd(model)
    trainer = CollectiveTrainer.trainer_init({"world_size": 2}, client=Client(llm), source=source)
    for seed, version in ((61, 1), (62, 2), (63, 4)):
        before = says()
        if version == 4:
            source.odd = "unknown"
            try:
                trainer.send_weights(deadline_s=60)
                raise AssertionError("it was taken")
            except UnknownTensor:
                assert (says(), llm.get_weight_version()) == (before, "2")
            source.odd = ""
        model.load_state_dict(drawn(seed).state_dict())
        assert trainer.send_weights(deadline_s=60).version == version
        assert (says(), llm.get_weight_version()) == (answer(model), str(version))
    trainer.shutdown()
    print("all is well", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
