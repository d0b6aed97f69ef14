"""Interpreters of the systems under test, each with packages of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-peers"
INSTALL_STEPS: tuple[tuple[str, ...], ...] = (("torch==2.13.0",), ("TransferQueue==0.1.11", "ray[default]"))
OURS_NEEDS = ("msgspec", "omegaconf", "prometheus-client", "rich", "typer", "uvloop", "xxhash")
INSTALL_DEADLINE_S = 1800.0
PROBE = "import importlib.metadata as m; print(m.version('TransferQueue'), m.version('ray'), m.version('torch'))"


class EnvironmentUnavailable(RuntimeError):
    """The peers' interpreter is missing and could not be made; the text says which step failed."""


def peer_python(override: Path | None, log: Path) -> Path:
    """Return an interpreter that has TransferQueue 0.1.11 and ray.

    Creates `.venv-peers` in the repository root when it is missing or incomplete (minutes, needs the package index;
    output goes to `log`). `override` is only checked, never changed. Raises EnvironmentUnavailable.
    """
    if override is not None:
        if not is_complete(override):
            raise EnvironmentUnavailable(f"{override} does not have TransferQueue 0.1.11 and ray")
        return override.absolute()
    python = PEERS / "bin" / "python"
    if not is_complete(python):
        install(python, log)
    if not is_complete(python):
        raise EnvironmentUnavailable(f"{PEERS.name} is incomplete after installing; see {log}")
    return python


def is_complete(python: Path) -> bool:
    """Whether the interpreter exists and has the peers, by their installed metadata (nothing is imported)."""
    if not python.exists():
        return False
    return metadata(python, PROBE).startswith("0.1.11 ")


def metadata(python: Path, probe: str) -> str:
    """What the probe printed, nothing when it failed."""
    answer = subprocess.run([python, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    return "" if answer.returncode else answer.stdout


def ray_python(peers: Callable[[], Path], log: Path) -> Path:
    """Return an interpreter that has ray and what our package needs: this one, or else the peers'.

    What is missing of ours is added to `.venv-peers`, where TransferQueue 0.1.11 does not use it; an interpreter of the
    user's is not changed. `peers` may raise; raises EnvironmentUnavailable.
    """
    if importlib.util.find_spec("ray") is not None:
        return Path(sys.executable)
    python, probe = peers(), f"import importlib.metadata as m; print(*map(m.version, {OURS_NEEDS!r}))"
    if not metadata(python, probe):
        if python != PEERS / "bin" / "python":
            raise EnvironmentUnavailable(f"{python} lacks some of {', '.join(OURS_NEEDS)}")
        pip_install(python, OURS_NEEDS, log)
    return python


def install(python: Path, log: Path) -> None:
    """Make the environment: torch first, so that the peers' own requirement can't pick another build."""
    print(f"bench: creating {PEERS.name} (torch, TransferQueue 0.1.11, ray); log: {log}", file=sys.stderr, flush=True)
    venv.create(PEERS, with_pip=True, clear=not python.exists())
    log.unlink(missing_ok=True)
    for packages in INSTALL_STEPS:
        pip_install(python, packages, log)


def pip_install(python: Path, packages: tuple[str, ...], log: Path) -> None:
    """Install packages, with the output at the end of `log`. Raises EnvironmentUnavailable."""
    command: list[str | Path] = [python, "-m", "pip", "install", "--disable-pip-version-check", *packages]
    with log.open("ab") as sink:
        try:
            status = subprocess.run(
                command, stdout=sink, stderr=subprocess.STDOUT, timeout=INSTALL_DEADLINE_S, check=False
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise EnvironmentUnavailable(f"installing {packages} did not end in {error.timeout} s") from error
    if status:
        raise EnvironmentUnavailable(f"installing {packages} failed with status {status}; see {log}")
