"""STAND (arXiv 2506.04708): tables of next-token distributions after the last 4, 3, 2 or 1 tokens, drawn without
replacement into a tree of a fixed shape.

Where the paper leaves room, or needs data that a device does not have:

- A committed token stores the ten likeliest tokens of the row that chose it. Prompt tokens have no rows: there the
  token that followed stands for the whole distribution.
- Children are drawn by Gumbel-top-K from ``p ** (1 / T)``: the order of ``log p + T * noise``. At temperature 0 that is
  the order of the probabilities.
- The paper prunes a tree of 625 nodes to the 80 that were accepted most often. Here a node's acceptance is modelled as
  the product along its path of what was measured per depth and rank, and the best nodes make the shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from esp_edge.config import DraftConfig
from esp_edge.drafters.builder import TreeBuilder
from esp_edge.drafters.maskless import MasklessDrafter
from esp_edge.drafters.template import fill, likeliest, template_of
from esp_edge.step import Outputs
from esp_edge.tree import DraftTree, Verdict

__all__ = ["StandDrafter", "StandTable", "accept_rate"]

Distribution: TypeAlias = Sequence[tuple[int, float]]  # (token, probability), best first

_LONGEST = 4
_STORED = 10
_MOST_CONTEXTS = 1 << 17
_NOISE = 4096
_DEEPEST = 13  # of the paper's tree
# First depth the rates hold for -> how often the child of each rank was right when its parent was reached. Measured on
# the bundled model's greedy answers to 31 Spec-Bench prompts, tables fresh for each.
_RATES = {
    5: (0.90, 0.035, 0.022, 0.0035, 0.002, 0.001, 0.0005, 0.0004, 0.0003, 0.0002),
    3: (0.83, 0.040, 0.016, 0.005, 0.0045, 0.002, 0.002, 0.0015, 0.0015, 0.001),
    2: (0.75, 0.047, 0.019, 0.008, 0.006, 0.003, 0.003, 0.0025, 0.002, 0.002),
    1: (0.55, 0.050, 0.025, 0.012, 0.008, 0.0045, 0.0045, 0.004, 0.0035, 0.003),
}


def accept_rate(depth: int, rank: int) -> float:
    """How often the child of a rank (from 0) is right when its parent at ``depth - 1`` was reached."""
    rates = next(rates for first, rates in _RATES.items() if depth >= first)
    return rates[rank] if rank < len(rates) and depth <= _DEEPEST else 0.0


class StandTable:
    """n-gram -> how often it was seen, and the mean of the distributions seen after it.

    >>> table = StandTable()
    >>> table.learn([5, 6], [(7, 0.75), (8, 0.25)])
    >>> table.learn([9, 6], [(8, 1.0)])
    >>> table.after([5, 6]), table.after([1, 6])  # after "5 6"; after "6", the mean of two
    (((7, 0.75), (8, 0.25)), ((8, 0.625), (7, 0.375)))
    """

    def __init__(self, most: int = _MOST_CONTEXTS) -> None:
        """Room for ``most`` contexts; the one not seen for the longest time goes first."""
        self._most = most
        self._seen: dict[tuple[int, ...], tuple[int, Distribution]] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._seen.clear()

    def learn(self, context: Sequence[int], current: Distribution) -> None:
        """Average a distribution into the entries of the last 1, 2, 3 and 4 tokens of ``context``."""
        for n in range(1, min(_LONGEST, len(context)) + 1):
            key = tuple(context[-n:])
            times, old = self._seen.pop(key, (0, ()))
            self._seen[key] = times + 1, _averaged(old, current, times)
        while len(self._seen) > self._most:
            del self._seen[next(iter(self._seen))]

    def after(self, context: Sequence[int]) -> Distribution:
        """The entry of the longest known end of ``context``; empty when even its last token is new."""
        for n in range(min(_LONGEST, len(context)), 0, -1):
            entry = self._seen.get(tuple(context[-n:]))
            if entry is not None:
                return entry[1]
        return ()


def _averaged(old: Distribution, current: Distribution, times: int) -> Distribution:
    """``times / (times + 1) * old + 1 / (times + 1) * current``, the ten best; ties go to the lower token."""
    if not times:
        return tuple(current)
    mixed = {token: p * times / (times + 1) for token, p in old}
    for token, p in current:
        mixed[token] = mixed.get(token, 0.0) + p / (times + 1)
    return tuple(sorted(mixed.items(), key=lambda item: (-item[1], item[0]))[:_STORED])


class StandDrafter(MasklessDrafter):
    """Tables over prompt and output; reads the rows of the accepted path only."""

    name = "stand"

    def __init__(self, config: DraftConfig, n_vocab: int, temperature: float = 0.0) -> None:
        super().__init__(config)
        self._width = min(_STORED, n_vocab)
        self._temperature = temperature
        self._template = template_of(likeliest(config.rows - 1, accept_rate))
        self._table = StandTable()
        self._noise: list[float] = np.random.default_rng(config.seed).gumbel(size=_NOISE).tolist()
        self._drawn = 0
        self._recent: list[int] = []

    def _forget(self) -> None:
        self._table.clear()

    def _start(self, prompt_ids: list[int]) -> None:
        self._drawn = 0
        self._recent = []
        self._append((token, ((token, 1.0),)) for token in prompt_ids)

    def _append(self, items: Iterable[tuple[int, Distribution]]) -> None:
        """Learn and commit (token, the distribution it came from)."""
        for token, distribution in items:
            self._table.learn(self._recent, distribution)
            self._recent = [*self._recent[1 - _LONGEST :], token]

    def _grow(self, builder: TreeBuilder) -> None:
        contexts = {0: self._recent}

        def children(node: int) -> list[tuple[int, float]]:
            if node:
                contexts[node] = [*contexts[builder.parents[node]][1 - _LONGEST :], builder.token_ids[node]]
            path = builder.prob(node)
            return [(token, path * p) for token, p in self._draw(self._table.after(contexts[node]))]

        fill(builder, self._template, children, self.name)

    def _draw(self, distribution: Distribution) -> Distribution:
        """Gumbel-top-K: all tokens in the order of draws without replacement."""
        if self._temperature <= 0:
            return distribution
        scored = [(math.log(p) + self._temperature * self._next_noise(), (token, p)) for token, p in distribution]
        return [item for _, item in sorted(scored, key=lambda pair: -pair[0])]

    def _next_noise(self) -> float:
        self._drawn += 1
        return self._noise[(self._drawn - 1) % _NOISE]

    def _learn(self, tree: DraftTree, outputs: Outputs, verdict: Verdict) -> None:
        del tree
        rows = np.array((0, *verdict.path), np.int32)
        ids, log_probs = outputs.top_k(rows, self._width)
        rows_of = zip(ids.tolist(), np.exp(log_probs.astype(np.float64)).tolist(), strict=True)
        seen = [[(t, p) for t, p in zip(tokens, probs, strict=True) if p > 0] for tokens, probs in rows_of]
        self._append(zip(verdict.token_ids, seen, strict=True))
