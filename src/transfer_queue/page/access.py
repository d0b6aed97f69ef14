"""Who may look. Every request passes here first, and every answer gets its headers here."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from hmac import compare_digest
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from transfer_queue.wire.address import is_loopback_header

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "tq_page"
OPEN_PATHS = frozenset({"/login", "/static/page.css", "/static/icon.svg"})  # nothing of the service is in them
MAX_FORM_NBYTES = 4096
FORM_S = 5.0  # so long a form may be on its way
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "connection": "close",  # one that waits for its next request would keep others out
}


class Access:
    """Around an application: with a `token` every request needs it; a page that only listens on loopback (`is_local`)
    answers for no other host name. A browser shows the token once, and has a cookie that is as good until the page's
    process ends."""

    def __init__(self, app: App, token: str, is_local: bool, port: int) -> None:
        self._app = app
        self._token = token.encode()
        self._is_local = is_local
        self._cookie = f"{COOKIE}_{port}"  # cookies do not know ports, and a user may have several pages
        self._pass = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        answer = self._refused(scope) or await self._login(Request(scope, receive))
        await (answer or self._app)(scope, receive, send_with_headers)

    def _refused(self, scope: Scope) -> Response | None:
        """For requests that no page of ours makes."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._is_local and not is_loopback_header(host):
            return PlainTextResponse("for this host only\n", 403)  # a foreign name means DNS rebinding
        origin = headers.get("origin")
        is_form = scope["path"] == "/login" and origin == "null"  # as browsers send a form of a page without referrer
        if not is_form and origin not in (None, f"http://{host}", f"https://{host}"):
            return PlainTextResponse("not from another page\n", 403)
        return None

    async def _login(self, request: Request) -> Response | None:
        """None where the request may go on."""
        path = request.scope["path"]  # what is routed by; a URL is made of the Host header, too
        if not self._token:
            return RedirectResponse(".", 303) if path == "/login" else None
        if path == "/login" and request.method == "POST":
            try:
                form = await asyncio.wait_for(_body(request), FORM_S)
            except (asyncio.TimeoutError, ClientDisconnect):
                return PlainTextResponse("the form did not come\n", 408)
            given = dict(parse_qsl(form.decode("utf-8", "replace"))).get("token", "")
            return self._admitted(".") if self._is_token(given) else RedirectResponse("login#wrong", 303)
        if path in OPEN_PATHS or self._has_pass(request):
            return None
        if self._is_token(request.query_params.get("token", "")):
            return self._admitted(".")  # the token leaves the address bar
        return RedirectResponse("login", 303) if path == "/" else PlainTextResponse("log in first\n", 401)

    def _has_pass(self, request: Request) -> bool:
        given = request.cookies.get(self._cookie, "")
        return compare_digest(given.encode("utf-8", "replace"), self._pass.encode())

    def _is_token(self, given: str) -> bool:
        return compare_digest(given.encode("utf-8", "replace"), self._token)

    def _admitted(self, to: str) -> Response:
        answer = RedirectResponse(to, 303)
        answer.set_cookie(self._cookie, self._pass, httponly=True, samesite="lax", path="/")
        return answer


async def _body(request: Request) -> bytes:
    """What a form sent, the beginning of it where it is more than a token can need."""
    found = b""
    async for part in request.stream():
        found += part
        if len(found) > MAX_FORM_NBYTES:
            return b""
    return found
