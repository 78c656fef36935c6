"""Suffix drafting: copy what followed an earlier occurrence of the longest repeated suffix.

SAM-Decoding (arXiv 2411.10666), automaton only, on prompt and output. It copies from the first occurrence; here
the newest is the default.
"""

from __future__ import annotations

from itertools import takewhile

from esp_edge.config import DraftConfig
from esp_edge.drafters.builder import TreeBuilder
from esp_edge.drafters.maskless import KEPT_TOKENS, MasklessDrafter
from esp_edge.drafters.suffix_automaton import SuffixAutomaton
from esp_edge.step import Outputs
from esp_edge.tree import DraftTree, Verdict

__all__ = ["SuffixDrafter"]


class SuffixDrafter(MasklessDrafter):
    """A chain of ``1 + 4 * match length`` tokens at most; no match, no draft.

    Of 1 2 7 9 1 2 8 1 2 the newest occurrence of "1 2" gives 8 1 2, the first one 7 9 1 2 8 1 2.
    """

    name = "suffix"

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self._newest = config.occurrence == "newest"
        self._forget()

    def _forget(self) -> None:
        self._automaton = SuffixAutomaton()
        self._n_requests = 0

    def _start(self, prompt_ids: list[int]) -> None:
        if len(self._automaton.text) > KEPT_TOKENS:
            self._forget()
        self._n_requests += 1
        # a token that occurs once keeps matches from running from one request into the next
        self._automaton.extend([-self._n_requests, *prompt_ids])

    def _grow(self, builder: TreeBuilder) -> None:
        match = self._automaton.match()
        if match.length == 0:
            return
        first = match.newest if self._newest else match.first
        run = self._automaton.text[first : first + min(self._rows - 1, 1 + 4 * match.length)]
        builder.chain(0, takewhile(lambda token: token >= 0, run), self.name)

    def _learn(self, tree: DraftTree, outputs: Outputs, verdict: Verdict) -> None:
        del tree, outputs
        self._automaton.extend(verdict.token_ids)
