"""The sockets that a server is reached at."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import TypeAlias

from transfer_queue.errors import ConfigError
from transfer_queue.server.connection import ServerConnection
from transfer_queue.server.settings import DOOR_NAME, SOCKET_NAME, ServerConfig

log = logging.getLogger("transfer_queue.server")

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
        self._remote: Factory | None = None  # from `serve` on
        self._servers: list[asyncio.AbstractServer] = []
        self._former: list[object] = []  # of event loops before: to take it apart would reach into them

    @property
    def tcp_name(self) -> str:
        return _name(self._tcp) if self._tcp is not None else ""

    def descriptors(self) -> list[int]:
        found = [self._home, self._unix.fileno(), self.door.fileno()]
        return found if self._tcp is None else [*found, self._tcp.fileno()]

    async def serve(self, loop: asyncio.AbstractEventLoop, local: Factory, remote: Factory) -> None:
        """Accept connections from now on."""
        self._former.append(self._servers)
        self._servers, self._remote = [await loop.create_unix_server(local, sock=self._unix, backlog=BACKLOG)], remote
        if self._tcp is not None:
            self._servers.append(await loop.create_server(remote, sock=self._tcp, backlog=BACKLOG))

    async def move(self, host: str) -> bool:
        """Listen on `host` in place of the address so far, where that is another one. Returns whether it does now."""
        if self._tcp is None or self._tcp.getsockname()[0] == host:
            return False
        try:
            before, self._tcp = self._tcp, _listen_again(host, self._tcp.getsockname()[1])
        except ConfigError as error:
            log.error("other hosts cannot reach this one at its new address: %s", error)
            return False
        if self._remote is None:
            before.close()
        else:
            self._servers.pop().close()
            loop = asyncio.get_running_loop()
            self._servers.append(await loop.create_server(self._remote, sock=self._tcp, backlog=BACKLOG))
        return True

    def close(self) -> None:
        for server in self._servers:
            server.close()


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


def _listen_again(host: str, port: int) -> socket.socket:
    """As `_listen`, on another port where somebody has that one."""
    try:
        return _listen(host, port)
    except ConfigError:
        return _listen(host, 0)


def _name(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
