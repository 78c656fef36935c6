"""Measuring T(n) on this device: enough sizes in a second or two, kept on disk, and how thread counts compare."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from esp_edge._runtime import llama_cpp
from esp_edge.config import MAX_BLOCK, MAX_EXACT_BLOCK
from esp_edge.errors import ConfigError
from esp_edge.models.device import cpu_name, gpu_names, usable_cores
from esp_edge.models.model import Context, TargetModel, offloads
from esp_edge.planner.curve import CONTEXT_STEP, CostCurve
from esp_edge.step import Step
from esp_edge.tree import DraftTree

__all__ = [
    "curve_settings",
    "dummy_tokens",
    "load_curve",
    "measure_curve",
    "measure_models",
    "measure_threads",
    "pass_ms",
    "plausible",
    "repeated_ms",
    "save_curve",
    "time_rounds",
    "time_sizes",
    "typical",
]

Progress = Callable[[int, int], None]
BUDGET_MS = 1200.0  # of timed passes at the short context; with all others, about 2.5 s

_KEY, _VERSION = "cost_curve", 3
_MOST_STORED = 8  # curves of one model file: thread counts, exact mode, ...
_SIZES = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, MAX_EXACT_BLOCK + 3, 96, 128, 192, MAX_BLOCK)
_NEEDED = (1, 2, 4, 8)  # measured however slow the device is
_THREAD_SIZES = (1, 2, 4, 6, 8, 16)
_MODEL_SIZES = (1, 4, 8)
_FAR = 7 * CONTEXT_STEP  # second context, copied together from blocks of the first
_FAR_SHARE = 0.3  # of the budget, that is spent there on top
_DEAREST = 0.15  # of the budget, that one pass may take if it can be left out
_FIRST_ROUND = 0.65  # of the budget, that measuring every size once may take
_EVEN = 1.5  # times an even share of the budget, that the passes of one size may take
_MOST_ROUNDS = 9
_CHEAP = 0.05  # of the budget, that a needed size may take to be timed twice in the first round
_REPEATED = 16  # rows up to which a pass is timed behind another one of its size: beyond, it makes little difference
_SWITCHES = 7  # between passes of one and two rows, to see what another size costs
_SWITCH_SHARE = 0.15  # of the budget, that these may take
_TRIES = 3  # for a pass that took longer than it can
_SLACK = 1.3  # times what a pass can take, before it is taken for disturbed
_BUSY = 1.25  # spread of a curve that is not worth keeping
# what changes the time of a pass from outside of the model's settings
_ENVIRONMENT = ("OMP_WAIT_POLICY", "OMP_PROC_BIND", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "GGML_CPU_TILED_MM")


# -- the cache -------------------------------------------------------------------------------------------------------


def load_curve(
    model: TargetModel,
    *,
    redo: bool = False,
    progress: Progress | None = None,
    measure: Callable[..., CostCurve] | None = None,
) -> CostCurve:
    """T(n) of this model file, with these settings, on this device: from the disk, or measured and stored.

    What was measured beside a busy program is used, but not stored (:func:`save_curve`).

    Args:
        redo: measure even if a curve is stored.
        progress: called with (milliseconds measured, milliseconds at most).
        measure: instead of :func:`measure_curve`.
    """
    settings = curve_settings(model)
    for entry in [] if redo else _stored(model):
        if entry["settings"] == settings:
            try:
                return CostCurve.from_document(entry.get("curve"))
            except ConfigError:  # cut off, or written by hand
                break
    curve = (measure or measure_curve)(model, progress=progress)
    save_curve(model, curve)
    return curve


def save_curve(model: TargetModel, curve: CostCurve) -> None:
    """Store a curve with what its passes taught it, for the next run with these settings.

    Not one measured beside a busy program (``curve.spread`` of 1.25 and more): passes correct few of its sizes.
    """
    if curve.spread >= _BUSY:
        return
    settings = curve_settings(model)
    others = [entry for entry in _stored(model) if entry["settings"] != settings]
    newest = {"settings": settings, "curve": curve.to_document()}
    model.cache.put(_KEY, [*others, newest][-_MOST_STORED:])


def _stored(model: TargetModel) -> list[dict[str, Any]]:
    entries = model.cache.get(_KEY)
    entries = entries if isinstance(entries, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("settings"), dict)]


def curve_settings(model: TargetModel) -> dict[str, Any]:
    """JSON-ready: everything a stored curve depends on. The model file itself is the cache's own key."""
    config = model.config
    return {
        "version": _VERSION,
        "llama_cpp_python": importlib.metadata.version("llama-cpp-python"),
        "build": llama_cpp.llama_print_system_info().decode("utf-8", "replace").strip(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "gpus": list(gpu_names()) if offloads(config) else [],
        "model": {**dataclasses.asdict(config), "n_ctx": None, "n_threads": model.threads},
        "kernels": model.kernels.isa,  # None where they are wanted, but do not run
        "contexts": _contexts(model),
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    }


# -- one curve -------------------------------------------------------------------------------------------------------


def measure_curve(model: TargetModel, *, budget_ms: float = BUDGET_MS, progress: Progress | None = None) -> CostCurve:
    """Time passes of dummy tokens on a context of their own, which is closed afterwards.

    Many sizes are timed at a short context, a few at a longer one, which tells how attention grows. The second one
    costs no prefill: its KV cells are copies of the first. A model that cannot roll back is timed at one row.

    Args:
        budget_ms: of timed passes at the short context; a third of it at the longer one. A slow device measures fewer
            sizes, and overruns it rather than miss 1, 2, 4 or 8 rows.
        progress: called with (milliseconds measured, milliseconds at most).
    """
    contexts = _contexts(model)
    sizes = _sizes(model, contexts[0])
    report = _Report(progress, budget_ms * (1.0 + _FAR_SHARE * (len(contexts) - 1)))
    with closing(model.new_context(2, n_ctx=contexts[-1] + CONTEXT_STEP)) as context:
        step = Step(context)
        tokens = dummy_tokens(model, contexts[0] + sizes[-1])
        step.prefill(tokens[: contexts[0]])

        def run(n: int) -> float:
            return report.add(repeated_ms(step, n, tokens))

        times = {contexts[0]: time_sizes(run, sizes, budget_ms)}
        switch_ms = _switch_ms(step, tokens, _SWITCH_SHARE * budget_ms) if len(sizes) > 1 else 0.0
        if len(contexts) > 1 and _stretch(context, contexts[0], contexts[1]):
            times[contexts[1]] = time_sizes(run, _NEEDED, _FAR_SHARE * budget_ms)
    report.finish()
    points = {at: plausible(found) for at, found in times.items()}
    spread = max(_spread(times[contexts[0]]), _contradiction(points))
    return CostCurve(points, spread=spread, switch_ms=switch_ms)


class _Report:
    """Progress in milliseconds of timed passes."""

    def __init__(self, progress: Progress | None, total_ms: float) -> None:
        self._progress, self._done, self._total = progress, 0.0, int(total_ms)

    def add(self, ms: float) -> float:
        self._done += ms
        if self._progress is not None:
            self._progress(min(int(self._done), self._total), self._total)
        return ms

    def finish(self) -> None:
        self._done = self._total
        self.add(0.0)


def _contexts(model: TargetModel) -> list[int]:
    """Tokens before the passes: one block of KV cells, less in a tiny context, and seven where they fit."""
    if not model.capability.speculation:
        return [1]
    near = min(CONTEXT_STEP, model.n_ctx // 2)
    return [near, _FAR] if near == CONTEXT_STEP and model.n_ctx >= _FAR + CONTEXT_STEP else [near]


def _sizes(model: TargetModel, near: int) -> list[int]:
    if not model.capability.speculation:
        return [1]
    most = MAX_EXACT_BLOCK + 3 if model.config.exact else MAX_BLOCK
    room = model.n_ctx - near if model.n_ctx < 2 * CONTEXT_STEP else CONTEXT_STEP
    return [n for n in _SIZES if n <= min(most, room - 1)]  # an exact single row is padded


def _stretch(context: Context, n: int, wanted: int) -> bool:
    """Make the ``n`` cells of sequence 0 ``wanted`` cells, by copies at the same positions; False where it cannot be.

    Attention walks over cells, whatever their position, so this costs milliseconds instead of a prefill.
    """
    pointer, memory = context.pointer, llama_cpp.llama_get_memory(context.pointer)
    size = llama_cpp.llama_state_seq_get_size(pointer, 0)
    buffer = (ctypes.c_uint8 * size)()
    if memory is None or llama_cpp.llama_state_seq_get_data(pointer, buffer, size, 0) == 0:
        return False
    for _ in range(wanted // n - 1):
        if llama_cpp.llama_state_seq_set_data(pointer, buffer, size, 1) == 0:
            return False
        llama_cpp.llama_memory_seq_cp(memory, 1, 0, -1, -1)
        llama_cpp.llama_memory_seq_rm(memory, 1, -1, -1)
    return True


# -- passes ----------------------------------------------------------------------------------------------------------


def dummy_tokens(model: TargetModel, n: int) -> list[int]:
    """Token ids, always the same and all over the vocabulary: one repeated token would use few experts of a mixture."""
    draw = random.Random(0)
    return [draw.randrange(model.tokenizer.n_vocab) for _ in range(n)]


def pass_ms(step: Step, n: int, tokens: Sequence[int], clock: Callable[[], float] = time.perf_counter) -> float:
    """Milliseconds of a pass over the last ``n`` tokens, all rows with logits; its rows are dropped again.

    The rows are a chain below one root: on the cost the shape of the tree has no influence, nor has a mask row any
    other than a token's, and no sequences are needed that plain decoding does not have.
    """
    tree = DraftTree.from_lists(tokens[-n:], range(-1, n - 1))
    start = clock()
    step.run(tree)
    elapsed = 1000.0 * (clock() - start)
    step.rollback()
    return elapsed


def repeated_ms(step: Step, n: int, tokens: Sequence[int]) -> float:
    """:func:`pass_ms` of a pass that follows one of its own size, as most do, where that makes a difference."""
    if n <= _REPEATED:
        pass_ms(step, n, tokens)
    return pass_ms(step, n, tokens)


def _switch_ms(step: Step, tokens: Sequence[int], budget_ms: float) -> float:
    """How much longer a pass takes behind one of another size: llama.cpp builds and plans its graph anew then.

    Told by passes of one row behind one of two rows and behind one of its own size, in turns; 0 where passes are so
    slow that it makes no difference.
    """
    behind: dict[int, list[float]] = {1: [], 2: []}
    pass_ms(step, 1, tokens)
    spent = 0.0
    for _ in range(_SWITCHES):
        for before, found in behind.items():
            spent += pass_ms(step, before, tokens)
            found.append(pass_ms(step, 1, tokens))
            spent += found[-1]
        if spent * (1 + 1 / len(behind[1])) > budget_ms:  # another round would not fit
            break
    if len(behind[1]) == 1:
        return 0.0
    return max(0.0, statistics.median(behind[2]) - statistics.median(behind[1]))


def typical(times: Sequence[float]) -> float:
    """Mean of the faster half: steadier than the minimum, and other programs only ever make a pass slower."""
    kept = sorted(times)[: (len(times) + 1) // 2]
    return sum(kept) / len(kept)


def time_sizes(run: Callable[[int], float], sizes: Sequence[int], budget_ms: float) -> dict[int, list[float]]:
    """Milliseconds of every pass by size, as many sizes and repetitions as a budget allows, in interleaved rounds.

    The first round goes from the needed sizes to the dear ones and leaves out what would not fit; later rounds, each
    in an order of its own, repeat a size as long as it has not used up its share. So small passes, which matter most,
    are timed several times and large ones once or twice.

    Args:
        run: makes a pass of so many rows and returns its milliseconds, the only clock there is.
        sizes: rising.
        budget_ms: of all passes together.
    """
    run(sizes[0])  # not counted: the first pass of a context allocates
    times: dict[int, list[float]] = {}
    for n in sorted(sizes, key=lambda n: (n not in _NEEDED, n)):
        dearest = _at_most(times, n)
        fits = dearest <= _DEAREST * budget_ms and _spent(times) + dearest <= _FIRST_ROUND * budget_ms
        if n in _NEEDED or not times or fits:
            times[n] = _first_times(run, n, dearest, _CHEAP * budget_ms if n in _NEEDED else 0.0)
    share = _EVEN * budget_ms / len(times)
    for number in range(1, _MOST_ROUNDS):
        for n in random.Random(number).sample(list(times), len(times)):
            if sum(times[n]) + min(times[n]) <= share and _spent(times) < budget_ms:
                times[n].append(run(n))
    times[sizes[0]].append(run(sizes[0]))  # a second time at least, and as late as can be: was the machine calm?
    return {n: times[n] for n in sorted(times)}


def _first_times(run: Callable[[int], float], n: int, dearest: float, cheap: float) -> list[float]:
    """One time; a second one where it is cheap, and more while all are longer than a pass of ``n`` rows can be."""
    found = [run(n)]
    if found[0] <= cheap:
        found.append(run(n))
    while dearest and min(found) > _SLACK * dearest and len(found) < _TRIES:
        found.append(run(n))
    return found


def _at_most(times: Mapping[int, Sequence[float]], n: int) -> float:
    """What a size can cost at most: as much a row as the next smaller one; 0 = not known."""
    smaller = max((size for size in times if size <= n), default=0)
    return min(times[smaller]) * n / smaller if smaller else 0.0


def _spent(times: Mapping[int, Sequence[float]]) -> float:
    return sum(map(sum, times.values()))


def plausible(times: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Milliseconds by size: typical ones, but no more than a larger pass took, or the same rows in several."""
    found = {n: typical(times[n]) for n in sorted(times)}
    least = math.inf
    for n in reversed(found):
        found[n] = min(found[n], _SLACK * least)  # a dip is real: kernels like full groups of rows
        least = min(least, found[n])
    for n, ms in found.items():
        found[n] = min([ms, *(_SLACK * math.ceil(n / m) * found[m] for m in found if m < n)])
    return found


def _spread(times: Mapping[int, Sequence[float]]) -> float:
    """Median over the sizes of the second best time as a multiple of the best; 1 where nothing was repeated."""
    repeated = [sorted(found) for found in times.values() if len(found) > 1]
    return statistics.median(found[1] / found[0] for found in repeated) if repeated else 1.0


def _contradiction(points: Mapping[int, Mapping[int, float]]) -> float:
    """How many times what it took at the longest context a size took at the shortest; at most 1 on a calm machine."""
    near, far = points[min(points)], points[max(points)]
    return max(near[n] / far[n] for n in far if n in near)


# -- threads ---------------------------------------------------------------------------------------------------------


def measure_threads(
    model: TargetModel,
    counts: Sequence[int],
    sizes: Sequence[int] = _THREAD_SIZES,
    *,
    budget_ms: float = BUDGET_MS,
    progress: Progress | None = None,
) -> dict[int, dict[int, float]]:
    """Thread count -> rows -> milliseconds, from interleaved rounds on one context.

    Args:
        counts: of CPU threads.
        sizes: rows; a model that cannot roll back is timed at one row.
        budget_ms: of the passes of one thread count; each size is timed at least once.
        progress: called with (rounds done, rounds at most).
    """
    near = _contexts(model)[0]
    sizes = [n for n in sizes if n <= _sizes(model, near)[-1]]
    with closing(model.new_context(1, n_ctx=near + CONTEXT_STEP)) as context:
        step = Step(context)
        tokens = dummy_tokens(model, near + sizes[-1])
        step.prefill(tokens[:near])

        def run(n_threads: int, n: int) -> float:
            llama_cpp.llama_set_n_threads(context.pointer, n_threads, n_threads)
            return pass_ms(step, n, tokens)

        return time_rounds(run, counts, sizes, budget_ms * len(counts), progress)


def measure_models(
    models: Sequence[TargetModel],
    sizes: Sequence[int] = _MODEL_SIZES,
    *,
    budget_ms: float = BUDGET_MS,
    progress: Progress | None = None,
) -> list[dict[int, float]]:
    """Rows -> milliseconds for one file loaded in several ways, from interleaved rounds on a context each.

    The arguments are those of :func:`measure_threads`.
    """
    near = _contexts(models[0])[0]
    sizes = [n for n in sizes if n <= _sizes(models[0], near)[-1]]
    tokens = dummy_tokens(models[0], near + sizes[-1])
    with ExitStack() as stack:
        steps = [
            Step(stack.enter_context(closing(model.new_context(1, n_ctx=near + CONTEXT_STEP)))) for model in models
        ]
        for step in steps:
            step.prefill(tokens[:near])
        which = range(len(models))
        found = time_rounds(lambda i, n: pass_ms(steps[i], n, tokens), which, sizes, budget_ms * len(models), progress)
    return [found[i] for i in which]


def time_rounds(
    run: Callable[[int, int], float],
    counts: Sequence[int],
    sizes: Sequence[int],
    budget_ms: float,
    progress: Progress | None = None,
) -> dict[int, dict[int, float]]:
    """The rounds of :func:`measure_threads`; ``run(n_threads, rows)`` returns milliseconds, the only clock there is.

    Those of :func:`measure_models`, too: ``counts`` are then the models' places.
    """
    times: dict[tuple[int, int], list[float]] = {(count, n): [] for count in counts for n in sizes}
    spent = 0.0
    for number in range(_MOST_ROUNDS):
        order = random.Random(number)
        for count in order.sample(list(counts), len(counts)):
            run(count, sizes[0])  # not counted: threads start and go to sleep
            for n in order.sample(list(sizes), len(sizes)):
                times[count, n].append(run(count, n))
                spent += times[count, n][-1]
        if progress is not None:
            progress(number + 1, _MOST_ROUNDS)
        if spent * (number + 2) / (number + 1) > budget_ms:  # another round would not fit
            break
    return {count: plausible({n: times[count, n] for n in sizes}) for count in counts}
