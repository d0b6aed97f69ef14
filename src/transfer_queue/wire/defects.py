"""What becomes of an error that nobody foresaw while a request was handled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from transfer_queue.errors import InternalError, TransferQueueError
from transfer_queue.wire import messages as m

log = logging.getLogger("transfer_queue.server")
T = TypeVar("T")


def answered(rid: int, what: str, make: Callable[[], T]) -> T | m.Failed:
    """What `make` returns, or the answer that request `rid` failed. Anything untyped is a defect: it ends one request
    and not the server. The log says where it was, and the caller that there was one."""
    try:
        return make()
    except TransferQueueError as error:
        return m.Failed(rid, error.code, str(error))
    except Exception:
        log.exception("%s failed", what)
        return m.Failed(rid, InternalError.code, f"{what} failed; see the server's log")
