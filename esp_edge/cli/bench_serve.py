"""``esp-edge bench serve``: the server beside llama-server: first token, memory, tokens/s with many streams."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from esp_edge.cli.bench import AsJson, NoPlots, model_file, shown_command
from esp_edge.cli.options import LoadOptions, ModelName, option
from esp_edge.cli.output import Bar, note, print_json, write_text

if TYPE_CHECKING:
    from esp_edge.bench.serving import ServingPlan

__all__ = ["serve"]

_bench = functools.partial(option, panel="Benchmark")
DEFAULT_CONTEXT = 4096  # as the server has it, when the model was trained for so much


def serve(
    *,
    load: LoadOptions,
    model: ModelName = "smollm2",
    peer: Annotated[
        str | None, _bench("--peer", metavar="llama-server=PATH", text="Measure llama.cpp's server beside ours.")
    ] = None,
    drafters: Annotated[str, _bench("--drafters", metavar="A,B", text="Of our servers, one each.")] = "auto,none",
    streams: Annotated[
        str, _bench("--streams", metavar="N,N", text="Concurrent streams; the largest is the number of slots.")
    ] = "1,2,4,8",
    prompt_tokens: Annotated[
        str, _bench("--prompt-tokens", metavar="N,N", text="Tokens of the prompts whose first token is waited for.")
    ] = "50,1000",
    max_tokens: Annotated[int, _bench("-n", "--max-tokens", text="Tokens of an answer at most.", min=1)] = 64,
    repeat: Annotated[int, _bench("--repeat", text="Repetitions of everything.", min=1)] = 5,
    out: Annotated[Path | None, _bench("--out", text="Directory for serving.json, report.md and the plot.")] = None,
    as_json: AsJson = False,
    no_plots: NoPlots = False,
) -> None:
    """Measure our server, and llama-server beside it: time to the first token, memory, tokens/s by streams.

    Real servers are started with the same settings and asked in turn; about half a minute a repetition and server.
    """
    from esp_edge.bench import plots, serving_report  # noqa: PLC0415 - the rest loads llama.cpp
    from esp_edge.bench.results import make_folder, write_json  # noqa: PLC0415
    from esp_edge.bench.serving import measure  # noqa: PLC0415
    from esp_edge.bench.spec import parse_numbers, split_list  # noqa: PLC0415

    if out is not None and not no_plots:
        plots.require_matplotlib()
    plan = dataclasses.replace(
        _plan(model, load, peer),
        drafters=tuple(split_list(drafters, drafters)),
        streams=tuple(parse_numbers(streams, "--streams")),
        prompts=tuple(sorted(parse_numbers(prompt_tokens, "--prompt-tokens"))),
        repeat=repeat,
        max_tokens=max_tokens,
    )
    plan.check()
    if out is not None:
        make_folder(out)
    with Bar("benchmark", shown=True) as bar:
        document = measure(plan, progress=bar.update, command=shown_command(sys.argv))
    if out is not None:
        write_json(out / "serving.json", document)
        figure = None if no_plots else serving_report.plot_serving(document, out)
        (out / "report.md").write_text(serving_report.report(document, figure), "utf-8")
        note(f"details: {out / 'report.md'}")
    if as_json:
        print_json(document)
    else:
        write_text(serving_report.overview(document))


def _plan(model: str, load: LoadOptions, peer: str | None) -> ServingPlan:
    """The model, the settings that all servers get, and the other program."""
    from esp_edge.bench.peers import Peer, PeerMode  # noqa: PLC0415
    from esp_edge.bench.serving import ServingPlan  # noqa: PLC0415
    from esp_edge.models.cache import ModelCache  # noqa: PLC0415
    from esp_edge.models.model import threads_for  # noqa: PLC0415

    program = None if peer is None else Peer.check(peer, [PeerMode("none")])
    file, config = model_file(model), load.config()
    config = dataclasses.replace(
        config,
        n_ctx=config.n_ctx or min(file.n_ctx_train or DEFAULT_CONTEXT, DEFAULT_CONTEXT),
        n_threads=threads_for(config, ModelCache(file.path)),
    )
    return ServingPlan(file, config, peer=program)
