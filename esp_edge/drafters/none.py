"""Plain decoding: the same loop with a one-node tree."""

from __future__ import annotations

from collections.abc import Sequence

from esp_edge.drafters.base import Budget
from esp_edge.step import Outputs
from esp_edge.tree import DraftTree, Verdict

__all__ = ["NoneDrafter"]


class NoneDrafter:
    """Never drafts."""

    name = "none"

    def __init__(self) -> None:
        self._root = 0

    def begin(self, token_ids: Sequence[int]) -> None:
        """The last prompt token is the first root."""
        self._root = int(token_ids[-1])

    def probe(self) -> DraftTree:
        """The root alone."""
        return DraftTree.root_only(self._root)

    def draft(self, budget: Budget) -> DraftTree:
        """The root alone, whatever the budget."""
        del budget
        return DraftTree.root_only(self._root)

    def observe(self, tree: DraftTree, outputs: Outputs, verdict: Verdict) -> None:
        """The bonus token is the next root."""
        del tree, outputs
        self._root = verdict.bonus_token
