"""The list of a folder's files, under its own digest."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from xxhash import xxh3_128_hexdigest

from transfer_queue.errors import CheckpointCorrupt, CheckpointUnsupported
from transfer_queue.structs import decodable

NO_DIGEST = "0" * 32


class File(msgspec.Struct):
    nbytes: int
    xxh3_128: str


@decodable
class Metadata(msgspec.Struct, omit_defaults=True):
    """`digest` is that of the list itself with zeros in place of the digest. `folder`: below which name the files lie
    ("": beside the list)."""

    digest: str
    format: int
    storage_saved: bool
    user_metadata: dict[str, Any]
    files: dict[str, File]
    folder: str = ""


def encoded(metadata: Metadata) -> bytes:
    """With its digest."""
    blank = json.dumps(msgspec.to_builtins(msgspec.structs.replace(metadata, digest=NO_DIGEST)), indent=2).encode()
    return blank.replace(NO_DIGEST.encode(), xxh3_128_hexdigest(blank).encode(), 1)


def decoded(data: bytes, where: str, expected: int) -> Metadata:
    """The list, once its digest fits; `expected` is its format, `where` is for errors."""
    try:
        content = json.loads(data)
        number = content["format"]
        if type(number) is int and number != expected:
            text = f"{where} is of format {number}, this version reads {expected}; or it is damaged"
            raise CheckpointUnsupported(text)
        metadata = msgspec.convert(content, Metadata)
    except CheckpointUnsupported:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{where} is damaged: {error}") from None
    if not _fits(data, metadata.digest):
        raise CheckpointCorrupt(f"{where} is damaged: its digest does not match")
    return metadata


def listed_by(data: bytes) -> Metadata | None:
    """The list, of whatever format, where it is one that `encoded` made; None for anything else."""
    try:
        metadata = msgspec.convert(json.loads(data), Metadata)
    except (ValueError, RecursionError):
        return None
    return metadata if _fits(data, metadata.digest) else None


def _fits(data: bytes, digest: str) -> bool:
    blank = data.replace(digest.encode("utf-8", "replace"), NO_DIGEST.encode(), 1)
    return xxh3_128_hexdigest(blank) == digest
