"""``esp-edge bench``: drafters against plain decoding on Spec-Bench, and the cost of a pass."""

from __future__ import annotations

import functools
import shlex
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esp_edge.cli.answer import load_model
from esp_edge.cli.options import LoadOptions, ModelName, option
from esp_edge.cli.output import Bar, note, print_json, write_text
from esp_edge.config import GenerationParams, ModelConfig

if TYPE_CHECKING:
    from esp_edge.bench.peers import Peer
    from esp_edge.bench.run import ModelFile
    from esp_edge.bench.spec import Lane

__all__ = ["AnswerOptions", "AsJson", "NoPlots", "Repeat", "cost", "model_file", "shown_command", "specbench"]

_bench = functools.partial(option, panel="Benchmark")
AsJson = Annotated[bool, _bench("--json", text="Print one JSON document.")]
NoPlots = Annotated[bool, _bench("--no-plots", text="Draw nothing; matplotlib is not needed then.")]
Repeat = Annotated[int, _bench("--repeat", text="Repetitions of the whole measurement.", min=1)]


@dataclass(frozen=True)
class AnswerOptions:
    """How questions are answered."""

    max_tokens: Annotated[int, _bench("-n", "--max-tokens", text="Tokens of an answer at most.", min=1)] = 100
    repeat: Repeat = 1
    temp: Annotated[float, _bench("--temp", text="Temperature; 0 = greedy.")] = 0.0
    seed: Annotated[int, _bench("-s", "--seed", text="Of every answer, when it is sampled.", min=0)] = 1

    def params(self) -> GenerationParams:
        """Checked settings; ConfigError when they are out of range."""
        return GenerationParams(max_tokens=self.max_tokens, temperature=self.temp, seed=self.seed)


@dataclass(frozen=True)
class PeerOptions:
    """Another program to measure beside ours."""

    peer: Annotated[
        str | None,
        _bench("--peer", metavar="llama-server=PATH", text="Measure llama.cpp's own draft-free modes beside ours."),
    ] = None
    peer_modes: Annotated[
        str | None,
        _bench("--peer-modes", metavar="A,B[OPTION=N,...]", text="Of --peer. (default: its five draft-free modes)"),
    ] = None


# -- specbench -------------------------------------------------------------------------------------------------------


def specbench(
    *,
    load: LoadOptions,
    answers: AnswerOptions,
    others: PeerOptions,
    questions: Annotated[
        Path, _bench("--questions", text="Spec-Bench's question.jsonl, a file of that format, or adversarial.")
    ],
    out: Annotated[Path, _bench("--out", text="Directory of the results; a run that was stopped there goes on.")],
    model: Annotated[
        list[str] | None,
        _bench("-m", "--model", "-hf", "--hf-repo", text="As in generate; may be repeated. (default: smollm2)"),
    ] = None,
    drafters: Annotated[
        str, _bench("--drafters", metavar="A,B[OPTION=VALUE,...]", text="Compared with plain decoding.")
    ] = "auto",
    block_complexity: Annotated[
        str, _bench("--block-complexity", metavar="N,N", text="Rows of one pass.")
    ] = "10,30,60",
    per_category: Annotated[
        int, _bench("--per-category", text="The first N questions of each category; 0 = all.", min=0)
    ] = 0,
    turns: Annotated[str, _bench("--turns", metavar="first|all", text="Turns to ask of a question.")] = "first",
    as_json: AsJson = False,
    no_plots: NoPlots = False,
) -> None:
    """Compare drafters with plain decoding, question by question, on one load of each model.

    Every answer is compared with plain decoding's. Exit code 1 when one differs by more than a near-tie (--exact: at
    all). Writes results.jsonl, differences.jsonl, summary.json, report.md and plots.
    """
    if turns not in ("first", "all"):
        raise typer.BadParameter(f"first or all is needed, but {turns!r} was given", param_hint="'--turns'")
    from esp_edge.bench import plots, report, spec  # noqa: PLC0415 - the rest loads llama.cpp
    from esp_edge.bench.questions import load_questions, select  # noqa: PLC0415

    specs = spec.parse_drafters(drafters)
    lanes = spec.make_lanes(specs, spec.parse_numbers(block_complexity, "--block-complexity"))
    chosen = select(load_questions(questions), per_category, turns)
    if not no_plots:
        plots.require_matplotlib()
    program, peer_lanes = _peer(others.peer, others.peer_modes)
    from esp_edge.bench.run import Plan  # noqa: PLC0415
    from esp_edge.bench.specbench import measure  # noqa: PLC0415

    config = load.config()
    if config.exact or config.kernels != "stock":
        lanes = spec.with_stock(lanes)
    files = [model_file(name) for name in model or ["smollm2"]]
    plan = Plan(files, config, [*lanes, *peer_lanes], chosen, answers.params(), answers.repeat, program)
    with Bar("benchmark", shown=True) as bar:
        summary = measure(plan, out, command=shown_command(sys.argv), plots=not no_plots, progress=bar.update)
    if as_json:
        print_json(summary)
    else:
        write_text(report.overview(summary))
    note(f"details: {out / 'report.md'}")
    if summary["failures"]:
        note(f"{summary['failures']} answers are not plain decoding's: see {out / 'differences.jsonl'}")
        raise typer.Exit(1)


