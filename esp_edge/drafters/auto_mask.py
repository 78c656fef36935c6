"""``--mask-init auto``: measure once per model file which mask initialisation guesses best, and remember it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from esp_edge.config import DraftConfig
from esp_edge.drafters.calibrate import CANDIDATES, Hits, best, calibrate, split_candidate
from esp_edge.errors import PromptError
from esp_edge.models.model import TargetModel
from esp_edge.step import Step
from esp_edge.tree import DraftTree

__all__ = ["measure_mask_inits", "resolve_mask_init"]

_KEY = "mask_init"
_VERSION = 1  # raise it when candidates, text or score change
_ANSWER_TOKENS = 96
_ENOUGH = 40  # positions; from fewer, on a slow device or a terse model, nothing is remembered
_CONTEXT = 512
_TEXT = (
    "Explain in a few sentences why the sky is blue during the day and red in the evening, then list three things "
    "one can do on a rainy afternoon."
)
_FALLBACK = "vocab-mean"


def resolve_mask_init(
    model: TargetModel, config: DraftConfig, *, redo: bool = False, progress: Callable[[int, int], None] | None = None
) -> DraftConfig:
    """The configuration with ``auto`` replaced by the initialisation that hits best on this model.

    Measured once per model file on the model's own greedy answer to a fixed prompt, then read from the disk cache.

    Args:
        redo: measure even if a result is stored.
        progress: called with (candidates done, candidates).
    """
    if config.drafter not in ("esp", "auto") or config.mask_init != "auto" or model.embeddings is None:
        return config
    stored = None if redo else model.cache.get(_KEY)
    if not isinstance(stored, dict) or stored.get("version") != _VERSION or stored.get("best") not in CANDIDATES:
        results = measure_mask_inits(model, progress=progress)
        stored = _document(results)
        if stored["positions"] >= _ENOUGH:
            model.cache.put(_KEY, stored)
    init, update = split_candidate(stored["best"])
    return replace(config, mask_init=init, mask_update=update if config.mask_update is None else config.mask_update)


def _document(results: dict[str, Hits]) -> dict[str, Any]:
    rates = {name: {str(k): rate for k, rate in hits.rates.items()} for name, hits in results.items()}
    positions = min((hits.positions for hits in results.values()), default=0)
    name = best(results) if results else _FALLBACK
    return {"version": _VERSION, "best": name, "positions": positions, "rates": rates}


def measure_mask_inits(model: TargetModel, *, progress: Callable[[int, int], None] | None = None) -> dict[str, Hits]:
    """Hit rates of every candidate on this model; empty when its answer is too short to measure on."""
    if model.embeddings is None:
        return {}
    if progress is not None:
        progress(0, len(CANDIDATES))
    prompt = _prompt(model)
    context = model.new_context(16, n_ctx=_CONTEXT)
    try:
        step = Step(context)
        answer = _greedy_answer(model, step, prompt)
        if len(answer) < 2:
            return {}
        return calibrate(step, model.embeddings, [*prompt, *answer], len(prompt), progress=progress)
    finally:
        context.close()


def _prompt(model: TargetModel) -> list[int]:
    try:
        ids = model.encode_chat([{"role": "user", "content": _TEXT}])
    except PromptError:
        ids = model.encode_prompt(_TEXT)
    return ids[-(_CONTEXT // 2) :]


def _greedy_answer(model: TargetModel, step: Step, prompt: list[int]) -> list[int]:
    step.prefill(prompt[:-1])
    answer: list[int] = []
    token = prompt[-1]
    for _ in range(min(_ANSWER_TOKENS, _CONTEXT - len(prompt) - 16)):
        token = step.run(DraftTree.root_only(token)).argmax(0)
        step.commit(())
        if token in model.tokenizer.eog_ids:
            break
        answer.append(token)
    return answer
