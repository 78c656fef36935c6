"""What passes teach about their own cost: a drift that all sizes share, and each size's own deviation from the curve.

A pass that took longer than the curve says is dearer than was thought, or the machine is slower for a while. Only the
first may change a decision: a planner compares T(n) with T(1), and a machine that is twice as slow changes no ratio.
So a Kalman filter splits the logarithm of observed over measured time into ``drift + deviation(rows)``: the drift may
wander quickly; deviations are small, slow, and alike for neighbouring sizes. Sizes never seen follow the drift.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["OnlineCost"]

_Floats = npt.NDArray[np.float64]

_DRIFT_SPREAD, _DRIFT_MEMORY = 0.7, 1000  # standard deviation of a logarithm; passes until it is forgotten
_OWN_SPREAD, _OWN_MEMORY = 0.2, 4000
_OCTAVES = 1.0  # doublings of the size after which two deviations are nearly unrelated
_NOISE = 0.08  # of one pass
_OUTLIER = 3.0  # standard deviations beyond which a pass was disturbed
_INFLATION = 0.01  # how far a disturbed pass goes back to the first uncertainty: it may have been a change
_MOST = 3.0  # a logarithm: no pass counts for more than 20 times the measured time


class OnlineCost:
    """Drift and deviations over the sizes of a curve.

    Attributes:
        drift: logarithm of how much slower than measured the machine is now.
        own: float64[len(sizes)], logarithm of each size's own deviation from the curve.
    """

    def __init__(self, sizes: Sequence[int], own: Sequence[float] | None = None) -> None:
        self._octaves = np.log2(np.asarray(sizes, np.float64))
        n = len(sizes)
        self._mean = np.zeros(n + 1)
        if own is not None:
            self._mean[1:] = own
        self._prior = np.zeros((n + 1, n + 1))
        self._prior[0, 0] = _DRIFT_SPREAD**2
        distance = np.abs(self._octaves[:, None] - self._octaves[None, :])
        self._prior[1:, 1:] = _OWN_SPREAD**2 * np.exp(-distance / _OCTAVES)
        self._covariance = self._prior.copy()
        memory = np.full(n + 1, float(_OWN_MEMORY))
        memory[0] = _DRIFT_MEMORY
        self._keep = np.exp(-1.0 / memory)  # what was learned fades, so the uncertainty never reaches zero
        self._keep2 = np.outer(self._keep, self._keep)
        self._refill = self._prior * (1.0 - self._keep2)

    @property
    def drift(self) -> float:
        """Logarithm of how much slower than measured the machine is now."""
        return float(self._mean[0])

    @property
    def own(self) -> _Floats:
        """float64[len(sizes)], logarithm of each size's own deviation; a copy."""
        return self._mean[1:].copy()

    @property
    def log_factor(self) -> _Floats:
        """float64[len(sizes)], drift and deviation together; a copy."""
        factor: _Floats = self._mean[0] + self._mean[1:]
        return factor

    def observe(self, rows: int, log_ratio: float) -> None:
        """Learn from a pass of ``rows`` rows that took ``exp(log_ratio)`` times what was measured.

        A disturbed pass moves the drift alone, and no further than a pass at the edge of the usual would.
        """
        self._mean *= self._keep
        covariance = self._covariance = self._covariance * self._keep2 + self._refill
        seen = self._weights(rows)
        spread = covariance @ seen
        variance = float(seen @ spread) + _NOISE**2
        surprise = max(-_MOST, min(_MOST, log_ratio)) - float(seen @ self._mean)
        limit = _OUTLIER * math.sqrt(variance)
        if abs(surprise) > limit:
            self._mean[0] += spread[0] / variance * math.copysign(limit, surprise)
            self._covariance = covariance + _INFLATION * (self._prior - covariance)
            return
        self._mean += spread * (surprise / variance)
        self._covariance = covariance - np.outer(spread, spread) / variance

    def _weights(self, rows: int) -> _Floats:
        """float64[1 + len(sizes)], which part each state has in a pass: the drift, and the two sizes around it."""
        octave = math.log2(max(1, rows))
        weights = np.zeros(len(self._mean))
        weights[0] = 1.0
        right = int(np.searchsorted(self._octaves, octave))
        if right == 0 or right == len(self._octaves):
            weights[1 + min(right, len(self._octaves) - 1)] = 1.0
            return weights
        left = right - 1
        part = float((octave - self._octaves[left]) / (self._octaves[right] - self._octaves[left]))
        weights[1 + left], weights[1 + right] = 1.0 - part, part
        return weights
