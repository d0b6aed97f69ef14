"""What `make test-frameworks` runs, one suite after the other, each in its environment."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from frameworks import differential, distributions, own_tests, programs
from frameworks.environments import ENVIRONMENTS, ROOT
from tools.environments import EnvironmentUnavailable, made

LOGS = ROOT / ".venv-frameworks" / "logs"
# The tests that meet tensordict. Warnings are not errors there: these releases warn about each other.
TENSORDICT_TESTS = (
    "test_client", "test_client_concurrency", "test_codec", "test_codec_bounds", "test_codec_lists",
    "test_codec_properties", "test_codec_values", "test_framework_calls", "test_isolation", "test_kv", "test_lifecycle",
    "test_metadata", "test_metadata_fields", "test_metadata_kv", "test_metadata_tags", "test_odd_inputs", "test_traps",
)  # fmt: skip


def clean_environment() -> dict[str, str]:
    """The environment without addresses of other runs."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "RAY_", "TQ_"))}


def run(command: Sequence[str | Path], cwd: Path = ROOT, **environment: str) -> int:
    """The exit status of a command, without addresses of other runs in its environment, and with `environment`."""
    return subprocess.run(command, cwd=cwd, env={**clean_environment(), **environment}, check=False).returncode


def python(name: str) -> Path:
    """The interpreter of an environment, which is made first when it has to be."""
    LOGS.mkdir(parents=True, exist_ok=True)
    return made(ENVIRONMENTS[name], LOGS / f"{name}.log")


def with_verl(arguments: Sequence[str]) -> int:
    return run([python("verl"), "-m", "pytest", "-c", "frameworks/pytest.ini", "frameworks", *arguments])


def with_tensordict(name: str, arguments: Sequence[str]) -> int:
    files = [str(path) for test in TENSORDICT_TESTS for path in sorted(Path("tests").glob(f"*/{test}.py"))]
    return run([python(name), "-m", "pytest", "-W", "default", *files, *arguments])


def with_programs(folder: Path, timeout_s: float) -> int:
    return programs.main(python("programs"), folder, timeout_s, clean_environment(), LOGS / "programs")


SUITES: dict[str, Callable[[Sequence[str]], int]] = {
    "verl": with_verl,
    "verl-own": lambda arguments: own_tests.verl(python("verl"), run, arguments),
    "nemo-rl": lambda arguments: own_tests.nemo_rl(python, run, arguments),
    "td-oldest": lambda arguments: with_tensordict("td-oldest", arguments),
    "td-newest": lambda arguments: with_tensordict("td-newest", arguments),
    "distributions": lambda _: distributions.main(),
    "differential": lambda arguments: differential.main(
        python("transferqueue"), python("td-newest"), clean_environment(), LOGS, arguments
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Run the named suites, all by default, or the programs of a folder; say how long each took; 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m frameworks", description=__doc__)
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], help="default: all")
    parser.add_argument("--programs", type=Path, metavar="DIR", help="run the programs of this folder instead")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that each of the programs may take")
    asked, rest = parser.parse_known_args(arguments)
    suites = {"programs": lambda _: with_programs(asked.programs, asked.timeout)} if asked.programs else SUITES
    failed = []
    for name in suites if asked.programs else asked.suites or SUITES:
        start = time.monotonic()
        try:
            status = suites[name](rest)
        except own_tests.NotRun as reason:
            print(f"frameworks: {name}: not run: {reason}", flush=True)
            continue
        except EnvironmentUnavailable as error:
            print(f"frameworks: {name}: {error}", file=sys.stderr)
            status = 1
        if status:
            failed.append(name)
        print(f"frameworks: {name}: {'failed' if status else 'passed'} in {time.monotonic() - start:.0f} s", flush=True)
    return bool(failed)
