"""Kernels of our own for a model's matrix products and attention on the CPU (``native/kernels``).

They work on the weights as the file has them, cost little more for a few rows than for one, and give a row the same
bits whatever the width of its pass. They hook into ggml's CPU backend, so they run only where the library is one they
were tried with; everything else computes with llama.cpp's own kernels, with one line that says why.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from esp_edge._runtime import native
from esp_edge.config import ModelConfig
from esp_edge.models import gguf

__all__ = ["FORMATS", "Kernels", "plan_kernels"]

FORMATS = frozenset(("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "BF16", "F16", "F32"))
_KNOWN_LIBRARIES = frozenset(("0.25.3",))  # ggml versions whose inner interface the hook was written for
_VECTOR, _MATRIX = 1, 2  # dimensions
_UNIT = {"Q4_K": 256, "Q6_K": 256, "F16": 16, "F32": 16}  # what a row's length must be a multiple of; others: 32


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which kernels a model computes with.

    Attributes:
        isa: instruction set of our own, None = llama.cpp's kernels only.
        reason: why llama.cpp's, in one line; None where ours run or were not asked for.
        complete: every matrix of the file has a kernel of ours, so llama.cpp need not repack any.
        matrices: how many were taken over, by type.
    """

    isa: str | None = None
    reason: str | None = None
    complete: bool = False
    matrices: Mapping[str, int] = field(default_factory=dict)

    def take_over(self, model_address: int) -> Kernels:
        """Give a loaded model's matrices to them."""
        if self.isa is None:
            return self
        found = {name.upper(): n for name, n in native.take_over_weights(model_address, self.isa).items()}
        if not found:
            return Kernels(reason="no matrix of this model has a kernel of ours: llama.cpp's are used")
        return Kernels(self.isa, None, self.complete, found)

    def __str__(self) -> str:
        """One line for people."""
        if self.isa is None:
            return f"llama.cpp's ({self.reason})" if self.reason else "llama.cpp's"
        matrices = ", ".join(f"{n} x {name}" for name, n in sorted(self.matrices.items()))
        return f"{self.isa} for {matrices}" + ("" if self.complete else "; llama.cpp's for the rest")


def plan_kernels(config: ModelConfig, header: gguf.GGUFHeader) -> Kernels:
    """What a model that is about to be loaded can use. No context may be computing when this is called first."""
    if config.kernels == "stock":
        return Kernels()
    if config.n_gpu_layers != 0:
        return Kernels(reason="layers run on other devices: llama.cpp's kernels are used")
    isa, reason = _install()
    if not isa:
        return Kernels(reason=reason)
    return Kernels(isa, None, all(_is_covered(tensor) for tensor in header.tensors.values()))


def _is_covered(tensor: gguf.TensorInfo) -> bool:
    if len(tensor.shape) <= _VECTOR or 1 in tensor.shape:
        return True
    name = tensor.type_name
    return len(tensor.shape) == _MATRIX and name in FORMATS and tensor.shape[0] % _UNIT.get(name, 32) == 0


@functools.cache
def _install() -> tuple[str, str | None]:
    version: str = native.ggml_version()
    if version not in _KNOWN_LIBRARIES:
        known = ", ".join(sorted(_KNOWN_LIBRARIES))
        return "", f"ggml {version} is not one that our kernels were tried with ({known}): llama.cpp's are used"
    try:
        isa: str = native.install_kernels()
    except RuntimeError as error:
        return "", f"{error}: llama.cpp's kernels are used"
    return isa, None if isa else "no kernels of ours for this processor (AVX2, AVX-512 VNNI or NEON with dot products)"
