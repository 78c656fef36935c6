"""The alignment plot. matplotlib is an optional extra and imported when it is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["plot_alignment"]

FORMATS = ("png", "svg")
DPI = 130
ACCEPTED, REJECTED, COUNT = "#0072b2", "#d55e00", "#dddddd"  # the first two from Okabe and Ito
STYLES = (("o", "-"), ("s", "--"))
Document = Mapping[str, Any]


def plot_alignment(document: Document, folder: Path) -> str:
    """Cosine by layer, and share in the Top-K by cosine, as ``alignment.png`` and ``.svg``; the PNG's name.

    Args:
        document: of :func:`esp_edge.analysis.alignment.summarize`, with at least one step.
        folder: where the files go; it exists.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to import

    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _by_layer(left, document["results"][0])
    _by_cosine(right, document)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{document.get('model', '')}: mask row against the true token in its slot".lstrip(": "))
    for suffix in FORMATS:
        figure.savefig(folder / f"alignment.{suffix}", dpi=DPI)
    return f"alignment.{FORMATS[0]}"


def _by_layer(axes: Any, result: Document) -> None:
    layers = result["layers"]
    groups = (("accepted", ACCEPTED, *STYLES[0]), ("rejected", REJECTED, *STYLES[1]))
    for name, colour, marker, line in groups:
        rows = [(layer["layer"], layer[name]["mean"], layer[name]["se"] or 0.0) for layer in layers if result[name]]
        if not rows:
            continue
        numbers, means, errors = zip(*rows, strict=True)
        label = f"{name} ({result[name]} steps)"
        axes.plot(numbers, means, color=colour, marker=marker, linestyle=line, ms=3.5, label=label)
        low = [mean - error for mean, error in zip(means, errors, strict=True)]
        high = [mean + error for mean, error in zip(means, errors, strict=True)]
        axes.fill_between(numbers, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.grid(axis="y", color=COUNT, linewidth=0.7)
    axes.set(xlabel="layer", ylabel="cosine, mean and standard error")
    axes.set_title(f"by layer, Top-{result['top_k']}", fontsize=10)
    axes.legend(frameon=False)


def _by_cosine(axes: Any, document: Document) -> None:
    results = document["results"]
    counts = axes.twinx()
    counts.set_zorder(axes.get_zorder() - 1)  # bars behind the lines
    axes.patch.set_visible(False)
    bins = results[0]["bins"]
    middles = [(each["low"] + each["high"]) / 2 for each in bins]
    counts.bar(middles, [each["steps"] for each in bins], width=0.045, color=COUNT)
    counts.set_ylabel("steps (bars)")
    counts.spines[["top"]].set_visible(False)
    for result, colour, (marker, line) in zip(results, (ACCEPTED, REJECTED), STYLES, strict=False):
        shares = [each["share"] for each in result["bins"]]
        errors = [math.sqrt(s * (1 - s) / each["steps"]) for s, each in zip(shares, result["bins"], strict=True)]
        label = f"in Top-{result['top_k']}"
        axes.errorbar(
            middles, shares, errors, color=colour, marker=marker, linestyle=line, ms=4, elinewidth=1, label=label
        )
    star = results[0]["delta_star"]
    if star is not None:
        axes.axvline(star["cosine"], color="#333333", linewidth=1, linestyle=":", label=f"delta* {star['cosine']:.2f}")
    axes.set(xlabel="cosine after the last layer", ylabel="share of true tokens, with its standard error")
    axes.set_ylim(-0.02, 1.04)
    axes.set_title("share in the Top-K by cosine", fontsize=10)
    axes.legend(frameon=False, loc="upper left")
