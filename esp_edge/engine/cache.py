"""The KV cache that all slots share, and the passes they run together."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from esp_edge._runtime import llama_cpp, native
from esp_edge.errors import DecodeError, EspEdgeError
from esp_edge.models.model import BATCH_ROWS, Context, TargetModel
from esp_edge.step import Outputs, SavedTrunk, Step
from esp_edge.tree import DraftTree

__all__ = ["Part", "PromptPrefill", "SharedCache"]

_MAX_SEQUENCES = 256  # of llama.cpp, over all slots
_SLOT_SEQUENCES = 60  # owners and leaves of one tree at most
_FREE = -1


class _SlotView:
    """A slot's range of sequences: what a step needs of a context."""

    def __init__(self, context: Context, first_sequence: int, width: int) -> None:
        self._context = context
        table = context.model.embeddings
        self._native = native.DecodeStep(_address(context), table.native if table else None, first_sequence, width)

    @property
    def model(self) -> TargetModel:
        return self._context.model

    @property
    def n_ctx(self) -> int:
        return self._context.n_ctx

    @property
    def lock(self) -> threading.RLock:
        return self._context.lock

    @property
    def native(self) -> Any:
        _ = self._context.native  # raises when closed
        return self._native


def _address(context: Context) -> int:
    return ctypes.cast(context.pointer, ctypes.c_void_p).value or 0


@dataclass(slots=True, eq=False)
class Part:
    """What one slot brings to a pass: a tree, or prompt tokens whose logits nobody reads.

    Attributes:
        rows: of the part, re-fed ones included.
        outputs: of the tree's rows, once the pass ran.
        error: why this part did not run.
    """

    step: Step
    tree: DraftTree | None = None
    token_ids: Sequence[int] = ()
    outputs: Outputs | None = None
    error: Exception | None = None
    rows: int = field(init=False)  # asked for several times a pass, and counting masks takes its time

    def __post_init__(self) -> None:
        self.rows = len(self.token_ids) if self.tree is None else self.tree.n_rows + len(self.step.refeed)


