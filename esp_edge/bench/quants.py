"""``esp-edge bench quants``: one model in several quantisations; size, cost of rows, speed and perplexity side by side.

files -> perplexity and T(n) of each -> the Spec-Bench run over all of them -> one table, one plot, one answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esp_edge.bench.cost import cost_rows
from esp_edge.bench.machine import describe_run
from esp_edge.bench.perplexity import Corpus, Perplexity, perplexity, read_stored, relative, store
from esp_edge.bench.quant_plots import plot_quants
from esp_edge.bench.report import markdown_table
from esp_edge.bench.results import Difference, write_json
from esp_edge.bench.run import ModelFile, Plan, open_run, prepare_models
from esp_edge.bench.spec import PLAIN
from esp_edge.bench.specbench import COST_CONTEXT, COST_ROWS, PLOTS
from esp_edge.bench.specbench import measure as measure_speed
from esp_edge.bench.summary import ALL
from esp_edge.config import MAX_BLOCK, MAX_EXACT_BLOCK
from esp_edge.models import gguf
from esp_edge.models.quantize import FULL_PRECISION, quantize, target_names
from esp_edge.session import Model, load

__all__ = [
    "SOURCE",
    "Weights",
    "answer",
    "make_files",
    "measure",
    "overview",
    "quant_report",
    "quant_rows",
    "quant_table",
]

SOURCE = "source"  # stands for the source file itself in --quants
DETAILS = "benchmark.md"
TIE = 0.05  # speeds this close are not told apart by one short run
Row = Mapping[str, Any]
Progress = Callable[[int, int, str], None]


# -- files -----------------------------------------------------------------------------------------------------------


def make_files(
    source: Path, quants: Sequence[str], folder: Path, *, threads: int = 0, progress: Callable[[str, float], None]
) -> list[ModelFile]:
    """The source in the asked quantisations, each once, in the order asked; what is there already is not made again.

    Args:
        quants: llama.cpp's names, or ``source``. The source's own quantisation means the source itself: making it again
            would only lose quality.
        folder: where new files go.
        threads: 0 = all cores.
        progress: told (file name, part done 0..1).

    Raises:
        ConfigError: an unknown name.
        ModelFileError, UnsupportedModelError: see :func:`esp_edge.models.quantize.quantize`.

    Warns:
        QuantizationWarning: the source is quantised already.
    """
    own = gguf.quant_name(gguf.preflight(source))
    wanted = [own if name.strip().lower() == SOURCE else target_names([name])[0] for name in quants]
    wanted = list(dict.fromkeys(wanted)) or target_names([])
    others = [name for name in wanted if name != own]
    made = quantize(source, others, folder, progress=progress, threads=threads) if others else []
    paths = dict(zip(others, made, strict=True)) | {own: source}
    return [ModelFile.read(paths[name]) for name in wanted]


@dataclass(frozen=True, slots=True)
class Weights:
    """How large a file is.

    Attributes:
        file_bytes: on disk, all parts.
        bits_per_weight: of its tensors, the unquantised ones included.
    """

    file_bytes: int
    bits_per_weight: float

    @classmethod
    def read(cls, path: Path) -> Weights:
        """What the headers of a model say."""
        parts = gguf.read_parts(gguf.read_header(path))
        tensors = [tensor for part in parts for tensor in part.tensors.values()]
        n_weights = sum(math.prod(tensor.shape) for tensor in tensors)
        bits = 8 * sum(tensor.n_bytes for tensor in tensors)
        return cls(sum(part.file_size for part in parts), bits / max(1, n_weights))


# -- measuring -------------------------------------------------------------------------------------------------------


def measure(
    plan: Plan,
    corpus: Corpus,
    out: Path,
    *,
    source: ModelFile,
    within: float = 2.0,
    command: str = "",
    plots: bool = True,
    progress: Progress,
) -> dict[str, Any]:
    """Everything the command does once the files are there, but print; the document of ``quants.json``.

    Stopped anywhere, it goes on in the same directory: perplexities and costs are kept by file, answers one by one.

    Args:
        plan: ``models`` are the quantisations.
        corpus: what perplexity is measured on.
        out: directory of the run, new or of an earlier run with the same settings.
        source: the file they were made from.
        within: percent that a perplexity may be above the best one for a file to be recommended.
        command: shown in the report.
        plots: draw them (needs matplotlib).
        progress: called with (done, total, what is being done); each stage has a total of its own.

    Raises:
        PromptError: the text for the perplexity is too short.
        ConfigError: the directory belongs to another run, or no question fits the context.
    """
    prepare_models(plan)
    open_run(plan, out)  # a directory of another run is refused before anything is measured
    found = {file.name: _file_facts(plan, file, corpus, out, progress) for file in plan.models}
    summary = measure_speed(plan, out, command=command, plots=plots, progress=progress)
    (out / "report.md").replace(out / DETAILS)
    weights = {file.name: Weights.read(file.path) for file in plan.models}
    rows = quant_rows(summary, weights, found)
    document = {
        "machine": summary["machine"],
        "settings": summary["settings"],
        "command": command,
        "source": {"model": source.name, "quant": source.quant},
        "text": corpus.settings | {"windows": next(iter(found.values())).windows},
        "within_percent": within,
        "answer": answer(rows, within),
        "rows": rows,
        "failures": summary["failures"],
    }
    write_json(out / "quants.json", document)
    figures = [f"{PLOTS}/{plot_quants(rows, out / PLOTS, source.name)}"] if plots else []
    (out / "report.md").write_text(quant_report(document, figures), "utf-8")
    return document


def _file_facts(plan: Plan, file: ModelFile, corpus: Corpus, out: Path, progress: Progress) -> Perplexity:
    """Perplexity of a file; its T(n) is left where the Spec-Bench run looks for it. Loads it where one is missing."""
    stored = read_stored(out, file.path, corpus, plan.config)
    sizes, cost = _cost_sizes(plan), out / f"cost-{file.name}.json"
    if stored and _has_sizes(cost, sizes):
        return stored
    with load(str(file.path), plan.config) as model:
        if not stored:

            def told(done: int, total: int) -> None:
                progress(done, total, f"{file.name}: perplexity on {corpus.name}")

            told(0, 0)
            stored = perplexity(model, corpus, progress=told)
            store(out, file.path, corpus, plan.config, stored)
        if not _has_sizes(cost, sizes):
            _measure_cost(file, model, sizes, cost, progress)
    return stored


def _cost_sizes(plan: Plan) -> list[int]:
    """Rows whose T(n) the table needs, and those of the Spec-Bench report up to the largest."""
    most = MAX_EXACT_BLOCK if plan.config.exact else MAX_BLOCK
    own = {1, 2, 4, 8, *(min(most, lane.block_complexity) for lane in plan.lanes)}
    return sorted(own | {n for n in COST_ROWS if n <= max(own)})


def _has_sizes(path: Path, sizes: Sequence[int]) -> bool:
    """Whether a cost file measured these sizes; larger than its context allows is not asked for again."""
    try:
        document = json.loads(path.read_text("utf-8"))
        return set(sizes) <= {*document["asked"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _measure_cost(file: ModelFile, model: Model, sizes: Sequence[int], path: Path, progress: Progress) -> None:
    context = min(COST_CONTEXT, model.n_ctx // 2)
    rows = [n for n in sizes if n < model.n_ctx // 2]

    def told(done: int, total: int) -> None:
        progress(done, total, f"{file.name}: cost of a pass")

    measured = cost_rows(model, rows, [context], progress=told)
    write_json(path, {"machine": describe_run(model), "asked": list(sizes), "rows": measured})


# -- rows ------------------------------------------------------------------------------------------------------------


def quant_rows(
    summary: Mapping[str, Any], weights: Mapping[str, Weights], perplexities: Mapping[str, Perplexity]
) -> list[dict[str, Any]]:
    """One row a file and drafter, smallest file first, JSON-ready; a file without drafters has one of plain decoding.

    Args:
        summary: of the Spec-Bench run.
        weights, perplexities: by model name.
    """
    base = min(perplexities.values(), key=lambda found: found.value)
    rows = []
    for model in sorted({row["model"] for row in summary["rows"]}, key=lambda name: weights[name].file_bytes):
        total = [row for row in summary["rows"] if row["model"] == model and row["category"] == ALL]
        plain = next(row for row in total if row["drafter"] == PLAIN)
        facts = _facts(weights[model], perplexities[model], base)
        cost = {row["rows"]: row["ms"] for row in summary["cost"].get(model, [])}
        lanes = [row for row in total if not str(row["drafter"]).startswith(PLAIN)] or [plain]
        rows += [_row(lane, plain, facts, cost, _failures(summary, lane)) for lane in lanes]
    return rows


def _facts(weights: Weights, found: Perplexity, base: Perplexity) -> dict[str, Any]:
    ratio, error = relative(found, base)
    return {
        "file_bytes": weights.file_bytes,
        "bits_per_weight": round(weights.bits_per_weight, 4),
        "perplexity": round(found.value, 6),
        "perplexity_error": round(found.error, 6),
        "perplexity_ratio": round(ratio, 6),
        "perplexity_ratio_error": round(error, 6),
        "perplexity_tokens": found.n_tokens,
    }


def _row(lane: Row, plain: Row, facts: Row, cost: Mapping[int, float], failures: int) -> dict[str, Any]:
    one, block = cost.get(1), lane["block_complexity"]

    def times(n: int) -> float | None:
        return round(cost[n] / one, 4) if one and n in cost else None

    return {
        "model": lane["model"],
        "quant": lane["quant"],
        **facts,
        "t1_ms": one,
        "t2_over_t1": times(2),
        "t4_over_t1": times(4),
        "t8_over_t1": times(8),
        "drafter": lane["drafter"],
        "block_complexity": block,
        "tn_over_t1": times(block),
        "plain_tokens_per_second": plain["tokens_per_second"],
        **{name: lane[name] for name in ("tau", "rows_per_pass", "tokens_per_second")},
        **{name: lane[name] for name in ("speedup", "speedup_min", "speedup_max")},
        **{name: lane[name] for name in ("n_prompts", "n_tokens", "identical", "near_ties")},
        "failures": failures,
    }


def _failures(summary: Mapping[str, Any], lane: Row) -> int:
    """Answers of a drafter on a file that a run must not have: its speedup is void."""
    place = (lane["model"], lane["drafter"], lane["block_complexity"])
    mine = [one for one in summary["differences"] if (one["model"], one["drafter"], one["block_complexity"]) == place]
    return sum(Difference.from_document(one).is_failure(summary["settings"]["exact"]) for one in mine)


# -- the answer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Choice:
    """A file at its fastest: with a drafter whose answers are plain decoding's, or without one."""

    row: Row
    speed: float
    how: str

    @property
    def name(self) -> str:
        return str(self.row["quant"])

    @property
    def excess(self) -> float:
        """Percent of perplexity above the best."""
        return 100 * (float(self.row["perplexity_ratio"]) - 1)


