"""``esp-edge bench replay``: run drafters along recorded answers, without the model.

Decoding is lossless, so the tokens are known, and verification is a comparison with them. After a pass the drafter sees
what the trace holds of it: the root, the accepted path, and the masks behind its end. That is all that ESP, PLD, suffix
and STAND read, and their counters are those of a live run. Token Recycling, RACER and ``auto`` also learn from the rows
of rejected drafts, which no trace has, so theirs come out too low. LADE lives on the rows of its window, which are no
tokens of the answer, so it cannot be replayed. Times come from a simulated device (:mod:`esp_edge.bench.simulate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from esp_edge.bench.replay_player import REJECTED, Draft, Player, Replayed, record_it, what_is_recorded
from esp_edge.bench.replay_view import RecordedOutputs
from esp_edge.bench.simulate import FLAT, Device, PerfectDrafts
from esp_edge.bench.spec import PLAIN, Lane
from esp_edge.bench.trace_file import Recording, Trace, TraceSettings, mask_label
from esp_edge.config import MAX_BLOCK, MAX_EXACT_BLOCK, DraftConfig
from esp_edge.drafters import make_drafter
from esp_edge.drafters.base import Drafter
from esp_edge.drafters.calibrate import split_candidate
from esp_edge.drafters.fused import FusedDrafter
from esp_edge.errors import ConfigError
from esp_edge.planner.curve import CostCurve
from esp_edge.planner.plan import Planner
from esp_edge.session import BATCH_SEQUENCES, sequences_for
from esp_edge.tree import FloatArray, Int32Array

__all__ = [
    "PERFECT_DRAFTS",
    "PERFECT_PLANNER",
    "Progress",
    "RecordedOutputs",
    "Replayed",
    "check_lanes",
    "replay",
    "replay_bounds",
    "replay_lanes",
]

PERFECT_PLANNER, PERFECT_DRAFTS = "perfect planner", "perfect drafts"
_PATH_ONLY = ("none", "pld", "suffix", "stand")  # they read the accepted path and nothing else
_PROBING = ("esp", "auto")
Progress: TypeAlias = Callable[[int, int, str], None]  # answers replayed, answers, what is being done


# -- settings --------------------------------------------------------------------------------------------------------


def _resolved(config: DraftConfig, settings: TraceSettings, device: Device | None) -> DraftConfig:
    """The configuration with ``auto`` replaced by what it stands for on the recorded model and the device."""
    if config.drafter not in _PROBING or config.mask_init != "auto":
        return config
    if config.drafter == "auto" and (settings.auto is None or not _planner(config, device).masks_may_pay):
        return config  # its other sources remain
    if settings.auto is None:
        raise ConfigError("drafter esp cannot be replayed: the recorded model cannot be probed, so there are no masks")
    init, update = split_candidate(settings.auto)
    return replace(config, mask_init=init, mask_update=update if config.mask_update is None else config.mask_update)


def _planner(config: DraftConfig, device: Device | None) -> Planner:
    """What ``auto`` plans with; passes take as long as the curve says, so it learns nothing from them."""
    measured = device is not None and config.cost != FLAT
    return Planner(device.curve if device is not None and measured else CostCurve.flat(), refine=False)


def _check(lane: Lane, settings: TraceSettings, device: Device | None) -> None:
    """Raise ConfigError when a lane cannot be replayed from a trace."""
    config = _resolved(lane.draft, settings, device)
    if config.drafter == "lade":
        raise ConfigError(
            "lade cannot be replayed: it learns from the rows of its lookahead window, which are no tokens of the "
            "answer and so in no trace; measure it with bench specbench"
        )
    if config.drafter == "draft-model":
        raise ConfigError("draft-model cannot be replayed: it runs a second model; measure it with bench specbench")
    if config.drafter == "auto" and config.cost != FLAT and device is None:
        raise ConfigError(
            "auto plans with the times of passes, which a trace does not have: give --cost FILE with those of bench "
            "cost, or auto[cost=flat]"
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
            f"{lane.label} needs {config.masks} masks of {label}{seed}, but {what_is_recorded(settings)}; "
            f"{record_it(settings, label, config.masks)}"
        )


def check_lanes(lanes: Sequence[Lane], settings: TraceSettings, device: Device | None = None) -> None:
    """Raise ConfigError, naming what was recorded, when a lane cannot be replayed."""
    for lane in lanes:
        _check(lane, settings, device)


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


def _lane_player(lane: Lane, settings: TraceSettings, device: Device | None) -> Player:
    config = _resolved(lane.draft, settings, device)
    exact = config.drafter in _PATH_ONLY or (config.drafter == "esp" and config.mask_init != "composed")
    replayed = Replayed(lane.label, lane.block_complexity, exact, notes=set() if exact else {REJECTED})
    return _player(config, settings, device, replayed)


def _player(config: DraftConfig, settings: TraceSettings, device: Device | None, replayed: Replayed) -> Player:
    probes = config.drafter in _PROBING and config.mask_init != "auto"
    label = mask_label(config.mask_init, config.mask_update) if probes else None

    def make() -> Draft:
        drafter = make_drafter(config, _NoEmbeddings(settings.n_vocab), lambda _: [0], settings.temperature)
        if isinstance(drafter, FusedDrafter):
            drafter.expect((), settings.temperature, settings.seed)
            return Draft(drafter, _planner(config, device), config.rows, wasteless=replayed.bound)
        return Draft(drafter)

    return Player(make, replayed, label, sequences_for(config), keep=config.keep, teach_prompt=False, device=device)


# -- bounds ----------------------------------------------------------------------------------------------------------


def replay_bounds(rows: int, settings: TraceSettings, device: Device) -> tuple[Player, Player]:
    """Players of what no planner, and no drafter at all, can beat on this device at a block complexity.

    The perfect planner sees the largest tree that ``auto`` makes when rows are free, but pays for the rows of the
    accepted nodes and the root alone: the same sources, nothing wasted. Perfect drafts are :class:`PerfectDrafts`.
    """
    config = _resolved(DraftConfig("auto", block_complexity=rows, cost=FLAT), settings, device)
    planner = Replayed(PERFECT_PLANNER, rows, exact=False, bound=True, notes={REJECTED})
    drafts = Replayed(PERFECT_DRAFTS, rows, exact=True, bound=True)

    def make() -> Draft:
        return Draft(PerfectDrafts(rows, device.draft_host_ms), Planner(device.curve, refine=False), rows)

    oracle = Player(make, drafts, None, 1, keep=False, teach_prompt=False, device=device)
    return _player(config, settings, device, planner), oracle


# -- all of it -------------------------------------------------------------------------------------------------------


def replay_lanes(
    trace: Trace,
    lanes: Sequence[Lane],
    *,
    device: Device | None = None,
    bounds: bool = False,
    progress: Progress | None = None,
) -> list[Replayed]:
    """Every lane along every answer of a trace; each file is read once.

    Args:
        device: what passes cost, for the simulated speed.
        bounds: replay, behind the lanes, the two bounds of each of their block complexities on the device, too
            (:func:`replay_bounds`).

    Raises:
        ConfigError: a lane cannot be replayed, or a file is damaged.
    """
    check_lanes(lanes, trace.settings, device)
    tell = progress or (lambda _done, _total, _text: None)
    players = [_lane_player(lane, trace.settings, device) for lane in lanes]
    if device is not None and bounds:
        sizes = sorted({lane.block_complexity for lane in lanes if lane.label != PLAIN})
        players += [player for rows in sizes for player in replay_bounds(rows, trace.settings, device)]
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
    device: Device | None = None,
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
        device: what passes cost, for the simulated speed.
        teach_prompt: call the drafter's method ``learn_prompt(token_ids, ids, log_probs)``, if it has one, after
            ``begin``, with the prompt's tokens but the last, int32[n], and the best next tokens of their rows,
            [n, top]. A session does not.

    Raises:
        ConfigError: the drafter's trees have masks that were not recorded.
    """
    replayed = Replayed(label or drafter.name, block_complexity, exact, notes=set() if exact else {REJECTED})
    draft = Draft(drafter, planner, block_complexity)
    player = Player(lambda: draft, replayed, masks, sequences, keep=True, teach_prompt=teach_prompt, device=device)
    for recording in recordings:
        player.play(recording)
    return replayed
