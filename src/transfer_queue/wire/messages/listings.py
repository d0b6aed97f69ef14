"""Messages that list keys. They are part of the unions in `messages`."""

from __future__ import annotations

import msgspec

from transfer_queue.wire.messages.base import Reply, Request, Seconds, Tags


class ListKeys(Request):
    """Keys and tags of one partition, or of all (None); `known` is the (table, version) the client has of each."""

    partition: str | None
    known: dict[str, tuple[int, int]]


class WatchKeys(Request):
    """Park until keys or tags of one partition, or of any (None), are other than at these (table, version)s; at most
    `timeout_s`."""

    partition: str | None
    known: dict[str, tuple[int, int]]
    timeout_s: Seconds


class KeyVersions(Reply):
    """(table, version) of each partition asked for that exists."""

    versions: dict[str, tuple[int, int]]


class Changes(msgspec.Struct, array_like=True, gc=False):
    """Keys whose row or tags are new since the version the client knows, or all of them when `full`.

    `tags` lie parallel to `keys` (None: all empty); `removed` come before them.
    """

    table: int
    version: int
    full: bool
    removed: list[str]
    keys: list[str]
    tags: list[Tags] | None


class Listing(Reply):
    """Every partition asked for that exists."""

    partitions: dict[str, Changes]
