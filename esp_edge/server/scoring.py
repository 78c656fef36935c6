"""Log-probabilities of a prompt's own tokens: ``echo`` with ``logprobs`` asks for them, as evaluations do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from esp_edge.config import MAX_EXACT_BLOCK
from esp_edge.errors import ContextLengthError
from esp_edge.session import TokenLogprob
from esp_edge.step import Outputs, Step
from esp_edge.tree import DraftTree

if TYPE_CHECKING:
    from esp_edge.models.model import Context
    from esp_edge.session import Model

__all__ = ["Scorer"]

CHAIN_ROWS = MAX_EXACT_BLOCK  # rows of a pass, as decode passes have: from 64 on llama.cpp computes them in another way


class Scorer:
    """Scores prompts one after the other, on a KV cache of its own that is made when the first one comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: Context | None = None

    def score(
        self, model: Model, ids: Sequence[int], n_top: int, is_wanted: Callable[[], bool]
    ) -> list[TokenLogprob | None]:
        """An entry a token; the first token has no log-probability: None.

        Args:
            n_top: likeliest tokens told at each position.
            is_wanted: asked before each pass; False ends the work with what there is.

        Raises:
            ContextLengthError: the prompt does not fit.
        """
        if len(ids) > model.n_ctx:
            raise ContextLengthError(len(ids), model.n_ctx)
        with self._lock:
            if self._context is None or self._context.closed:
                self._context = model.new_context(1)
            width = CHAIN_ROWS if model.capability.speculation else 1
            return self._run(Step(self._context), ids, width, min(n_top, model.tokenizer.n_vocab), is_wanted)

    @staticmethod
    def _run(
        step: Step, ids: Sequence[int], width: int, n_top: int, is_wanted: Callable[[], bool]
    ) -> list[TokenLogprob | None]:
        step.reset()
        found: list[TokenLogprob | None] = [None]
        for first in range(0, len(ids) - 1, width):
            if not is_wanted():
                break
            rows = ids[first : min(first + width, len(ids) - 1)]
            outputs = step.run(DraftTree.from_lists(list(rows), range(-1, len(rows) - 1)))
            found += [_score(outputs, row, ids[first + row + 1], n_top) for row in range(len(rows))]
            step.commit(range(1, len(rows)))
        step.reset()
        return found

    def close(self) -> None:
        """Free the KV cache."""
        with self._lock:
            if self._context is not None:
                self._context.close()
                self._context = None


def _score(outputs: Outputs, row: int, token_id: int, n_top: int) -> TokenLogprob:
    top: tuple[tuple[int, float], ...] = ()
    if n_top:
        best, values = outputs.top_k(np.array([row], np.int32), n_top)
        top = tuple(zip(best[0].tolist(), values[0].tolist(), strict=True))
    return TokenLogprob(token_id, outputs.logprob(row, token_id), top)
