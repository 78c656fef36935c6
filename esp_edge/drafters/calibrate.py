"""Which mask initialisation guesses best on this model: what ``--mask-init auto`` runs once per model file.

The text is a chat prompt and the model's own greedy answer, so it supplies its own labels: the mask behind token
``p`` sits in the slot of token ``p + 1`` and must propose token ``p + 2``. Known tokens go through the model as a
chain with one mask behind each, a few at a time, exactly as a decode pass would run them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from esp_edge.errors import ConfigError
from esp_edge.masks import Embeddings, MaskVectors, make_masks
from esp_edge.step import Outputs
from esp_edge.tree import DraftTree, FloatArray, Int32Array

__all__ = ["CANDIDATES", "RANKS", "Hits", "ProbeStep", "best", "calibrate", "split_candidate"]

RANKS = (1, 2, 4, 8, 15, 29)
_SCORE_RANKS = (1, 4, 15)
# Simplest first: an equal score goes to the earlier one. Frozen, the last tokens are only a template's end: hence @0.1.
CANDIDATES = ("vocab-mean", "prompt-mean@0", "prompt-mean", "last-k@0.1", "sample")

_Progress = Callable[[int, int], None]


class ProbeStep(Protocol):
    """The part of the target step that calibration drives."""

    def reset(self) -> None:
        """Empty the KV cache."""

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Commit all these tokens."""

    def run(self, tree: DraftTree) -> Outputs:
        """One pass."""

    def commit(self, path: Sequence[int]) -> None:
        """Keep the root and these nodes, drop the other rows of the pass."""


@dataclass(frozen=True, slots=True)
class Hits:
    """How often the true token was among a candidate's first K proposals.

    Attributes:
        positions: labelled positions.
        hits: one count for each K of ``RANKS``.
    """

    positions: int
    hits: tuple[int, ...]

    @classmethod
    def from_ranks(cls, ranks: Sequence[int]) -> Hits:
        """Count from the rank (0 = first) of the true token at every position; beyond the last K is a miss."""
        return cls(len(ranks), tuple(sum(rank < k for rank in ranks) for k in RANKS))

    @property
    def rates(self) -> dict[int, float]:
        """K -> share of the positions."""
        return {k: n / self.positions if self.positions else 0.0 for k, n in zip(RANKS, self.hits, strict=True)}

    @property
    def score(self) -> float:
        """Mean rate over a chain, a small and a large tree (K = 1, 4, 15)."""
        rates = self.rates
        return sum(rates[k] for k in _SCORE_RANKS) / len(_SCORE_RANKS)


def split_candidate(name: str) -> tuple[str, float | None]:
    """``INIT@LAMBDA`` -> initialisation and update; ``INIT`` -> initialisation and None, its default update.

    >>> split_candidate("prompt-mean@0"), split_candidate("vocab-mean")
    (('prompt-mean', 0.0), ('vocab-mean', None))
    """
    init, at, update = name.rpartition("@")
    if not at or name.startswith("token:"):
        return name, None
    try:
        return init, float(update)
    except ValueError:
        raise ConfigError(f"a candidate is INIT or INIT@LAMBDA, but {name!r} was given; try prompt-mean@0") from None


def best(results: Mapping[str, Hits]) -> str:
    """Candidate with the highest score; of equals the one that comes first.

    Raises:
        ConfigError: no candidate.
    """
    if not results:
        raise ConfigError("choosing a mask-init needs at least one candidate, but none was given")
    return max(results, key=lambda name: results[name].score)


