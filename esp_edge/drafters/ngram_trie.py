"""A trie of all n-grams of a text with their frequencies, in bounded memory (RACER, arXiv 2604.14885)."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["NgramTrie"]


@dataclass(slots=True)
class _Node:
    count: int = 0
    children: dict[int, _Node] = field(default_factory=dict)


class NgramTrie:
    """Every window of up to ``n`` tokens is a path; a node counts the windows through it.

    When there are more than ``most`` nodes the oldest window leaves. The original drops the node not touched for the
    longest time; a window that was seen again has a younger copy here, which keeps its nodes.

    >>> trie = NgramTrie(n=3)
    >>> trie.extend([1, 2, 3, 1, 2, 4])
    >>> trie.retrieve([1, 2], 3)  # the match itself, seen twice, then what followed it
    [(), (3,), (4,)]
    """

    def __init__(self, n: int = 10, most: int = 10_000) -> None:
        self._n = n
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._root = _Node()
        self._windows: deque[list[int]] = deque()
        self._open: deque[_Node] = deque()  # last node of each of the newest windows, oldest first
        self.n_nodes = 0

    def cut(self) -> None:
        """What follows does not belong to the windows that are still open."""
        self._open.clear()

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in token_ids:
            self._windows.append([])
            self._open.append(self._root)
            if len(self._open) > self._n:
                self._open.popleft()
            for i in range(len(self._open)):
                self._windows[i - len(self._open)].append(token)
                self._open[i] = self._step(self._open[i], token)
            while self.n_nodes > self._most and len(self._windows) > self._n:
                self._drop(self._windows.popleft())

    def _step(self, node: _Node, token: int) -> _Node:
        child = node.children.get(token)
        if child is None:
            child = node.children[token] = _Node()
            self.n_nodes += 1
        child.count += 1
        return child

    def _drop(self, window: list[int]) -> None:
        node = self._root
        for token in window:
            child = node.children[token]
            child.count -= 1
            if child.count == 0:
                del node.children[token]
                self.n_nodes -= 1
            node = child

    def retrieve(self, context: Sequence[int], k: int, least: int = 2) -> list[tuple[int, ...]]:
        """The ``k`` most frequent nodes at and below the ends of ``context``, as paths from there.

        Every end of ``least`` tokens and more counts, so the list may hold a path several times. Order: frequency, then
        depth in the trie (shallow first), then the longer end, then the path; a path comes after its beginnings.
        """
        heap: list[tuple[int, int, int, tuple[int, ...], _Node]] = []
        for length in range(least, min(self._n, len(context)) + 1):
            node = self._find(context[-length:])
            if node is None:  # neither does a longer end occur
                break
            heap.append((-node.count, length, -length, (), node))
        heapq.heapify(heap)
        paths: list[tuple[int, ...]] = []
        while heap and len(paths) < k:
            _, depth, end, path, node = heapq.heappop(heap)
            paths.append(path)
            for token, child in node.children.items():
                heapq.heappush(heap, (-child.count, depth + 1, end, (*path, token), child))
        return paths

    def _find(self, tokens: Sequence[int]) -> _Node | None:
        node = self._root
        for token in tokens:
            child = node.children.get(token)
            if child is None:
                return None
            node = child
        return node
