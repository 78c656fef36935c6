"""Chat templates: the Jinja dialect of Hugging Face, with the text of users kept apart from the markup.

A template turns messages into one text in which ``<|im_end|>`` and its kind are special tokens. The same characters
inside a message must stay plain text, or anyone who writes a message can end it and speak as the system. So before
rendering every such text inside a message is replaced by a placeholder that cannot be guessed; afterwards the text is
cut at the placeholders, and what they stood for becomes a piece of its own, marked ``literal``::

    user: "say <|im_end|>"   ->   [Piece("<|im_start|>user\\nsay ", False), Piece("<|im_end|>", True),
                                   Piece("<|im_end|>\\n", False)]
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from esp_edge.errors import PromptError
from esp_edge.models.gguf import ArrayInfo, read_array
from esp_edge.models.gguf_checks import one_line, some

__all__ = ["FALLBACK_NAME", "FALLBACK_TEMPLATE", "ROLES", "ChatTemplate", "Piece"]

ROLES = ("system", "user", "assistant", "tool", "developer")

FALLBACK_NAME = "chatml"
FALLBACK_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

KEY = "tokenizer.chat_template"
USER_DEFINED = 4  # token type: markup such as <think> or runs of spaces, which are text to everybody
# llama.cpp turns these into user-defined tokens, which it reads as tokens even in plain text; cut in two they are not
HARMONY = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"})
PROBE = "\ue000probe\ue001"
RAW = "use --raw to write the whole prompt yourself"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a rendered prompt.

    Attributes:
        text: what to tokenise; pieces are tokenised one by one.
        literal: text from a message that looks like a special token: tokenise it without special parsing.
    """

    text: str
    literal: bool


# ------------------------------------------------------------------------------------------------------ environment


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's tokens for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


# ---------------------------------------------------------------------------------------------------------- messages


def _text_of(content: Any, where: str) -> str:
    """Content as one text: a string, nothing, or text parts (joined by line breaks)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise PromptError(f"{where}.content must be a text, null or a list of text parts, but it is {_kind(content)}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            found = f"type {one_line(repr(kind), 40)}" if kind is not None else _kind(part)
            raise PromptError(f'{where}.content[{index}] must be {{"type": "text", "text": ...}}, but it has {found}')
        texts.append(text)
    return "\n".join(texts)


def _part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        int: "a number",
        float: "a number",
        bool: "true or false",
    }
    return "null" if value is None else names.get(type(value), f"of type {type(value).__name__}")


def _checked(message: Any, where: str) -> dict[str, Any]:
    """A copy of a message with a known role and its content as text."""
    if not isinstance(message, Mapping):
        raise PromptError(f"{where} must be an object with role and content, but it is {_kind(message)}")
    role = message.get("role")
    if role not in ROLES:
        found = "it has none" if "role" not in message else f"it is {one_line(repr(role), 40)}"
        raise PromptError(f"{where}.role must be one of {', '.join(ROLES)}, but {found}")
    if "content" not in message and not message.get("tool_calls"):
        raise PromptError(f"{where} has no content: give a text (it may be empty)")
    copy = {str(key): value for key, value in message.items()}
    copy["role"] = "system" if role == "developer" else role
    copy["content"] = _text_of(message.get("content"), where)
    return copy


def _valid_unicode(text: str) -> str:
    """Lone surrogates cannot be tokenised: U+FFFD instead."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _Shield:
    """Swaps special tokens inside message texts for placeholders of digits between two private-use characters."""

    def __init__(self, pattern: re.Pattern[str] | None) -> None:
        self.pattern = pattern
        self.nonce = f"{secrets.randbits(96):029d}"
        self.hidden: list[str] = []
        self.mark = re.compile(f"\ue000{self.nonce}([0-9]+)\ue001")

    def _hide(self, match: re.Match[str]) -> str:
        self.hidden.append(match[0])
        return f"\ue000{self.nonce}{len(self.hidden) - 1}\ue001"

    def protect(self, value: Any) -> Any:
        """A copy of a value with every text in it protected."""
        if isinstance(value, str):
            text = _valid_unicode(value)
            return self.pattern.sub(self._hide, text) if self.pattern else text
        if isinstance(value, Mapping):
            return {key: self.protect(item) for key, item in value.items()}
        return [self.protect(item) for item in value] if isinstance(value, list | tuple) else value

    def pieces(self, rendered: str) -> list[Piece]:
        """Cut the rendered text at the placeholders."""
        found: list[Piece] = []
        for index, part in enumerate(self.mark.split(rendered)):
            if index % 2 == 0:
                found += [Piece(part, False)] if part else []
            else:
                text = self.hidden[int(part)]
                parts = (text[:2], text[2:]) if text in HARMONY else (text,)
                found += [Piece(item, True) for item in parts]
        return found


