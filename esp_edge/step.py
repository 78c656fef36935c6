"""One target forward over a draft tree, and the repair of the KV cache afterwards."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from esp_edge._runtime import native
from esp_edge.config import MAX_BLOCK, MAX_EXACT_BLOCK
from esp_edge.errors import ConfigError, DecodeError
from esp_edge.models.model import BATCH_ROWS, MAX_OUTPUT_ROWS, TargetModel, offloads
from esp_edge.tree import DraftTree, FloatArray, Int32Array

__all__ = ["MAX_EXACT_ROWS", "CacheView", "NoRoomError", "Outputs", "SavedTrunk", "Step", "naive_layout"]

_NO_ROOM = 1
_NO_TOKENS: Int32Array = np.empty(0, np.int32)
_CACHED_LAYOUTS = 512
MAX_EXACT_ROWS = MAX_EXACT_BLOCK + 3  # of a pass: below the 64 rows of the tiled kernel


class Outputs(Protocol):
    """Logits of the last pass, read in place. Valid until the next pass."""

    def argmax(self, row: int) -> int:
        """Token with the largest logit of a row; the lowest id wins a tie."""

    def top_k(self, rows: Int32Array, k: int) -> tuple[Int32Array, FloatArray]:
        """Best ``k`` tokens of each row, best first: ids int32[len(rows), k], log-probs float32[len(rows), k]."""

    def top_k_sketch(self, rows: Int32Array, k: int) -> tuple[Int32Array, FloatArray]:
        """The same with estimated log-probabilities, in a fraction of the time: for drafts, never for output."""

    def logprob(self, row: int, token_id: int) -> float:
        """Natural log-probability of a token under the row's softmax at temperature 1."""


class CacheView(Protocol):
    """What a step needs of a context: a whole one, or a slot's share of one."""

    @property
    def model(self) -> TargetModel:
        """The target model."""

    @property
    def n_ctx(self) -> int:
        """Cells."""

    @property
    def lock(self) -> threading.RLock:
        """Held around everything that touches the llama_context."""

    @property
    def native(self) -> Any:
        """The compiled step; ConfigError once the context is closed."""


@dataclass(frozen=True, slots=True)
class SavedTrunk:
    """A trunk outside of the cache: llama.cpp's bytes of its cells, and what the step knew about it.

    Attributes:
        n_past: tokens whose cells are in ``data``.
        n_aligned: of these, written by whole prefill chunks.
        refeed: committed tokens behind them that have no cell.
    """

    data: bytes
    n_past: int
    n_aligned: int
    refeed: tuple[int, ...]


class NoRoomError(DecodeError):
    """The KV cache has no slot for the pass; the cache is as before, a smaller tree may fit."""


