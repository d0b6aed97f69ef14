"""What the service remarks on a call that did as it was told, for the log of the one who called."""

from __future__ import annotations

import logging

log = logging.getLogger("transfer_queue")

MAX_SAID = 1024
_said: dict[str, None] = {}


def warn(what: str, note: str) -> None:
    """Log a remark; "" is none."""
    if note:
        log.warning("%s: %s", what, note)


def warn_once(what: str, note: str) -> None:
    """Log a remark that this process has not logged yet: programs repeat the call in every step."""
    if note and note not in _said:
        _said[note] = None
        while len(_said) > MAX_SAID:
            _said.pop(next(iter(_said)), None)
        log.warning("%s: %s", what, note)
