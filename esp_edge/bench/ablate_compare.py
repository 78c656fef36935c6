"""Rows and judged pairs of a table of ``bench ablate``, from what was measured or replayed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from esp_edge.bench.ablate_tables import Ask, RunKey
from esp_edge.bench.paper import ABLATIONS, PAPER_MODELS, Ablation, Entry, Figure, Pair
from esp_edge.bench.results import Record, RunDirectory
from esp_edge.bench.spec import Lane
from esp_edge.bench.summary import ALL, complete_rounds
from esp_edge.config import MAX_EXACT_BLOCK

__all__ = ["CAVEAT", "CLOSE", "Document", "Measured", "ablation_document", "verdict"]

TILED_ROWS = 64  # llama.cpp's CPU backend
TOLERANCE = 0.01  # relative; ratios this close to 1 have no direction
SAME, OPPOSITE, CLOSE, UNKNOWN = "same direction", "opposite", "within 1 %", "paper gives no figure"
COPIED = (  # of a summary row
    *("tau", "rows_per_pass", "tokens_per_second", "host_ms_per_pass", "model_ms_per_pass"),
    *("n_prompts", "n_tokens", "identical", "near_ties", "mask_init"),
)
CAVEAT = (
    f"The paper's figures are for {' and '.join(PAPER_MODELS)} on a data-centre GPU, ours for the model and machine "
    "named here: compare directions, not sizes."
)
Document: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """A finished run: its summary document, and the records of the questions that every lane answered."""

    summary: Mapping[str, Any]
    records: Sequence[Record]

    @classmethod
    def read(cls, folder: Path) -> Measured:
        """What :func:`esp_edge.bench.specbench.measure` left in a directory."""
        run = json.loads((folder / "run.json").read_text("utf-8"))
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
        lanes = list(dict.fromkeys((row["drafter"], row["block_complexity"]) for row in summary["rows"]))
        records = RunDirectory(folder, run["settings"], run["machine"]).records
        return cls(summary, complete_rounds(records, lanes))

    def row(self, model: str, lane: Lane) -> Mapping[str, Any]:
        """The summary row of a lane over all categories."""
        wanted = (model, *lane.key, ALL)
        keys = ("model", "drafter", "block_complexity", "category")
        return next(row for row in self.summary["rows"] if tuple(row[key] for key in keys) == wanted)

    def per_question(self, model: str, lane: Lane, metric: str) -> dict[Any, float]:
        """Question id -> tau, or tokens per millisecond for ``speedup``; one-token answers are left out."""
        sums: dict[Any, list[float]] = {}
        for record in self.records:
            if record.model == model and record.unit[3:] == lane.key:
                total = sums.setdefault(record.question_id, [0.0, 0.0])
                for turn in record.turns:
                    total[0] += turn.committed_tokens
                    total[1] += turn.passes if metric == "tau" else turn.decode_ms
        return {question_id: part / whole for question_id, (part, whole) in sums.items() if whole}


def ablation_document(ablation: Ablation, ask: Ask, measured: Mapping[RunKey, Measured]) -> Document:
    """The document of ``ablate-TABLE.json``: settings, rows and judged pairs of every model, JSON-ready."""
    keys = dict.fromkeys(ask.run_key(ablation, entry) for entry in ablation.entries)
    summaries = [measured[key].summary for key in keys]
    models = list(dict.fromkeys(row["model"] for row in summaries[0]["rows"]))
    return {
        "table": ablation.key,
        "title": ablation.title,
        "notes": [*([CAVEAT] if ablation.key in ABLATIONS else []), *_notes(ablation, ask)],
        "machine": summaries[0]["machine"],
        "command": summaries[0]["command"],
        "settings": [_settings(summary) for summary in summaries],
        "failures": sum(summary["failures"] for summary in summaries),
        "rows": [_row(model, ablation, entry, ask, measured) for model in models for entry in ablation.entries],
        "pairs": [_pair(model, ablation, pair, ask, measured) for model in models for pair in ablation.pairs],
    }


def _notes(ablation: Ablation, ask: Ask) -> list[str]:
    notes = [ablation.note] if ablation.note else []
    largest = ask.largest(ablation)
    if ask.exact and largest > MAX_EXACT_BLOCK:
        notes.append(
            f"NOT EXACT: exact mode allows passes of {MAX_EXACT_BLOCK} rows and this table needs {largest}, so it was "
            "measured in the default mode, where answers may differ at near-ties."
        )
    if largest >= TILED_ROWS:
        notes.append(
            f"On CPUs a pass of {TILED_ROWS} rows or more takes another attention kernel than smaller ones. Its "
            "rounding can turn a choice that is slightly more than a near-tie: on SmolLM2-135M Q4_0 three trees of 64 "
            "and 128 rows gave the same other token at a margin of 0.262, one of 60 rows plain decoding's."
        )
    return notes


def _settings(summary: Mapping[str, Any]) -> Document:
    names = ("questions", "max_tokens", "temperature", "seed", "repeat", "exact")
    return {name: summary["settings"][name] for name in names}


def _row(model: str, ablation: Ablation, entry: Entry, ask: Ask, measured: Mapping[RunKey, Measured]) -> dict[str, Any]:
    found = measured[ask.run_key(ablation, entry)].row(model, ask.lane(entry))
    return {
        "model": model,
        "quant": found["quant"],
        "configuration": entry.name,
        "drafter": found["drafter"],
        "block_complexity": found["block_complexity"],
        "speedup": _value(found, "speedup"),
        "speedup_range": _range(found),
        **{name: found[name] for name in COPIED},
        "paper": {name: asdict(figure) for name, figure in zip(PAPER_MODELS, entry.figures, strict=True)},
    }


def _value(row: Mapping[str, Any], metric: str) -> float:
    """Of a summary row; a speedup of exact mode is over the default mode's plain decoding, as a user has it."""
    stock = row.get("speedup_stock") if metric == "speedup" else None
    return float(row[metric] if stock is None else stock)


