"""What one rank fetched, for all ranks of a model-parallel group: tensor, pipeline and context parallel ranks train on
the same rows.

    fetch_together(bridge, group, ...)
        first rank ──fetch──▶ service
        first rank ──one broadcast of all──▶ the others                           how="broadcast"
        first rank ──broadcast of the row numbers──▶ the others ──read──▶ service     how="read"

What is broadcast are the bytes of the values (`codec.packed`), never a pickle. Where the first rank fails, the others
raise the same error: nobody waits for a broadcast that does not come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from tensordict import NonTensorStack

from transfer_queue.bridge.bridge import Fetched, RolloutBridge
from transfer_queue.bridge.conversion import Form, read_columns
from transfer_queue.codec.packed import batch_decode_from, batch_encode_into
from transfer_queue.codec.slices import Slice
from transfer_queue.errors import InternalError, InvalidInput, TransferQueueError, error_from_code
from transfer_queue.metadata import BatchMeta


def fetch_together(
    bridge: RolloutBridge,
    group: dist.ProcessGroup | None,
    partition_id: str,
    task: str,
    dp_rank: int,
    *,
    dp_size: int | None = None,
    columns: Iterable[str] | None = None,
    form: Form = "tensors",
    slices: Mapping[str, Slice] | None = None,
    how: Literal["broadcast", "read"] = "broadcast",
    timeout_s: float | None = None,
) -> Fetched:
    """As `RolloutBridge.fetch`, for every rank of `group` (None: all); all of them call it, with the same arguments.

    "broadcast": the first rank fetches, and the others receive its columns as they are stored; on other hosts, and
    where the group is faster than the service. "read": the others read from the service themselves; they may differ in
    `slices` then, and ranks of one host share its memory. Only the first rank takes the rows. Blocks for the group.
    Raises what `fetch` raised, on all ranks.
    """
    if how not in ("broadcast", "read"):
        raise InvalidInput(f'how is "broadcast" or "read", got {how!r}')
    wanted = None if columns is None else list(columns)
    if dist.get_rank(group) == 0:
        fetched, content = _fetched(
            bridge, group, how, partition_id, task, dp_rank, dp_size=dp_size, columns=wanted, slices=slices,
            timeout_s=timeout_s,
        )  # fmt: skip
        return Fetched(fetched.meta, read_columns(content, bridge.schema, form), fetched.schedule)
    said = _receive(group)
    if "error" in said:
        raise error_from_code(said["error"], said["text"])
    meta = BatchMeta._build(said["rows"], partition_id, {key: {} for key in said["fields"]}, True, None, said["life"])
    content = said["columns"] if how == "broadcast" else bridge.read(meta, said["fields"], slices)
    return Fetched(meta, read_columns(content, bridge.schema, form), said["schedule"])


def _fetched(
    bridge: RolloutBridge, group: dist.ProcessGroup | None, how: str, *args: Any, **more: Any
) -> tuple[Fetched, dict[str, Any]]:
    """What the first rank has fetched, which it tells the others."""
    try:
        fetched, content = bridge.fetch_stored(*args, **more)
    except Exception as error:
        code = error.code if isinstance(error, TransferQueueError) else InternalError.code
        _send(group, {"error": code, "text": str(error)})
        raise
    said = {
        "rows": np.ascontiguousarray(fetched.meta.indexes),
        "life": fetched.meta.service_id,
        "fields": list(content),
        "schedule": fetched.schedule,
        "columns": {name: _plain(value) for name, value in content.items()} if how == "broadcast" else None,
    }
    _send(group, said)
    return fetched, content


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, NonTensorStack) else value


def _send(group: dist.ProcessGroup | None, value: Any) -> None:
    buffers, _ = batch_encode_into([value], lambda sizes: [torch.empty(sizes[0], dtype=torch.uint8, device="cpu")])
    _broadcast(torch.tensor([len(buffers[0])], device="cpu"), group)
    _broadcast(buffers[0], group)


def _receive(group: dist.ProcessGroup | None) -> Any:
    size = _broadcast(torch.zeros(1, dtype=torch.int64, device="cpu"), group)
    data = _broadcast(torch.empty(int(size[0]), dtype=torch.uint8, device="cpu"), group)
    return batch_decode_from([data], copy=False)[0]


def _broadcast(data: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """`data` of the group's first rank. A group that takes tensors of a GPU only gets them there."""
    first = dist.get_global_rank(group, 0) if group is not None else 0
    if dist.get_backend(group) != "nccl":
        dist.broadcast(data, first, group=group)
        return data
    there = data.cuda()
    dist.broadcast(there, first, group=group)
    return data.copy_(there)
