"""``generate --jsonl``: many requests, one model load, one JSON document a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from esp_edge.cli.answer import answer, to_messages
from esp_edge.cli.inputs import decode_utf8, read_bytes
from esp_edge.cli.output import Bar, Notices, print_json
from esp_edge.config import GenerationParams
from esp_edge.errors import ConfigError, EspEdgeError, PromptError

if TYPE_CHECKING:
    from esp_edge.session import Prompt, Session

__all__ = ["Request", "finished", "open_results", "read_requests", "run"]

RequestId: TypeAlias = str | int


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the input.

    Attributes:
        request_id: of the user's choice, unique in the file.
        prompt: raw text, token ids or messages.
        params: the command's, with the line's own values in their place.
    """

    request_id: RequestId
    prompt: Prompt
    params: GenerationParams


# -- reading ---------------------------------------------------------------------------------------------------------


def read_requests(
    source: str | Path, params: GenerationParams, *, system: str | None = None, raw: bool = False
) -> list[Request]:
    """All requests of a file (``-`` = stdin), checked before the first is answered.

    Raises:
        PromptError: ``FILE:LINE: what is wrong``.
    """
    data, name = read_bytes(source)
    requests: list[Request] = []
    lines: dict[RequestId, int] = {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            request = _request(_json_object(line), params, system, raw)
        except (PromptError, ConfigError) as error:
            raise PromptError(f"{name}:{number}: {error}") from None
        if request.request_id in lines:
            first = lines[request.request_id]
            raise PromptError(f"{name}:{number}: id {request.request_id!r} was used in line {first}; ids must differ")
        lines[request.request_id] = number
        requests.append(request)
    if not requests:
        raise PromptError(f'{name} holds no request; write one a line: {{"id": "1", "prompt": "Hello"}}')
    return requests


def _json_object(line: bytes) -> dict[str, Any]:
    text = decode_utf8(line, "a request")
    try:
        document = json.loads(text)
    except ValueError as error:
        raise PromptError(f"a request must be a JSON object on one line, but it is no JSON: {error}") from None
    except RecursionError:
        raise PromptError("a request must be a JSON object on one line, but this one nests too deep") from None
    if not isinstance(document, dict):
        raise PromptError(f"a request must be a JSON object, but a {type(document).__name__} was found")
    return document


def _request(document: Mapping[str, Any], params: GenerationParams, system: str | None, raw: bool) -> Request:
    request_id = document.get("id")
    if not isinstance(request_id, str | int) or isinstance(request_id, bool):
        raise PromptError(f"id must be a text or a whole number, but {request_id!r} was found")
    if ("prompt" in document) == ("messages" in document):
        raise PromptError("a request needs either prompt or messages")
    return Request(request_id, _prompt(document, system, raw), _own_params(document, params))


def _prompt(document: Mapping[str, Any], system: str | None, raw: bool) -> Prompt:
    messages = document.get("messages")
    if "messages" in document:
        if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
            raise PromptError("messages must be a non-empty list of objects with role and content")
        return messages
    prompt = document["prompt"]
    if isinstance(prompt, str):
        return prompt if raw else to_messages(prompt, system)
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        return prompt
    raise PromptError("prompt must be a text or a non-empty list of token ids")


def _own_params(document: Mapping[str, Any], params: GenerationParams) -> GenerationParams:
    own: dict[str, Any] = {}
    for name in ("max_tokens", "temperature", "seed"):
        if document.get(name) is not None:
            own[name] = document[name]
    stop = document.get("stop")
    if stop is not None:
        if not isinstance(stop, str | list):
            raise PromptError(f"stop must be a text or a list of texts, but {stop!r} was found")
        own["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return replace(params, **own)


# -- writing ---------------------------------------------------------------------------------------------------------


def finished(path: Path) -> dict[RequestId, bool]:
    """Ids that a results file already answers, and whether with an error. A line cut off by a crash is removed.

    Raises:
        PromptError: a line that is no result; nothing is written to such a file.
    """
    if not path.exists():
        return {}
    data, name = read_bytes(path)
    whole = data[: data.rfind(b"\n") + 1]
    done: dict[RequestId, bool] = {}
    for number, line in enumerate(whole.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            document = _json_object(line)
            done[document["id"]] = "error" in document
        except (PromptError, KeyError, TypeError):
            raise PromptError(f"{name}:{number} is not a result of an earlier run; choose another --out file") from None
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return done


@contextmanager
def open_results(path: Path | None) -> Iterator[TextIO]:
    """Where documents go: the end of a file, or stdout."""
    if path is None:
        yield sys.stdout
    else:
        with path.open("a", encoding="ascii", newline="\n") as file:
            yield file


# -- answering -------------------------------------------------------------------------------------------------------


def run(session: Session, requests: Sequence[Request], results: TextIO, *, bar: Bar) -> int:
    """Answer all requests, a document as soon as it is there; the number of those that failed.

    Raises:
        KeyboardInterrupt: Ctrl-C; the request then running has no document.
    """
    notices = Notices()
    if any(_is_chat(request.prompt) for request in requests):
        notices.show(session.model.template_warning)
    n_failed = 0
    bar.update(0, len(requests))
    for n_done, request in enumerate(requests, start=1):
        document = _document(session, request, notices)
        n_failed += "error" in document
        print_json(document, results)
        bar.update(n_done, len(requests))
    return n_failed


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and isinstance(prompt[0], dict)


def _document(session: Session, request: Request, notices: Notices) -> dict[str, Any]:
    try:
        result = answer(session, request.prompt, request.params)
    except EspEdgeError as error:
        return {"id": request.request_id, "error": {"message": str(error), "type": type(error).__name__}}
    if result.finish_reason is None:
        raise KeyboardInterrupt
    notices.show(result.stats.note)
    return result.document(request.request_id, session, logprobs=request.params.logprobs is not None)
