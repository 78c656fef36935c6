"""Copy-logit adjacency: for every token seen, the model's best next tokens the last time it was a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from esp_edge.step import Outputs
from esp_edge.tree import DraftTree

__all__ = ["WIDTH", "Adjacency"]

WIDTH = 8


class Adjacency:
    """Token Recycling's matrix M[V][8] (arXiv 2408.08696), with rows for seen tokens only.

    Every row of a pass counts, accepted or not; the original starts from zeros where nothing is known yet, here an
    unseen token has no next tokens.
    """

    def __init__(self, n_vocab: int) -> None:
        self._width = min(WIDTH, n_vocab)
        self._rows: dict[int, list[int]] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._rows.clear()

    def learn(self, tree: DraftTree, outputs: Outputs) -> None:
        """Read the best next tokens of every node; of two nodes with one token the later row stays."""
        ids, _ = outputs.top_k(np.arange(tree.n_nodes, dtype=np.int32), self._width)
        self._rows.update(zip(tree.token_ids.tolist(), ids.tolist(), strict=True))

    def after(self, token_id: int) -> Sequence[int]:
        """Next tokens, best first; empty where the token was never a row."""
        return self._rows.get(token_id, ())
