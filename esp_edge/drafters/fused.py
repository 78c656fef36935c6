"""``auto``: one draft tree from every free source, as large as its rows are worth on this device.

Sources: copying (what followed earlier occurrences of the end of the text), adjacency (the model's own best next
tokens the last times these tokens were a row), the ranks of the row that chose the root, and ESP masks, placed only
behind the likely anchors. The compiled ``FusedDrafter`` does the work; docs/how-it-works.md tells how.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np

from esp_edge._runtime import native
from esp_edge.config import FUSED_SOURCES, DraftConfig
from esp_edge.drafters.base import Budget
from esp_edge.masks import MaskVectors
from esp_edge.step import Outputs
from esp_edge.tree import DraftTree, FloatArray, Int32Array, Verdict

__all__ = ["FusedDrafter"]

SOURCES = ("", "suffix", "adjacency", "esp1", "esp2", "last")  # as the compiled core counts them
ROW_WIDTH = 16  # best next tokens read of every node
MASK_WIDTH = 48  # and of a mask
LEARNING_RATE = 0.02
MARGIN = 1.05  # times its price that a row must promise: predictions are best where they were chosen for being high
TRUST_MEMORY = 0.98  # a pass counts this much less with every later one
TRUST_PRIOR = 6.0  # tokens that the first trust is worth
FIRST_TRUST = 0.9  # share of its promise that a draft is believed to keep before there is proof
_VERSION = 2  # of what is stored: raise it when a feature changes
_NUMBERS_KEPT = ("weights", "corrections")


@lru_cache(maxsize=1)
def prior_weights() -> FloatArray:
    """float32[n]: the weights that were learned once, on questions that no benchmark reports (docs: benchmarks)."""
    text = resources.files("esp_edge.drafters").joinpath("fused_prior.txt").read_text("ascii")
    return np.array(text.split(), np.float32)


class FusedDrafter:
    """Follows the drafter protocol; what it learned stays for the next generation of the session.

    Attributes:
        core: the compiled drafter.
        n_learned: passes that were observed.
    """

    name = "auto"

    def __init__(self, config: DraftConfig, n_vocab: int, masks: MaskVectors | None, temperature: float = 0.0) -> None:
        """``masks`` None: the model cannot be probed, or probing cannot pay here; the other sources remain."""
        self._rows = config.rows
        self._keep = config.keep
        self._k = config.masks if masks is not None else 0
        self._masks = masks
        self._row_width = min(ROW_WIDTH, n_vocab)
        self._mask_width = min(MASK_WIDTH, n_vocab)
        self._root = 0
        self._promised = 0.0  # accepted tokens that the last tree was expected to bring
        self._predicted, self._accepted = TRUST_PRIOR, FIRST_TRUST * TRUST_PRIOR
        self.n_learned = 0
        self._expected: Int32Array = np.empty(0, np.int32)
        self.core = native.FusedDrafter()
        self.core.weights = prior_weights()
        self.core.set_learning(LEARNING_RATE if config.learn else 0.0, config.learn)
        wanted = config.sources.split("+") if config.sources else FUSED_SOURCES
        self.core.set_sources(*(name in wanted for name in FUSED_SOURCES))
        if "esp" not in wanted:
            self._k = 0
        self.core.set_apart(config.apart)
        self._dense = config.dense
        self.core.sampled(temperature, 0)

    def expect(self, token_ids: Sequence[int], temperature: float, seed: int) -> None:
        """What is known of the next answer: tokens that it may repeat, and how its tokens will be drawn."""
        self._expected = np.array(token_ids, np.int32)
        self.core.sampled(temperature, seed)

    def begin(self, token_ids: Sequence[int]) -> None:
        """Start a generation; its last token is the first root."""
        if self._masks is not None:
            self._masks.begin(token_ids)
        self._root = int(token_ids[-1])
        self._promised = 0.0
        self.core.begin(np.array(token_ids, np.int32), self._keep, self._expected)

    def learn_prompt(self, token_ids: Int32Array, ids: Int32Array, logprobs: FloatArray) -> None:
        """Best next tokens of the prompt's rows, the last one left out: int32[n] and [n, width] each; after begin."""
        del token_ids
        width = min(self._row_width, ids.shape[1])
        ids, logprobs = np.ascontiguousarray(ids[:, :width]), np.ascontiguousarray(logprobs[:, :width], np.float32)
        self.core.learn_prompt(0, ids, logprobs)

    def probe(self) -> DraftTree:
        """The root, with its masks where masks are used at all."""
        vectors = self._masks.vectors() if self._masks is not None else None
        return DraftTree.root_only(self._root, self._k, vectors[: self._k] if vectors is not None else None)

    def draft(self, budget: Budget) -> DraftTree:
        """The tree and the masks that are worth most at the price of their rows."""
        rows = min(self._rows, budget.rows)
        ids, parents, probs, masks, sources, expected = self.core.draft(
            rows, budget.depth, budget.sequences, self._k, budget.cost, self._price(budget), self._dense
        )
        self._promised = expected - 1.0
        vectors = self._masks.for_tree(ids, parents, masks) if self._masks is not None and any(masks.tolist()) else None
        names = tuple(SOURCES[source] for source in sources.tolist())
        return DraftTree(ids, parents, probs, masks, vectors, names)

    def _price(self, budget: Budget) -> float:
        """The price of a row, raised where drafts have lately been accepted less often than predicted.

        Candidates are drafted because their probability came out high, so those that are drafted disappoint a little
        even when all candidates together are calibrated, and in some texts more than in others.
        """
        trust = min(1.0, self._accepted / self._predicted)
        return budget.price * MARGIN / trust

    def observe(self, tree: DraftTree, outputs: Outputs, verdict: Verdict) -> None:
        """Learn what followed every node, and what the anchor's masks guess."""
        nodes, bonus = (tree.token_ids, tree.parents, tree.masks), verdict.bonus_token
        self.core.observe(outputs, *nodes, verdict.path, bonus, self._row_width, self._mask_width)
        if self._masks is not None:
            self._masks.commit(verdict.token_ids)
        # fading while nothing is drafted as well: drafts that disappointed are tried again later
        self._predicted = _faded(self._predicted, TRUST_PRIOR) + self._promised
        self._accepted = _faded(self._accepted, FIRST_TRUST * TRUST_PRIOR) + len(verdict.path)
        self._root = bonus
        self.n_learned += 1

    def explain(self) -> dict[str, Any]:
        """How good the predictions have been since the drafter was made, and what masks bring; JSON-ready."""
        bands = [
            {"predicted": round(predicted / n, 4), "observed": round(hits / n, 4), "candidates": int(n)}
            for predicted, hits, n in self.core.reliability()
            if n
        ]
        return {"calibration": bands, "mask_gain": round(self.core.mask_gain, 3) if self._k else None}

    def learned(self) -> dict[str, Any]:
        """The weights and what calibration observed, JSON-ready, for :meth:`recall` in another process."""
        numbers = {name: [round(float(x), 5) for x in getattr(self.core, name)] for name in _NUMBERS_KEPT}
        return {"version": _VERSION, **numbers}

    def recall(self, document: Any) -> None:
        """Take up what was stored; what is nothing of the kind, or of another version, is left alone."""
        if not isinstance(document, dict) or document.get("version") != _VERSION:
            return
        found: dict[str, FloatArray] = {}
        for name in _NUMBERS_KEPT:
            numbers = _numbers(document.get(name))
            if numbers is None or numbers.shape != getattr(self.core, name).shape:
                return
            found[name] = numbers
        if (found["corrections"] < 0.0).any():  # they are counts
            return
        for name, numbers in found.items():
            setattr(self.core, name, numbers)


def _numbers(stored: Any) -> FloatArray | None:
    """Stored numbers as float32[n]; None where they are none."""
    try:
        numbers = np.array(stored, np.float32)
    except (TypeError, ValueError, OverflowError):
        return None
    return numbers if np.isfinite(numbers).all() else None


def _faded(total: float, prior: float) -> float:
    """A sum of tokens that fades, down to what is believed without proof."""
    return prior + TRUST_MEMORY * (total - prior)
