"""Kernels of our own for a model's matrix products and attention on the CPU (``native/kernels``).

They cost little more for a few rows than for one, and give a row the same bits whatever the width of its pass.
Weights of less than 32 bits are repacked when a model is loaded, unless the file's own pages are to be used. They hook
into ggml's CPU backend, so they run only where the library is one they were tried with; everything else computes with
llama.cpp's own kernels, with one line that says why.

With ``kernels="auto"`` they run where they decode faster, which is measured (:mod:`esp_edge.models.kernel_choice`).
``$ESP_EDGE_KERNELS_ISA`` names the best instruction set that may be used, to try the others; who sets it has chosen
ours, and nothing is measured.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from esp_edge._runtime import native
from esp_edge.config import ModelConfig
from esp_edge.errors import ConfigError
from esp_edge.models import gguf, kernel_choice
from esp_edge.models.cache import ModelCache

__all__ = ["FORMATS", "ISA_VARIABLE", "Kernels", "plan_kernels"]

FORMATS = frozenset(("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "BF16", "F16", "F32"))
ISA_VARIABLE = "ESP_EDGE_KERNELS_ISA"
_KNOWN_LIBRARIES = frozenset(("0.25.3",))  # ggml versions whose inner interface the hook was written for
_NONE_HERE = "no kernels of ours for this processor (AVX2, AVX-512 VNNI or NEON with dot products)"
_VECTOR, _MATRIX = 1, 2  # dimensions
_UNIT = {"Q4_K": 256, "Q6_K": 256, "F16": 16, "F32": 16}  # what a row's length must be a multiple of; others: 32
_RUNS = {"avx512": ("avx512", "avx2"), "avx2": ("avx2",), "neon": ("neon",)}  # by the best: what else runs, best first


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which kernels a model computes with; as text, one line for people.

    Attributes:
        isa: instruction set of our own, None = llama.cpp's kernels only.
        reason: why llama.cpp's, in one line; None where ours run or were not asked for.
        failed: ours would suit this model and processor, but not the library: worth telling at every load.
        complete: every matrix of the file has a kernel of ours, so llama.cpp need not repack any.
        types: of the file's matrices.
        repack: weights of less than 32 bits are to be kept once more, repacked; the file's pages are then given back.
        lookups: names of matrices that are not multiplied with, so never repacked.
        matrices: how many were taken over, by type.
        repacked_bytes: size of the repacked weights.
    """

    isa: str | None = None
    reason: str | None = None
    failed: bool = False
    complete: bool = False
    types: frozenset[str] = frozenset()
    repack: bool = False
    lookups: frozenset[str] = frozenset()
    matrices: Mapping[str, int] = field(default_factory=dict)
    repacked_bytes: int = 0

    def take_over(self, model_address: int, n_threads: int) -> tuple[Kernels, object]:
        """Give a loaded model's matrices to them.

        Args:
            n_threads: that repack.

        Returns:
            What they compute with then, and an object that must be kept until the model is freed.
        """
        if self.isa is None:
            return self, None
        give = functools.partial(native.take_over_weights, model_address, self.isa)
        try:
            taken = give(self.repack, sorted(self.lookups), n_threads)
        except MemoryError:
            taken = give(False, [], n_threads)
        found = {name.upper(): n for name, n in taken.matrices.items()}
        if not found:
            return Kernels(reason="no matrix of this model has a kernel of ours: llama.cpp's are used"), None
        # an instruction set may lack a format: BF16 where AVX-512 has no products of it
        complete = self.complete and self.types <= found.keys()
        return replace(self, complete=complete, matrices=found, repacked_bytes=taken.repacked_bytes), taken

    @property
    def warning(self) -> str | None:
        """What to tell whoever loads a model; None where all is as it was asked for."""
        return self.reason if self.failed else None

    def __str__(self) -> str:
        if self.isa is None:
            return f"llama.cpp's ({self.reason})" if self.reason else "llama.cpp's"
        matrices = ", ".join(f"{n} x {name}" for name, n in sorted(self.matrices.items()))
        mib = self.repacked_bytes / 2**20
        repacked = f", {mib:.{0 if mib >= 1 else 2}f} MiB of them repacked" if mib else ""
        return f"{self.isa} for {matrices}{repacked}" + ("" if self.complete else "; llama.cpp's for the rest")