class SharedCache:
    """One context; every slot owns a range of its sequence ids, all share its cells.

    In exact mode the cells of a slot must stay in position order, as they are when it runs alone: a row adds up its
    visible cells in the order in which they lie. llama.cpp puts new rows into the first free cells, so a cell that one
    slot frees in front of another slot's cells would break the other's order. Cells are therefore not freed but parked
    in a sequence that no row sees through, new rows always go to the end, and when the end of the cache is reached all
    trunks are copied out and back in, bit by bit, one behind the other.

    Attributes:
        steps: one a slot.
        width: sequences of a slot.
        n_cells: cells in all.
        exact: whether the order is kept.
        keeps_prefixes: whether a trunk may be cut and go on; a sliding window or a recurrent memory has lost what that
            needs.
    """

    def __init__(self, model: TargetModel, n_slots: int) -> None:
        self.exact = model.config.exact
        self._pads_lone_rows = model.pads_lone_rows
        can_branch = model.capability.speculation
        self.width = min(_SLOT_SEQUENCES, (_MAX_SEQUENCES - 1) // n_slots) if can_branch else 1
        self._parking = n_slots * self.width if self.exact else _FREE
        self._context = model.new_context(n_slots * self.width + (1 if self.exact else 0))
        self.n_cells = self._context.n_ctx
        table = model.embeddings
        self._batch = native.BatchPass(_address(self._context), table.native if table else None)
        self.steps = [
            Step(_SlotView(self._context, n * self.width, self.width), defer_head=model.config.defer_head)
            for n in range(n_slots)
        ]
        for step in self.steps:
            step.native.park_in(self._parking)
        self.keeps_prefixes = can_branch and int(llama_cpp.llama_model_n_swa(model.pointer)) == 0
        self._top = 0  # exact mode: cells from here on were not used since they were last put in order
        self._last: Part | None = None  # exact mode: of the last pass, its cells are at the end
        self._last_rows = 0

    @property
    def last_ms(self) -> float:
        """Time of the last pass: llama_decode, and the part of its output head that was computed afterwards."""
        return float(self._batch.last_us) / 1000.0

    @property
    def closed(self) -> bool:
        """Whether the context was freed, by :meth:`close` or with its model."""
        return self._context.closed

    def close(self) -> None:
        """Free the context; calling it twice is harmless."""
        self._context.close()

    # -- passes ----------------------------------------------------------------------------------------------------

    def run(self, parts: Sequence[Part]) -> bool:
        """Decode all parts in one pass; each then has its outputs or its error.

        False: the pass as a whole failed and nothing was stored. Run the parts one by one, then only those concerned
        have an error.
        """
        with self._context.lock:
            _ = self._context.native  # raises when closed
            rows = sum(part.rows for part in parts)
            if self.exact:
                self._tidy(rows + 1)
            trees = [part.tree for part in parts if part.tree is not None]
            by_id = all(self.steps[0].takes_ids(tree) for tree in trees)
            self._batch.start(by_id)
            taken = [part for part in parts if self._append(part)]
            if not taken:
                return True
            padded = self._pads_lone_rows and sum(part.tree.n_rows for part in taken if part.tree is not None) == 1
            if padded:  # logits of a lone row come from a kernel of its own
                self._batch.start(by_id)
                for part in taken:
                    self._append(part, pad_rows=1)
            return self._decode(taken, taken[-1].rows + (1 if padded and taken[-1].tree is not None else 0))

    def _decode(self, parts: Sequence[Part], last_rows: int) -> bool:
        trees = [part for part in parts if part.tree is not None]
        # the heads of several sessions are cheaper together
        status = int(self._batch.decode(len(trees) == 1 and trees[0].step.defers_head()))
        retry = status != 0 and len(parts) > 1
        for part in parts:
            try:
                part.outputs = part.step.settle(self._batch, status)
            except EspEdgeError as error:
                part.error = None if retry else error
        if status == 0 and self.exact:
            self._last, self._last_rows = parts[-1], last_rows
            self._top += self._batch.n_rows
        return not retry

    def _append(self, part: Part, pad_rows: int = 0) -> bool:
        try:
            if part.tree is None:
                part.step.append_prefill(self._batch, part.token_ids)
            else:
                part.step.append(self._batch, part.tree, pad_rows=pad_rows)
        except (EspEdgeError, ValueError, IndexError) as error:  # what compiled code throws
            part.error = error
            return False
        return True

    @contextmanager
    def settling(self, part: Part) -> Iterator[None]:
        """Around the commit or rollback of a part: what the last one drops is at the end and can be freed."""
        if part is not self._last:
            yield
            return
        step, before = part.step, part.step.n_past
        step.native.park_in(_FREE)
        try:
            yield
        finally:
            self._last = None
            if not self._context.closed:
                step.native.park_in(self._parking)
                self._top -= self._last_rows - (step.n_past - before)

    # -- cells -----------------------------------------------------------------------------------------------------

    def restore(self, step: Step, saved: SavedTrunk) -> bool:
        """Put a saved trunk into a slot; False, with an empty trunk, where there is no room."""
        with self._context.lock:
            step.reset()
            if self.exact:
                self._tidy(saved.n_past)
            done = step.restore(saved)
            self._top += step.n_past
            return done

    def _tidy(self, n_wanted: int) -> None:
        """Exact mode, between two passes: make room at the end for so many cells."""
        if self._top + n_wanted <= self.n_cells and any(step.n_past for step in self.steps):
            return
        saved = [(step, step.save()) for step in self.steps if step.n_past]
        self._batch.clear_memory()
        for step in self.steps:
            step.forget()
        self._top, self._last = 0, None
        for step, trunk in saved:
            if not step.restore(trunk):
                raise DecodeError("the KV cache could not be put in order: raise --ctx-size or use fewer slots")
            self._top += trunk.n_past


class PromptPrefill:
    """Exact mode's prefill: in a context of its own, chunk by chunk, as if the prompt were alone.

    The kernels of wide passes add up the cache in tiles, so their bits depend on where the cells lie. The finished
    trunk is copied into its slot: passes below 64 rows only need the order.
    """

    def __init__(self, model: TargetModel) -> None:
        self._context = model.new_context(1)
        self._step = Step(self._context)
        self._owner: object = None

    @property
    def n_past(self) -> int:
        """Tokens stored."""
        return self._step.n_past

    def load(self, owner: object, trunk: SavedTrunk | None, n: int) -> None:
        """Continue from the first ``n`` tokens of a trunk, or from nothing."""
        self._owner = owner
        if trunk is None or not self._step.restore(trunk):
            self._step.reset()
        self._step.truncate(n)

    def holds(self, owner: object) -> bool:
        """Whether the stored tokens are this owner's."""
        return self._owner is owner

    def advance(self, token_ids: Sequence[int]) -> None:
        """Prefill the next chunk of a prompt whose first :attr:`n_past` tokens are stored."""
        first = self._step.n_past
        self._step.prefill(token_ids[first : first + BATCH_ROWS])

    def save(self) -> SavedTrunk:
        """A copy of what is stored."""
        return self._step.save()

    def release(self, owner: object) -> None:
        """The owner needs it no more."""
        if self._owner is owner:
            self._owner = None

    def close(self) -> None:
        """Free the context; calling it twice is harmless."""
        self._context.close()
