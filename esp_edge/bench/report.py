"""Markdown from a summary document: tables for people, identity beside every speedup."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from esp_edge.bench.spec import is_peer
from esp_edge.bench.summary import ALL

__all__ = [
    "category_table",
    "cost_curves",
    "cost_table",
    "curve_name",
    "depth_table",
    "lane_name",
    "markdown_table",
    "overview",
    "report",
]

MAX_DIFFERENCES = 50  # lines of the report; all are in differences.jsonl
Summary = Mapping[str, Any]
Row = Mapping[str, Any]

CONVENTIONS = """\
tau and the first speedup are pooled: sum of tokens / sum of passes or time, prefill pass excluded. Spec-Bench takes the
mean over questions of each question's tokens/s and divides it by plain decoding's, prefill included; its mean accepted
length is the pooled tau. `mean tau` is the mean over questions. `[keep]` rows carry their tables from question to
question, all others begin every answer with empty ones. `speedup` compares with plain decoding
in the same mode and with the same kernels; `over stock` compares with `none[stock]` of the same run: plain decoding in
the default mode with llama.cpp's own kernels."""
PEERS = """\
`llama-server:` rows are another program, llama.cpp's own server, asked for the same token ids in the same rounds, one
program computing at a time; `over peer` and `same as peer` compare with its own plain decoding, `llama-server:none`.
Times are by its clock, without HTTP. Its passes are derived: tokens minus accepted drafts. Its time outside of
llama.cpp and acceptance by depth are not known. It cuts prompts into other batches and is built with other kernels, so
answers may differ; that is counted and explained but never fails the run, and exact mode says nothing about it. The
n-gram map, pool and cache (`ngram-map-*`, `ngram-mod`, `ngram-cache`) live on in the server from question to question,
like `[keep]` rows."""


def lane_name(row: Row) -> str:
    """``esp[mask-init=sample] @ 30``; plain decoding has no block complexity to tell."""
    name = str(row["drafter"])
    return name if row["block_complexity"] == 1 else f"{name} @ {row['block_complexity']}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns line up as text, too; the first column is left-aligned, numbers are right-aligned."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(row: Sequence[str]) -> str:
        padded = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        return f"| {' | '.join(padded)} |"

    return "\n".join(map(line, [cells[0], rule, *cells[1:]])) + "\n"


# -- parts -----------------------------------------------------------------------------------------------------------


def overview(summary: Summary) -> str:
    """What the command prints: alarms, then one table a model."""
    parts = [*_alarms(summary)]
    for model, rows in _by_model(summary["rows"]).items():
        parts.append(f"{model}, {_settings_line(summary)}")
        parts.append(_main_table([row for row in rows if row["category"] == ALL]))
    return "\n".join(parts)


