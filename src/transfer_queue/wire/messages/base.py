"""What messages are made of, and the answers that any request may get."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Annotated, Any, TypeAlias

import msgspec

Tags: TypeAlias = dict[str, Any]
# Whoever keeps plain values encodes them again, in a listing, a checkpoint, a journal, with less of the stack left. One
# that is refused there is of a request that was carried out already.
MAX_NESTING = 64
_CONTAINERS = frozenset((dict, list, tuple))
Seconds = Annotated[float, msgspec.Meta(ge=-1e300)]  # any but NaN, which is neither before nor after any deadline


class Message(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Base of all messages."""


class Request(Message):
    """Base of the requests that get exactly one reply."""

    rid: int


class Reply(Message):
    rid: int


class Inline(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=0):
    """The bytes ride in the payload of the message, at `offset`."""

    offset: int


class InArena(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=1):
    """The bytes lie in shared memory of the server that says so; whoever is told has them pinned, and maps them.
    `digest`, where it is not 0, is their xxh3-64: they lie on a disk."""

    arena: int
    offset: int
    digest: int = 0


class Remote(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=2):
    """The bytes lie on the unit that the block's number names, and have to be taken from there."""


class InEngine(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=3):
    """The bytes lie in the service's storage engine under `key`; whoever is told has them pinned."""

    key: str


class Registered(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=4):
    """The bytes lie in memory of the process at `endpoint` from `address` on, where the job's transport reads them;
    whoever is told has them pinned."""

    endpoint: str
    address: int


Location: TypeAlias = Inline | InArena | Remote | InEngine | Registered
REMOTE = Remote()


class Piece(msgspec.Struct, array_like=True, gc=False):
    """One block of a reply. `layout` is the position of its layout in the reply's list."""

    block: int
    nbytes: int = 0
    layout: int = 0
    location: Location = REMOTE


class Done(Reply):
    note: str = ""  # a remark for the caller's log


class Failed(Reply):
    code: str
    text: str


class Waiting(Reply):
    """Not the answer yet: the request stays parked, and `text` says what is missing."""

    text: str


def is_too_deep(values: Iterable[Any]) -> bool:
    """Whether lists, tuples and dicts are nested more than `MAX_NESTING` deep in one of these values."""
    level = _containers(values)
    for _ in range(MAX_NESTING):
        if not level:
            return False
        level = _containers(chain.from_iterable(map(_content, level)))
    return bool(level)


def _containers(values: Iterable[Any]) -> list[Any]:
    """Each once: in a value of a caller one may be in many places, or in itself."""
    return list({id(one): one for one in values if type(one) in _CONTAINERS}.values())


def _content(one: Any) -> Iterable[Any]:
    return chain(one, one.values()) if type(one) is dict else one
