"""This package and TransferQueue 0.1.11 over each other in one environment, and this package under the other's name.

Wheels are built and installed for real, without their requirements: the packages are imported only as far as that goes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORT = "import transfer_queue; print(transfer_queue.__version__)"
NAMED = "from importlib.metadata import version; print(version('TransferQueue'))"
LIMIT_S = 300.0


class Environment:
    """A fresh virtual environment."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.bin = folder / "bin"

    def pip(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self.run("python", "-m", "pip", "--disable-pip-version-check", *arguments)

    def run(self, program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [self.bin / program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=self.bin)

    def install(self, what: str | Path) -> None:
        done = self.pip("install", "--quiet", "--no-deps", "--force-reinstall", what)
        assert done.returncode == 0, done.stderr

    def mended(self) -> None:
        """Do what the doctor says, and look whether that helped."""
        sick = self.run("tq", "doctor")
        assert sick.returncode == 1, sick
        command = sick.stdout.strip().splitlines()[-1].strip()
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        assert done.returncode == 0, done
        well = self.run("tq", "doctor")
        assert (well.returncode, "nothing is wrong" in well.stdout) == (0, True), well
        imported = self.run("python", "-W", "error", "-c", IMPORT)
        assert imported.returncode == 0, imported


def main() -> int:
    """Check every order; raises AssertionError for what does not hold."""
    with tempfile.TemporaryDirectory(prefix="tq-distributions-") as scratch:
        folder = Path(scratch)
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "ours", ROOT]
        subprocess.run(build, check=True, timeout=LIMIT_S)
        compat = [sys.executable, ROOT / "tools" / "wheel_compat.py", "--out", folder / "compat"]
        subprocess.run(compat, check=True, timeout=LIMIT_S)
        (ours,) = (folder / "ours").glob("*.whl")
        (named,) = (folder / "compat").glob("*.whl")
        environment = Environment(folder / "venv")
        theirs_over_ours(environment, ours)
        ours_over_theirs(environment, ours)
        left_without_files(environment, ours)
        under_the_other_name(environment, named)
    return 0


def theirs_over_ours(environment: Environment, ours: Path) -> None:
    environment.install(ours)
    assert environment.run("tq", "doctor").returncode == 0
    environment.install("TransferQueue==0.1.11")
    failed = environment.run("python", "-c", IMPORT)
    assert failed.returncode == 1, failed
    assert "installed over each other" in failed.stderr, failed.stderr
    assert "The files of TransferQueue win" in failed.stderr, failed.stderr
    status = environment.run("tq", "status")
    assert (status.returncode, "To mend it" in status.stderr) == (1, True), status
    environment.mended()
    print("theirs over ours: said and mended", flush=True)


def ours_over_theirs(environment: Environment, ours: Path) -> None:
    environment.install("TransferQueue==0.1.11")
    environment.install(ours)
    imported = environment.run("python", "-c", IMPORT)
    assert imported.returncode == 0, imported
    assert "The files of transfer-queue win" in imported.stderr, imported.stderr
    environment.mended()
    print("ours over theirs: said and mended", flush=True)


def left_without_files(environment: Environment, ours: Path) -> None:
    """Removing the other takes the files that both have along."""
    environment.install("TransferQueue==0.1.11")
    assert environment.pip("uninstall", "-y", "TransferQueue").returncode == 0
    status = environment.run("tq", "status")
    assert (status.returncode, "missing or changed" in status.stderr) == (1, True), status
    environment.mended()
    print("the other removed: said and mended", flush=True)
    assert environment.pip("uninstall", "-y", "transfer-queue").returncode == 0


def under_the_other_name(environment: Environment, named: Path) -> None:
    environment.install("TransferQueue==0.1.11")
    environment.install(named)  # pip takes the other away by itself
    version = environment.run("python", "-c", NAMED).stdout.strip()
    assert version.startswith("0.1.11+tq."), version
    assert environment.run("tq", "doctor").returncode == 0
    assert environment.run("python", "-W", "error", "-c", IMPORT).returncode == 0
    for pin in ("TransferQueue>=0.1.10", "TransferQueue==0.1.11", "TransferQueue~=0.1.8", "TransferQueue<0.2"):
        done = environment.pip("install", "--no-deps", "--no-index", pin)
        assert (done.returncode, "already satisfied" in done.stdout) == (0, True), done
    for line in environment.pip("check").stdout.splitlines():  # its own requirements were left out, and that is all
        assert line.lower().startswith("transferqueue 0.1.11+tq"), line
    print(f"under the name TransferQueue: {version} satisfies its pins", flush=True)
