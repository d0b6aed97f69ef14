"""The entries of a journal: what the state machines were asked, and what became of the unit's memory.

The controller is asked again, for it answers the same question in the same state alike; a sampler of others may not, so
what it answered is said. The unit is told what it did:
where a block lies depends on the file system, too.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from transfer_queue.wire import messages as m

Range: TypeAlias = tuple[int, int, int, int]  # file, offset, bytes, xxh3-64 of them


class _Record(msgspec.Struct, array_like=True, gc=False):
    """Base of all entries."""


# The controller. `now` is the time of time.monotonic(), which all processes of a host share.


class Requested(_Record, tag=0):
    """The session sent a request that may change something; it may have been refused, or parked."""

    session: bytes
    now: float
    message: m.ClientMessage


class Forgotten(_Record, tag=1):
    """Nobody waits for these requests any more: (session, rid)."""

    requests: list[tuple[bytes, int]]


class AnswerReceived(_Record, tag=2):
    session: bytes
    rid: int


class TakenBack(_Record, tag=3):
    session: bytes
    rid: int


class Expired(_Record, tag=4):
    now: float


class Postponed(_Record, tag=28):
    by_s: float


class Tidied(_Record, tag=5):
    pass


class Relocated(_Record, tag=6):
    block: int
    target: int
    rows: bytes


class RowsGathered(_Record, tag=7):
    target: int
    blocks: bytes
    rows: bytes


class UnitHidden(_Record, tag=38):
    unit: int


class UnitLost(_Record, tag=8):
    unit: int


class BlocksLost(_Record, tag=41):
    """The storage engine does not have their bytes any more."""

    blocks: list[int]


class SamplerHeard(_Record, tag=39):
    """What a foreign sampler answers in the records of this event (`controller.sampler_calls`), and what it remembers
    afterwards."""

    answers: list[bytes]
    state: bytes | None


# Sessions.


class Attached(_Record, tag=9):
    """One more connection. `pid`: of the process at its other end (0: on another host, or not known). `host`: the
    address that it comes from ("": this host)."""

    session: bytes
    local: bool
    pid: int
    host: str = ""


class Detached(_Record, tag=10):
    """One connection less. `ended`: the session had said goodbye."""

    session: bytes
    ended: bool


class Ended(_Record, tag=11):
    session: bytes


# The unit's memory.


class ArenaOpened(_Record, tag=12):
    """The keeper sends its descriptor."""

    size: int
    grain: int
    spills: bool


class Placed(_Record, tag=13):
    arena: int
    offset: int
    nbytes: int
    owner: bytes | None


class PlacedInEngine(_Record, tag=40):
    key: str
    nbytes: int
    owner: bytes | None


class BlockGiven(_Record, tag=14):
    """A session was given a block to fill, in answer to this request."""

    session: bytes
    rid: int
    block: int


class Published(_Record, tag=15):
    block: int
    layout: bytes
    digest: int


class Dropped(_Record, tag=16):
    block: int


class BlockPinned(_Record, tag=17):
    block: int
    session: bytes
    rid: int


class BlockUnpinned(_Record, tag=18):
    block: int
    session: bytes
    rid: int


class Vacated(_Record, tag=19):
    """A session holds no memory any more."""

    session: bytes


# Commits that wait for the controller.


class CommitHeld(_Record, tag=24):
    """`blocks`: with their layouts and digests. Where the controller is on another host, the commit is passed on to it
    now."""

    session: bytes
    rid: int
    blocks: list[tuple[int, bytes, int]]


class CommitReleased(_Record, tag=25):
    """It waits no longer; what became of its blocks is said besides."""

    session: bytes
    rid: int


class Doubted(_Record, tag=26):
    """Only the controller of another host knows whether rows lie in this block."""

    block: int


class CommitDone(_Record, tag=27):
    """It was carried out; `block` is its first one. The answer is known where it was passed on to."""

    session: bytes
    rid: int
    block: int


# Units of other hosts.


class UnitJoined(_Record, tag=20):
    message: m.Join
    address: str


class CommitsResolved(_Record, tag=21):
    message: m.ResolveCommits
    unit: int


class BlockOnDisk(_Record, tag=22):
    """The bytes of a block are in a blocks file of the journal as well (`server.journal`)."""

    block: int
    place: Range


class BlockCopied(_Record, tag=23):
    """What the journal has of a block is that of its copy now."""

    block: int
    copy: int


Record: TypeAlias = (
    Requested | Forgotten | AnswerReceived | TakenBack | Expired | Postponed | Tidied | Relocated | RowsGathered
    | UnitHidden | UnitLost | BlocksLost | Attached | Detached | Ended
    | ArenaOpened | Placed | PlacedInEngine | BlockGiven | Published | Dropped | BlockPinned | BlockUnpinned | Vacated
    | CommitHeld | CommitReleased | CommitDone | Doubted
    | UnitJoined | CommitsResolved | BlockOnDisk | BlockCopied | SamplerHeard
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(list[Record]).decode
