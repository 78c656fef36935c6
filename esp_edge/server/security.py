"""Who may call, and how much they may send. Plain ASGI layers around the application, outermost first:

``HeaderGuard``  size of the request line and headers
``HostGuard``    a name that points here without being this machine's is not served
``OriginGuard``  a page of another site may not make a browser call this server, readable or not
``KeyGuard``     an API key, when the server has any
``BodyGuard``    size, time and nesting of a body, before anything parses it

:func:`http_protocol` stands before all of them: headers that do not come to an end never become a request, and a body
that nobody reads does not keep its connection open.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from esp_edge.server.errors import ApiError
from esp_edge.server.settings import ServerSettings, is_loopback

__all__ = ["BodyGuard", "HeaderGuard", "HostGuard", "KeyGuard", "OriginGuard", "http_protocol", "is_too_deep"]

LINGER_SECONDS = 5.0
AUTHORITY = re.compile(r"(?P<name>\[[^\[\]]*\]|[^:\[\]]*)(?::\d*)?", re.ASCII)  # of a Host header: name, [IPv6], port
PUBLIC = frozenset(("/health", "/v1/health"))


class HeaderGuard:
    """Refuses a request whose line and headers are too large; h11 does so only where they come in several pieces."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http":
            line = len(scope.get("raw_path") or b"") + len(scope["query_string"])
            if line + sum(len(name) + len(value) for name, value in scope["headers"]) > self._max_bytes:
                message = f"the request line and headers may have {self._max_bytes} bytes, but these have more"
                error = ApiError(431, message, code="headers_too_large", headers={"Connection": "close"})
                await error.response()(scope, receive, _lingering(receive, send))
                return
        await self._app(scope, receive, send)


