"""The price of a row: what the next pass may cost, given how fast this answer has been so far."""

from __future__ import annotations

from typing import Any

from esp_edge.metrics import GenerationStats
from esp_edge.planner.curve import CostCurve
from esp_edge.tree import FloatArray

__all__ = ["Planner"]

_MEMORY = 0.97  # a pass counts this much less with every later one
_LOOK_EVERY = 13  # passes whose time refines the curve; looking at every one would cost as much as drafting
_LOOK_FIRST = 8  # passes of a size that are looked at all the same: the curve may be of another hour of this machine
_FIRST_PASSES = 8.0  # passes that the starting price is worth
_SHOWN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 60)
_RARELY = 1.1  # rows a pass below which speculation is as good as off
_NEAR_FREE = 2.0  # times T(1) that eight rows may cost for mask rows to have a chance


class Planner:
    """Turns measured times into the price a drafter plans with.

    A plan is worth its expected tokens minus the price times its milliseconds, where the price is the speed that this
    device and text reach in the long run (Dinkelbach's form of tokens per time). That also prices what only pays later,
    the masks. A plan of one row is always among those compared, so nothing is drafted where nothing pays.

    Attributes:
        curve: T(n), refined by every pass.
    """

    def __init__(self, curve: CostCurve, *, refine: bool = True) -> None:
        """``refine`` False: the curve stays as it is, for a simulated device."""
        self.curve = curve
        self._refine = refine
        self._tokens = 0.0
        self._ms = 0.0
        self._n_passes = 0
        self._n_looks: dict[int, int] = {}  # by rows
        self._last_rows = 0  # of the last pass, 0 = there was none

    @property
    def masks_may_pay(self) -> bool:
        """Whether rows are so cheap here that mask rows, which only guess, can be worth theirs."""
        return self.curve.ratio(8, 0) < _NEAR_FREE

    def cost(self, rows: int, context: int, *, shared: bool = False) -> FloatArray:
        """float32[rows], milliseconds of a pass of 1, 2, ... rows after ``context`` tokens and the last pass.

        A pass of another size than the last one costs ``curve.switch_ms`` more. So single drafts that hardly pay are
        not made, and where drafts pay, passes tend to keep their size.

        Args:
            shared: several sessions share the pass, so that none of them decides about its size.
        """
        return self.curve.table(context, rows, 0 if shared else self._last_rows)[1:]

    def price(self, context: int) -> float:
        """Tokens that a millisecond is worth now: at least what plain decoding makes of it."""
        one = self.curve.ms(1, context)
        return max(1.0 / one, (self._tokens + _FIRST_PASSES) / (self._ms + _FIRST_PASSES * one))

    def observe(self, rows: int, context: int, ms: float, tokens: int) -> None:
        """Learn from a pass: its rows (re-fed ones included), the tokens before it, its time and what it committed.

        The price is kept in the curve's time, not in the clock's, so that a disturbed pass does not change it.
        """
        switch_ms = self.curve.switch_now if self._last_rows not in (0, rows) else 0.0
        self._last_rows = rows
        self._tokens = _MEMORY * self._tokens + tokens
        self._ms = _MEMORY * self._ms + self.curve.ms(rows, context) + switch_ms
        self._n_passes += 1
        looks = self._n_looks.get(rows, 0)
        if self._refine and (looks < _LOOK_FIRST or self._n_passes % _LOOK_EVERY == 0):
            self._n_looks[rows] = looks + 1
            self.curve.observe(rows, context, ms - switch_ms)

    def explain(self, stats: GenerationStats, context: int) -> dict[str, Any]:
        """What passes cost around ``context`` tokens, what that saved, and why little was drafted if so; JSON-ready."""
        one = self.curve.ms(1, context)
        plain_ms = one * stats.committed_tokens
        return {
            "cost": {str(rows): round(self.curve.ms(rows, context), 3) for rows in _SHOWN},
            "switch_ms": round(self.curve.switch_ms, 3),
            "price": round(self.price(context), 5),
            "plain_ms": round(plain_ms, 1),
            "saved_ms": round(plain_ms - stats.decode_ms, 1),
            "reason": self._reason(stats, context),
        }

    def _reason(self, stats: GenerationStats, context: int) -> str | None:
        if stats.note is not None:
            return stats.note
        if stats.passes and stats.rows_per_pass < _RARELY:
            ratio = self.curve.ratio(2, context)
            return (
                f"a second row costs {ratio - 1:.2f} of a pass here, and few drafts were likely enough to be worth it"
            )
        return None
