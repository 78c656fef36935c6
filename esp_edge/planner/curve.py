"""T(n): the time of a pass of n rows on this device, by context length; measured once, corrected by every pass."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from esp_edge.config import MAX_BLOCK
from esp_edge.errors import ConfigError
from esp_edge.planner.online import OnlineCost
from esp_edge.tree import FloatArray

__all__ = ["CONTEXT_STEP", "CostCurve", "Points", "extend", "isotonic"]

Points = Mapping[int, Mapping[int, float]]  # context -> rows -> milliseconds
CONTEXT_STEP = 256  # llama.cpp pads the KV cells that attention walks to this; one table serves all contexts of a step

_VERSION = 2
_Floats = npt.NDArray[np.float64]
_CACHED_TABLES = 256
_STALE = 0.01  # relative change of a size's time after which tables are built anew
_LEAST = 0.5  # of the reference: what a context shorter than every measured one may cost at least


class CostCurve:
    """T(rows, context) in milliseconds, never falling with the rows.

    Between two measured sizes, and two measured contexts, it runs straight; beyond the largest size with the slope of
    the upper half, beyond the longest context with the growth between the last two. One context tells nothing about
    growth, and is taken for all. :meth:`observe` refines it (:mod:`esp_edge.planner.online`).

    >>> curve = CostCurve({256: {1: 7.0, 2: 11.0, 4: 15.0, 8: 23.0}})
    >>> curve.ms(1, 100), curve.ms(3, 100), curve.ms(16, 100)
    (7.0, 13.0, 39.0)

    Args:
        points: context -> rows -> milliseconds as measured. The context with the most sizes gives the shape; the others
            may have few sizes, they only say how it grows.
        own: logarithms of what passes corrected at each size of that context, from an earlier run.
        spread: how many times the best time of a size its next one was; well above 1, other programs disturbed.
        switch_ms: what a pass costs on top when the one before it had another number of rows: the points are of passes
            that follow one of their own size, for which llama.cpp keeps its graph of computations.

    Raises:
        ConfigError: no point, or one that is no positive time of a positive number of rows.
    """

    def __init__(
        self, points: Points, own: Sequence[float] | None = None, *, spread: float = 1.0, switch_ms: float = 0.0
    ) -> None:
        _check(points)
        if not 0.0 <= switch_ms < math.inf:
            raise ConfigError(f"the cost of another number of rows is at least 0 ms, but {switch_ms} was found")
        self.spread = spread
        self.switch_ms = switch_ms
        self._points = {context: dict(sorted(points[context].items())) for context in sorted(points)}
        reference = max(self._points.values(), key=len)
        self._sizes = np.array(list(reference), np.int64)
        self._reference = np.array(list(reference.values()), np.float64)
        self._contexts = [float(context) for context in self._points]
        self._growth = np.stack([self._growth_of(found) for found in self._points.values()])
        if own is not None and len(own) != len(self._sizes):
            raise ConfigError(f"a cost curve of {len(self._sizes)} sizes cannot have {len(own)} corrections")
        self._online = OnlineCost(list(reference), own)
        self._factor = np.exp(self._online.log_factor)
        self._tables: dict[tuple[int, int, int], FloatArray] = {}

    @classmethod
    def flat(cls, ms: float = 1.0) -> CostCurve:
        """A device on which rows are free, T(n) = T(1): what a large GPU comes close to."""
        return cls({0: {1: ms, MAX_BLOCK: ms}})

    @property
    def points(self) -> dict[int, dict[int, float]]:
        """Context -> rows -> milliseconds as measured; a copy."""
        return {context: dict(found) for context, found in self._points.items()}

    @property
    def drift(self) -> float:
        """How much slower than measured the machine is now; 1 = as measured."""
        return math.exp(self._online.drift)

    @property
    def switch_now(self) -> float:
        """What another number of rows than before costs now, in milliseconds."""
        return self.switch_ms * self.drift

    def ms(self, rows: int, context: int) -> float:
        """Milliseconds of a pass of ``rows`` rows (>= 1, re-fed ones included) after ``context`` tokens."""
        return float(self.table(context, max(rows, 1))[max(rows, 1)])

    def ratio(self, rows: int, context: int) -> float:
        """T(rows) / T(1): the tau from which a pass of ``rows`` rows pays."""
        return self.ms(rows, context) / self.ms(1, context)

    def table(self, context: int, n_max: int = MAX_BLOCK, last_rows: int = 0) -> FloatArray:
        """float32[n_max + 1], read-only: milliseconds by rows, 0 for none. The same for :data:`CONTEXT_STEP` tokens.

        Args:
            last_rows: of the pass before, so that every other number costs the switch as well; 0 = none of them does.
        """
        key = max(context, 0) // CONTEXT_STEP, max(n_max, MAX_BLOCK), last_rows if self.switch_ms else 0
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) >= _CACHED_TABLES:
                self._tables.clear()
            found = self._tables[key] = self._build(*key)
        return found[: n_max + 1]

    def observe(self, rows: int, context: int, ms: float) -> None:
        """Learn from a pass: its rows (re-fed ones included), the tokens before it and what :meth:`ms` predicts.

        A time that is none is left out, so a caller need not look at its clock twice.
        """
        if rows < 1 or not 0.0 < ms < math.inf:
            return
        measured = float(extend(self._sizes, self._measured(context), np.array([rows]))[0])
        self._online.observe(rows, math.log(ms / measured))
        factor = np.exp(self._online.log_factor)
        if np.abs(factor / self._factor - 1.0).max() > _STALE:
            self._factor = factor
            self._tables.clear()
        else:  # the drift is in the cost of a switch
            self._tables = {key: table for key, table in self._tables.items() if key[-1] == 0}

    # -- storing ---------------------------------------------------------------------------------------------------

    def to_document(self) -> dict[str, Any]:
        """JSON-ready: the points and what passes corrected; how slow the machine was meanwhile is left out."""
        return {
            "version": _VERSION,
            "points": {str(c): {str(n): round(ms, 5) for n, ms in found.items()} for c, found in self._points.items()},
            "own": [round(value, 5) for value in self._online.own.tolist()],
            "switch_ms": round(self.switch_ms, 5),
        }

    @classmethod
    def from_document(cls, document: Any) -> CostCurve:
        """The curve of :meth:`to_document`.

        Raises:
            ConfigError: it is none.
        """
        try:
            if document["version"] != _VERSION:
                raise ConfigError(
                    f"a cost curve of version {_VERSION} is needed, but {document['version']!r} was found"
                )
            points = {int(c): {int(n): float(ms) for n, ms in found.items()} for c, found in document["points"].items()}
            own = [float(value) for value in document["own"]]
            if not all(abs(value) < 3.0 for value in own):
                raise ConfigError("a cost curve's corrections are logarithms below 3: measure again with esp-edge tune")
            return cls(points, own, switch_ms=float(document["switch_ms"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise ConfigError("this document is no cost curve: measure again with esp-edge tune") from None

    # -- building --------------------------------------------------------------------------------------------------

    def _growth_of(self, found: Mapping[int, float]) -> _Floats:
        """float64[len(sizes)], milliseconds that another context adds to the reference.

        Attention grows smoothly with the rows, so the stairs of the reference stay although ``found`` skips sizes.
        """
        sizes = np.array(list(found), np.int64)
        base = extend(self._sizes, self._reference, sizes)
        return extend(sizes, np.array(list(found.values())) - base, self._sizes)

    def _measured(self, context: float) -> _Floats:
        """float64[len(sizes)], milliseconds at a context, as measured."""
        if len(self._contexts) == 1:
            return self._reference
        left = max(0, min(bisect_left(self._contexts, context) - 1, len(self._contexts) - 2))
        first, second = self._contexts[left], self._contexts[left + 1]
        part = (context - first) / (second - first)
        growth = self._growth[left] + part * (self._growth[left + 1] - self._growth[left])
        times: _Floats = np.maximum(self._reference + growth, _LEAST * self._reference)
        return times

    def _build(self, step: int, n_max: int, last_rows: int) -> FloatArray:
        if last_rows:
            switch_ms = np.float32(self.switch_now)
            table = self.table(step * CONTEXT_STEP, n_max) + switch_ms
            table[last_rows : last_rows + 1] -= switch_ms
        else:
            knots = isotonic(self._measured(step * CONTEXT_STEP + CONTEXT_STEP // 2) * self._factor)
            table = extend(self._sizes, knots, np.arange(n_max + 1)).astype(np.float32)
        table[0] = 0.0
        table.setflags(write=False)
        return table


def _check(points: Points) -> None:
    if not points or not all(points.values()):
        raise ConfigError("a cost curve needs at least one measured size")
    for context, found in points.items():
        for rows, ms in found.items():
            if context < 0 or rows < 1 or not 0.0 < ms < math.inf:
                raise ConfigError(
                    f"a cost curve needs positive times of positive sizes, but {ms} ms for {rows} rows at context "
                    f"{context} was found"
                )


def extend(sizes: npt.NDArray[np.int64], values: _Floats, wanted: npt.NDArray[np.int64]) -> _Floats:
    """Values at other sizes: straight lines in between, the first one below, beyond with the slope of the upper half.

    One size alone is taken as proportional: without a second measurement, rows are not free.

    Args:
        sizes: int64[n], rising.
        values: float64[n].
        wanted: int64[m].

    Returns:
        float64[m].
    """
    last = int(sizes[-1])
    if len(sizes) == 1:
        slope = float(values[0]) / last
    else:
        middle = min(int(np.searchsorted(sizes, last / 2)), len(sizes) - 2)
        slope = max(0.0, float(values[-1] - values[middle]) / (last - int(sizes[middle])))
    inside: _Floats = np.interp(wanted, sizes, values)
    return inside + slope * np.maximum(wanted - last, 0)


def isotonic(values: _Floats) -> _Floats:
    """float64[n], the nearest sequence that never falls: neighbours out of order share their mean."""
    means: list[float] = []
    counts: list[int] = []
    for value in values.tolist():
        mean, count = value, 1
        while means and means[-1] > mean:
            mean = (mean * count + means[-1] * counts[-1]) / (count + counts[-1])
            count += counts.pop()
            means.pop()
        means.append(mean)
        counts.append(count)
    return np.repeat(means, counts)
