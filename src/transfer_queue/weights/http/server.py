"""vLLM's weight-transfer and pause routes as an ASGI app over a `Control`."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from transfer_queue.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidInput,
    NotSupported,
    TooManyConnections,
    TransferQueueError,
)
from transfer_queue.weights.control.control import Control
from transfer_queue.weights.control.control_async import AsyncControl
from transfer_queue.weights.http import bodies
from transfer_queue.weights.http.extra import lacking
from transfer_queue.weights.receive.status import encode

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
except ModuleNotFoundError as error:
    raise lacking(error) from error

MAX_BODY_NBYTES = 64 << 20  # metadata of a million tensors; weights go another way
BODY_TIMEOUT_S = 30.0
MAX_CALLS = 64
CALL_TIMEOUT_S = 660.0  # more than the steps' own deadlines, which end them cleanly
TURNS = 3  # of the event loop, in which it reads the end of a connection that lies behind the body
EXPECTED = (503, 504)  # a server that is busy, paused or late says so: nothing is wrong with its program
Answer: TypeAlias = "dict[str, Any]"
log = logging.getLogger(__name__)


def control_app(
    control: Control | AsyncControl,
    token: str,
    *,
    max_body_nbytes: int = MAX_BODY_NBYTES,
    body_timeout_s: float = BODY_TIMEOUT_S,
    call_timeout_s: float = CALL_TIMEOUT_S,
    weights_root: str = "",
) -> Starlette:
    """The routes, to be served alone or mounted: `app.mount("/", control_app(control, token))`, after other routes.

    Every request needs `Authorization: Bearer <token>`; "" lets everybody in. Of those that have it `MAX_CALLS` run at
    a time; others are refused (`TooManyConnections`). A call that has no answer within `call_timeout_s` gets 504 and
    may still take effect. Blocking work runs in threads.
    `weights_root`: the disk engine takes weights from below this folder only (default: the engine's own, else
    TQ_WEIGHTS_ROOT, else from nowhere).
    """
    bodies.check_token(token)
    shared = control if isinstance(control, AsyncControl) else AsyncControl(control)
    shared.control.confine(weights_root)
    routes = _Routes(shared, max_body_nbytes, body_timeout_s, call_timeout_s)
    return Starlette(
        routes=routes.all(),
        middleware=[Middleware(_Guard, token=token)],
        exception_handlers={HTTPException: _no_route},
    )


class _Routes:
    def __init__(
        self, control: AsyncControl, max_body_nbytes: int, body_timeout_s: float, call_timeout_s: float
    ) -> None:
        self._control = control
        self._max_body_nbytes = max_body_nbytes
        self._body_timeout_s = body_timeout_s
        self._call_timeout_s = call_timeout_s

    def all(self) -> list[Route]:
        post = {
            "/init_weight_transfer_engine": self.init,
            "/start_weight_update": self.start,
            "/start_draft_weight_update": self.start_draft,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish,
            "/shutdown_weight_transfer_engine": self.shutdown,
            "/update_weight_version": self.rename,
            "/weight_checker": self.check,
            "/pause": self.pause,
            "/resume": self.resume,
            "/abort_requests": self.abort_requests,
            "/tqw/abort_weight_update": self.abort_update,
        }
        get = {
            "/weight_info": self.info,
            "/is_paused": self.is_paused,
            "/get_world_size": self.world_size,
            "/tqw/status": self.status,
        }
        posts = [Route(path, self._endpoint(self._with_body(call)), methods=["POST"]) for path, call in post.items()]
        return posts + [Route(path, self._endpoint(call), methods=["GET"]) for path, call in get.items()]

    def _endpoint(self, call: Callable[[Request], Awaitable[Answer]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return JSONResponse(await asyncio.wait_for(call(request), self._call_timeout_s))
            except Exception as error:  # noqa: BLE001  the server lives on, whatever a call ran into
                if isinstance(error, asyncio.TimeoutError) and not isinstance(error, TransferQueueError):
                    error = DeadlineExceeded(f"no result within {self._call_timeout_s} s: it may still come")
                return _refuse(_told(error, request))

        return answer

    def _with_body(self, call: Callable[[Request, bytes], Awaitable[Answer]]) -> Callable[[Request], Awaitable[Answer]]:
        """Calls that change something. One whose caller has hung up before it began is not made: a server that was
        stopped finds it when it goes on, and by then the caller may be in another update."""

        async def made(request: Request) -> Answer:
            data = await self._body(request)
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if await request.is_disconnected():
                raise bodies.Refusal(DeadlineExceeded("the caller has gone before the call began"))
            return await call(request, data)

        return made

    async def _body(self, request: Request) -> bytes:
        async def read() -> bytes:
            data = bytearray()
            async for part in request.stream():
                data += part
                if len(data) > self._max_body_nbytes:
                    raise bodies.Refusal(InvalidInput(f"a body has at most {self._max_body_nbytes} bytes"), "body", 413)
            return bytes(data)

        try:
            return await asyncio.wait_for(read(), self._body_timeout_s)
        except asyncio.TimeoutError:
            late = DeadlineExceeded(f"the body did not come within {self._body_timeout_s} s")
            raise bodies.Refusal(late, "body", 408) from None
        except ClientDisconnect:
            raise bodies.Refusal(InvalidInput("the body ended early"), "body") from None

    # updates

    async def init(self, _request: Request, data: bytes) -> Answer:
        body = bodies.parse(data, bodies.InitBody)
        await self._control.init_weight_transfer_engine(body.init_info)
        return {"message": "Weight transfer initialized"}

    async def start(self, request: Request, _data: bytes) -> Answer:
        self._control.control.expect_run(bodies.run_of(request.headers))
        await self._control.start_weight_update()
        return {"message": "Weight update started"}

    async def start_draft(self, _request: Request, _data: bytes) -> Answer:
        await self._control.start_draft_weight_update()
        return {"message": "Draft weight update started"}

    async def update(self, _request: Request, data: bytes) -> Answer:
        body = bodies.parse(data, bodies.UpdateBody)
        await self._control.update_weights(body.update_info)
        return {"message": "Weights updated"}

    async def finish(self, request: Request, data: bytes) -> Answer:
        body = bodies.parse(data, bodies.FinishBody) if data.strip() else bodies.FinishBody()
        self._control.control.expect_run(bodies.run_of(request.headers))
        await self._control.finish_weight_update(body.weight_version)
        return {"message": "Weight update finished"}

    async def shutdown(self, request: Request, _data: bytes) -> Answer:
        self._control.control.expect_run(bodies.run_of(request.headers))
        await self._control.shutdown_weight_transfer_engine()
        return {"message": "Weight transfer shut down"}

    async def abort_update(self, request: Request, _data: bytes) -> Answer:
        self._control.control.expect_run(bodies.run_of(request.headers))
        return {"aborted": await self._control.abort_weight_update("a client asked to")}

    # versions and checks

    async def rename(self, request: Request, data: bytes) -> Answer:
        body = bodies.parse(data, bodies.VersionBody)
        self._control.control.expect_run(bodies.run_of(request.headers))
        await self._control.update_weight_version(body.new_version)
        return {"success": True, "new_version": body.new_version}

    async def info(self, _request: Request) -> Answer:
        return {"weight_version": await self._control.get_weight_version()}

    async def check(self, _request: Request, data: bytes) -> Answer:
        body = bodies.parse(data, bodies.CheckBody)
        if body.action == "reset":
            await self._control.reset_weights()
            return {"status": "reset"}
        if body.action == "checksum":
            return {"checksums": await self._control.compute_weight_checksums()}
        if body.baseline is None:
            raise bodies.Refusal(InvalidInput("to compare needs a 'baseline' object"), "body.baseline")
        return (await self._control.compare_weights(body.baseline))._asdict()

    async def world_size(self, request: Request) -> Answer:
        include_dp = bodies.flag(request.query_params.get("include_dp"), True, "include_dp")
        return {"world_size": await self._control.get_world_size(include_dp)}

    async def status(self, _request: Request) -> Answer:
        return encode(await self._control.status())

    # generation

    async def pause(self, request: Request, _data: bytes) -> Answer:
        query = request.query_params
        clear_cache = bodies.flag(query.get("clear_cache"), True, "clear_cache")
        waits = bodies.flag(query.get("wait_for_inflight_requests"), False, "wait_for_inflight_requests")
        mode: Any = query.get("mode", "wait" if waits else "abort")
        lease_s = bodies.seconds(query.get("lease_s"), "lease_s")
        await self._control.pause_generation(mode, clear_cache, query.get("owner", ""), lease_s)
        return {"status": "paused"}

    async def resume(self, request: Request, _data: bytes) -> Answer:
        await self._control.resume_generation(request.query_params.get("owner"))
        return {"status": "resumed"}

    async def is_paused(self, _request: Request) -> Answer:
        return {"is_paused": await self._control.is_paused()}

    async def abort_requests(self, _request: Request, data: bytes) -> Answer:
        body = bodies.parse(data, bodies.AbortBody)
        return {"status": "aborted", "aborted": await self._control.abort_requests(body.request_ids)}


class _Guard:
    """Asks for the token before anything of a request is read, and counts the requests that have it."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else b""
        self._num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif not self._is_let_in(scope):
            await _refuse(bodies.Refusal(AccessDenied("missing or wrong token")))(scope, receive, send)
        elif self._num_calls >= MAX_CALLS:
            full = TooManyConnections(f"{MAX_CALLS} calls run here, as many as may: try again when others have ended")
            await _refuse(bodies.Refusal(full))(scope, receive, send)
        else:
            self._num_calls += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._num_calls -= 1

    def _is_let_in(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return not self._expected or hmac.compare_digest(given, self._expected)


def _refuse(refusal: bodies.Refusal) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
    if refusal.status == 503:
        headers["Retry-After"] = "1"
    return JSONResponse(refusal.body(), refusal.status, headers)


def _told(error: Exception, request: Request) -> bodies.Refusal:
    refusal = bodies.refusal_of(error)
    if refusal.status in EXPECTED:
        log.warning("%s: %s", request.url.path, refusal)
    elif refusal.status >= 500:
        log.error("%s failed", request.url.path, exc_info=error)
    return refusal


async def _no_route(_request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = "no such route" if status == 404 else "this route has another method" if status == 405 else str(error)
    return _refuse(bodies.Refusal(NotSupported(what), None, status))
