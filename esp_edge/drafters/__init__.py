"""Draft sources, all behind one protocol (``drafters.base.Drafter``)."""

from __future__ import annotations

from esp_edge.config import DraftConfig
from esp_edge.drafters.base import Budget, Drafter
from esp_edge.drafters.draft_model import open_draft_model
from esp_edge.drafters.esp import EspDrafter
from esp_edge.drafters.fused import FusedDrafter
from esp_edge.drafters.lade import LadeDrafter
from esp_edge.drafters.none import NoneDrafter
from esp_edge.drafters.pld import PldDrafter
from esp_edge.drafters.racer import RacerDrafter
from esp_edge.drafters.recycling import RecyclingDrafter
from esp_edge.drafters.stand import StandDrafter
from esp_edge.drafters.suffix import SuffixDrafter
from esp_edge.errors import ConfigError, UnsupportedModelError
from esp_edge.masks import Embeddings, Tokenize, make_masks
from esp_edge.models.model import TargetModel

__all__ = ["Budget", "Drafter", "EspDrafter", "NoneDrafter", "make_drafter"]

_ANY_VOCABULARY = 1 << 31


def make_drafter(
    config: DraftConfig,
    embeddings: Embeddings | None,
    tokenize: Tokenize | None,
    temperature: float = 0.0,
    *,
    target: TargetModel | None = None,
) -> Drafter:
    """The drafter a configuration asks for.

    Args:
        embeddings: token embeddings of the target model; None = it cannot be probed.
        tokenize: text -> token ids, for ``mask_init="token:TEXT"``.
        temperature: of the sampler; 0 = greedy.
        target: the target model; only ``draft-model`` cannot do without it.

    Raises:
        ConfigError: ``mask_init`` is still ``auto`` or cannot be used, or the draft model does not fit the target.
        ModelError: the draft model cannot be loaded.
        UnsupportedModelError: ``esp`` without embeddings.
    """
    if config.drafter == "esp":
        return _esp(config, embeddings, tokenize, temperature)
    if config.drafter == "auto":
        return _fused(config, embeddings, tokenize, temperature, target)
    if config.drafter == "none":
        return NoneDrafter()
    if config.drafter == "draft-model":
        if target is None:
            raise ConfigError("drafter draft-model needs the target model to compare vocabularies, but none was given")
        return open_draft_model(config, target)
    return _rival(config, temperature, target)


def _fused(
    config: DraftConfig,
    embeddings: Embeddings | None,
    tokenize: Tokenize | None,
    temperature: float,
    target: TargetModel | None,
) -> FusedDrafter:
    """Without masks where the model cannot be probed, or ``mask_init`` was left open because probing cannot pay."""
    masks = None
    if embeddings is not None and config.mask_init != "auto":
        masks = make_masks(
            config.mask_init, config.masks, embeddings, config.mask_update, seed=config.seed, tokenize=tokenize
        )
    return FusedDrafter(config, target.tokenizer.n_vocab if target else _ANY_VOCABULARY, masks, temperature)


def _rival(config: DraftConfig, temperature: float, target: TargetModel | None) -> Drafter:
    n_vocab = target.tokenizer.n_vocab if target else _ANY_VOCABULARY
    if config.drafter == "pld":
        return PldDrafter(config)
    if config.drafter == "suffix":
        return SuffixDrafter(config)
    if config.drafter == "recycling":
        return RecyclingDrafter(config, n_vocab)
    if config.drafter == "stand":
        return StandDrafter(config, n_vocab, temperature)
    if config.drafter == "lade":
        return LadeDrafter(config, target.tokenizer.eog_ids if target else frozenset())
    return RacerDrafter(config, n_vocab)


def _esp(
    config: DraftConfig, embeddings: Embeddings | None, tokenize: Tokenize | None, temperature: float
) -> EspDrafter:
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