def answer(rows: Sequence[Row], within: float) -> str:
    """Which file to download: the fastest whose perplexity is at most ``within`` percent above the best, in a sentence.

    A file's speed is that of plain decoding or of its fastest drafter, whichever is more. What is faster but worse is
    named as well, with how much worse, and so is what is as fast as far as one run can tell.

    Args:
        rows: of :func:`quant_rows`.
    """
    choices = [_fastest([row for row in rows if row["model"] == model]) for model in _models(rows)]
    best = min(choices, key=lambda choice: choice.excess)
    quality = f"{best.row['perplexity']:.2f} ± {best.row['perplexity_error']:.2f}"
    if len(choices) == 1:
        return (
            f"Only {best.name} ({_size(best.row['file_bytes'])}) was measured, so there is nothing to choose from: "
            f"{best.speed:.1f} tokens/s {best.how}, perplexity {quality}."
        )
    good = sorted((one for one in choices if one is best or one.excess <= within), key=lambda one: -one.speed)
    chosen = good[0]
    ties = [one.name for one in good[1:] if one.speed > (1 - TIE) * chosen.speed]
    also = f" ({_listed(ties)} within {100 * TIE:.0f} % of that)" if ties else ""
    faster = [one for one in choices if one not in good and one.speed > chosen.speed]
    worse = [_worse(one) for one in sorted(faster, key=lambda one: one.excess)]
    if len(good) == 1:
        why = (
            f"of {len(choices)} files no other has a perplexity within {within:g} % of its own, {quality}; on this "
            f"machine it makes"
        )
    else:
        why = (
            f"{len(good)} of {len(choices)} files have a perplexity within {within:g} % of the best ({best.name}, "
            f"{quality}), and of these {chosen.name}{_behind(chosen)} is the fastest on this machine,"
        )
    return (
        f"Download {chosen.name} ({_size(chosen.row['file_bytes'])}): {why} {chosen.speed:.1f} tokens/s {chosen.how}"
        + also
        + (f"; faster but worse: {_listed(worse)}." if worse else ".")
    )


