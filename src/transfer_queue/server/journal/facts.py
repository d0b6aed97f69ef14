"""What a log says about blocks, and how facts are written."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from transfer_queue.controller.facts import ControllerFact, Fact
from transfer_queue.errors import JournalCorrupt

LENGTH_NBYTES = 4


class BlockLogged(Fact, tag=20):
    """A block, with its bytes."""

    block: int
    layout: bytes
    data: bytes


class BlockStored(Fact, tag=21):
    """A block whose bytes lie in a blocks file; `digest` is their xxh3-64."""

    block: int
    layout: bytes
    file: int
    offset: int
    nbytes: int
    digest: int


class BlockInEngine(Fact, tag=29):
    """A block whose bytes lie in the storage engine, under `key`, and last there."""

    block: int
    layout: bytes
    nbytes: int
    key: str


class LeftInEngine(Fact, tag=30):
    """In a snapshot: nobody needs what lies under these keys, and it was not deleted yet."""

    keys: list[str]


class EngineIs(Fact, tag=31):
    """In a snapshot: the place of the blocks that lie in the storage engine (`StorageEngine.place`). `directory`: the
    inode of the one that the snapshot was written in (0: not known). `shared`: what the keys begin with of blocks that
    another journal may need, of which this one is a copy."""

    place: str
    directory: int = 0
    shared: list[str] = msgspec.field(default_factory=list)


class BlockRenamed(Fact, tag=22):
    """A block is a copy of another one, whose bytes in the journal are its own from now on."""

    block: int
    copy: int


class SnapshotComplete(Fact, tag=23):
    """The snapshot of this number, without which its log did not count, is on the disk."""

    number: int


class UnitKnown(Fact, tag=24):
    """A unit of another host is, or came to be, a member under this number."""

    unit: int
    incarnation: bytes
    address: str
    away_s: float
    lasts: bool


class UnitsNumbered(Fact, tag=28):
    """The highest number that a unit ever had; in a snapshot."""

    last: int


class MemberIs(Fact, tag=25):
    """In the journal of a unit: as whom it joined (`Membership`)."""

    unit: int
    incarnation: bytes
    service: bytes


class BlockGone(Fact, tag=26):
    """In the journal of a unit: nobody needs the block any more."""

    block: int


class BlockShared(Fact, tag=27):
    """In the journal of a unit: a block is a copy of another one, and has the same bytes in the journal."""

    block: int
    copy: int


JournalFact: TypeAlias = (
    ControllerFact | BlockLogged | BlockStored | BlockInEngine | BlockRenamed | SnapshotComplete | UnitKnown | MemberIs
    | BlockGone | BlockShared | UnitsNumbered | LeftInEngine | EngineIs
)  # fmt: skip

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[JournalFact]).decode


# What `encoded` raises where a value in a fact is none of msgpack.
UNWRITABLE = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)


def encoded(facts: list[JournalFact]) -> bytes:
    """The facts of an event. Raises `UNWRITABLE`."""
    data = _encode(facts)
    return len(data).to_bytes(LENGTH_NBYTES, "little") + data


def decoded(payload: bytes) -> Iterator[JournalFact]:
    """The facts of several events. Raises `JournalCorrupt`."""
    return itertools.chain.from_iterable(decoded_events(payload))


def decoded_events(payload: bytes) -> Iterator[list[JournalFact]]:
    """The facts of each event. Raises `JournalCorrupt`."""
    at = 0
    while at < len(payload):
        start = at + LENGTH_NBYTES
        at = start + int.from_bytes(payload[at:start], "little")
        try:
            yield _decode(memoryview(payload)[start:at])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise JournalCorrupt(f"facts that cannot be read: {error}") from None
