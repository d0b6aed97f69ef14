"""What the messages of `messages` and of `checkpoints` are made of."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

Tags: TypeAlias = dict[str, Any]


class Message(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Base of all messages."""


class Request(Message):
    """Base of the requests that get exactly one reply."""

    rid: int


class Reply(Message):
    rid: int


class Piece(msgspec.Struct, array_like=True, gc=False):
    """One block of a reply. `arena` is INLINE when its bytes ride in the payload at `offset`, ELSEWHERE when they lie
    on the unit that the block's number names and have to be taken from there."""

    block: int
    arena: int
    offset: int
    nbytes: int
    layout: int
