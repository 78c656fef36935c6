"""``esp-edge bench trace`` and ``bench replay``: record answers once, run drafters along them without the model."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esp_edge.cli.bench import AsJson, NoPlots, model_file, shown_command
from esp_edge.cli.options import LoadOptions, ModelName, option
from esp_edge.cli.output import Bar, note, print_json, write_text
from esp_edge.config import GenerationParams

if TYPE_CHECKING:
    from esp_edge.bench.simulate import Device

__all__ = ["DeviceOptions", "Half", "replay", "trace"]

_bench = functools.partial(option, panel="Benchmark")
DEFAULT_DRAFTERS = "esp,pld,suffix,stand,recycling,racer"
Half = Annotated[
    str,
    _bench(
        "--half",
        metavar="untaught|taught|all",
        text="Questions by whether they taught the weights that auto starts with (id // 2 is even), if Spec-Bench's.",
    ),
]


@dataclass(frozen=True)
class DeviceOptions:
    """The device whose times a replay takes."""

    cost: Annotated[
        str | None,
        _bench("--cost", metavar="FILE|flat", text="T(n) of the passes: a cost*.json of bench; flat = rows are free."),
    ] = None
    host_ms: Annotated[
        str | None,
        _bench(
            "--host-ms", metavar="PLAIN,DRAFTING", text="Our own milliseconds of a pass, with --cost. (default: 0,0)"
        ),
    ] = None

    def device(self) -> Device | None:
        """The simulated device, None where none was asked for; ConfigError when it cannot be read."""
        from esp_edge.bench.simulate import read_device  # noqa: PLC0415

        if self.cost is None:
            if self.host_ms is not None:
                raise typer.BadParameter("it needs --cost FILE", param_hint="'--host-ms'")
            return None
        return read_device(self.cost, self.host_ms)


def trace(
    *,
    load: LoadOptions,
    questions: Annotated[Path, _bench("--questions", text="Spec-Bench's question.jsonl, or a file of that format.")],
    out: Annotated[Path, _bench("--out", text="Directory of the trace; one that was stopped there goes on.")],
    model: ModelName = "smollm2",
    per_category: Annotated[
        int, _bench("--per-category", text="The first N questions of each category; 0 = all.", min=0)
    ] = 0,
    turns: Annotated[str, _bench("--turns", metavar="first|all", text="Turns to ask of a question.")] = "first",
    max_tokens: Annotated[int, _bench("-n", "--max-tokens", text="Tokens of an answer at most.", min=1)] = 100,
    mask_init: Annotated[
        str,
        _bench(
            "--mask-init", metavar="A,B", text="Mask vectors to probe with: INIT, INIT@UPDATE or auto; none = none."
        ),
    ] = "vocab-mean,prompt-mean",
    masks: Annotated[int, _bench("--masks", text="Mask rows behind every root, 1..3.", min=1, max=3)] = 2,
    top: Annotated[int, _bench("--top", text="Candidates to keep of each row.", min=1)] = 64,
    temp: Annotated[float, _bench("--temp", text="Temperature; 0 = greedy.")] = 0.0,
    seed: Annotated[int, _bench("-s", "--seed", text="Of every answer, when it is sampled.", min=0)] = 1,
) -> None:
    """Record plain decoding once: its tokens and what every row and the masks behind it said.

    bench replay then runs any drafter along the recorded tokens, in seconds and without the model. Writes run.json and
    one file an answer.
    """
    if turns not in ("first", "all"):
        raise typer.BadParameter(f"first or all is needed, but {turns!r} was given", param_hint="'--turns'")
    from esp_edge.bench.questions import load_questions, select  # noqa: PLC0415 - the rest loads llama.cpp

    params = GenerationParams(max_tokens=max_tokens, temperature=temp, seed=seed)
    chosen = select(load_questions(questions), per_category, turns)
    inits = [name.strip() for name in mask_init.split(",") if name.strip() not in ("", "none")]
    from esp_edge.bench.trace import TracePlan, record_trace  # noqa: PLC0415

    plan = TracePlan(model_file(model), load.config(), chosen, params, inits, masks, top)
    with Bar("trace", shown=True) as bar:
        made = record_trace(plan, out, progress=bar.update)
    note(f"{len(made)} answers in {out}: esp-edge bench replay {out}")


def replay(
    *,
    simulated: DeviceOptions,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Directory of bench trace.")],
    drafters: Annotated[
        str | None,
        _bench(
            "--drafters",
            metavar="A,B[OPTION=VALUE,...]",
            text=f"Drafters to run along the answers. (default: {DEFAULT_DRAFTERS}; with --cost auto, too)",
        ),
    ] = None,
    block_complexity: Annotated[
        str, _bench("--block-complexity", metavar="N,N", text="Rows of one pass.")
    ] = "10,30,60",
    half: Half = "all",
    out: Annotated[Path | None, _bench("--out", text="Directory for replay.json, replay.md and plots.")] = None,
    as_json: AsJson = False,
    no_plots: NoPlots = False,
) -> None:
    """Run drafters along recorded answers, without the model: tau, acceptance and rows a pass in seconds.

    The column exact tells whose figures are those of a live run; the others also learn from the rows of rejected
    drafts, which a trace does not have. lade and draft-model cannot be replayed. With --cost it simulates a device:
    auto plans with its T(n), every drafter gets a simulated speed, and two bounds tell how far auto is from what is
    possible.
    """
    from esp_edge.bench import plots, spec  # noqa: PLC0415 - the rest loads llama.cpp

    device = simulated.device()
    default = DEFAULT_DRAFTERS if device is None else f"{DEFAULT_DRAFTERS},auto"
    specs = spec.parse_drafters(default if drafters is None else drafters)
    wanted = spec.parse_numbers(block_complexity, "--block-complexity")
    plain = [spec.PLAIN] if any(one.label == spec.PLAIN for one in specs) else []
    lanes = [lane for lane in spec.make_lanes(specs, wanted) if lane.label != spec.PLAIN or plain]
    if out is not None and not no_plots:
        plots.require_matplotlib()
    from esp_edge.bench.halves import half_of  # noqa: PLC0415
    from esp_edge.bench.replay import replay_lanes  # noqa: PLC0415
    from esp_edge.bench.replay_report import overview, replay_document, write_replay  # noqa: PLC0415
    from esp_edge.bench.results import make_folder  # noqa: PLC0415
    from esp_edge.bench.trace_file import Trace  # noqa: PLC0415

    recorded = half_of(Trace(trace), half)
    if out is not None:
        make_folder(out)
    with Bar("replay", shown=True) as bar:
        replayed = replay_lanes(recorded, lanes, device=device, bounds=True, progress=bar.update)
    command = shown_command(sys.argv)
    document = replay_document(recorded, replayed, command=command, device=device, half=half)
    if out is not None:
        write_replay(document, out, plots=not no_plots)
        note(f"details: {out / 'replay.md'}")
    if as_json:
        print_json(document)
    else:
        write_text(overview(document))
