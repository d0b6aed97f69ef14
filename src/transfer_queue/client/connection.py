"""One blocking connection to the service: one request at a time, with a deadline."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from transfer_queue.codec.values import Lifting
from transfer_queue.errors import ProtocolError, UnsupportedValue
from transfer_queue.wire import handshake, notices
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address
from transfer_queue.wire.blocking import MIN_WAIT_S, FrameSocket, dial, within

_lifting = Lifting()
_decode = msgspec.msgpack.Decoder(m.ServerMessage, ext_hook=_lifting._lift).decode
_items_of = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_number_of = msgspec.msgpack.Decoder(int).decode
FOR_PEOPLE = (m.ServiceOverview.__name__, m.RowInspected.__name__)


def decode_reply(header: memoryview) -> m.Message:
    """A message of the server. One with a value that this process cannot make, such as a tag whose type is registered
    elsewhere only, is an error of the call that asked; others that use the connection do not hear of it."""
    try:
        return _decode(header)
    except (UnsupportedValue, ProtocolError) as error:
        return _not_made(header, error)


def _not_made(header: memoryview, error: UnsupportedValue | ProtocolError) -> m.Message:
    """What people look at has a description of such a value (`codec.described`)."""
    kind, number = _items_of(header)[:2]
    if type(error) is UnsupportedValue and msgspec.msgpack.decode(kind) in FOR_PEOPLE:
        from transfer_queue.codec.described import DescribingLifting  # it brings torch, which looks do not need

        return msgspec.msgpack.decode(header, type=m.ServerMessage, ext_hook=DescribingLifting()._lift)
    return m.Failed(_number_of(number), error.code, str(error))


class Connection:
    """A connection after the handshake. Not for concurrent use; broken for good once a call failed half-way.

    For `spin_s` the receiver looks for an answer before it sleeps (`FrameSocket`). Raises `ServiceRestarted` when the
    server is of another life than `life`.
    """

    def __init__(
        self,
        address: Address,
        session: bytes,
        timeout_s: float,
        spin_s: float = 0.0,
        life: handshake.Life = handshake.ANY,
    ) -> None:
        self.address = address
        sock = dial(address, timeout_s, f"server at {address}")
        try:
            self._frames = FrameSocket(sock, m.encode, decode_reply, f"the server at {address}", spin_s=spin_s)
            self._frames.check, self._frames.check_long = m.decode_client, (m.SMALL_HEADER_NBYTES, m.check_length)
            steps = handshake.greeting(address, m.PROTOCOL_VERSION, session, life)
            self.welcome = handshake.carry_out(steps, lambda message: self._exchange(message, timeout_s))
        except BaseException:
            sock.close()
            raise

    def _exchange(self, message: m.Message, timeout_s: float) -> m.Message:
        self._frames.send(message, timeout_s)
        return self._frames.receive(timeout_s, what="connect")[0]

    def spin(self, spin_s: float) -> None:
        """From now on look that long for an answer before sleeping."""
        self._frames.spin_s = spin_s

    def call(
        self, request: m.Request, payload: memoryview | None, timeout_s: float, into: memoryview | None = None
    ) -> tuple[Any, memoryview]:
        """The reply and its payload, received straight into `into` when given.

        Raises `DeadlineExceeded` or `ServiceUnavailable`: close the connection then. `InvalidInput` for what cannot be
        sent: nothing was.
        """
        self.post(request, payload, timeout_s)
        return self.answer(request, timeout_s, into)

    def post(self, request: m.Request, payload: memoryview | None, timeout_s: float) -> None:
        """Send a request without waiting. Its `answer` has to be taken before the next is posted."""
        self._frames.send(request, timeout_s, payload)

    def answer(self, request: m.Request, timeout_s: float, into: memoryview | None = None) -> tuple[Any, memoryview]:
        """Wait for the answer to what was posted. Raises as `call`."""
        place, what, end = within(into), type(request).__name__, time.monotonic() + timeout_s
        reply, data = self._frames.receive(timeout_s, place, what)
        while isinstance(reply, m.Waiting):
            notices.say(self.welcome.service, reply.text)
            reply, data = self._frames.receive(max(MIN_WAIT_S, end - time.monotonic()), place, what)
        if getattr(reply, "rid", None) != request.rid:
            raise ProtocolError(f"answer {reply!r} to another request")
        return reply, data

    def notify(self, *messages: m.Message) -> None:
        """Send what nobody answers."""
        self._frames.send_all(messages)

    @property
    def is_lost(self) -> bool:
        """Of an idle one: whether the server has closed it."""
        return self._frames.is_lost

    def shut(self) -> None:
        """End the call that another thread makes: it raises `ServiceUnavailable`."""
        self._frames.shut()

    def close(self) -> None:
        self._frames.close()
