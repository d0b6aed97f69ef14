"""torch dtypes by name."""

from __future__ import annotations

import torch

from transfer_queue.errors import ProtocolError

_BY_NAME = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
_BY_DTYPE = {dtype: name for name, dtype in _BY_NAME.items()}


def dtype_name(dtype: torch.dtype) -> str:
    return _BY_DTYPE.get(dtype) or str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called `name`, or `ProtocolError` where this torch has none."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ProtocolError(f"this torch has no dtype {name!r}") from None
