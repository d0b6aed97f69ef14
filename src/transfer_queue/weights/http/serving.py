"""The control surface on a port of its own, served by a thread."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from types import TracebackType
from typing import Any

from transfer_queue.errors import ConfigError, DeadlineExceeded
from transfer_queue.weights.control.control import Control
from transfer_queue.weights.control.control_async import AsyncControl
from transfer_queue.weights.http.extra import lacking
from transfer_queue.weights.http.server import control_app
from transfer_queue.wire.address import advertised, is_loopback
from transfer_queue.wire.token import checked_token, token_from_environment

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as error:
    raise lacking(error) from error

LOOPBACK = "127.0.0.1"
HEAD_TIMEOUT_S = 10.0
MAX_STRANGERS = 64
STOP_TIMEOUT_S = 5.0


class HttpServer:
    """A running server: `url`, and the `token` it asks for. `close` it, or use it as a context."""

    def __init__(self, app: Any, host: str, port: int, token: str) -> None:
        self.token = token
        self._socket = _listen(host, port)
        bound = self._socket.getsockname()
        shown = advertised(bound[0])
        self.url = f"http://[{shown}]:{bound[1]}" if ":" in shown else f"http://{shown}:{bound[1]}"
        config = uvicorn.Config(
            app, http=PatientHttp, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
            timeout_graceful_shutdown=int(STOP_TIMEOUT_S), headers=[("Connection", "close")],
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="tq-weights-http", daemon=True)
        self._thread.start()
        self._wait()

    def close(self) -> None:
        """Stop taking requests, give the running ones a few seconds, and end. May be repeated."""
        self._server.should_exit = True
        self._thread.join(2 * STOP_TIMEOUT_S)
        self._socket.close()

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._socket]))

    def _wait(self) -> None:
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                self.close()
                raise DeadlineExceeded(f"the server did not start within {STOP_TIMEOUT_S} s")
            time.sleep(0.001)


def serve(
    control: Control | AsyncControl, host: str = LOOPBACK, port: int = 0, token: str | None = None, **limits: Any
) -> HttpServer:
    """Serve until `close` (port 0: any free one). `limits` are those of `control_app`.

    `token` None: the one of the environment (`TQ_TOKEN`, `TQ_TOKEN_FILE`), or a random one. "": none, on the loopback
    interface only, as one of fewer than 16 characters. `ConfigError` for others, and when it cannot listen there.
    """
    if token is None:
        token = token_from_environment() or secrets.token_urlsafe(32)
    if not is_loopback(host):
        if not token:
            raise ConfigError(f"{host} can be reached by others: serving there needs a token")
        checked_token(token, "token")
    return HttpServer(control_app(control, token, **limits), host, port, token)


class PatientHttp(H11Protocol):
    """uvicorn waits for a request's head for ever; here it has `HEAD_TIMEOUT_S`, and of the connections without one the
    latest `MAX_STRANGERS` stay: nobody keeps others out by staying. One request per connection."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._patience = self.loop.call_later(HEAD_TIMEOUT_S, self._expect_head)
        strangers = [one for one in self.connections if isinstance(one, PatientHttp) and one._is_stranger()]
        if len(strangers) > MAX_STRANGERS:
            min(strangers, key=lambda one: one._patience.when()).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.cancel()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._is_stranger():
            self.transport.abort()

    def _is_stranger(self) -> bool:
        begun: Any = self.cycle  # None until there is a request, whatever uvicorn's annotation says
        return begun is None and not self.transport.is_closing()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=MAX_STRANGERS)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
