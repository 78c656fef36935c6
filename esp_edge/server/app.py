"""The application: every layer around the routes, in the order in which a request meets them.

::

    counting -> CORS headers -> size of the headers -> host -> origin -> API key -> size, time and nesting of the body
    -> route -> plan -> batch -> reply
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from esp_edge import __version__
from esp_edge.server import chat, completions, embeddings, errors, info, pages
from esp_edge.server.schemas import ErrorReply
from esp_edge.server.security import BodyGuard, HeaderGuard, HostGuard, KeyGuard, OriginGuard
from esp_edge.server.service import EngineLike, Service, in_thread
from esp_edge.server.settings import ServerSettings

__all__ = ["create_app", "service_of"]

LOCAL_ORIGINS = r"https?://(localhost|[a-z0-9-]+\.localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?"


def create_app(engine: EngineLike | None, settings: ServerSettings | None = None) -> FastAPI:
    """The server over one engine.

    Args:
        engine: None while the model loads: ``/health`` says so until :meth:`Service.attach` gives it.
    """
    settings = settings or ServerSettings()
    service = Service(settings, engine)
    embedder, scorer = embeddings.Embedder(), completions.Scorer()

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        for closable in (embedder, scorer):
            await in_thread(closable.close)

    app = FastAPI(
        title="esp_edge",
        version=__version__,
        description="OpenAI-compatible server for local GGUF models with lossless multi-token decoding.",
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        responses={"4XX": {"model": ErrorReply}, "5XX": {"model": ErrorReply}},
    )
    app.state.service = service
    errors.install(app)
    app.include_router(chat.routes(service))
    app.include_router(completions.routes(service, scorer))
    app.include_router(embeddings.routes(service, embedder))
    app.include_router(info.routes(service))
    if settings.web:
        app.include_router(pages.routes())
    _add_layers(app, service)
    return app


def service_of(app: FastAPI) -> Service:
    """State of an application made here."""
    service: Service = app.state.service
    return service


def _add_layers(app: FastAPI, service: Service) -> None:
    """The last one added is the outermost."""
    settings = service.settings
    app.add_middleware(
        BodyGuard,
        max_bytes=settings.max_body_bytes,
        max_nesting=settings.max_nesting,
        seconds=settings.body_seconds,
    )
    public = pages.page_paths() if settings.web else []
    app.add_middleware(KeyGuard, keys=settings.api_keys, public=public)
    app.add_middleware(OriginGuard, origins=settings.cors_origins)
    app.add_middleware(HostGuard, host=settings.host, names=settings.allowed_hosts)
    app.add_middleware(HeaderGuard, max_bytes=settings.max_header_bytes)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(settings.cors_origins),
        allow_origin_regex=LOCAL_ORIGINS,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        max_age=600,
    )
    app.add_middleware(_Counting, service=service)


class _Counting:
    """Counts requests by route and status."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._http = app, service.metrics.http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        begun = False

        def count(status: int) -> None:
            nonlocal begun
            begun = True
            path = getattr(scope.get("route"), "path", "other")  # a path of a client would be a label without end
            self._http.labels(path, str(status)).inc()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            if not begun:
                count(500)  # answered further out
            raise
