"""Tools: how a model is told about them, held to them, and how its answer becomes calls.

=============  =====================================================================================================
tool_choice    what happens
=============  =====================================================================================================
none           the model is not told
auto           the model is told; an answer that is a call (JSON, or JSON between <tool_call> tags) becomes one
required       as auto, and a JSON schema leaves nothing but one call
a function     as auto, and a JSON schema leaves nothing but its arguments
=============  =====================================================================================================
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from esp_edge.server.errors import ApiError, shown
from esp_edge.server.schemas import NamedChoice, Tool

__all__ = ["Call", "Offer", "Piece", "Reader", "TextReader", "for_template", "make_offer", "parse_calls"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FENCE = re.compile(r"^```(?:json)?\s*\n(.*?)\n?```$", re.DOTALL)
# how an answer begins that is a call, white space left out
_HEADS = tuple(
    f"{fence}{bracket}{key}"
    for fence in ("", "```json", "```")
    for bracket in ("{", "[{")
    for key in ('"name":', '"type":"function",', '"arguments":', '"parameters":')
)
_MOST_HEAD = 200  # characters looked at
_HEAD = re.compile(r'^\s*\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"arguments"\s*:\s*')


@dataclass(frozen=True, slots=True)
class Call:
    """A piece of a tool call.

    Attributes:
        index: which call of the answer.
        name: of the function, on its first piece.
        arguments: JSON text, or the next piece of it.
    """

    index: int
    name: str | None
    arguments: str


Piece = str | Call  # text of the message, or of a call


class Reader(Protocol):
    """Sorts the text of an answer into message and calls, as it comes."""

    def push(self, text: str) -> list[Piece]:
        """What is certain now."""

    def finish(self) -> list[Piece]:
        """What was held back."""


class TextReader:
    """An answer without tools."""

    def push(self, text: str) -> list[Piece]:
        """All of it."""
        return [text] if text else []

    def finish(self) -> list[Piece]:
        """Nothing was held back."""
        return []


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of a request.

    Attributes:
        tools: as sent, for templates that write them; empty = none are offered.
        names: of their functions.
        forced: the function whose arguments alone are the answer.
        required: the answer must be a call.
    """

    tools: tuple[dict[str, Any], ...] = ()
    names: tuple[str, ...] = ()
    forced: str | None = None
    required: bool = False

    def reader(self) -> Reader:
        """For one answer."""
        if self.forced is not None:
            return _ForcedReader(self.forced)
        if self.required:
            return _RequiredReader()
        return _AutoReader(self.names) if self.names else TextReader()

    def schema(self) -> dict[str, Any]:
        """JSON schema of the answer: the arguments of the forced function, else a call of any of them."""
        if self.forced is not None:
            return _parameters(next(tool for tool in self.tools if tool["function"]["name"] == self.forced))
        calls: list[Any] = []
        definitions: dict[str, Any] = {}
        for index, tool in enumerate(self.tools):
            arguments, own = _lifted(_parameters(tool), f"tool{index}_")
            definitions |= own
            calls.append(_call_schema(tool["function"]["name"], arguments))
        return {"anyOf": calls, "$defs": definitions} if definitions else {"anyOf": calls}

    def schema_or(self, other: dict[str, Any]) -> dict[str, Any]:
        """JSON schema of an answer that is either a call or fits another schema."""
        answer, own = _lifted(other, "answer_")
        calls = self.schema()
        return {"anyOf": [*calls["anyOf"], answer], "$defs": {**calls.get("$defs", {}), **own}}

    def system_text(self) -> str:
        """For models whose template knows no tools."""
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in self.tools]
        return (
            "You can call these functions:\n"
            + "\n".join(lines)
            + '\nTo call one, answer with nothing but {"name": "FUNCTION", "arguments": {...}}.'
        )


def make_offer(tools: Sequence[Tool] | None, choice: str | NamedChoice | None) -> Offer:
    """What a request offers.

    Raises:
        ApiError: a choice without tools, a name that is not among them, or one that is there twice.
    """
    documents = tuple(tool.model_dump(exclude_none=True) for tool in tools or ())
    names = tuple(document["function"]["name"] for document in documents)
    repeated = next((name for name, n in Counter(names).items() if n > 1), None)
    if repeated is not None:
        raise ApiError(400, f"every function needs a name of its own, but {repeated!r} is there twice", param="tools")
    if isinstance(choice, NamedChoice):
        if choice.function.name not in names:
            message = f"tool_choice must name one of the tools, but {shown(choice.function.name)} is none of them"
            raise ApiError(400, message, param="tool_choice")
        return Offer(documents, names, forced=choice.function.name, required=True)
    if choice == "required":
        if not documents:
            raise ApiError(400, "tool_choice required needs tools, but there are none", param="tool_choice")
        return Offer(documents, names, names[0] if len(names) == 1 else None, required=True)
    return Offer() if choice == "none" else Offer(documents, names)


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    return tool["function"].get("parameters") or {"type": "object"}


