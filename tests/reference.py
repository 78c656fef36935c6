"""Slow, readable twins of the fast code, written from the paper. Tests compare the package with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from esp_edge.tree import DraftTree

__all__ = [
    "Candidates",
    "RefTree",
    "attention",
    "block_complexity",
    "dynamic_tree",
    "positions",
    "prompt_mean",
    "pruned",
    "running_update",
    "static_tree",
    "walk",
]

Candidates = Sequence[tuple[int, float]]  # (token id, natural log-probability) of one mask, best first
FloatArray = npt.NDArray[np.float32]


# Mask vectors


def prompt_mean(rows: FloatArray) -> FloatArray:
    """Eq 4: mean of the prompt's embeddings, float32[n_embd]."""
    total = np.zeros(rows.shape[1], np.float64)
    for row in rows:
        total += row
    return (total / len(rows)).astype(np.float32)


def running_update(vectors: FloatArray, rows: FloatArray, update: float) -> FloatArray:
    """Eq 5: m <- m + lambda (e_new - m), one token after the other, for every mask."""
    current = vectors.astype(np.float64)
    for row in rows:
        for i in range(len(current)):
            current[i] = current[i] + update * (row - current[i])
    return current.astype(np.float32)


# Draft trees (App. D, Algorithm 1)


@dataclass
class RefTree:
    """Breadth-first nodes, the root first; ``log_probs`` belong to whole paths."""

    token_ids: list[int]
    parents: list[int]
    log_probs: list[float]
    depths: list[int]


def pruned(candidates: Candidates, parent_token: int) -> list[tuple[int, float]]:
    """Section 3.5: a candidate that repeats its parent gives way to the next best."""
    return [(token, value) for token, value in candidates if token != parent_token]


def _layers(root: int, masks: Sequence[Candidates], prune: bool) -> list[list[tuple[int, float]]]:
    """Per depth: (token, log-probability of the path through the Top-1 nodes above)."""
    layers: list[list[tuple[int, float]]] = []
    parent, path = root, 0.0
    for candidates in masks:
        kept = pruned(candidates, parent) if prune else list(candidates)
        if not kept:
            break
        layers.append([(token, path + value) for token, value in kept])
        parent, path = layers[-1][0]
    return layers


def _emit(root: int, layers: Sequence[Sequence[tuple[int, float]]]) -> RefTree:
    """Breadth first; every node of a depth hangs below the first node of the depth above."""
    tree = RefTree([root], [-1], [0.0], [0])
    parent = 0
    for depth, layer in enumerate(layers, start=1):
        first = len(tree.token_ids)
        for token, value in layer:
            tree.token_ids.append(token)
            tree.parents.append(parent)
            tree.log_probs.append(value)
            tree.depths.append(depth)
        parent = first
    return tree


def static_tree(root: int, masks: Sequence[Candidates], widths: Sequence[int], prune: bool = True) -> RefTree:
    """Top K_i of mask i at depth i."""
    layers = _layers(root, masks, prune)
    return _emit(root, [layer[:width] for layer, width in zip(layers, widths, strict=False)])


def dynamic_tree(root: int, masks: Sequence[Candidates], n_nodes: int, prune: bool = True) -> RefTree:
    """Algorithm 1: pool the top N of every depth, keep the best N, drop nodes whose parent was not kept."""
    pool = []
    for depth, layer in enumerate(_layers(root, masks, prune), start=1):
        for rank, (token, value) in enumerate(layer[:n_nodes]):
            pool.append((-value, depth, rank, token))
    kept = sorted(pool)[:n_nodes]
    places = {(depth, rank) for _, depth, rank, _ in kept}
    linked = [item for item in kept if all((above, 0) in places for above in range(1, item[1]))]
    layers: list[list[tuple[int, float]]] = []
    for value, depth, _, token in sorted(linked, key=lambda item: (item[1], item[2])):
        while len(layers) < depth:
            layers.append([])
        layers[depth - 1].append((token, -value))
    return _emit(root, layers)


# One pass (A.6, A.7)


def positions(tree: DraftTree) -> list[int]:
    """Position of every row relative to the root's: a node's depth, a mask's owner + 1, + 2, ..."""
    depths = [0]
    for parent in tree.parents.tolist()[1:]:
        depths.append(depths[parent] + 1)
    masks = [depths[owner] + j for owner, count in enumerate(tree.masks.tolist()) for j in range(1, count + 1)]
    return depths + masks


def attention(tree: DraftTree) -> npt.NDArray[np.bool_]:
    """bool[n_rows, n_rows]: row i sees row j of the same pass. The committed prefix is seen by all.

    A node sees the root, its ancestors and itself; mask j of an owner sees what the owner sees, the owner,
    masks 1..j-1 of the owner and itself.
    """
    sees: list[set[int]] = []
    for node, parent in enumerate(tree.parents.tolist()):
        sees.append({node} | (sees[parent] if node else set()))
    for owner, count in enumerate(tree.masks.tolist()):
        seen = set(sees[owner])
        for _ in range(count):
            seen = seen | {len(sees)}
            sees.append(seen)
    matrix = np.zeros((len(sees), len(sees)), np.bool_)
    for row, seen in enumerate(sees):
        matrix[row, sorted(seen)] = True
    return matrix


def walk(tree: DraftTree, choose: Callable[[int], int]) -> tuple[list[int], list[int]]:
    """Sample matching: (accepted nodes, committed tokens). ``choose(node)`` is called once a committed token.

    Every committed token is the target's own choice at the node reached; a child that carries it is only a short cut.
    """
    path: list[int] = []
    tokens: list[int] = []
    node = 0
    while True:
        token = choose(node)
        tokens.append(token)
        below = [i for i, p in enumerate(tree.parents.tolist()) if p == node and int(tree.token_ids[i]) == token and i]
        if not below:
            return path, tokens
        node = below[0]
        path.append(node)


def block_complexity(k: int, widths: Sequence[int]) -> int:
    """Eq 7: rows of a pass in which every node owns k masks."""
    return (k + 1) * (1 + sum(widths))
