"""Runs the Python blocks of a Markdown file in order, as one program, and compares what they print.

A block ```python runs; a block ```text right behind it is its expected output. Blocks marked otherwise are not run.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main(paths: list[str]) -> int:
    failed = 0
    for path in paths:
        blocks = BLOCK.findall(Path(path).read_text(encoding="utf-8"))
        names: dict[str, object] = {"__name__": "__readme__"}
        for (language, code), following in zip(blocks, [*blocks[1:], ("", "")], strict=True):
            if language != "python":
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, path, "exec"), names)
            if following[0] == "text" and printed.getvalue().strip() != following[1].strip():
                print(f"{path}: expected\n{following[1]}\ngot\n{printed.getvalue()}")
                failed += 1
        print(f"{path}: {sum(language == 'python' for language, _ in blocks)} blocks run")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
