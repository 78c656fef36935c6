"""``esp-edge analyze``: what happens inside a model while it is probed, and where the time of a pass goes."""

from __future__ import annotations

import functools
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from esp_edge.cli.answer import load_model
from esp_edge.cli.options import LoadOptions, ModelName, option
from esp_edge.cli.output import Bar, note, print_json, write_text

if TYPE_CHECKING:
    from esp_edge.session import Model

__all__ = ["alignment", "profile"]

_analyze = functools.partial(option, panel="Analysis")


def alignment(
    *,
    load: LoadOptions,
    model: ModelName = "smollm2",
    mask_init: Annotated[
        str, _analyze("--mask-init", text="As in generate; one mask stands behind every root.")
    ] = "auto",
    mask_update: Annotated[
        float | None,
        _analyze("--mask-update", text="Running update, 0 (frozen) to 1. (default: as the init wants)"),
    ] = None,
    top_k: Annotated[
        int, _analyze("--top-k", text="Proposals of a mask that count as accepted; K = 1 is always shown.", min=1)
    ] = 14,
    prompts: Annotated[int, _analyze("--prompts", text="Built-in creative-writing prompts.", min=1, max=100)] = 20,
    questions: Annotated[
        Path | None, _analyze("--questions", text="Spec-Bench's question.jsonl or such a file, instead of those.")
    ] = None,
    per_category: Annotated[
        int, _analyze("--per-category", text="The first N questions of each category; 0 = all.", min=0)
    ] = 0,
    max_tokens: Annotated[int, _analyze("-n", "--max-tokens", text="Tokens of an answer at most.", min=1)] = 64,
    out: Annotated[
        Path | None, _analyze("--out", text="Directory for alignment.json, alignment.md and the plot.")
    ] = None,
    as_json: Annotated[bool, _analyze("--json", text="Print one JSON document.")] = False,
    no_plots: Annotated[bool, _analyze("--no-plots", text="Draw nothing; matplotlib is not needed then.")] = False,
) -> None:
    """Compare the hidden states of mask rows with those of the true tokens (the paper's Figure 2 and Lemma 3.1).

    Prints, layer by layer, the cosine of the two for accepted and rejected steps, and the threshold delta* above which
    the true token was always among the mask's first K.
    """
    if out is not None:
        _prepare(out, plot=not no_plots)
    from esp_edge.analysis import report  # noqa: PLC0415 - the rest loads llama.cpp
    from esp_edge.analysis.alignment import built_in_prompts, measure, summarize  # noqa: PLC0415

    texts = built_in_prompts(prompts) if questions is None else _first_turns(questions, per_category)
    with closing(load_model(model, load.config())) as target, Bar("reading hidden states") as bar:
        found = measure(
            target,
            texts,
            max_tokens=max_tokens,
            top_k=top_k,
            mask_init=mask_init,
            mask_update=mask_update,
            progress=bar.update,
        )
        source = "built-in prompts" if questions is None else questions.name
        document = _about(target, source, max_tokens) | summarize(found)
    if out is not None:
        _write(document, out, plot=not no_plots)
    if as_json:
        print_json(document)
    else:
        write_text(report.overview(document))


def _first_turns(questions: Path, per_category: int) -> list[str]:
    from esp_edge.bench.questions import load_questions, select  # noqa: PLC0415

    return [question.turns[0] for question in select(load_questions(questions), per_category)]


def _about(model: Model, source: str, max_tokens: int) -> dict[str, Any]:
    from esp_edge.bench.machine import describe_run  # noqa: PLC0415

    name = model.path.name.removesuffix(".gguf")
    return {"machine": describe_run(model), "model": name, "prompts": source, "max_tokens": max_tokens}


def _write(document: dict[str, Any], out: Path, *, plot: bool) -> None:
    from esp_edge.analysis import report  # noqa: PLC0415
    from esp_edge.analysis.plots import plot_alignment  # noqa: PLC0415
    from esp_edge.bench.results import write_json  # noqa: PLC0415

    write_json(out / "alignment.json", document)
    figure = plot_alignment(document, out) if plot and document["n_steps"] else None
    (out / "alignment.md").write_text(report.report(document, figure), "utf-8")
    note(f"details: {out / 'alignment.md'}")


# -- profile ---------------------------------------------------------------------------------------------------------


def profile(
    *,
    load: LoadOptions,
    model: ModelName = "smollm2",
    rows: Annotated[str, _analyze("--rows", metavar="N,N-M", text="Sizes of the passes.")] = "1,2,4,8,16,32",
    contexts: Annotated[
        str, _analyze("--contexts", metavar="N,N", text="Cells in the KV cache; --ctx-size plays no part.")
    ] = "256,2048,8192",
    repeat: Annotated[int, _analyze("--repeat", text="Passes of each size, whole and recorded.", min=1)] = 7,
    separate: Annotated[
        bool, _analyze("--separate", text="Compute every node alone, which adds a cost a node; always so on a GPU.")
    ] = False,
    out: Annotated[Path | None, _analyze("--out", text="Directory for profile.json, profile.md and the plot.")] = None,
    as_json: Annotated[bool, _analyze("--json", text="Print one JSON document.")] = False,
    no_plots: Annotated[bool, _analyze("--no-plots", text="Draw nothing; matplotlib is not needed then.")] = False,
) -> None:
    """Time a pass part by part: each matrix, attention, the rest, at several sizes and contexts.

    Beside the times stand the bounds: what the pass reads and computes, and how fast this machine reads memory.
    """
    from esp_edge.bench.spec import parse_numbers  # noqa: PLC0415 - the rest loads llama.cpp

    sizes, lengths = parse_numbers(rows, "--rows"), parse_numbers(contexts, "--contexts", least=0)
    if out is not None:
        _prepare(out, plot=not no_plots)
    from esp_edge.analysis.profile import measure, read_bandwidth, summarize  # noqa: PLC0415
    from esp_edge.analysis.profile_report import overview  # noqa: PLC0415
    from esp_edge.bench.machine import describe_run  # noqa: PLC0415
    from esp_edge.models.model import default_threads  # noqa: PLC0415

    config = load.config()
    bandwidth = read_bandwidth(config.n_threads or default_threads())
    with closing(load_model(model, config)) as target, Bar("timing passes") as bar:
        found = measure(target, sizes, lengths, repeat=repeat, separate=separate, progress=bar.update)
        machine = describe_run(target, n_ctx=max(lengths) + max(sizes))
        document = {"machine": machine, "model": target.path.name.removesuffix(".gguf")} | summarize(found, bandwidth)
    if out is not None:
        _write_profile(document, out, plot=not no_plots)
    if as_json:
        print_json(document)
    else:
        write_text(overview(document))


def _prepare(out: Path, *, plot: bool) -> None:
    """Make the directory, and miss matplotlib before anything is measured."""
    from esp_edge.bench.plots import require_matplotlib  # noqa: PLC0415
    from esp_edge.bench.results import make_folder  # noqa: PLC0415

    make_folder(out)
    if plot:
        require_matplotlib()


def _write_profile(document: dict[str, Any], out: Path, *, plot: bool) -> None:
    from esp_edge.analysis.profile_plot import plot_profile  # noqa: PLC0415
    from esp_edge.analysis.profile_report import report  # noqa: PLC0415
    from esp_edge.bench.results import write_json  # noqa: PLC0415

    write_json(out / "profile.json", document)
    figure = plot_profile(document, out) if plot else None
    (out / "profile.md").write_text(report(document, figure), "utf-8")
    note(f"details: {out / 'profile.md'}")
