"""torch dtypes by name, and as NumPy has them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from transfer_queue.errors import InvalidInput, ProtocolError, UnsupportedValue

_BY_NAME = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
_BY_DTYPE = {dtype: name for name, dtype in _BY_NAME.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name `torch_dtype` knows, or `UnsupportedValue` for the dtypes of quantized tensors."""
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise UnsupportedValue(f"{dtype} cannot be stored: it describes quantized tensors") from None


def dtype_called(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype given as itself or by name: "float32", "torch.float32". Raises `InvalidInput`."""
    found = _BY_NAME.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise InvalidInput(f'expected a dtype of torch, or its name as "float32"; got {dtype!r}')
    return found


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called `name`, or `ProtocolError` where this torch has none."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ProtocolError(f"this torch has no dtype {name!r}") from None


@functools.cache
def lying_as(dtype: torch.dtype) -> tuple[np.dtype[Any], bool]:
    """The dtype of arrays over the same bytes, and whether tensors over these have `dtype`: else they are to be viewed
    as one, as those of bfloat16, which NumPy lacks."""
    try:
        plain = np.dtype(str(dtype).removeprefix("torch."))
        return plain, torch.from_numpy(np.empty(0, plain)).dtype == dtype
    except TypeError:
        return np.dtype(f"i{dtype.itemsize}"), False
