"""Lossless multi-token decoding for local GGUF models: no training, no draft model, not one changed token."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from esp_edge.config import DraftConfig, GenerationParams, ModelConfig
from esp_edge.errors import (
    ConfigError,
    ContextLengthError,
    DecodeError,
    EspEdgeError,
    GrammarError,
    ModelDownloadError,
    ModelError,
    ModelFileError,
    ModelLoadError,
    PromptError,
    UnsupportedModelError,
)
from esp_edge.metrics import GenerationStats

if TYPE_CHECKING:
    from esp_edge.dropin import Llama
    from esp_edge.session import Chunk, Model, Session, TokenLogprob, load

__all__ = [
    "Chunk",
    "ConfigError",
    "ContextLengthError",
    "DecodeError",
    "DraftConfig",
    "EspEdgeError",
    "GenerationParams",
    "GenerationStats",
    "GrammarError",
    "Llama",
    "Model",
    "ModelConfig",
    "ModelDownloadError",
    "ModelError",
    "ModelFileError",
    "ModelLoadError",
    "PromptError",
    "Session",
    "TokenLogprob",
    "UnsupportedModelError",
    "__version__",
    "load",
]

__version__ = "0.1.0"

_LAZY = dict.fromkeys(("Chunk", "Model", "Session", "TokenLogprob", "load"), "esp_edge.session")
_LAZY["Llama"] = "esp_edge.dropin"


def __getattr__(name: str) -> Any:
    """Load llama.cpp only when something of it is used: ``esp-edge --help`` must be instant."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
