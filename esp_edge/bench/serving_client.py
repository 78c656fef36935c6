"""One client for all servers: a streamed chat request, its times by this side's clock, and many of them at once."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from esp_edge.bench.peers import last_lines
from esp_edge.bench.server_process import HOST, ServerProcess
from esp_edge.errors import DecodeError

__all__ = ["Messages", "PromptSize", "Reply", "ask", "ask_all", "cold_messages"]

ANSWER_SECONDS = 3600.0
Messages = Sequence[Mapping[str, str]]
_PROBES = 8, 40  # words of the two prompts from which a prompt's size is learned
# frequent words: a token each for most models
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
"""


@dataclass(frozen=True, slots=True)
class Reply:
    """A streamed answer.

    Attributes:
        first_s: seconds from the request to the first text.
        total_s: to the end of the stream.
        text: the answer.
        prompt_tokens, completion_tokens: as the server counts them.
        cached_tokens: of the prompt; None = the server does not say.
    """

    first_s: float
    total_s: float
    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


def ask(server: ServerProcess, messages: Messages, max_tokens: int) -> Reply:
    """Ask for a greedy answer, as a stream.

    Raises:
        DecodeError: the server refused it, broke off, or answered something else.
    """
    body = {
        "model": "any",
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(HOST, server.port, timeout=ANSWER_SECONDS)
    try:
        begin = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise DecodeError(f"{server.label} answered with status {response.status}: {last_lines(response.read())}")
        return _read(server, response, begin)
    except (OSError, http.client.HTTPException):
        raise DecodeError(f"{server.label} broke off an answer ({server.end()}): {server.said()}") from None
    finally:
        connection.close()


def _read(server: ServerProcess, response: http.client.HTTPResponse, begin: float) -> Reply:
    """Lines are only kept while they come: parsing would take the server's time on a small machine."""
    first, lines = 0.0, []
    for line in response:
        if line.startswith(b"data: {"):
            if not first and _content(json.loads(line[6:])):
                first = time.perf_counter() - begin
            lines.append(line)
    total = time.perf_counter() - begin
    events = [json.loads(line[6:]) for line in lines]
    usage = next((event["usage"] for event in reversed(events) if event.get("usage")), None)
    if usage is None:
        said = events[-1].get("error", events[-1]) if events else "nothing"
        raise DecodeError(f"{server.label} ended a stream without its usage: {last_lines(json.dumps(said).encode())}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    text = "".join(map(_content, events))
    return Reply(first or total, total, text, int(usage["prompt_tokens"]), int(usage["completion_tokens"]), cached)


def _content(event: Mapping[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    return str((choices[0].get("delta") or {}).get("content") or "")


def ask_all(
    server: ServerProcess, requests: Sequence[Messages], streams: int, max_tokens: int
) -> tuple[float, list[Reply]]:
    """All requests, so many at the same time: seconds from the first request to the last token, and the answers."""
    with ThreadPoolExecutor(streams) as pool:
        begin = time.perf_counter()
        replies = list(pool.map(lambda messages: ask(server, messages, max_tokens), requests))
        return time.perf_counter() - begin, replies


# -- prompts ---------------------------------------------------------------------------------------------------------


def cold_messages(number: int, n_words: int) -> Messages:
    """A prompt of which no server has seen more than the template's first tokens: the system message is its own."""
    rng, known = random.Random(number), _WORDS.split()
    words = " ".join(rng.choice(known) for _ in range(n_words))
    system = f"{number} is the number of this conversation."
    return ({"role": "system", "content": system}, {"role": "user", "content": f"Continue this list of words: {words}"})


@dataclass(frozen=True, slots=True)
class PromptSize:
    """How many tokens a prompt of so many words has, learned from two prompts.

    Attributes:
        base: tokens of a prompt without words.
        per_word: tokens a word.
    """

    base: float
    per_word: float

    @classmethod
    def learn(cls, server: ServerProcess, number: int) -> PromptSize:
        """Ask the server, which says how many tokens a prompt had."""
        few, many = _PROBES
        tokens = [ask(server, cold_messages(number + n, n), 1).prompt_tokens for n in _PROBES]
        per_word = max((tokens[1] - tokens[0]) / (many - few), 0.1)
        return cls(tokens[0] - few * per_word, per_word)

    def words(self, n_tokens: int) -> int:
        """Words of a prompt of about so many tokens, at least one."""
        return max(1, round((n_tokens - self.base) / self.per_word))
