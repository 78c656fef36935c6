"""``esp-edge bench ablate``: the paper's tables on a model of one's own, side by side with the paper's figures.

A table is a set of lanes for the Spec-Bench runner. All lanes of the asked tables run in one interleaved run where
they can; tables that exact mode cannot hold, and other temperatures, get a run of their own. The figures are for other
models on another device, so what is judged is the direction of each comparison, not its size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from esp_edge.bench.ingredients import INGREDIENTS
from esp_edge.bench.paper import ABLATIONS, PAPER_MODELS, Ablation, Entry, Figure, Pair
from esp_edge.bench.plots import COLOURS, DPI, FORMATS
from esp_edge.bench.report import markdown_table
from esp_edge.bench.results import Record, RunDirectory, write_json
from esp_edge.bench.run import Plan, Progress, prepare_models
from esp_edge.bench.spec import DrafterSpec, Lane, make_lanes, parse_drafters, with_stock
from esp_edge.bench.specbench import PLOTS, measure
from esp_edge.bench.summary import ALL, complete_rounds
from esp_edge.config import MAX_EXACT_BLOCK
from esp_edge.errors import ConfigError

__all__ = [
    "CAVEAT",
    "TABLES",
    "Ask",
    "Measured",
    "ablate",
    "ablation_document",
    "ablation_text",
    "find_ablations",
    "make_runs",
    "verdict",
    "write_ablation",
]

TABLES = {**ABLATIONS, INGREDIENTS.key: INGREDIENTS}  # the paper's, and our own
ALL_TABLES = "all"
DEFAULT_MASK_INIT = "prompt-mean"  # the paper's
TILED_ROWS = 64  # llama.cpp's CPU backend
TOLERANCE = 0.01  # relative; ratios this close to 1 have no direction
SAME, OPPOSITE, CLOSE, UNKNOWN = "same direction", "opposite", "within 1 %", "paper gives no figure"
METRICS = {"tau": "tau", "speedup": "speedup", "host_ms_per_pass": "host ms/pass"}
COPIED = (  # of a summary row
    *("tau", "rows_per_pass", "tokens_per_second", "host_ms_per_pass", "model_ms_per_pass"),
    *("n_prompts", "n_tokens", "identical", "near_ties", "mask_init"),
)
MARKERS = ("s", "D")  # of the paper's models in plots
CAVEAT = (
    f"The paper's figures are for {' and '.join(PAPER_MODELS)} on a data-centre GPU, ours for the model and machine "
    "named here: compare directions, not sizes."
)
Document: TypeAlias = dict[str, Any]
RunKey: TypeAlias = tuple[float, bool]  # temperature, exact


@dataclass(frozen=True, slots=True)
class Ask:
    """What a user sets for all tables.

    Attributes:
        mask_init: of every ESP lane that does not fix its own.
        temperature: of every entry that does not fix its own.
        exact: where the table's passes are small enough for it.
    """

    mask_init: str = DEFAULT_MASK_INIT
    temperature: float = 0.0
    exact: bool = False

    def spec(self, entry: Entry) -> DrafterSpec:
        """An entry as a drafter with all its options.

        Raises:
            ConfigError: no such mask initialisation.
        """
        text = entry.drafter
        if text.startswith("esp[") and "mask-init=" not in text:
            text = f"{text[:-1]},mask-init={self.mask_init}]"
        return parse_drafters(text)[0]

    def lane(self, entry: Entry) -> Lane:
        """An entry as a lane of the runner."""
        return make_lanes([self.spec(entry)], [1])[-1]  # every entry fixes its own block complexity

    def run_key(self, ablation: Ablation, entry: Entry) -> RunKey:
        """The run in which an entry is measured."""
        temperature = self.temperature if entry.temperature is None else entry.temperature
        return temperature, self.exact and self.largest(ablation) <= MAX_EXACT_BLOCK

    def largest(self, ablation: Ablation) -> int:
        """Rows of a table's largest pass."""
        return max(self.lane(entry).block_complexity for entry in ablation.entries)


