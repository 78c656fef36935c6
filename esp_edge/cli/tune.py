"""``esp-edge tune``: measure what a pass costs on this device, say what would make it cheaper, and remember it."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shlex
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esp_edge.cli.answer import load_model
from esp_edge.cli.options import ModelName, option
from esp_edge.cli.output import Bar, note, print_json, write_text
from esp_edge.config import ModelConfig

if TYPE_CHECKING:
    from esp_edge.models.model import TargetModel
    from esp_edge.planner.advice import Advice, ThreadTimes
    from esp_edge.planner.curve import CostCurve

__all__ = ["tune"]

_tune = functools.partial(option, panel="Tuning", env=False)
_CONTEXT = 300  # where times are told


def tune(
    *,
    model: ModelName = "smollm2",
    threads: Annotated[
        str, _tune("-t", "--threads", metavar="N,N", text="CPU threads to compare. (default: 1, half, all cores)")
    ] = "",
    n_gpu_layers: Annotated[int, option("-ngl", "--n-gpu-layers", text="Layers on the GPU; -1 = all.")] = 0,
    apply: Annotated[
        bool, _tune("--apply", text="Remember the best thread count for this file on this machine.")
    ] = False,
    reset: Annotated[bool, _tune("--reset", text="Forget it, and measure nothing.")] = False,
    as_json: Annotated[bool, _tune("--json", text="Print one JSON document.")] = False,
) -> None:
    """Measure what a pass of n rows costs here, by threads and kernels, and say what would make it cheaper.

    The cost curve that decides about drafts is measured anew, too. A thread count that was remembered with --apply is
    used wherever --threads is 0.
    """
    if apply and reset:
        raise typer.BadParameter("give either --apply or --reset, not both", param_hint="'--apply'")
    from esp_edge.bench.spec import parse_threads  # noqa: PLC0415 - the rest loads llama.cpp

    counts = parse_threads(threads) if threads else []
    with closing(load_model(model, ModelConfig(n_gpu_layers=n_gpu_layers))) as target:
        if reset:
            _remember(target, 0)
        else:
            document = _measured(target, counts, shlex.quote(model), apply)
            print_json(document) if as_json else _print(document)


def _measured(model: TargetModel, counts: list[int], name: str, apply: bool) -> dict[str, Any]:
    from esp_edge.models.device import usable_cores  # noqa: PLC0415
    from esp_edge.models.model import default_threads  # noqa: PLC0415
    from esp_edge.planner import advice, measure  # noqa: PLC0415

    in_use = model.threads
    wanted = counts or advice.thread_counts(default_threads(), usable_cores())
    with Bar("comparing thread counts") as bar:
        times = measure.measure_threads(model, sorted({*wanted, in_use}), progress=bar.update)
    best = advice.best_threads(times)
    told = advice.on_threads(times, in_use, f"esp-edge tune -m {name} --apply")
    applied = apply and _apply(model, told, best)
    with Bar("measuring the cost of a pass") as bar:
        curve = measure.load_curve(model, redo=True, progress=bar.update)
    lines = [told, *_on_kernels(model, name), *_more_advice(model, curve, name)]
    return {**_document(model, times, curve), "in_use": in_use, "best": best, "applied": applied} | {
        "advice": [asdict(line) for line in lines]
    }


def _apply(model: TargetModel, told: Advice, best: int) -> bool:
    """Remember a thread count if it is better than the one in use."""
    if told.command is None:
        note("nothing to remember: the thread count in use is the best")
        return False
    return _remember(model, best)


def _remember(model: TargetModel, n_threads: int) -> bool:
    from esp_edge.models.device import remember_threads  # noqa: PLC0415

    if not remember_threads(model.cache, n_threads):
        note("the cache directory (ESP_EDGE_CACHE) cannot be written: nothing is remembered")
        return False
    note(f"remembered: {n_threads} threads for this file on this machine" if n_threads else "nothing is remembered now")
    return True


def _on_kernels(model: TargetModel, name: str) -> list[Advice]:
    """Our CPU kernels beside llama.cpp's in a few passes of this model, or why ours do not run; [] on a GPU."""
    from esp_edge.models.model import TargetModel  # noqa: PLC0415
    from esp_edge.planner import advice, measure  # noqa: PLC0415

    kernels = model.kernels
    if kernels.isa is None:
        on_cpu = model.config.n_gpu_layers == 0 and kernels.reason is not None
        return [advice.Advice("kernels", str(kernels))] if on_cpu else []
    with (
        TargetModel(str(model.path), replace(model.config, kernels="stock")) as stock,
        Bar("comparing kernels") as bar,
    ):
        ours, llama_cpp = measure.measure_models([model, stock], progress=bar.update)
    return [advice.on_kernels(ours, llama_cpp, kernels.isa, f"esp-edge generate -m {name} --kernels stock")]


