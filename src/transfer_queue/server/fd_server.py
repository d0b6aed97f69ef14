"""Hands out arena descriptors: a client sends an arena's number and gets its file descriptor (SCM_RIGHTS, unix(7))."""

from __future__ import annotations

import asyncio
import os
import socket

from transfer_queue.storage.blocks import Unit
from transfer_queue.wire.arena_fds import NUMBER, SIZE
from transfer_queue.wire.peer import peer_uid


class ArenaFdServer:
    """Serves a unix socket that listens and does not block; every visitor gets one descriptor and is shown out."""

    def __init__(self, listening: socket.socket, unit: Unit) -> None:
        self._unit = unit
        self._visitors: dict[socket.socket, asyncio.TimerHandle] = {}
        self._socket = listening
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._open)

    def _open(self) -> None:
        try:
            visitor, _ = self._socket.accept()
        except OSError:
            return
        visitor.setblocking(False)
        if peer_uid(visitor) not in (os.getuid(), 0):
            visitor.close()
            return
        self._visitors[visitor] = self._loop.call_later(5.0, self._show_out, visitor)
        self._loop.add_reader(visitor, self._serve, visitor)

    def _serve(self, visitor: socket.socket) -> None:
        try:
            asked = visitor.recv(NUMBER.size)
            number = NUMBER.unpack(asked)[0] if len(asked) == NUMBER.size else -1
            if 0 <= number < len(self._unit.shm.arenas):
                arena = self._unit.shm.arenas[number]
                socket.send_fds(visitor, [SIZE.pack(arena.size)], [arena.fd])
        except OSError:
            pass  # the visitor left
        self._show_out(visitor)

    def _show_out(self, visitor: socket.socket) -> None:
        timer = self._visitors.pop(visitor, None)
        if timer is not None:
            timer.cancel()
            self._loop.remove_reader(visitor)
            visitor.close()

    def close(self) -> None:
        for visitor in list(self._visitors):
            self._show_out(visitor)
        self._loop.remove_reader(self._socket)
        self._socket.close()
