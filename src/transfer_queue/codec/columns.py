"""A column of a batch as its rows, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase


def rows_of(column: Any, rows: int | None = None) -> list[Any]:
    """The values of a column, one for each row, each as it was put. `rows`: how many a NonTensorData without batch size
    is for, as a mapping may hold one."""
    if isinstance(column, torch.Tensor):
        return list(column.unbind(0))  # memory-mapped ones of tensordict want the dimension
    if isinstance(column, (NonTensorStack, NonTensorData)):
        return _values(column, rows)
    return list(column.unbind(0)) if isinstance(column, TensorDictBase) else list(column)


def unsized(column: Any) -> bool:
    """Whether it is a NonTensorData that does not say for how many rows it is."""
    return isinstance(column, NonTensorData) and not column.batch_size


def items_in(column: NonTensorData) -> int | None:
    """How many rows the data of an unsized column are for where they are a column; None for what is one value."""
    data = _datum(column)
    return len(data) if _is_many(data) else None


def _values(column: Any, rows: int | None) -> list[Any]:
    """Of a NonTensorData, data of one item per row is a column, which is how tensordict wraps arrays; anything else is
    one value for all rows. Indexing it, as tensordict does, gives all of its data for every row."""
    if isinstance(column, NonTensorStack):
        return [_datum(item) for item in column.tensordicts]
    shape = column.batch_size or (() if rows is None else (rows,))
    values: list[Any] = _spread(_datum(column), shape)
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
    if _is_many(data) and len(data) == shape[0]:
        return [_spread(item, shape[1:]) for item in data]
    return [_spread(data, shape[1:])] * shape[0]


def _is_many(data: Any) -> bool:
    return isinstance(data, (list, tuple)) or (isinstance(data, (np.ndarray, torch.Tensor)) and data.ndim > 0)
