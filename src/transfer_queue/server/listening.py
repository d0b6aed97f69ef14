"""The sockets that a server is reached at."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import TypeAlias

from transfer_queue.errors import ConfigError
from transfer_queue.server.connection import ServerConnection
from transfer_queue.server.settings import DOOR_NAME, SOCKET_NAME, ServerConfig

BACKLOG = 4096  # a server that stands still for a moment turns nobody away
Factory: TypeAlias = Callable[[], ServerConnection]


class Listening:
    """The sockets that a server is reached at; a standby inherits them, and with them who waits there."""

    def __init__(self, config: ServerConfig, home: int) -> None:
        """`home`: the descriptor that holds the run directory. Raises `ConfigError`."""
        self.path = os.path.join(config.run_dir, SOCKET_NAME)
        self._home = home
        self._unix = _listen_here(self.path)
        self.door = _listen_here(os.path.join(config.run_dir, DOOR_NAME))
        self._tcp = _listen(config.host, config.port) if config.host else None
        self.tcp_name = _name(self._tcp) if self._tcp is not None else ""

    def descriptors(self) -> list[int]:
        found = [self._home, self._unix.fileno(), self.door.fileno()]
        return found if self._tcp is None else [*found, self._tcp.fileno()]

    async def serve(
        self, loop: asyncio.AbstractEventLoop, local: Factory, remote: Factory
    ) -> list[asyncio.AbstractServer]:
        """Accept connections from now on."""
        servers: list[asyncio.AbstractServer] = [await loop.create_unix_server(local, sock=self._unix, backlog=BACKLOG)]
        if self._tcp is not None:
            servers.append(await loop.create_server(remote, sock=self._tcp, backlog=BACKLOG))
        return servers


def _listen_here(path: str) -> socket.socket:
    """A unix socket of mode 0600 that listens."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    found.bind(path)
    os.chmod(path, 0o600)
    found.listen(BACKLOG)
    return found


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; connections wait until they are accepted."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(where[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error}") from error


def _name(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
