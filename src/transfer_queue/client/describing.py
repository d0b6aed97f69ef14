"""From the server's view of rows to the metadata users hold."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from transfer_queue.client.remarks import warn_once
from transfer_queue.codec.dtypes import torch_dtype
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.contents import REPEATED, Redelivered
from transfer_queue.schema import DENSE, MIXED, NESTED, OBJECTS, FieldSchema
from transfer_queue.wire.arrays import numbers_of
from transfer_queue.wire.lives import naming
from transfer_queue.wire.messages import Committed, RowSet, Tags


@lru_cache(maxsize=4096)
def _spec(field: FieldSchema) -> dict[str, Any]:
    if field.kind in (OBJECTS, NESTED, MIXED):
        return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    dense = field.kind == DENSE
    shape = torch.Size(field.shape or (1,)) if dense else None
    return {"dtype": torch_dtype(field.dtype), "shape": shape, "is_nested": not dense, "is_non_tensor": False}


def field_specs(fields: Iterable[FieldSchema]) -> dict[str, dict[str, Any]]:
    """`BatchMeta.field_schema` of these fields."""
    return {field.name: _spec(field) for field in fields}


UNKNOWN = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}


def batch_meta(service_id: bytes, reply: RowSet, partition: str, fields: list[str] | None = None) -> BatchMeta:
    """The rows that a life of the service named; `fields` that do not exist yet have neither dtype nor shape."""
    schema = field_specs(reply.schema)
    for name in fields or ():
        schema.setdefault(name, UNKNOWN)
    indexes = numbers_of(reply.rows)
    ready = True if reply.ready is None else np.frombuffer(reply.ready, np.int8).copy()
    meta = BatchMeta._build(indexes, partition, schema, ready, reply.tags, naming(service_id, reply.loads))
    meta.lease = reply.lease
    if reply.redelivered:
        rows = indexes.tolist()
        meta.redelivered = {rows[at]: Redelivered(attempts, reason) for at, attempts, reason in reply.redelivered}
    if reply.repeated:
        meta.extra_info[REPEATED] = reply.repeated
    return meta


def num_repeated(meta: BatchMeta) -> int:
    """How many rows of a batch are there once more, so that all data-parallel ranks get the same number."""
    return int(meta.extra_info.get(REPEATED, 0))


def warn_repeated(meta: BatchMeta) -> None:
    if num_repeated(meta):
        text = "rows were repeated at the end of a batch, so that all data-parallel ranks get the same number"
        warn_once(f"partition {meta.partition_ids[0]!r}", f"{text}; meta.extra_info[{REPEATED!r}] says how many")


def committed_meta(
    service_id: bytes, reply: Committed, partition: str, schema: Iterable[FieldSchema], tags: list[Tags] | None
) -> BatchMeta:
    """Metadata of the rows a commit wrote."""
    names = naming(service_id, reply.loads)
    return BatchMeta._build(numbers_of(reply.rows), partition, field_specs(schema), True, tags, names)
