"""Token-embedding rows of a model, read on demand from the memory-mapped file."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from esp_edge._runtime import native
from esp_edge.errors import UnsupportedModelError
from esp_edge.models.cache import ModelCache
from esp_edge.models.gguf import TensorInfo
from esp_edge.tree import FloatArray, Int32Array

__all__ = ["EmbeddingTable"]


class EmbeddingTable:
    """``token_embd.weight``: rows exactly as llama.cpp feeds them on the id path.

    Attributes:
        native: the compiled table, for the decode step.
        n_embd, n_vocab: shape of the table.
    """

    def __init__(self, path: Path, tensor: TensorInfo, *, scale: float = 1.0, cache: ModelCache | None = None) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        data = np.frombuffer(self._map, np.uint8, tensor.n_bytes, tensor.offset)
        self._scale = scale
        self._cache = cache
        self._moments: tuple[FloatArray, FloatArray] | None = None
        self.n_embd, self.n_vocab = tensor.shape[:2]
        try:
            self.native = native.EmbeddingTable(
                data.ctypes.data, tensor.n_bytes, tensor.ggml_type, self.n_embd, self.n_vocab, scale
            )
            self.native.file_mapped = True
        except ValueError as error:
            raise UnsupportedModelError(f"{path}: {error}") from error

    def rows(self, token_ids: Sequence[int] | Int32Array) -> FloatArray:
        """float32[len(token_ids), n_embd]; IndexError on an id outside the vocabulary."""
        rows: FloatArray = self.native.rows(np.ascontiguousarray(token_ids, np.int32))
        return rows

    def mean(self) -> FloatArray:
        """float32[n_embd], mean over the vocabulary; computed once a model file and cached."""
        return self._load_moments()[0]

    def std(self) -> FloatArray:
        """float32[n_embd], standard deviation over the vocabulary, per dimension."""
        return self._load_moments()[1]

    def _load_moments(self) -> tuple[FloatArray, FloatArray]:
        if self._moments is None:
            stored = self._stored_moments()
            if stored is not None:
                mean, std = stored
            else:
                mean, std = self.native.moments()
                if self._cache:
                    document = {"scale": self._scale, "mean": mean.tolist(), "std": std.tolist()}
                    self._cache.put("embedding_moments", document)
            self._moments = mean, std
        return self._moments

    def _stored_moments(self) -> tuple[FloatArray, FloatArray] | None:
        stored: Any = self._cache.get("embedding_moments") if self._cache else None
        try:
            mean, std = np.array(stored["mean"], np.float32), np.array(stored["std"], np.float32)
            fits = mean.shape == std.shape == (self.n_embd,) and stored["scale"] == self._scale
        except (KeyError, TypeError, ValueError, OverflowError):
            return None  # nothing stored, or by something else
        return (mean, std) if fits and np.isfinite(mean).all() and np.isfinite(std).all() else None
