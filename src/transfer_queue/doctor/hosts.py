"""How a trial reaches its hosts: this one by a process of its own, others by the agents that listen there."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from typing import Protocol

from transfer_queue.doctor import messages as d
from transfer_queue.doctor.member_process import MemberProcess
from transfer_queue.errors import ServiceUnavailable
from transfer_queue.wire import handshake
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address
from transfer_queue.wire.blocking import FrameSocket, dial

AGAIN_S = 0.25


class TrialHost(Protocol):
    """A host of the trial. For one thread at a time, but for `interrupt`."""

    label: str

    def begin(self, begin: d.BeginTrial) -> m.Message:
        """The host's facts. Raises a `TransferQueueError` where it takes no part."""

    def ask(self, order: m.Message, timeout_s: float) -> m.Message:
        """Raises `DeadlineExceeded` or `ServiceUnavailable`: nothing more is to be asked then."""

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


class LocalHost:
    """The host that leads."""

    label = "this host"

    def __init__(self, token: str, settings: bytes) -> None:
        self._token, self._settings = token, settings
        self._member = MemberProcess()

    def begin(self, begin: d.BeginTrial) -> m.Message:
        told = d.setup(begin, self._token, self._settings)
        return self._member.ask(told, d.limit_s(begin, begin.timeout_s))

    def ask(self, order: m.Message, timeout_s: float) -> m.Message:
        return self._member.ask(order, d.limit_s(order, timeout_s))

    def interrupt(self) -> None:
        self._member.interrupt()

    def close(self) -> None:
        self._member.close()


class RemoteHost:
    """A host on which an agent listens at `address`, if need be only after `wait_s`."""

    def __init__(self, address: Address, wait_s: float) -> None:
        self.address, self.label = address, str(address).removeprefix("tcp:")
        self._wait_s = wait_s
        self._stream: FrameSocket[m.Message] | None = None
        self._interrupted = False

    def begin(self, begin: d.BeginTrial) -> m.Message:
        sock = self._dial(begin.timeout_s)
        try:
            if self._interrupted:
                raise ServiceUnavailable("the trial was given up")
            self._stream = d.stream_over(sock, d.decode_answer, f"the doctor at {self.address}")
            steps = handshake.greeting(self.address, d.PROTOCOL)
            handshake.carry_out(steps, lambda message: self._exchange(message, begin.timeout_s))
        except BaseException:  # an interrupt must not leave the connection
            sock.close()
            raise
        return self.ask(begin, begin.timeout_s)

    def _dial(self, timeout_s: float) -> socket.socket:
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                return dial(self.address, timeout_s, f"doctor at {self.address}")
            except ServiceUnavailable:
                if time.monotonic() >= deadline or self._interrupted:
                    raise
                select.select([], [], [], AGAIN_S)  # a host that begins to listen tells nobody

    def _exchange(self, message: m.Message, timeout_s: float) -> m.Message:
        assert self._stream is not None
        self._stream.send(message, timeout_s)
        return self._stream.receive(timeout_s, what=type(message).__name__)[0]

    def ask(self, order: m.Message, timeout_s: float) -> m.Message:
        return self._exchange(order, d.limit_s(order, timeout_s) + d.SLACK_S)

    def interrupt(self) -> None:
        self._interrupted = True
        if self._stream is not None:
            self._stream.shut()

    def close(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()
