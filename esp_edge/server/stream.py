"""Replies to a client that may leave at any moment: whole ones, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from esp_edge.server.batch import Batch
from esp_edge.server.errors import Json, to_api_error
from esp_edge.server.service import Service

__all__ = ["reply", "stream"]

GONE = 499  # nobody reads it; nginx logs it so
DONE = "[DONE]"
LATER = 5.0  # seconds; where this package's own protocol listens has cut the connection by then
log = logging.getLogger("esp_edge.server")
_Found = TypeVar("_Found")


class _GoneError(Exception):
    """The client left."""


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _unless_gone(request: Request, batch: Batch | None, work: Coroutine[Any, Any, _Found]) -> _Found:
    """The result of ``work``; ends it and raises _GoneError as soon as the client leaves, or what failed the batch."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_until_gone(request))
    failing = [] if batch is None else [batch.failed]
    waiting: set[asyncio.Future[Any]] = {working, watching, *failing}
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        for failed in failing:
            if failed.done():
                raise failed.result()
        raise _GoneError
    finally:
        for task in (working, watching):
            task.cancel()
        if working.done() or not any(failed.done() for failed in failing):  # a shutdown waits for no thread
            await asyncio.gather(working, watching, return_exceptions=True)


async def reply(request: Request, batch: Batch | None, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """The JSON document that ``work`` makes, of a batch or of something else."""
    try:
        return Json(await _unless_gone(request, batch, work))
    except _GoneError:
        return Response(status_code=GONE)
    finally:
        if batch is not None:
            batch.close()


class _Events(EventSourceResponse):
    """Closes its batch however the response ends, even before its first event."""

    def __init__(self, batch: Batch, content: AsyncIterator[str], service: Service) -> None:
        self._batch = batch
        super().__init__(
            content,
            sep="\n",
            ping=service.settings.ping_seconds,
            ping_message_factory=lambda: ServerSentEvent(comment="ping"),
            send_timeout=service.settings.send_seconds + LATER,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.info("a client left its stream unread")
        finally:
            self._batch.close()


async def stream(
    request: Request, service: Service, batch: Batch, documents: AsyncIterator[dict[str, Any]]
) -> Response:
    """The documents as server-sent events.

    The status waits for the first document, that is for the first token, so that a failure before it has a true one;
    but not longer than until the first keep-alive is due.

    Raises:
        ApiError: before the first token.
    """
    first = asyncio.ensure_future(_next(documents))
    try:
        await _unless_gone(request, batch, _settled(first, service.settings.ping_seconds))
        if first.done():
            first.result()
    except BaseException as error:
        first.cancel()
        batch.close()
        if isinstance(error, _GoneError):
            return Response(status_code=GONE)
        raise
    return _Events(batch, _encoded(first, documents), service)


async def _next(documents: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
    async for document in documents:
        return document
    return None


async def _settled(task: asyncio.Future[Any], seconds: float) -> None:
    await asyncio.wait({task}, timeout=seconds)


async def _encoded(
    first: asyncio.Future[dict[str, Any] | None], documents: AsyncIterator[dict[str, Any]]
) -> AsyncIterator[str]:
    try:
        document = await first
        while document is not None:
            yield _event(document)
            document = await _next(documents)
        yield _event(DONE)
    except Exception as error:  # the status is sent: the error becomes an event
        yield _event(to_api_error(error).body())
    finally:
        first.cancel()
        with suppress(RuntimeError):
            await documents.aclose()  # type: ignore[attr-defined]


def _event(data: dict[str, Any] | str) -> str:
    return data if isinstance(data, str) else json.dumps(data, separators=(",", ":"), allow_nan=False)
