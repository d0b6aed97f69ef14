"""Faults of the system as typed errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transfer_queue.errors import InternalError, ServiceUnavailable, TransferQueueError

MAX_TEXT = 4096  # characters of a fault that is told: several are put into one


@contextmanager
def system_faults() -> Iterator[None]:
    """What the system raises within, or in a function that this decorates, is raised as one of our errors."""
    try:
        yield
    except TransferQueueError:
        raise
    except OSError as error:
        raise as_typed(error) from error


def as_typed(error: Exception) -> TransferQueueError:
    """The error itself, or one of ours that says the same."""
    if isinstance(error, TransferQueueError):
        return error
    if isinstance(error, OSError):
        return ServiceUnavailable(str(error))
    return InternalError(repr(error))


def cut_text(text: str) -> str:
    """Its beginning and its end, where it is too long for a message (`protocol.MAX_HEADER_NBYTES`), as text that can be
    encoded: whoever waits for a fault is to hear of it."""
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[: MAX_TEXT // 2]} ... {len(text) - MAX_TEXT} characters ... {text[-MAX_TEXT // 2 :]}"
