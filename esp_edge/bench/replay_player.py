"""One drafter on its way through recorded answers, and what is counted of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from esp_edge.bench.calibration import BANDS, Calibration
from esp_edge.bench.replay_view import RecordedOutputs, accepted_chain
from esp_edge.bench.results import Record, Turn
from esp_edge.bench.simulate import Device, PerfectDrafts
from esp_edge.bench.summary import ALL, summary_rows
from esp_edge.bench.trace_file import MaskRows, Recording, TraceSettings, is_frozen
from esp_edge.config import MAX_BLOCK, MAX_EXACT_BLOCK
from esp_edge.drafters.base import Budget, Drafter
from esp_edge.drafters.fused import FusedDrafter
from esp_edge.errors import ConfigError
from esp_edge.metrics import GenerationStats
from esp_edge.planner.plan import Planner
from esp_edge.tree import DraftTree, Verdict
from esp_edge.verify import verify

__all__ = ["REJECTED", "Draft", "Player", "Replayed", "record_it", "what_is_recorded"]

_MAX_EXACT_ROWS = MAX_EXACT_BLOCK + 3
_TIMED = ("_per_second", "speedup", "_ms", "identical", "near_ties", "repeats")  # what a replay cannot tell
REJECTED = "learns from the rows of rejected drafts too, which a trace does not have: tau comes out too low"
_PADDED = "asked for more candidates than the trace has: record with a larger --top"
_NEAREST = "read mask rows whose vectors are some tokens newer or older than in a live run"


@dataclass(slots=True)
class Replayed:
    """One drafter's counters over all answers.

    Attributes:
        label, block_complexity: of the drafter.
        exact: whether a live run has the same counters, as far as the drafter's kind tells.
        bound: whether it is no drafter but a bound, which knows what will be accepted.
        records: one a question; those of questions with an error have no turns. Times are those of the simulated
            device, 0 without one.
        plain_ms: question id -> what plain decoding takes on the simulated device for the same tokens.
        calibration: of ``auto``'s predictions; empty for other drafters.
        notes: why the counters are not those of a live run.
    """

    label: str
    block_complexity: int
    exact: bool
    bound: bool = False
    records: dict[int | str, Record] = field(default_factory=dict)
    plain_ms: dict[int | str, float] = field(default_factory=dict)
    calibration: Calibration = field(default_factory=Calibration)
    notes: set[str] = field(default_factory=set)

    def rows(self) -> list[dict[str, Any]]:
        """A summary row a category, then the one of all; as in ``replay.json``."""
        unit = (self.label, self.block_complexity)
        rows = summary_rows({record.unit: record for record in self.records.values()}, {}, [unit])
        more = {
            "exact": self.exact and not self.notes,
            "bound": self.bound,
            "note": "; ".join(sorted(self.notes)) or None,
        }
        return [
            {name: row[name] for name in row if not any(part in name for part in _TIMED)}
            | more
            | {"simulated_speed": self._speed(row["category"])}
            for row in rows
        ]

    def _speed(self, category: str) -> float | None:
        """Plain decoding's time over this drafter's on the simulated device; None without one."""
        chosen = [record for record in self.records.values() if category in (ALL, record.category)]
        ours = sum(turn.decode_ms for record in chosen for turn in record.turns)
        plain = sum(self.plain_ms.get(record.question_id, 0.0) for record in chosen)
        return round(plain / ours, 6) if ours else None

    @property
    def total(self) -> dict[str, Any]:
        """The row of all categories.

        Raises:
            ConfigError: no answer was replayed.
        """
        row = next((row for row in self.rows() if row["category"] == ALL), None)
        if row is None:
            raise ConfigError("the trace has no answer to replay: record some questions with bench trace")
        return row

    @property
    def tau(self) -> float:
        """Tokens per decode pass, over all answers."""
        return float(self.total["tau"])

    def add(self, recording: Recording, stats: GenerationStats | None) -> None:
        """Count an answer; None = it has an error."""
        found = self.records.get(recording.question_id)
        if found is None:
            settings = recording.settings
            found = Record(
                model=settings.model,
                quant=settings.quant,
                repeat=0,
                question_id=recording.question_id,
                category=recording.category,
                drafter=self.label,
                block_complexity=self.block_complexity,
                turns=(),
            )
        if stats is None:
            found = replace(found, turns=(), error=recording.error)
        else:
            turn = Turn.from_stats(recording.token_ids, recording.finish_reason, stats)
            found = replace(found, turns=(*found.turns, turn), mask_init=stats.mask_init)
        self.records[recording.question_id] = found


@dataclass(frozen=True, slots=True)
class Draft:
    """What makes the trees, as a session holds it.

    Attributes:
        drafter: follows the protocol.
        planner: what a pass costs; None = the drafter does not ask.
        rows: most rows of a planned tree.
        wasteless: a bound: a pass is charged for the rows of its accepted nodes and the root alone.
    """

    drafter: Drafter
    planner: Planner | None = None
    rows: int = MAX_BLOCK
    wasteless: bool = False


class Player:
    """A drafter on its way through answers. In a question it lives on, and ``begin`` decides what it still knows."""

    def __init__(
        self,
        make: Callable[[], Draft],
        replayed: Replayed,
        masks: str | None,
        sequences: int,
        *,
        keep: bool,
        teach_prompt: bool,
        device: Device | None = None,
    ) -> None:
        """``keep``: one drafter for all questions, else each has a new one, as it has a session of its own."""
        self.replayed = replayed
        self._make = make
        self._draft = make()
        self._masks = masks
        self._frozen = masks is not None and is_frozen(masks)
        self._sequences = sequences
        self._keep = keep
        self._teach = teach_prompt
        self._device = device

    def play(self, recording: Recording) -> None:
        """Draft along an answer and count the passes."""
        if recording.turn == 0 and not self._keep:
            self._draft = self._make()
        if recording.error is not None:
            self.replayed.add(recording, None)
            return
        drafter = self._draft.drafter
        if isinstance(drafter, PerfectDrafts):
            drafter.know(recording.token_ids)
        before = _rated(drafter)
        stats = self._answer(recording)
        self.replayed.add(recording, stats)
        if isinstance(drafter, FusedDrafter):
            self.replayed.calibration.rated.add(_rated(drafter) - before)
        if self._device is not None:
            first = len(recording.prompt_ids) - 1 + stats.prefill_tokens
            plain_ms = self._device.plain_ms(first, stats.committed_tokens)
            known = self.replayed.plain_ms.get(recording.question_id, 0.0)
            self.replayed.plain_ms[recording.question_id] = known + plain_ms

    def _answer(self, recording: Recording) -> GenerationStats:
        tokens, n_prompt, drafter = recording.token_ids, len(recording.prompt_ids), self._draft.drafter
        limit = min(recording.settings.n_ctx - n_prompt, recording.settings.max_tokens)
        last = tokens[-1] if recording.finish_reason == "stop" else -1  # no other token ends an answer
        stats = GenerationStats(drafter.name, prompt_tokens=n_prompt, mask_init=self._masks)
        drafter.begin(recording.prompt_ids)
        self._teach_prompt(recording)
        tree, done, refed = drafter.probe(), 0, 0
        if limit == 1 or tree.n_rows > self._budget(recording, done, limit, 0).rows:
            tree = DraftTree.root_only(recording.prompt_ids[-1])
        while True:
            verdict = verify(
                tree,
                lambda _row, position: tokens[position - n_prompt],
                position=n_prompt + done,
                limit=min(limit, len(tokens)) - done,
                is_end=lambda token: token == last,
            )
            self._count(stats, tree, verdict, refed, n_prompt + done - 1 - refed)
            n_tokens = len(verdict.token_ids)
            if done + n_tokens == len(tokens):
                return stats
            chain, verdict_of_chain = accepted_chain(tree, verdict)
            outputs = self._outputs(recording, done, chain)
            drafter.observe(chain, outputs, verdict_of_chain)
            if outputs.padded:
                self.replayed.notes.add(_PADDED)
            done, refed = done + n_tokens, _n_refed(recording.settings, verdict)
            tree = drafter.draft(self._budget(recording, done, limit, refed))

    def _teach_prompt(self, recording: Recording) -> None:
        learn = getattr(self._draft.drafter, "learn_prompt", None) if self._teach else None
        if learn is not None:
            rows = recording.prompt
            learn(np.array(recording.prompt_ids[:-1], np.int32), rows.ids, rows.log_probs)

    def _count(self, stats: GenerationStats, tree: DraftTree, verdict: Verdict, refed: int, n_past: int) -> None:
        """Count a pass after ``n_past`` tokens; one of the prefill has no time and teaches no planner."""
        n_accepted, n_tokens = len(verdict.path), len(verdict.token_ids)
        rows = tree.n_rows
        if self._draft.wasteless:
            rows, refed = n_accepted + 1, 0
        if stats.prefill_tokens:
            self._time(stats, rows + refed, n_past)
            self._plan_after(tree.n_rows + refed, n_past, n_tokens)
            if isinstance(self._draft.drafter, FusedDrafter):
                self.replayed.calibration.note_pass(tree, verdict)
        stats.count(rows, tree.depths.tolist(), [i < n_accepted for i in range(n_tokens)])

    def _time(self, stats: GenerationStats, rows: int, n_past: int) -> None:
        device = self._device
        if device is None:
            return
        model_ms = device.model_ms(rows, n_past)
        stats.model_ms += model_ms
        stats.decode_ms += model_ms + device.host_ms(drafts=self._draft.drafter.name != "none")

    def _plan_after(self, rows: int, n_past: int, n_tokens: int) -> None:
        """Tell the planner of a pass; it took as long as the curve says."""
        planner = self._draft.planner
        if planner is not None:
            planner.observe(rows, n_past, planner.curve.ms(rows, n_past), n_tokens)

    def _budget(self, recording: Recording, done: int, limit: int, refed: int) -> Budget:
        """As in ``Session``: the context's end, what a pass may hold, and the tokens still wanted."""
        settings = recording.settings
        n_free = settings.n_ctx - (len(recording.prompt_ids) + done - 1)
        rows = min(n_free - 1, _MAX_EXACT_ROWS - refed) if settings.exact else min(n_free, MAX_BLOCK)
        rows, planner = max(1, rows), self._draft.planner
        if planner is None:
            return Budget(rows=rows, depth=limit - done - 1, sequences=self._sequences)
        n_past = len(recording.prompt_ids) + done - 1 - refed
        cost = planner.cost(min(rows, self._draft.rows) + refed, n_past)[refed:]
        return Budget(rows, limit - done - 1, self._sequences, cost, planner.price(n_past))

    def _outputs(self, recording: Recording, done: int, chain: DraftTree) -> RecordedOutputs:
        nodes = slice(done, done + chain.n_nodes)
        ids, log_probs = recording.roots.ids[nodes], recording.roots.log_probs[nodes]
        n_masks = int(chain.masks[-1])
        if n_masks == 0:
            return RecordedOutputs(ids, log_probs)
        rows = self._mask_rows(recording, n_masks)
        lag = chain.n_nodes - 1
        place, found = rows.find(done + lag, 0 if self._frozen else lag)
        if found != lag and not self._frozen:
            self.replayed.notes.add(_NEAREST)
        return RecordedOutputs(
            np.concatenate([ids, rows.ids[place, :n_masks]]),
            np.concatenate([log_probs, rows.log_probs[place, :n_masks]]),
        )

    def _mask_rows(self, recording: Recording, n_masks: int) -> MaskRows:
        settings = recording.settings
        rows = recording.masks.get(self._masks or "")
        if rows is None or n_masks > settings.masks:
            raise ConfigError(
                f"the drafter asks for {n_masks} masks of {self._masks}, but {what_is_recorded(settings)}; "
                f"{record_it(settings, self._masks or '', n_masks)}"
            )
        return rows


def _n_refed(settings: TraceSettings, verdict: Verdict) -> int:
    """Accepted nodes that ``Step.commit`` drops and feeds again: all from the first that does not follow directly."""
    if not settings.in_order:
        return 0
    kept = 0
    while kept < len(verdict.path) and verdict.path[kept] == kept + 1:
        kept += 1
    return len(verdict.path) - kept


def _rated(drafter: Drafter) -> Any:
    """float64[10, 3], predicted, hits and candidates so far; zeros for drafters that do not tell."""
    return np.array(drafter.core.reliability() if isinstance(drafter, FusedDrafter) else np.zeros((BANDS, 3)))


def what_is_recorded(settings: TraceSettings) -> str:
    """Of masks, for messages."""
    inits = ", ".join(settings.mask_inits) or "none"
    return f"the trace has {settings.masks} masks of {inits}"


def record_it(settings: TraceSettings, label: str, masks: int) -> str:
    """What to do to have these masks recorded, too."""
    inits = dict.fromkeys([*settings.mask_inits, *([label] if label else [])])
    return f"record it with bench trace --mask-init {','.join(inits)} --masks {max(masks, settings.masks)}"
