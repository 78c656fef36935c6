"""The draft tree: what one pass verifies and where it probes. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from esp_edge.errors import ConfigError

__all__ = ["DraftTree", "FloatArray", "Int32Array", "Verdict"]

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """A root, draft nodes below it and mask rows behind some of them.

    Node 0 is the root: the last committed token, which is not in the KV cache yet. A parent always comes
    before its children. The rows of the pass are the nodes in order, then the mask rows owner by owner, so
    mask ``j`` (from 0) of owner ``b`` is row ``n_nodes + sum(masks[:b]) + j``.

    >>> tree = DraftTree.from_lists([5, 7, 9, 8], [-1, 0, 0, 1], masks=[1, 1, 0, 0])
    >>> tree.n_nodes, tree.n_rows, tree.mask_rows(1).tolist(), tree.depths.tolist()
    (4, 6, [5], [0, 1, 1, 2])

    Attributes:
        token_ids: int32[n_nodes], ``token_ids[0]`` is the root's token.
        parents: int32[n_nodes], ``parents[0] == -1`` and ``0 <= parents[i] < i`` otherwise.
        probs: float32[n_nodes], the drafter's estimate that the whole path to the node is accepted (root 1).
        masks: int32[n_nodes], number of mask rows behind each node.
        mask_vectors: float32[n_mask_rows, n_embd], one vector a mask row in row order, or fewer rows, at least
            max(masks), shared by all owners (mask ``j`` uses row ``j``); None when there are no masks. Give shared
            vectors exactly max(masks) rows: then both readings agree where the numbers of rows do.
        sources: one name a node, which draft source proposed it ("" for the root).
    """

    token_ids: Int32Array
    parents: Int32Array
    probs: FloatArray
    masks: Int32Array
    mask_vectors: FloatArray | None = None
    sources: tuple[str, ...] = ()
    _depths: list[Int32Array] = field(default_factory=list, repr=False)
    _n_mask_rows: list[int] = field(default_factory=list, init=False, repr=False)

    @classmethod
    def root_only(cls, token_id: int, masks: int = 0, mask_vectors: FloatArray | None = None) -> DraftTree:
        """A pass that drafts nothing: plain decoding, or a probe when ``masks`` > 0."""
        counts = np.array([masks], np.int32) if masks else _NO_MASKS
        vectors = mask_vectors if masks else None
        return cls(np.array([token_id], np.int32), _NO_PARENT, _CERTAIN, counts, vectors, (), [_DEPTH_0])

    @classmethod
    def from_lists(
        cls,
        token_ids: Sequence[int],
        parents: Sequence[int],
        probs: Sequence[float] | None = None,
        masks: Sequence[int] | None = None,
        mask_vectors: FloatArray | None = None,
        *,
        sources: Sequence[str] = (),
    ) -> DraftTree:
        """Build a checked tree from plain lists; ``probs`` default to 1 and ``masks`` to none.

        Raises:
            ConfigError: lengths differ, a parent does not precede its child, two siblings carry one token, or
                there are fewer mask vectors than the masks of one owner.
        """
        n = len(token_ids)
        tree = cls(
            np.asarray(token_ids, np.int32),
            np.asarray(parents, np.int32),
            np.ones(n, np.float32) if probs is None else np.asarray(probs, np.float32),
            np.zeros(n, np.int32) if masks is None else np.asarray(masks, np.int32),
            mask_vectors,
            tuple(sources),
        )
        tree.check()
        return tree

    def check(self) -> None:
        """Raise ConfigError unless the arrays describe a tree as the class promises."""
        n = self.n_nodes
        if n == 0 or any(len(a) != n for a in (self.parents, self.probs, self.masks)):
            raise ConfigError("a draft tree needs a root and arrays of equal length")
        if self.parents[0] != -1 or np.any(self.parents[1:] < 0) or np.any(self.parents[1:] >= np.arange(1, n)):
            raise ConfigError("in a draft tree the root's parent is -1 and every other parent precedes its child")
        if np.any(self.masks < 0):
            raise ConfigError("a node cannot have a negative number of masks")
        if self.mask_vectors is not None and len(self.mask_vectors) < self.masks.max():
            raise ConfigError(
                f"a draft tree needs a vector for each of an owner's {self.masks.max()} masks, "
                f"but has {len(self.mask_vectors)}"
            )
        edges = set(zip(self.parents.tolist(), self.token_ids.tolist(), strict=True))
        if len(edges) != n:
            raise ConfigError("two siblings of a draft tree carry the same token")

    @property
    def n_nodes(self) -> int:
        """Root and draft nodes."""
        return len(self.token_ids)

    @property
    def n_mask_rows(self) -> int:
        """Mask rows over all owners."""
        if not self._n_mask_rows:  # asked several times a pass
            self._n_mask_rows.append(sum(self.masks.tolist()))
        return self._n_mask_rows[0]

    @property
    def n_rows(self) -> int:
        """Rows of the pass: the block complexity (paper Eq 7 when every node owns k masks)."""
        return self.n_nodes + self.n_mask_rows

    @property
    def depths(self) -> Int32Array:
        """int32[n_nodes], the root has depth 0."""
        if not self._depths:
            depths = [0]
            for parent in self.parents.tolist()[1:]:
                depths.append(depths[parent] + 1)
            self._depths.append(np.array(depths, np.int32))
        return self._depths[0]

    def mask_rows(self, owner: int) -> Int32Array:
        """int32[masks[owner]], row numbers of the masks behind ``owner``."""
        masks = self.masks.tolist()
        first = self.n_nodes + sum(masks[:owner])
        return np.arange(first, first + masks[owner], dtype=np.int32)

    def children(self) -> dict[tuple[int, int], int]:
        """Map (parent node, token id) -> child node."""
        pairs = zip(self.parents.tolist(), self.token_ids.tolist(), strict=True)
        return {edge: node for node, edge in enumerate(pairs) if node}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target model decided about a tree.

    Attributes:
        path: accepted nodes from the root down, the root excluded.
        token_ids: committed tokens: those of ``path``, then the bonus token.
    """

    path: tuple[int, ...]
    token_ids: tuple[int, ...]

    @property
    def anchor(self) -> int:
        """The deepest accepted node (0 = the root): its masks seed the next tree."""
        return self.path[-1] if self.path else 0

    @property
    def bonus_token(self) -> int:
        """The model's own next token: root of the next pass."""
        return self.token_ids[-1]

    def first(self, n: int) -> Verdict:
        """The verdict as if only its first ``n`` tokens had been wanted; the last one never has a cell."""
        return self if n == len(self.token_ids) else Verdict(self.path[: n - 1], self.token_ids[:n])


def _constant(value: float, kind: type[np.int32 | np.float32]) -> Any:
    """A read-only array of one number."""
    array = np.array([value], kind)
    array.setflags(write=False)
    return array


# what all trees of a lone root share: plain decoding makes one a token
_NO_PARENT: Int32Array = _constant(-1, np.int32)
_NO_MASKS: Int32Array = _constant(0, np.int32)
_DEPTH_0: Int32Array = _constant(0, np.int32)
_CERTAIN: FloatArray = _constant(1.0, np.float32)
