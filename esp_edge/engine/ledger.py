"""What the drafts of shared passes cost and brought by the clock, and what that makes of the price of a row.

A cost curve is of another hour, of one session alone, and corrected by a pass now and then. Where several sessions
share a pass, a row is worth so little more than it costs that an error of a few percent turns a gain into a loss. So
drafts are also compared with what they are an alternative to: the passes, in the same seconds, in which nobody drafted.
"""

from __future__ import annotations

import math

__all__ = ["Ledger"]

_MEMORY = 0.8  # of the time of a pass without drafts
_STEP = 0.03  # of the factor's logarithm, for a token lost
_FADE = 0.995  # of the logarithm, a pass: drafts that lost are tried again, some hundred passes later
_MOST = math.log(8.0)
_LARGEST = 1.0  # extra time that a pass is believed, in passes without drafts: more is a disturbance


class Ledger:
    """Raises the price of a row while drafts lose time, and lets it fall again.

    >>> ledger = Ledger()
    >>> ledger.observe(8, 8, 50.0, 8)  # eight sessions, nobody drafts: a token takes 6.25 ms
    >>> ledger.observe(8, 12, 75.0, 9)  # four rows more: 25 ms, worth four tokens, brought one
    >>> round(ledger.factor, 3)
    1.094

    Attributes:
        factor: times the planner's price; 1 = drafts keep what they promise, or nothing is known.
    """

    def __init__(self) -> None:
        self._plain_ms: dict[int, float] = {}  # by sessions
        self._log = 0.0

    @property
    def factor(self) -> float:
        """Times the planner's price."""
        return math.exp(self._log)

    def observe(self, n_sessions: int, rows: int, ms: float, tokens: int) -> None:
        """Take up a pass: its sessions, its rows (re-fed ones included: drafts are why), its time and its tokens."""
        self._log *= _FADE
        plain = self._plain_ms.get(n_sessions)
        if rows == n_sessions:
            self._plain_ms[n_sessions] = ms if plain is None else _MEMORY * plain + (1.0 - _MEMORY) * ms
        elif plain:
            extra = min(ms / plain - 1.0, _LARGEST)
            lost = extra * n_sessions - (tokens - n_sessions)
            self._log = min(max(self._log + _STEP * lost, 0.0), _MOST)
