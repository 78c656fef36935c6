"""What a reply says about how it was made: usage (OpenAI), timings (llama.cpp's names), speculation (vLLM's names)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from esp_edge.metrics import GenerationStats

__all__ = ["acceptance_histogram", "speculation", "timings", "total", "usage"]

COPIES = ("prediction", "suffix")  # the sources that may copy from a prediction, the first that is there counts

_SUMS = (
    "prompt_tokens",
    "cached_tokens",
    "prefill_tokens",
    "passes",
    "rows",
    "draft_tokens",
    "accepted_tokens",
    "committed_tokens",
    "prefill_ms",
    "decode_ms",
    "model_ms",
)


def total(stats: Sequence[GenerationStats]) -> GenerationStats:
    """Statistics of several answers together."""
    if len(stats) == 1:
        return stats[0]
    first = stats[0] if stats else GenerationStats()
    found = GenerationStats(first.drafter, first.block_complexity, first.masks, first.mask_init, note=first.note)
    for name in _SUMS:
        setattr(found, name, sum(getattr(one, name) for one in stats))
    for name in ("accepted_by_depth", "drafted_by_depth"):
        setattr(found, name, [sum(d) for d in zip_longest(*(getattr(one, name) for one in stats), fillvalue=0)])
    for name in ("drafted_by_source", "accepted_by_source", "sizes"):
        counts: dict[Any, int] = {}
        for one in stats:
            for key, n in getattr(one, name).items():
                counts[key] = counts.get(key, 0) + n
        setattr(found, name, counts)
    return found


def _emitted(stats: GenerationStats) -> int:
    return stats.prefill_tokens + stats.committed_tokens


def usage(n_prompt: int, stats: Sequence[GenerationStats], *, predicted: bool) -> dict[str, Any]:
    """OpenAI's usage object.

    Args:
        n_prompt: tokens of the different prompts together; n answers to one count it once.
        predicted: the request had a prediction; then what was copied, from there or from the prompt, is told.
    """
    whole = total(stats)
    completion = _emitted(whole)
    source = next((name for name in COPIES if predicted and name in whole.drafted_by_source), "")
    accepted = whole.accepted_by_source.get(source, 0)
    drafted = whole.drafted_by_source.get(source, 0)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": completion,
        "total_tokens": n_prompt + completion,
        "prompt_tokens_details": {"cached_tokens": min(whole.cached_tokens, n_prompt)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def acceptance_histogram(stats: GenerationStats) -> list[int]:
    """Decode passes by the number of draft tokens that they accepted, from 0 on; the sum is the number of passes."""
    reached = [stats.passes, *stats.accepted_by_depth, 0]
    return [reached[i] - reached[i + 1] for i in range(len(reached) - 1)]


def speculation(stats: GenerationStats) -> dict[str, Any]:
    """The ``speculative_decoding_stats`` block."""
    rate = stats.accepted_tokens / stats.draft_tokens if stats.draft_tokens else 0.0
    return {
        "mean_acceptance_length": round(stats.tau, 4),
        "draft_acceptance_rate": round(rate, 4),
        "num_spec_steps": stats.passes,
        "num_draft_tokens": stats.draft_tokens,
        "num_accepted_draft_tokens": stats.accepted_tokens,
        "acceptance_histogram": acceptance_histogram(stats),
        "drafter": stats.drafter,
        "block_complexity": stats.block_complexity,
        "masks": stats.masks,
        "mask_init": stats.mask_init,
        "rows_per_pass": round(stats.rows_per_pass, 3),
        "drafted_by_source": dict(stats.drafted_by_source),
        "accepted_by_source": dict(stats.accepted_by_source),
        "seed": stats.seed,
        "note": stats.note,
    }


def timings(stats: GenerationStats) -> dict[str, Any]:
    """The ``timings`` block; the first token belongs to the prompt's time, so speed leaves it out."""
    n_prompt, n = stats.prompt_tokens - stats.cached_tokens, stats.committed_tokens
    return {
        "cache_n": stats.cached_tokens,
        "prompt_n": n_prompt,
        "prompt_ms": round(stats.prefill_ms, 3),
        "prompt_per_token_ms": round(stats.prefill_ms / n_prompt, 4) if n_prompt else 0.0,
        "prompt_per_second": round(1000 * n_prompt / stats.prefill_ms, 3) if stats.prefill_ms else 0.0,
        "predicted_n": _emitted(stats),
        "predicted_ms": round(stats.decode_ms, 3),
        "predicted_per_token_ms": round(stats.decode_ms / n, 4) if n else 0.0,
        "predicted_per_second": round(stats.tokens_per_second, 3),
        "draft_n": stats.draft_tokens,
        "draft_n_accepted": stats.accepted_tokens,
    }
