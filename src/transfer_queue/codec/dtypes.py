"""torch dtypes by name."""

from __future__ import annotations

import torch

from transfer_queue.errors import ProtocolError, UnsupportedValue

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


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called `name`, or `ProtocolError` where this torch has none."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ProtocolError(f"this torch has no dtype {name!r}") from None
