"""Messages about a partition as a whole."""

from __future__ import annotations

from transfer_queue.schema import FieldSchema
from transfer_queue.wire.messages.base import Reply, Request, Tags


class SetPartition(Request):
    """Declare a partition's size (rows expected in all), how many rows fields will have (`sizes`), and merge metadata;
    creates it."""

    partition: str
    size: int | None
    metadata: Tags
    sizes: dict[str, int] = {}  # noqa: RUF012  msgspec copies it


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


class DescribePartition(Request):
    """Everything that is known of a partition's rows at one instant, without their data."""

    partition: str


class PartitionDescription(Reply):
    """Rows by ascending index; `fields` in the order they were first written.

    `ready` is int8 (rows, fields): 1 where a cell is written. `consumed` has int8 (rows,) for each task: 1 where it
    took the row. `reserved` are the rows of `rows` that nobody claimed yet. `keys` and `tags` are parallel to `rows`,
    `tags` None where all are empty.
    """

    known: bool
    rows: bytes = b""
    reserved: bytes = b""
    fields: list[FieldSchema] = []  # noqa: RUF012  msgspec copies these
    ready: bytes = b""
    keys: list[str | None] = []  # noqa: RUF012
    tags: list[Tags] | None = None
    consumed: dict[str, bytes] = {}  # noqa: RUF012


class ListPartitions(Request):
    pass
