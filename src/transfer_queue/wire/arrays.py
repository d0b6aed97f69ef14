"""Arrays of numbers as they travel: little-endian int64, one after the other; in a sampling_config of any dtype."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer_queue.errors import InvalidInput, ProtocolError

Numbers = NDArray[np.int64]
ARRAY = 1  # the code of msgpack's extension
NUMERIC = "biuf"  # kinds of dtype that have nothing but numbers in their bytes
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, list[int], bytes]).decode


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


def pack_array(array: NDArray[Any]) -> msgspec.msgpack.Ext:
    """An array of numbers as a value of msgpack; its dtype has one of the kinds `NUMERIC`."""
    return msgspec.msgpack.Ext(ARRAY, _encode((array.dtype.str, array.shape, array.tobytes())))


def unpack_arrays(value: Any) -> Any:
    """`value`, decoded from msgpack, with arrays of its own where `pack_array` was used. Raises `InvalidInput`."""
    if isinstance(value, msgspec.msgpack.Ext):
        return _unpack_array(value)
    if isinstance(value, list):
        return [unpack_arrays(item) for item in value]
    if isinstance(value, dict):
        return {key: unpack_arrays(item) for key, item in value.items()}
    return value


def _unpack_array(packed: msgspec.msgpack.Ext) -> NDArray[Any]:
    try:
        name, shape, data = _decode(packed.data)
        dtype = np.dtype(name)
        if packed.code != ARRAY or dtype.kind not in NUMERIC or min(shape, default=0) < 0:
            raise ValueError(f"code {packed.code}, dtype {dtype}, shape {shape}")
        if math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"{len(data)} bytes for {shape} of {dtype}")
        return np.frombuffer(data, dtype).reshape(shape).copy()
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise InvalidInput(f"sampling_config: not an array: {error}") from None
