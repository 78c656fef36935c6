"""What the drafters without mask rows have in common: the root, the budget, and when to forget."""

from __future__ import annotations

from collections.abc import Sequence

from esp_edge.config import DraftConfig
from esp_edge.drafters.base import Budget
from esp_edge.drafters.builder import TreeBuilder
from esp_edge.step import Outputs
from esp_edge.tree import DraftTree, Verdict

__all__ = ["KEPT_TOKENS", "MasklessDrafter"]

KEPT_TOKENS = 1 << 17  # a drafter that keeps its text across requests starts afresh when it holds more


class MasklessDrafter:
    """Follows the drafter protocol; a subclass fills in the four methods at the end.

    With ``DraftConfig.keep`` what was learned survives ``begin``; otherwise every generation starts from nothing, so
    that it does not depend on the ones before.
    """

    name = ""

    def __init__(self, config: DraftConfig) -> None:
        self._rows = config.rows
        self._keep = config.keep
        self._root = 0

    def begin(self, token_ids: Sequence[int]) -> None:
        """Start a generation; the last prompt token is the first root."""
        if not self._keep:
            self._forget()
        self._root = int(token_ids[-1])
        self._start([int(token) for token in token_ids])

    def probe(self) -> DraftTree:
        """The root alone: there are no masks."""
        return DraftTree.root_only(self._root)

    def draft(self, budget: Budget) -> DraftTree:
        """A tree of at most the block complexity in rows, within the budget."""
        builder = TreeBuilder(self._root, self._rows, budget)
        self._grow(builder)
        return builder.tree()

    def observe(self, tree: DraftTree, outputs: Outputs, verdict: Verdict) -> None:
        """Learn from a pass; the bonus token is the next root."""
        self._learn(tree, outputs, verdict)
        self._root = verdict.bonus_token

    def _forget(self) -> None:
        """Drop everything that was learned."""

    def _start(self, prompt_ids: list[int]) -> None:
        """Read the prompt of a new generation."""

    def _grow(self, builder: TreeBuilder) -> None:
        """Add draft nodes; what does not fit is refused by the builder."""

    def _learn(self, tree: DraftTree, outputs: Outputs, verdict: Verdict) -> None:
        """Learn from a pass; ``self._root`` is still the root of ``tree``."""
