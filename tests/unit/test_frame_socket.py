"""Frames over a blocking socket: whose memory they hold, and for how long."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from transfer_queue.errors import ServiceUnavailable
from transfer_queue.weights.transport import protocol as p
from transfer_queue.wire.framing import frame

NBYTES = 1 << 20


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
