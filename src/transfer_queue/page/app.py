"""The routes: the page itself, its events, one row, one image. All of them only read, and all but images are HTML."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

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
from transfer_queue.page import fragments
from transfer_queue.page.journey import image_of, journey
from transfer_queue.page.printable import printable
from transfer_queue.page.watching import ServiceWatch

STATIC = Path(__file__).parent / "static"
KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
FILES = {path.name: (path.read_bytes(), KINDS[path.suffix]) for path in STATIC.iterdir() if path.suffix in KINDS}
PULSE_S = 1.0  # so often a viewer hears something, also of a service that stands still
SILENT_S = 1.5
ROW_S = 5.0
MAX_VIEWERS, MAX_ROWS, ROW_THREADS = 200, 16, 4
MAX_KEY = 1 << 16  # characters


class RowWanted(NamedTuple):
    """What a request names: a partition, by hash, and a row of it."""

    partition_id: str
    key: str | None
    row: int | None

    def refusal(self, status: int, why: str) -> Response:
        return _html(fragments.refusal(printable(why, 400), self.partition_id, self.row), status)


Made: TypeAlias = Callable[[TransferQueueClient, str], Response]  # of the partition of that name


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
                Route("/", _index),
                Route("/login", _login),
                *(Route(f"/static/{name}", _file(name)) for name in FILES),
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
            _answer(reading, RowWanted("", None, None).refusal(503, "the page has ended"))

    def _wake(self) -> None:
        """Everybody who waits for a look, and only they."""
        self._looked.set()
        self._looked = asyncio.Event()

    async def events(self, request: Request) -> Response:
        """Server-sent events until the viewer leaves: after each look the parts of the page that have changed for this
        viewer, in one message without a name, or a `pulse` where none has; and a `map` when there is another one. A
        viewer that is slow gets the latest, and misses those between."""
        if self.watch.num_viewers >= MAX_VIEWERS:
            return PlainTextResponse("too many viewers\n", 503)
        self._loop = asyncio.get_running_loop()
        return StreamingResponse(self._events(_hash(request, "partition")), media_type="text/event-stream")

    async def _events(self, partition_id: str) -> AsyncIterator[bytes]:
        number, sent, sent_map = 0, dict[str, bytes](), b""
        with self.watch.viewer(partition_id):
            yield b":\n\n"
            while not self._closed:
                looked = self._looked
                look = self.watch.latest
                if look.number != number:
                    number = look.number
                    if look.overview is not None and (encoded := look.encoded_map(partition_id)) != sent_map:
                        sent_map = encoded
                        yield _event(encoded, "map")  # before what is written beside its lines
                    yield _changed(look.fragments(partition_id), sent)
                elif (silent_s := self.watch.silent_s) > SILENT_S:
                    text = f"The service has not answered for {silent_s:.1f} s. What is shown is from before."
                    yield _changed(fragments.state("bad", "no answer", text), sent)
                if not looked.is_set():
                    await _within(looked.wait(), PULSE_S)

    async def row(self, request: Request) -> Response:
        """One row of the partition of that hash: by `row`, by `key`, or by `wanted`, which is a key, or "#17"."""
        wanted = _wanted(request)
        key, row = wanted.key, wanted.row
        if (key is None) == (row is None) or len(key or "") > MAX_KEY:
            return wanted.refusal(400, "name a row by its key, or by its index")
        return await self._of_row(wanted, lambda client, name: _html(
            fragments.row(journey(client, name, key, row), wanted.partition_id)
        ))  # fmt: skip

    async def image(self, request: Request) -> Response:
        """One value as a small PNG."""
        wanted, field = _wanted(request), _hash(request, "field")
        row = wanted.row
        if row is None:
            return wanted.refusal(400, "name a row by its index")

        def made(client: TransferQueueClient, name: str) -> Response:
            content = image_of(client, name, row, field)
            if content is None:
                return wanted.refusal(404, "this value is no picture")
            return Response(content, media_type="image/png")

        return await self._of_row(wanted, made)

    async def _of_row(self, wanted: RowWanted, made: Made) -> Response:
        """`made` in a thread. A service that does not answer keeps a few of them, not the page."""
        if len(self._reading) >= MAX_ROWS:
            return wanted.refusal(503, "others are looking at rows: try again")
        loop = asyncio.get_running_loop()
        reading: asyncio.Future[Response] = loop.create_future()
        self._reading.add(reading)
        # A daemon: Python waits for the threads of an executor, and so for a service that does not answer.
        arguments = loop, reading, wanted, made
        threading.Thread(target=self._read_for, args=arguments, name="tq-page-row", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.shield(reading), ROW_S)
        except asyncio.TimeoutError:
            return wanted.refusal(504, "the service does not answer")

    def _read_for(
        self, loop: asyncio.AbstractEventLoop, reading: asyncio.Future[Response], wanted: RowWanted, made: Made
    ) -> None:
        answer = wanted.refusal(500, "the row could not be read")
        try:
            with self._turns:
                answer = self._read(wanted, made)
        finally:
            with contextlib.suppress(RuntimeError):  # the page has ended, and its loop is closed
                loop.call_soon_threadsafe(self._read_one, reading, answer)

    def _read_one(self, reading: asyncio.Future[Response], answer: Response) -> None:
        self._reading.discard(reading)
        _answer(reading, answer)

    def _read(self, wanted: RowWanted, made: Made) -> Response:
        try:
            client = self.watch.client()
            name = self.watch.name_of(wanted.partition_id, client)
            return wanted.refusal(404, "there is no such partition any more") if name is None else made(client, name)
        except (UnknownRows, StorageKeyNotFoundError) as error:
            return wanted.refusal(404, str(error))
        except CallerError as error:
            return wanted.refusal(400, str(error))
        except DeadlineExceeded as error:
            return wanted.refusal(504, str(error))
        except TransferQueueError as error:
            return wanted.refusal(503, str(error))


def _answer(reading: asyncio.Future[Response], answer: Response) -> None:
    if not reading.done():
        reading.set_result(answer)


def _file(name: str) -> Callable[[Request], Any]:
    async def found(_: Request) -> Response:
        content, kind = FILES[name]
        return Response(content, media_type=kind)

    return found


async def _index(request: Request) -> Response:
    return _html(fragments.index(_hash(request, "partition")))


async def _login(_: Request) -> Response:
    return _html(fragments.login())


def _event(data: bytes, name: str = "") -> bytes:
    """One message. HTMX puts those without a name into the page, and tells the script of the others."""
    lines = data.replace(b"\r", b"").replace(b"\n", b"\ndata: ")
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + lines + b"\n\n"


def _changed(found: dict[str, bytes], sent: dict[str, bytes]) -> bytes:
    """The parts of the page that differ from those that were sent, which they are from now on."""
    news = {name: part for name, part in found.items() if sent.get(name) != part}
    sent.update(news)
    return _event(b"".join(news.values())) if news else _event(b"", "pulse")


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


def _wanted(request: Request) -> RowWanted:
    """The row that a request names; of one that names none, or two, neither or both."""
    partition_id, key, row = _hash(request, "partition"), request.query_params.get("key"), _number(request, "row")
    wanted = request.query_params.get("wanted")
    if wanted is None:
        return RowWanted(partition_id, key, row)
    index = re.fullmatch("#([0-9]{1,18})", wanted)
    return RowWanted(partition_id, None, int(index[1])) if index else RowWanted(partition_id, wanted, None)


def _html(content: bytes, status: int = 200) -> Response:
    return Response(content, status, media_type="text/html")
