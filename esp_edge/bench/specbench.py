"""``esp-edge bench specbench``: run what is missing, then write summary, report and plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from esp_edge.bench.cost import cost_rows
from esp_edge.bench.plots import plot_cost, plot_summary
from esp_edge.bench.report import report
from esp_edge.bench.results import RunDirectory, write_json
from esp_edge.bench.run import ModelFile, Plan, open_run, prepare_models, run_all
from esp_edge.bench.summary import failures, skipped_questions, summary_rows
from esp_edge.errors import ConfigError
from esp_edge.session import Model

__all__ = ["COST_CONTEXT", "COST_ROWS", "PLOTS", "measure"]

COST_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 30, 40, 50, 60)
COST_CONTEXT = 300  # a question and half of its answer
PLOTS = "plots"


def measure(
    plan: Plan, out: Path, *, command: str = "", plots: bool = True, progress: Callable[[int, int, str], None]
) -> dict[str, Any]:
    """Everything the command does but print; the document of ``summary.json``.

    Args:
        out: directory of the run, new or of an earlier run with the same settings.
        command: shown in the report.
        plots: draw them (needs matplotlib).
        progress: called with (answers recorded, answers, what is being done).

    Raises:
        ConfigError: the directory belongs to another run, no question fits the context, or a model cannot be exact in
            this process any more.
    """
    prepare_models(plan)
    results = open_run(plan, out)
    progress(len(results.records), plan.n_units, f"{len(results.records)} of {plan.n_units} answers are recorded")

    def measure_cost(file: ModelFile, model: Model) -> None:
        if not _cost_file(out, file.name).exists():
            progress(len(results.records), plan.n_units, f"{file.name}: cost of a pass")
            write_json(_cost_file(out, file.name), {"machine": results.machine, "rows": _cost(plan, model)})

    run_all(plan, results, progress=progress, after=measure_cost)
    summary = _summary(plan, results, command)
    write_json(out / "summary.json", summary)
    figures = _plots(plan, summary, out / PLOTS) if plots else {}
    (out / "report.md").write_text(report(summary, figures), "utf-8")
    return summary


def _cost_file(out: Path, model: str) -> Path:
    return out / f"cost-{model}.json"


def _cost(plan: Plan, model: Model) -> list[dict[str, Any]]:
    """T(n) up to the largest block complexity of the run, where the context allows it."""
    largest = max(lane.block_complexity for lane in plan.lanes if lane.peer is None)
    context = min(COST_CONTEXT, model.n_ctx // 2)
    rows = [n for n in COST_ROWS if n <= max(largest, COST_ROWS[2]) and n < model.n_ctx // 2]
    return cost_rows(model, rows, [context])


def _summary(plan: Plan, results: RunDirectory, command: str) -> dict[str, Any]:
    rows = summary_rows(results.records, results.differences, [lane.key for lane in plan.lanes])
    skipped = skipped_questions(results.records)
    if not rows:
        why = next(iter(skipped.values()), "there is none")
        raise ConfigError(f"no question could be answered by every drafter: {why}")
    costs = {file.name: json.loads(_cost_file(results.path, file.name).read_text("utf-8")) for file in plan.models}
    return {
        "machine": results.machine,
        "settings": results.settings,
        "command": command,
        "rows": rows,
        "cost": {name: document["rows"] for name, document in costs.items()},
        "differences": [asdict(difference) for difference in results.differences.values()],
        "failures": len(failures(results.differences.values(), exact=plan.config.exact)),
        "skipped": {str(question_id): why for question_id, why in skipped.items()},
    }


def _plots(plan: Plan, summary: Mapping[str, Any], folder: Path) -> dict[str, Sequence[str]]:
    """Draw everything; model -> paths relative to the report."""
    folder.mkdir(exist_ok=True)
    figures: dict[str, Sequence[str]] = {}
    for file in plan.models:
        rows = [row for row in summary["rows"] if row["model"] == file.name]
        if not rows:
            continue
        names = [*plot_summary(rows, folder, file.name), plot_cost(summary["cost"][file.name], folder, file.name)]
        figures[file.name] = [f"{PLOTS}/{name}" for name in names]
    return figures