def plan_kernels(
    config: ModelConfig, header: gguf.GGUFHeader, *, n_threads: int = 0, cache: ModelCache | None = None
) -> Kernels:
    """What a model that is about to be loaded can use.

    Args:
        n_threads: of its passes.
        cache: where ``kernels="auto"`` finds and keeps what it measures; None = do not measure, use ours.

    Raises:
        ConfigError: ``$ESP_EDGE_KERNELS_ISA`` is no instruction set.
    """
    if config.kernels == "stock":
        return Kernels()
    limit = _limit()
    if config.n_gpu_layers != 0:
        return Kernels(reason="layers run on other devices: llama.cpp's kernels are used")
    best, reason = _install()
    if not best:
        return Kernels(reason=reason, failed=reason != _NONE_HERE)
    allowed = [isa for isa in _RUNS[best] if limit is None or isa in _RUNS[limit]]
    if not allowed:
        return Kernels(reason=f"{ISA_VARIABLE}={limit} leaves none of ours for this processor, which has {best}")
    tensors = (tensor for part in gguf.read_parts(header) for tensor in part.tensors.values())
    matrices = [tensor for tensor in tensors if _is_matrix(tensor)]
    types = frozenset(tensor.type_name for tensor in matrices)
    complete, lookups = all(map(_is_covered, matrices)), kernel_choice.lookups_of(matrices)
    planned = Kernels(allowed[0], complete=complete, types=types, repack=config.repack, lookups=lookups)
    # exact mode promises the same bits tomorrow, so nothing measured may decide in it
    if config.kernels != "auto" or config.exact or limit is not None or cache is None:
        return planned
    return _faster(planned, kernel_choice.matrices_of(matrices, _is_covered), n_threads, cache)


def _faster(planned: Kernels, matrices: kernel_choice.Matrices, n_threads: int, cache: ModelCache) -> Kernels:
    """What was planned, or llama.cpp's where they decode clearly faster."""
    isa, complete, repack = planned.isa or "", planned.complete, planned.repack
    found = kernel_choice.choose(matrices, isa, n_threads, cache, complete=complete, repack=repack)
    if found is None or found.takes_ours:
        return planned
    return Kernels(reason=f"they are faster here: {found}; --kernels fast uses ours")


def _limit() -> str | None:
    """The best instruction set that may be used; None = any."""
    wanted = os.environ.get(ISA_VARIABLE) or None
    if wanted is not None and wanted not in _RUNS:
        raise ConfigError(f"{ISA_VARIABLE} must be one of {', '.join(_RUNS)}, but {wanted!r} was given")
    return wanted


def _is_matrix(tensor: gguf.TensorInfo) -> bool:
    return len(tensor.shape) > _VECTOR and 1 not in tensor.shape


def _is_covered(matrix: gguf.TensorInfo) -> bool:
    name = matrix.type_name
    return len(matrix.shape) == _MATRIX and name in FORMATS and matrix.shape[0] % _UNIT.get(name, 32) == 0


@functools.cache
def _install() -> tuple[str, str | None]:
    """The best instruction set of ours here and None, or "" and why there is none."""
    version: str = native.ggml_version()
    if version not in _KNOWN_LIBRARIES:
        known = ", ".join(sorted(_KNOWN_LIBRARIES))
        return "", f"ggml {version} is not one that our kernels were tried with ({known}): llama.cpp's are used"
    try:
        isa: str = native.install_kernels()
    except RuntimeError as error:
        return "", f"{error}: llama.cpp's kernels are used"
    return isa, None if isa else _NONE_HERE


_install()  # now: the list that the hook grows must not change under a thread that computes
