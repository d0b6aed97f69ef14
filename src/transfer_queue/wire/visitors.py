"""Those who connect to a listening socket, each in a thread of its own."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from collections.abc import Callable
from typing import Any

from transfer_queue.errors import TooManyConnections

REST_S = 0.1  # after what cannot be taken now, for want of descriptors or threads: others have to give some back first


class Visitors:
    """`serve` is called for each connection, with the address that it came from and `enter`, and closes it.

    It calls `enter` once it knows who that is: `most` may have entered at a time, whoever comes besides gets
    `TooManyConnections` from it. Of the strangers who have not entered the latest `most` stay, or as many as half of
    the process's descriptors; the connections of those before are shut, so that nobody who only stays keeps others out.
    Owns `listening`."""

    def __init__(
        self,
        listening: socket.socket,
        serve: Callable[[socket.socket, Any, Callable[[], None]], None],
        name: str,
        most: int,
    ) -> None:
        """`name`: of the threads."""
        self._listening, self._serve, self._name, self._most = listening, serve, name, most
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most_strangers = most if limit == resource.RLIM_INFINITY else min(most, limit // 2)
        self._lock = threading.Lock()
        self._here: dict[threading.Thread, socket.socket] = {}
        self._strangers: dict[threading.Thread, None] = {}  # in order of arrival
        self._entered: set[threading.Thread] = set()
        self._closed = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._accepting.start()

    def show_out(self) -> None:
        """Nobody comes in any more, and the connections of those that are here are shut. Repeatable."""
        with self._lock:
            self._closed.set()
            here = list(self._here.values())
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listening.close()
        for sock in here:
            _shut(sock)

    def join(self) -> None:
        """Wait until all have left."""
        with self._lock:
            here = list(self._here)
        for thread in here:
            thread.join()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                self._take(*self._listening.accept())
            except (OSError, RuntimeError):  # no descriptor, or no thread, is to be had
                self._closed.wait(REST_S)

    def _take(self, sock: socket.socket, where: Any) -> None:
        thread = threading.Thread(target=self._receive, args=(sock, where), name=self._name, daemon=True)
        with self._lock:
            if self._closed.is_set():
                sock.close()
                return
            if len(self._strangers) >= self._most_strangers:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _shut(self._here[oldest])
            self._here[thread], self._strangers[thread] = sock, None
            try:
                thread.start()
            except RuntimeError:
                self._leave(thread)
                sock.close()
                raise

    def _receive(self, sock: socket.socket, where: Any) -> None:
        try:
            self._serve(sock, where, self._enter)
        finally:
            with self._lock:
                self._leave(threading.current_thread())

    def _leave(self, thread: threading.Thread) -> None:
        """Under the lock."""
        del self._here[thread]
        self._strangers.pop(thread, None)
        self._entered.discard(thread)

    def _enter(self) -> None:
        me = threading.current_thread()
        with self._lock:
            if len(self._entered) >= self._most:
                raise TooManyConnections(f"{self._most} connections, as many as it may: others have to leave first")
            self._strangers.pop(me, None)
            self._entered.add(me)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
