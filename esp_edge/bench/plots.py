"""Plots of a summary document, each as PNG and SVG. matplotlib is an optional extra and imported when it is needed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esp_edge.bench.report import cost_curves, curve_name, lane_name
from esp_edge.bench.spec import PLAIN
from esp_edge.bench.summary import ALL
from esp_edge.errors import ConfigError

__all__ = [
    "COLOURS",
    "DPI",
    "FORMATS",
    "category_figure",
    "depth_figure",
    "drafter_figure",
    "label_width",
    "new_figure",
    "plot_cost",
    "plot_summary",
    "require_matplotlib",
    "save_figure",
    "series_style",
]

FORMATS = ("png", "svg")
DPI = 130
MAX_DEPTH = 12
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999933", "#555555")  # Okabe and Ito
MARKERS = "os^Dv<>P"
Row = Mapping[str, Any]
Figure = Any


def require_matplotlib() -> None:
    """Raise ConfigError where matplotlib is missing: better before an hour of measuring than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError('plots need matplotlib: pip install "esp-edge[bench]", or give --no-plots')


def plot_summary(rows: Sequence[Row], folder: Path, model: str) -> list[str]:
    """tau, speedup, categories and acceptance by depth of one model; returns the names of the PNG files.

    Args:
        rows: summary rows of that model.
        folder: where the files go; it exists.
    """
    total = [row for row in rows if row["category"] == ALL]
    figures = {
        "tau": drafter_figure(total, "tau", "tau: tokens per decode pass"),
        "speedup": drafter_figure(total, "speedup", "speedup over plain decoding (decode only)"),
        "tau-by-category": category_figure(rows, "tau", "tau by category"),
        "speedup-by-category": category_figure(rows, "speedup", "speedup by category"),
        "acceptance": depth_figure(total),
    }
    made = {name: figure for name, figure in figures.items() if figure is not None}
    return [save_figure(figure, folder, f"{name}-{model}", model) for name, figure in made.items()]


def plot_cost(rows: Sequence[Row], folder: Path, model: str) -> str:
    """T(n) against n, a line a context and thread count, with its spread; returns the name of the PNG file."""
    figure, axes = new_figure(7.5, 4.8)
    curves = cost_curves(rows)
    for number, ((context, threads), points) in enumerate(curves.items()):
        sizes = [row["rows"] for row in points]
        style = series_style(number)
        axes.plot(sizes, [row["ms"] for row in points], label=curve_name(context, threads), ms=3, **style)
        low, high = [row["ms_min"] for row in points], [row["ms_max"] for row in points]
        axes.fill_between(sizes, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.set(xlabel="rows of the pass", ylabel="milliseconds", title="T(n), the time of a pass: median and range")
    axes.set_ylim(0, 1.5 * max(row["ms"] for row in rows))  # one disturbed pass must not flatten the curves
    axes.legend(frameon=False)
    return save_figure(figure, folder, f"cost-{model}", model)


# -- drawing ---------------------------------------------------------------------------------------------------------


def new_figure(width: float, height: float) -> tuple[Figure, Any]:
    """A figure of so many inches, and its axes."""
    from matplotlib.figure import Figure as NewFigure  # noqa: PLC0415 - optional, and slow to import

    figure = NewFigure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    return figure, axes


def save_figure(figure: Figure, folder: Path, name: str, model: str) -> str:
    """Put the model below the title of the first axes and write every format; returns the name of the PNG file."""
    axes = figure.axes[0]
    axes.set_title(f"{axes.get_title()}\n{model}", fontsize=10)
    for suffix in FORMATS:
        figure.savefig(folder / f"{name}.{suffix}", dpi=DPI)
    return f"{name}.{FORMATS[0]}"


def series_style(number: int) -> dict[str, Any]:
    """Colour, marker and line of a series: told apart without colours, too."""
    lines, turn = ("-", "--", ":"), number // len(COLOURS)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[(number + turn) % len(MARKERS)],
        "linestyle": lines[turn % len(lines)],
    }


