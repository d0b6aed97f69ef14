"""What one rank fetched, for all ranks of a model-parallel group: tensor, pipeline and context parallel ranks train on
the same rows.

    fetch_together(bridge, group, ...)
        first rank ──fetch──▶ service
        first rank ──one broadcast of all──▶ the others                               how="broadcast"
        first rank ──broadcast of the row numbers──▶ the others ──read──▶ service     how="read"

What is broadcast are the bytes of the values (`codec.packed`), never a pickle. Where the first rank fails, the others
raise the same error: nobody waits for a broadcast that does not come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from tensordict import NonTensorStack

from transfer_queue.bridge.bridge import Fetched, RolloutBridge
from transfer_queue.bridge.conversion import Form, read_columns
from transfer_queue.codec.packed import batch_decode_from, batch_encode_into
from transfer_queue.codec.slices import Slice
from transfer_queue.errors import InternalError, InvalidInput, error_from_code
from transfer_queue.metadata import BatchMeta

Group: TypeAlias = "dist.ProcessGroup | None"


def fetch_together(
    bridge: RolloutBridge,
    group: Group | Sequence[Group],
    partition_id: str,
    task: str,
    dp_rank: int = 0,
    dp_size: int = 1,
    *,
    columns: Iterable[str] | None = None,
    others: bool | None = None,
    form: Form = "tensors",
    slices: Mapping[str, Slice] | None = None,
    how: Literal["auto", "broadcast", "read"] = "auto",
    lease_s: float | None = None,
    timeout_s: float | None = None,
) -> Fetched:
    """As `RolloutBridge.fetch`, for every rank of `group` (None: all); all of them call it, with the same arguments.
    Where several groups make up the model-parallel ranks, as Megatron's for context, tensors and pipeline: all of them,
    in one order; the rank that is the first of each fetches.

    "broadcast": the first rank fetches, and the others receive its columns as they are stored. "read": the others read
    from the service themselves; they may differ in `slices` then, and ranks of one host share its memory. "auto":
    "read" where the service has one host, else "broadcast". The first rank decides. Only it takes the rows, or has them
    on a lease (`meta.lease` is 0 on the others): it calls `ack`. Blocks for the group. Raises what `fetch` raised, on
    all ranks.
    """
    if how not in ("auto", "broadcast", "read"):
        raise InvalidInput(f'how is "auto", "broadcast" or "read", got {how!r}')
    groups: list[Group] = list(group) if isinstance(group, (list, tuple)) else [group]  # type: ignore[list-item]
    wanted = None if columns is None else list(columns)
    fetched: Fetched | None = None
    packed: torch.Tensor | None = None
    if all(dist.get_rank(one) == 0 for one in groups):
        has_others = any(dist.get_world_size(one) > 1 for one in groups)
        said: list[torch.Tensor] = []

        def convert(fetched: Fetched, content: dict[str, Any]) -> None:
            fetched.columns = read_columns(content, bridge.schema, form)
            if has_others:
                said.append(_packed(_said(fetched, content, _reads(bridge, how))))

        try:
            fetched = bridge.fetch_stored(
                partition_id, task, dp_rank, dp_size, convert, columns=wanted, others=others, slices=slices,
                lease_s=lease_s, timeout_s=timeout_s,
            )  # fmt: skip
            packed = said[0] if said else None
        except BaseException as error:
            code = getattr(error, "code", InternalError.code)
            _pass_on(_packed({"error": code, "text": str(error)}), groups)
            raise
    packed = _pass_on(packed, groups)
    if fetched is None:
        told = _unpacked(packed)
        fields: dict[str, dict[str, Any]] = {name: {} for name in told["fields"]}
        fetched = Fetched(BatchMeta._build(told["rows"], partition_id, fields, True, None, told["life"]), {})
        fetched.schedule = told["schedule"]
        content = told["columns"] or bridge.read(fetched.meta, told["fields"], slices)
        fetched.columns = read_columns(content, bridge.schema, form)
    return fetched


def _reads(bridge: RolloutBridge, how: str) -> bool:
    """Whether the others read: where all rows of the service lie on one host, they share its memory."""
    return how == "read" or (how == "auto" and not bridge.client.stats()["units"])


def _said(fetched: Fetched, content: Mapping[str, Any], reads: bool) -> dict[str, Any]:
    """What the first rank tells the others."""
    return {
        "rows": np.ascontiguousarray(fetched.meta.indexes),
        "life": fetched.meta.service_id,
        "fields": list(content),
        "schedule": fetched.schedule,
        "columns": None if reads else {name: _plain(value) for name, value in content.items()},
    }


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, NonTensorStack) else value


def _packed(value: Any) -> torch.Tensor:
    buffers, _ = batch_encode_into([value], lambda sizes: [torch.empty(sizes[0], dtype=torch.uint8, device="cpu")])
    found: torch.Tensor = buffers[0]
    return found


def _unpacked(packed: torch.Tensor | None) -> dict[str, Any]:
    """Raises what the first rank said that it failed with."""
    if packed is None:
        raise InternalError("no rank of this group is the first of all of its groups: they are not model-parallel ones")
    said: dict[str, Any] = batch_decode_from([packed], copy=False)[0]
    if "error" in said:
        raise error_from_code(said["error"], said["text"])
    return said


def _pass_on(packed: torch.Tensor | None, groups: Sequence[Group]) -> torch.Tensor | None:
    """What the first rank of all groups has: by way of each group, whose first rank may not have it yet."""
    for group in groups:
        if dist.get_world_size(group) == 1:
            continue
        is_first = dist.get_rank(group) == 0
        size = -1 if packed is None or not is_first else len(packed)
        size = int(_broadcast(torch.tensor([size], device="cpu"), group)[0])
        if size >= 0:
            mine = packed if packed is not None and is_first else torch.empty(size, dtype=torch.uint8, device="cpu")
            packed = _broadcast(mine, group)
    return packed


def _broadcast(data: torch.Tensor, group: Group) -> torch.Tensor:
    """`data` of the group's first rank. A group that takes tensors of a GPU only gets them there."""
    first = dist.get_global_rank(group, 0) if group is not None else 0
    if dist.get_backend(group) != "nccl":
        dist.broadcast(data, first, group=group)
        return data
    there = data.cuda()
    dist.broadcast(there, first, group=group)
    return data.copy_(there)
