"""``esp-edge bench replay``: run drafters along recorded answers, without the model.

Decoding is lossless, so the tokens are known, and verification is a comparison with them. After a pass the drafter sees
what the trace holds of it: the root, the accepted path, and the masks behind its end. That is all that ESP, PLD, suffix
and STAND read, and their counters are those of a live run. Token Recycling, RACER and ``auto`` also learn from the rows
of rejected drafts, which no trace has, so theirs come out too low. LADE lives on the rows of its window, which are no
tokens of the answer, so it cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from esp_edge.bench.results import Record, Turn
from esp_edge.bench.spec import Lane
from esp_edge.bench.summary import ALL, summary_rows
from esp_edge.bench.trace_file import MaskRows, Recording, Trace, TraceSettings, is_frozen, mask_label
from esp_edge.config import MAX_BLOCK, MAX_EXACT_BLOCK, DraftConfig
from esp_edge.drafters import make_drafter
from esp_edge.drafters.base import Budget, Drafter
from esp_edge.drafters.calibrate import split_candidate
from esp_edge.drafters.fused import FusedDrafter
from esp_edge.errors import ConfigError
from esp_edge.metrics import GenerationStats
from esp_edge.planner.curve import CostCurve
from esp_edge.planner.plan import Planner
from esp_edge.session import BATCH_SEQUENCES, sequences_for
from esp_edge.tree import DraftTree, FloatArray, Int32Array, Verdict
from esp_edge.verify import verify

__all__ = ["RecordedOutputs", "Replayed", "check_lanes", "replay", "replay_lanes"]

_PATH_ONLY = ("none", "pld", "suffix", "stand")  # they read the accepted path and nothing else
_PROBING = ("esp", "auto")
_MAX_EXACT_ROWS = MAX_EXACT_BLOCK + 3
_TIMED = ("_per_second", "speedup", "_ms", "identical", "near_ties", "repeats")  # what a replay cannot tell
_REJECTED = "learns from the rows of rejected drafts too, which a trace does not have: tau comes out too low"
_PADDED = "asked for more candidates than the trace has: record with a larger --top"
_NEAREST = "read mask rows whose vectors are some tokens newer or older than in a live run"
Progress: TypeAlias = Callable[[int, int, str], None]  # answers replayed, answers, what is being done


# -- what a drafter sees ---------------------------------------------------------------------------------------------


class RecordedOutputs:
    """``esp_edge.step.Outputs`` of an accepted path and of the masks behind its end, as they were recorded.

    Where more candidates are asked than recorded, the rest are token ids -1, -2, ..., of probability 0.

    Attributes:
        padded: whether that happened.
    """

    def __init__(self, ids: Int32Array, log_probs: FloatArray) -> None:
        """ids and log_probs: [rows, top], the nodes of the path, root first, then the mask rows."""
        self._ids = ids
        self._log_probs = log_probs
        self.padded = False

    def argmax(self, row: int) -> int:
        """Token with the largest logit of a row."""
        return int(self._ids[row, 0])

    def top_k(self, rows: Int32Array, k: int) -> tuple[Int32Array, FloatArray]:
        """Best ``k`` tokens of each row: ids int32[len(rows), k], log-probs float32[len(rows), k]."""
        ids, log_probs = self._ids[rows, :k], self._log_probs[rows, :k]
        missing = k - ids.shape[1]
        if missing <= 0:
            return ids, log_probs
        self.padded = True
        none = np.tile(np.arange(-1, -missing - 1, -1, dtype=np.int32), (len(ids), 1))
        never = np.full(none.shape, -np.inf, np.float32)
        return np.concatenate([ids, none], axis=1), np.concatenate([log_probs, never], axis=1)

    def top_k_sketch(self, rows: Int32Array, k: int) -> tuple[Int32Array, FloatArray]:
        """The same, from the exact log-probabilities."""
        return self.top_k(rows, k)

    def logprob(self, row: int, token_id: int) -> float:
        """Log-probability of a token; minus infinity when it is none of the recorded."""
        found = np.flatnonzero(self._ids[row] == token_id)
        return float(self._log_probs[row, found[0]]) if len(found) else float("-inf")


def _reduced(tree: DraftTree, verdict: Verdict) -> tuple[DraftTree, Verdict]:
    """The root and the accepted path as a chain, masks at its end only, and the verdict in its numbers."""
    path = [0, *verdict.path]
    n = len(path)
    masks = np.zeros(n, np.int32)
    masks[-1] = tree.masks[verdict.anchor]
    chain = DraftTree(
        tree.token_ids[path],
        np.arange(-1, n - 1, dtype=np.int32),
        tree.probs[path],
        masks,
        None,
        tuple(tree.sources[node] for node in path) if tree.sources else (),
        [np.arange(n, dtype=np.int32)],
    )
    return chain, Verdict(tuple(range(1, n)), verdict.token_ids)


# -- one drafter -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Replayed:
    """One drafter's counters over all answers.

    Attributes:
        label, block_complexity: of the drafter.
        exact: whether a live run has the same counters, as far as the drafter's kind tells.
        records: one a question, without times; those of questions with an error have no turns.
        notes: why the counters are not those of a live run.
    """

    label: str
    block_complexity: int
    exact: bool
    records: dict[int | str, Record] = field(default_factory=dict)
    notes: set[str] = field(default_factory=set)

    def rows(self) -> list[dict[str, Any]]:
        """A summary row a category, then the one of all; as in ``replay.json``."""
        unit = (self.label, self.block_complexity)
        rows = summary_rows({record.unit: record for record in self.records.values()}, {}, [unit])
        more = {"exact": self.exact and not self.notes, "note": "; ".join(sorted(self.notes)) or None}
        return [{name: row[name] for name in row if not any(part in name for part in _TIMED)} | more for row in rows]

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
class _Draft:
    """What makes the trees, as a session holds it.

    Attributes:
        drafter: follows the protocol.
        planner: what a pass costs; None = the drafter does not ask.
        rows: most rows of a planned tree.
    """

    drafter: Drafter
    planner: Planner | None = None
    rows: int = MAX_BLOCK


class _Player:
    """A drafter on its way through answers. In a question it lives on, and ``begin`` decides what it still knows."""

    def __init__(
        self,
        make: Callable[[], _Draft],
        replayed: Replayed,
        masks: str | None,
        sequences: int,
        *,
        keep: bool,
        teach_prompt: bool,
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

    def play(self, recording: Recording) -> None:
        """Draft along an answer and count the passes."""
        if recording.turn == 0 and not self._keep:
            self._draft = self._make()
        self.replayed.add(recording, None if recording.error is not None else self._answer(recording))

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
            n_accepted, n_tokens = len(verdict.path), len(verdict.token_ids)
            if stats.prefill_tokens:  # the first pass belongs to the prefill
                self._plan_after(tree.n_rows + refed, n_prompt + done - 1 - refed, n_tokens)
            stats.count(tree.n_rows, tree.depths.tolist(), [i < n_accepted for i in range(n_tokens)])
            if done + n_tokens == len(tokens):
                return stats
            chain, verdict_of_chain = _reduced(tree, verdict)
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
                f"the drafter asks for {n_masks} masks of {self._masks}, but {_what_is_recorded(settings)}; "
                f"{_record_it(settings, self._masks or '', n_masks)}"
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


# -- settings --------------------------------------------------------------------------------------------------------


def _what_is_recorded(settings: TraceSettings) -> str:
    inits = ", ".join(settings.mask_inits) or "none"
    return f"the trace has {settings.masks} masks of {inits}"


def _record_it(settings: TraceSettings, label: str, masks: int) -> str:
    inits = dict.fromkeys([*settings.mask_inits, *([label] if label else [])])
    return f"record it with bench trace --mask-init {','.join(inits)} --masks {max(masks, settings.masks)}"


def _resolved(config: DraftConfig, settings: TraceSettings) -> DraftConfig:
    """The configuration with ``auto`` replaced by what it stands for on the recorded model."""
    if config.drafter not in _PROBING or config.mask_init != "auto":
        return config
    if settings.auto is None and config.drafter == "auto":
        return config  # its other sources remain
    if settings.auto is None:
        raise ConfigError("drafter esp cannot be replayed: the recorded model cannot be probed, so there are no masks")
    init, update = split_candidate(settings.auto)
    return replace(config, mask_init=init, mask_update=update if config.mask_update is None else config.mask_update)


def _check(lane: Lane, settings: TraceSettings) -> None:
    """Raise ConfigError when a lane cannot be replayed from a trace."""
    config = _resolved(lane.draft, settings)
    if config.drafter == "lade":
        raise ConfigError(
            "lade cannot be replayed: it learns from the rows of its lookahead window, which are no tokens of the "
            "answer and so in no trace; measure it with bench specbench"
        )
    if config.drafter == "draft-model":
        raise ConfigError("draft-model cannot be replayed: it runs a second model; measure it with bench specbench")
    if config.drafter == "auto" and config.cost != "flat":
        raise ConfigError(
            "auto cannot be replayed by measured times, which a trace does not have; give auto[cost=flat], or call "
            "esp_edge.bench.replay.replay with a planner"
        )
    if settings.exact and config.rows > MAX_EXACT_BLOCK:
        raise ConfigError(
            f"{lane.label} has a block complexity of {config.rows}, but the trace is of exact mode, which allows "
            f"{MAX_EXACT_BLOCK}; lower it, or record without --exact"
        )
    if config.drafter not in _PROBING or config.mask_init == "auto":
        return
    label = mask_label(config.mask_init, config.mask_update)
    found = label in settings.mask_inits
    same_k = config.mask_init != "last-k" or config.masks == settings.masks
    same_seed = config.mask_init != "sample" or config.seed == 0
    if not found or config.masks > settings.masks or not same_k or not same_seed:
        seed = "" if same_seed else f" (seed {config.seed})"
        raise ConfigError(
            f"{lane.label} needs {config.masks} masks of {label}{seed}, but {_what_is_recorded(settings)}; "
            f"{_record_it(settings, label, config.masks)}"
        )


def check_lanes(lanes: Sequence[Lane], settings: TraceSettings) -> None:
    """Raise ConfigError, naming what was recorded, when a lane cannot be replayed."""
    for lane in lanes:
        _check(lane, settings)


class _NoEmbeddings:
    """Stands for the embedding table: what the vectors would be has been recorded already."""

    n_embd = 1

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab

    def rows(self, token_ids: Sequence[int] | Int32Array) -> FloatArray:
        return np.zeros((len(token_ids), 1), np.float32)

    def mean(self) -> FloatArray:
        return np.zeros(1, np.float32)

    def std(self) -> FloatArray:
        return np.zeros(1, np.float32)


def _lane_player(lane: Lane, settings: TraceSettings) -> _Player:
    config = _resolved(lane.draft, settings)
    probes = config.drafter in _PROBING and config.mask_init != "auto"
    label = mask_label(config.mask_init, config.mask_update) if probes else None
    exact = config.drafter in _PATH_ONLY or (config.drafter == "esp" and config.mask_init != "composed")
    replayed = Replayed(lane.label, lane.block_complexity, exact, notes=set() if exact else {_REJECTED})

    def make() -> _Draft:
        drafter = make_drafter(config, _NoEmbeddings(settings.n_vocab), lambda _: [0], settings.temperature)
        if isinstance(drafter, FusedDrafter):
            drafter.expect((), settings.temperature, settings.seed)
            return _Draft(drafter, Planner(CostCurve.flat(), refine=False), config.rows)
        return _Draft(drafter)

    return _Player(make, replayed, label, sequences_for(config), keep=lane.keep, teach_prompt=False)


# -- all of it -------------------------------------------------------------------------------------------------------


def replay_lanes(trace: Trace, lanes: Sequence[Lane], *, progress: Progress | None = None) -> list[Replayed]:
    """Every lane along every answer of a trace; each file is read once.

    Raises:
        ConfigError: a lane cannot be replayed, or a file is damaged.
    """
    check_lanes(lanes, trace.settings)
    tell = progress or (lambda _done, _total, _text: None)
    players = [_lane_player(lane, trace.settings) for lane in lanes]
    for done, recording in enumerate(trace):
        tell(done, len(trace), f"{trace.settings.model}: question {recording.question_id}")
        for player in players:
            player.play(recording)
    tell(len(trace), len(trace), f"{trace.settings.model}: done")
    return [player.replayed for player in players]


def replay(
    recordings: Iterable[Recording],
    drafter: Drafter,
    *,
    masks: str | None = None,
    sequences: int = BATCH_SEQUENCES,
    label: str | None = None,
    block_complexity: int = MAX_BLOCK,
    exact: bool = True,
    planner: Planner | None = None,
    teach_prompt: bool = True,
) -> Replayed:
    """One drafter of your own along recorded answers: the workbench for tuning.

    Keep ``list(Trace(path))`` and pass it again and again: then no file is read twice.

    Args:
        recordings: a :class:`Trace`, or answers of one.
        drafter: follows the protocol; it is not made anew between answers.
        masks: label of the recorded initialisation whose rows stand behind an anchor; None = the drafter has no masks.
        sequences: of the session's KV cache; 64 where a drafter of your own is given.
        label, block_complexity: name the rows of the result; a planner's cost goes no further than that many rows.
        exact: whether the drafter reads the accepted path only.
        planner: gives the budget its ``cost`` and ``price``, and learns from every pass as if it took the time that the
            curve says; None = neither.
        teach_prompt: call the drafter's method ``learn_prompt(token_ids, ids, log_probs)``, if it has one, after
            ``begin``, with the prompt's tokens but the last, int32[n], and the best next tokens of their rows,
            [n, top]. A session does not.

    Raises:
        ConfigError: the drafter's trees have masks that were not recorded.
    """
    replayed = Replayed(label or drafter.name, block_complexity, exact, notes=set() if exact else {_REJECTED})
    draft = _Draft(drafter, planner, block_complexity)
    player = _Player(lambda: draft, replayed, masks, sequences, keep=True, teach_prompt=teach_prompt)
    for recording in recordings:
        player.play(recording)
    return replayed
