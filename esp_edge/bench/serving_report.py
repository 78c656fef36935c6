"""The tables, the report and the plot of ``esp-edge bench serve``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esp_edge.bench.plots import new_figure, save_figure, series_style
from esp_edge.bench.report import markdown_table
from esp_edge.bench.serving import SECOND_TURN

__all__ = ["overview", "plot_serving", "report"]

MIB = float(1 << 20)
NONE = "-"
METHOD = """\
All servers have the same model file, threads, cells and slots, and are asked through `/v1/chat/completions` by the same
client on the same machine, greedily. One is asked at a time, and every measurement goes round all of them before the
next; numbers are medians. *First token*: from sending a request to the first text of its stream, for prompts of which a
server knows only the template's first tokens; the second turn goes on from the long prompt and its answer.
*Streams*: tokens of all answers over the time from the first request to the last token, prompts included, and how many
times the speed of {reference} that is. *Memory*: of a server that runs alone. RSS counts every page of the process,
those of the mapped model file included that were touched; *anonymous* is what belongs to no file. *Ready* is from the
start of the process to the first 200 of `/health`."""
LIMITS = """\
What it does not say: the client takes its share of the same cores; a server with more cores than streams is another
case; answers may part at near-ties, so `same` counts, among all answers of the stream measurements, those whose text is
the same to the letter as that of {reference}, and those that part may differ a little in length."""
Row = Mapping[str, Any]


def overview(document: Mapping[str, Any]) -> str:
    """What the command prints: two tables."""
    settings, rows = document["settings"], document["rows"]
    head = (
        f"{settings['model']}, {settings['n_threads']} threads, {settings['n_ctx']} cells in {settings['slots']} slots"
    )
    return "\n".join([f"{head}, {settings['repeat']} repetitions", "", _waiting_table(rows), _speed_table(rows)])


def report(document: Mapping[str, Any], figure: str | None) -> str:
    """The whole ``report.md``."""
    settings, machine = document["settings"], dict(document["machine"])
    memory = machine.pop("memory_bytes", None)
    if memory:
        machine["memory"] = f"{memory / 2**30:.1f} GiB"
    shown = [[name.replace("_", " "), str(value)] for name, value in machine.items()]
    parts = ["# Servers side by side", overview(document).rstrip("\n")]
    if figure:
        parts.append(f"![tokens/s and time to the first token]({figure})")
    parts.append(METHOD.format(reference=settings["reference"]))
    parts.append(LIMITS.format(reference=settings["reference"]))
    if settings["peer"]:
        parts.append(f"The other program is {settings['peer']}.")
    if document.get("command"):
        parts.append(f"```\n{document['command']}\n```")
    parts.append(markdown_table(["machine", ""], shown).rstrip("\n"))
    return "\n\n".join(parts) + "\n"


# -- tables ----------------------------------------------------------------------------------------------------------


def _firsts(rows: Sequence[Row]) -> list[str]:
    return [what for what in rows[0]["cells"] if what.startswith("first_")]


def _streams(rows: Sequence[Row]) -> list[str]:
    return [what for what in rows[0]["cells"] if what.startswith("streams_")]


def _waiting_table(rows: Sequence[Row]) -> str:
    firsts = _firsts(rows)
    head = ["server", *(f"first token, {_prompt(rows, what)}" for what in firsts), SECOND_TURN, "ready"]
    head += ["idle RSS", "PSS", "anonymous", "after a request: RSS", "anonymous"]
    memory = ("rss_idle", "pss_idle", "anonymous_idle", "rss_used", "anonymous_used")
    return markdown_table(head, [_waiting_row(row, firsts, memory) for row in rows])


def _waiting_row(row: Row, firsts: Sequence[str], memory: Sequence[str]) -> list[str]:
    cells = row["cells"]
    ready = f"{cells['ready_s']['median']:.1f} s"
    waits = [f"{cells[what]['median']:.0f} ms" for what in (*firsts, SECOND_TURN)]
    return [
        row["lane"],
        *waits,
        ready,
        *(f"{cells[w]['median'] / MIB:.0f} MiB" if w in cells else NONE for w in memory),
    ]


def _prompt(rows: Sequence[Row], what: str) -> str:
    """The size of a prompt as it was, by the first server's count."""
    return f"{rows[0]['cells'][what]['prompt_tokens']:.0f} tokens"


def _speed_table(rows: Sequence[Row]) -> str:
    streams = _streams(rows)
    head = ["tokens/s", *(_count(what) for what in streams), "same"]
    return markdown_table(head, [[row["lane"], *_speeds(row, streams), _same(row)] for row in rows])


def _count(what: str) -> str:
    n = what.removeprefix("streams_")
    return "1 stream" if n == "1" else f"{n} streams"


def _speeds(row: Row, streams: Sequence[str]) -> list[str]:
    cells = [row["cells"][what] for what in streams]
    return [f"{cell['median']:.1f}" + (f" ({cell['over']:.2f}x)" if cell["over"] else "") for cell in cells]


def _same(row: Row) -> str:
    return f"{row['same']}/{row['answers']}"


# -- plot ------------------------------------------------------------------------------------------------------------


def plot_serving(document: Mapping[str, Any], folder: Path) -> str:
    """tokens/s against streams beside the times to the first token; returns the name of the PNG file."""
    from matplotlib.gridspec import GridSpec  # noqa: PLC0415 - optional, and slow to import

    figure, left = new_figure(11, 4.6)
    grid = GridSpec(1, 2, figure=figure)
    left.set_subplotspec(grid[0])
    right = figure.add_subplot(grid[1])
    right.spines[["top", "right"]].set_visible(False)
    _speed_panel(left, document["rows"])
    _wait_panel(right, document["rows"])
    model = document["settings"]["model"]
    return save_figure(figure, folder, f"serving-{model}", model)


def _speed_panel(axes: Any, rows: Sequence[Row]) -> None:
    for number, row in enumerate(rows):
        counts = [int(what.removeprefix("streams_")) for what in _streams(rows)]
        cells = [row["cells"][what] for what in _streams(rows)]
        style = series_style(number)
        axes.plot(counts, [cell["median"] for cell in cells], label=row["lane"], ms=5, **style)
        low, high = [cell["min"] for cell in cells], [cell["max"] for cell in cells]
        axes.fill_between(counts, low, high, color=style["color"], alpha=0.12, linewidth=0)
    axes.set(xlabel="concurrent streams", ylabel="tokens/s of all streams", title="throughput: median and range")
    axes.set_xticks(counts)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _wait_panel(axes: Any, rows: Sequence[Row]) -> None:
    whats = [*_firsts(rows), SECOND_TURN]
    height = 0.8 / len(rows)
    for number, row in enumerate(rows):
        values = [row["cells"][what]["median"] for what in whats]
        places = [-place - number * height for place in range(len(whats))]
        bars = axes.barh(places, values, height=0.9 * height, color=series_style(number)["color"], label=row["lane"])
        axes.bar_label(bars, [f"{value:.0f}" for value in values], padding=3, fontsize=8)
    names = [*(f"cold prompt,\n{_prompt(rows, what)}" for what in _firsts(rows)), SECOND_TURN]
    axes.set_yticks([-place - 0.5 * (0.8 - height) for place in range(len(whats))], names)
    axes.set(xlabel="milliseconds", title="time to the first token")
    axes.margins(x=0.12)
    axes.legend(frameon=False)
