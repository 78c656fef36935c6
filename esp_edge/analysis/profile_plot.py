"""The plot of a profile: stacked bars, milliseconds above and shares below. matplotlib is imported when needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esp_edge.analysis.plots import DPI, FORMATS

__all__ = ["GROUPS", "plot_profile"]

Document = Mapping[str, Any]
GROUPS: dict[str, tuple[str, ...]] = {
    "q, k, v": ("q", "k", "v", "qkv"),
    "o": ("o",),
    "gate, up": ("gate", "up"),
    "down": ("down",),
    "output head": ("head",),
    "attention": ("attention",),
    "norm, rope, elementwise": ("norm", "rope", "elementwise"),
    "copies, lookups, other": ("product", "copy", "get_rows", "other"),
    "rest": (),
}
"""What is one colour -> the parts in it."""

# Okabe and Ito, grey for the rest; hatches tell neighbours apart without colours, too
_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#999933", "#e69f00", "#d55e00", "#cc79a7", "#aaaaaa", "#555555")
_HATCHES = ("", "//", "", "\\\\", "", "..", "", "xx", "")


def plot_profile(document: Document, folder: Path) -> str:
    """``profile.png`` and ``profile.svg``, a column of panels for each context; the PNG's name.

    Args:
        document: of :func:`esp_edge.analysis.profile.summarize`.
        folder: where the files go; it exists.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to import

    contexts = list(dict.fromkeys(one["context"] for one in document["passes"]))
    figure = Figure(figsize=(2.6 + 3.4 * len(contexts), 7.0), layout="constrained")
    panels = figure.subplots(2, len(contexts), squeeze=False)
    for column, context in enumerate(contexts):
        passes = [one for one in document["passes"] if one["context"] == context]
        _bars(panels[0][column], passes, shares=False)
        _bars(panels[1][column], passes, shares=True)
        panels[0][column].set_title(f"context {context}", fontsize=10)
        panels[1][column].set_xlabel("rows of the pass")
    panels[0][0].set_ylabel("milliseconds")
    panels[1][0].set_ylabel("share of the pass")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)  # in the order of the stack
    figure.suptitle(f"{document.get('model', '')}: where the time of a pass goes".lstrip(": "), fontsize=11)
    for suffix in FORMATS:
        figure.savefig(folder / f"profile.{suffix}", dpi=DPI)
    return f"profile.{FORMATS[0]}"


def _bars(axes: Any, passes: Sequence[Document], *, shares: bool) -> None:
    places = range(len(passes))
    stacks = [_stack(one) for one in passes]
    totals = [sum(stack.values()) if shares else 1.0 for stack in stacks]
    below = [0.0] * len(passes)
    for number, name in enumerate(GROUPS):
        values = [stack[name] / total for stack, total in zip(stacks, totals, strict=True)]
        style = {"color": _COLOURS[number], "hatch": _HATCHES[number], "edgecolor": "white", "linewidth": 0.4}
        axes.bar(places, values, bottom=below, width=0.8, label=name, **style)
        below = [low + value for low, value in zip(below, values, strict=True)]
    axes.set_xticks(list(places), [str(one["rows"]) for one in passes])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    if shares:
        axes.set_ylim(0, 1)


def _stack(one: Document) -> dict[str, float]:
    """Milliseconds by colour; a rest below zero, which is noise or the price of separate nodes, has no bar."""
    times = {op["op"]: op["ms"] for op in one["ops"]}
    stack = {name: sum(times.get(part, 0.0) for part in parts) for name, parts in GROUPS.items()}
    return stack | {"rest": max(0.0, one["rest_ms"])}
