"""Where the repository lies, and with which PYTHONPATH children of tests find the package and what tests share."""

from __future__ import annotations

import os
from pathlib import Path

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parent.parent
SOURCES = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
SOURCES_AND_HELPERS = os.pathsep.join((SOURCES, str(HELPERS)))
