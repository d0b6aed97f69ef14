"""What a trial asks of its hosts, after the handshake, and what they answer. An order gets exactly one answer.

The tokens of the trial's service are not sent: every host derives them from the token that it knows and the nonce of
the trial, so that no member of the trial has the token of a job, and nobody else those of the trial.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from typing import Any, TypeAlias

import msgspec

from transfer_queue.errors import ProtocolError
from transfer_queue.wire import messages as m
from transfer_queue.wire.blocking import FrameSocket

PROTOCOL = 1
MAX_HEADER_NBYTES = 64 << 10
NONCE_NBYTES = 16
MAX_TIMEOUT_S = 600.0
START_S, SLACK_S = 40.0, 5.0


class BeginTrial(m.Message):
    """Take part in a trial of `backend`. No call of the trial's clients takes longer than `timeout_s`."""

    backend: str
    nonce: bytes
    timeout_s: float


class LeadTrial(m.Message):
    """Start the controller's server, which listens at `host` ("": other hosts take no part)."""

    host: str


class JoinTrial(m.Message):
    """Start a unit of the service at `address`, "tcp:HOST:PORT"."""

    address: str


class WriteTrial(m.Message):
    """Write the rows of host `number`."""

    number: int


class ReadTrial(m.Message):
    """Read and compare the rows that host `number` wrote."""

    number: int


class TrialSetup(m.Message):
    """The first message to the process of a member, from the one that started it: `BeginTrial` with what it needs.

    `settings`: merged ones, as JSON, of which the backend and the server's address and port count.
    """

    begin: BeginTrial
    token: str
    unit_token: str
    settings: bytes


class HostFacts(m.Message):
    """What a host has. `machine` is the same where two members share a kernel and its network."""

    name: str
    machine: str
    python: str
    libraries: dict[str, str]
    rdma_devices: list[str]
    free_nbytes: int


class HostOpened(m.Message):
    """The host's server is there: it listens at `address` ("": not for other hosts), its transport at `endpoint`."""

    address: str
    endpoint: str
    seconds: float


class BytesMoved(m.Message):
    nbytes: int
    seconds: float


Order: TypeAlias = BeginTrial | LeadTrial | JoinTrial | WriteTrial | ReadTrial
_encode = msgspec.msgpack.Encoder().encode
# An agent never leads: whoever holds the token cannot make it listen elsewhere.
decode_at_agent = msgspec.msgpack.Decoder(m.Hello | m.Proof | BeginTrial | JoinTrial | WriteTrial | ReadTrial).decode
decode_at_member = msgspec.msgpack.Decoder(TrialSetup | LeadTrial | JoinTrial | WriteTrial | ReadTrial).decode
decode_answer = msgspec.msgpack.Decoder(m.Challenge | m.Welcome | m.Failed | HostFacts | HostOpened | BytesMoved).decode


def stream_over(sock: socket.socket, decode: Any, peer: str) -> FrameSocket[m.Message]:
    return FrameSocket(sock, _encode, decode, peer, max_header_nbytes=MAX_HEADER_NBYTES)


def limit_s(order: m.Message, timeout_s: float) -> float:
    """How long a member may take to answer. A server that starts has a deadline of its own, and imports take time."""
    is_start = isinstance(order, (BeginTrial, LeadTrial, JoinTrial))
    return 2 * timeout_s + (START_S if is_start else SLACK_S)


def setup(begin: BeginTrial, token: str, settings: bytes) -> TrialSetup:
    """Raises `ProtocolError` for a trial that would be none."""
    if len(begin.nonce) != NONCE_NBYTES or not 0 < begin.timeout_s <= MAX_TIMEOUT_S:
        raise ProtocolError(f"a trial with a nonce of {len(begin.nonce)} bytes and {begin.timeout_s:g} s for a call")
    return TrialSetup(begin, _derived(token, b"client", begin), _derived(token, b"unit", begin), settings)


def _derived(token: str, role: bytes, begin: BeginTrial) -> str:
    text = b"transfer_queue doctor|" + role + b"|" + begin.nonce.hex().encode()
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()
