"""Memory as NumPy arrays: what keeps it alive, and where it lies."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
PAGE = 4096


class Anchor:
    """Keeps `owner` alive for the arrays and tensors over its memory. Watch its end by a weak reference."""

    __slots__ = ("__array_interface__", "__weakref__", "_owner")

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.__array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
        self._owner = owner

    def array(self) -> Bytes:
        return np.asarray(self)


class ReturnedMemory(Anchor):
    """Calls `released` when the last array or tensor is gone.

    `released` may run in any thread and inside the garbage collector: it must only hand a note to someone else. An
    interrupt from the keyboard can keep it from running.
    """

    __slots__ = ("_released",)

    def __init__(self, address: int, nbytes: int, owner: object, released: Callable[[], None]) -> None:
        super().__init__(address, nbytes, owner)
        self._released = released

    def __del__(self) -> None:
        self._released()


def address_of(memory: Bytes | memoryview | bytearray | mmap.mmap) -> int:
    return int(np.asarray(memory).__array_interface__["data"][0])
