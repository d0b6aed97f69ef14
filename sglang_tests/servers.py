"""SGLang servers as child processes on loopback, on the CPU."""

from __future__ import annotations

import base64
import pickle
import sys
from pathlib import Path
from typing import Any, Literal

import torch

from sglang_tests import faults
from transfer_queue.integrations.sglang.client import PauseMode, SGLangClient
from transfer_queue.integrations.sglang.payload import LOADER
from vllm_tests.models import NUM_TOKENS, PROMPT
from vllm_tests.processes import PATHS, ServerProcess

CACHE_TOKENS = 8192


class Server(ServerProcess):
    """`loaders`: of `--custom-weight-loader`."""

    def __init__(
        self, model: Path, log: Path, tp: int, *options: str, loaders: tuple[str, ...] = (LOADER, faults.NAME)
    ) -> None:
        super().__init__(log)
        self.tp = tp
        command = [
            sys.executable, "-m", "sglang_tests.launch", "--host", "127.0.0.1", "--port", str(self.port),
            "--api-key", self.token, "--model-path", str(model), "--dtype", "float32", "--tp", str(tp),
            "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
            "--grammar-backend", "none", "--disable-cuda-graph", "--skip-tokenizer-init", "--skip-server-warmup",
            "--max-total-tokens", str(CACHE_TOKENS), "--max-running-requests", "8", "--sleep-on-idle",
            *(["--custom-weight-loader", *loaders] if loaders else []), *options,
        ]  # fmt: skip
        binding = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp)))} if tp > 1 else {}
        self.begin(command, {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": PATHS, **binding})

    def client(self, transport: Literal["tcp", "shm"] = "tcp", pause: PauseMode = "retract") -> SGLangClient:
        return SGLangClient(self.url, self.token, transport=transport, pause=pause, timeout_s=60.0)

    def say(self, num_tokens: int = NUM_TOKENS, prompt: list[int] | None = None) -> list[int]:
        """The greedy continuation."""
        return list(self.generate(num_tokens, prompt)["output_ids"])

    def generate(self, num_tokens: int = NUM_TOKENS, prompt: list[int] | None = None) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        body = {"input_ids": prompt or PROMPT, "sampling_params": sampling, "return_logprob": True}
        status, found = self.ask("POST", "/generate", body)
        assert status == 200, (status, found)
        return dict(found)

    def break_loader(self, num_times: int, rank: int = -1) -> None:
        """Have the next loads fail in the middle, in one worker or (-1) in all."""
        told = [torch.tensor(num_times if rank in (-1, one) else 0) for one in range(self.tp)]
        texts = [base64.b64encode(pickle.dumps([("times", one)], protocol=4)).decode() for one in told]
        body = {"serialized_named_tensors": texts, "load_format": faults.NAME, "flush_cache": False}
        for path, given in (
            ("/begin_weight_update", {}),
            ("/update_weights_from_tensor", body),
            ("/end_weight_update", {}),
        ):
            status, found = self.ask("POST", path, given)
            assert status == 200, found

    def worker_nbytes(self) -> int:
        """What each of the workers has of memory, at most."""
        return max(one.memory_info().rss for one in self.family() if "scheduler" in " ".join(one.cmdline()))
