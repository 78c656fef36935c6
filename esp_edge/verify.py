"""Lossless verification by sample matching: one choice of the target model per committed token, in chain order.

The draft never changes what is chosen, only how many choices one pass can make (algorithms A.7 and D.4, rule 1). With a
drawn token keyed by (seed, position, token) this holds at any temperature (rule 4).
"""

from __future__ import annotations

from collections.abc import Callable

from esp_edge.tree import DraftTree, Verdict

__all__ = ["verify"]


def verify(
    tree: DraftTree,
    choose: Callable[[int, int], int],
    *,
    position: int,
    limit: int,
    is_end: Callable[[int], bool],
) -> Verdict:
    """Walk from the root along the target model's own choices while the tree contains them.

    Args:
        tree: the verified tree.
        choose: (row, absolute position) -> token; called once per committed token, in order, and never for a node that
            was not reached.
        position: absolute position of the first token to choose.
        limit: tokens to commit at most, >= 1.
        is_end: ends the walk after that token (end of generation).

    Returns:
        The accepted path and the committed tokens; the last one has no cell yet.
    """
    drafted, parents = tree.token_ids.tolist(), tree.parents.tolist()
    node = 0
    path: list[int] = []
    tokens: list[int] = []
    while True:
        token = choose(node, position + len(tokens))
        tokens.append(token)
        child = _child(drafted, parents, node, token)
        if child is None or len(tokens) >= limit or is_end(token):
            return Verdict(tuple(path), tuple(tokens))
        path.append(child)
        node = child


def _child(drafted: list[int], parents: list[int], node: int, token: int) -> int | None:
    """The child of a node that carries a token; children come after their parent, so a walk looks at a node once."""
    for child in range(node + 1, len(parents)):
        if parents[child] == node and drafted[child] == token:
            return child
    return None