def _range(row: Mapping[str, Any]) -> list[float] | None:
    """Slowest and fastest repetition; None for a single one, and in exact mode, whose range has another base."""
    if row["repeats"] < 2 or row.get("speedup_stock") is not None:
        return None
    return [row["speedup_min"], row["speedup_max"]]


def _pair(model: str, ablation: Ablation, pair: Pair, ask: Ask, measured: Mapping[RunKey, Measured]) -> dict[str, Any]:
    entries = [ablation.entry(name) for name in (pair.left, pair.right)]
    keys = [ask.run_key(ablation, entry) for entry in entries]
    lanes = [ask.lane(entry) for entry in entries]
    values = [_value(measured[key].row(model, lane), pair.metric) for key, lane in zip(keys, lanes, strict=True)]
    ratio = _ratio(*values)
    theirs = [_ratio_of(pair.metric, *figures) for figures in zip(*(one.figures for one in entries), strict=True)]
    found: dict[str, Any] = {
        "model": model,
        "left": pair.left,
        "right": pair.right,
        "metric": pair.metric,
        "ratio": None if ratio is None else round(ratio, 6),
        "paper": {name: one and round(one, 6) for name, one in zip(PAPER_MODELS, theirs, strict=True)},
        "verdict": verdict(ratio, theirs),
        "near": _near(ratio, theirs),
        "questions": None,
    }
    if keys[0] == keys[1] and pair.metric in ("tau", "speedup"):
        left, right = (measured[keys[0]].per_question(model, lane, pair.metric) for lane in lanes)
        found["questions"] = _votes(left, right)
    return found


def _ratio(left: float, right: float) -> float | None:
    return left / right if left > 0 and right > 0 else None


def _ratio_of(metric: str, left: Figure, right: Figure) -> float | None:
    above, below = (getattr(figure, metric, None) for figure in (left, right))
    return None if above is None or below is None else above / below


def _votes(left: Mapping[Any, float], right: Mapping[Any, float]) -> dict[str, int]:
    """Questions on which the left one is better, and worse; the rest are equal."""
    both = [(left[one], right[one]) for one in left if one in right]
    return {"for": sum(a > b for a, b in both), "against": sum(a < b for a, b in both), "of": len(both)}


def verdict(ours: float | None, theirs: Sequence[float | None]) -> str:
    """Whether a ratio of ours goes the paper's way.

    Args:
        ours: left / right; None = it could not be measured.
        theirs: the paper's ratios, a model each; their geometric mean is its direction.

    Returns:
        ``paper gives no figure``; ``within 1 %`` when either side is, so that there is no direction to compare; else
        ``same direction`` or ``opposite``.
    """
    paper = _mean(theirs)
    if ours is None or paper is None:
        return UNKNOWN
    if _is_near(ours) or _is_near(paper):
        return CLOSE
    return SAME if (ours > 1) == (paper > 1) else OPPOSITE


def _near(ours: float | None, theirs: Sequence[float | None]) -> str | None:
    """Which side of a comparison is within 1 %: ``both``, ``ours``, ``paper``, or None."""
    paper = _mean(theirs)
    sides = [name for name, one in (("ours", ours), ("paper", paper)) if one is not None and _is_near(one)]
    return "both" if len(sides) == 2 else sides[0] if sides else None


def _mean(ratios: Sequence[float | None]) -> float | None:
    logs = [math.log(ratio) for ratio in ratios if ratio is not None]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _is_near(ratio: float) -> bool:
    return abs(ratio - 1) <= TOLERANCE
