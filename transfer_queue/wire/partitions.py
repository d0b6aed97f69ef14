"""Messages about a partition as a whole."""

from __future__ import annotations

from transfer_queue.schema import FieldSchema
from transfer_queue.wire.base import Reply, Request, Tags


class SetPartition(Request):
    """Declare a partition's size (rows expected in all) and merge metadata; creates it."""

    partition: str
    size: int | None
    metadata: Tags


class GetPartition(Request):
    partition: str


class PartitionInfo(Reply):
    """`note`: a remark for the caller's log. `schema`: of all fields, in the order they were first written."""

    known: bool
    size: int | None
    metadata: Tags
    rows: int
    note: str = ""
    schema: list[FieldSchema] = []  # noqa: RUF012  msgspec copies it
