"""`python -m vllm_tests [--python EXISTING] [pytest arguments]`: the tests, in an environment that is made first.

It needs Python 3.11: the CPU build of vLLM wants torch's CPU wheel of 2.13.0, which is there for that one only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.environments import EnvironmentUnavailable

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str]) -> int:
    """pytest's exit status; 1 when there is no environment."""
    parser = argparse.ArgumentParser(prog="python -m vllm_tests", description=__doc__)
    parser.add_argument("--python", type=Path, help="an interpreter that has vLLM and this package, instead")
    asked, rest = parser.parse_known_args(arguments)
    try:
        python = asked.python or _made()
    except EnvironmentUnavailable as error:
        print(f"vllm_tests: {error}", file=sys.stderr)
        return 1
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "TQ_", "VLLM_"))}
    tests = [one for one in rest if one.startswith("vllm_tests")] or ["vllm_tests"]
    more = [one for one in rest if one not in tests]
    command = [python, "-m", "pytest", "-c", "vllm_tests/pytest.ini", "--rootdir", ROOT, *tests, *more]
    return subprocess.run(command, cwd=ROOT, env=kept, check=False).returncode


def _made() -> Path:
    if sys.version_info[:2] != (3, 11):
        raise EnvironmentUnavailable(f"needs Python 3.11 (make PYTHON=python3.11 test-vllm), this is {sys.version}")
    from vllm_tests.environment import made

    return made()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