def drafter_figure(rows: Sequence[Row], key: str, title: str) -> Figure | None:
    """A bar a drafter and block complexity; names stand on the left, where long ones can be read."""
    bars = [row for row in rows if row["drafter"] != PLAIN]
    if not bars:
        return None
    names = [lane_name(row) for row in bars]
    figure, axes = new_figure(5.7 + label_width(names), 1.3 + 0.32 * len(bars))
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color="#dddddd", linewidth=0.7)
    blocks = sorted({row["block_complexity"] for row in bars})
    colours = [COLOURS[blocks.index(row["block_complexity"]) % len(COLOURS)] for row in bars]
    places = range(len(bars), 0, -1)
    values = [row[key] for row in bars]
    axes.barh(places, values, color=colours, height=0.72)
    ends = values
    if key == "speedup":
        ends = [max(row["speedup"], row["speedup_max"]) for row in bars]
        axes.errorbar(values, places, xerr=_spread(bars), fmt="none", ecolor="#333333", elinewidth=1, capsize=2)
    for place, row, end in zip(places, bars, ends, strict=True):
        at = (max(1.0, end), place)  # never across the line of plain decoding
        axes.annotate(_label(row, key), at, xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    axes.axvline(1, color="#333333", linewidth=1)
    axes.set_yticks(list(places), names, fontsize=8)
    axes.set_ylim(0.4, len(bars) + 0.6)
    axes.set_xlim(0, (1.4 if key == "speedup" else 1.1) * max(1, *ends))
    axes.set_title(title)
    return figure


def label_width(labels: Sequence[str]) -> float:
    """Inches that the longest of these labels takes at font size 8, or what usual ones take."""
    return max(1.8, 0.075 * max(map(len, labels)))


def _spread(rows: Sequence[Row]) -> list[list[float]]:
    """Distances to the slowest and fastest repetition; rounding may leave a bound on the wrong side by a digit."""
    down = [max(0.0, row["speedup"] - row["speedup_min"]) for row in rows]
    return [down, [max(0.0, row["speedup_max"] - row["speedup"]) for row in rows]]


def _label(row: Row, key: str) -> str:
    """The value; a speedup never without how many answers are plain decoding's."""
    if key != "speedup":
        return f"{row[key]:.2f}"
    return f"{row[key]:.2f}x, {row['identical']}/{row['n_prompts']} same"


def category_figure(rows: Sequence[Row], key: str, title: str) -> Figure | None:
    """A heat map: drafters down, categories across; white is no gain, blue is better, red is worse."""
    lanes = list(dict.fromkeys(lane_name(row) for row in rows if row["drafter"] != PLAIN))
    categories = list(dict.fromkeys(row["category"] for row in rows))
    if not lanes:
        return None
    values = {(lane_name(row), row["category"]): row[key] for row in rows}
    grid = [[values.get((lane, category), float("nan")) for category in categories] for lane in lanes]
    same = {lane_name(row): f"  {row['identical']}/{row['n_prompts']} same" for row in rows if row["category"] == ALL}
    labels = [lane + (same.get(lane, "") if key == "speedup" else "") for lane in lanes]
    width = 0.8 + label_width(labels) + 0.62 * max(4, len(categories))  # the title needs four
    figure, axes = new_figure(width, 1.9 + 0.34 * len(lanes))
    axes.grid(visible=False)
    axes.imshow(grid, cmap="RdBu", norm=_around_one(grid), aspect="auto")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            axes.annotate(f"{value:.2f}", (x, y), ha="center", va="center", fontsize=8, color=_ink(value, grid))
    axes.set_xticks(range(len(categories)), categories, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(lanes)), labels, fontsize=8)
    axes.tick_params(length=0)
    axes.set_title(title)
    return figure


def _reach(grid: Sequence[Sequence[float]]) -> float:
    """Largest distance from 1, at least 0.25 so that noise is not painted as a difference."""
    return max(0.25, *(abs(value - 1) for line in grid for value in line if value == value))  # noqa: PLR0124 - not NaN


def _around_one(grid: Sequence[Sequence[float]]) -> Any:
    from matplotlib.colors import Normalize  # noqa: PLC0415

    reach = _reach(grid)
    return Normalize(1 - reach, 1 + reach)


def _ink(value: float, grid: Sequence[Sequence[float]]) -> str:
    """White on dark cells."""
    return "white" if abs(value - 1) > 0.65 * _reach(grid) else "black"


def depth_figure(rows: Sequence[Row]) -> Figure | None:
    """Share of passes accepted to each depth, a line a drafter at its largest block complexity."""
    largest: dict[str, Row] = {}
    for row in rows:
        if row["accepted_by_depth"] and row["passes"]:
            largest[row["drafter"]] = max(row, largest.get(row["drafter"], row), key=_block)
    if not largest:
        return None
    figure, axes = new_figure(7.2 + label_width([lane_name(row) for row in largest.values()]), 4.8)
    for number, row in enumerate(largest.values()):
        shares = [accepted / row["passes"] for accepted in row["accepted_by_depth"][:MAX_DEPTH]]
        axes.plot(range(1, len(shares) + 1), shares, label=lane_name(row), ms=4, **series_style(number))
    deepest = max(len(row["accepted_by_depth"][:MAX_DEPTH]) for row in largest.values())
    axes.set_xticks(range(1, deepest + 1))
    axes.set(xlabel="depth of the draft", ylabel="share of passes accepted to that depth")
    axes.set_title("acceptance by depth, at the largest block complexity")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _block(row: Row) -> int:
    return int(row["block_complexity"])
