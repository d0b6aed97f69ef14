"""Runs the Python blocks of Markdown files in order, each file as one program, and compares what they print.

A block ```python runs; a block ```text right behind it is its expected output. Blocks marked otherwise are not run.
Every file has a process of its own, so that no service, import path or environment variable reaches the next one.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ALONE = "--alone"
TIMEOUT_S = 120


def main(arguments: list[str]) -> int:
    if arguments[:1] == [ALONE]:
        return failures(arguments[1])
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        return sum(pool.map(failed, arguments))


def failed(path: str) -> bool:
    """Run a file in a child process; what it printed is shown once it ended."""
    start = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
    command = [sys.executable, __file__, ALONE, path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    print(f"{done.stdout.strip()} in {time.monotonic() - start:.1f} s")
    if done.returncode:
        print(done.stderr)
    return done.returncode != 0


def failures(path: str) -> int:
    """How many blocks of a file printed something else than what stands behind them."""
    blocks = BLOCK.findall(Path(path).read_text(encoding="utf-8"))
    names: dict[str, object] = {"__name__": "__readme__"}
    failed = 0
    for (language, code), following in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, path, "exec"), names)
        if following[0] == "text" and printed.getvalue().strip() != following[1].strip():
            print(f"{path}: expected\n{following[1]}\ngot\n{printed.getvalue()}")
            failed += 1
    print(f"{path}: {sum(language == 'python' for language, _ in blocks)} blocks run", end="")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
