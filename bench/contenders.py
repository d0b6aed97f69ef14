"""Systems that are measured each in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.environments import ROOT, EnvironmentUnavailable, peer_python, redis_python, reverb_python
from bench.fresh_memory import touch_memory

LOG = ROOT / ".venv-peers.log"


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


PEERS: dict[str, tuple[str, Callable[[], Path]]] = {
    "0.1.11": ("0.1.11", lambda: peer_python(None, LOG)),
    "ray": ("ray", lambda: peer_python(None, LOG)),
    "hand": ("hand", lambda: Path(sys.executable)),
    "redis": ("redis", lambda: redis_python(LOG)),
    "reverb": ("reverb", lambda: reverb_python(LOG)),
    "pipe": ("pipe", lambda: Path(sys.executable)),
}
"""By name: the system, and what makes or finds its interpreter."""


def arguments(about: str | None, cases: Iterable[str], rounds: int) -> argparse.Namespace:
    """The command line of a module whose `measure` prints what `in_turn` collects."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--peers", default="")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--only", default=",".join(cases))
    return parser.parse_args()


def in_turn(
    systems: dict[str, Contender], module: str, case: str, limit_s: float, rounds: int, once: Container[str] = ()
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """(name, what its process measured) of every system, round by round. Who failed or was not done in time (None) is
    not asked again, nor who takes its turn `once`."""
    touch_memory()
    done: set[str] = set()
    for _ in range(rounds):
        for name in [name for name in systems if name not in done]:
            measured = systems[name].measured(module, case, limit_s)
            if measured is None or name in once:
                done.add(name)
            yield name, measured


def contenders(names: str, say: Callable[[str], None]) -> dict[str, Contender]:
    """The peers of these names, which commas separate; `say` tells of those that cannot be installed here."""
    found: dict[str, Contender] = {}
    for name in names.split(",") if names else []:
        system, python = PEERS[name]
        try:
            found[name] = Contender(system, str(python()))
        except EnvironmentUnavailable as error:
            say(f"{name} is left out: {error}")
    return found
