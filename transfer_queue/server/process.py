"""The server process: listeners, timers, the watch on its owner, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from typing import cast

import msgspec

from transfer_queue.controller import Controller
from transfer_queue.errors import ConfigError
from transfer_queue.sampler import from_spec
from transfer_queue.server.compacting import Compactor
from transfer_queue.server.door import Door
from transfer_queue.server.link import Link
from transfer_queue.server.service import Service
from transfer_queue.server.settings import DOOR_NAME, SOCKET_NAME, Ready, ServerConfig, clear_run_dir
from transfer_queue.storage.shm.unit import Unit
from transfer_queue.wire.messages import Welcome

log = logging.getLogger("transfer_queue.server")


class Server:
    """One running server; `run` returns after `stop`, SIGTERM, or the end of the owner."""

    def __init__(self, config: ServerConfig) -> None:
        if config.host and not config.token:
            raise ConfigError("serving TCP needs a token: an open port without one would serve everybody")
        if config.join:
            raise ConfigError(f"joining {config.join}: this release has one storage unit, the controller's")
        self.config = config
        self.links: set[Link] = set()
        unit = Unit(config.budget_nbytes, config.arena_dir)
        self.service = Service(Controller(from_spec(config.sampler), config.max_rows, config.reserved_rows), unit)
        self._compactor = Compactor(self.service)
        self._stopped = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at = 0.0
        self._recent_peak = 0

    async def run(self, announce: int) -> None:
        """Serve; writes the addresses as one JSON line to the descriptor `announce`."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        os.makedirs(self.config.run_dir, mode=0o700, exist_ok=True)
        path = os.path.join(self.config.run_dir, SOCKET_NAME)
        for name in (SOCKET_NAME, DOOR_NAME):
            _claim(os.path.join(self.config.run_dir, name))
        try:
            door = Door(os.path.join(self.config.run_dir, DOOR_NAME), self.service.unit)
            servers = [await loop.create_unix_server(lambda: Link(self, "", local=True), path)]
            os.chmod(path, 0o600)
            if self.config.host:
                servers.append(await loop.create_server(self._remote, self.config.host, self.config.port))
            watch = self._watch_owner(loop)
            self._announce(announce, path, servers[1:])
            trimmer = loop.create_task(self._trim())
            await self._stopped.wait()
            trimmer.cancel()
            if watch is not None:
                loop.remove_reader(watch)
                os.close(watch)
            door.close()
            for server in servers:
                server.close()
            for link in list(self.links):
                link.close()
            await asyncio.sleep(0)
        finally:
            self.service.unit.close()
            clear_run_dir(self.config.run_dir)

    def _remote(self) -> Link:
        return Link(self, self.config.token, local=False)

    def stop(self) -> None:
        self._stopped.set()

    def welcome(self, local: bool) -> Welcome:
        door = os.path.join(self.config.run_dir, DOOR_NAME) if local else ""
        return Welcome(os.getpid(), door, json.dumps(self.config.client).encode())

    def deliver(self) -> None:
        """Send the answers of parked requests that have one now, and keep the timer on the next deadline."""
        for ticket, reply in self.service.answered():
            link = cast(Link, ticket[0])  # type: ignore[index]
            link.answer_parked(ticket, reply)
        self._compactor.run()
        deadline = self.service.next_deadline()
        if deadline is None or (self._timer is not None and deadline == self._wake_at):
            return
        if self._timer is not None:
            self._timer.cancel()
        delay = max(0.0, deadline - time.monotonic())
        self._wake_at = deadline
        self._timer = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self.service.expire(time.monotonic())
        self.deliver()

    async def _trim(self) -> None:
        """Every `trim_after_s`, return the memory that the last two periods did not need."""
        unit = self.service.unit
        while True:
            await asyncio.sleep(self.config.trim_after_s)
            peak, unit.peak_nbytes = unit.peak_nbytes, unit.used_nbytes
            unit.trim(max(peak, self._recent_peak))
            self._recent_peak = peak

    def _watch_owner(self, loop: asyncio.AbstractEventLoop) -> int | None:
        """Stop when the owner ends. The descriptor of a process becomes readable then (pidfd_open(2))."""
        owner = self.config.owner_pid
        if not owner:
            return None
        try:
            watch = os.pidfd_open(owner)
        except ProcessLookupError:
            self.stop()
            return None
        loop.add_reader(watch, self.stop)
        return watch

    def _announce(self, descriptor: int, path: str, tcp: list[asyncio.Server]) -> None:
        address = ""
        if tcp:
            host, port = tcp[0].sockets[0].getsockname()[:2]
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        ready = Ready(pid=os.getpid(), unix=path, tcp=address)
        os.write(descriptor, msgspec.json.encode(ready) + b"\n")
        if descriptor > 2:
            os.close(descriptor)


def _claim(path: str) -> None:
    """Remove the socket of a server that was killed; `ConfigError` where one is alive."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise ConfigError(f"another server listens on {path}")


def serve(config: ServerConfig, announce: int) -> None:
    """Run a server in this process until it is stopped."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # replies are trees of small objects without cycles
    try:
        import uvloop

        runner = uvloop.run
    except ImportError:
        runner = asyncio.run

    async def main() -> None:
        await Server(config).run(announce)

    runner(main())


def main() -> None:
    """Entry of the child process: the config comes as JSON on standard input, the addresses go to standard output."""
    logging.basicConfig(
        level=os.environ.get("TQ_LOGGING_LEVEL", "WARNING"), format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerConfig)
    serve(config, announce=1)
