"""The process of the page: an HTTP server on one thread, until SIGTERM, Ctrl-C or the end of who started it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable

import uvicorn

from transfer_queue.client.client import TransferQueueClient
from transfer_queue.page.access import Access
from transfer_queue.page.app import Page
from transfer_queue.weights.http.serving import PatientHttp
from transfer_queue.wire.address import is_loopback

MAX_CONNECTIONS = 512
STOP_S = 1


def serve(
    attach: Callable[[], TransferQueueClient], listener: socket.socket, token: str, owner: int | None = None
) -> None:
    """Serve on `listener` until the process is told to end. `owner`: a descriptor; the end of what can be read from it
    is the end of the page."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    asyncio.run(_serve(attach, listener, token, owner))


async def _serve(
    attach: Callable[[], TransferQueueClient], listener: socket.socket, token: str, owner: int | None
) -> None:
    host, port = listener.getsockname()[:2]
    page = Page(attach)
    config = uvicorn.Config(
        Access(page.app, token, is_loopback(host), port), http=PatientHttp, ws="none",
        lifespan="off", log_config=None, access_log=False, server_header=False, limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=STOP_S,
    )  # fmt: skip
    server = _Server(config, page)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    if owner is not None:
        asyncio.get_running_loop().add_reader(owner, server.end_with_owner, owner)
    await server.serve([listener])


class _Server(uvicorn.Server):
    """Ends the events first: their viewers would never leave by themselves. A signal is a good end."""

    def __init__(self, config: uvicorn.Config, page: Page) -> None:
        super().__init__(config)
        self._page = page

    def end_with_owner(self, owner: int) -> None:
        if not os.read(owner, 4096):
            asyncio.get_running_loop().remove_reader(owner)
            self.stop()

    def stop(self) -> None:
        self.should_exit = True

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """uvicorn's own way raises the signal again at the end."""
        return contextlib.nullcontext()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._page.close()
        await super().shutdown(sockets)
