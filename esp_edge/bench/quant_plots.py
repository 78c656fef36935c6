"""The plot of ``bench quants``: speed against perplexity, and the speedup of every file and drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esp_edge.bench.plots import label_width, new_figure, save_figure, series_style
from esp_edge.bench.report import lane_name
from esp_edge.bench.spec import PLAIN

__all__ = ["plot_quants"]

Row = Mapping[str, Any]
SMALLEST, LARGEST = 30, 350  # areas of markers, points squared
HEADROOM = 1.3


def plot_quants(rows: Sequence[Row], folder: Path, model: str) -> str:
    """tokens/s against perplexity, a marker as large as the file, beside the speedups; returns the name of the PNG.

    Args:
        rows: of :func:`esp_edge.bench.quants.quant_rows`.
        folder: where the files go; it exists.
        model: of the source, for the title.
    """
    names = [f"{row['quant']}  {lane_name(row)}" for row in rows]
    figure, (left, right) = _two_panels(names)
    _speed_panel(left, rows)
    _speedup_panel(right, rows, names)
    return save_figure(figure, folder, f"quants-{model}", model)


def _two_panels(names: Sequence[str]) -> tuple[Any, tuple[Any, Any]]:
    from matplotlib.gridspec import GridSpec  # noqa: PLC0415 - optional, and slow to import

    figure, left = new_figure(9.7 + label_width(names), max(4.6, 1.6 + 0.32 * len(names)))
    grid = GridSpec(1, 2, figure=figure, width_ratios=(1.25, 1))
    left.set_subplotspec(grid[0])
    right = figure.add_subplot(grid[1])
    right.spines[["top", "right"]].set_visible(False)
    right.grid(axis="x", color="#dddddd", linewidth=0.7)
    right.set_axisbelow(True)
    return figure, (left, right)


def _speed_panel(axes: Any, rows: Sequence[Row]) -> None:
    """Plain decoding hollow, drafters filled; up and to the left is better."""
    files = list({row["model"]: row for row in rows}.values())
    areas = _areas(files)
    lanes = list(dict.fromkeys(lane_name(row) for row in rows if row["drafter"] != PLAIN))
    for row in files:
        at = (row["perplexity"], row["plain_tokens_per_second"])
        error = row["perplexity"] * row["perplexity_ratio_error"]
        axes.errorbar(*at, xerr=error, color="#999999", elinewidth=1, capsize=2, zorder=1)
        axes.scatter(*at, s=areas[row["model"]], facecolors="none", edgecolors="#333333", zorder=3)
        label = f"{row['quant']}, {row['file_bytes'] / 2**20:.0f} MiB"
        top = max(at[1], *(one["tokens_per_second"] for one in rows if one["model"] == row["model"]))
        axes.annotate(label, (at[0], top), xytext=(0, 14), textcoords="offset points", ha="center", fontsize=8)
    for number, lane in enumerate(lanes):
        mine = [row for row in rows if lane_name(row) == lane]
        style = series_style(number)
        x, y = [row["perplexity"] for row in mine], [row["tokens_per_second"] for row in mine]
        sizes = [areas[row["model"]] for row in mine]
        axes.scatter(x, y, s=sizes, color=style["color"], marker=style["marker"], alpha=0.7, zorder=2)
        axes.scatter([], [], s=40, color=style["color"], marker=style["marker"], label=lane)
    axes.scatter([], [], s=40, facecolors="none", edgecolors="#333333", label="plain decoding")
    fastest = max(max(row["plain_tokens_per_second"], row["tokens_per_second"]) for row in rows)
    axes.set(xlabel="perplexity, lower is better; bars: error of the difference from the best", ylabel="tokens/s")
    axes.set_ylim(0, HEADROOM * max(fastest, 1e-9))
    axes.margins(x=0.15)
    axes.set_title("speed against perplexity; area of a marker: file size")
    axes.legend(frameon=False, fontsize=8)


def _areas(files: Sequence[Row]) -> dict[str, float]:
    """Model -> area of its marker, in proportion to the file."""
    largest = max(row["file_bytes"] for row in files)
    return {row["model"]: max(SMALLEST, LARGEST * row["file_bytes"] / largest) for row in files}


def _speedup_panel(axes: Any, rows: Sequence[Row], names: Sequence[str]) -> None:
    lanes = list(dict.fromkeys(lane_name(row) for row in rows))
    places = list(range(len(rows), 0, -1))
    values = [row["speedup"] for row in rows]
    axes.barh(places, values, color=[series_style(lanes.index(lane_name(row)))["color"] for row in rows], height=0.72)
    for place, row in zip(places, rows, strict=True):
        label = f"{row['speedup']:.2f}x, {row['identical']}/{row['n_prompts']} same" + " (void)" * bool(row["failures"])
        at = (max(1.0, row["speedup"]), place)  # never across the line of plain decoding
        axes.annotate(label, at, xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    axes.axvline(1, color="#333333", linewidth=1)
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xlim(0, 1.45 * max(1, *values))
    axes.set_title("speedup over plain decoding (decode only)", fontsize=10)
