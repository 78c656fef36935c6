"""Which replica a request belongs to: requests that begin alike go where their beginning is in the KV cache already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["PREFIX_CHARS", "prefix_key", "ranked"]

PREFIX_CHARS = 256  # of the first user message, or of a raw prompt
_DIGEST_BYTES = 16


def prefix_key(path: str, body: bytes) -> str:
    """A digest of what decides about the beginning of a prompt; "" for requests without one, and for broken ones.

    Chat: the tools, all messages before the first one of the user, and that one's first 256 characters. So the turns of
    a conversation stay together, as do questions on one document, while conversations that share no more than a system
    prompt are spread. Raw completions: the first 256 characters or token ids. OpenAI's ``prompt_cache_key`` stands for
    all of this when a request has it.

    Args:
        path: of the URL.
        body: of the request, in JSON.
    """
    kind = path.rstrip("/").removeprefix("/v1")
    if kind not in ("/chat/completions", "/completions"):
        return ""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(request, dict):
        return ""
    chosen = request.get("prompt_cache_key")
    beginning: Any = (
        chosen if isinstance(chosen, str) and chosen else (_chat if kind.startswith("/chat") else _prompt)(request)
    )
    if not beginning:
        return ""
    # ASCII, for half a surrogate pair has no UTF-8 form
    return hashlib.blake2b(json.dumps(beginning).encode("ascii"), digest_size=_DIGEST_BYTES).hexdigest()


def _chat(request: Mapping[str, Any]) -> list[Any]:
    messages = request.get("messages")
    if not isinstance(messages, list):
        return []
    beginning: list[Any] = [request.get("tools")]
    for message in messages:
        if isinstance(message, dict) and message.get("role") == "user":
            return [*beginning, _text(message.get("content"))[:PREFIX_CHARS]]
        beginning.append(message)
    return beginning if messages else []


def _text(content: object) -> str:
    """Content of a message: a text, or a list of parts."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    return str(content)


def _prompt(request: Mapping[str, Any]) -> Any:
    """The beginning of the first prompt: a text, or token ids."""
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    return prompt[:PREFIX_CHARS] if isinstance(prompt, str | list) else None


def ranked(key: str, names: Iterable[str]) -> list[str]:
    """Names of replicas in the order of a key's preference: rendezvous hashing.

    Everybody who knows the names finds the same order. When one goes, only the keys that preferred it move, and they
    are spread over all others; when it comes back under another name, some keys of each move to it.

    >>> ranked("k", ["a", "b", "c"]) == [name for name in ranked("k", ["d", "c", "b", "a"]) if name != "d"]
    True
    """
    return sorted(names, key=lambda name: (_weight(key, name), name), reverse=True)


def _weight(key: str, name: str) -> bytes:
    return hashlib.blake2b(f"{key} {name}".encode(), digest_size=8).digest()
