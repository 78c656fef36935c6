"""Lookahead decoding (hao-ai-lab/LookaheadDecoding): n-grams from Jacobi iterations, tried when their first token fits.

A window of ``W`` columns and ``N - 1`` levels runs in every pass. Level 0 guesses the next tokens; level ``r`` of a
column holds what the model said after level ``r - 1``. With the columns of level 0 as a chain below the root and the
levels of a column as a chain below its level 0, the window is an ordinary part of the draft tree, with the positions
and the attention of the original. So is a guess: a chain below the root.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

import numpy as np

from esp_edge.config import DraftConfig
from esp_edge.drafters.builder import NO_NODE, TreeBuilder
from esp_edge.drafters.maskless import MasklessDrafter
from esp_edge.step import Outputs
from esp_edge.tree import DraftTree, Verdict

__all__ = ["LadeDrafter", "NgramPool", "lade_shape"]

_SHAPES = {10: (3, 4, 1), 30: (4, 5, 5), 60: (5, 8, 7)}  # block complexity -> (N, W, G), paper App. F


def lade_shape(rows: int) -> tuple[int, int, int]:
    """(N, W, G) for a block complexity: the largest tabled one with ``(N - 1)(W + G) <= rows``; below 10 a small one.

    >>> lade_shape(60), lade_shape(59), lade_shape(7)
    ((5, 8, 7), (4, 5, 5), (3, 2, 1))
    """
    fitting = [shape for block, shape in _SHAPES.items() if block <= rows]
    return fitting[-1] if fitting else (3, max(1, rows // 2 - 1), 1)


class NgramPool:
    """First token -> at most G continuations of N - 1 tokens; the one not seen for the longest time gives way."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pool: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, first: int, following: tuple[int, ...]) -> None:
        """Note an n-gram; a known one becomes the newest."""
        known = self._pool.setdefault(first, {})
        known.pop(following, None)
        known[following] = None
        if len(known) > self._most:
            del known[next(iter(known))]

    def after(self, first: int) -> list[tuple[int, ...]]:
        """Continuations, newest first."""
        return [*reversed(self._pool.get(first, {}))]


class LadeDrafter(MasklessDrafter):
    """The window and the guesses of the root, ``(N - 1)(W + G)`` rows with the root; equal paths share their rows.

    Level 0 starts from random prompt tokens and the other levels fill in the first ``N - 2`` passes. The window moves
    on by one a pass, whatever was accepted, and rests in passes that cannot hold it: the last tokens of an answer.

    Attributes:
        levels: the window; level 0 without the root's column, which is column 0.
    """

    name = "lade"

    def __init__(self, config: DraftConfig, ends: AbstractSet[int] = frozenset()) -> None:
        """``ends``: end-of-generation tokens; in the window a prompt token takes their place."""
        super().__init__(config)
        self._n, self._w, self._g = lade_shape(config.rows)
        self._seed = config.seed
        self._ends = ends
        self.levels: list[list[int]] = []
        self._forget()

    def _forget(self) -> None:
        self._pool = NgramPool(self._g)

    def _start(self, prompt_ids: list[int]) -> None:
        self._rng = np.random.default_rng(self._seed)
        self._prompt = prompt_ids
        self.levels = [[self._any_token() for _ in range(self._w + self._n - 3)]]

    def _any_token(self) -> int:
        return self._prompt[int(self._rng.integers(len(self._prompt)))]

    def _grow(self, builder: TreeBuilder) -> None:
        self._place_guesses(builder)  # first: accepted rows that follow the root directly need not be fed again
        newest = self._walk(lambda parent, token: builder.add(parent, token, "lade-window"))
        if NO_NODE in newest:
            builder.clear()
            self._place_guesses(builder)

    def _place_guesses(self, builder: TreeBuilder) -> None:
        for guess in self._pool.after(self._root):
            builder.chain(0, guess, self.name)

    def _walk(self, child: Callable[[int, int], int]) -> list[int]:
        """Nodes of the newest level by way of ``child(parent, token)``, ``NO_NODE`` where one on the way is missing."""

        def below(parent: int, token: int) -> int:
            return NO_NODE if parent == NO_NODE else child(parent, token)

        columns = [0]
        for token in self.levels[0]:
            columns.append(below(columns[-1], token))
        newest = columns[1:]
        for level in self.levels[1:]:
            columns = newest = [below(parent, token) for parent, token in zip(columns, level, strict=True)]
        return newest

    def _learn(self, tree: DraftTree, outputs: Outputs, verdict: Verdict) -> None:
        del verdict
        nodes = tree.children()
        newest = self._walk(lambda parent, token: nodes.get((parent, token), NO_NODE))
        if NO_NODE in newest:
            return
        said = [outputs.argmax(row) for row in newest]
        said = [self._any_token() if token in self._ends else token for token in said]
        levels = self.levels
        if len(levels) == self._n - 1:
            self._collect(said)
            self.levels = [levels[1][1:], *levels[2:], said]
        else:  # the first level has no row behind the root, so nothing to drop with the column that passes
            self.levels = [*(level[1:] for level in levels), said if len(levels) == 1 else said[1:]]

    def _collect(self, said: list[int]) -> None:
        """One n-gram a column: its tokens from level 0 down, then what the model said after the last."""
        firsts = [self._root, *self.levels[0]]
        for first, *following in zip(firsts, *self.levels[1:], said, strict=True):
            self._pool.add(first, tuple(following))
