"""What all messages have in common."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Base of all messages."""


class Request(Message):
    """Base of the requests that get exactly one reply."""

    rid: int


class Reply(Message):
    """Base of the replies: `rid` is the request's."""

    rid: int
