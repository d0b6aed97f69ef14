"""Where the cells of rows lie."""

from __future__ import annotations

import msgspec

from transfer_queue.schema import FieldSchema
from transfer_queue.wire.messages.base import Piece, Reply, Request


class Get(Request):
    """Locate and pin the cells of `fields` (None: all that every row has) on `keys` or `rows`.

    With `by_key`, unknown keys and fields that are not ready on every row are dropped unless `strict`.
    `prints`, 16 bytes each: locate shared cells of the one field that may hold what has these prints instead; the
    answer has a row for each, and `prints` says for which one.
    """

    partition: str
    keys: list[str] | None
    rows: bytes | None
    fields: list[str] | None
    strict: bool
    service: bytes = b""
    prints: bytes | None = None


class Part(msgspec.Struct, array_like=True, gc=False):
    """Fields that lie alike: `runs` is int64 (k, 3) of (piece, first row in it, number of rows), in result order."""

    fields: list[str]
    runs: bytes


class Located(Reply):
    """`units` has the address of every unit that pieces lie on elsewhere; "" is the server that answers."""

    count: int
    pieces: list[Piece]
    layouts: list[bytes]
    parts: list[Part]
    schema: list[FieldSchema]
    units: dict[int, str] = {}  # noqa: RUF012  msgspec copies it
    note: str = ""
    prints: bytes = b""  # int64, for an answer by prints: which of those asked for each row may have
