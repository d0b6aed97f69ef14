"""What calls of this process wait for, in its log."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("transfer_queue")

SAME_S = 1.0  # a server tells all that are due within moments of each other

_said: dict[tuple[bytes, str], float] = {}  # when, of what was said just now; no lock, which a fork would copy locked


def say(service: bytes, text: str) -> None:
    """Log what a service (the life of it) says that a call waits for. Many that wait for the same, as the tasks of an
    event loop do, are told so at one time: that is one line."""
    now = time.monotonic()
    for one, said in list(_said.items()):
        if now - said > SAME_S:
            _said.pop(one, None)
    if _said.setdefault((service, text), now) is now:
        log.warning("%s", text)
