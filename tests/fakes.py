"""Stand-ins that need no model: outputs with dense logits, embeddings with random rows, random draft trees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from esp_edge.tree import DraftTree, FloatArray, Int32Array

__all__ = ["FakeEmbeddings", "FakeOutputs", "draft_trees"]


class FakeOutputs:
    """``step.Outputs`` over a dense matrix ``logits``: float32[rows, n_vocab]."""

    def __init__(self, logits: npt.ArrayLike) -> None:
        self.logits: FloatArray = np.asarray(logits, np.float32)
        wide = self.logits.astype(np.float64)
        top = wide.max(axis=1, keepdims=True)
        self.log_probs = wide - top - np.log(np.exp(wide - top).sum(axis=1, keepdims=True))

    def argmax(self, row: int) -> int:
        return int(self.logits[row].argmax())

    def top_k(self, rows: Sequence[int] | Int32Array, k: int) -> tuple[Int32Array, FloatArray]:
        picked = np.asarray(rows, np.intp)
        ids = np.argsort(-self.logits[picked], axis=1, kind="stable")[:, :k]
        values = np.take_along_axis(self.log_probs[picked], ids, axis=1)
        return ids.astype(np.int32), values.astype(np.float32)

    def logprob(self, row: int, token_id: int) -> float:
        return float(self.log_probs[row, token_id])


class FakeEmbeddings:
    """``masks.Embeddings`` with a normal random table; ``table`` overrides it. ``n_reads`` counts rows handed out."""

    def __init__(self, seed: int = 0, n_vocab: int = 50, n_embd: int = 6, table: npt.ArrayLike | None = None) -> None:
        if table is None:
            table = np.random.default_rng(seed).standard_normal((n_vocab, n_embd))
        self.table: FloatArray = np.asarray(table, np.float32)
        self.n_vocab, self.n_embd = self.table.shape
        self.n_reads = 0
        self.most_at_once = 0

    def rows(self, token_ids: Sequence[int] | Int32Array) -> FloatArray:
        self.n_reads += len(token_ids)
        self.most_at_once = max(self.most_at_once, len(token_ids))
        rows: FloatArray = self.table[np.asarray(token_ids, np.intp)]
        return rows

    def mean(self) -> FloatArray:
        mean: FloatArray = self.table.mean(axis=0)
        return mean

    def std(self) -> FloatArray:
        std: FloatArray = self.table.std(axis=0)
        return std


@st.composite
def draft_trees(draw: st.DrawFn, max_nodes: int = 12, max_masks: int = 3, n_vocab: int = 20) -> DraftTree:
    """Any valid tree: parents in any order that precedes the child, masks behind any node, no vectors."""
    token_ids, parents = [draw(st.integers(0, n_vocab - 1))], [-1]
    taken: set[tuple[int, int]] = set()
    for node in range(1, draw(st.integers(1, max_nodes))):
        edge = draw(st.tuples(st.integers(0, node - 1), st.integers(0, n_vocab - 1)).filter(lambda e: e not in taken))
        taken.add(edge)
        parents.append(edge[0])
        token_ids.append(edge[1])
    masks = draw(st.lists(st.integers(0, max_masks), min_size=len(parents), max_size=len(parents)))
    return DraftTree.from_lists(token_ids, parents, masks=masks)
