"""A rollout's record as rows, and the metadata of rows, by NeMo-RL's own functions and class where it is installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

ROUTED_EXPERTS = "routed_experts"
TASK = "train"


class PackedGroup(NamedTuple):
    """Rows of one group. `fields`: what the data plane's client puts; `sequence_lengths`: tokens of each row."""

    sample_ids: list[str]
    fields: Any
    tags: list[dict[str, Any]]
    sequence_lengths: list[int]


PackRecord: TypeAlias = Callable[..., PackedGroup]  # (record, *, pad_value_dict, weight_version, group_id)


@dataclass
class SampleMeta:
    """Stands in for NeMo-RL's `KVBatchMeta` where that is not installed: the same attributes."""

    partition_id: str
    task_name: str | None
    sample_ids: list[str]
    fields: list[str] | None = None
    sequence_lengths: list[int] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None

    @property
    def size(self) -> int:
        return len(self.sample_ids)

    def concat(self, *others: SampleMeta) -> SampleMeta:
        """The rows of all, in order; the fields that all have."""
        parts = [self, *others]
        extra = {name: value for part in parts for name, value in part.extra_info.items()}
        return SampleMeta(
            self.partition_id,
            self.task_name,
            [one for part in parts for one in part.sample_ids],
            [name for name in self.fields or [] if all(name in (part.fields or []) for part in parts)],
            [one for part in parts for one in part.sequence_lengths or []],
            extra,
            [one for part in parts for one in part.tags or []],
        )


def described(meta: Any) -> dict[str, Any]:
    """Metadata as plain values, which travel with the group."""
    return {
        "task_name": meta.task_name, "sample_ids": list(meta.sample_ids), "fields": list(meta.fields or []),
        "sequence_lengths": [int(one) for one in meta.sequence_lengths or []],
        "tags": [dict(tag) for tag in meta.tags or []],
    }  # fmt: skip


def meta_of(partition_id: str, values: Mapping[str, Any]) -> Any:
    """Metadata of rows: NeMo-RL's class where it is installed."""
    return _meta_class()(partition_id=partition_id, **values)


@functools.cache
def _meta_class() -> Any:
    if importlib.util.find_spec("nemo_rl") is None:
        return SampleMeta
    return importlib.import_module("nemo_rl.data_plane").KVBatchMeta


def pack_as_nemo(record: Any, *, pad_value_dict: Mapping[str, int], weight_version: int, group_id: str) -> PackedGroup:
    """The rows that NeMo-RL makes of a record. Raises ImportError without it."""
    payload = importlib.import_module("nemo_rl.experience.payload")
    batch = payload.record_to_train_batch(record, pad_value_dict=pad_value_dict)
    more = {"weight_version": weight_version, "group_id": group_id}
    if "prompt_idx" in inspect.signature(payload.pack_payload).parameters:
        more["prompt_idx"] = record.prompt_idx
    sample_ids, fields, tags = payload.pack_payload(batch, **more)
    lengths = [int(one) for one in batch["input_lengths"].tolist()]
    return PackedGroup(list(sample_ids), fields, [dict(tag) for tag in tags], lengths)
