"""Those who connect to a listening socket, each in a thread of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any


class Visitors:
    """`serve` is called for each connection, with the address that it came from, and closes it. More than `most` at
    once are closed as they come. Owns `listening`."""

    def __init__(
        self, listening: socket.socket, serve: Callable[[socket.socket, Any], None], name: str, most: int
    ) -> None:
        """`name`: of the threads."""
        self._listening, self._serve, self._name, self._most = listening, serve, name, most
        self._lock = threading.Lock()
        self._here: dict[threading.Thread, socket.socket] = {}
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._accepting.start()

    def show_out(self) -> None:
        """Nobody comes in any more, and the connections of those that are here are shut. Repeatable."""
        with self._lock:
            self._closed = True
            here = list(self._here.values())
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listening.close()
        for sock in here:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait until all have left."""
        with self._lock:
            here = list(self._here)
        for thread in here:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, where = self._listening.accept()
            except OSError:
                if self._closed:
                    return
                continue
            thread = threading.Thread(target=self._receive, args=(sock, where), name=self._name, daemon=True)
            with self._lock:
                if self._closed or len(self._here) >= self._most:
                    sock.close()
                    continue
                self._here[thread] = sock
                thread.start()

    def _receive(self, sock: socket.socket, where: Any) -> None:
        try:
            self._serve(sock, where)
        finally:
            with self._lock:
                self._here.pop(threading.current_thread(), None)
