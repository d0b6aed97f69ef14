"""One of several systems, measured in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from bench.environments import ROOT


class Contender(NamedTuple):
    """`system` in this interpreter, with the packages of `tree` before others."""

    system: str
    python: str = sys.executable
    tree: Path | None = None

    def measured(self, module: str, case: str, limit_s: float) -> dict[str, Any] | None:
        """What `measure` of `module` prints; None where it failed, or was not done within `limit_s`."""
        folders = [str(ROOT)]
        if self.tree is not None:
            folders.insert(0, str(self.tree / "src" if (self.tree / "src").exists() else self.tree))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
        code = f"from {module} import measure; measure({self.system!r}, {case!r})"
        command = [self.python, "-c", code]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
            try:
                output, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it started, such as a Ray cluster, ends with it
        return next((json.loads(line) for line in reversed(output.splitlines()) if line.startswith("{")), None)
