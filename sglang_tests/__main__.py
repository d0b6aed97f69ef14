"""`python -m sglang_tests [--python EXISTING] [pytest arguments]`: the tests, in an environment that is made first.

It needs Python 3.11: torch's CPU wheel of 2.13.0 is there for that one only.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.server_tests import run


def _made() -> Path:
    from sglang_tests.environment import made  # reads TOML, which Python 3.10 cannot

    return made()


if __name__ == "__main__":
    sys.exit(run("sglang_tests", __doc__, _made, "SGLANG_", sys.argv[1:]))
