"""Table, Markdown, JSON and plots of a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esp_edge.bench.halves import ALL_QUESTIONS, told_half
from esp_edge.bench.replay import PERFECT_DRAFTS, PERFECT_PLANNER, Replayed
from esp_edge.bench.replay_plots import plot_replay
from esp_edge.bench.report import category_table, depth_table, lane_name, markdown_table
from esp_edge.bench.results import make_folder, write_json
from esp_edge.bench.simulate import Device
from esp_edge.bench.summary import ALL
from esp_edge.bench.trace_file import Trace
from esp_edge.errors import ConfigError

__all__ = ["overview", "replay_document", "write_replay"]

Document = Mapping[str, Any]
Row = Mapping[str, Any]
PLOTS = "plots"

METHOD = """\
Replayed along recorded answers, without the model. `exact` rows have the counters of a live run in exact mode; in the
default mode a live run may take another way at near-ties. tau is tokens per decode pass over all answers, `mean tau`
the mean over questions; the prefill pass and its token are left out. `[keep]` rows carry their tables from question to
question, all others begin every answer with empty ones."""
SPEED = """\
`simulated speed` is the time of plain decoding over that of the replayed passes on the device named above: tokens x
T(1) / sum of T(rows of each pass), host time added to both. `auto` plans with that T(n), `auto[cost=flat]` as if rows
were free; all pay for every row. Two rows are bounds. *perfect planner*: the largest tree that `auto` makes when rows
are free, paid for its accepted nodes and the root alone, so the same sources and nothing wasted. *perfect drafts*: the
next tokens are known, and every pass has as many of them as bring most tokens a millisecond."""
CALIBRATED = """\
Share of candidates that were the model's choice, per tenth of the probability that `auto` gave them. *rated*: all
candidates of nodes that were reached; *drafted*: those that were in the tree, which the planner stakes rows on."""


def replay_document(
    trace: Trace,
    replayed: Sequence[Replayed],
    *,
    command: str = "",
    device: Device | None = None,
    half: str = ALL_QUESTIONS,
) -> dict[str, Any]:
    """The document of ``replay.json``.

    Args:
        trace: what was replayed; ``half``: which questions those are.
        device: what the passes cost.

    Raises:
        ConfigError: the trace has no answer.
    """
    rows = [row for one in replayed for row in one.rows()]
    if not rows:
        raise ConfigError(f"{trace.path} has no answer to replay: run bench trace again")
    skipped = {str(record.question_id): record.error for one in replayed for record in one.records.values()}
    return {
        "trace": trace.settings.as_dict(),
        "answers": len(trace),
        "half": half,
        "split": told_half(half),
        "device": None if device is None else device.as_dict(),
        "command": command,
        "skipped": {question_id: why for question_id, why in skipped.items() if why},
        "rows": rows,
        "reached": _reached(rows),
        "calibration": [found for one in replayed if (found := _calibration(one)) is not None],
    }


def _calibration(one: Replayed) -> dict[str, Any] | None:
    """Of a planning drafter; a bound is none."""
    found = None if one.bound else one.calibration.document()
    return found and {"drafter": one.label, "block_complexity": one.block_complexity, **found}


def _reached(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """How much of the bounds' speed every lane of ``auto`` reaches, overall; empty without a simulated device."""
    total = [row for row in rows if row["category"] == ALL and row["simulated_speed"]]
    bounds = {(row["drafter"], row["block_complexity"]): row["simulated_speed"] for row in total if row["bound"]}
    found = []
    for row in total:
        size = row["block_complexity"]
        if not row["bound"] and row["drafter"].partition("[")[0] == "auto":
            shares = {
                name.replace(" ", "_"): round(row["simulated_speed"] / bounds[name, size], 4)
                for name in (PERFECT_PLANNER, PERFECT_DRAFTS)
            }
            found.append({"drafter": row["drafter"], "block_complexity": size, **shares})
    return found


def overview(document: Document) -> str:
    """What the command prints: one table, what it says about ``auto``, then why rows are not exact."""
    total = [row for row in document["rows"] if row["category"] == ALL]
    parts = [f"{_about(document)}\n", _main_table(document), *_findings(document), *_notes(total)]
    return "\n".join(parts).rstrip("\n") + "\n"


def write_replay(document: Document, out: Path, *, plots: bool = True) -> None:
    """``replay.json``, ``replay.md`` and, with ``plots``, PNG and SVG files below ``plots``."""
    make_folder(out)
    write_json(out / "replay.json", dict(document))
    figures = plot_replay(document, out / PLOTS) if plots else []
    (out / "replay.md").write_text(_report(document, figures), "utf-8")


# -- text ------------------------------------------------------------------------------------------------------------


def _about(document: Document) -> str:
    trace = document["trace"]
    mode = "exact mode" if trace["exact"] else "default mode"
    draw = "greedy" if trace["temperature"] == 0 else f"temperature {trace['temperature']:g}"
    answers = f"{document['answers']} of {trace['n_answers']} answers"
    parts = [f"{trace['model']}, {answers}, up to {trace['max_tokens']} tokens, {draw}, {mode}", document["split"]]
    device = document["device"]
    if device is not None:
        plain, drafting = device["host_ms"]
        host = f", and {plain:g} ms (plain) or {drafting:g} ms (drafting) of our own" if plain or drafting else ""
        parts.append(f"passes take the time of {device['name']}{host}")
    return "; ".join(parts)


