"""Table, Markdown, JSON and plots of a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esp_edge.bench.plots import category_figure, depth_figure, drafter_figure, save_figure
from esp_edge.bench.replay import Replayed
from esp_edge.bench.report import category_table, depth_table, lane_name, markdown_table
from esp_edge.bench.results import make_folder, write_json
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


def replay_document(trace: Trace, replayed: Sequence[Replayed], *, command: str = "") -> dict[str, Any]:
    """The document of ``replay.json``.

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
        "command": command,
        "skipped": {question_id: why for question_id, why in skipped.items() if why},
        "rows": rows,
    }


def overview(document: Document) -> str:
    """What the command prints: one table, then why rows are not exact."""
    total = [row for row in document["rows"] if row["category"] == ALL]
    return "\n".join([f"{_about(document)}\n", _main_table(total), *_notes(total)]).rstrip("\n") + "\n"


def write_replay(document: Document, out: Path, *, plots: bool = True) -> None:
    """``replay.json``, ``replay.md`` and, with ``plots``, PNG and SVG files below ``plots``."""
    make_folder(out)
    write_json(out / "replay.json", dict(document))
    figures = _plots(document, out / PLOTS) if plots else []
    (out / "replay.md").write_text(_report(document, figures), "utf-8")


def _about(document: Document) -> str:
    trace = document["trace"]
    mode = "exact mode" if trace["exact"] else "default mode"
    draw = "greedy" if trace["temperature"] == 0 else f"temperature {trace['temperature']:g}"
    answers = f"{document['answers']} of {trace['n_answers']} answers"
    return f"{trace['model']}, {answers}, up to {trace['max_tokens']} tokens, {draw}, {mode}"


def _main_table(rows: Sequence[Row]) -> str:
    head = ["drafter @ block complexity", "tau", "mean tau", "rows/pass", "passes", "tokens", "exact"]
    return markdown_table(
        head,
        [
            [
                lane_name(row) + (f" ({row['mask_init']})" if row["mask_init"] and "[" not in row["drafter"] else ""),
                f"{row['tau']:.3f}",
                f"{row['tau_mean_of_prompts']:.3f}",
                f"{row['rows_per_pass']:.1f}",
                str(row["passes"]),
                str(row["n_tokens"]),
                "yes" if row["exact"] else "no",
            ]
            for row in rows
        ],
    )


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
    parts = ["# Replay", _about(document) + ".", METHOD]
    parts += [f"```\n{document['command']}\n```"] if document["command"] else []
    parts += [_main_table(total), *(f"- {line}" for line in _notes(total))]
    parts += ["## tau by category", category_table(rows, lambda row: f"{row['tau']:.2f}")]
    parts += ["## Acceptance by depth", "Share of passes whose draft was accepted to that depth.", depth_table(total)]
    if document["skipped"]:
        parts += ["## Questions left out", *(f"- question {one}: {why}" for one, why in document["skipped"].items())]
    if figures:
        parts += ["## Plots", "\n".join(f"![{name}]({PLOTS}/{name})" for name in figures)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _plots(document: Document, folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    rows, model = document["rows"], document["trace"]["model"]
    total = [row for row in rows if row["category"] == ALL]
    same = [{**row, "identical": row["n_prompts"]} for row in rows]
    figures = {
        "tau": drafter_figure(total, "tau", "tau by replay: tokens per decode pass"),
        "tau-by-category": category_figure(same, "tau", "tau by category, by replay"),
        "acceptance": depth_figure(total),
    }
    return [
        save_figure(figure, folder, f"{name}-{model}", model) for name, figure in figures.items() if figure is not None
    ]
