"""RACER (arXiv 2604.14885): what followed the last tokens in the text, then the adjacency of rows, in one trie."""

from __future__ import annotations

from collections import deque

from esp_edge.config import DraftConfig
from esp_edge.drafters.adjacency import WIDTH, Adjacency
from esp_edge.drafters.builder import NO_NODE, TreeBuilder
from esp_edge.drafters.maskless import MasklessDrafter
from esp_edge.drafters.ngram_trie import NgramTrie
from esp_edge.step import Outputs
from esp_edge.tree import DraftTree, Verdict

__all__ = ["RacerDrafter", "grow_by_breadth"]

_NGRAM = 10


class RacerDrafter(MasklessDrafter):
    """Retrieval has first call on the rows; what it leaves, and what it proposes twice, goes to the logits tree.

    The original also reads the logits of the prompt's rows; a prefill here computes none but the last.
    """

    name = "racer"

    def __init__(self, config: DraftConfig, n_vocab: int) -> None:
        super().__init__(config)
        self._adjacency = Adjacency(n_vocab)
        self._trie = NgramTrie(_NGRAM)
        self._recent: list[int] = []  # the end of the text, root included; the trie does not hold the root yet

    def _forget(self) -> None:
        self._adjacency.clear()
        self._trie.clear()

    def _start(self, prompt_ids: list[int]) -> None:
        self._trie.cut()
        self._trie.extend(prompt_ids[:-1])
        self._recent = prompt_ids[-_NGRAM:]

    def _grow(self, builder: TreeBuilder) -> None:
        nodes: dict[tuple[int, ...], int] = {(): 0}
        for path in self._trie.retrieve(self._recent, builder.capacity):
            parent = nodes.get(path[:-1], NO_NODE)
            if path and parent != NO_NODE:
                nodes[path] = builder.add(parent, path[-1], "racer-copy")
        grow_by_breadth(builder, self._adjacency, "racer-logits")

    def _learn(self, tree: DraftTree, outputs: Outputs, verdict: Verdict) -> None:
        self._adjacency.learn(tree, outputs)
        self._trie.extend((self._root, *verdict.token_ids[:-1]))
        self._recent = [*self._recent, *verdict.token_ids][-_NGRAM:]


def grow_by_breadth(builder: TreeBuilder, adjacency: Adjacency, source: str, breadth: int = WIDTH) -> None:
    """Breadth first with halving breadth until the tree is full (RACER Eq 3, Algorithm 1, Figure 9).

    A node of breadth ``b`` has its best ``b`` next tokens for children. Their breadths are 8, 4, 2, 1, 1, ... below the
    root and ``b / 2, b / 4, ...``, at least 1, below another node. Nodes that are there already cost nothing.
    """
    queue = deque([(0, breadth)])
    while queue and builder.n_free:
        parent, width = queue.popleft()
        below = width if parent == 0 else width // 2
        for token in adjacency.after(builder.token_ids[parent])[:width]:
            node = builder.add(parent, token, source)
            if node != NO_NODE:
                queue.append((node, max(1, below)))
            below //= 2
