"""The handshake at the end that is called, over a blocking socket, with a peer in the role of a client."""

from __future__ import annotations

import os
from collections.abc import Callable

from transfer_queue.errors import AccessDenied, TooManyConnections
from transfer_queue.wire import handshake
from transfer_queue.wire import messages as m
from transfer_queue.wire.blocking import FrameSocket


def admit(
    stream: FrameSocket[m.Message], version: int, token: str, timeout_s: float, enter: Callable[[], None]
) -> None:
    """Return once the peer has proved that it knows `token`, and was welcomed. Each message takes at most `timeout_s`.
    `enter` is called in between, and may refuse it (`visitors`).

    Raises `AccessDenied` and `TooManyConnections`, which the peer was told, and as `FrameSocket`.
    """

    def token_of(role: int) -> str:
        if role != handshake.CLIENT:
            raise AccessDenied(f"there is no role {role}")
        return token

    reception = handshake.Reception(version, token_of)
    try:
        while (challenge := reception.take(stream.receive(timeout_s)[0])) is not None:
            stream.send(challenge, timeout_s)
        enter()
    except (AccessDenied, TooManyConnections) as error:
        stream.send(m.Failed(0, error.code, str(error)), timeout_s)
        raise
    stream.send(m.Welcome(os.getpid(), "", b""), timeout_s)
