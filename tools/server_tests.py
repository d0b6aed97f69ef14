"""Tests that need an interpreter of their own, with an inference server in it: `python -m PACKAGE`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.environments import EnvironmentUnavailable

ROOT = Path(__file__).resolve().parent.parent


def run(package: str, about: str | None, made: Callable[[], Path], prefix: str, arguments: Sequence[str]) -> int:
    """pytest's exit status; 1 when there is no environment. `made` makes the interpreter, whose package it imports;
    variables with this `prefix` are kept from the tests."""
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description=about)
    parser.add_argument("--python", type=Path, help="an interpreter that has the server and this package, instead")
    asked, rest = parser.parse_known_args(arguments)
    try:
        python = asked.python or _made(package, made)
    except EnvironmentUnavailable as error:
        print(f"{package}: {error}", file=sys.stderr)
        return 1
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "TQ_", prefix))}
    tests = [one for one in rest if one.startswith(package)] or [package]
    more = [one for one in rest if one not in tests]
    command = [python, "-m", "pytest", "-c", f"{package}/pytest.ini", "--rootdir", ROOT, *tests, *more]
    return subprocess.run(command, cwd=ROOT, env=kept, check=False).returncode


def _made(package: str, made: Callable[[], Path]) -> Path:
    if sys.version_info[:2] != (3, 11):
        target = package.partition("_")[0]
        raise EnvironmentUnavailable(f"needs Python 3.11 (make PYTHON=python3.11 test-{target}), this is {sys.version}")
    return made()
