"""A column of a batch as its rows, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase


def rows_of(column: Any) -> list[Any]:
    """The values of a column, one for each row, each as it was put."""
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    if isinstance(column, (NonTensorStack, NonTensorData)):
        return _values(column)
    return list(column.unbind(0)) if isinstance(column, TensorDictBase) else list(column)


def _values(column: Any) -> list[Any]:
    """Of a NonTensorData, data of one item per row is a column, which is how tensordict wraps arrays; anything else is
    one value for all rows. Indexing it, as tensordict does, gives all of its data for every row."""
    if isinstance(column, NonTensorStack):
        return [_datum(item) for item in column.tensordicts]
    values: list[Any] = _spread(_datum(column), column.batch_size)
    return values


def _datum(item: Any) -> Any:
    if type(item) is NonTensorData:
        content: Any = item
        return content._non_tensordict["data"]  # the attribute access costs ten times as much
    return item.tolist() if isinstance(item, NonTensorStack) else item


def _spread(data: Any, shape: Sequence[int]) -> Any:
    """One value for every place of `shape`, in nested lists: the items of `data` where it has as many, else `data`."""
    if not shape:
        return data
    is_many = isinstance(data, (list, tuple)) or (isinstance(data, (np.ndarray, torch.Tensor)) and data.ndim)
    if is_many and len(data) == shape[0]:
        return [_spread(item, shape[1:]) for item in data]
    return [_spread(data, shape[1:])] * shape[0]