def find_ablations(names: Sequence[str]) -> list[Ablation]:
    """Tables by name, each once; ``all`` is every one.

    Raises:
        ConfigError: an unknown name, or none.
    """
    known = f"{', '.join(TABLES)} or {ALL_TABLES}"
    if not names:
        raise ConfigError(f"a table is needed: {known}")
    unknown = [name for name in names if name not in TABLES and name != ALL_TABLES]
    if unknown:
        raise ConfigError(f"a table must be one of {known}, but {unknown[0]!r} was given")
    chosen = TABLES if ALL_TABLES in names else dict.fromkeys(names)
    return [TABLES[name] for name in chosen]


def make_runs(ablations: Sequence[Ablation], ask: Ask) -> dict[RunKey, list[Lane]]:
    """(temperature, exact) -> lanes of one run, plain decoding first; a lane that several tables share runs once."""
    runs: dict[RunKey, list[DrafterSpec]] = {}
    for ablation in ablations:
        for entry in ablation.entries:
            runs.setdefault(ask.run_key(ablation, entry), []).append(ask.spec(entry))
    return {key: make_lanes(specs, [1]) for key, specs in runs.items()}


# -- measuring -------------------------------------------------------------------------------------------------------


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


def ablate(
    ablations: Sequence[Ablation],
    plan: Plan,
    ask: Ask,
    out: Path,
    *,
    command: str = "",
    plots: bool = True,
    progress: Progress | None = None,
) -> list[Document]:
    """Measure what is missing in the directory, then write one report, JSON document and plot a table.

    Args:
        plan: models, questions, parameters and repetitions; its lanes are replaced by those of the tables.
        out: the runs are folders in it, named after the tables.
        progress: called with (answers recorded, answers, what is being done), run by run.

    Raises:
        ConfigError: a folder of the directory belongs to another run.
    """
    prepare_models(plan)  # a run in the default mode may come before an exact one
    runs = make_runs(ablations, ask)
    base = ALL_TABLES if len(ablations) == len(TABLES) else "+".join(ablation.key for ablation in ablations)
    measured = {}
    for key, lanes in runs.items():
        folder = out / _folder(base, key, ask)
        part = _part(plan, key, lanes)
        measure(part, folder, command=command, plots=False, progress=progress or (lambda _done, _total, _text: None))
        measured[key] = Measured.read(folder)
    documents = [ablation_document(ablation, ask, measured) for ablation in ablations]
    for document in documents:
        write_ablation(document, out, plots=plots)
    return documents


def _folder(base: str, key: RunKey, ask: Ask) -> str:
    temperature, exact = key
    at = f"-temp-{temperature:g}" if temperature != ask.temperature else ""
    return f"run-{base}{at}{'-default-mode' if ask.exact and not exact else ''}"


