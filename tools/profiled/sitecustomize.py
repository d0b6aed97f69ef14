"""Every interpreter that has this folder on its path notes each call of a function of the package: time and place.

`entered.py` puts it there, for a client and the server that the client starts. The clock is the machine's, so that the
notes of two processes can be compared.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType

PACKAGE = os.environ.get("TQ_HOUSE_PACKAGE", "") + os.sep
NOTES = os.environ.get("TQ_HOUSE_NOTES", "")


def _note(frame: FrameType, event: str, _: object) -> None:
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(PACKAGE):
        os.write(_file, f"{time.monotonic()}\t{code.co_firstlineno}\t{code.co_filename}\n".encode())


if NOTES:
    _file = os.open(NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    threading.setprofile(_note)
    sys.setprofile(_note)
