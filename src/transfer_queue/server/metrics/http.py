"""GET /metrics over HTTP, inside the server's loop: one short answer per connection, nothing else is served.

Every family is rendered by itself, and requests of clients are answered in between. A thread would not disturb them
less: it needs the interpreter as long, and gives it back less often.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterator

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from transfer_queue.errors import ConfigError
from transfer_queue.wire.address import is_loopback_header

TIMEOUT_S = 5.0  # for a visitor to ask, and again to take the answer
HEAD_NBYTES = 16 << 10
MAX_VISITORS = 32
LOOPBACK = "127.0.0.1"


class Endpoint:
    """An HTTP listener; `address` is "host:port" as scrapers on other hosts would write it."""

    def __init__(self, collector: Collector) -> None:
        self.address, self.port = "", 0
        self._collector = collector
        self._loopback = True
        self._visits: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    async def open(self, host: str, port: int) -> None:
        """Listen on `host` ("": loopback) and `port` (0: any free one). Raises `ConfigError` when that is not free."""
        host = host or LOOPBACK
        try:
            self._server = await asyncio.start_server(self._visit, host, port, limit=HEAD_NBYTES)
        except OSError as error:
            raise ConfigError(f"metrics.port: cannot listen on {host}:{port} ({error.strerror or error})") from error
        bound = self._server.sockets[0].getsockname()
        address = ipaddress.ip_address(bound[0])
        self._loopback = address.is_loopback
        self.port = int(bound[1])
        shown = socket.gethostname() if address.is_unspecified else str(address)
        self.address = f"[{shown}]:{bound[1]}" if ":" in shown else f"{shown}:{bound[1]}"

    def close(self) -> None:
        self._server.close()
        for visit in self._visits:
            visit.cancel()

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visit = asyncio.current_task()
        if visit is None or len(self._visits) >= MAX_VISITORS:
            writer.transport.abort()
            return
        self._visits.add(visit)
        writer.transport.set_write_buffer_limits(0)  # so that `drain` waits for all of it
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
            writer.write(await self._answer(head))
            await asyncio.wait_for(writer.drain(), TIMEOUT_S)
            writer.close()
        except (OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            pass  # the visitor left, or does not speak HTTP
        finally:
            self._visits.discard(visit)
            if not writer.is_closing():
                writer.transport.abort()

    async def _answer(self, head: bytes) -> bytes:
        lines = head.decode("latin-1").split("\r\n")
        method, _, rest = lines[0].partition(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        if "origin" in headers or (self._loopback and not is_loopback_header(headers.get("host", ""))):
            return _response("403 Forbidden", b"for this host only\n")  # a page in a browser, not a scraper
        if method != "GET":
            return _response("405 Method Not Allowed", b"GET only\n", "Allow: GET\r\n")
        if rest.split(" ")[0].partition("?")[0] != "/metrics":
            return _response("404 Not Found", b"see /metrics\n")
        return _response("200 OK", await page(self._collector), kind=CONTENT_TYPE_PLAIN_0_0_4)


async def page(collector: Collector) -> bytes:
    """All families as text; other work of this loop runs between them."""
    texts, last = [], ""
    for family in collector.collect():
        text = generate_latest(_Only(family))
        texts.append(text.split(b"\n", 2)[2] if family.name == last else text)  # help and type come once
        last = family.name
        await asyncio.sleep(0)
    return b"".join(texts)


class _Only(Collector):
    """One family as a registry, which is what the renderer takes."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


def _response(status: str, body: bytes, more: str = "", kind: str = "text/plain; charset=utf-8") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
