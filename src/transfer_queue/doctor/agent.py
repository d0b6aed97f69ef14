"""What waits on a host for a trial that is led elsewhere: `tq doctor --serve`."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from transfer_queue.doctor import messages as d
from transfer_queue.doctor.member_process import MemberProcess
from transfer_queue.errors import ConfigError, DeadlineExceeded, ProtocolError, ServiceUnavailable, TransferQueueError
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address, advertised, tune
from transfer_queue.wire.blocking import FrameSocket
from transfer_queue.wire.reception import admit
from transfer_queue.wire.visitors import Visitors

log = logging.getLogger("transfer_queue.doctor")
HELLO_S = 5.0
SEND_S = 10.0
LOOK_S = 0.5
MAX_VISITORS = 16
TURNS = 4  # for how many orders of others a host waits for its own


class DoctorAgent:
    """Takes part in one trial of `backend` at a time, for whoever knows the token of `place`. `settings` as of
    `TrialSetup`."""

    def __init__(self, place: Address, backend: str, settings: bytes) -> None:
        """Listens from now on. Raises `ConfigError`."""
        family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        try:
            listening = socket.create_server((place.host, place.port), family=family, backlog=MAX_VISITORS)
        except OSError as error:
            raise ConfigError(f"--serve: cannot listen at {place}: {error}; name an address of this host and a free "
                              "port, or port 0 for any") from error  # fmt: skip
        self.address = Address(host=advertised(place.host), port=listening.getsockname()[1])
        self._token, self._backend, self._settings = place.token, backend, settings
        self._busy = threading.Lock()
        self._began, self._ended = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._member: MemberProcess | None = None
        self._closed = False
        self._visitors = Visitors(listening, self._receive, "tq-doctor-visit", MAX_VISITORS)

    def wait(self, wait_s: float = 0.0) -> None:
        """Until the end of the first trial, which has to begin within `wait_s`; for ever if that is 0. Raises
        `DeadlineExceeded`."""
        began, over = time.monotonic(), self._ended if wait_s else threading.Event()
        while not over.wait(LOOK_S):  # a signal that another thread of this process gets wakes nobody
            if wait_s and not self._began.is_set() and time.monotonic() > began + wait_s:
                raise DeadlineExceeded(
                    f"no trial was led to {self.address} within {wait_s:g} s: run `tq doctor --backend {self._backend} "
                    "--with HOST:PORT` on another host, with the same token"
                )

    def close(self) -> None:
        """End a trial that is under way, and wait for its processes."""
        with self._lock:
            self._closed = True
            member = self._member
        self._visitors.show_out()
        if member is not None:
            member.interrupt()
        self._visitors.join()

    def _receive(self, sock: socket.socket, where: Any, enter: Callable[[], None]) -> None:
        stream = d.stream_over(sock, d.decode_at_agent, f"the doctor at {where[0]}")
        try:
            tune(sock)
            admit(stream, d.PROTOCOL, self._token, HELLO_S, enter)
            begin = stream.receive(HELLO_S)[0]
            self._begin(stream, begin)
        except (TransferQueueError, OSError) as error:
            log.info("%s", error)
        finally:
            stream.close()

    def _begin(self, stream: FrameSocket[m.Message], begin: m.Message) -> None:
        """Take part, unless it is another's turn."""
        if not isinstance(begin, d.BeginTrial):
            raise ProtocolError(f"{type(begin).__name__} before a trial began")
        try:
            told = d.setup(begin, self._token, self._settings)
            if begin.backend != self._backend:
                raise ConfigError(
                    f"here `tq doctor` serves a trial of {self._backend}, not of {begin.backend!r}: start it with the "
                    "same --backend and --config on every host"
                )
            if not self._busy.acquire(blocking=False):
                raise ServiceUnavailable("another trial is under way here: try again when it has ended")
        except TransferQueueError as error:
            stream.send(m.Failed(0, error.code, str(error)), SEND_S)
            return
        self._began.set()
        try:
            self._take_part(stream, told)
        finally:
            self._busy.release()
            self._ended.set()

    def _take_part(self, stream: FrameSocket[m.Message], told: d.TrialSetup) -> None:
        """One order after the other, until who leads has enough, or is gone."""
        member = MemberProcess()
        with self._lock:
            self._member = member
        timeout_s = told.begin.timeout_s
        try:
            order: m.Message = told
            limit_s = d.limit_s(told.begin, timeout_s)
            while not self._closed:
                try:
                    answer = member.ask(order, limit_s)
                except (DeadlineExceeded, ServiceUnavailable) as error:
                    stream.send(m.Failed(0, error.code, str(error)), SEND_S)
                    return
                stream.send(answer, SEND_S)
                order = stream.receive(TURNS * d.limit_s(told.begin, timeout_s))[0]
                limit_s = d.limit_s(order, timeout_s)
        finally:
            with self._lock:
                self._member = None
            member.close()
