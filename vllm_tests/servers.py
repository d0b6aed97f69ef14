"""vLLM servers as child processes on loopback."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from transfer_queue.weights.http import WeightSyncClient
from vllm_tests.models import NUM_TOKENS, PROMPT
from vllm_tests.processes import PATHS, ServerProcess


class Server(ServerProcess):
    def __init__(self, model: Path, backend: str, log: Path, tp: int = 1, *options: str) -> None:
        super().__init__(log)
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(self.port),
            "--api-key", self.token, "--model", str(model), "--served-model-name", "tiny", "--dtype", "float32",
            "--enforce-eager", "--max-model-len", "4096", "--tensor-parallel-size", str(tp),
            "--weight-transfer-config", json.dumps({"backend": backend}),
            "--worker-extension-cls", "vllm_tests.faults.Faults", *options,
        ]  # fmt: skip
        more = {
            "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": PATHS,
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp))), "VLLM_NO_USAGE_STATS": "1",
            "TQ_WEIGHTS_ROOT": tempfile.gettempdir(),
        }  # fmt: skip
        self.begin(command, more)

    def shared_files(self, pid: int) -> set[Path]:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            return set()
        return {
            Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/vllm_dist_" in line and "deleted" not in line
        }

    def client(self, timeout_s: float = 60.0) -> WeightSyncClient:
        return WeightSyncClient(self.url, self.token, timeout_s=timeout_s)

    def say(self, num_tokens: int = NUM_TOKENS, prompt: list[int] | None = None) -> list[int]:
        """The greedy continuation."""
        status, found = self.complete(num_tokens, prompt)
        assert status == 200, (status, found)
        return list(found["choices"][0]["token_ids"])

    def complete(self, num_tokens: int, prompt: list[int] | None = None, request_id: str = "") -> tuple[int, Any]:
        body = {
            "model": "tiny", "prompt": prompt or PROMPT, "max_tokens": num_tokens, "temperature": 0.0,
            "ignore_eos": True, "return_token_ids": True, **({"request_id": request_id} if request_id else {}),
        }  # fmt: skip
        return self.ask("POST", "/v1/completions", body)

    def break_loader(self, num_times: int, rank: int = -1) -> None:
        """Have the next loads fail in the middle, in one worker or (-1) in all."""
        status, found = self.ask(
            "POST", "/collective_rpc", {"method": "break_loader", "args": [num_times, rank], "timeout": 20}
        )
        assert status == 200, found