class HostGuard:
    """Serves this machine's names only, where only this machine is listened to.

    A hostile name server can let a name of its own point to 127.0.0.1 (DNS rebinding). A browser takes a page of that
    name for one of this server: it sends a GET without an Origin, and lets the page read the answer. But the Host
    header tells the name. IP addresses are no names, nobody can point them elsewhere; so they are all fine.

    Args:
        host: the address that is listened on. On one that others reach, names are not told apart unless some are given.
        names: further names that are served; ``*`` = all.
    """

    def __init__(self, app: ASGIApp, host: str, names: Sequence[str]) -> None:
        self._app = app
        self._names = frozenset(_name_of(name) for name in (host, *names))
        self._any = "*" in names or not (is_loopback(host) or names)

    def _is_ours(self, host: str) -> bool:
        name = _name_of(host)
        if not name:  # none that a browser sends
            return name is not None
        return name in self._names or is_loopback(name) or _is_ip(name.strip("[]"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and not self._any and scope["path"] not in PUBLIC:
            host = Headers(scope=scope).get("host", "")
            if not self._is_ours(host):
                message = f"the server does not answer to the name {host[:100]!r}; allow it with --allowed-host"
                await ApiError(403, message, code="host_not_allowed").response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _name_of(host: str) -> str | None:
    """``Example.com.:80`` -> ``example.com``; None for what is no Host header."""
    match = AUTHORITY.fullmatch(host.strip())
    return match["name"].rstrip(".").lower() if match else None


class OriginGuard:
    """Refuses requests that a browser sends for a page of an origin that is not allowed.

    Allowed are the machine's own pages, those named, and the page that this server itself serves. The latter is told by
    its Host header, which :class:`HostGuard` has looked at.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._any = "*" in origins
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    def _is_allowed(self, origin: str, host: str) -> bool:
        origin = origin.lower()
        if self._any or origin in self._origins:
            return True
        try:
            address = urlsplit(origin)
            name = address.hostname or ""
        except ValueError:
            return False
        return is_loopback(name) or (bool(name) and address.netloc == host.lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not self._is_allowed(origin, headers.get("host", "")):
                message = "pages of this origin may not call the server; allow it with --cors-origin"
                await ApiError(403, message, code="origin_not_allowed").response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class KeyGuard:
    """Asks for one of the keys, as ``Authorization: Bearer KEY`` or ``X-Api-Key: KEY``.

    Args:
        public: paths that need none, besides health.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], public: Iterable[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._public = PUBLIC | frozenset(public)

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        found = given.encode("utf-8", "replace")
        matches = [hmac.compare_digest(found, key) for key in self._keys]  # all of them: the time tells nothing
        return any(matches)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        is_open = not self._keys or scope["type"] != "http" or scope["path"] in self._public
        if is_open or scope["method"] == "OPTIONS" or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        message = "a valid API key is needed: send it as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
        error = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        await error.response()(scope, receive, send)


class BodyGuard:
    """Reads a body, refuses one that is too large, too slow, too deep or no UTF-8, and hands it on in one piece.

    Args:
        seconds: that a body may take to arrive; a client that sends a byte now and then would hold its part for ever.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, max_nesting: int, seconds: float = ServerSettings().body_seconds
    ) -> None:
        self._app, self._max_bytes, self._max_nesting, self._seconds = app, max_bytes, max_nesting, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read_in_time(Headers(scope=scope), receive)
        except ApiError as error:
            await error.response()(scope, receive, _lingering(receive, send))
            return
        if body is None:
            return  # the client left
        try:
            self._check(body)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self._app(scope, replay, send)

    async def _read_in_time(self, headers: Headers, receive: Receive) -> bytes | None:
        try:
            return await asyncio.wait_for(self._read(headers, receive), self._seconds)
        except (TimeoutError, asyncio.TimeoutError):
            wanted = f"a body must arrive within {self._seconds:g} seconds"
            closing = {"Connection": "close"}
            raise ApiError(
                408,
                f"{wanted}, but this one has not; send it again",
                param="body",
                code="request_timeout",
                headers=closing,
            ) from None

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        length = headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._max_bytes):
            raise self._too_large()
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                raise self._too_large()
            if not message.get("more_body"):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        message = f"a body may have {self._max_bytes} bytes, but this one has more; send less or raise --max-body-size"
        # what was not read is still on its way: the connection cannot go on
        return ApiError(413, message, param="body", code="request_too_large", headers={"Connection": "close"})

    def _check(self, body: bytes) -> None:
        try:
            body.decode("utf-8")
        except UnicodeDecodeError as error:
            message = f"the body must be UTF-8, but byte {error.start} is not"
            raise ApiError(400, message, param="body") from None
        if is_too_deep(body, self._max_nesting):
            message = f"JSON may nest {self._max_nesting} levels deep, but this body nests deeper"
            raise ApiError(400, message, param="body", code="nested_too_deep")


def _lingering(receive: Receive, send: Send) -> Send:
    """``send`` for an answer to a request that was not read to its end.

    Closing a connection with unread bytes resets it, which can take the answer away from a client that is still
    sending. So the answer goes out whole, and the connection ends when the client has sent all, or after a while.
    """

    async def drain() -> None:
        message = await receive()
        while message["type"] == "http.request" and message.get("more_body"):
            message = await receive()

    async def sender(message: Message) -> None:
        if message["type"] != "http.response.body" or message.get("more_body"):
            await send(message)
            return
        await send({**message, "more_body": True})
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(drain(), LINGER_SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return sender


_STRUCTURE = b'"[]{}'
_OTHERS = bytes(byte for byte in range(256) if byte not in _STRUCTURE)
_SAME = bytes.maketrans(b"{}", b"[]")


def is_too_deep(body: bytes, limit: int) -> bool:
    """Whether JSON nests deeper than ``limit`` brackets, told without parsing it: parsers recurse.

    >>> is_too_deep(b'{"a": [1, "[[["]}', 2), is_too_deep(b"[[[]]]", 2)
    (False, True)
    """
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_SAME, _OTHERS)
    brackets = b"".join(bare.split(b'"')[::2])
    depth = 0
    for byte in brackets.replace(b"[]", b""):  # a long flat list is gone with its innermost level
        depth += 1 if byte == ord("[") else -1
        if depth >= limit:
            return True
    return False


# -- slow clients ----------------------------------------------------------------------------------------------------


def http_protocol(settings: ServerSettings) -> type[H11Protocol]:
    """uvicorn's HTTP/1.1, for ``uvicorn.Config(http=...)``; uvicorn itself waits for clients for ever."""

    class Impatient(_Impatient):
        pass

    Impatient.settings = settings
    return Impatient


class _Impatient(H11Protocol):
    """Closes connections whose client takes too long.

    One that opens many and sends a byte now and then takes every file descriptor. So a request line and its headers
    have ``header_seconds``, from the first byte of a request, on a new connection from its start. Bodies are
    :class:`BodyGuard`'s, which answers before it closes; where nothing reads the body, behind a GET or a request that
    was refused for its headers, the connection is closed a little later. One whose client has read nothing for
    ``send_seconds`` while there was much to read is cut.
    """

    settings: ServerSettings
    _timed: object = None  # the state of h11 that the time runs for

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override, unused-ignore]
        self._timers: dict[str, asyncio.TimerHandle] = {}
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._timers["write"] = self.loop.call_later(self.settings.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop("write")
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop("read")
        self._stop("write")
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Where another part of a request is awaited, another time runs."""
        state = self.conn.their_state
        if state is self._timed:
            return
        self._stop("read")
        self._timed = state
        body_seconds = self.settings.body_seconds + 2 * LINGER_SECONDS
        seconds = {h11.IDLE: self.settings.header_seconds, h11.SEND_BODY: body_seconds}.get(state)
        if seconds is not None and not self.transport.is_closing():
            self._timers["read"] = self.loop.call_later(seconds, self.transport.close)

    def _stop(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
