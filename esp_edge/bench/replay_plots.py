"""Plots of a replay, each as PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esp_edge.bench.plots import category_figure, depth_figure, drafter_figure, new_figure, save_figure, series_style
from esp_edge.bench.report import lane_name
from esp_edge.bench.summary import ALL

__all__ = ["calibration_figure", "plot_replay"]

Row = Mapping[str, Any]


def plot_replay(document: Mapping[str, Any], folder: Path) -> list[str]:
    """tau, its categories, acceptance by depth, calibration and simulated speed; returns the names of the PNG files.

    Args:
        document: of ``replay.json``.
        folder: where the files go; it is made.
    """
    folder.mkdir(exist_ok=True)
    rows, model = document["rows"], document["trace"]["model"]
    total = [row for row in rows if row["category"] == ALL]
    drafters = [{**row, "identical": row["n_prompts"]} for row in rows if not row["bound"]]
    figures = {
        "tau": drafter_figure(
            [row for row in total if not row["bound"]], "tau", "tau by replay: tokens per decode pass"
        ),
        "tau-by-category": category_figure(drafters, "tau", "tau by category, by replay"),
        "acceptance": depth_figure([row for row in total if not row["bound"]]),
        "calibration": calibration_figure(document["calibration"]),
    }
    if document["device"] is not None:
        known = [row for row in total if row["simulated_speed"] is not None]
        figures["simulated-speed"] = drafter_figure(known, "simulated_speed", "simulated speed, and its bounds")
    return [
        save_figure(figure, folder, f"{name}-{model}", model) for name, figure in figures.items() if figure is not None
    ]


def calibration_figure(found: Sequence[Row]) -> Any:
    """Observed against predicted acceptance, both sets of candidates, each drafter at its largest block complexity."""
    largest = {one["drafter"]: one for one in sorted(found, key=lambda one: int(one["block_complexity"]))}
    if not largest:
        return None
    figure, axes = new_figure(6.4, 5.6)
    axes.plot([0, 1], [0, 1], color="#333333", linewidth=1, label="as predicted")
    lines = [(one, name) for one in largest.values() for name in ("rated", "drafted")]
    for number, (one, name) in enumerate(lines):
        bands = one[name]["bands"]
        axes.plot(
            [band["predicted"] for band in bands],
            [band["observed"] for band in bands],
            label=f"{lane_name(one)}, {name}",
            ms=4,
            **series_style(number),
        )
    axes.set(xlabel="predicted probability", ylabel="share that was the model's choice", xlim=(0, 1), ylim=(0, 1))
    axes.set_title("calibration: predicted against observed acceptance")
    axes.legend(frameon=False, fontsize=8)
    return figure
