"""From chunks to what may be shown of them: text, and the tokens that it consists of.

The session holds back half a character and what may become a stop text. Token by token information, such as
log-probabilities, must wait for its text, or the stream would tell what it hides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from esp_edge.models.tokenizer import TextDecoder, Tokenizer

if TYPE_CHECKING:
    from esp_edge.session import Chunk, TokenLogprob

__all__ = ["Delta", "Token", "TokenFeed"]


@dataclass(frozen=True, slots=True)
class Token:
    """A token whose text is shown.

    Attributes:
        data: its bytes.
        text: characters that it completes; those of all tokens together are the answer.
        offset: characters of the answer before it.
        source: the draft source that proposed it, "" where it was no accepted draft.
        logprob: when asked for.
    """

    token_id: int
    data: bytes
    text: str
    offset: int
    source: str
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class Delta:
    """What a chunk brings to the client.

    Attributes:
        tokens: those whose text is complete with this one.
        pieces: (text, draft source) of its parts, which spell the text.
    """

    text: str
    tokens: tuple[Token, ...]
    pieces: tuple[tuple[str, str], ...]
    finish_reason: str | None


class TokenFeed:
    """Releases the tokens of one answer as their text appears; an end-of-generation token is none of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = TextDecoder()
        self._waiting: deque[Token] = deque()
        self._unshown: deque[tuple[str, str]] = deque()
        self._decoded = 0  # characters
        self._shown = 0

    def push(self, chunk: Chunk) -> Delta:
        """Text of a chunk and the tokens that are complete with it."""
        for i, token_id in enumerate(chunk.token_ids):
            if token_id not in self._tokenizer.eog_ids:
                logprob = chunk.logprobs[i] if chunk.logprobs else None
                source = chunk.sources[i] if i < len(chunk.sources) else ""
                self._waiting.append(self._token(token_id, source, logprob))
        self._shown += len(chunk.text)
        tokens = list(self._complete())
        if chunk.finish_reason is not None:
            tokens += self._rest()
        return Delta(chunk.text, tuple(tokens), tuple(self._pieces(chunk.text)), chunk.finish_reason)

    def _pieces(self, text: str) -> Iterator[tuple[str, str]]:
        at = 0
        while at < len(text) and self._unshown:
            part, source = self._unshown.popleft()
            if len(part) > len(text) - at:
                self._unshown.appendleft((part[len(text) - at :], source))
                part = part[: len(text) - at]
            yield part, source
            at += len(part)
        if at < len(text):  # half a character at the very end
            yield text[at:], ""

    def _token(self, token_id: int, source: str, logprob: TokenLogprob | None) -> Token:
        data, offset = self._tokenizer.piece(token_id), self._decoded
        text = self._decoder.push(data)
        self._decoded += len(text)
        if text:
            self._unshown.append((text, source))
        return Token(token_id, data, text, offset, source, logprob)

    def _complete(self) -> list[Token]:
        found = []
        while self._waiting and self._waiting[0].offset + len(self._waiting[0].text) <= self._shown:
            found.append(self._waiting.popleft())
        return found

    def _rest(self) -> list[Token]:
        """At the end: the token that a stop text cuts, without what is hidden of it."""
        found = []
        while self._waiting and self._waiting[0].offset < self._shown:
            token = self._waiting.popleft()
            text = token.text[: self._shown - token.offset]
            found.append(Token(token.token_id, text.encode(), text, token.offset, token.source, token.logprob))
        return found
