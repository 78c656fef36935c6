"""What a drafter sees of a replayed pass: the rows of the accepted path and of the masks behind its end."""

from __future__ import annotations

import numpy as np

from esp_edge.tree import DraftTree, FloatArray, Int32Array, Verdict

__all__ = ["RecordedOutputs", "accepted_chain"]


class RecordedOutputs:
    """``esp_edge.step.Outputs`` of an accepted path and of the masks behind its end, as they were recorded.

    Where more candidates are asked than recorded, the rest are token ids -1, -2, ..., of probability 0.

    Attributes:
        padded: whether that happened.
    """

    def __init__(self, ids: Int32Array, log_probs: FloatArray) -> None:
        """ids and log_probs: [rows, top], the nodes of the path, root first, then the mask rows."""
        self._ids = ids
        self._log_probs = log_probs
        self.padded = False

    def argmax(self, row: int) -> int:
        """Token with the largest logit of a row."""
        return int(self._ids[row, 0])

    def top_k(self, rows: Int32Array, k: int) -> tuple[Int32Array, FloatArray]:
        """Best ``k`` tokens of each row: ids int32[len(rows), k], log-probs float32[len(rows), k]."""
        ids, log_probs = self._ids[rows, :k], self._log_probs[rows, :k]
        missing = k - ids.shape[1]
        if missing <= 0:
            return ids, log_probs
        self.padded = True
        none = np.tile(np.arange(-1, -missing - 1, -1, dtype=np.int32), (len(ids), 1))
        never = np.full(none.shape, -np.inf, np.float32)
        return np.concatenate([ids, none], axis=1), np.concatenate([log_probs, never], axis=1)

    def top_k_sketch(self, rows: Int32Array, k: int) -> tuple[Int32Array, FloatArray]:
        """The same, from the exact log-probabilities."""
        return self.top_k(rows, k)

    def logprob(self, row: int, token_id: int) -> float:
        """Log-probability of a token; minus infinity when it is none of the recorded."""
        found = np.flatnonzero(self._ids[row] == token_id)
        return float(self._log_probs[row, found[0]]) if len(found) else float("-inf")


def accepted_chain(tree: DraftTree, verdict: Verdict) -> tuple[DraftTree, Verdict]:
    """The root and the accepted path as a chain, masks at its end only, and the verdict in its numbers."""
    path = [0, *verdict.path]
    n = len(path)
    masks = np.zeros(n, np.int32)
    masks[-1] = tree.masks[verdict.anchor]
    chain = DraftTree(
        tree.token_ids[path],
        np.arange(-1, n - 1, dtype=np.int32),
        tree.probs[path],
        masks,
        None,
        tuple(tree.sources[node] for node in path) if tree.sources else (),
        [np.arange(n, dtype=np.int32)],
    )
    return chain, Verdict(tuple(range(1, n)), verdict.token_ids)
