"""Build this package as a wheel under the name TransferQueue, for whatever requires that: `verl[verl-core]`, say.

`python tools/wheel_compat.py [--version 0.1.11] [--out dist]`. The version is the given one with the local part
`+tq.VERSION` (PEP 440): `==0.1.11`, `>=0.1.10` and `<0.2` all take it, and no package index accepts it by mistake.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME, VERSION = "TransferQueue", "0.1.11"


def write_tree(folder: Path, version: str) -> str:
    """What the wheel is built from, in `folder`: these sources with other metadata. Returns the version with its local
    part."""
    own = (ROOT / "src" / "transfer_queue" / "version" / "version").read_text(encoding="utf-8").strip()
    full = f"{version}+tq.{own}"
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    changes = {
        r'^name = "transfer-queue"$': f'name = "{NAME}"',
        r'^dynamic = \["version"\]$': f'version = "{full}"',
        r"^\[tool\.hatch\.version\]\n(?:.+\n)+": "",
    }
    for pattern, replacement in changes.items():
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if count != 1:
            raise SystemExit(f"wheel-compat: pyproject.toml has {count} of {pattern}")
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    return full


def main() -> int:
    """Build it and say what it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", default=VERSION, help=f"the release to stand for (default: {VERSION})")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheel goes (default: dist)")
    asked = parser.parse_args()
    if not re.fullmatch(r"\d+(\.\d+)+", asked.version):
        parser.error(f"--version: {asked.version!r} is not a release such as {VERSION}")
    with tempfile.TemporaryDirectory(prefix="tq-wheel-") as folder:
        full = write_tree(Path(folder), asked.version)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(asked.out), folder]
        status = subprocess.run(command, check=False).returncode
    if status == 0:
        print(
            f"{NAME} {full} is in {asked.out}. Install it with: pip install --no-deps {asked.out}/transferqueue-*.whl"
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