def _more_advice(model: TargetModel, curve: CostCurve, name: str) -> list[Advice]:
    """About quant, build, device and environment."""
    from esp_edge._runtime import llama_cpp  # noqa: PLC0415
    from esp_edge.models import gguf  # noqa: PLC0415
    from esp_edge.models.device import cpu_flags  # noqa: PLC0415
    from esp_edge.models.model import offloads  # noqa: PLC0415
    from esp_edge.planner import advice  # noqa: PLC0415

    on_gpu = offloads(model.config)
    lines: list[Advice | None] = []
    if model.capability.speculation:
        ratio = functools.partial(curve.ratio, context=_CONTEXT)
        quant, ours = gguf.quant_name(model.header), model.kernels.complete
        lines.append(advice.on_quant(quant, ratio, name, on_gpu=on_gpu, ours=ours))
    system_info = llama_cpp.llama_print_system_info().decode("utf-8", "replace")
    lines.append(advice.on_build(system_info, cpu_flags(), importlib.metadata.version("llama-cpp-python")))
    can_offload = bool(llama_cpp.llama_supports_gpu_offload())
    lines.append(advice.on_device(can_offload, on_gpu, f"esp-edge tune -m {name} -ngl -1"))
    lines.append(advice.on_environment(os.environ))
    return [line for line in lines if line is not None]


def _document(model: TargetModel, times: ThreadTimes, curve: CostCurve) -> dict[str, Any]:
    from esp_edge.bench.machine import describe_run  # noqa: PLC0415
    from esp_edge.planner import advice  # noqa: PLC0415

    ratio = functools.partial(curve.ratio, context=_CONTEXT)
    points = curve.points
    can_draft = model.capability.speculation
    return {
        "model": model.path.name,
        "machine": describe_run(model, n_ctx=max(points)),
        "threads": [
            {"threads": count, "rows": n, "context": min(points), "ms": round(ms, 4)}
            for count, found in times.items()
            for n, ms in found.items()
        ],
        "curve": {str(context): {str(n): round(ms, 4) for n, ms in found.items()} for context, found in points.items()},
        "break_even": {str(n): round(tau, 3) for n, tau in advice.break_even(ratio).items()} if can_draft else {},
        "most_speedup": round(advice.most_speedup(ratio), 2) if can_draft else 1.0,
        "speculation": model.capability.reason if not can_draft else None,
    }


def _print(document: dict[str, Any]) -> None:
    from esp_edge.bench import report  # noqa: PLC0415

    machine = document["machine"]
    write_text(f"{document['model']} ({machine['quant']}) on {machine['cpu']}\n\n")
    write_text(report.cost_table(document["threads"]) + "\n")
    if document["speculation"]:
        write_text(f"speculation: {document['speculation']}\n")
    else:
        taus = [f"{tau:.2f} at {n}{' rows' * (n == '2')}" for n, tau in document["break_even"].items()]
        write_text(
            f"break-even: a tree pays from a tau of {', '.join(taus)}; drafts that are always right would decode "
        )
        write_text(f"{document['most_speedup']:.2f}x as fast (up to 16 rows)\n")
    for line in document["advice"]:
        command = f"; run: {line['command']}" if line["command"] else ""
        write_text(f"{line['kind']}: {line['text']}{command}\n")
