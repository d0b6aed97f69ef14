"""Runs the Python blocks of Markdown files in order, each file as one program, and compares what they print.

A block ```python runs; a block ```text right behind it is its expected output. Blocks marked otherwise are not run.
Every file has a process of its own, so that no service, import path or environment variable reaches the next one.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, NamedTuple

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 120
AT_ONCE = min(2, os.cpu_count() or 1)


class Running(NamedTuple):
    """A file whose blocks are run, and what they print."""

    path: str
    pid: int
    said: IO[str]
    start: float


def main(arguments: list[str]) -> int:
    for name in [name for name in os.environ if name.startswith("TQ_")]:
        del os.environ[name]
    import torch.nested._internal.ops  # noqa: F401  once for all files: with torch these imports take seconds

    import transfer_queue.dataloader
    import transfer_queue.interface  # noqa: F401

    gc.freeze()
    running: list[Running] = []
    failed = 0
    for path in arguments:
        if len(running) == AT_ONCE:
            failed += ended(running)
        said = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in `ended`
        pid = os.fork()
        if not pid:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            signal.alarm(TIMEOUT_S)
            return failures(path)
        running.append(Running(path, pid, said, time.monotonic()))
    while running:
        failed += ended(running)
    return failed


def ended(running: list[Running]) -> bool:
    """Wait for the end of one of them, and show what it printed. Whether it failed."""
    pid, status = os.wait()
    one = next(one for one in running if one.pid == pid)
    running.remove(one)
    with one.said as said:
        said.seek(0)
        text = said.read().strip()
    shown = text if status else text.splitlines()[-1]
    print(f"{shown} in {time.monotonic() - one.start:.1f} s" + (f": FAILED ({status})" if status else ""), flush=True)
    return status != 0


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
