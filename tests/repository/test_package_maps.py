"""The docstring of a package maps its folder: a line for each module and each package in it, and for nothing else.

A line of a map is a name, or several with commas, then two spaces or more and what it is for; before it may stand the
lines of a tree. Names of classes and functions beside modules begin with a capital or belong into sentences.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import transfer_queue

ROOT = Path(transfer_queue.__file__).parent
LINE = re.compile(r"^[\s│├└─]*([a-z_][a-z0-9_]*(?:, [a-z_][a-z0-9_]*)*)\s{2,}\S")


def packages() -> list[str]:
    """Every package, by its path below the root; the root is "."."""
    return [path.parent.relative_to(ROOT).as_posix() for path in sorted(ROOT.rglob("__init__.py"))]


def mapped(package: str) -> list[str]:
    """The names on the lines of the map, each as often as it stands there."""
    text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))) or ""
    return [name for line in text.splitlines() for found in LINE.findall(line) for name in found.split(", ")]


def present(package: str) -> list[str]:
    """The modules and packages of the folder; `__main__` is what runs it, no part of it."""
    folder = ROOT / package
    modules = [path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")]
    return modules + [path.parent.name for path in folder.glob("*/__init__.py")]


@pytest.mark.parametrize("package", packages())
def test_a_package_maps_its_folder(package: str) -> None:
    is_true = sorted(mapped(package)) == sorted(present(package))
    missing, foreign = set(present(package)) - set(mapped(package)), set(mapped(package)) - set(present(package))
    assert is_true, f"not on the map: {sorted(missing)}; on it, but not there: {sorted(foreign)}; or named twice"
