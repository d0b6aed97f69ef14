"""The interpreter of the tests: SGLang's wheel without its requirements, and those that a server on a CPU imports.

Left out is what was built for CUDA, sglang-kernel among it (see `kernels`). Its torch is 2.13.0, as with vLLM, where
SGLang asks for 2.14.1.
"""

from __future__ import annotations

from pathlib import Path

import tomllib

from tools.environments import Environment
from tools.environments import made as made_environment

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TORCH, SGLANG = "torch==2.13.0", "sglang==0.5.23"
TORCHVISION = "torchvision==0.28.0"  # with --no-deps: its operators need CUDA and are not loaded
NEEDED = (
    "transformers==5.19.0", "tokenizers==0.23.2", "triton==3.9.0", "apache-tvm-ffi==0.1.11",
    "compressed-tensors==0.18.0", "xgrammar==0.2.7", "llguidance>=1.7.6,<2", "openai==2.8.0", "openai-harmony==0.0.4",
    "numba==0.65.1", "sentencepiece==0.2.1", "aiohttp", "dill", "distro", "einops", "fastapi", "gguf", "interegular",
    "ipython", "jsonschema", "msgspec", "ninja", "numpy", "orjson", "partial-json-parser", "pillow",
    "prometheus-client", "psutil", "pybase64", "pydantic", "python-multipart", "pyzmq", "regex", "requests", "scipy",
    "setproctitle", "soundfile", "tiktoken", "tqdm", "uvicorn>=0.51", "uvloop", "watchfiles", "xxhash", "zstandard",
)  # fmt: skip
TESTS = ("pytest>=8", "pytest-timeout>=2.3")

ENVIRONMENT = Environment(
    folder=ROOT / ".venv-sglang" / "sglang-cpu",
    steps=(
        (TORCH,),
        (TORCH, *NEEDED),
        ("--no-deps", SGLANG, TORCHVISION),
        (TORCH, *NEEDED, *TESTS, *PROJECT["dependencies"], "--editable", str(ROOT)),
    ),
    versions=(("sglang", "0.5.23"), ("torch", ""), ("transfer-queue", "")),
)


def made() -> Path:
    """The interpreter; the first time takes minutes and 3 GB. `EnvironmentUnavailable` when it cannot be made."""
    ENVIRONMENT.folder.parent.mkdir(exist_ok=True)
    return made_environment(ENVIRONMENT, ENVIRONMENT.folder.parent / "install.log")