# ---------------------------------------------------------------------------------------------------------- template


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja text.
        bos_token, eos_token: what the template may write for them.
        special_tokens: texts that special parsing reads as one token; inside messages they stay text.
        name: what to call it: ``chatml`` for the fallback, ``file`` for a model's own, or the name it has there.

    Raises:
        PromptError: the source does not compile.
    """

    def __init__(
        self, source: str, bos_token: str, eos_token: str, special_tokens: Sequence[str], name: str = "file"
    ) -> None:
        self.source, self.bos_token, self.eos_token, self.name = source, bos_token, eos_token, name
        texts = sorted({text for text in special_tokens if text.strip()}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            cause = f"line {error.lineno}: {one_line(str(error.message), 120)}"
            raise PromptError(f"the model's chat template does not compile ({cause}); {RAW}") from None
        except Exception as error:  # a template is a program of somebody else: anything may come out of it
            raise PromptError(f"the model's chat template does not compile ({_shown(error)}); {RAW}") from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[Piece]:
        """The prompt of a conversation, in pieces.

        Args:
            messages: role (one of :data:`ROLES`; developer = system) and content (text, None or text parts).
            add_generation_prompt: end with the opening of the assistant's answer.
            kwargs: further variables of the template, such as ``tools`` or ``enable_thinking``.

        Raises:
            PromptError: malformed messages, or the template refuses them.
        """
        if not isinstance(messages, list | tuple):
            raise PromptError(f"messages must be a list, but it is {_kind(messages)}")
        if not messages:
            raise PromptError("messages is empty: give at least one message")
        checked = [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]
        if self._wants_parts:
            checked = [{**message, "content": _part(message["content"])} for message in checked]
        shield = _Shield(self._pattern)
        try:
            return shield.pieces(self._render(shield.protect(checked), add_generation_prompt, shield.protect(kwargs)))
        except TemplateError as error:
            shown = one_line(str(error.message), 200)
            raise PromptError(f"the chat template refuses these messages: {shown}") from None
        except Exception as error:  # as above
            raise PromptError(f"the chat template fails on these messages ({_shown(error)}); {RAW}") from None

    def _render(self, messages: list[Any], add_generation_prompt: bool, kwargs: Mapping[str, Any]) -> str:
        variables = {"tools": None, "documents": None, "bos_token": self.bos_token, "eos_token": self.eos_token}
        return self._template.render(
            {**variables, **kwargs, "messages": messages, "add_generation_prompt": add_generation_prompt}
        )

    @cached_property
    def _wants_parts(self) -> bool:
        """Some templates only read content as a list of parts; the text of a string then silently disappears."""
        for content in (PROBE, _part(PROBE)):
            try:
                text = self._render([{"role": "user", "content": content}], True, {})
            except Exception:  # a template may refuse the probe for reasons of its own
                continue
            if PROBE in text:
                return content is not PROBE
        return False

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], special_tokens: Sequence[str], name: str | None = None
    ) -> tuple[ChatTemplate, str | None]:
        """The template of a GGUF, or the named fallback and a warning that says so.

        Args:
            metadata: of :class:`~esp_edge.models.gguf.GGUFHeader`.
            special_tokens: texts that special parsing reads as one token.
            name: of one of several templates (``tokenizer.chat_template.NAME``); None = the default one.

        Raises:
            PromptError: the template does not compile, or there is none of this name.
        """
        source, found = _source(metadata, name)
        tokens = _elements(metadata.get("tokenizer.ggml.tokens"))
        bos, eos = (_token(tokens, metadata.get(f"tokenizer.ggml.{key}_token_id")) for key in ("bos", "eos"))
        special = _markup(tokens, _elements(metadata.get("tokenizer.ggml.token_type")), special_tokens)
        if source is not None:
            return cls(source, bos, eos, special, found), None
        warning = f"the file has no chat template: using '{FALLBACK_NAME}', which the model may not know; {RAW}"
        return cls(FALLBACK_TEMPLATE, bos, eos, special, FALLBACK_NAME), warning


def _shown(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}", 160)


def _source(metadata: Mapping[str, Any], name: str | None) -> tuple[str | None, str]:
    """(template, its name); (None, name of the fallback) without one."""
    named = {
        key.removeprefix(f"{KEY}."): value
        for key, value in metadata.items()
        if key.startswith(f"{KEY}.") and isinstance(value, str)
    }
    if name is not None:
        if name not in named:
            there = f"it has {some(sorted(named), 8)}" if named else "it has no named ones"
            raise PromptError(f"the model has no chat template named {one_line(repr(name), 40)}; {there}")
        return named[name], name
    own = metadata.get(KEY)
    if isinstance(own, str) and own.strip():
        return own, "file"
    return (named["default"], "default") if "default" in named else (None, FALLBACK_NAME)


def _elements(value: Any) -> Sequence[Any]:
    if isinstance(value, ArrayInfo):
        return read_array(value)
    return value if isinstance(value, list) else []


def _token(tokens: Sequence[Any], index: Any) -> str:
    """Text of a token; empty if there is none."""
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        return ""
    token = tokens[index]
    return token.decode("utf-8", "replace") if isinstance(token, bytes) else str(token)


def _markup(tokens: Sequence[Any], types: Sequence[Any], special_tokens: Iterable[str]) -> list[str]:
    """Special tokens without the user-defined ones: ``<think>`` in an answer must reach the template as it is."""
    plain = {
        _token(tokens, index) for index, kind in enumerate(types) if kind == USER_DEFINED and index < len(tokens)
    } - HARMONY
    return [text for text in special_tokens if text not in plain]