def _main_table(document: Document) -> str:
    rows = document["rows"]
    total = [row for row in rows if row["category"] == ALL]
    head = ["drafter @ block complexity", "tau", "mean tau", "rows/pass"]
    timed = document["device"] is not None
    head += ["simulated speed", "worst category"] if timed else []
    head += ["passes", "tokens", "exact"]
    return markdown_table(
        head,
        [
            [
                lane_name(row) + (f" ({row['mask_init']})" if row["mask_init"] and "[" not in row["drafter"] else ""),
                f"{row['tau']:.3f}",
                f"{row['tau_mean_of_prompts']:.3f}",
                f"{row['rows_per_pass']:.1f}",
                *([_speed(row), _worst(rows, row)] if timed else []),
                str(row["passes"]),
                str(row["n_tokens"]),
                "bound" if row["bound"] else "yes" if row["exact"] else "no",
            ]
            for row in total
        ],
    )


def _speed(row: Row) -> str:
    return "-" if row["simulated_speed"] is None else f"{row['simulated_speed']:.2f}x"


def _worst(rows: Sequence[Row], total: Row) -> str:
    """Category in which a drafter is slowest, and how fast it is there."""
    lane = (total["drafter"], total["block_complexity"])
    mine = [row for row in rows if (row["drafter"], row["block_complexity"]) == lane and row["category"] != ALL]
    known = [row for row in mine if row["simulated_speed"] is not None]
    worst = min(known, key=lambda row: float(row["simulated_speed"]), default=None)
    return "-" if worst is None else f"{worst['category']} {_speed(worst)}"


def _findings(document: Document) -> list[str]:
    """What the figures of ``auto`` come to, a line each."""
    lines = [
        f"{lane_name(one)} reaches {100 * one['perfect_planner']:.0f} % of the perfect planner's speed, "
        f"{100 * one['perfect_drafts']:.0f} % of that of perfect drafts"
        for one in document["reached"]
    ]
    lines += [
        f"{lane_name(one)}: predicted and observed acceptance are at most {one['rated']['largest_gap']:.3f} apart in "
        f"every tenth of probability, those of drafted candidates {one['drafted']['largest_gap']:.3f}"
        for one in document["calibration"]
    ]
    return lines


def _notes(rows: Sequence[Row]) -> list[str]:
    """Why rows are not exact, a line a reason."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row["note"]:
            names.setdefault(row["note"], []).append(row["drafter"])
    return [f"not exact, {', '.join(dict.fromkeys(drafters))}: {why}" for why, drafters in names.items()]


def _report(document: Document, figures: Sequence[str]) -> str:
    rows = document["rows"]
    total = [row for row in rows if row["category"] == ALL]
    timed = document["device"] is not None
    parts = ["# Replay", _about(document) + ".", METHOD, *([SPEED] if timed else [])]
    parts += [f"```\n{document['command']}\n```"] if document["command"] else []
    parts += [_main_table(document), "\n".join(f"- {line}" for line in [*_findings(document), *_notes(total)])]
    if timed:
        parts += ["## Simulated speed by category", category_table(rows, _speed)]
    parts += ["## tau by category", category_table(rows, lambda row: f"{row['tau']:.2f}")]
    parts += ["## Acceptance by depth", "Share of passes whose draft was accepted to that depth.", depth_table(total)]
    if document["calibration"]:
        parts += ["## Calibration", CALIBRATED]
    for one in document["calibration"]:
        parts += [f"### {lane_name(one)}", _calibration_table(one)]
    if document["skipped"]:
        skipped = [f"- question {one}: {why}" for one, why in document["skipped"].items()]
        parts += ["## Questions left out", "\n".join(skipped)]
    if figures:
        parts += ["## Plots", "\n".join(f"![{name}]({PLOTS}/{name})" for name in figures)]
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def _calibration_table(one: Row) -> str:
    """A tenth of probability a row; both sets of candidates side by side."""
    sets = ("rated", "drafted")
    found = {name: {band["from"]: band for band in one[name]["bands"]} for name in sets}
    head = ["predicted", *(f"{name}: {what}" for name in sets for what in ("mean", "observed", "gap", "candidates"))]
    starts = sorted({start for bands in found.values() for start in bands})
    return markdown_table(
        head,
        [
            [f"{start:.1f} to {start + 0.1:.1f}", *(cell for name in sets for cell in _band(found[name].get(start)))]
            for start in starts
        ],
    )


def _band(band: Row | None) -> list[str]:
    if band is None:
        return ["-"] * 4
    gap = band["observed"] - band["predicted"]
    return [f"{band['predicted']:.3f}", f"{band['observed']:.3f}", f"{gap:+.3f}", str(band["candidates"])]
