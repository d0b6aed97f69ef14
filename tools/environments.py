"""Virtual environments of other packages: made once, step by step, and made again when their steps change."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
INSTALL_DEADLINE_S = 1800.0
STAMP = ".installed"


class EnvironmentUnavailable(RuntimeError):
    """An interpreter is missing and could not be made; the text says which step failed."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What an environment consists of.

    Each step is the arguments of one `pip install`. The first pins torch, so that no later requirement picks a build
    with gigabytes of CUDA packages. `versions` are the distributions it has to have in the end, "" for any version.
    `interpreter` makes it; without one it is of the Python that runs this.
    """

    folder: Path
    steps: tuple[tuple[str, ...], ...]
    versions: tuple[tuple[str, str], ...]
    interpreter: Path | None = None

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def is_complete(self) -> bool:
        """Whether it was made by these very steps and has what it has to have."""
        stamp = self.folder / STAMP
        return (
            stamp.exists() and stamp.read_text(encoding="utf-8") == repr(self.steps) and has(self.python, self.versions)
        )


def requirements(*lists: str) -> tuple[str, ...]:
    """What these lists of `pyproject.toml` ask for: "dependencies", or an extra. Python 3.10 has no reader of TOML."""
    text = PROJECT.read_text(encoding="utf-8")
    blocks = re.findall(rf"^(?:{'|'.join(lists)}) = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    return tuple(requirement for block in blocks for requirement in re.findall(r'"([^"]+)"', block))


def made(environment: Environment, log: Path) -> Path:
    """The interpreter of the environment, which is created when missing, incomplete or out of date.

    Creating takes minutes and needs the package index; pip's output goes to `log`. Raises EnvironmentUnavailable.
    """
    if not environment.is_complete():
        _install(environment, log)
        if not environment.is_complete():
            raise EnvironmentUnavailable(f"{environment.folder.name} is incomplete after installing; see {log}")
    return environment.python


def has(python: Path, versions: tuple[tuple[str, str], ...]) -> bool:
    """Whether the interpreter exists and has these distributions, by installed metadata (nothing is imported)."""
    if not python.exists():
        return False
    code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]), sep='\\n')"
    command: list[str | Path] = [python, "-c", code, *(name for name, _ in versions)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found = answer.stdout.split()
    return answer.returncode == 0 and all(
        not wanted or version == wanted for version, (_, wanted) in zip(found, versions, strict=True)
    )


def _install(environment: Environment, log: Path) -> None:
    folder = environment.folder
    print(f"creating {folder.parent.name}/{folder.name}; log: {log}", file=sys.stderr, flush=True)
    subprocess.run([environment.interpreter or sys.executable, "-m", "venv", "--clear", folder], check=True)
    with log.open("wb") as sink:
        for packages in environment.steps:
            command: list[str | Path] = [environment.python, "-m", "pip", "install", "--disable-pip-version-check"]
            try:
                status = subprocess.run(
                    command + list(packages),
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    timeout=INSTALL_DEADLINE_S,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired as error:
                raise EnvironmentUnavailable(f"installing {packages} did not end in {error.timeout} s") from error
            if status:
                raise EnvironmentUnavailable(f"installing {packages} failed with status {status}; see {log}")
    (folder / STAMP).write_text(repr(environment.steps), encoding="utf-8")