def _part(plan: Plan, key: RunKey, lanes: Sequence[Lane]) -> Plan:
    """The plan of one run. Draws are from the whole distribution, as the paper's are, with no filter."""
    temperature, exact = key
    params = replace(plan.params, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    config = replace(plan.config, exact=exact)
    stock = exact or config.kernels != "stock"
    return replace(plan, lanes=with_stock(lanes) if stock else lanes, params=params, config=config)


# -- comparing -------------------------------------------------------------------------------------------------------


def ablation_document(ablation: Ablation, ask: Ask, measured: Mapping[RunKey, Measured]) -> Document:
    """The document of ``ablate-TABLE.json``: settings, rows and judged pairs of every model, JSON-ready."""
    keys = dict.fromkeys(ask.run_key(ablation, entry) for entry in ablation.entries)
    summaries = [measured[key].summary for key in keys]
    models = list(dict.fromkeys(row["model"] for row in summaries[0]["rows"]))
    return {
        "table": ablation.key,
        "title": ablation.title,
        "notes": [CAVEAT, *_notes(ablation, ask)],
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


# -- telling ---------------------------------------------------------------------------------------------------------


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
        parts.append(_rows_table(rows).rstrip("\n"))
        parts.append(_pairs_table([pair for pair in document["pairs"] if pair["model"] == model]).rstrip("\n"))
        if figures and model in figures:
            parts.append(f"![{document['table']}]({figures[model]})")
    return "\n\n".join(parts) + "\n"


def _settings_text(document: Document) -> str:
    machine = document["machine"]
    runs = " and ".join(_run_text(settings) for settings in document["settings"])
    layers = machine.get("n_gpu_layers")
    where = f"{machine['cpu']}, {machine['threads']} threads"
    if layers:
        where += f", {'all' if layers == -1 else layers} layers on the GPU"
    return (
        f"Measured: {runs}; lanes interleaved question by question; {where}; {machine['date']}. tau and speedup are "
        "pooled, decode only. In the second table `ours` and the paper's columns are left / right, `questions` counts "
        "those on which left is better and worse."
    )


def _run_text(settings: Mapping[str, Any]) -> str:
    draw = "greedy" if settings["temperature"] == 0 else f"T = {settings['temperature']:g}, seed {settings['seed']}"
    mode = "exact mode, speedup over plain decoding of the default mode" if settings["exact"] else "default mode"
    questions = str(settings["questions"]).partition(",")[0]
    return f"{questions}, up to {settings['max_tokens']} tokens, {draw}, {mode}, repeated {settings['repeat']}x"


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["configuration", "rows", "tau", "speedup", "host ms/pass", "same as plain", "near-ties"]
    for name in PAPER_MODELS:
        head += [f"{name} tau", "speedup"]
    return markdown_table(head, [_cells(row) for row in rows])


def _cells(row: Mapping[str, Any]) -> list[str]:
    became = row["mask_init"]
    name = row["configuration"] + (f" = {became}" if became and "mask-init=auto" in row["drafter"] else "")
    spread = "" if row["speedup_range"] is None else " ({:.2f}..{:.2f})".format(*row["speedup_range"])
    cells = [name, str(row["block_complexity"]), f"{row['tau']:.3f}", f"{row['speedup']:.2f}x{spread}"]
    cells += [f"{row['host_ms_per_pass']:.2f}", f"{row['identical']}/{row['n_prompts']}", str(row["near_ties"])]
    for figure in row["paper"].values():
        cells += [_figure_text(figure["tau"], ""), _figure_text(figure["speedup"], "x")]
    return cells


def _figure_text(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.2f}{unit}" if round(value, 2) == value else f"{value:.3f}{unit}"


def _pairs_table(pairs: Sequence[Mapping[str, Any]]) -> str:
    head = ["left against right", "of", "ours", "questions", *PAPER_MODELS, "verdict"]
    return markdown_table(
        head,
        [
            [
                f"{pair['left']} / {pair['right']}",
                METRICS[pair["metric"]],
                _percent(pair["ratio"]),
                _votes_text(pair["questions"]),
                *(_percent(ratio) for ratio in pair["paper"].values()),
                pair["verdict"] + (f" ({pair['near']})" if pair["verdict"] == CLOSE else ""),
            ]
            for pair in pairs
        ],
    )


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
        _panel(axes, rows, key)
    panels[0].set_yticks(range(len(rows), 0, -1), [row["configuration"] for row in rows], fontsize=8)
    figure.suptitle(f"{document['title']}\n{model}; markers: the paper's models, on a GPU", fontsize=10)
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    name = f"ablate-{document['table']}-{model}"
    for suffix in FORMATS:
        figure.savefig(folder / f"{name}.{suffix}", dpi=DPI)
    return f"{name}.{FORMATS[0]}"


def _panel(axes: Any, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    places = list(range(len(rows), 0, -1))
    axes.barh(places, [row[key] for row in rows], color=COLOURS[4], height=0.66, label="here")
    furthest = 1.0
    for place, row in zip(places, rows, strict=True):
        values = [row[key], *(figure[key] for figure in row["paper"].values() if figure[key] is not None)]
        furthest = max(furthest, *values)
        same = f", {row['identical']}/{row['n_prompts']} same" if key == "speedup" else ""
        text, inside = f"{row[key]:.2f}{same}", (4, 0)
        axes.annotate(text, (0, place), xytext=inside, textcoords="offset points", va="center", fontsize=7)
    for name, marker, colour in zip(PAPER_MODELS, MARKERS, (COLOURS[5], COLOURS[0]), strict=True):
        found = [(row["paper"][name][key], place) for place, row in zip(places, rows, strict=True)]
        shown = [(value, place) for value, place in found if value is not None]
        axes.plot([value for value, _ in shown], [place for _, place in shown], marker, color=colour, ms=5, label=name)
    axes.axvline(1, color="#333333", linewidth=1)
    axes.set_xlim(0, 1.08 * furthest)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("tau" if key == "tau" else "speedup over plain decoding (decode only)")
