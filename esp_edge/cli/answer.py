"""From a prompt to an answer: what ``generate``, its batches and ``chat`` have in common."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from esp_edge.cli.output import Bar, Notices
from esp_edge.config import DraftConfig, GenerationParams, ModelConfig
from esp_edge.metrics import GenerationStats

if TYPE_CHECKING:
    from esp_edge.session import Chunk, Model, Prompt, Session, TokenLogprob

__all__ = ["Answer", "Interrupt", "answer", "load_model", "open_session", "to_messages"]


def to_messages(text: str, system: str | None = None) -> list[dict[str, str]]:
    """A user's text, after a system prompt if there is one, as messages for the chat template."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": text}]


def load_model(spec: str, config: ModelConfig) -> Model:
    """:func:`esp_edge.session.load` with a progress bar for what has to be downloaded, and a note if kernels failed."""
    from esp_edge.session import load  # noqa: PLC0415 - loads llama.cpp

    with Bar(f"downloading {spec}", unit="bytes") as bar:
        model = load(spec, config, progress=bar.update_file)
    Notices().show(model.kernels.warning)
    return model


@contextmanager
def open_session(spec: str, config: ModelConfig, draft: DraftConfig) -> Iterator[Session]:
    """A session on a model loaded for it; both are closed in the end. The first use of a model measures some facts."""
    with closing(load_model(spec, config)) as model:
        model.remember = True
        with Bar("measuring this model (once)") as bar:
            session = model.session(draft, progress=bar.update)
        with closing(session):
            yield session


class Interrupt:
    """Ctrl-C while an answer is written: ask to stop after the current pass, so that the KV cache stays right.

    Before the first chunk, and the second time, it is a KeyboardInterrupt as usual.
    """

    def __init__(self) -> None:
        self.pressed = False
        self.writing = False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.pressed or not self.writing:
            raise KeyboardInterrupt
        self.pressed = True

    def __enter__(self) -> Interrupt:
        self._ours = threading.current_thread() is threading.main_thread()  # only there signals can be caught
        if self._ours:
            self._old = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.SIG_DFL if self._old is None else self._old)


@dataclass(slots=True)
class Answer:
    """All chunks of one generation.

    Attributes:
        finish_reason: ``stop`` or ``length``; None when it was interrupted.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)

    def add(self, chunk: Chunk) -> None:
        """Append a chunk."""
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.finish_reason = chunk.finish_reason
        self.stats = chunk.stats

    def document(self, answer_id: str | int, session: Session, *, logprobs: bool = False) -> dict[str, Any]:
        """JSON-ready; the same keys for every answer of a run."""
        document: dict[str, Any] = {
            "id": answer_id,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.stats.prompt_tokens,
            "stats": self.stats.as_dict(),
        }
        if logprobs:
            document["logprobs"] = [_logprob_document(entry, session) for entry in self.logprobs]
        return document


def _logprob_document(entry: TokenLogprob, session: Session) -> dict[str, Any]:
    def one(token_id: int, logprob: float) -> dict[str, Any]:
        token = session.model.tokenizer.raw_piece(token_id).decode("utf-8", "replace")
        finite = logprob if math.isfinite(logprob) else None  # JSON has no -Infinity
        return {"token_id": token_id, "token": token, "logprob": finite}

    return {**one(entry.token_id, entry.logprob), "top": [one(*rival) for rival in entry.top]}


def answer(
    session: Session, prompt: Prompt, params: GenerationParams, on_text: Callable[[str], None] | None = None
) -> Answer:
    """Generate to the end, or until Ctrl-C.

    Args:
        on_text: called with every new piece of text.

    Raises:
        EspEdgeError: the prompt or the parameters cannot be used, or a pass failed.
        KeyboardInterrupt: Ctrl-C before the first chunk, or twice.
    """
    try:
        return _collect(session.generate(prompt, params), on_text)
    except KeyboardInterrupt:
        session.token_ids.clear()  # it struck anywhere: trust nothing in the KV cache
        raise


def _collect(chunks: Generator[Chunk, None, None], on_text: Callable[[str], None] | None) -> Answer:
    result = Answer()
    with Interrupt() as interrupt, closing(chunks):
        for chunk in chunks:
            interrupt.writing = True
            result.add(chunk)
            if on_text is not None:
                on_text(chunk.text)
            if interrupt.pressed:
                break
    return result
