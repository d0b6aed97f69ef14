"""Frames over a blocking socket: whose memory they hold, and for how long."""

from __future__ import annotations

import resource
import socket
import threading
import weakref
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from transfer_queue.errors import DeadlineExceeded, ServiceUnavailable
from transfer_queue.weights.transport import protocol as p
from transfer_queue.wire import blocking
from transfer_queue.wire.blocking import at_most
from transfer_queue.wire.framing import frame

NBYTES = 1 << 20
SENT = msgspec.msgpack.encode(p.Sent())


pytestmark = pytest.mark.usefixtures("no_collections")


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    made = socket.socketpair()
    yield made
    for one in made:
        one.close()


@pytest.mark.parametrize("whole", [True, False])
def test_the_memory_of_a_payload_is_let_go_of_without_a_collection(
    ends: tuple[socket.socket, socket.socket], whole: bool
) -> None:
    """Versions of weights stayed until a collection came by, three of them at times."""
    ours, theirs = p.stream_over(ends[0], p.decode_server, "the other end"), ends[1]
    place = np.zeros(NBYTES, np.uint8)
    gone = weakref.ref(place)
    theirs.sendall(frame(msgspec.msgpack.encode(p.Sent()), NBYTES) + b"half of it")
    if whole:
        sending = threading.Thread(target=theirs.sendall, args=(bytes(NBYTES - len(b"half of it")),))
        sending.start()
        assert bytes(ours.receive(5.0, p.exactly(place))[1][:4]) == b"half"
        sending.join()
    else:
        theirs.close()
        with pytest.raises(ServiceUnavailable):
            ours.receive(5.0, p.exactly(place))
        ours.close()
    del place
    assert gone() is None


def test_a_closed_one_goes_without_a_collection(ends: tuple[socket.socket, socket.socket]) -> None:
    one = p.stream_over(ends[0], p.decode_server, "the other end")
    gone = weakref.ref(one)
    one.close()
    del one
    assert gone() is None


@pytest.mark.parametrize(
    "began", [b"\x01", frame(SENT, 9), frame(SENT, 9) + b"12345678"], ids=["prefix", "header", "most"]
)
@pytest.mark.parametrize("is_behind", [False, True])
def test_of_a_message_only_the_beginning_is_waited_for_without_end(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, began: bytes, is_behind: bool
) -> None:
    monkeypatch.setattr(blocking, "MESSAGE_S", 0.1, raising=False)
    ours, theirs = p.stream_over(ends[0], p.decode_server, "the other end"), ends[1]
    theirs.sendall(frame(SENT) * is_behind + began)
    if is_behind:
        assert ours.receive(None, at_most(9))[0] == p.Sent()
    with pytest.raises(DeadlineExceeded, match="the other end"):
        ours.receive(None, at_most(9))


def test_a_message_in_pieces_is_received_whole_without_a_time_limit_of_its_own(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = p.stream_over(ends[0], p.decode_server, "the other end"), ends[1]
    whole = frame(SENT, NBYTES) + bytes(NBYTES)
    sending = threading.Thread(
        target=lambda: [theirs.sendall(whole[at : at + 65537]) for at in range(0, len(whole), 65537)]
    )
    sending.start()
    assert len(ours.receive(None, at_most(NBYTES))[1]) == NBYTES
    sending.join()
    assert ours._limit_s is None


def test_a_payload_that_was_announced_takes_memory_as_it_comes(ends: tuple[socket.socket, socket.socket]) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    ours, theirs = p.stream_over(ends[0], p.decode_server, "the other end"), ends[1]
    before = resident()
    theirs.sendall(frame(SENT, 256 * NBYTES) + b"one")
    with pytest.raises(DeadlineExceeded):
        ours.receive(0.1, at_most(256 * NBYTES))
    assert resident() - before < 64 * NBYTES


def test_an_answer_that_stalls_is_not_waited_for_until_its_deadline(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = p.stream_over(ends[0], p.decode_server, "the other end"), ends[1]
    theirs.sendall(frame(SENT, NBYTES) + b"the first bytes")
    with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
        ours.receive(3600.0, at_most(NBYTES), stall_s=0.01)
    ours.close()
