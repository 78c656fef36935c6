"""Draft sources, all behind one protocol (``drafters.base.Drafter``)."""

from __future__ import annotations

from esp_edge.config import DraftConfig
from esp_edge.drafters.base import Budget, Drafter
from esp_edge.drafters.esp import EspDrafter
from esp_edge.drafters.none import NoneDrafter
from esp_edge.errors import ConfigError, UnsupportedModelError
from esp_edge.masks import Embeddings, Tokenize, make_masks

__all__ = ["Budget", "Drafter", "EspDrafter", "NoneDrafter", "make_drafter"]


def make_drafter(
    config: DraftConfig, embeddings: Embeddings | None, tokenize: Tokenize | None, temperature: float = 0.0
) -> Drafter:
    """The drafter a configuration asks for.

    Args:
        embeddings: token embeddings of the target model; None = it cannot be probed.
        tokenize: text -> token ids, for ``mask_init="token:TEXT"``.
        temperature: of the sampler; 0 = greedy.

    Raises:
        ConfigError: ``mask_init`` is still ``auto`` or cannot be used.
        UnsupportedModelError: ``esp`` without embeddings.
    """
    if config.drafter == "none":
        return NoneDrafter()
    if config.mask_init == "auto":
        raise ConfigError("mask-init 'auto' must be resolved by calibration before a drafter is made; name one instead")
    if embeddings is None:
        raise UnsupportedModelError(
            "drafter esp needs a model that takes embedding rows, but this one does not; use --drafter none"
        )
    masks = make_masks(
        config.mask_init, config.masks, embeddings, config.mask_update, seed=config.seed, tokenize=tokenize
    )
    return EspDrafter(config, masks, temperature)