def report(summary: Summary, figures: Mapping[str, Sequence[str]]) -> str:
    """The whole ``report.md``.

    Args:
        summary: the document of ``summary.json``.
        figures: model -> paths of its plots, relative to the report.
    """
    parts = ["# Benchmark", *_alarms(summary), _method(summary), _machine(summary["machine"])]
    for model, rows in _by_model(summary["rows"]).items():
        parts += _model_part(model, rows, summary["cost"].get(model, []), figures.get(model, ()))
    if any(is_peer(row["drafter"]) for row in summary["rows"]):
        parts += ["## The other program", PEERS, f"It is {summary['settings']['peer']}."]
    parts += _differences(summary["differences"])
    if summary["skipped"]:
        skipped = [f"- question {question_id}: {why}" for question_id, why in summary["skipped"].items()]
        parts += ["## Questions left out", "\n".join(skipped)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    models: dict[str, list[Row]] = {}
    for row in rows:
        models.setdefault(row["model"], []).append(row)
    return models


def _alarms(summary: Summary) -> list[str]:
    n = summary["failures"]
    if not n:
        return []
    why = "exact mode allows none" if summary["settings"]["exact"] else "they are no near-ties"
    return [
        f"**DIFFERENT OUTPUT: {n} answers are not plain decoding's, and {why}; their drafters' speedups are void.**"
    ]


def _settings_line(summary: Summary) -> str:
    settings = summary["settings"]
    mode = "exact mode" if settings["exact"] else "default mode"
    draw = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    return (
        f"{settings['questions'].partition(' (')[0]}, up to {settings['max_tokens']} tokens, {draw}, {mode}, "
        f"repeated {settings['repeat']}x"
    )


def _method(summary: Summary) -> str:
    place = ", ours in one process" if "peer" in summary["settings"] else " in one process"
    lines = [f"{_settings_line(summary)}. All drafters were interleaved question by question{place}."]
    if summary.get("command"):
        lines.append(f"\n```\n{summary['command']}\n```")
    return "\n".join(lines)


def _machine(machine: Row) -> str:
    shown = dict(machine)
    memory = shown.pop("memory_bytes", None)
    if memory:
        shown["memory"] = f"{memory / 2**30:.1f} GiB"
    return markdown_table(["machine", ""], [[name.replace("_", " "), str(value)] for name, value in shown.items()])


def _model_part(model: str, rows: Sequence[Row], cost: Sequence[Row], figures: Sequence[str]) -> list[str]:
    total = [row for row in rows if row["category"] == ALL]
    parts = [f"## {model} ({rows[0]['quant']})", _main_table(total)]
    parts += ["### Both conventions", CONVENTIONS, _convention_table(total)]
    parts += ["### Speedup by category", "Decode only, pooled; behind it the answers equal to plain decoding's."]
    parts += [
        category_table(rows, _speed_cell),
        "### tau by category",
        category_table(rows, lambda row: _two(row["tau"])),
    ]
    parts += ["### Acceptance by depth", "Share of passes whose draft was accepted to that depth.", depth_table(total)]
    if cost:
        parts += ["### T(n): milliseconds of a pass of n rows", cost_table(cost)]
    if figures:
        parts += ["### Plots", "\n".join(f"![{path.rpartition('/')[2]}]({path})" for path in figures)]
    return parts


def _two(value: float) -> str:
    return f"{value:.2f}"


def _known(value: float | None) -> str:
    return "-" if value is None else _two(value)


def _same(row: Row) -> str:
    return f"{row['identical']}/{row['n_prompts']}"


def _different(row: Row) -> str:
    n = row["n_prompts"] - row["identical"] - row["near_ties"]
    return f"**{n}**" if n else "0"


def _speed_cell(row: Row) -> str:
    return f"{row['speedup']:.2f}x {_same(row)}"


def _main_table(rows: Sequence[Row]) -> str:
    bases = {"over stock": "speedup_stock", "over peer": "speedup_peer"}
    shown = {name: key for name, key in bases.items() if any(row[key] is not None for row in rows)}
    head = ["drafter @ block complexity", "tau", "rows/pass", "tokens/s", "speedup", "min..max"]
    head += [*shown, "same as plain", *["same as peer"] * ("over peer" in shown)]
    head += ["near-ties", "different", "host ms/pass", "model ms/pass"]
    return markdown_table(
        head,
        [
            [
                lane_name(row) + _what_auto_became(row),
                f"{row['tau']:.3f}",
                f"{row['rows_per_pass']:.1f}",
                f"{row['tokens_per_second']:.1f}",
                f"{row['speedup']:.2f}x",
                f"{row['speedup_min']:.2f}..{row['speedup_max']:.2f}",
                *(f"{row[key]:.2f}x" for key in shown.values()),
                _same(row),
                *([f"{row['identical_peer']}/{row['n_prompts']}"] if "over peer" in shown else []),
                str(row["near_ties"]),
                _different(row),
                _known(row["host_ms_per_pass"]),
                _known(row["model_ms_per_pass"]),
            ]
            for row in rows
        ],
    )


def _what_auto_became(row: Row) -> str:
    """Name of the mask initialisation where the drafter's label does not tell it."""
    return f" ({row['mask_init']})" if row["mask_init"] and "mask-init" not in row["drafter"] else ""


def _convention_table(rows: Sequence[Row]) -> str:
    head = ["drafter @ block complexity", "tau", "mean tau", "decode, pooled", "end to end, pooled"]
    head += ["decode, mean of questions", "Spec-Bench", "Spec-Bench tokens/s", "same as plain"]
    return markdown_table(
        head,
        [
            [
                lane_name(row),
                _two(row["tau"]),
                _two(row["tau_mean_of_prompts"]),
                f"{row['speedup']:.2f}x",
                f"{row['speedup_end_to_end']:.2f}x",
                f"{row['specbench_speedup_decode']:.2f}x",
                f"{row['specbench_speedup']:.2f}x",
                f"{row['specbench_tokens_per_second']:.1f}",
                _same(row),
            ]
            for row in rows
        ],
    )


def category_table(rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    """A drafter a row, a category a column; ``cell`` writes a summary row."""
    categories = list(dict.fromkeys(row["category"] for row in rows))
    lanes: dict[str, dict[str, str]] = {}
    for row in rows:
        lanes.setdefault(lane_name(row), {})[row["category"]] = cell(row)
    return markdown_table(
        ["drafter @ block complexity", *categories],
        [[name, *(cells.get(category, "-") for category in categories)] for name, cells in lanes.items()],
    )


def depth_table(rows: Sequence[Row]) -> str:
    """A drafter a row: the share of its passes accepted to each depth, ten at most."""
    deepest = max((len(row["accepted_by_depth"]) for row in rows), default=0)
    depths = range(min(deepest, 10))
    return markdown_table(
        ["drafter @ block complexity", *(str(depth + 1) for depth in depths)],
        [[lane_name(row), *(_share(row, depth) for depth in depths)] for row in rows if row["accepted_by_depth"]],
    )


def _share(row: Row, depth: int) -> str:
    accepted = row["accepted_by_depth"]
    return f"{accepted[depth] / row['passes']:.3f}" if depth < len(accepted) else "-"


def curve_name(context: int, threads: int) -> str:
    """``context 300, 2 threads``."""
    return f"context {context}, {threads} thread{'s' * (threads != 1)}"


def cost_curves(rows: Sequence[Row]) -> dict[tuple[int, int], list[Row]]:
    """(context, threads) -> rows of :func:`esp_edge.bench.cost.cost_rows` by size."""
    curves: dict[tuple[int, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: int(row["rows"])):
        curves.setdefault((row["context"], row["threads"]), []).append(row)
    return dict(sorted(curves.items()))


def cost_table(rows: Sequence[Row]) -> str:
    """A size a row, a context and thread count a column: milliseconds, and how many times T(1)."""
    curves = cost_curves(rows)
    head = ["rows", *(curve_name(context, threads) for context, threads in curves)]
    columns = [_cost_column(points) for points in curves.values()]
    sizes = dict.fromkeys(row["rows"] for points in curves.values() for row in points)
    return markdown_table(head, [[str(n), *(column.get(n, "-") for column in columns)] for n in sizes])


def _cost_column(points: Sequence[Row]) -> dict[int, str]:
    one = next((row["ms"] for row in points if row["rows"] == 1), None)
    return {row["rows"]: f"{row['ms']:.2f}" + (f" ({row['ms'] / one:.2f}x)" if one else "") for row in points}


def _differences(differences: Sequence[Row]) -> list[str]:
    if not differences:
        return []
    table = markdown_table(
        ["drafter @ block complexity", "model", "question", "turn", "token", "margin", "kind"],
        [
            [
                lane_name(one),
                one["model"],
                str(one["question_id"]),
                str(one["turn"] + 1),
                str(one["position"]),
                "-" if one["margin"] is None else f"{one['margin']:.4f}",
                one["kind"],
            ]
            for one in differences[:MAX_DIFFERENCES]
        ],
    )
    about = (
        "First differing token (from 0) and how much likelier plain decoding's token was, as a difference of "
        "log-probabilities; a near-tie is at most 0.25."
    )
    more = len(differences) - MAX_DIFFERENCES
    return ["## Where answers differ", about, table, *([f"and {more} more in differences.jsonl"] if more > 0 else [])]
