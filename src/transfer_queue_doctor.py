"""Whether the files of the package `transfer_queue` are those of this project, and the command that mends it if not.

Two distributions install a package of that name: `transfer-queue`, this project, and `TransferQueue`. pip knows them by
different names and lets each overwrite the other's files. This module lies beside the package and imports nothing of
it, so that it also runs where the package cannot be imported any more. It is what the command `tq` starts with.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

PACKAGE = "transfer_queue"
OURS, OTHER = "transfer-queue", "transferqueue"  # as pip normalises them (PEP 503)
MARK = "transfer_queue_doctor.py"  # a file that only wheels of this project have


@dataclass(frozen=True, kw_only=True)
class Installed:
    """A distribution that brings the package. `files` has the SHA-256 of each of the package's files, by its place.

    `source` is where pip took it from, or a requirement. `is_ours`: it was built from this project, under either name.
    """

    name: str
    version: str
    is_ours: bool
    is_editable: bool
    source: str
    files: dict[Path, str]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def num_in_place(self) -> int:
        """How many of its files are there, unchanged."""
        return sum(_digest(path) == wanted for path, wanted in self.files.items())


def installed(path: Sequence[str] | None = None) -> list[Installed]:
    """The distributions on `path` (default: sys.path) that bring the package, this project's first."""
    found: dict[str, Installed] = {}
    for one in metadata.distributions(path=list(sys.path if path is None else path)):
        name = re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower()
        if name in (OURS, OTHER):
            found.setdefault(name, _read(one, name))
    return sorted(found.values(), key=lambda one: not one.is_ours)


def _read(one: metadata.Distribution, name: str) -> Installed:
    # Not `one.files`: since Python 3.12 it leaves out what is missing, which is what is looked for.
    record = list(csv.reader((one.read_text("RECORD") or "").splitlines()))
    direct = json.loads(one.read_text("direct_url.json") or "{}")
    editable = bool(direct.get("dir_info", {}).get("editable"))
    url = direct.get("url", "")
    return Installed(
        name=one.metadata["Name"],
        version=one.version,
        is_ours=name == OURS or any(line[0] == MARK for line in record),
        is_editable=editable,
        source=url.removeprefix("file://") if url else f"{one.metadata['Name']}=={one.version}",
        files={
            Path(str(one.locate_file(file))): digest.removeprefix("sha256=")
            for file, digest, _ in record
            if file.startswith(f"{PACKAGE}/") and digest and not file.endswith(".pyc")
        },
    )


def _digest(path: Path) -> str:
    try:
        return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")
    except OSError:
        return ""


def folder(path: Sequence[str] | None = None) -> Path | None:
    """Where Python finds the package, without importing it; None where there is none."""
    spec = PathFinder.find_spec(PACKAGE, None if path is None else list(path))
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def trouble(path: Sequence[str] | None = None) -> tuple[str, str] | None:
    """What is wrong, and the command that mends it; None where nothing is."""
    found = installed(path)
    ours = [one for one in found if one.is_ours]
    others = [one for one in found if not one.is_ours]
    if ours and others:
        return _both(ours[0], others[0], folder(path))
    if len(ours) > 1:
        return f"{ours[0]} and {ours[1]} are both this project, and share their files", _pip(ours[1:], None)
    for one in ours:
        missing = len(one.files) - one.num_in_place()
        if missing:
            return f"{missing} of the {len(one.files)} files of {one} are missing or changed", _pip([], one)
    return None


def _both(ours: Installed, other: Installed, place: Path | None) -> tuple[str, str]:
    if ours.is_editable:
        what = f"{ours} is installed as editable from {ours.source}; Python takes the package from {place}"
        return f"{what}, and {other} is installed too", _pip([other], None)
    mine, its = ours.num_in_place(), other.num_in_place()
    first, second = (other, ours) if mine == len(ours.files) else (ours, other)
    what = (
        f"{ours} and {other} are installed over each other in {place}: {mine} of {len(ours.files)} files are of "
        f"{ours.name}, {its} of {len(other.files)} of {other.name}. The files of {second.name} win"
    )
    return f"{what}; to remove either breaks the other" if first is other else what, _pip([other], ours)


def _pip(removed: Sequence[Installed], restored: Installed | None) -> str:
    pip = f"{shlex.quote(sys.executable)} -m pip"
    steps = [f"{pip} uninstall -y {' '.join(one.name for one in removed)}"] if removed else []
    if restored is not None:
        steps.append(f"{pip} install --force-reinstall --no-deps {shlex.quote(restored.source)}")
    return " && ".join(steps)


def explanation() -> str | None:
    """One text for an error or a warning, None where nothing is wrong."""
    found = trouble()
    return None if found is None else f"{found[0]}. To mend it: {found[1]}"


def report() -> int:
    """Print what is installed and what is wrong; 1 where something is, else 0."""
    for one in installed():
        place = (
            f"editable, {one.source}" if one.is_editable else f"{one.num_in_place()} of {len(one.files)} files in place"
        )
        print(f"{one}: {place}")
    print(f"Python takes {PACKAGE} from {folder()}")
    found = trouble()
    if found is None:
        print("nothing is wrong")
        return 0
    print(f"{found[0]}.\nTo mend it:\n  {found[1]}")
    return 1


def main() -> int:
    """The command `tq`: `doctor` here, all others in the package."""
    if sys.argv[1:] == ["doctor"]:
        return report()
    try:
        from transfer_queue.cli import main as command
    except ImportError as error:
        text = explanation()
        if text is None:
            raise
        print(f"tq: {PACKAGE} cannot be imported ({error}). {text}", file=sys.stderr)
        return 1
    command()
    return 0


if __name__ == "__main__":
    sys.exit(main())
