"""``generate --jsonl``: many requests, one model load, one JSON document a line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
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
_SETTINGS = frozenset(field.name for field in fields(GenerationParams))
# names of the flags and of other programs, which would be taken for remarks and change nothing
_OTHER_NAMES = {
    "temp": "temperature",
    "typical": "typical_p",
    "n_predict": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "grammar_file": "grammar",
    "json_schema_file": "json_schema",
}
_KINDS: dict[str, tuple[type, str]] = {
    "grammar": (str, "a GBNF text"),
    "json_schema": (dict, "an object"),
    "ignore_eos": (bool, "true or false"),
}


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
    """The command's settings with the line's own in their place; null = the command's."""
    for key in document:
        name = key.replace("-", "_")
        name = _OTHER_NAMES.get(name, name)
        if name in _SETTINGS and name != key:
            raise PromptError(f"{key} must be written {name} in a request")
    own = {key: _setting(key, value) for key, value in document.items() if key in _SETTINGS and value is not None}
    if "grammar" in own:  # the line's own shape of an answer replaces the command's, whichever way it is written
        own.setdefault("json_schema", None)
    elif "json_schema" in own:
        own["grammar"] = None
    try:
        return replace(params, **own)
    except OverflowError:
        raise PromptError("a number of the request is too large") from None


def _setting(name: str, value: Any) -> Any:
    """A setting as :class:`GenerationParams` holds it; numbers are checked there."""
    if name in ("stop", "dry_sequence_breakers"):
        if not isinstance(value, str | list):
            raise PromptError(f"{name} must be a text or a list of texts, but {value!r} was found")
        return (value,) if isinstance(value, str) else tuple(value)
    if name == "logit_bias":
        if not isinstance(value, dict) or not all(key.isdecimal() and len(key) < 10 for key in value):
            raise PromptError(f"logit_bias must be an object of token ids and numbers, but {value!r} was found")
        return {int(key): bias for key, bias in value.items()}
    kind, wanted = _KINDS.get(name, (object, ""))
    if not isinstance(value, kind):
        raise PromptError(f"{name} must be {wanted}, but {value!r} was found")
    return value


# -- writing ---------------------------------------------------------------------------------------------------------


def finished(path: Path) -> dict[RequestId, bool]:
    """Ids of the documents of a results file, and whether the last one of an id is an error.

    A line cut off by a crash is removed, and a last line that only lacks its end gets one.

    Raises:
        PromptError: a line that is no result; nothing is written to such a file.
    """
    if not path.exists():
        return {}
    data, name = read_bytes(path)
    end = data.rfind(b"\n") + 1
    done: dict[RequestId, bool] = {}
    lines = data[:end].split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip() and not _count_result(line, done):
            raise _no_result(name, number)
    tail = data[end:]
    if not tail:
        return done
    if _count_result(tail, done):
        with path.open("ab") as file:
            file.write(b"\n")
    elif _is_torn(tail, bool(done)):
        os.truncate(path, end)
    else:
        raise _no_result(name, len(lines))
    return done


def _no_result(name: str, number: int) -> PromptError:
    return PromptError(f"{name}:{number} is not a result of an earlier run; choose another --out file")


def _count_result(line: bytes, done: dict[RequestId, bool]) -> bool:
    """Enter a line into ``done`` if it is a result; whether it was."""
    try:
        document = _json_object(line)
    except PromptError:
        return False
    request_id = document.get("id")
    if not isinstance(request_id, str | int) or isinstance(request_id, bool):
        return False
    if "error" not in document and not isinstance(document.get("token_ids"), list):
        return False
    done[request_id] = "error" in document
    return True


def _is_torn(tail: bytes, after_results: bool) -> bool:
    """Whether an unterminated line is the start of a result: of somebody else's file nothing may be cut off."""
    try:
        _json_object(tail)
    except PromptError:
        return after_results or tail.startswith(b'{"id": ')
    return False


@contextmanager
def open_results(path: Path | None) -> Iterator[TextIO]:
    """Where documents go: the end of a file, or stdout."""
    if path is None:
        yield sys.stdout
    else:
        with path.open("a", encoding="ascii", newline="\n") as file:
            yield file


# -- answering -------------------------------------------------------------------------------------------------------


def run(session: Session, requests: Sequence[Request], results: TextIO, *, bar: Bar, explain: bool = False) -> int:
    """Answer all requests, a document as soon as it is there; the number of those that failed.

    Args:
        explain: every document has an ``explanation``, null where the drafter has none.

    Raises:
        KeyboardInterrupt: Ctrl-C; the request then running has no document.
    """
    notices = Notices()
    if any(_is_chat(request.prompt) for request in requests):
        notices.show(session.model.template_warning)
    n_failed = 0
    bar.update(0, len(requests))
    for n_done, request in enumerate(requests, start=1):
        document = _document(session, request, notices, explain)
        n_failed += "error" in document
        print_json(document, results)
        bar.update(n_done, len(requests))
    return n_failed


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and isinstance(prompt[0], dict)


def _document(session: Session, request: Request, notices: Notices, explain: bool) -> dict[str, Any]:
    try:
        result = answer(session, request.prompt, request.params)
    except EspEdgeError as error:
        return {"id": request.request_id, "error": {"message": str(error), "type": type(error).__name__}}
    if result.finish_reason is None:
        raise KeyboardInterrupt
    notices.show(result.stats.note)
    document = result.document(request.request_id, session, logprobs=request.params.logprobs is not None)
    return document | {"explanation": session.explain(result.stats)} if explain else document
