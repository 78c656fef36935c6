"""From the fields of a request to the settings of a generation, naming the field that is at fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from esp_edge.config import DraftConfig, GenerationParams
from esp_edge.errors import ConfigError
from esp_edge.server.errors import ApiError, shown
from esp_edge.server.schemas import SamplingRequest, Speculative

__all__ = ["constrained", "draft_of", "params_of", "seeded"]

# fields that are called the same on both sides, and checked there
_FIELDS = (
    "stop",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "logit_bias",
    "ignore_eos",
)
_SEEDS = 1 << 64


def params_of(
    request: SamplingRequest, defaults: GenerationParams, *, max_tokens: int | None, max_field: str, n_vocab: int
) -> GenerationParams:
    """Sampling settings of a request; a grammar is set by :func:`constrained`.

    Args:
        max_tokens: as asked for, -1 or None = until the end.
        max_field: the field that it came from.

    Raises:
        ApiError: 400 with the field that is out of range.
    """
    params = _set(defaults, max_field, max_tokens=None if max_tokens == -1 else max_tokens)
    for name in _FIELDS:
        value: Any = getattr(request, name)
        if value is None:
            continue
        if name == "logit_bias":
            value = _bias(value, n_vocab)
        params = _set(params, name, **{name: tuple(value) if isinstance(value, list) else value})
    if request.prediction is not None:
        params = _set(params, "prediction", prediction=str(request.prediction.content))
    return params


def _set(params: GenerationParams, field: str, **values: Any) -> GenerationParams:
    try:
        return replace(params, **values)
    except ConfigError as error:
        raise ApiError(400, str(error), param=field) from None


def _bias(given: dict[str, float], n_vocab: int) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < n_vocab):
            message = f"logit_bias maps token ids from 0 to {n_vocab - 1} to numbers, but {shown(key)} was given"
            raise ApiError(400, message, param="logit_bias")
        bias[int(key)] = value
    return bias


def constrained(params: GenerationParams, field: str, **constraint: Any) -> GenerationParams:
    """The settings with a grammar or a JSON schema in place of whatever the server's defaults had."""
    return _set(params, field, **{"grammar": None, "json_schema": None, **constraint})


def seeded(params: GenerationParams, index: int) -> GenerationParams:
    """Settings of the ``index``-th of several answers: each has a seed of its own."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=(params.seed + index) % _SEEDS)


def draft_of(speculative: Speculative | None, default: DraftConfig) -> DraftConfig | None:
    """How this request drafts; None = as the server does.

    Raises:
        ApiError: 400, a setting is out of range or contradicts another one.
    """
    if speculative is None:
        return None
    given = speculative.model_dump(exclude_none=True)
    enabled = given.pop("enabled", True)
    try:
        config = replace(default, **given)
        return config if enabled else replace(config, drafter="none")
    except ConfigError as error:
        raise ApiError(400, str(error), param="speculative") from None
