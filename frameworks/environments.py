"""The interpreters of the suites. They have this package from the tree, editable, but for TransferQueue's own."""

from __future__ import annotations

from pathlib import Path

from tools.environments import Environment, requirements

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
REQUIREMENTS = requirements("dependencies")
TESTS = ("pytest>=8", "pytest-timeout>=2.3", "psutil>=5.9", "hypothesis>=6.100", "packaging>=24")


def _with_this_package(name: str, tensordict: str, *packages: str) -> Environment:
    """torch, one release of tensordict, this package, what its tests need, and `packages`, resolved together.

    The package's own requirements are named too, so that an environment is made again when they change.
    """
    wanted = (TORCH, tensordict, *packages, *TESTS, *REQUIREMENTS, "--editable", str(ROOT))
    versions = [package.partition("==")[::2] for package in (tensordict, *packages)]
    return Environment(
        folder=ROOT / ".venv-frameworks" / name, steps=((TORCH,), wanted), versions=(*versions, ("torch", ""))
    )


ENVIRONMENTS = {
    # verl asks for TransferQueue only in its extra `verl-core`, which also holds the last three.
    "verl": _with_this_package("verl", "tensordict==0.10.0", "verl==0.9.1", "cachetools", "fastapi", "uvicorn"),
    # What the data plane imports; NeMo-RL itself, a checkout, is on the path.
    "nemo-rl": _with_this_package(
        "nemo-rl", "tensordict==0.12.2", "ray", "datasets", "pillow", "pydantic", "requests", "transformers"
    ),
    "td-oldest": _with_this_package("td-oldest", "tensordict==0.10.0", "pillow"),
    "td-newest": _with_this_package("td-newest", "tensordict", "pillow"),
    # What programs written for TransferQueue import beside it: its own requirements.
    "programs": _with_this_package("programs", "tensordict", "ray[default]", "hydra-core"),
    "transferqueue": Environment(
        folder=ROOT / ".venv-frameworks" / "transferqueue",
        steps=((TORCH,), (TORCH, "TransferQueue==0.1.11", "ray[default]")),
        versions=(("TransferQueue", "0.1.11"), ("ray", ""), ("torch", "")),
    ),
}
