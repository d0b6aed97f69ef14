"""Draft models in a real vLLM, of every kind that its build for CPUs runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vllm_tests.processes import PATHS, ROOT

KINDS = {
    "draft_model": ("tq_tcp", 2), "eagle": ("tq_tcp", 2), "eagle3": ("tq_shm", 1), "medusa": ("tq_shm", 1),
    "mimo": ("tq_tcp", 2), "glm4_moe": ("tq_tcp", 2), "deepseek_v3": ("tq_shm", 1),
}  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_model_and_draft_are_updated_together_apart_and_never_by_halves(kind: str) -> None:
    from vllm_tests.drafting import scenes_of

    backend, tp = KINDS[kind]
    more = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": PATHS,
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp))),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "vllm_tests.drafting", kind, backend, str(tp)], cwd=ROOT, env={**os.environ, **more},
        capture_output=True, text=True, timeout=560, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    well = [line for line in done.stdout.splitlines() if line.startswith("well:")]
    assert well == [f"well: {scene.__name__}" for scene in scenes_of(kind)]
