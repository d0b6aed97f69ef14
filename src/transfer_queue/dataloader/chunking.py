"""Splitting a batch and its metadata into micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from transfer_queue.client.describing import num_repeated, warn_repeated
from transfer_queue.client.transfer.read import new_tensordict
from transfer_queue.codec.nested import Offsets, jagged, strided
from transfer_queue.errors import InvalidInput, UnsupportedValue
from transfer_queue.metadata import BatchMeta


def chunk_batch_fn(td: TensorDict, batch_meta: BatchMeta, micro_batch_size: int = 1) -> list[tuple[Any, BatchMeta]]:
    """(rows, their metadata) of each `micro_batch_size` rows; the last may have fewer.

    Of a batch with repeated rows at its end (`batch_meta.extra_info["repeated"]`), every data-parallel rank gets the
    same number of parts: they are made without the repeated rows where these suffice, then of about the same size.
    Dense and jagged tensors are views of those of `td`. Raises `UnsupportedValue` (a TypeError) unless `td` is a
    TensorDict, `InvalidInput` (a ValueError) when the size is not a positive int or exceeds the rows, or `td` and
    `batch_meta` differ in rows.
    """
    if not isinstance(td, TensorDict):
        raise UnsupportedValue(f"Expected TensorDict, got {type(td).__name__}")
    if not isinstance(micro_batch_size, int) or isinstance(micro_batch_size, bool) or micro_batch_size <= 0:
        raise InvalidInput(f"micro_batch_size must be a positive integer, got {micro_batch_size}")
    if not td.batch_size:
        raise InvalidInput("Input TensorDict must have non-empty batch_size")
    total = td.batch_size[0]
    if micro_batch_size > total:
        raise InvalidInput(f"micro_batch_size ({micro_batch_size}) exceeds total batch size ({total})")
    if len(batch_meta) != total:
        raise InvalidInput(f"{total} rows of data with {len(batch_meta)} rows of metadata")
    if micro_batch_size == total and not num_repeated(batch_meta):  # not `td.copy`, which makes tuples of torch.Size
        whole = {key: value if isinstance(value, torch.Tensor) else value[:total] for key, value in td.items()}
        return [(new_tensordict(whole, total), batch_meta[:])]
    columns, own = dict(td.items()), total - _repeated_at_end(batch_meta)
    found = []
    for start, stop in bounds(total, own, micro_batch_size):
        part = {key: _rows(value, start, stop) for key, value in columns.items()}
        meta = batch_meta[start:stop]
        warn_repeated(meta)
        found.append((new_tensordict(part, stop - start), meta))
    return found


def _repeated_at_end(meta: BatchMeta) -> int:
    """How many of the rows at the end are repeated; joined metas have some before other rows, too."""
    repeated = meta._repeated_rows()
    return 0 if repeated is None else int(np.logical_and.accumulate(repeated[::-1]).sum())


def bounds(total: int, own: int, micro_batch_size: int) -> list[tuple[int, int]]:
    """(first row, row after the last) of each micro-batch of `total` rows, of which all but `own` may be left out.

    Their number depends on `total` alone.
    """
    count = -(-total // micro_batch_size)
    used = max(own, count)  # so that no part is empty
    if -(-used // micro_batch_size) == count:
        starts = list(range(0, used, micro_batch_size))
    else:
        starts = [used * part // count for part in range(count)]
    return list(zip(starts, [*starts[1:], used], strict=True))


def _rows(whole: Any, start: int, stop: int) -> Any:
    """Some rows of a column; a view unless it is a nested tensor that is not jagged, or has gaps."""
    if not getattr(whole, "is_nested", False):
        return whole[start:stop]
    if whole.layout is not torch.jagged:
        rows = whole.unbind(0)[start:stop]
        sizes = torch.tensor([tuple(row.shape) for row in rows], dtype=torch.int64, device="cpu")
        return strided(torch.cat([row.reshape(-1) for row in rows]), sizes)  # torch's own takes some dtypes only
    if whole._lengths is not None:
        return torch.nested.as_nested_tensor(list(whole.unbind(0)[start:stop]), layout=torch.jagged)
    offsets = whole._offsets[start : stop + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    values = whole._values.narrow(whole._ragged_idx - 1, first, last - first)
    return jagged(values, Offsets.of((offsets - first).numpy()), whole._ragged_idx)
