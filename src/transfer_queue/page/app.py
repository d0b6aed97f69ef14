"""The routes: the page itself, its events, one row, one image. All of them only read."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from transfer_queue.client.client import TransferQueueClient
from transfer_queue.errors import (
    CallerError,
    DeadlineExceeded,
    StorageKeyNotFoundError,
    TransferQueueError,
    UnknownRows,
)
from transfer_queue.page.journey import image_of, journey
from transfer_queue.page.printable import printable
from transfer_queue.page.watching import ServiceWatch

STATIC = Path(__file__).parent / "static"
KINDS = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
FILES = {path.name: (path.read_bytes(), KINDS[path.suffix]) for path in STATIC.iterdir() if path.suffix in KINDS}
PULSE_S = 1.0  # so often a viewer hears something, also of a service that stands still
SILENT_S = 1.5
ROW_S = 5.0
MAX_VIEWERS, MAX_ROWS, ROW_THREADS = 200, 16, 4
MAX_KEY = 1 << 16  # characters
T = TypeVar("T")


class Page:
    """What the routes share. `told` is to be called after each look, from any thread."""

    def __init__(self, attach: Callable[[], TransferQueueClient]) -> None:
        self.watch = ServiceWatch(attach, self.told)
        self._turns = threading.BoundedSemaphore(ROW_THREADS)
        self._reading: set[asyncio.Future[Response]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looked = asyncio.Event()
        self._closed = False
        self.app = Starlette(
            routes=[
                Route("/", _file("index.html")),
                Route("/login", _file("login.html")),
                *(Route(f"/static/{name}", _file(name)) for name in FILES if not name.endswith(".html")),
                Route("/events", self.events),
                Route("/row", self.row),
                Route("/image", self.image),
            ]
        )

    def told(self) -> None:
        loop = self._loop
        if loop is not None and not self._closed:
            loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        """End the events, and detach. The loop is not closed before."""
        self._closed = True
        self._wake()
        self.watch.close()
        for reading in self._reading:
            _answer(reading, _refusal(503, "the page has ended"))

    def _wake(self) -> None:
        """Everybody who waits for a look, and only they."""
        self._looked.set()
        self._looked = asyncio.Event()

    async def events(self, request: Request) -> Response:
        """Server-sent events until the viewer leaves: `look` for each look, `map` when there is a new one. A viewer
        that is slow gets the latest, and misses those between."""
        if self.watch.num_viewers >= MAX_VIEWERS:
            return PlainTextResponse("too many viewers\n", 503)
        self._loop = asyncio.get_running_loop()
        return StreamingResponse(self._events(_hash(request, "partition")), media_type="text/event-stream")

    async def _events(self, partition_id: str) -> AsyncIterator[bytes]:
        number = map_number = 0
        with self.watch.viewer(partition_id):
            yield b"retry: 1000\n\n"
            while not self._closed:
                looked = self._looked
                look = self.watch.latest
                if look.number != number:
                    number = look.number
                    yield _event("look", look.encoded(partition_id))
                    newest, encoded = look.encoded_map(partition_id)
                    if newest != map_number:
                        map_number = newest
                        yield _event("map", encoded) if encoded else _event("map", b"null")
                elif self.watch.silent_s > SILENT_S:
                    yield _event("silent", f"{self.watch.silent_s:.1f}".encode())
                if not looked.is_set():
                    await _within(looked.wait(), PULSE_S)

    async def row(self, request: Request) -> Response:
        """One row, by `row` or `key`, of the partition of that hash."""
        key, row = request.query_params.get("key"), _number(request, "row")
        if (key is None) == (row is None) or len(key or "") > MAX_KEY:
            return _refusal(400, "name a row by its key, or by its index")
        return await self._of_row(request, lambda client, name: _json(journey(client, name, key, row)))

    async def image(self, request: Request) -> Response:
        """One value as a small PNG."""
        row, field = _number(request, "row"), _hash(request, "field")
        if row is None:
            return _refusal(400, "name a row by its index")
        return await self._of_row(request, lambda client, name: _png(image_of(client, name, row, field)))

    async def _of_row(self, request: Request, made: Callable[[TransferQueueClient, str], Response]) -> Response:
        """`made` in a thread. A service that does not answer keeps a few of them, not the page."""
        if len(self._reading) >= MAX_ROWS:
            return _refusal(503, "others are looking at rows: try again")
        loop = asyncio.get_running_loop()
        reading: asyncio.Future[Response] = loop.create_future()
        self._reading.add(reading)
        arguments = loop, reading, _hash(request, "partition"), made
        # A daemon: Python waits for the threads of an executor, and so for a service that does not answer.
        threading.Thread(target=self._read_for, args=arguments, name="tq-page-row", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.shield(reading), ROW_S)
        except asyncio.TimeoutError:
            return _refusal(504, "the service does not answer")

    def _read_for(
        self, loop: asyncio.AbstractEventLoop, reading: asyncio.Future[Response], partition_id: str,
        made: Callable[[TransferQueueClient, str], Response],
    ) -> None:  # fmt: skip
        answer = _refusal(500, "the row could not be read")
        try:
            with self._turns:
                answer = self._read(partition_id, made)
        finally:
            with contextlib.suppress(RuntimeError):  # the page has ended, and its loop is closed
                loop.call_soon_threadsafe(self._read_one, reading, answer)

    def _read_one(self, reading: asyncio.Future[Response], answer: Response) -> None:
        self._reading.discard(reading)
        _answer(reading, answer)

    def _read(self, partition_id: str, made: Callable[[TransferQueueClient, str], Response]) -> Response:
        try:
            client = self.watch.client()
            name = self.watch.name_of(partition_id, client)
            return _refusal(404, "there is no such partition any more") if name is None else made(client, name)
        except (UnknownRows, StorageKeyNotFoundError) as error:
            return _refusal(404, str(error))
        except CallerError as error:
            return _refusal(400, str(error))
        except DeadlineExceeded as error:
            return _refusal(504, str(error))
        except TransferQueueError as error:
            return _refusal(503, str(error))


def _answer(reading: asyncio.Future[Response], answer: Response) -> None:
    if not reading.done():
        reading.set_result(answer)


def _file(name: str) -> Callable[[Request], Any]:
    async def found(_: Request) -> Response:
        content, kind = FILES[name]
        return Response(content, media_type=kind)

    return found


def _event(name: str, data: bytes) -> bytes:
    """`data` has no line breaks: JSON writes them out."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


async def _within(waiting: Any, timeout_s: float) -> None:
    """Until `waiting` is over, or the time is."""
    try:
        await asyncio.wait_for(waiting, timeout_s)
    except asyncio.TimeoutError:
        return


def _hash(request: Request, name: str) -> str:
    """A hash of the query; "" for anything else."""
    found = request.query_params.get(name, "")
    return found if re.fullmatch("[0-9a-f]{16}", found) else ""


def _number(request: Request, name: str) -> int | None:
    """A row of the query, None for anything else."""
    found = request.query_params.get(name, "")
    return int(found) if re.fullmatch("[0-9]{1,18}", found) else None


def _json(values: Any) -> Response:
    return Response(msgspec.json.encode(values), media_type="application/json")


def _refusal(status: int, why: str) -> Response:
    return Response(msgspec.json.encode({"error": printable(why, 400)}), status, media_type="application/json")


def _png(content: bytes | None) -> Response:
    return _refusal(404, "this value is no picture") if content is None else Response(content, media_type="image/png")
