"""Answers as llama-cpp-python gives them: its penalties hear the answer only, and its ``scores`` are filled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from esp_edge._runtime import llama_cpp
from esp_edge.config import DraftConfig, GenerationParams
from esp_edge.models.model import TargetModel
from esp_edge.models.sampler import Sampler
from esp_edge.session import Chunk, Generation, Session
from esp_edge.tree import FloatArray

__all__ = ["AnswerSession", "Sessions"]


class _AnswerSampler(Sampler):
    """A sampler that does not hear the prompt and writes down the logits it chose from."""

    def __init__(self, sampler: Sampler, scores: FloatArray | None) -> None:
        self._sampler, self._scores = sampler, scores

    def pick(self, step: Any, row: int, position: int) -> int:
        """As :meth:`Sampler.pick`; the logits go to the row of the token in front."""
        if self._scores is not None:
            self._scores[position - 1] = step.logits(row)
        return self._sampler.pick(step, row, position)

    def accept(self, token_id: int, *, generated: bool) -> None:
        """As :meth:`Sampler.accept`, prompt tokens left out."""
        if generated:
            self._sampler.accept(token_id, generated=True)


class _Answer(Generation):
    """A generation whose prompt may end with tokens that are already part of the answer."""

    def __init__(
        self,
        model: TargetModel,
        token_ids: Sequence[int],
        params: GenerationParams,
        answered: Sequence[int],
        scores: FloatArray | None,
    ) -> None:
        super().__init__(model, token_ids, params)
        self._sampler = _AnswerSampler(self._sampler, scores)
        self._answered = tuple(answered)

    def begin(self, max_rows: int) -> None:
        """As :meth:`Generation.begin`; penalties and grammar hear what was answered before."""
        super().begin(max_rows)
        for token_id in self._answered:
            self._sampler.accept(token_id, generated=True)


class AnswerSession(Session):
    """A session that can continue an answer, and prefills with llama-cpp-python's number of threads."""

    def __init__(self, model: TargetModel, draft: DraftConfig, prefill_threads: int) -> None:
        super().__init__(model, draft)
        self._prefill_threads = prefill_threads

    def answer(
        self,
        token_ids: Sequence[int],
        params: GenerationParams,
        *,
        answered: Sequence[int] = (),
        scores: FloatArray | None = None,
    ) -> Generator[Chunk, None, None]:
        """As :meth:`Session.generate`, for token ids.

        Args:
            answered: those of the ids that are the answer so far, for its penalties and its grammar.
            scores: float32[n_ctx, n_vocab], of which row i gets the logits that the token at i + 1 was chosen from.

        Raises:
            PromptError, GrammarError: as for :meth:`Session.generate`.
        """
        self._require_open()
        generation = _Answer(self.model, token_ids, params, answered, scores)
        generation.use(*self._start(generation.params, generation.n_prompt))
        return self._run(generation)

    def _prefill(self, generation: Generation) -> None:
        self._set_threads(self._prefill_threads)
        try:
            super()._prefill(generation)
        finally:
            self._set_threads(self.model.threads)

    def _set_threads(self, n_batch: int) -> None:
        """Of passes with several rows: a prompt may use more threads than a draft tree."""
        context = self._context
        if context is not None and not context.closed:
            with context.lock:
                llama_cpp.llama_set_n_threads(context.pointer, self.model.threads, n_batch)


class Sessions:
    """Lends one session to each answer that is being made, and keeps the last one for the next prompt.

    So answers may overlap, in threads or as half-read streams, and only those that do need a second KV cache.
    """

    def __init__(self, make: Callable[[], AnswerSession]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._idle: AnswerSession | None = None
        self._closed = False

    def take(self) -> AnswerSession:
        """The idle session, or a new one."""
        with self._lock:
            session, self._idle = self._idle, None
            return session or self._make()

    def give_back(self, session: AnswerSession) -> None:
        """Its answer ended."""
        with self._lock:
            spare, self._idle = (session, None) if self._closed else (self._idle, session)
        if spare is not None:
            spare.close()

    def close(self) -> None:
        """Free the idle session; those that are lent go when they come back. Calling it twice is harmless."""
        with self._lock:
            spare, self._idle, self._closed = self._idle, None, True
        if spare is not None:
            spare.close()
