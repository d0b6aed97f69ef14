"""One HTTP server that answers in JSON: calls that end in time, and refusals as typed errors."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from transfer_queue.errors import (
    AccessDenied,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    NotOpen,
    NotSupported,
    ProtocolError,
    ServiceUnavailable,
    TransferQueueError,
    error_from_code,
)

MAX_ANSWER_NBYTES = 256 << 20  # checksums of a million tensors
Answer = dict[str, Any]
_BY_STATUS: dict[int, type[TransferQueueError]] = {
    401: AccessDenied, 403: AccessDenied, 404: NotSupported, 405: NotSupported, 408: DeadlineExceeded, 409: NotOpen,
    500: InternalError, 501: NotSupported, 502: ServiceUnavailable, 503: ServiceUnavailable, 504: DeadlineExceeded,
}  # fmt: skip


class HttpPeer(NamedTuple):
    """`token` goes with every call ("": none)."""

    url: str
    host: str
    port: int
    secure: bool
    prefix: str
    token: str

    @staticmethod
    def of(url: str, token: str) -> HttpPeer:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
            http.client.HTTPConnection(host, port or 80)  # connects nobody yet
            (host.encode("idna"), parts.path.encode("ascii"))
        except (ValueError, http.client.InvalidURL) as error:
            raise ConfigError(f"{url!r} is not the URL of a server: {error}") from None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{url!r} is not the URL of a server")
        secure = parts.scheme == "https"
        return HttpPeer(url, host, port or (443 if secure else 80), secure, parts.path.rstrip("/"), token)

    def optional(self, path: str, timeout_s: float, more: Mapping[str, str]) -> None:
        """POST to a route that the server need not have."""
        with suppress(NotSupported):
            self.call("POST", path, None, timeout_s, more)

    def call(
        self, method: str, path: str, body: Answer | None, timeout_s: float, more: Mapping[str, str] | None = None
    ) -> Answer:
        """The JSON object answered with 200. A typed error for everything else; `DeadlineExceeded` in time."""
        headers = {"Connection": "close", **(more or {})}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        try:
            data = None if body is None else json.dumps(body)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"{path}: {error}") from None
        if data is not None:
            headers["Content-Type"] = "application/json"
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        link = kind(self.host, self.port, timeout=timeout_s)
        late = threading.Event()
        try:
            status, text = _exchange(link, method, self.prefix + path, data, headers, timeout_s, late)
        except (OSError, http.client.HTTPException) as error:
            if not late.is_set() and not isinstance(error, TimeoutError):
                raise ServiceUnavailable(f"{self.url}{path}: {error!r}") from None
            late.set()
        finally:
            link.close()
        if late.is_set():
            raise DeadlineExceeded(f"{self.url}{path}: no answer within {timeout_s} s")
        return _read(status, text, path)


def _exchange(
    link: http.client.HTTPConnection, method: str, path: str, data: str | None, headers: dict[str, str],
    timeout_s: float, late: threading.Event,
) -> tuple[int, bytes]:  # fmt: skip
    """Status and body. The socket's own timeout is one for each read, which a peer that drips bytes never meets: a
    timer sets `late` and ends the connection."""
    deadline = time.monotonic() + timeout_s
    link.connect()
    timer = threading.Timer(deadline - time.monotonic(), _cut, (link.sock, late))
    timer.start()
    try:
        link.request(method, path, data, headers)
        with link.getresponse() as response:
            return response.status, response.read(MAX_ANSWER_NBYTES + 1)
    finally:
        timer.cancel()
        timer.join()


def _cut(sock: socket.socket, late: threading.Event) -> None:
    late.set()
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _read(status: int, text: bytes, path: str) -> Answer:
    if len(text) > MAX_ANSWER_NBYTES:
        raise ProtocolError(f"{path}: an answer of more than {MAX_ANSWER_NBYTES} bytes")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = text.decode(errors="replace")[:2000]
    if status == 200 and isinstance(found, dict):
        return found
    if status == 200:
        raise ProtocolError(f"{path}: the answer is no JSON object")
    raise _error(status, found, path)


def _error(status: int, found: Any, path: str) -> TransferQueueError:
    """What a refusal says: in our envelope with a `reason`, in vLLM's, in older ones, or in plain text."""
    inner = found.get("error", found.get("detail", found)) if isinstance(found, dict) else found
    message = inner.get("message", inner) if isinstance(inner, dict) else inner
    reason = inner.get("reason") if isinstance(inner, dict) else None
    said = f"{path}: {message}" if message else f"{path}: {status}"
    if isinstance(reason, str) and reason and status not in (404, 405):
        return error_from_code(reason, said)
    kind = _BY_STATUS.get(status, InvalidInput if 400 <= status < 500 else InternalError)
    return kind(f"{said} ({status})")
