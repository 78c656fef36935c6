"""Trees of a fixed shape: which ranks to try below which, decided before any token is known."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from esp_edge.drafters.builder import NO_NODE, TreeBuilder

__all__ = ["Path", "Template", "fill", "likeliest", "template_of"]

Path = tuple[int, ...]  # ranks from the root down: (1, 0) = best child of the second-best child
Template = list[tuple[int, int]]  # (place of the parent in the list from 1, 0 = the root; rank), parents first


def likeliest(n: int, accept: Callable[[int, int], float]) -> list[Path]:
    """The ``n`` paths of largest probability, best first; ties go to the shallower, then to the better ranks.

    Args:
        accept: (depth from 1, rank) -> probability that this child is the right one when its parent is reached;
            never rises with the rank, never above 1.
    """

    def item(path: Path, above: float) -> tuple[float, int, Path, float]:
        return -above * accept(len(path), path[-1]), len(path), path, above

    heap = [item((0,), 1.0)]
    paths: list[Path] = []
    while len(paths) < n:
        value, _, path, above = heapq.heappop(heap)
        paths.append(path)
        heapq.heappush(heap, item((*path, 0), -value))
        heapq.heappush(heap, item((*path[:-1], path[-1] + 1), above))
    return paths


def template_of(paths: Iterable[Path]) -> Template:
    """Paths as a template; every path but the shortest has its parent before it.

    >>> template_of([(0,), (1,), (0, 0)])
    [(0, 0), (0, 1), (1, 0)]
    """
    places: dict[Path, int] = {(): 0}
    template: Template = []
    for path in paths:
        template.append((places[path[:-1]], path[-1]))
        places[path] = len(template)
    return template


def fill(
    builder: TreeBuilder, template: Template, children: Callable[[int], Sequence[tuple[int, float]]], source: str
) -> None:
    """Place tokens into a template as far as there are any and there is room.

    Args:
        children: node -> (token, probability of the path to it), best first; asked once a node, in the
            template's order.
    """
    nodes = [0]
    known: dict[int, Sequence[tuple[int, float]]] = {}
    for place, rank in template:
        parent, node = nodes[place], NO_NODE
        if parent != NO_NODE:
            if parent not in known:
                known[parent] = children(parent)
            if rank < len(known[parent]):
                token, prob = known[parent][rank]
                node = builder.add(parent, token, source, prob)
        nodes.append(node)
