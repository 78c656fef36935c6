"""The gateway: reads a request, has a replica answer it, and passes the answer on as it comes.

It keeps what must not reach a replica from it (missing keys, bodies that are too large) by the layers that the server
itself has. When a replica is lost, an answer that has not begun becomes a 503, which OpenAI's clients repeat; a stream
ends with an error event, as it does when an engine fails; anything else that has begun is cut, so that nobody takes a
part for the whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Protocol
from urllib.parse import quote

import anyio.to_thread
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from esp_edge.deploy.affinity import prefix_key
from esp_edge.deploy.asgi import Messages, portable
from esp_edge.server.errors import ApiError, to_api_error
from esp_edge.server.pages import page_paths
from esp_edge.server.security import BodyGuard, HeaderGuard, KeyGuard
from esp_edge.server.settings import ServerSettings

__all__ = ["Backend", "BusyError", "LostError", "gateway"]

RETRY_SECONDS = 1


class LostError(Exception):
    """The replica went before its answer was complete."""


class BusyError(Exception):
    """No replica took the request; the message says why."""


class Backend(Protocol):
    """Where answers come from."""

    def __call__(self, scope: Scope, body: bytes, key: str) -> AsyncGenerator[Messages, None]:
        """ASGI messages of an answer.

        Raises:
            LostError, BusyError: see there.
        """


def gateway(backend: Backend, settings: ServerSettings) -> ASGIApp:
    """The application of a gateway.

    Args:
        settings: those of the replicas.
    """
    app: ASGIApp = _Gateway(backend)
    app = BodyGuard(app, max_bytes=settings.max_body_bytes, max_nesting=settings.max_nesting)
    app = KeyGuard(app, keys=settings.api_keys, public=page_paths() if settings.web else [])
    return _AtRoot(HeaderGuard(app, max_bytes=settings.max_header_bytes))


class _AtRoot:
    """Takes the prefix of a route off a path, so that everything behind it knows one path for a thing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the life of the application."""
        prefix = scope.get("root_path", "").rstrip("/")
        if prefix and scope.get("path", "").startswith(f"{prefix}/"):
            scope = {**scope, "root_path": "", "path": scope["path"][len(prefix) :]}
            scope["raw_path"] = quote(scope["path"]).encode("ascii")
        await self._app(scope, receive, send)


class _Gateway:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the life of the application."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            body = await _read(receive)
            if body is not None:
                await self._answer(scope, body, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        key = await anyio.to_thread.run_sync(prefix_key, scope["path"], body) if body else ""
        answer = _Answer(scope, receive, send)
        relaying = asyncio.ensure_future(answer.relay(self._backend(portable(scope), body, key)))
        leaving = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((relaying, leaving), return_when=asyncio.FIRST_COMPLETED)
            if relaying.done():
                relaying.result()
        finally:
            for task in (relaying, leaving):
                task.cancel()
            await asyncio.gather(relaying, leaving, return_exceptions=True)


class _Answer:
    """What has gone to a client so far."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._begun = self._complete = self._is_stream = False

    async def relay(self, messages: AsyncGenerator[Messages, None]) -> None:
        """Pass everything on.

        Raises:
            Exception: what ended an answer that had begun and cannot carry an error.
        """
        try:
            async with contextlib.aclosing(messages):
                async for batch in messages:
                    for message in batch:
                        await self._pass_on(message)
        except Exception as error:
            if not self._complete:
                await self._fail(error)

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._begun, self._is_stream = True, kind.startswith(b"text/event-stream")
        self._complete = message["type"] == "http.response.body" and not message.get("more_body")
        await self._send(message)

    async def _fail(self, error: Exception) -> None:
        told = _told(error)
        if not self._begun:
            await told.response()(self._scope, self._receive, self._send)
        elif self._is_stream:  # it came in whole events
            event = f"data: {json.dumps(told.body(), separators=(',', ':'))}\n\n"
            await self._send({"type": "http.response.body", "body": event.encode("ascii"), "more_body": False})
        else:
            raise error


def _told(error: Exception) -> ApiError:
    headers = {"Retry-After": str(RETRY_SECONDS)}
    if isinstance(error, BusyError):
        return ApiError(503, str(error), code="queue_full", headers=headers)
    if isinstance(error, LostError):
        message = "the replica that worked on this answer is gone: ask again"
        return ApiError(503, message, code="replica_lost", headers=headers)
    return to_api_error(error)


async def _read(receive: Receive) -> bytes | None:
    """A body, in one piece as a rule; None when the client leaves."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _live(receive: Receive, send: Send) -> None:
    """There is nothing to start or to stop."""
    while True:
        kind = (await receive())["type"].removeprefix("lifespan.")
        await send({"type": f"lifespan.{kind}.complete"})
        if kind == "shutdown":
            return
