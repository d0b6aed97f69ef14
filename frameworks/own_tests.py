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
QUEUE = ("transfer_queue", "transferqueue", "ppo.v1")


class Run(Protocol):
    def __call__(self, command: Sequence[str | Path], cwd: Path, **environment: str) -> int: ...


class NotRun(Exception):
    """A suite that lacks files nobody can install; the text says how to get them."""


def verl(python: Path, run: Run, arguments: Sequence[str]) -> int:
    """Run every test of verl's that it says runs on a CPU (`*_on_cpu.py`); 1 when one failed.

    The source distribution lacks the tests of its trainer on the queue. Where VERL names a checkout, those of its files
    run, too, that name the queue, over the checkout's own verl: take the release that the environment has.
    """
    source = _verl_source(python, run)
    status = _one_by_one(python, run, source, _on_cpu(source), arguments)
    if "VERL" in os.environ:
        checkout = Path(os.environ["VERL"]).resolve()
        named = [file for file in _on_cpu(checkout) if any(name in _text(file) for name in QUEUE)]
        status |= _one_by_one(python, run, checkout, named, arguments)
    return status


def _on_cpu(source: Path) -> list[Path]:
    return sorted((source / "tests").rglob("test_*_on_cpu.py"))


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _one_by_one(python: Path, run: Run, source: Path, files: Sequence[Path], arguments: Sequence[str]) -> int:
    """Run files in one process, and each that starts Ray or the queue in one of its own; 1 when a test failed."""
    starting = [file for file in files if any(name in _text(file) for name in ("ray.init", "tq.init"))]
    together = [file for file in files if file not in starting]
    turns = [turn for turn in (together, *([file] for file in starting)) if turn]
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
