"""Embedding-Space Probing: the masks behind the last accepted node draft the next tree (ESP paper, section 3).

A pass verifies a tree and probes behind each of its nodes at the same time. Mask ``j`` (from 1) of the deepest
accepted node guesses the token ``j`` places after the bonus token, so it fills depth ``j`` of the next tree. Only the
best node of a depth has children (top-1 expansion, App. D): widths ``(K1, K2, ...)`` describe a tree completely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from esp_edge.config import DraftConfig
from esp_edge.drafters.base import Budget
from esp_edge.masks import MaskVectors
from esp_edge.step import Outputs
from esp_edge.tree import DraftTree, Int32Array, Verdict

__all__ = ["EspDrafter"]

_Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Layer:
    """Candidates of one depth, best first, after pruning.

    Attributes:
        token_ids: int32[n].
        log_probs: float64[n], of the whole path from the root.
    """

    token_ids: Int32Array
    log_probs: _Float64Array


@dataclass(frozen=True, slots=True)
class _Shape:
    """The part of a tree that its widths decide. Shared between trees: never written to."""

    parents: Int32Array
    masks: Int32Array
    depths: Int32Array
    sources: tuple[str, ...]


class EspDrafter:
    """Static trees of fixed widths, or the dynamic tree of Algorithm 1.

    With temperature T > 0 the mask distributions are ``softmax(logits / T)`` over the candidates read, not over the
    vocabulary: the tail is left out, so at high T probabilities come out too large. The order inside one
    mask is unaffected; only the comparison between depths is approximate.
    """

    name = "esp"

    def __init__(self, config: DraftConfig, masks: MaskVectors, temperature: float = 0.0) -> None:
        self._rows = config.rows
        self._k = config.masks
        self._widths = config.tree
        self._prune = config.prune
        self._masks = masks
        self._temperature = temperature
        widest = max(config.tree) if config.tree else config.rows // (config.masks + 1) - 1
        # one more than the widest depth: pruning may drop one
        self._n_candidates = max(1, min(widest + 1, masks.n_vocab))
        self._root = 0
        self._candidates: tuple[Int32Array, npt.NDArray[np.floating]] | None = None

    def begin(self, token_ids: Sequence[int]) -> None:
        """Initialise the mask vectors from the prompt; its last token is the first root."""
        self._masks.begin(token_ids)
        self._root = int(token_ids[-1])
        self._candidates = None

    def probe(self) -> DraftTree:
        """The root and its k masks (algorithms A.4)."""
        return self._tree((), [], depth=self._k, k=self._k)

    def draft(self, budget: Budget) -> DraftTree:
        """Tree from the masks of the last anchor; without them the root and its masks.

        Every node owns k masks, fewer where a mask's position ``depth(owner) + j`` would pass ``budget.depth``, and
        none when ``budget.rows`` cannot hold the root's.
        """
        rows = min(self._rows, budget.rows)
        k = self._k if rows > self._k else 0
        n_nodes = max(0, min(rows // (k + 1), budget.sequences) - 1)
        layers = self._layers(n_nodes, budget.depth)
        if self._widths is None:
            widths = _dynamic_widths(layers, n_nodes)
        else:
            widths = _static_widths(self._widths, layers, n_nodes)
        return self._tree(widths, layers, budget.depth, k)

    def observe(self, tree: DraftTree, outputs: Outputs, verdict: Verdict) -> None:
        """Read the anchor's masks; fold the committed tokens into the mask vectors."""
        rows = tree.mask_rows(verdict.anchor)
        self._candidates = outputs.top_k(rows, self._n_candidates) if len(rows) else None
        width = min(self._masks.guess_width, self._masks.n_vocab)
        if width:
            nodes = np.arange(tree.n_nodes, dtype=np.int32)
            self._masks.learn(tree.token_ids, *outputs.top_k(nodes, width))
        self._masks.commit(verdict.token_ids)
        self._root = verdict.bonus_token

    def _layers(self, n_nodes: int, depth: int) -> list[_Layer]:
        """Top ``n_nodes`` candidates of each depth below the best path (Algorithm 1, steps 1 and 2)."""
        if self._candidates is None or n_nodes == 0:
            return []
        layers: list[_Layer] = []
        parent, path = self._root, 0.0
        log_probs = _at_temperature(self._candidates[1], self._temperature)
        for ids, values in zip(self._candidates[0][:depth], log_probs, strict=False):
            if self._prune:
                kept = ids != parent
                ids, values = ids[kept], values[kept]  # noqa: PLW2901
            if len(ids) == 0:
                break
            layers.append(_Layer(ids[:n_nodes], path + values[:n_nodes]))
            parent, path = int(ids[0]), float(layers[-1].log_probs[0])
        return layers

    def _tree(self, widths: tuple[int, ...], layers: Sequence[_Layer], depth: int, k: int) -> DraftTree:
        masks = tuple(max(0, min(k, depth - d)) for d in range(len(widths) + 1))
        shape = _shape(widths, masks)
        token_ids = np.empty(len(shape.parents), np.int32)
        probs = np.ones(len(shape.parents), np.float32)
        token_ids[0] = self._root
        first = 1
        for width, layer in zip(widths, layers, strict=False):
            token_ids[first : first + width] = layer.token_ids[:width]
            probs[first : first + width] = np.exp(layer.log_probs[:width])
            first += width
        vectors = self._masks.for_tree(token_ids, shape.parents, shape.masks)
        return DraftTree(token_ids, shape.parents, probs, shape.masks, vectors, shape.sources, [shape.depths])


