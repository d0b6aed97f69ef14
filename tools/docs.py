"""Builds the documentation as one site, in `site/`: `python tools/docs.py`, or `python tools/docs.py serve`.

Needs nothing but Python 3.11: the packages of the extra `docs` are installed into `.venv-docs`. The package itself is
not: the reference is read from its source. Every warning is an error, a link to nowhere among them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.environments import Environment, EnvironmentUnavailable, made  # noqa: E402

COMMANDS = {"build": ["build", "--strict"], "serve": ["serve", "--strict"]}


def environment() -> Environment:
    """The environment with the packages of the extra `docs`."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["project"]["optional-dependencies"]["docs"]
    return Environment(folder=ROOT / ".venv-docs", steps=(tuple(packages),), versions=(("mkdocs", ""),))


def main(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "build"
    if command not in COMMANDS:
        print(f"{command!r} is not one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        python = made(environment(), ROOT / ".venv-docs" / "install.log")
    except EnvironmentUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [python, "-m", "mkdocs", *COMMANDS[command], *arguments[1:]], cwd=ROOT, env=variables
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
