"""Growing a draft tree node by node inside a budget; what several sources propose in one place becomes one node."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from esp_edge.drafters.base import Budget
from esp_edge.tree import DraftTree

__all__ = ["NO_NODE", "TreeBuilder"]

NO_NODE = -1


class TreeBuilder:
    """Nodes by number, the root is 0. No masks, so only leaves need a sequence.

    >>> builder = TreeBuilder(5, 4, Budget(rows=10, depth=2, sequences=2))
    >>> builder.chain(0, [7, 8, 9], "copy")  # depth 2 at most
    [1, 2]
    >>> builder.add(0, 7, "other"), builder.add(0, 6, "other"), builder.add(0, 4, "other")
    (1, 3, -1)
    >>> builder.tree().token_ids.tolist()  # a path stays together: 5-7-8, then 6
    [5, 7, 8, 6]

    Attributes:
        token_ids, parents, depths: of every node.
    """

    def __init__(self, root: int, n_nodes: int, budget: Budget) -> None:
        """A root alone; ``n_nodes`` bounds the tree besides the budget."""
        self._most = min(n_nodes, budget.rows)
        self._depth = budget.depth
        self._sequences = budget.sequences
        self.token_ids = [root]
        self.clear()

    def clear(self) -> None:
        """Back to the root alone."""
        self.token_ids = self.token_ids[:1]
        self.parents = [-1]
        self.depths = [0]
        self._probs = [1.0]
        self._sources = [""]
        self._children: list[dict[int, int]] = [{}]
        self._n_leaves = 1

    @property
    def n_free(self) -> int:
        """Nodes that may still be added."""
        return self._most - len(self.token_ids)

    @property
    def capacity(self) -> int:
        """Nodes the tree may have, root included."""
        return self._most

    def prob(self, node: int) -> float:
        """Probability of the path to a node, as it was given."""
        return self._probs[node]

    def has_room(self, parent: int) -> bool:
        """Whether a new child may hang below ``parent``."""
        needs_leaf = bool(self._children[parent])
        return (
            len(self.token_ids) < self._most
            and self.depths[parent] < self._depth
            and self._n_leaves + needs_leaf <= self._sequences
        )

    def add(self, parent: int, token_id: int, source: str, prob: float = 1.0) -> int:
        """The child of ``parent`` that carries ``token_id``, new or known; ``NO_NODE`` where there is no room.

        Args:
            prob: that the whole path to the node is accepted; ignored for a known node, as is ``source``.
        """
        known = self._children[parent].get(token_id)
        if known is not None:
            return known
        if not self.has_room(parent):
            return NO_NODE
        node = len(self.token_ids)
        self._n_leaves += bool(self._children[parent])
        self._children[parent][token_id] = node
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self._probs.append(prob)
        self._sources.append(source)
        self._children.append({})
        return node

    def chain(self, parent: int, token_ids: Iterable[int], source: str) -> list[int]:
        """Each token the child of the one before, as far as there is room; the nodes."""
        nodes: list[int] = []
        for token_id in token_ids:
            node = self.add(nodes[-1] if nodes else parent, token_id, source)
            if node == NO_NODE:
                break
            nodes.append(node)
        return nodes

    def _rows(self) -> list[int]:
        """Row of each node: depth first, children in the order they were added."""
        rows = [0] * len(self.token_ids)
        stack, row = [0], 0
        while stack:
            node = stack.pop()
            rows[node] = row
            row += 1
            stack += reversed(self._children[node].values())
        return rows

    def tree(self) -> DraftTree:
        """The tree, depth first, children in the order they were added.

        Accepted rows that follow the root directly stay in the KV cache as they are; others are fed again. So add the
        likeliest child first.
        """
        if len(self.token_ids) == 1:
            return DraftTree.root_only(self.token_ids[0])
        rows = np.array(self._rows(), np.int32)
        order = np.argsort(rows)
        parents = np.array(self.parents, np.int32)[order]
        parents[1:] = rows[parents[1:]]
        return DraftTree(
            np.array(self.token_ids, np.int32)[order],
            parents,
            np.array(self._probs, np.float32)[order],
            np.zeros(len(order), np.int32),
            None,
            tuple(self._sources[node] for node in order.tolist()),
            [np.array(self.depths, np.int32)[order]],
        )