def naive_layout(tree: DraftTree) -> Any:
    """The layout of a pass built node by node, as a plain implementation does every time (paper Table 4)."""
    parents, masks = tree.parents.tolist(), tree.masks.tolist()
    n = len(parents)
    is_leaf = [True] * n
    for parent in parents[1:]:
        is_leaf[parent] = False
    owners = [i for i in range(n) if is_leaf[i] or masks[i]]
    sequence = {owner: s for s, owner in enumerate(owners)}
    members: list[set[int]] = [set() for _ in range(n)]
    depth = [0] * n
    for node in range(n):
        if node:
            depth[node] = depth[parents[node]] + 1
        if node in sequence:
            ancestor = node
            while ancestor >= 0:
                members[ancestor].add(sequence[node])
                ancestor = parents[ancestor]
    rows_depth, offsets, ids = list(depth), [0], []
    for node in range(n):
        own = [sequence[node]] if node in sequence else []
        ids += own + sorted(members[node] - set(own))
        offsets.append(len(ids))
    for owner in range(n):
        for j in range(masks[owner]):
            rows_depth.append(depth[owner] + 1 + j)
            ids.append(sequence[owner])
            offsets.append(len(ids))
    return native.TreeLayout.from_rows(rows_depth, offsets, ids, n)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _locked(method: _Method) -> _Method:
    """Hold the context's lock during a method."""

    @functools.wraps(method)
    def locked(self: Step, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return cast(_Method, locked)


class Step:
    """Passes over one context. The cache holds the committed tokens but the last one, the next root.

    On the CPU the cells stay in position order: accepted nodes that do not directly follow the root are dropped and fed
    again in front of the next root (``refeed``). That costs about a tenth of a row a pass, and without it four answers
    of five change somewhere at a near-tie. Exact mode also prefills in fixed chunks, because llama.cpp's kernels give
    other bits for 64 rows and more, and pads one-row passes to two rows where these have other bits, too.

    Attributes:
        n_past: tokens whose cells are stored.
        refeed: committed tokens in front of the root that have no cell.
        in_order: whether cells stay in position order; on the CPU they do.
    """

    def __init__(self, context: CacheView, impl: str = "efficient", *, defer_head: bool = False) -> None:
        """``defer_head``: its passes may compute logits when they are asked for, where that costs less."""
        capability = context.model.capability
        self._context = context
        self._n_batch = BATCH_ROWS
        self.impl = impl
        self._defer_head = defer_head
        self.exact = context.model.config.exact
        self._pads_lone_rows = context.model.pads_lone_rows
        self.in_order = self.exact or not offloads(context.model.config)
        self._can_embed = capability.masks
        # a pass without masks may use token ids where that cannot change a bit
        self._prefer_ids = not capability.masks or capability.bit_equal
        self._layouts: dict[tuple[bytes, bytes], Any] = {}
        self._indices: dict[tuple[bytes, bool], Int32Array] = {}
        self._tree: DraftTree | None = None
        self._n_aligned = 0
        self.refeed: list[int] = []
        self.lock = context.lock  # another thread may close the context: never during a native call

    @property
    def n_past(self) -> int:
        """Tokens whose cells are stored."""
        n: int = self.native.n_past
        return n

    @property
    def n_free(self) -> int:
        """Cells that are free, the tokens to feed again already taken off."""
        return self._context.n_ctx - self.n_past - len(self.refeed)

    @property
    def max_rows(self) -> int:
        """Rows the next tree may have, at least 1: what is free, and what a pass may hold."""
        if not self.exact:
            return max(1, min(self.n_free, MAX_BLOCK))
        return max(1, min(self.n_free - 1, MAX_EXACT_ROWS - len(self.refeed)))  # a lone row is padded

    @property
    def model_ms(self) -> float:
        """Time spent inside llama_decode so far."""
        return float(self.native.decode_us) / 1000.0

    @property
    def native(self) -> Any:
        """The compiled step, for the sampler; ConfigError once the context is closed."""
        return self._context.native

    # -- the trunk -------------------------------------------------------------------------------------------------

    def reusable(self, n_common: int) -> int:
        """How many of ``n_common`` stored tokens a new prompt may keep.

        Exact mode keeps whole prefill chunks only: cells written by decode passes have other bits than a prefill.
        """
        n = min(n_common, self.n_past)
        return min(n, self._n_aligned) // BATCH_ROWS * BATCH_ROWS if self.exact else n

    @_locked
    def truncate(self, n: int) -> None:
        """Keep the first ``n`` stored tokens; where the memory cannot, keep none."""
        self.refeed = []
        self._tree = None
        if n >= self.n_past:
            self.native.rollback()
        elif n == 0 or not self.native.truncate(n):
            self.native.clear()
        self._n_aligned = min(self._n_aligned, self.n_past)

    def reset(self) -> None:
        """Forget everything."""
        self.truncate(0)

    @_locked
    def prefill(self, token_ids: Sequence[int] | Int32Array) -> None:
        """Append tokens to the trunk, in chunks of 512 rows; all or, after an error or an interrupt, none.

        Raises:
            NoRoomError: they do not fit the context.
            DecodeError: llama.cpp failed.
        """
        refeed, self.refeed = self.refeed, []
        tokens = np.ascontiguousarray([*refeed, *token_ids], np.int32)
        first = self.n_past
        try:
            for start in range(0, len(tokens), BATCH_ROWS):  # signals are seen between two chunks
                self._check(self.native.prefill(tokens[start : start + BATCH_ROWS], BATCH_ROWS))
        except BaseException:
            self.truncate(first)
            self.refeed = refeed
            raise
        if first == self._n_aligned and first % BATCH_ROWS == 0:
            self._n_aligned = self.n_past // BATCH_ROWS * BATCH_ROWS

    # -- the pass --------------------------------------------------------------------------------------------------

    @_locked
    def run(self, tree: DraftTree) -> Outputs:
        """One target forward over the tree; the logits stay readable until the next call.

        Raises:
            NoRoomError: the cache has no slot for the pass.
            ConfigError: masks on a model that cannot be probed, an exact pass of 64 rows and more, or any of 257.
            DecodeError: llama.cpp failed.
        """
        refeed = self._admit(tree)
        status = self.native.run(
            self._layout(tree),
            tree.token_ids,
            refeed,
            *self._mask_input(tree),
            1 if self._pads_lone_rows and tree.n_rows == 1 else 0,
            self.takes_ids(tree),
            self._defer_head,
        )
        self._check(status)
        self._tree = tree
        outputs: Outputs = self.native
        return outputs

    def takes_ids(self, tree: DraftTree) -> bool:
        """Whether the tree's rows may go in as token ids; a pass holds ids or embeddings, never both."""
        return tree.n_mask_rows == 0 and self._prefer_ids

    def _admit(self, tree: DraftTree) -> Int32Array:
        """The tokens in front of the root, int32[n]; ConfigError when the tree cannot be run."""
        if tree.n_mask_rows and not self._can_embed:
            raise ConfigError(f"this model cannot take mask rows: {self._context.model.capability.reason}")
        rows = tree.n_rows + len(self.refeed)
        if self.exact and rows > MAX_EXACT_ROWS:
            raise ConfigError(f"an exact pass may have {MAX_EXACT_ROWS} rows, this one has {rows}")
        if tree.n_rows > MAX_OUTPUT_ROWS:  # llama.cpp would abort the process
            raise ConfigError(f"a tree may have {MAX_OUTPUT_ROWS} rows, this one has {tree.n_rows}")
        return np.array(self.refeed, np.int32) if self.refeed else _NO_TOKENS

    def _mask_input(self, tree: DraftTree) -> tuple[FloatArray | None, Int32Array | None]:
        return (tree.mask_vectors, self._mask_index(tree)) if tree.n_mask_rows else (None, None)

    # -- a part in a pass shared with other steps of the context ---------------------------------------------------

    @_locked
    def append(self, batch: Any, tree: DraftTree, *, pad_rows: int = 0) -> None:
        """Add the rows that :meth:`run` would decode to a ``native.BatchPass``; when this raises, it is as before.

        Raises:
            ConfigError: as for :meth:`run`; the sum over all steps is the caller's to check.
        """
        refeed = self._admit(tree)
        self.native.append(batch, self._layout(tree), tree.token_ids, refeed, *self._mask_input(tree), pad_rows)
        self._tree = tree

    @_locked
    def defers_head(self) -> bool:
        """Whether a shared pass, to which only this step appended a tree, should compute its logits when asked."""
        return self._defer_head and bool(self.native.defers_head())

    @_locked
    def append_prefill(self, batch: Any, token_ids: Sequence[int]) -> None:
        """Add trunk tokens, whose logits nobody reads."""
        self.native.append_prefill(batch, np.array(token_ids, np.int32))

    @_locked
    def settle(self, batch: Any, status: int) -> Outputs:
        """After the shared pass was decoded: the logits of this step's rows, numbered from its root.

        Raises:
            NoRoomError, DecodeError: as for :meth:`run`.
        """
        self.native.settle(batch)
        if status != 0:
            self._tree = None
        self._check(status)
        outputs: Outputs = self.native
        return outputs

    @_locked
    def save(self) -> SavedTrunk:
        """A copy of the trunk for :meth:`restore` here or in another step of the model."""
        data: bytes = self.native.save()
        return SavedTrunk(data, self.n_past, self._n_aligned, tuple(self.refeed))

    @_locked
    def restore(self, saved: SavedTrunk) -> bool:
        """Replace the trunk by a saved one, bit by bit. False, with an empty trunk, where there is no room for it."""
        self._tree = None
        done = bool(self.native.restore(saved.data, saved.n_past))
        self.refeed = list(saved.refeed) if done else []
        self._n_aligned = saved.n_aligned if done else 0
        return done

    @_locked
    def share(self, other: Step, n: int) -> None:
        """Replace the trunk by the first ``n`` tokens of another step of the context; both then own the cells."""
        self._tree, self.refeed = None, []
        self.native.share(other.native, n)
        self._n_aligned = min(other._n_aligned, n)

    @_locked
    def forget(self) -> None:
        """The caller emptied the whole memory of the context."""
        self.native.forget()
        self._tree, self.refeed, self._n_aligned = None, [], 0

    # -- after a pass ----------------------------------------------------------------------------------------------

    @_locked
    def commit(self, path: Sequence[int]) -> None:
        """Keep the root and the accepted path of the last pass, drop every other row.

        Raises:
            ConfigError: no pass is waiting, or the path does not run through its tree.
        """
        tree = self._tree
        if tree is None:
            raise ConfigError("commit needs a pass that was not committed yet")
        parent = 0
        for node in path:
            if not 0 < node < tree.n_nodes or tree.parents[node] != parent:
                raise ConfigError(f"the path {list(path)} does not run through the tree")
            parent = node
        kept = self.native.commit(np.array(path, np.int32) if path else _NO_TOKENS, self.in_order)
        self.refeed = [int(tree.token_ids[node]) for node in path[kept:]]
        self._tree = None

    @_locked
    def rollback(self) -> None:
        """Drop the rows of a pass that was not committed; the cache is as before it, or empty where it cannot be."""
        waiting, self._tree = self._tree is not None, None
        if waiting and not self._context.model.capability.speculation:
            self.native.clear()
        else:
            self.native.rollback()

    def _layout(self, tree: DraftTree) -> Any:
        if self.impl == "naive":
            return naive_layout(tree)
        key = (tree.parents.tobytes(), tree.masks.tobytes())
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _CACHED_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = native.TreeLayout.build(tree.parents, tree.masks)
        return layout

    def _mask_index(self, tree: DraftTree) -> Int32Array:
        """int32[n_mask_rows], the mask vector of each mask row."""
        vectors = tree.mask_vectors
        if vectors is None:
            raise ConfigError("a tree with mask rows needs mask vectors")
        own = len(vectors) == tree.n_mask_rows and len(vectors) > int(tree.masks.max())
        key = (tree.masks.tobytes(), own)
        index = self._indices.get(key)
        if index is None:
            if len(self._indices) >= _CACHED_LAYOUTS:
                self._indices.clear()
            rows = range(tree.n_mask_rows) if own else [j for count in tree.masks.tolist() for j in range(count)]
            index = self._indices[key] = np.array(rows, np.int32)
        return index

    @staticmethod
    def _check(status: int) -> None:
        if status == _NO_ROOM:
            raise NoRoomError("the KV cache is full: shorten the prompt or raise --ctx-size")
        if status != 0:
            raise DecodeError(f"llama.cpp could not run the pass (status {status})")
