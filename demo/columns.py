"""Ragged columns: padded tensors to jagged ones and back, and their size."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor


def ragged(padded: Tensor, lengths: Tensor) -> Tensor:
    """A jagged column of the first `lengths[i]` values of each row of a (B, R, ...) tensor."""
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(padded[inside(lengths, padded.shape[1])], offsets)


def inside(lengths: Tensor, width: int) -> Tensor:
    """(B, width) bools: which positions a ragged column of these lengths fills."""
    return torch.arange(width) < lengths[:, None]


def row_lengths(column: Tensor) -> Tensor:
    """(B,) lengths of the rows of a jagged column."""
    offsets: Tensor = column.offsets()  # type: ignore[attr-defined]  # nested tensors have it
    return offsets.diff()


def padded(column: Tensor, width: int, fill: float = 0) -> Tensor:
    """(B, width, ...): the rows of a jagged column, the rest is `fill`."""
    lengths = row_lengths(column)
    values = column.values()
    result = torch.full((len(lengths), width, *values.shape[1:]), fill, dtype=values.dtype)
    result[inside(lengths, width)] = values
    return result


def payload_nbytes(data: TensorDict) -> int:
    """Bytes of all values of all columns, without offsets."""
    return sum(column.nbytes for column in data.values())
