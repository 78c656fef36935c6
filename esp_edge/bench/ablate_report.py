"""Markdown, JSON and a plot of a table of ``bench ablate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esp_edge.bench.ablate_compare import CLOSE, Document
from esp_edge.bench.paper import ABLATIONS, PAPER_MODELS
from esp_edge.bench.plots import COLOURS, DPI, FORMATS
from esp_edge.bench.report import markdown_table
from esp_edge.bench.results import write_json
from esp_edge.bench.specbench import PLOTS

__all__ = ["ablation_text", "write_ablation"]

METRICS = {"tau": "tau", "speedup": "speedup", "host_ms_per_pass": "host ms/pass"}
MARKERS = ("s", "D")  # of the paper's models in plots


def ablation_text(document: Document, figures: Mapping[str, str] | None = None) -> str:
    """Markdown of a document.

    Args:
        figures: model -> path of its plot, relative to the report.
    """
    parts = [f"# {document['title']}", *document["notes"], _settings_text(document)]
    if document["failures"]:
        parts.insert(1, f"**DIFFERENT OUTPUT: {document['failures']} answers are not plain decoding's.**")
    if document["command"]:
        parts.append(f"```\n{document['command']}\n```")
    for model in dict.fromkeys(row["model"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["model"] == model]
        parts.append(f"## {model} ({rows[0]['quant']})")
        parts.append(_rows_table(document, rows).rstrip("\n"))
        pairs = [pair for pair in document["pairs"] if pair["model"] == model]
        parts.append(_pairs_table(document, pairs).rstrip("\n"))
        if figures and model in figures:
            parts.append(f"![{document['table']}]({figures[model]})")
    return "\n\n".join(parts) + "\n"


def _settings_text(document: Document) -> str:
    simulated = document.get("simulated")
    return (_measured_text(document) if simulated is None else _simulated_text(document, simulated)) + (
        " tau and speedup are pooled, decode only. In the second table `ours` and the paper's columns are left / "
        "right, `questions` counts those on which left is better and worse."
    )


def _simulated_text(document: Document, simulated: Mapping[str, Any]) -> str:
    settings, (plain, drafting) = document["settings"][0], simulated["device"]["host_ms"]
    mode = "exact mode" if settings["exact"] else "default mode"
    draw = "greedy" if settings["temperature"] == 0 else f"T = {settings['temperature']:g}, seed {settings['seed']}"
    return (
        f"Replayed: {simulated['answers']} recorded answers of {simulated['split']}; up to {settings['max_tokens']} "
        f"tokens, {draw}, {mode}. Speedups are simulated: passes take the time of {simulated['device']['name']}, and "
        f"{plain:g} ms (plain) or {drafting:g} ms (drafting) of our own. `auto` learns from rejected rows, too, which "
        "a trace does not have, so live it is a little better."
    )


def _measured_text(document: Document) -> str:
    machine = document["machine"]
    runs = " and ".join(_run_text(settings) for settings in document["settings"])
    layers = machine.get("n_gpu_layers")
    where = f"{machine['cpu']}, {machine['threads']} threads"
    if layers:
        where += f", {'all' if layers == -1 else layers} layers on the GPU"
    return f"Measured: {runs}; lanes interleaved question by question; {where}; {machine['date']}."


def _run_text(settings: Mapping[str, Any]) -> str:
    draw = "greedy" if settings["temperature"] == 0 else f"T = {settings['temperature']:g}, seed {settings['seed']}"
    mode = "exact mode, speedup over plain decoding of the default mode" if settings["exact"] else "default mode"
    questions = str(settings["questions"]).partition(",")[0]
    return f"{questions}, up to {settings['max_tokens']} tokens, {draw}, {mode}, repeated {settings['repeat']}x"


def _papers(document: Document) -> Sequence[str]:
    """The paper's models; none for a table that is our own."""
    return PAPER_MODELS if document["table"] in ABLATIONS else ()


def _rows_table(document: Document, rows: Sequence[Mapping[str, Any]]) -> str:
    """A replay has nothing to compare with plain decoding: it follows its tokens."""
    measured = document.get("simulated") is None
    head = ["configuration", "rows", "tau", "rows/pass", "speedup" if measured else "simulated speed", "host ms/pass"]
    head += ["same as plain", "near-ties"] if measured else []
    for name in _papers(document):
        head += [f"{name} tau", "speedup"]
    return markdown_table(head, [_cells(row, _papers(document), measured=measured) for row in rows])