def calibrate(
    step: ProbeStep,
    embeddings: Embeddings,
    token_ids: Sequence[int],
    n_prompt: int,
    candidates: Sequence[str] = CANDIDATES,
    *,
    chunk: int = 12,
    deadline_s: float = 20.0,
    progress: _Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Hits]:
    """Hit rates of every candidate over the same positions of a text.

    The time is shared: each candidate has an equal slice and none goes further than the one before it, so a slow
    device measures fewer positions, at least one chunk a candidate.

    Args:
        token_ids: prompt, then the model's own greedy answer.
        n_prompt: tokens of the prompt.
        candidates: names for ``split_candidate``, simplest first.
        chunk: tokens a pass; each brings one mask row.
        deadline_s: seconds for everything; overrun by at most one pass a candidate.
        progress: called with (candidates done, candidates) after each.

    Returns:
        Hits by candidate, in the order given.

    Raises:
        ConfigError: an empty prompt, an answer under two tokens, or a candidate that cannot be used.
    """
    if n_prompt < 1 or len(token_ids) - n_prompt < 2:
        raise ConfigError(
            f"calibration needs a prompt and an answer of at least 2 tokens, but got {n_prompt} and "
            f"{len(token_ids) - n_prompt}; use a longer text"
        )
    masks = {name: _masks_of(name, embeddings) for name in candidates}
    start = clock()
    limit = len(token_ids)
    ranks: dict[str, list[int]] = {}
    for done, name in enumerate(candidates, start=1):
        until = start + deadline_s * done / len(candidates)
        ranks[name] = _Walk(step, masks[name], token_ids, n_prompt, chunk, clock).run(limit, until)
        limit = len(ranks[name])
        if progress is not None:
            progress(done, len(candidates))
    return {name: Hits.from_ranks(found[:limit]) for name, found in ranks.items()}


def _masks_of(name: str, embeddings: Embeddings) -> MaskVectors:
    init, update = split_candidate(name)
    return make_masks(init, 1, embeddings, update)


@dataclass(slots=True)
class _Walk:
    """One candidate's way through the text, a chain of ``chunk`` known tokens a pass."""

    step: ProbeStep
    masks: MaskVectors
    token_ids: Sequence[int]
    n_prompt: int
    chunk: int
    clock: Callable[[], float]
    ranks: list[int] = field(default_factory=list)

    def run(self, limit: int, until: float) -> list[int]:
        """Ranks of the true tokens: one pass at least, then up to ``limit`` of them or until the clock says so."""
        self.step.reset()
        if self.n_prompt > 1:
            self.step.prefill(self.token_ids[: self.n_prompt - 1])
        self.masks.begin(self.token_ids[: self.n_prompt])
        first = self.n_prompt - 1
        last = len(self.token_ids) - 2  # owners beyond have no label
        while first < last and (not self.ranks or (self.clock() < until and len(self.ranks) < limit)):
            end = min(first + self.chunk, last)
            self._pass(first, end)
            first = end
        return self.ranks

    def _pass(self, first: int, end: int) -> None:
        """Probe behind tokens ``first`` .. ``end - 1`` and commit them."""
        tokens = np.asarray(self.token_ids[first:end], np.int32)
        tree = _chain(tokens, self._vectors(tokens, is_first=first == self.n_prompt - 1))
        outputs = self.step.run(tree)
        masks = np.arange(tree.n_nodes, tree.n_rows, dtype=np.int32)  # one a node, in the order of the nodes
        width = min(RANKS[-1], self.masks.n_vocab)
        proposed, _ = outputs.top_k(masks, width)
        truth = np.asarray(self.token_ids[first + 2 : end + 2], np.int32)
        right = proposed == truth[:, None]
        self.ranks += np.where(right.any(axis=1), right.argmax(axis=1), RANKS[-1]).tolist()
        if self.masks.guess_width:
            nodes = np.arange(tree.n_nodes, dtype=np.int32)
            self.masks.learn(tokens, *outputs.top_k(nodes, min(self.masks.guess_width, self.masks.n_vocab)))
        self.step.commit(range(1, tree.n_nodes))

    def _vectors(self, tokens: Int32Array, *, is_first: bool) -> FloatArray:
        """float32[len(tokens), n_embd]: what each token's mask would be if the token were the root of a pass."""
        rows: list[FloatArray] = []
        for i, token in enumerate(tokens):
            if i or not is_first:  # the prompt's last token is part of the prompt already
                self.masks.commit([int(token)])
            vectors = self.masks.for_tree(tokens[i : i + 1], np.array([-1], np.int32), np.ones(1, np.int32))
            assert vectors is not None  # one mask was asked for
            rows.append(vectors[0])
        return np.stack(rows)


def _chain(tokens: Int32Array, vectors: FloatArray) -> DraftTree:
    """Each token the child of the one before, with one mask behind it."""
    n = len(tokens)
    ones = np.ones(n, np.int32)
    return DraftTree(tokens, np.arange(-1, n - 1, dtype=np.int32), np.ones(n, np.float32), ones, vectors)
