"""Token Recycling (arXiv 2408.08696): the best next tokens of every row, looked up again along a fixed tree."""

from __future__ import annotations

from math import prod

from esp_edge.config import DraftConfig
from esp_edge.drafters.adjacency import Adjacency
from esp_edge.drafters.builder import TreeBuilder
from esp_edge.drafters.maskless import MasklessDrafter
from esp_edge.drafters.template import Path, fill, template_of
from esp_edge.step import Outputs
from esp_edge.tree import DraftTree, Verdict

__all__ = ["RecyclingDrafter", "template_paths"]

# How often the token of a rank is right, adjacency kept across prompts: measured on the bundled model. Only the order
# of their products matters.
_RANK_PROBS = (0.244, 0.066, 0.028, 0.022, 0.013, 0.012, 0.010, 0.008)

# The authors' tree of 80 nodes: ranks from the root down -> number of children
_CHILDREN = {
    "": 8,
    **{"0": 8, "1": 4, "2": 3, "3": 2, "4": 1, "5": 1, "6": 1, "7": 1},
    **{"00": 8, "01": 3, "02": 2, "03": 1, "04": 1, "05": 1, "06": 1, "07": 1, "10": 2, "11": 1},
    **{"20": 1, "30": 1, "40": 1, "50": 1},
    **{"000": 5, "001": 2, "002": 1, "003": 1, "004": 1, "010": 1, "020": 1, "100": 1, "200": 1, "300": 1},
    **{"0000": 3, "0001": 1, "0002": 1, "0010": 1, "0100": 1, "1000": 1},
    **{"00000": 2, "00010": 1},
}


def template_paths(n: int) -> list[Path]:
    """The best ``n`` of the 80 paths by the product of their ranks' probabilities; ties: shallower, better ranks."""
    paths = [(*map(int, above), rank) for above, count in _CHILDREN.items() for rank in range(count)]
    return sorted(paths, key=lambda path: (-_prob(path), len(path), path))[:n]


def _prob(path: Path) -> float:
    return prod(_RANK_PROBS[rank] for rank in path)


class RecyclingDrafter(MasklessDrafter):
    """The template's best nodes, as many as the block complexity leaves beside the root.

    The original skips the prefill; here its last row counts, because the pass that reads it reports it.
    """

    name = "recycling"

    def __init__(self, config: DraftConfig, n_vocab: int) -> None:
        super().__init__(config)
        self._template = template_of(template_paths(config.rows - 1))
        self._adjacency = Adjacency(n_vocab)

    def _forget(self) -> None:
        self._adjacency.clear()

    def _grow(self, builder: TreeBuilder) -> None:
        def children(node: int) -> list[tuple[int, float]]:
            after = self._adjacency.after(builder.token_ids[node])
            return [(token, builder.prob(node) * p) for token, p in zip(after, _RANK_PROBS, strict=False)]

        fill(builder, self._template, children, self.name)

    def _learn(self, tree: DraftTree, outputs: Outputs, verdict: Verdict) -> None:
        del verdict
        self._adjacency.learn(tree, outputs)
