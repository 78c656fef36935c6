"""The web page: the files of ``static``, and nothing else of this machine."""

from __future__ import annotations

import mimetypes
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, PlainTextResponse, Response

__all__ = ["STATIC", "page_paths", "routes"]

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".ico": "image/x-icon",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
_HEADERS = {
    # text of the model never runs: no code but the page's own files, no connection but to this server
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'; frame-ancestors 'none'",  # what the page itself says, and no frames
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _files(folder: Path) -> dict[str, Path]:
    """URL path below ``/static/`` -> file. Only these are served: a path of a request never becomes one of a file."""
    found = sorted(folder.rglob("*")) if folder.is_dir() else []
    return {path.relative_to(folder).as_posix(): path for path in found if path.is_file() and not path.is_symlink()}


def page_paths(folder: Path = STATIC) -> list[str]:
    """Absolute URL paths that need no API key: the page has to load before it can ask for one."""
    return ["/", *(f"/static/{name}" for name in _files(folder))]


def routes(folder: Path = STATIC) -> APIRouter:
    """``/`` and, below ``/static``, every file of the folder."""
    router = APIRouter(include_in_schema=False)
    files = _files(folder)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index() -> Response:
        if INDEX not in files:
            return PlainTextResponse("This build has no web page; the API is at /v1.\n", status_code=404)
        return _response(files[INDEX])

    @router.api_route("/static/{name:path}", methods=["GET", "HEAD"])
    async def file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return _response(files[name])

    return router


def _response(path: Path) -> Response:
    kind = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return FileResponse(path, media_type=kind, headers=_HEADERS)
