"""A seat in the engine: a range of sequences with its trunk, and the request that sits there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from esp_edge.config import DraftConfig
from esp_edge.drafters.base import Drafter
from esp_edge.engine.ticket import Ticket
from esp_edge.metrics import GenerationStats
from esp_edge.models.model import TargetModel
from esp_edge.planner.plan import Planner
from esp_edge.session import Drafting, Generation, common_prefix
from esp_edge.step import SavedTrunk, Step

__all__ = ["Request", "Settings", "Slot"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a request drafts: the configuration with ``auto`` resolved, and the engine's planner for it."""

    draft: DraftConfig
    planner: Planner | None


@dataclass(slots=True, eq=False)
class Request:
    """A submitted prompt.

    Attributes:
        serial: rises with every request; the highest is the youngest.
        saved: the trunk of a request that had to give up its slot.
        drafter: and its drafter.
        needs_draft: whether its last tree was already verified.
        partial, n_partial: exact mode: a trunk whose first tokens are the start of the prompt, and how many; until the
            prefill context takes it up, and again while another prompt has that.
    """

    ticket: Ticket
    generation: Generation
    settings: Settings
    serial: int
    saved: SavedTrunk | None = None
    drafter: tuple[DraftConfig, float, Drafter] | None = None
    needs_draft: bool = False
    partial: SavedTrunk | None = None
    n_partial: int = 0
    submitted: float = field(default_factory=time.perf_counter)
    seated: float = 0.0


class Slot(Drafting):
    """One of the engine's seats. Used by the engine's thread only.

    Attributes:
        step: passes over the slot's sequences.
        request: who sits here; None = idle.
        token_ids: tokens of the trunk and, while an answer is made, the one behind it.
        decoding: whether the prompt is in the cache.
        last_used: when a request left, in the engine's count of rounds.
    """

    def __init__(self, number: int, model: TargetModel, step: Step) -> None:
        super().__init__(model)
        self.number = number
        self.step = step
        self.request: Request | None = None
        self.token_ids: list[int] = []
        self.decoding = False
        self.needs_draft = False
        self.last_used = 0
        self._clock = 0.0

    # -- who sits here ---------------------------------------------------------------------------------------------

    def seat(self, request: Request) -> None:
        """Take a request: its settings, drafter and statistics. The trunk is the caller's to prepare.

        Raises:
            EspEdgeError: the drafter cannot be made.
        """
        self.request = request
        self.decoding = self.needs_draft = False
        self._draft, self._planner = request.settings.draft, request.settings.planner
        self.step.impl = self._draft.impl
        self._clock = time.perf_counter()
        if request.drafter is not None:
            self._drop_drafter()
            self._kept, request.drafter = request.drafter, None
            self.needs_draft = request.needs_draft
            return
        request.seated = self._clock
        request.generation.use(*self._start(request.generation.params, request.generation.n_prompt))

    def leave(self) -> None:
        """The request ends; the trunk stays for the next one."""
        self.request = None
        self.decoding = self.needs_draft = False
        self.token_ids = self.token_ids[: self.step.n_past]

    def give_up(self) -> Request:
        """The request goes back to the queue with its trunk and drafter.

        Raises:
            RuntimeError: nobody sits here.
        """
        request = self.request
        if request is None:
            raise RuntimeError("an idle slot has no request to give up")
        if self.decoding:
            request.saved = self.step.save()
            request.drafter, self._kept = self._kept, None
            request.needs_draft = self.needs_draft
        request.partial, request.n_partial = None, 0
        self.request = None
        self.decoding = self.needs_draft = False
        self.token_ids = []
        self.step.reset()
        return request

    def close(self) -> None:
        """Free the drafter, keeping what it learned where that is wanted."""
        self._drop_drafter()

    # -- cells -----------------------------------------------------------------------------------------------------

    @property
    def n_cells(self) -> int:
        """Cells in use, those promised to the rest of a prompt included."""
        if self.request is not None and not self.decoding:
            return max(self.request.generation.n_prompt, self.step.n_past)
        return self.step.n_past

    def reusable(self, token_ids: list[int], keeps_prefixes: bool) -> int:
        """Tokens of the trunk that a prompt may start from; without ``keeps_prefixes`` only a whole trunk."""
        n_past = self.step.n_past
        n = self.step.reusable(common_prefix(self.token_ids, token_ids[:-1]))
        return n if n == n_past or keeps_prefixes else 0

    # -- passes ----------------------------------------------------------------------------------------------------

    @property
    def planner(self) -> Planner | None:
        """Of the drafter that sizes its trees; shared by all slots."""
        return self._planner

    @property
    def most_rows(self) -> int:
        """Rows of the largest tree that the settings allow."""
        return self._draft.rows

    def begin(self, generation: Generation, max_rows: int) -> None:
        """The prompt is in the cache."""
        self.token_ids = generation.token_ids
        generation.begin(max_rows)
        self.decoding = True

    def count_time(self, stats: GenerationStats, model_ms: float, *, in_prefill: bool) -> None:
        """Count the wall time since the last chunk; the first chunk ends the prefill."""
        now = time.perf_counter()
        elapsed, self._clock = 1000.0 * (now - self._clock), now
        if in_prefill:
            stats.prefill_ms += elapsed
        else:
            stats.decode_ms += elapsed
            stats.model_ms += model_ms