def _call_schema(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _lifted(schema: dict[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema that may stand inside another one, and its definitions for the root: references count from there."""
    definitions: dict[str, Any] = {}

    def walk(value: Any, *, at_root: bool = False) -> Any:
        if isinstance(value, list):
            return [walk(item) for item in value]
        if not isinstance(value, dict):
            return value
        copy = {}
        for key, item in value.items():
            if at_root and key in ("$defs", "definitions") and isinstance(item, dict):
                definitions.update({prefix + name: walk(part) for name, part in item.items()})
            elif key == "$ref" and isinstance(item, str):
                copy[key] = re.sub(r"^#/(?:\$defs|definitions)/", f"#/$defs/{prefix}", item)
            else:
                copy[key] = walk(item)
        return copy

    return walk(schema, at_root=True), definitions


# -- answers ---------------------------------------------------------------------------------------------------------


def parse_calls(text: str, names: Sequence[str]) -> list[Call]:
    """The calls that a text consists of; empty when it is anything else.

    >>> parse_calls('{"name": "add", "arguments": {"a": 1}}', ["add"])
    [Call(index=0, name='add', arguments='{"a": 1}')]
    """
    text = text.strip()
    if text.startswith(_OPEN):
        parts = [part.replace(_CLOSE, "").strip() for part in text.split(_OPEN)[1:]]
    else:
        fenced = _FENCE.match(text)
        parts = [fenced[1] if fenced else text]
    try:
        found = [json.loads(part) for part in parts]
    except (ValueError, RecursionError):
        return []
    flat = [call for item in found for call in (item if isinstance(item, list) else [item])]
    calls = [_call(index, item, names) for index, item in enumerate(flat)]
    return [call for call in calls if call is not None] if all(calls) else []


def _call(index: int, item: Any, names: Sequence[str]) -> Call | None:
    if not isinstance(item, dict) or item.get("name") not in names:
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return Call(index, item["name"], json.dumps(arguments, ensure_ascii=False))


class _ForcedReader:
    """The whole answer is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[Piece]:
        name, self._name = self._name, None
        return [Call(0, name, text)] if text or name else []

    def finish(self) -> list[Piece]:
        return []


class _RequiredReader:
    """The answer is ``{"name": ..., "arguments": {...}}``; arguments are handed on as they come."""

    def __init__(self) -> None:
        self._held = ""
        self._arguments: _Balanced | None = None

    def push(self, text: str) -> list[Piece]:
        if self._arguments is not None:
            more = self._arguments.take(text)
            return [Call(0, None, more)] if more else []
        self._held += text
        head = _HEAD.match(self._held)
        if head is None:
            return []
        self._arguments = _Balanced()
        return [Call(0, head[1], self._arguments.take(self._held[head.end() :]))]

    def finish(self) -> list[Piece]:
        return []


class _Balanced:
    """Passes JSON text on until its first object ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._begun = self._in_text = self._escaped = self._ended = False

    def take(self, text: str) -> str:
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        for index, char in enumerate(text):
            if self._ended:
                return text[:index]
            self._step(char)
        return text

    def _step(self, char: str) -> None:
        if self._in_text:
            self._in_text = self._escaped or char != '"'
            self._escaped = not self._escaped and char == "\\"
        elif char == '"':
            self._in_text = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self._ended = self._depth == 0


class _AutoReader:
    """Text is handed on unless it begins like a call, or a call's tag begins in it; those wait for the end."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._held = ""
        self._begun = False  # some text was handed on
        self._calling = False

    def push(self, text: str) -> list[Piece]:
        self._held += text
        if self._calling or (not self._begun and self._may_be_call()):
            return []
        at = self._held.find(_OPEN)
        self._calling = at >= 0
        cut = at if at >= 0 else len(self._held) - _overlap(self._held, _OPEN)
        shown, self._held = self._held[:cut], self._held[cut:]
        self._begun = self._begun or bool(shown)
        return [shown] if shown else []

    def _may_be_call(self) -> bool:
        start = "".join(self._held[:_MOST_HEAD].split())
        self._calling = any(start.startswith(head) for head in _HEADS)
        return self._calling or any(head.startswith(start) for head in _HEADS)

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        calls = parse_calls(held, self._names)
        return [*calls] if calls else [held] if held else []


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of a text that begins the mark."""
    return next((n for n in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:n])), 0)


# -- earlier calls in a conversation ---------------------------------------------------------------------------------


def for_template(messages: Sequence[Any], knows_tools: bool) -> Iterator[Any]:
    """Messages as chat templates want them: arguments of earlier calls as objects, or all of it as plain text."""
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not (calls or message.get("role") == "tool"):
            yield message
        elif knows_tools:
            yield {**message, "tool_calls": [_with_object(c) for c in calls]} if isinstance(calls, list) else message
        else:
            yield _as_text(message)


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content)
        return {"role": "user", "content": f"Result of the call: {text}"}
    given = message["tool_calls"] if isinstance(message["tool_calls"], list) else []
    calls = [_with_object(call) for call in given if isinstance(call, dict)]
    lines = [json.dumps(call.get("function", {}), ensure_ascii=False) for call in calls]
    content = message.get("content")
    first = [content] if isinstance(content, str) and content else []
    return {"role": message.get("role"), "content": "\n".join([*first, *lines])}
