"""Counters of one generation. Only emitted tokens count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["GenerationStats"]


@dataclass(slots=True)
class GenerationStats:
    """Running statistics; times in milliseconds.

    The first pass belongs to the prefill: it is neither in ``passes`` nor in ``decode_ms``, and the token it
    commits counts in ``prefill_tokens`` (algorithms E: tau excludes the prefill pass).

    Attributes:
        passes: decode passes.
        rows: rows of the decode passes together.
        draft_tokens: draft nodes verified.
        accepted_tokens: draft nodes whose token was emitted.
        committed_tokens: tokens emitted by decode passes, bonus tokens included.
        accepted_by_depth: passes in which depth d + 1 was accepted.
        drafted_by_depth: passes whose tree reached depth d + 1.
        drafted_by_source, accepted_by_source: draft nodes, and those emitted, by the source that proposed them.
        sizes: rows of a pass -> how many decode passes had that many.
        model_ms: inside llama.cpp, decode passes only.
        decode_ms: the whole decode loop, so host time is ``decode_ms - model_ms``.
    """

    drafter: str = "none"
    block_complexity: int = 1
    masks: int = 0
    mask_init: str | None = None
    seed: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    passes: int = 0
    rows: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    committed_tokens: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    model_ms: float = 0.0
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted_by_depth: list[int] = field(default_factory=list)
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    note: str | None = None

    @property
    def tau(self) -> float:
        """Tokens committed per decode pass, bonus included; 0 before the first pass."""
        return self.committed_tokens / self.passes if self.passes else 0.0

    @property
    def rows_per_pass(self) -> float:
        """Mean block complexity actually used."""
        return self.rows / self.passes if self.passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed, prefill excluded."""
        return 1000.0 * self.committed_tokens / self.decode_ms if self.decode_ms else 0.0

    @property
    def host_ms_per_pass(self) -> float:
        """Time of a decode pass outside llama.cpp."""
        return (self.decode_ms - self.model_ms) / self.passes if self.passes else 0.0

    @property
    def model_ms_per_pass(self) -> float:
        """Time of a decode pass inside llama.cpp."""
        return self.model_ms / self.passes if self.passes else 0.0

    def count(
        self,
        n_rows: int,
        depths: Sequence[int],
        accepted: Sequence[bool],
        drafted_from: Sequence[str] = (),
        accepted_from: Sequence[str] = (),
    ) -> None:
        """Count a pass: its rows, the depth of every node (root first), and which emitted tokens were drafts.

        Args:
            drafted_from: source of every node; accepted_from: of every emitted token; "" = none.
        """
        if self.prefill_tokens == 0:
            self.prefill_tokens = len(accepted)
            return
        n_accepted = sum(accepted)
        self.passes += 1
        self.rows += n_rows
        self.sizes[n_rows] = self.sizes.get(n_rows, 0) + 1
        for counts, names in ((self.drafted_by_source, drafted_from), (self.accepted_by_source, accepted_from)):
            for name in names:
                if name:
                    counts[name] = counts.get(name, 0) + 1
        self.draft_tokens += len(depths) - 1
        self.accepted_tokens += n_accepted
        self.committed_tokens += len(accepted)
        for by_depth, reached in ((self.drafted_by_depth, max(depths)), (self.accepted_by_depth, n_accepted)):
            by_depth.extend([0] * (reached - len(by_depth)))
            for depth in range(reached):
                by_depth[depth] += 1

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, in the order people read it."""
        return {
            "drafter": self.drafter,
            "block_complexity": self.block_complexity,
            "masks": self.masks,
            "mask_init": self.mask_init,
            "passes": self.passes,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "tau": round(self.tau, 4),
            "rows_per_pass": round(self.rows_per_pass, 3),
            "prefill_ms": round(self.prefill_ms, 3),
            "decode_ms": round(self.decode_ms, 3),
            "host_ms_per_pass": round(self.host_ms_per_pass, 4),
            "model_ms_per_pass": round(self.model_ms_per_pass, 4),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "cached_tokens": self.cached_tokens,
            "accepted_by_depth": list(self.accepted_by_depth),
            "drafted_by_depth": list(self.drafted_by_depth),
            "drafted_by_source": dict(self.drafted_by_source),
            "accepted_by_source": dict(self.accepted_by_source),
            "sizes": {str(rows): n for rows, n in sorted(self.sizes.items())},
            "seed": self.seed,
            "note": self.note,
        }
