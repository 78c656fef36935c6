"""The state of a chat that is not on the screen: messages, settings, saved files."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from esp_edge.cli.inputs import read_text
from esp_edge.cli.options import stops_from, with_tree
from esp_edge.config import DraftConfig, GenerationParams
from esp_edge.errors import ConfigError, PromptError

__all__ = ["SETTINGS", "Conversation", "assign", "closest", "settings"]

ALL = "all"  # how no choice of draft sources is written


def closest(word: str, words: Iterable[str]) -> str:
    """`` (did you mean X?)``, or nothing when no word is close."""
    found = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {found[0]}?" if found else ""


# -- messages --------------------------------------------------------------------------------------------------------


@dataclass
class Conversation:
    """What was said.

    Attributes:
        system: system prompt, or None for the template's own.
        history: user and assistant messages in turn.
    """

    system: str | None = None
    history: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        """Everything, as the chat template takes it."""
        first = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*first, *self.history]

    def add(self, role: str, content: str) -> None:
        """Append a message."""
        self.history.append({"role": role, "content": content})

    def drop_last(self, role: str) -> bool:
        """Remove the last message if it is by ``role``; whether it was."""
        if not self.history or self.history[-1]["role"] != role:
            return False
        self.history.pop()
        return True

    def save(self, path: Path, model: str) -> None:
        """Write the messages as JSON. A file that is no saved chat is not overwritten.

        Raises:
            PromptError: the file is something else or cannot be written.
        """
        if os.path.exists(path):  # unlike Path.exists it never raises
            _read_chat(path)
        text = json.dumps({"model": model, "messages": self.messages()}, ensure_ascii=False, indent=2) + "\n"
        part = path.with_name(path.name + ".part")
        try:
            part.write_text(text, "utf-8", errors="replace")
            os.replace(part, path)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            with suppress(OSError, ValueError):
                part.unlink()
            raise PromptError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from None

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Read what :meth:`save` wrote.

        Raises:
            PromptError: the file cannot be read or is no saved chat.
        """
        messages = _read_chat(path)
        if messages and messages[0]["role"] == "system":
            return cls(messages[0]["content"], messages[1:])
        return cls(None, messages)


def _read_chat(path: Path) -> list[dict[str, str]]:
    try:
        document = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, PromptError):
            raise
        document = None
    messages = document.get("messages") if isinstance(document, dict) else None
    if not isinstance(messages, list) or not all(_is_message(item) for item in messages):
        raise PromptError(f'{path} is no saved chat: it needs {{"messages": [{{"role", "content"}}, ...]}}')
    return [{"role": item["role"], "content": item["content"]} for item in messages]


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)


# -- settings --------------------------------------------------------------------------------------------------------


def _switch(text: str) -> bool:
    if text in ("on", "true", "yes", "1"):
        return True
    if text in ("off", "false", "no", "0"):
        return False
    raise ValueError(text)


def _count_or_none(text: str) -> int | None:
    return None if int(text) == -1 else int(text)


def _number_or_none(text: str) -> float | None:
    return None if text == "default" else float(text)


def _rows_or_none(text: str) -> int | None:
    return None if text == "default" else int(text)


def _text_or_none(text: str) -> str | None:
    return None if text == "off" else text


def _sources(text: str) -> str:
    return "" if text == ALL else text


def _stops(text: str) -> tuple[str, ...]:
    return () if text == "off" else tuple(stops_from(text))


# flag -> (field, how its text is read, what is expected)
_PARAMS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "max-tokens": ("max_tokens", _count_or_none, "a whole number"),
    "temp": ("temperature", float, "a number"),
    "top-k": ("top_k", int, "a whole number"),
    "top-p": ("top_p", float, "a number"),
    "min-p": ("min_p", float, "a number"),
    "typical": ("typical_p", float, "a number"),
    "repeat-penalty": ("repeat_penalty", float, "a number"),
    "repeat-last-n": ("repeat_last_n", int, "a whole number"),
    "presence-penalty": ("presence_penalty", float, "a number"),
    "frequency-penalty": ("frequency_penalty", float, "a number"),
    "dry-multiplier": ("dry_multiplier", float, "a number"),
    "dry-base": ("dry_base", float, "a number"),
    "dry-allowed-length": ("dry_allowed_length", int, "a whole number"),
    "dry-penalty-last-n": ("dry_penalty_last_n", int, "a whole number"),
    "seed": ("seed", _count_or_none, "a whole number"),
    "stop": ("stop", _stops, "a text, a JSON array of texts, or off"),
    "ignore-eos": ("ignore_eos", _switch, "on or off"),
}
_DRAFT: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "drafter": ("drafter", str, "a name"),
    "draft-model": ("draft_model", _text_or_none, "a model or off"),
    "block-complexity": ("block_complexity", _rows_or_none, "a whole number or default"),
    "masks": ("masks", int, "a whole number"),
    "tree": ("tree", str, "dynamic or K1,K2"),
    "mask-init": ("mask_init", str, "a name"),
    "mask-update": ("mask_update", _number_or_none, "a number or default"),
    "prune": ("prune", _switch, "on or off"),
    "impl": ("impl", str, "efficient or naive"),
    "keep": ("keep", _switch, "on or off"),
    "occurrence": ("occurrence", str, "newest or first"),
    "draft-seed": ("seed", int, "a whole number"),
    "sources": ("sources", _sources, "names joined by +, or all"),
}
SETTINGS = (*_PARAMS, *_DRAFT)
# the name in the API where it is another one; --seed is the sampler's, although drafts have a seed, too
_ALIASES = {
    alias: name
    for name, (attribute, _, _) in (_PARAMS | _DRAFT).items()
    if (alias := attribute.replace("_", "-")) not in SETTINGS
}
_UNSET = {
    "tree": "dynamic",
    "mask-update": "default",
    "block-complexity": "default",
    "draft-model": "off",
}  # how None is written; -1 for the others


def assign(params: GenerationParams, draft: DraftConfig, name: str, text: str) -> tuple[GenerationParams, DraftConfig]:
    """Both settings after ``/set NAME TEXT``; names are those of the flags, without the dashes in front.

    Raises:
        ConfigError: no such name, or a value that cannot be.
    """
    name = name.lstrip("-").replace("_", "-")
    name = _ALIASES.get(name, name)
    if name not in SETTINGS:
        raise ConfigError(f"there is no setting {name!r}{closest(name, (*SETTINGS, *_ALIASES))} (/show lists them)")
    attribute, read, expected = _PARAMS.get(name) or _DRAFT[name]
    try:
        value = read(text)
    except ValueError:
        raise ConfigError(f"{name} needs {expected}, but {text!r} was given") from None
    if name in _PARAMS:
        return dataclasses.replace(params, **{attribute: value}), draft
    if name == "tree":
        return params, with_tree(draft, text)
    return params, dataclasses.replace(draft, **{attribute: value})


def settings(params: GenerationParams, draft: DraftConfig) -> dict[str, str]:
    """Every setting as ``/set`` takes it."""
    values = {name: getattr(params, attribute) for name, (attribute, _, _) in _PARAMS.items()}
    values |= {name: getattr(draft, attribute) for name, (attribute, _, _) in _DRAFT.items()}
    return {name: _UNSET.get(name, "-1") if value is None else _shown(value) for name, value in values.items()}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):  # stop texts, or the widths of a tree
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")) if value else "off"
    return str(value) or ALL
