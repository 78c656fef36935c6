"""Predicted against observed acceptance of ``auto``'s candidates, per tenth of the predicted probability.

Two sets of candidates, both of nodes that were reached, so that the model's choice is known. *Rated*: everything that
any source proposed there, in the tree or not; the weights learn from these. *Drafted*: those that were in the tree; the
planner stakes rows on these, and they were chosen for being likely.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from esp_edge.tree import DraftTree, Verdict

__all__ = ["BANDS", "Calibration", "Tally"]

BANDS = 10
_Sums: TypeAlias = npt.NDArray[np.float64]


@dataclass(slots=True)
class Tally:
    """Sums of one set of candidates.

    Attributes:
        sums: float64[BANDS, 3]: predicted probabilities, hits, candidates.
    """

    sums: _Sums = field(default_factory=lambda: np.zeros((BANDS, 3)))

    def add(self, sums: Iterable[Sequence[float]]) -> None:
        """Add sums of the same form, such as those of the compiled drafter."""
        self.sums += np.array(list(sums), np.float64)

    def note(self, predicted: float, hit: bool) -> None:
        """Add one candidate."""
        band = min(BANDS - 1, int(predicted * BANDS))
        self.sums[band] += (predicted, float(hit), 1.0)

    def document(self) -> dict[str, Any]:
        """``bands``, those with candidates, and the largest gap among them; JSON-ready."""
        bands = [
            {
                "from": band / BANDS,
                "to": (band + 1) / BANDS,
                "predicted": round(predicted / n, 4),
                "observed": round(hits / n, 4),
                "candidates": int(n),
            }
            for band, (predicted, hits, n) in enumerate(self.sums.tolist())
            if n
        ]
        gaps = [abs(band["predicted"] - band["observed"]) for band in bands]
        return {"bands": bands, "largest_gap": round(max(gaps, default=0.0), 4)}


@dataclass(slots=True)
class Calibration:
    """What ``auto`` predicted, and what came of it.

    Attributes:
        rated, drafted: the two sets of candidates.
    """

    rated: Tally = field(default_factory=Tally)
    drafted: Tally = field(default_factory=Tally)

    def note_pass(self, tree: DraftTree, verdict: Verdict) -> None:
        """Count the drafts below every reached node; a node's own probability is its path's over its parent's."""
        reached = {node: verdict.token_ids[depth] for depth, node in enumerate((0, *verdict.path))}
        probs, tokens = tree.probs.tolist(), tree.token_ids.tolist()
        for node, parent in enumerate(tree.parents.tolist()):
            if parent in reached and probs[parent] > 0:
                self.drafted.note(min(1.0, probs[node] / probs[parent]), tokens[node] == reached[parent])

    def document(self) -> dict[str, Any] | None:
        """Both sets, JSON-ready; None before any candidate."""
        if not self.rated.sums[:, 2].any():
            return None
        return {"rated": self.rated.document(), "drafted": self.drafted.document()}
