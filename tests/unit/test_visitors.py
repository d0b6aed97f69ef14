"""Those who connect to a server of weights, or to the doctor: who stays, who has to leave, and what is told to whom."""

from __future__ import annotations

import errno
import resource
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import until

from transfer_queue.errors import ServiceUnavailable, TooManyConnections
from transfer_queue.weights.transport import protocol as p
from transfer_queue.weights.transport.serving import Empty, WeightServer, listen_tcp
from transfer_queue.weights.transport.tracker import Tracker
from transfer_queue.wire.address import Address
from transfer_queue.wire.framing import frame

MOST, TIMEOUT_S = 3, 20.0


class Flaky(socket.socket):
    """A listening socket whose next `num_faults` calls fail, as where descriptors have run out."""

    num_faults = num_calls = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.num_calls += 1
        if self.num_faults:
            self.num_faults -= 1
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


class Place:
    """A server of weights with room for `MOST` peers. All that connected is closed with it."""

    def __init__(self) -> None:
        listening, text = listen_tcp("127.0.0.1", 0)
        self.listening = Flaky(fileno=listening.detach())
        self.address: Address = p.address_of(text, "secret")
        self.server = WeightServer(self.listening, "secret", Empty(), max_peers=MOST)
        self._opened: list[Any] = []

    def idle(self) -> socket.socket:
        """A connection of somebody who says nothing."""
        self._opened.append(socket.create_connection((self.address.host, self.address.port), TIMEOUT_S))
        return self._opened[-1]

    def peer(self) -> p.Peer:
        self._opened.append(p.Peer(self.address, TIMEOUT_S))
        return self._opened[-1]

    def close(self) -> None:
        for one in self._opened:
            one.close()
        self.server.close()


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()


def test_strangers_who_say_nothing_keep_nobody_out_and_the_oldest_has_to_leave(place: Place) -> None:
    strangers = [place.idle() for _ in range(MOST)]
    place.peer()
    assert strangers[0].recv(1) == b""
    place.peer()
    assert place.peer().stream.is_lost is False


def test_strangers_have_half_of_the_descriptors_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4096))
    place = Place()
    monkeypatch.undo()
    try:
        strangers = [place.idle() for _ in range(3)]
        strangers[0].settimeout(3)  # before its time to say hello is over
        assert strangers[0].recv(1) == b""
    finally:
        place.close()


def test_who_has_the_token_is_told_that_there_is_no_room(place: Place) -> None:
    peers = [place.peer() for _ in range(MOST)]
    with pytest.raises(TooManyConnections, match="3 connections"):
        place.peer()
    assert not any(one.stream.is_lost for one in peers)


def test_what_brings_no_payload_is_refused_one_before_memory_is_made_for_it() -> None:
    listening, text = listen_tcp("127.0.0.1", 0)
    server = WeightServer(listening, "secret", Empty(), tracker=Tracker(1))
    peer = p.Peer(p.address_of(text, "secret"), TIMEOUT_S)
    peer.stream.socket.sendall(frame(p._encode(p.OutcomeMessage(b"{}")), 1 << 20))
    with pytest.raises(ServiceUnavailable):
        peer.stream.receive(TIMEOUT_S)
    peer.close()
    server.close()


def test_peers_who_have_left_make_room(place: Place) -> None:
    for one in [place.peer() for _ in range(MOST)]:
        one.close()

    def comes_in() -> bool:
        try:
            return bool(place.peer())
        except TooManyConnections:
            return False

    until(comes_in, "room for one more")


def test_a_thread_that_cannot_start_costs_one_connection_only(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "tq-weights-serve":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ServiceUnavailable):
            place.peer()
    place.peer()


def test_a_server_without_descriptors_waits_before_it_looks_again(place: Place) -> None:
    place.listening.num_faults = 1 << 40
    place.idle()
    until(lambda: place.listening.num_calls > 3, "the third fault")
    assert place.listening.num_calls < 100
    place.listening.num_faults = 0
    place.peer()
