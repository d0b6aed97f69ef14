"""Fails where a file has more than 600 lines or a function more than 60: the concept is then two concepts."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

MAX_FILE, MAX_FUNCTION = 600, 60
FOLDERS = ("transfer_queue", "tests", "demo", "examples", "bench", "tools", "frameworks", "vllm_tests")


def oversized(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    found = []
    if text.count("\n") > MAX_FILE:
        found.append(f"{path}: {text.count(chr(10))} lines, at most {MAX_FILE}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION:
                found.append(f"{path}:{node.lineno} {node.name}: {lines} lines, at most {MAX_FUNCTION}")
    return found


def main() -> int:
    files = [path for folder in FOLDERS for path in sorted(Path(folder).rglob("*.py"))]
    found = [line for path in files for line in oversized(path)]
    print("\n".join(found) or f"sizes: {len(files)} files are fine")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
