"""Faults of the system as typed errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transfer_queue.errors import InternalError, ServiceUnavailable, TransferQueueError


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
