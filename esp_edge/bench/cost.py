"""T(n): what a pass of n rows costs, at several contexts and thread counts."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from esp_edge.config import MAX_BLOCK, MAX_EXACT_BLOCK
from esp_edge.errors import ConfigError
from esp_edge.models.model import Context, TargetModel
from esp_edge.planner.measure import dummy_tokens, pass_ms
from esp_edge.step import Step

__all__ = ["cost_rows"]

_Key = tuple[int, int, int]  # rows, context, threads


def cost_rows(
    model: TargetModel,
    rows: Sequence[int],
    contexts: Sequence[int],
    threads: Sequence[int] = (0,),
    *,
    repeat: int = 5,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Time passes of dummy tokens, all of them with logits, and drop their rows again.

    A round measures every size once, in an order of its own, at every context and thread count; so a machine that slows
    down as it warms up slows all sizes alike. The passes are those of
    :func:`esp_edge.planner.measure.pass_ms`.

    Args:
        rows: sizes of the passes.
        contexts: tokens in the KV cache before the pass.
        threads: CPU threads; 0 = the model's default.
        repeat: rounds.
        progress: called with (passes done, passes).

    Returns:
        ``rows``, ``context``, ``threads``, ``ms`` (median), ``ms_min`` and ``ms_max`` of each combination.

    Raises:
        ConfigError: more rows than a pass may have, or a context that does not fit.
    """
    _check(model, rows, contexts)
    rows, contexts = sorted(set(rows)), sorted(set(contexts))
    threads = list(dict.fromkeys(n or model.threads for n in threads))
    times: dict[_Key, list[float]] = {(n, c, t): [] for t in threads for c in contexts for n in rows}
    total = repeat * len(times)
    tokens = dummy_tokens(model, contexts[-1] + rows[-1])
    for round_number in range(repeat):
        order = random.Random(round_number)
        for n_threads in order.sample(threads, len(threads)):
            with closing(_context(model, n_threads, contexts[-1] + rows[-1])) as context:
                for (n, at), ms in _one_round(Step(context), rows, contexts, tokens, order):
                    times[n, at, n_threads].append(ms)
                    if progress is not None:
                        progress(sum(map(len, times.values())), total)
    return [_row(key, found) for key, found in times.items()]


def _check(model: TargetModel, rows: Sequence[int], contexts: Sequence[int]) -> None:
    most = MAX_EXACT_BLOCK + 3 if model.config.exact else MAX_BLOCK
    if max(rows) > most:
        raise ConfigError(f"a pass may have {most} rows here, but --rows asks for {max(rows)}; lower it")
    trained = int(model.header.hyperparameter("context_length") or 0)
    if trained and max(contexts) + max(rows) > trained:
        raise ConfigError(
            f"the model was trained for {trained} tokens, but a context of {max(contexts)} and {max(rows)} rows were "
            f"asked for; lower --contexts"
        )


def _context(model: TargetModel, n_threads: int, n_ctx: int) -> Context:
    """A context with threads of its own; llama.cpp takes them when it is made."""
    config = model.config
    model.config = replace(config, n_threads=n_threads)
    try:
        return model.new_context(1, n_ctx=n_ctx)
    finally:
        model.config = config


def _one_round(
    step: Step, rows: Sequence[int], contexts: Sequence[int], tokens: Sequence[int], order: random.Random
) -> list[tuple[tuple[int, int], float]]:
    """((rows, context), milliseconds) of every size; the KV cache grows from context to context."""
    found = []
    for context in contexts:
        step.prefill(tokens[step.n_past : context])
        for n in (rows[-1], rows[0]):  # not counted: the first pass of a context allocates
            pass_ms(step, n, tokens)
        for n in order.sample(rows, len(rows)):
            found.append(((n, context), pass_ms(step, n, tokens)))
    return found


def _row(key: _Key, times: Sequence[float]) -> dict[str, Any]:
    rows, context, threads = key
    return {
        "rows": rows,
        "context": context,
        "threads": threads,
        "ms": round(statistics.median(times), 4),
        "ms_min": round(min(times), 4),
        "ms_max": round(max(times), 4),
    }
