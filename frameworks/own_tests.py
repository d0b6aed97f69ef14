"""The frameworks' own tests, not edited: verl's from its source distribution, NeMo-RL's from a checkout."""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from frameworks.environments import ROOT
from tools.environments import EnvironmentUnavailable

SETTINGS = ROOT / "frameworks" / "own_tests.ini"
VERL = "verl-0.9.1"


class Run(Protocol):
    def __call__(self, command: Sequence[str | Path], cwd: Path, **environment: str) -> int: ...


class NotRun(Exception):
    """A suite that lacks files nobody can install; the text says how to get them."""


def verl(python: Path, run: Run, arguments: Sequence[str]) -> int:
    """Run every test of verl's that it says runs on a CPU (`*_on_cpu.py`); 1 when one failed.

    Tests that start Ray have a process each: they start and stop it for themselves.
    """
    source = _verl_source(python, run)
    files = sorted((source / "tests").rglob("test_*_on_cpu.py"))
    on_ray = [file for file in files if "ray.init" in file.read_text(encoding="utf-8")]
    turns = [[file for file in files if file not in on_ray], *([file] for file in on_ray)]
    failed = [_pytest(python, run, source, [*turn, *arguments], "frameworks.coroutines") for turn in turns]
    return int(any(failed))


def _verl_source(python: Path, run: Run) -> Path:
    """verl's source distribution, unpacked. Downloads it once; raises EnvironmentUnavailable where that fails."""
    store = ROOT / ".venv-frameworks" / "sources"
    if not (store / VERL).exists():
        wanted = ("download", VERL.replace("-", "=="), "--no-binary", "verl", "--no-deps", "--no-build-isolation")
        if run([python, "-m", "pip", "--quiet", *wanted, "--dest", str(store)], ROOT):
            raise EnvironmentUnavailable(f"the source distribution of {VERL} cannot be downloaded")
        with tarfile.open(store / f"{VERL}.tar.gz") as archive, tempfile.TemporaryDirectory(dir=store) as folder:
            archive.extractall(folder, filter="data")
            (Path(folder) / VERL).rename(store / VERL)
    return store / VERL


def nemo_rl(python: Callable[[str], Path], run: Run, arguments: Sequence[str]) -> int:
    """Run the data plane's tests of the checkout that NEMO_RL names, without those of Mooncake; 1 when one failed."""
    checkout = Path(os.environ.get("NEMO_RL", ""))
    tests = checkout.resolve() / "tests" / "unit" / "data_plane"
    if "NEMO_RL" not in os.environ or not tests.exists():
        raise NotRun("NEMO_RL has to name a checkout of github.com/NVIDIA-NeMo/RL: no package of it has these tests")
    # Their conftest.py one folder up starts clusters with models: not read.
    chosen = ["--confcutdir", tests, tests, "-k", "not mooncake", *arguments]
    return _pytest(python("nemo-rl"), run, checkout.resolve(), chosen, "frameworks.nemo_rl")


def _pytest(python: Path, run: Run, cwd: Path, arguments: Sequence[str | Path], plugin: str) -> int:
    options = ["-c", SETTINGS, "--rootdir", cwd, "-p", plugin]
    # Ray finds clusters of others on this machine by itself, unless told to start its own.
    environment = {"PYTHONPATH": f"{cwd}{os.pathsep}{ROOT}", "RAY_ADDRESS": "local"}
    return run([python, "-m", "pytest", *options, *arguments], cwd, **environment)
