"""Failures as a client sees them: OpenAI's error shape with a true status, and 500 only for what is our fault.

The openai package retries 408, 409, 429 and everything from 500 on, so a client's fault must never be one of these. A
body that does not arrive in time is a 408 all the same: the line may be faster when the request is sent again.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from esp_edge.errors import (
    ConfigError,
    ContextLengthError,
    DecodeError,
    EngineClosedError,
    EspEdgeError,
    GrammarError,
    PromptError,
    QueueFullError,
)

__all__ = ["ApiError", "Json", "install", "to_api_error"]

INVALID = "invalid_request_error"
log = logging.getLogger("esp_edge.server")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    503: "overloaded_error",
}


class Json(JSONResponse):
    """JSON in ASCII: half a surrogate pair, which a client may have sent, has no UTF-8 form."""

    def render(self, content: Any) -> bytes:
        """The bytes of the body."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class ApiError(Exception):
    """An answer with a status of 400 or more.

    Args:
        param: the field of the request that is at fault.
        code: for programs.
        headers: of the response.
        more: further members of the error object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        self.more = dict(more or {})

    def body(self) -> dict[str, Any]:
        """``{"error": {...}}``."""
        kind = _TYPES.get(self.status, INVALID)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.more}}

    def response(self) -> Json:
        """The whole answer."""
        return Json(self.body(), status_code=self.status, headers=self.headers)


def to_api_error(error: BaseException, params: Mapping[type[EspEdgeError], str | None] | None = None) -> ApiError:
    """What a client is told about a failure.

    Args:
        params: the field at fault for a kind of error.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
        return ApiError(503, str(error), code="queue_full", headers=headers)
    if isinstance(error, EngineClosedError):
        return ApiError(503, "the server is shutting down", code="shutting_down")
    param = next((name for kind, name in (params or {}).items() if isinstance(error, kind)), None)
    if isinstance(error, ContextLengthError):
        numbers = {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx}
        return ApiError(400, str(error), param=param, code="context_length_exceeded", more=numbers)
    if isinstance(error, GrammarError | PromptError | ConfigError):
        code = "invalid_grammar" if isinstance(error, GrammarError) else None
        return ApiError(400, str(error), param=param, code=code)
    return _our_fault(error)


def _our_fault(error: BaseException) -> ApiError:
    """Told in the log in full, and to the client as far as it is a matter of the model."""
    if isinstance(error, DecodeError):
        log.error("%s", error)
        return ApiError(500, str(error), code="decode_failed")
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed; its log says why", code="internal_error")


# -- what FastAPI refuses --------------------------------------------------------------------------------------------

_WANTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_attributes_type": "a JSON object",
    "model_type": "a JSON object",
    "string_type": "a text",
}
_MOST_SHOWN = 60


def shown(value: object) -> str:
    """A value as a message shows it: short, on one line, as in JSON but for texts."""
    names = {None: "null", True: "true", False: "false"}
    text = names[value] if value is None or isinstance(value, bool) else repr(value)[: _MOST_SHOWN + 1]
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


def _path(location: Sequence[Any]) -> str:
    """``("body", "tools", 0, "function")`` -> ``tools[0].function``; the body itself is ``body``."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif re.fullmatch("[a-z_0-9]+", str(part)):  # not the name of a union's member
            path += f".{part}" if path else str(part)
    return path or "body"


def _message(found: Mapping[str, Any]) -> tuple[str, str]:
    """(message, param) of the first thing that pydantic found wrong."""
    kind, location, context = found["type"], found["loc"], found.get("ctx", {})
    if kind == "json_invalid":
        where = f"at byte {location[1]}: {context.get('error')}" if len(location) > 1 else str(context.get("error"))
        return f"the body must be JSON, but it is not ({where})", "body"
    path = _path(location)
    if kind == "missing" and path == "body":
        return "the request needs a body: send a JSON object", path
    if kind == "missing":
        return f"{path} is required, but it is missing", path
    if path == "body" and isinstance(found.get("input"), bytes):
        return "the body must be JSON and its Content-Type application/json: set that header", "body"
    if kind in _WANTED:
        wanted = _WANTED[kind]
    elif kind == "literal_error":
        wanted = f"one of {context['expected']}"
    elif "ge" in context or "le" in context or "gt" in context:
        bounds = (("ge", "at least"), ("gt", "above"), ("le", "at most"))
        wanted = " and ".join(f"{words} {context[key]}" for key, words in bounds if key in context)
    else:
        return f"{path}: {found['msg'].removeprefix('Value error, ')}", path
    return f"{path} must be {wanted}, but {shown(found.get('input'))} was given", path


def _invalid(_request: Request, error: Exception) -> Json:
    found = error.errors()[0] if isinstance(error, RequestValidationError) else {}
    message, param = _message(found)
    return ApiError(400, message, param=param).response()


def _http(request: Request, error: Exception) -> Json:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = str(getattr(error, "detail", error))
    if status == 404:
        detail = f"there is no {request.method} {shown(request.url.path)}; docs/server.md lists what there is"
    elif status == 405:
        detail = f"{shown(request.url.path)} does not take {request.method}"
    elif status == 400:
        return ApiError(400, f"the body must be JSON, but it is not ({detail})", param="body").response()
    return ApiError(status, detail, headers=getattr(error, "headers", None)).response()


def _known(_request: Request, error: Exception) -> Json:
    return to_api_error(error).response()


def _unexpected(_request: Request, error: Exception) -> Json:
    found = to_api_error(error)
    found.headers["Connection"] = "close"  # Starlette raises the error again, for which uvicorn closes it
    return found.response()


def install(app: FastAPI) -> None:
    """Give an application these answers instead of FastAPI's own."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ApiError, _known)
    app.add_exception_handler(EspEdgeError, _known)
    app.add_exception_handler(Exception, _unexpected)
