"""Pages of the dashboard and its stream of events, as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.dashboard.access import AccessPolicy
from headrace.dashboard.report import read_static, render_report
from headrace.dashboard.sampler import Sample

__all__ = ["SampleSource", "make_app"]

_MEDIA_TYPES = {"dashboard.css": "text/css", "dashboard.js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # The URL that is opened first contains the token.
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_CHECK_SECONDS = 0.25
"""Seconds between checks for a new sample: at most this much later than it was taken."""
_RETRY_MS = 1000


class SampleSource(Protocol):
    """What the application needs of a `StatusSampler`."""

    @property
    def latest(self) -> Sample | None:
        """The latest sample; None before the first one."""

    @property
    def is_stopped(self) -> bool:
        """Whether there will be no more samples; streams of events end."""

    def history(self) -> bytes:
        """Return the measurements of the last hour as JSON."""

    def plans(self) -> bytes:
        """Return the steps of the known plans as JSON."""


def make_app(source: SampleSource, policy: AccessPolicy) -> ASGIApp:
    """Return the application.

    Args:
        source: Where samples come from.
        policy: Who may see the pages.
    """

    async def page(request: Request) -> Response:
        return Response(read_static("index.html"), media_type="text/html")

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _MEDIA_TYPES:
            return PlainTextResponse("not found\n", 404)
        return Response(read_static(name), media_type=_MEDIA_TYPES[name])

    async def events(request: Request) -> Response:
        return StreamingResponse(_events(source), media_type="text/event-stream")

    async def report(request: Request) -> Response:
        sample = source.latest
        if sample is None:
            return PlainTextResponse("no status yet; try again in a second\n", 503)
        text = render_report(sample, source.history(), source.plans())
        return Response(
            text,
            media_type="text/html",
            headers={"content-disposition": 'attachment; filename="headrace-report.html"'},
        )

    routes = [
        Route("/", page),
        Route("/static/{name}", static),
        Route("/events", events),
        Route("/report", report),
    ]
    return _Guard(Starlette(routes=routes), policy)


async def _events(source: SampleSource) -> AsyncIterator[bytes]:
    """Yield the history, then each new sample; a slow reader gets the latest one only."""
    number = plans_version = -1
    yield f"retry: {_RETRY_MS}\n\n".encode()
    while not source.is_stopped:
        sample = source.latest
        if sample is not None and sample.number != number:
            if number < 0:
                yield _event("history", source.history())
            if sample.plans_version != plans_version:
                plans_version = sample.plans_version
                yield _event("plans", source.plans())
            number = sample.number
            yield _event("status", sample.status)
        await asyncio.sleep(_CHECK_SECONDS)


def _event(name: str, data: bytes) -> bytes:
    # JSON as msgspec writes it has no line breaks.
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


class _Guard:
    """Checks each request before the application sees it, and adds the headers for security."""

    def __init__(self, app: ASGIApp, policy: AccessPolicy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        refusal = self._refuse(HTTPConnection(scope))
        with contextlib.suppress(asyncio.CancelledError):  # the server is stopping
            await (refusal or self._app)(scope, receive, send_with_headers)

    def _refuse(self, request: HTTPConnection) -> Response | None:
        """Return the answer to a request that the application must not see."""
        if not self._policy.allows_host(request.headers.get("host")):
            return PlainTextResponse(
                "this dashboard answers only to localhost and 127.0.0.1; "
                "use `headrace dashboard --host` for another name\n",
                421,
            )
        given = request.query_params.get("token")
        if given is not None and self._policy.token and self._policy.allows_token(given):
            # Relative to the URL, so that a path such as "//host" is not taken for another site.
            response = RedirectResponse("./", 303)
            response.set_cookie(self._policy.cookie, given, httponly=True, samesite="lax", path="/")
            return response
        if not self._policy.allows_token(request.cookies.get(self._policy.cookie)):
            return PlainTextResponse(
                "open the URL that `headrace dashboard` printed: it contains the token\n", 401
            )
        return None