def _cells(row: Mapping[str, Any], papers: Sequence[str], *, measured: bool) -> list[str]:
    became = row["mask_init"]
    name = row["configuration"] + (f" = {became}" if became and "mask-init=auto" in row["drafter"] else "")
    spread = "" if row["speedup_range"] is None else " ({:.2f}..{:.2f})".format(*row["speedup_range"])
    cells = [name, str(row["block_complexity"]), f"{row['tau']:.3f}", f"{row['rows_per_pass']:.1f}"]
    cells += [f"{row['speedup']:.2f}x{spread}", f"{row['host_ms_per_pass']:.2f}"]
    cells += [f"{row['identical']}/{row['n_prompts']}", str(row["near_ties"])] if measured else []
    for figure in (row["paper"][name] for name in papers):
        cells += [_figure_text(figure["tau"], ""), _figure_text(figure["speedup"], "x")]
    return cells


def _figure_text(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.2f}{unit}" if round(value, 2) == value else f"{value:.3f}{unit}"


def _pairs_table(document: Document, pairs: Sequence[Mapping[str, Any]]) -> str:
    papers = _papers(document)
    head = ["left against right", "of", "ours", "questions", *papers, *(["verdict"] if papers else [])]
    return markdown_table(
        head,
        [
            [
                f"{pair['left']} / {pair['right']}",
                METRICS[pair["metric"]],
                _percent(pair["ratio"]),
                _votes_text(pair["questions"]),
                *(_percent(pair["paper"][name]) for name in papers),
                *([_verdict_text(pair)] if papers else []),
            ]
            for pair in pairs
        ],
    )


def _verdict_text(pair: Mapping[str, Any]) -> str:
    return str(pair["verdict"]) + (f" ({pair['near']})" if pair["verdict"] == CLOSE else "")


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def _votes_text(votes: Mapping[str, int] | None) -> str:
    return "-" if votes is None else f"{votes['for']} : {votes['against']} of {votes['of']}"


def write_ablation(document: Document, out: Path, *, plots: bool = True) -> None:
    """Write ``ablate-TABLE.json``, ``ablate-TABLE.md`` and a plot a model (PNG and SVG)."""
    name = f"ablate-{document['table']}"
    write_json(out / f"{name}.json", document)
    figures = {}
    if plots:
        (out / PLOTS).mkdir(exist_ok=True)
        for model in dict.fromkeys(row["model"] for row in document["rows"]):
            figures[model] = f"{PLOTS}/{_plot(document, model, out / PLOTS)}"
    (out / f"{name}.md").write_text(ablation_text(document, figures), "utf-8")


def _plot(document: Document, model: str, folder: Path) -> str:
    """Our tau and speedup as bars, the paper's as markers beside them; returns the name of the PNG file."""
    from matplotlib.figure import Figure as NewFigure  # noqa: PLC0415 - optional, and slow to import

    rows = [row for row in document["rows"] if row["model"] == model]
    figure = NewFigure(figsize=(10.0, 2.1 + 0.36 * len(rows)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key in zip(panels, ("tau", "speedup"), strict=True):
        _panel(axes, rows, key, document)
    panels[0].set_yticks(range(len(rows), 0, -1), [row["configuration"] for row in rows], fontsize=8)
    markers = "; markers: the paper's models, on a GPU" if _papers(document) else ""
    figure.suptitle(f"{document['title']}\n{model}{markers}", fontsize=10)
    if _papers(document):
        handles, labels = panels[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    name = f"ablate-{document['table']}-{model}"
    for suffix in FORMATS:
        figure.savefig(folder / f"{name}.{suffix}", dpi=DPI)
    return f"{name}.{FORMATS[0]}"


def _panel(axes: Any, rows: Sequence[Mapping[str, Any]], key: str, document: Document) -> None:
    simulated = document.get("simulated") is not None
    places = list(range(len(rows), 0, -1))
    axes.barh(places, [row[key] for row in rows], color=COLOURS[4], height=0.66, label="here")
    furthest = 1.0
    for place, row in zip(places, rows, strict=True):
        values = [row[key], *(figure[key] for figure in row["paper"].values() if figure[key] is not None)]
        furthest = max(furthest, *values)
        same = f", {row['identical']}/{row['n_prompts']} same" if key == "speedup" and not simulated else ""
        text, inside = f"{row[key]:.2f}{same}", (4, 0)
        axes.annotate(text, (0, place), xytext=inside, textcoords="offset points", va="center", fontsize=7)
    for name, marker, colour in zip(_papers(document), MARKERS, (COLOURS[5], COLOURS[0]), strict=False):
        found = [(row["paper"][name][key], place) for place, row in zip(places, rows, strict=True)]
        shown = [(value, place) for value, place in found if value is not None]
        axes.plot([value for value, _ in shown], [place for _, place in shown], marker, color=colour, ms=5, label=name)
    axes.axvline(1, color="#333333", linewidth=1)
    axes.set_xlim(0, 1.08 * furthest)
    axes.spines[["top", "right"]].set_visible(False)
    speed = "simulated speed" if simulated else "speedup over plain decoding (decode only)"
    axes.set_xlabel("tau" if key == "tau" else speed)