def _peer(program: str | None, modes: str | None) -> tuple[Peer | None, list[Lane]]:
    """The checked program and the lanes it adds."""
    from esp_edge.bench import peers  # noqa: PLC0415

    if program is None:
        if modes is not None:
            raise typer.BadParameter("it needs --peer llama-server=PATH", param_hint="'--peer-modes'")
        return None, []
    chosen = peers.parse_modes(modes if modes is not None else peers.DEFAULT_MODES)
    return peers.Peer.check(program, chosen), peers.peer_lanes(chosen)


def model_file(name: str) -> ModelFile:
    """The file behind ``-m``, downloaded where it is not there yet."""
    from esp_edge.bench.run import ModelFile  # noqa: PLC0415
    from esp_edge.models import hub  # noqa: PLC0415

    with Bar(f"downloading {name}", unit="bytes") as bar:
        return ModelFile.read(hub.resolve(name, progress=bar.update_file))


def shown_command(argv: list[str]) -> str:
    """The command line for the report, files and directories by their last name only."""
    return f"esp-edge {shlex.join(map(_shortened, argv[1:]))}"


def _shortened(word: str) -> str:
    program, equals, path = word.partition("=")
    if equals and program in ("--peer", "llama-server"):  # --peer=llama-server=PATH, llama-server=PATH
        return f"{program}={_shortened(path)}"
    return Path(word).name if Path(word).is_absolute() or Path(word).exists() else word


# -- cost ------------------------------------------------------------------------------------------------------------


def cost(
    *,
    model: ModelName = "smollm2",
    rows: Annotated[str, _bench("--rows", metavar="N,N-M", text="Sizes of the passes.")] = "1-64",
    contexts: Annotated[str, _bench("--contexts", metavar="N,N", text="Tokens in the KV cache.")] = "64,300,1024",
    threads: Annotated[
        str, _bench("-t", "--threads", metavar="N,N", text="CPU threads; 0 = one a physical core.")
    ] = "0",
    repeat: Repeat = 5,
    n_gpu_layers: Annotated[int, _bench("-ngl", "--n-gpu-layers", text="Layers on the GPU; -1 = all.")] = 0,
    out: Annotated[Path | None, _bench("--out", text="Directory for cost.json and the plot.")] = None,
    as_json: AsJson = False,
    no_plots: NoPlots = False,
) -> None:
    """Measure T(n), the time of a pass of n rows: medians of interleaved runs."""
    from esp_edge.bench import plots, report, spec  # noqa: PLC0415 - the rest loads llama.cpp

    sizes, lengths = spec.parse_numbers(rows, "--rows"), spec.parse_numbers(contexts, "--contexts", least=0)
    counts = spec.parse_threads(threads, least=0)
    if out is not None and not no_plots:
        plots.require_matplotlib()
    from esp_edge.bench.cost import cost_rows  # noqa: PLC0415
    from esp_edge.bench.machine import describe_run  # noqa: PLC0415
    from esp_edge.bench.results import make_folder, write_json  # noqa: PLC0415

    if out is not None:
        make_folder(out)
    config = ModelConfig(n_gpu_layers=n_gpu_layers)
    with closing(load_model(model, config)) as target, Bar("timing passes") as bar:
        measured = cost_rows(target, sizes, lengths, counts, repeat=repeat, progress=bar.update)
        machine = describe_run(
            target,
            n_ctx=max(row["context"] + row["rows"] for row in measured),
            n_threads=max(row["threads"] for row in measured),
        )
        document = {"machine": machine, "rows": measured}
        name = target.path.name.removesuffix(".gguf")
    if out is not None:
        write_json(out / "cost.json", document)
        if not no_plots:
            plots.plot_cost(measured, out, name)
    if as_json:
        print_json(document)
    else:
        write_text(report.cost_table(measured))
