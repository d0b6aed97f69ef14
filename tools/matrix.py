"""Runs the tests under every Python and both ends of tensordict that the package takes, each with its own environment.

`make matrix` runs the whole suite under each pair; `ARGS="--python 3.12 --tensordict newest tests/unit"` a part of it
under one. What is none of this tool's options goes to pytest. Prints a table as `docs/status.md` has it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a file, its own folder comes first
from tools.environments import Environment, EnvironmentUnavailable, made, requirements  # noqa: E402

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TENSORDICTS = {"oldest": "tensordict==0.10.0", "newest": "tensordict"}
TORCH = "torch==2.13.0"
WHOLE_SUITE = ("--numprocesses", "auto", "--dist", "loadfile", "--no-loadscope-reorder")
NAMES = ("torch", "tensordict")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one environment made of the tests; `note` says why there is no more to say."""

    python: str
    torch: str = "-"
    tensordict: str = "-"
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    note: str = ""

    def line(self) -> str:
        result = self.note or f"{self.passed} | {self.failed} | {self.skipped} | {self.seconds:.0f}"
        return f"| {self.python} | {self.torch} | {self.tensordict} | {result} |"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", choices=PYTHONS, help="may be repeated; default all")
    parser.add_argument("--tensordict", action="append", choices=tuple(TENSORDICTS), help="may be repeated")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-matrix", help="the folder that keeps them")
    options, tests = parser.parse_known_args(arguments)
    rows = [
        row(version, release, options.environments.absolute(), tests or WHOLE_SUITE)
        for version in options.python or PYTHONS
        for release in options.tensordict or TENSORDICTS
    ]
    print("| Python | torch | tensordict | passed | failed | skipped | seconds |\n" + "| --- " * 7 + "|")
    print("\n".join(one.line() for one in rows))
    return any(one.failed or one.note for one in rows)


def row(version: str, release: str, folder: Path, tests: Sequence[str]) -> Row:
    """Run the tests in one environment, which is made first where it is missing or out of date (minutes)."""
    interpreter = found(version)
    if interpreter is None:
        return Row(python=version, tensordict=release, note="not run: there is no such Python here")
    one = environment(version, release, interpreter, folder)
    try:
        python = made(one, folder / f"{one.folder.name}.log")
    except EnvironmentUnavailable as error:
        return Row(python=version, tensordict=release, note=f"not run: {error}")
    return tested(python, tests)


def found(version: str) -> Path | None:
    """The interpreter of that minor version: the one on the path, else the newest that pyenv has."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    releases = sorted(pyenv.glob(f"{version}.*/bin/python"), key=lambda path: int(path.parts[-3].rpartition(".")[2]))
    for candidate in (shutil.which(f"python{version}"), *reversed(releases)):
        # A shim of pyenv stands for a version that is not there, too.
        if candidate and not subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode:
            return Path(candidate)
    return None


def environment(version: str, release: str, interpreter: Path, folder: Path) -> Environment:
    """torch, one release of tensordict and this package from the tree with its extras for tests, resolved together.

    The requirements are named too, so that an environment is made again when they change.
    """
    wanted = (
        TORCH,
        TENSORDICTS[release],
        *requirements("dependencies", "dev", "demo"),
        "--editable",
        f"{ROOT}[dev,demo]",
    )
    _, _, exact = TENSORDICTS[release].partition("==")
    return Environment(
        folder=folder / f"{version}-{release}",  # no name of a package: a test looks for them in a process's files
        steps=((TORCH,), wanted),
        versions=(("tensordict", exact), ("torch", "")),
        interpreter=interpreter,
    )


def tested(python: Path, tests: Sequence[str]) -> Row:
    """Run pytest from the repository's root and count its report."""
    code = (
        "import importlib.metadata as m, platform, sys; print(platform.python_version(), *map(m.version, sys.argv[1:]))"
    )
    answer = subprocess.run([python, "-c", code, *NAMES], capture_output=True, text=True, check=True)
    version, torch, tensordict = answer.stdout.split()
    print(f"== Python {version}, torch {torch}, tensordict {tensordict}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", f"--junit-xml={report}", *tests]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        seconds = time.monotonic() - start
        if not report.exists():
            note = f"pytest ended with status {status} and no report"
            return Row(python=version, torch=torch, tensordict=tensordict, note=note)
        total, failed, skipped = counts(report)
    return Row(
        python=version, torch=torch, tensordict=tensordict,
        passed=total - failed - skipped, failed=failed, skipped=skipped, seconds=seconds,
        note="" if total else f"no test was run (status {status})",
    )  # fmt: skip


def counts(report: Path) -> tuple[int, int, int]:
    """How many tests a report of pytest has: all, those that failed or could not be set up, those that were skipped."""
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    numbers = [[int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")] for suite in suites]
    total, failures, errors, skipped = (sum(column) for column in zip(*numbers, strict=True))
    return total, failures + errors, skipped


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
