"""vLLM's `LLM` in the trainer's process, over the collective transport."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from vllm_tests.models import drawn, save
from vllm_tests.processes import ROOT


def test_an_llm_in_the_trainers_process(tmp_path: Path) -> None:
    folder = save(drawn(6), tmp_path / "model")
    more = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "vllm_tests.in_process", str(folder)], cwd=ROOT, env={**os.environ, **more},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    assert "all is well" in done.stdout
