"""What peers ask servers of weights, after the handshake.

The peer proves that it knows the token (`wire.handshake`), then asks one thing after another.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import msgspec

from transfer_queue.errors import ProtocolError, error_from_code
from transfer_queue.wire import handshake
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address, parse_address
from transfer_queue.wire.blocking import FrameSocket, Into, dial

PROTOCOL = 1
MAX_HEADER_NBYTES = 64 << 10
Step: TypeAlias = Literal["offer", "packed", "served", "failed"]
Came: TypeAlias = Literal["", "staged", "damaged", "lost"]


class GetManifest(m.Message):
    """The manifest with this key, or the newest one (""), as the payload."""

    key: str


class GetBucket(m.Message):
    """A bucket, as the payload."""

    key: str
    bucket: int


class GetMemory(m.Message):
    """The memory that holds all buckets, as a descriptor. It stays as it is until this connection is closed."""

    key: str


class GetSpecs(m.Message):
    """What is to come (`wants.Specs`), as the payload."""


class WantsMessage(m.Message):
    """What a receiver needs of that: a `wants.WantsReport` as the payload."""


class GetHolders(m.Message):
    """The addresses of the servers that have a version's buckets, by the trainer's rank: JSON, as the payload."""

    key: str


class EnterRank(m.Message):
    """A rank of the trainer comes to rank 0, and is of this run ("": it was not told yet). That of rank 0 is the
    payload of the answer; `WrongEpoch` where it is another one."""

    rank: int
    run_id: str


class RankMessage(m.Message):
    """What a rank of the trainer brings to rank 0 (`ranks`), as the payload; it waits for `timeout_s`."""

    rank: int
    step: Step
    turn: str
    timeout_s: float


class JoinSwarm(m.Message):
    """A receiver that listens at `name` takes part in the update with this manifest (`tracker`), until this connection
    is closed. The buckets that it lacks, as JSON, are the payload. It gives a bucket up after `stall_s`."""

    key: str
    name: str
    stall_s: float


class NextBucket(m.Message):
    """What is that receiver to fetch next, and how the last one of this connection `came`. A `tracker.Assignment` as
    JSON is the payload of the answer, which takes at most `timeout_s`."""

    key: str
    name: str
    came: Came
    timeout_s: float


class OutcomeMessage(m.Message):
    """How an update went: an `Outcome` as JSON."""

    body: bytes


class Sent(m.Message):
    """The answer to all of these."""


_encode = msgspec.msgpack.Encoder().encode
decode_client = msgspec.msgpack.Decoder(
    m.Hello
    | m.Proof
    | GetManifest
    | GetBucket
    | GetMemory
    | GetSpecs
    | WantsMessage
    | GetHolders
    | EnterRank
    | RankMessage
    | JoinSwarm
    | NextBucket
    | OutcomeMessage
).decode
decode_server = msgspec.msgpack.Decoder(m.Challenge | m.Welcome | m.Failed | Sent).decode


def address_of(text: str, token: str) -> Address:
    """`tcp:HOST:PORT`, `unix:PATH`, or `unix:@NAME` for a name without a file (unix(7), abstract)."""
    if text.startswith("unix:@"):
        return Address(path="\0" + text[6:], token=token)
    return parse_address(text, token)._replace(token=token)


def stream_over(sock: socket.socket, decode: Callable[[memoryview], m.Message], peer: str) -> FrameSocket[m.Message]:
    return FrameSocket(sock, _encode, decode, peer, max_header_nbytes=MAX_HEADER_NBYTES, takes_fds=True)


class Peer:
    """A connection to a server of weights, after the handshake. `begun` is given it before that: a server that hangs
    keeps the caller in there until another thread interrupts it."""

    def __init__(self, address: Address, timeout_s: float, begun: Callable[[Peer], object] | None = None) -> None:
        self.address = address
        sock = dial(address, timeout_s, f"server of weights at {_shown(address)}")
        try:
            self.stream = stream_over(sock, decode_server, f"the server of weights at {_shown(address)}")
            if begun is not None:
                begun(self)
            handshake.carry_out(
                handshake.greeting(address, PROTOCOL), lambda message: self._exchange(message, timeout_s)
            )
        except BaseException:  # an interrupt must not leave the connection
            sock.close()
            raise

    def _exchange(self, message: m.Message, timeout_s: float) -> m.Message:
        self.stream.send(message, timeout_s)
        return self.stream.receive(timeout_s)[0]

    def ask(
        self,
        message: m.Message,
        timeout_s: float,
        into: Into | None = None,
        body: bytes | None = None,
        stall_s: float = math.inf,
    ) -> memoryview:
        """The payload of the answer to a message, which may have one itself (`body`). Raises what the server answers
        instead. `stall_s`: how long no byte of it may come."""
        self.stream.send(message, timeout_s, body)
        reply, payload = self.stream.receive(timeout_s, into, stall_s=stall_s)
        if isinstance(reply, m.Failed):
            raise error_from_code(reply.code, f"{_shown(self.address)}: {reply.text}")
        if not isinstance(reply, Sent):
            raise ProtocolError(f"{type(reply).__name__} instead of an answer")
        return payload

    def interrupt(self) -> None:
        """Wake up the thread that waits for an answer, which finds the connection lost. From any thread."""
        self.stream.shut()

    def close(self) -> None:
        self.stream.close()


def exactly(memory: Any) -> Into:
    """For a payload that fills `memory`."""
    return lambda nbytes: memoryview(memory).cast("B")


def _shown(address: Address) -> str:
    return str(address).replace("\0", "@")
