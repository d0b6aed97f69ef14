"""Programs of others, a folder of them, run as they are: tutorials, recipes and scripts written for TransferQueue.

`make test-frameworks ARGS="--programs DIR"`. The folder is copied, so that no program takes a package that lies beside
it for this one. Every `*.py` in it runs in a process group of its own, files called `test_*.py` with pytest. A program
has failed when it ends with another status than 0, prints a traceback, or is not done in time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

STOPPING_S = 20.0  # Ray ends its own processes after a SIGTERM
SHOWN_LINES = 15


def main(python: Path, folder: Path, timeout_s: float, environment: Mapping[str, str], logs: Path) -> int:
    """Run every program of `folder`, print a line for each; 1 when one failed or there is none."""
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tq-") as scratch:
        copy = Path(scratch) / folder.resolve().name
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("transfer_queue", "__pycache__", ".git", ".venv*"))
        programs = sorted(path for path in copy.rglob("*.py") if not path.name.startswith("_"))
        if not programs:
            print(f"frameworks: {folder} has no programs")
        # `ray.init()` takes a cluster that runs on this machine unless it looks for one elsewhere.
        alone = {**environment, "RAY_TMPDIR": scratch, "RAY_AUTH_MODE": "disabled"}
        failed = 0
        for program in programs:
            name = program.relative_to(copy)
            log = logs / f"{'.'.join(name.with_suffix('').parts)}.log"
            started = time.monotonic()
            verdict = _verdict(python, program, timeout_s, alone, log)
            print(f"frameworks: {name}: {verdict or 'passed'} in {time.monotonic() - started:.0f} s", flush=True)
            if verdict:
                failed += 1
                print("\n".join(f"    {line}" for line in _lines(log)[-SHOWN_LINES:]), f"\n    the whole: {log}")
    print(f"frameworks: {len(programs) - failed} of {len(programs)} programs passed")
    return int(bool(failed) or not programs)


def _verdict(python: Path, program: Path, timeout_s: float, environment: Mapping[str, str], log: Path) -> str:
    """What is wrong with a run of `program`, "" where nothing is."""
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(program.parent)]
    is_test = program.name.startswith("test_")
    command = [str(python), *(tests if is_test else []), str(program)]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=program.parent, env=dict(environment), stdin=subprocess.DEVNULL, stdout=sink,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return f"not done after {timeout_s:g} s"
        finally:
            _end(process)
    if status:
        return f"failed with status {status}"
    return "printed a traceback" if not is_test and any("Traceback (most" in line for line in _lines(log)) else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program and what is left of its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOPPING_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()
