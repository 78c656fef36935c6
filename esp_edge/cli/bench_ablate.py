"""``esp-edge bench ablate``: the paper's tables, side by side with the paper's figures."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated

import typer

from esp_edge.cli.bench import AsJson, NoPlots, Repeat, model_file, shown_command
from esp_edge.cli.options import LoadOptions, option
from esp_edge.cli.output import Bar, note, print_json, write_text
from esp_edge.config import GenerationParams

__all__ = ["ablate"]

_bench = functools.partial(option, panel="Benchmark")
NAMES = "table1, table2, table3, table4, table5, lambda, pruning, temperature, bc120, bc, auto or all"


def ablate(
    *,
    load: LoadOptions,
    tables: Annotated[list[str], typer.Argument(metavar="TABLE...", help=f"{NAMES}.")],
    questions: Annotated[Path, _bench("--questions", text="Spec-Bench's question.jsonl, or a file of that format.")],
    out: Annotated[Path, _bench("--out", text="Directory of the results; a run that was stopped there goes on.")],
    model: Annotated[
        list[str] | None,
        _bench("-m", "--model", "-hf", "--hf-repo", text="As in generate; may be repeated. (default: smollm2)"),
    ] = None,
    per_category: Annotated[
        int, _bench("--per-category", text="The first N questions of each category; 0 = all.", min=0)
    ] = 1,
    max_tokens: Annotated[int, _bench("-n", "--max-tokens", text="Tokens of an answer at most.", min=1)] = 100,
    repeat: Repeat = 1,
    temp: Annotated[
        float, _bench("--temp", text="Temperature, no filters; 0 = greedy. Table temperature has its own.")
    ] = 0.0,
    seed: Annotated[int, _bench("-s", "--seed", text="Of every answer, when it is sampled.", min=0)] = 1,
    mask_init: Annotated[
        str, _bench("--mask-init", text="Of all tables but table5; the paper's is prompt-mean.")
    ] = "prompt-mean",
    as_json: AsJson = False,
    no_plots: NoPlots = False,
) -> None:
    """Measure the paper's tables on your model and show its figures beside yours, which are for other models and a GPU.

    For each comparison it says whether yours goes the paper's way. Writes ablate-TABLE.md, ablate-TABLE.json and plots,
    and the runs behind them. Exit code 1 when an answer differs from plain decoding's by more than a near-tie.
    """
    from esp_edge.bench import ablate as bench  # noqa: PLC0415 - the rest loads llama.cpp
    from esp_edge.bench import plots  # noqa: PLC0415
    from esp_edge.bench.questions import load_questions, select  # noqa: PLC0415
    from esp_edge.bench.run import Plan  # noqa: PLC0415

    chosen = bench.find_ablations(tables)
    config = load.config()
    ask = bench.Ask(mask_init, temp, config.exact)
    bench.make_runs(chosen, ask)  # wrong settings fail before a model is loaded
    params = GenerationParams(max_tokens=max_tokens, temperature=temp, seed=seed)
    asked = select(load_questions(questions), per_category)
    if not no_plots:
        plots.require_matplotlib()
    files = [model_file(name) for name in model or ["smollm2"]]
    plan = Plan(files, config, (), asked, params, repeat)
    with Bar("ablation", shown=True) as bar:
        documents = bench.ablate(
            chosen, plan, ask, out, command=shown_command(sys.argv), plots=not no_plots, progress=bar.update
        )
    if as_json:
        print_json({"ablations": documents})
    else:
        write_text("\n".join(map(bench.ablation_text, documents)))
    for ablation in chosen:
        note(f"details: {out / f'ablate-{ablation.key}.md'}")
    if any(document["failures"] for document in documents):
        note("answers are not plain decoding's: see differences.jsonl in the run's folder")
        raise typer.Exit(1)
