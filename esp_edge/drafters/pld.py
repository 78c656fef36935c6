"""Prompt lookup decoding: copy what followed the last tokens when they stood in the text for the first time.

Saxena's prompt-lookup-decoding, with Spec-Bench's settings: 3, then 2, then 1 token to match, 10 to copy.
"""

from __future__ import annotations

from collections.abc import Iterable

from esp_edge.config import DraftConfig
from esp_edge.drafters.builder import TreeBuilder
from esp_edge.drafters.maskless import KEPT_TOKENS, MasklessDrafter
from esp_edge.step import Outputs
from esp_edge.tree import DraftTree, Verdict

__all__ = ["PldDrafter"]

_LONGEST = 3
_COPIED = 10


class PldDrafter(MasklessDrafter):
    """A chain of 10 tokens, or as many as the block complexity leaves beside the root.

    An occurrence counts only when the whole chain stands behind it. Of 1 2 3 4 5 1 2 with 3 tokens to copy, the
    first "1 2" qualifies: the draft is 3 4 5.
    """

    name = "pld"

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self._length = min(_COPIED, config.rows - 1)
        self._forget()

    def _forget(self) -> None:
        self._text: list[int] = []
        self._where: dict[tuple[int, ...], int] = {}  # n-gram -> end of its first occurrence with a whole chain behind

    def _start(self, prompt_ids: list[int]) -> None:
        if len(self._text) > KEPT_TOKENS:
            self._forget()
        self._first = len(self._text)  # no n-gram and no chain runs from one request into the next
        self._append(prompt_ids)

    def _append(self, token_ids: Iterable[int]) -> None:
        text, length = self._text, self._length
        for token in token_ids:
            text.append(token)
            end = len(text) - length  # the n-grams that end here have their chain now
            for start in range(end - 1, max(self._first, end - _LONGEST) - 1, -1):
                self._where.setdefault(tuple(text[start:end]), end)

    def _grow(self, builder: TreeBuilder) -> None:
        text = self._text
        for start in range(max(self._first, len(text) - _LONGEST), len(text)):
            end = self._where.get(tuple(text[start:]))
            if end is not None:
                builder.chain(0, text[end : end + self._length], self.name)
                return

    def _learn(self, tree: DraftTree, outputs: Outputs, verdict: Verdict) -> None:
        del tree, outputs
        self._append(verdict.token_ids)
