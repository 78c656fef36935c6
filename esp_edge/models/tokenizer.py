"""Text to token ids and back, through the vocabulary of the loaded model."""

from __future__ import annotations

import codecs
import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from esp_edge._runtime import llama_cpp
from esp_edge.errors import ConfigError, PromptError
from esp_edge.tree import Int32Array

__all__ = ["StopMatcher", "TextDecoder", "Tokenizer"]

_CONTROL = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
_SPECIAL = _CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED


_LONG_TEXT = 8192  # bytes
_STACK_PER_BYTE = 640
_MOST_STACK = 1 << 30
_Made = TypeVar("_Made")
_stack_size = threading.Lock()


def _with_deep_stack(n_bytes: int, make: Callable[[], _Made]) -> _Made:
    """Run ``make`` in a thread whose stack grows with the text.

    Some of llama.cpp's pre-tokenizers are regular expressions that recurse once a character, and 25,000 characters
    without a break end a process with a common stack.

    Raises:
        PromptError: the text would need a stack of more than 1 GiB.
    """
    needed = n_bytes * _STACK_PER_BYTE + (1 << 20)
    if needed > _MOST_STACK:
        raise PromptError(f"a text of {n_bytes} bytes cannot be tokenised at once; split it")
    with _stack_size, ThreadPoolExecutor(1) as pool:
        before = threading.stack_size(-(-needed // 65536) * 65536)
        try:
            made = pool.submit(make)  # the thread starts here, with this stack
        finally:
            threading.stack_size(before)
        return made.result()


def _utf8(text: str) -> bytes:
    """UTF-8 with lone surrogates as U+FFFD: llama.cpp throws on invalid UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


class Tokenizer:
    """The vocabulary of a model. Valid as long as the model is loaded."""

    def __init__(self, vocab: ctypes.c_void_p) -> None:
        self._pointer: ctypes.c_void_p | None = vocab
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(vocab)
        self.bos: int = llama_cpp.llama_vocab_bos(vocab)
        self.eos: int = llama_cpp.llama_vocab_eos(vocab)
        self.adds_bos: bool = bool(llama_cpp.llama_vocab_get_add_bos(vocab))
        self.eog_ids = frozenset(i for i in range(self.n_vocab) if llama_cpp.llama_vocab_is_eog(vocab, i))
        self._pieces: dict[int, bytes] = {}

    @property
    def _vocab(self) -> ctypes.c_void_p:
        if self._pointer is None:
            raise ConfigError("the model was closed: load it again")
        return self._pointer

    def close(self) -> None:
        """The model is going away; every later use is a ConfigError."""
        self._pointer = None

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            add_special: add BOS and the like where the model wants them.
            parse_special: read ``<|im_end|>`` and its kind as tokens; False keeps them plain text.

        Raises:
            PromptError: the tokenizer refuses the text.
        """
        data = _utf8(text)
        if len(data) > _LONG_TEXT:
            return _with_deep_stack(len(data), lambda: self._encode(data, add_special, parse_special))
        return self._encode(data, add_special, parse_special)

    def _encode(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        capacity = len(data) + 8
        while True:
            buffer = (llama_cpp.llama_token * capacity)()
            n = llama_cpp.llama_tokenize(self._vocab, data, len(data), buffer, capacity, add_special, parse_special)
            if n >= 0:
                return self._checked(buffer[:n], data)
            if -n <= capacity:
                raise PromptError(f"the tokenizer refused a text of {len(data)} bytes; shorten it")
            capacity = -n

    def _checked(self, ids: Sequence[int], data: bytes) -> list[int]:
        """Ids that exist: some vocabularies have no token for what they do not know, and say -1."""
        if any(token_id < 0 for token_id in ids):
            raise PromptError(f"the vocabulary has no token for a part of {data[:40]!r}; use another text or model")
        return list(ids)

    def piece(self, token_id: int) -> bytes:
        """Bytes of a token as text shows it; control tokens are empty."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = b"" if self.is_control(token_id) else self.raw_piece(token_id)
        return piece

    def raw_piece(self, token_id: int) -> bytes:
        """Bytes of a token, control tokens written out."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = llama_cpp.llama_token_to_piece(self._vocab, token_id, buffer, size, 0, True)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def decode(self, token_ids: Sequence[int] | Int32Array) -> str:
        """Text of token ids, broken UTF-8 as U+FFFD."""
        return b"".join(self.piece(int(i)) for i in token_ids).decode("utf-8", "replace")

    def is_control(self, token_id: int) -> bool:
        """A token that has no text of its own (BOS, ``<|im_end|>``, unknown)."""
        return bool(llama_cpp.llama_vocab_get_attr(self._vocab, token_id) & _CONTROL)

    def special_texts(self) -> list[str]:
        """Texts that ``parse_special`` would read as one token."""
        found = []
        for token_id in range(self.n_vocab):
            if llama_cpp.llama_vocab_get_attr(self._vocab, token_id) & _SPECIAL:
                text = self.raw_piece(token_id).decode("utf-8", "replace")
                if text:
                    found.append(text)
        return found

    def encode_array(self, text: str) -> Int32Array:
        """``encode`` without special tokens, as int32[n]."""
        return np.array(self.encode(text), np.int32)


class TextDecoder:
    """Joins token bytes into text, holding back half a character.

    >>> decoder = TextDecoder()
    >>> decoder.push(b"\\xf0\\x9f"), decoder.push(b"\\x98\\x80"), decoder.push(b"\\xf0"), decoder.flush()
    ('', '😀', '', '�')
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        """Text that is complete now."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left: nothing, or one U+FFFD for half a character."""
        text = self._decoder.decode(b"", final=True)
        return text[:1]


class StopMatcher:
    """Finds the earliest stop text in a stream and holds back what might become one.

    >>> stop = StopMatcher(("END",))
    >>> stop.push("alpha E"), stop.push("ND beta"), stop.hit
    ('alpha ', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """Text that is safe to show; after a hit nothing more is."""
        if not self._stops:
            return text
        if self.hit:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.hit = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = self._longest_prefix()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _longest_prefix(self) -> int:
        """Length of the longest end of the held text that begins a stop text."""
        longest = 0
        for stop in self._stops:
            for n in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:n]):
                    longest = n
                    break
        return longest

    def flush(self) -> str:
        """The held text, once nothing more can follow."""
        shown, self._held = self._held, ""
        return shown
