"""``esp-edge bench ablate``: the paper's tables, side by side with the paper's figures."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from esp_edge.cli.bench import AsJson, NoPlots, Repeat, model_file, shown_command
from esp_edge.cli.bench_trace import DeviceOptions, Half
from esp_edge.cli.options import LoadOptions, option
from esp_edge.cli.output import Bar, note, print_json, write_text
from esp_edge.config import GenerationParams

if TYPE_CHECKING:
    from esp_edge.bench.paper import Ablation
    from esp_edge.bench.questions import Question
    from esp_edge.bench.simulate import Device

__all__ = ["ablate"]

_bench = functools.partial(option, panel="Benchmark")
NAMES = "table1, table2, table3, table4, table5, lambda, pruning, temperature, bc120, bc, auto or all"


def ablate(
    *,
    load: LoadOptions,
    simulated: DeviceOptions,
    tables: Annotated[list[str], typer.Argument(metavar="TABLE...", help=f"{NAMES}.")],
    out: Annotated[Path, _bench("--out", text="Directory of the results; a run that was stopped there goes on.")],
    questions: Annotated[
        Path | None, _bench("--questions", text="Spec-Bench's question.jsonl, or a file of that format.")
    ] = None,
    trace: Annotated[
        Path | None,
        _bench("--trace", text="Replay the answers of a directory of bench trace instead, as fast as --cost says."),
    ] = None,
    half: Half = "all",
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
    and the runs behind them. Exit code 1 when an answer differs from plain decoding's by more than a near-tie. Table
    auto, the ingredients of the drafter auto, can be replayed, too: --trace DIR --cost FILE, in seconds and without a
    model.
    """
    from esp_edge.bench import ablate as bench  # noqa: PLC0415 - the rest loads llama.cpp
    from esp_edge.bench import plots  # noqa: PLC0415
    from esp_edge.bench.run import Plan  # noqa: PLC0415

    chosen = bench.find_ablations(tables)
    config = load.config()
    params = GenerationParams(max_tokens=max_tokens, temperature=temp, seed=seed)
    if not no_plots:
        plots.require_matplotlib()
    if trace is not None:
        run = _replayed(chosen, trace, half, _device(simulated, questions), mask_init)
    else:
        asked = _asked(questions, half, per_category, simulated)
        ask = bench.Ask(mask_init, temp, config.exact)
        bench.make_runs(chosen, ask)  # wrong settings fail before a model is loaded
        files = [model_file(name) for name in model or ["smollm2"]]
        run = functools.partial(bench.ablate, chosen, Plan(files, config, (), asked, params, repeat), ask)
    with Bar("ablation", shown=True) as bar:
        documents = run(out, command=shown_command(sys.argv), plots=not no_plots, progress=bar.update)
    _tell(documents, [out / f"ablate-{ablation.key}.md" for ablation in chosen], as_json=as_json)


def _tell(documents: list[dict[str, Any]], reports: Sequence[Path], *, as_json: bool) -> None:
    """Print the tables and where their reports are; exit code 1 where an answer is not plain decoding's."""
    from esp_edge.bench.ablate_report import ablation_text  # noqa: PLC0415

    if as_json:
        print_json({"ablations": documents})
    else:
        write_text("\n".join(map(ablation_text, documents)))
    for report in reports:
        note(f"details: {report}")
    if any(document["failures"] for document in documents):
        note("answers are not plain decoding's: see differences.jsonl in the run's folder")
        raise typer.Exit(1)


_Run: TypeAlias = Callable[..., list[dict[str, Any]]]  # out and what is told of it -> documents


def _replayed(chosen: Sequence[Ablation], trace: Path, half: str, device: Device, mask_init: str) -> _Run:
    from esp_edge.bench import ablate as bench  # noqa: PLC0415
    from esp_edge.bench.halves import half_of  # noqa: PLC0415
    from esp_edge.bench.trace_file import Trace  # noqa: PLC0415

    answers = half_of(Trace(trace), half)
    return functools.partial(bench.replay_ablation, chosen, answers, device, mask_init=mask_init, half=half)


def _device(simulated: DeviceOptions, questions: Path | None) -> Device:
    device = simulated.device()
    if device is None or questions is not None:
        raise typer.BadParameter("it needs --cost FILE, and no --questions", param_hint="'--trace'")
    return device


def _asked(questions: Path | None, half: str, per_category: int, simulated: DeviceOptions) -> list[Question]:
    from esp_edge.bench.halves import is_in_half  # noqa: PLC0415
    from esp_edge.bench.questions import load_questions, select  # noqa: PLC0415

    if questions is None or simulated.device() is not None:
        raise typer.BadParameter("give it alone, or --trace DIR with --cost FILE", param_hint="'--questions'")
    return select([one for one in load_questions(questions) if is_in_half(one.question_id, half)], per_category)