def _at_temperature(log_probs: npt.NDArray[np.floating], temperature: float) -> _Float64Array:
    """float64[depths, n]; rounding may leave a log-probability above 0, which would put a child before its parent."""
    values: _Float64Array = np.minimum(log_probs, 0.0, dtype=np.float64)
    if temperature <= 0:
        return values
    values -= values[:, :1]  # best first, so nothing overflows below
    values /= max(temperature, 1e-6)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    return values


def _dynamic_widths(layers: Sequence[_Layer], n_nodes: int) -> tuple[int, ...]:
    """Widths of Algorithm 1: pool all depths, keep the best ``n_nodes`` by (probability desc, depth asc, rank asc).

    The pool is laid out depth by depth and rank by rank, so a stable sort by probability is the whole order.
    A child's path is never likelier than its parent's, so kept depths and ranks have no holes; the loop stops at
    an empty depth all the same.
    """
    if not layers:
        return ()
    pool = np.concatenate([layer.log_probs for layer in layers])
    kept = np.argsort(-pool, kind="stable")[:n_nodes]
    ends = np.cumsum([len(layer.log_probs) for layer in layers])
    counts = np.bincount(np.searchsorted(ends, kept, side="right"), minlength=len(layers)).tolist()
    return tuple(counts[: counts.index(0)] if 0 in counts else counts)


def _static_widths(widths: tuple[int, ...], layers: Sequence[_Layer], n_nodes: int) -> tuple[int, ...]:
    """Fixed widths, cut in breadth-first order where nodes or candidates run out."""
    cut: list[int] = []
    for width, layer in zip(widths, layers, strict=False):
        cut.append(min(width, len(layer.token_ids), n_nodes - sum(cut)))
        if cut[-1] == 0:
            return tuple(cut[:-1])
    return tuple(cut)


@lru_cache(maxsize=1024)
def _shape(widths: tuple[int, ...], masks: tuple[int, ...]) -> _Shape:
    """Breadth-first arrays of a top-1 expansion; ``masks[d]`` mask rows behind each node of depth d.

    >>> shape = _shape((3, 2), (1, 1, 0))
    >>> shape.parents.tolist(), shape.masks.tolist(), shape.sources
    ([-1, 0, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0], ('', 'esp1', 'esp1', 'esp1', 'esp2', 'esp2'))
    """
    counts = (1, *widths)
    firsts = np.cumsum((0, *counts))  # first node of each depth, then the number of nodes
    depths = np.repeat(np.arange(len(counts)), counts)
    parents = np.where(depths > 0, firsts[depths - 1], -1)
    sources = tuple(f"esp{depth}" if depth else "" for depth in depths.tolist())
    return _Shape(parents.astype(np.int32), np.array(masks, np.int32)[depths], depths.astype(np.int32), sources)