def _models(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def _fastest(rows: Sequence[Row]) -> _Choice:
    plain = _Choice(rows[0], rows[0]["plain_tokens_per_second"], "without a drafter")
    lanes = [row for row in rows if not row["failures"] and row["drafter"] != PLAIN]
    drafted = [_Choice(row, row["tokens_per_second"], f"with {_lane(row)}") for row in lanes]
    return max([plain, *drafted], key=lambda choice: choice.speed)


def _behind(choice: _Choice) -> str:
    """How far a perplexity is from the best one; nothing for the best itself."""
    return f" ({_excess(choice.row)})" if choice.excess > 0 else ""


def _worse(choice: _Choice) -> str:
    return f"{choice.name}, {choice.speed:.1f} tokens/s {choice.how}, perplexity {_excess(choice.row)}"


def _listed(names: Sequence[str]) -> str:
    return "; ".join(names) if any("," in name for name in names) else ", ".join(names)


def _lane(row: Row) -> str:
    return f"{row['drafter']} @ {row['block_complexity']}" if row["drafter"] != PLAIN else "none"


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"


# -- table and report ------------------------------------------------------------------------------------------------

HEAD = [
    *["quantization", "size", "bits/weight", "perplexity", "over the best", "T(1) ms", "T(2)/T(1)", "T(4)/T(1)"],
    *["T(8)/T(1)", "drafter @ block complexity", "T(n)/T(1)", "tau", "plain tokens/s", "tokens/s", "speedup"],
    "same as plain",
]

NOTES = """\
- Perplexity: {tokens} scored tokens of {text}, windows of {n_ctx} tokens, the first half of each only read (llama.cpp's
  protocol), ± one standard error. `over the best` is the difference from the best file on the same tokens; its error is
  that of the differences token by token.
- T(n): median time of a pass of n rows, relative to one row; the column T(n)/T(1) is at the row's block complexity.
  A drafter whose passes are that large gains where tau exceeds it.
- tau, tokens/s and speedup are pooled over all answers, decode only. Plain decoding and drafters were interleaved
  question by question, but the files were measured one after the other: what compares tokens/s of two files is as
  steady as the machine was."""


def quant_table(rows: Sequence[Row]) -> str:
    """The table as Markdown; what a file says once is not repeated for its further drafters."""
    return markdown_table(
        HEAD, [_cells(row, first=n == 0 or rows[n - 1]["model"] != row["model"]) for n, row in enumerate(rows)]
    )


def _cells(row: Row, *, first: bool) -> list[str]:
    file = [
        row["quant"],
        _size(row["file_bytes"]),
        f"{row['bits_per_weight']:.2f}",
        f"{row['perplexity']:.3f} ± {row['perplexity_error']:.3f}",
        _excess(row),
        "-" if row["t1_ms"] is None else f"{row['t1_ms']:.2f}",
        *(_times(row[name]) for name in ("t2_over_t1", "t4_over_t1", "t8_over_t1")),
    ]
    lane = [
        _lane(row),
        _times(row["tn_over_t1"]),
        f"{row['tau']:.3f}",
        f"{row['plain_tokens_per_second']:.1f}",
        f"{row['tokens_per_second']:.1f}",
        f"{row['speedup']:.2f}x" + " (void)" * bool(row["failures"]),
        f"{row['identical']}/{row['n_prompts']}",
    ]
    return [*(file if first else [""] * len(file)), *lane]


def _excess(row: Row) -> str:
    if row["perplexity_ratio"] <= 1:
        return "best"
    return f"+{100 * (row['perplexity_ratio'] - 1):.2f} ± {100 * row['perplexity_ratio_error']:.2f} %"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def overview(document: Mapping[str, Any]) -> str:
    """What the command prints: the table, then the answer and what to know before believing it."""
    return "\n".join([quant_table(document["rows"]), document["answer"], *_caveats(document)]) + "\n"


def _caveats(document: Mapping[str, Any]) -> list[str]:
    source, rows = document["source"], document["rows"]
    found = []
    if document["failures"]:
        found.append(
            f"**DIFFERENT OUTPUT: {document['failures']} answers are not plain decoding's; their drafters' speedups "
            "are void.**"
        )
    remade = [row["quant"] for row in rows if row["model"] != source["model"]]
    if remade and source["quant"] not in FULL_PRECISION:
        found.append(
            f"{', '.join(dict.fromkeys(remade))} were made from {source['quant']}, which was quantized already: files "
            "made from full precision should have a better perplexity at the same size and speed."
        )
    return found


def quant_report(document: Mapping[str, Any], figures: Sequence[str]) -> str:
    """The whole ``report.md``.

    Args:
        document: of ``quants.json``.
        figures: paths of plots, relative to the report.
    """
    rows, text, machine = document["rows"], document["text"], document["machine"]
    about = NOTES.format(tokens=rows[0]["perplexity_tokens"], text=text["name"], n_ctx=text["n_ctx"])
    parts = [f"# {document['source']['model']}: which quantization?", document["answer"], *_caveats(document)]
    parts += [quant_table(rows), about]
    parts += [f"![{path.rpartition('/')[2]}]({path})" for path in figures]
    if document["command"]:
        parts.append(f"```\n{document['command']}\n```")
    parts.append(f"{machine['cpu']}, {machine['threads']} threads, {machine['os']}, {machine['date']}.")
    parts.append(f"By category, both conventions of the speedup and where answers differ: [{DETAILS}]({DETAILS}).")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"
