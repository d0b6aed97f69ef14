"""Arrays of numbers as they travel: little-endian int64, one after the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import InvalidInput, ProtocolError

Numbers = NDArray[np.int64]


def numbers_of(data: bytes | memoryview, width: int = 0) -> Numbers:
    """The numbers in `data`, read-only, as rows of `width` where that is given.

    Raises `ProtocolError` for a length that is not of whole numbers, or of whole rows.
    """
    if len(data) % (8 * max(1, width)):
        raise ProtocolError(f"an array of {len(data)} bytes")
    found = np.frombuffer(data, np.int64)
    return found.reshape(-1, width) if width else found


def indexes_of(data: bytes) -> Numbers:
    """The row indexes that a caller's request names; a wrong length is `InvalidInput`."""
    if len(data) % 8:
        raise InvalidInput(f"row indexes of {len(data)} bytes")
    return numbers_of(data)
