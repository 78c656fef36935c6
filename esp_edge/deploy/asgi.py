"""An ASGI application at the other end of a line that carries messages one way only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import ASGIApp, Message, Scope

__all__ = ["Messages", "call", "portable"]

Messages = list[Message]
_PORTABLE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")


def portable(scope: Scope) -> dict[str, Any]:
    """What of a request's scope means the same in another process."""
    found = {name: scope[name] for name in _PORTABLE if name in scope}
    found["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    for name in ("client", "server"):
        address = scope.get(name)
        found[name] = tuple(address) if address else None
    return {"asgi": {"version": "3.0", "spec_version": "2.3"}, **found}


async def call(app: ASGIApp, scope: Scope, body: bytes) -> AsyncGenerator[Messages, None]:
    """What the application sends, as it comes; first of all an empty list, which says that the request has arrived.

    Closing the generator is the client's leaving: the application is told, and cancelled.

    Raises:
        Exception: what the application raised before its answer was complete.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    complete = False

    async def receive() -> Message:
        if first:
            return first.pop()
        await asyncio.Event().wait()  # until the task is cancelled
        raise AssertionError("nobody sets it")

    async def send(message: Message) -> None:
        nonlocal complete
        complete = message["type"] == "http.response.body" and not message.get("more_body")
        sent.put_nowait(message)

    async def run() -> None:
        try:
            await app(scope, receive, send)
        finally:
            sent.put_nowait(None)

    running = asyncio.ensure_future(run())
    try:
        yield []
        async for messages in _batches(sent):
            yield messages
        if not complete:
            await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _batches(sent: asyncio.Queue[Message | None]) -> AsyncGenerator[Messages, None]:
    """All that there is at a time, until None."""
    while (message := await sent.get()) is not None:
        messages = [message]
        while not sent.empty():
            more = sent.get_nowait()
            if more is None:
                yield messages
                return
            messages.append(more)
        yield messages
