"""The drafter protocol: what every draft source looks like to the session.

Lifecycle of one generation::

    drafter.begin(prompt_ids)             # the last prompt token is the first root
    loop:
        tree = drafter.draft(budget)      # rooted at the last committed token
        ... the session runs the pass and verifies ...
        drafter.observe(tree, outputs, verdict)

The first pass of a generation belongs to the prefill: its tree is ``drafter.probe()``, the root with masks
and no drafts (algorithms A.4). A drafter never sees rejected text as committed, and never owns KV cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from esp_edge.step import Outputs
from esp_edge.tree import DraftTree, FloatArray, Verdict

__all__ = ["Budget", "Drafter"]

_FREE: FloatArray = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a draft may use.

    Attributes:
        rows: rows of the pass, root and masks included.
        depth: deepest node; the root has depth 0. Bounded by the context end and by the tokens still wanted.
        sequences: owners plus leaves without masks.
        cost: float32[n], milliseconds of a pass of 1..n rows; empty = rows are free. Only ``auto`` reads it.
        price: tokens that a millisecond is worth.
    """

    rows: int
    depth: int
    sequences: int
    cost: FloatArray = field(default_factory=lambda: _FREE, repr=False, compare=False)
    price: float = 0.0


class Drafter(Protocol):
    """A draft source."""

    name: str

    def begin(self, token_ids: Sequence[int]) -> None:
        """Start a generation; ``token_ids`` is the whole prompt, its last token the first root."""

    def probe(self) -> DraftTree:
        """Tree of the first pass: the root, with masks where the drafter uses them, and no draft."""

    def draft(self, budget: Budget) -> DraftTree:
        """A tree rooted at the last committed token, within the budget (root only is always allowed)."""

    def observe(self, tree: DraftTree, outputs: Outputs, verdict: Verdict) -> None:
        """Learn from a pass before its outputs are gone."""
