"""Whether our CPU kernels or llama.cpp's decode a model faster here: measured when it is first loaded, kept on disk.

Every distinct matrix of the file, by type and shape, is multiplied with 1, 2, 4 and 8 columns in both ways, in turns
(``native/kernels/product_race.cpp``): weights where llama.cpp would put them, repacked if it repacks such, and under
our kernels, repacked if they are to be. What a pass of n rows takes is the sum over the matrices, T(n), and what counts
is how fast it decodes with speculation: the largest E(n) / T(n), where E(n) is what a pass of n rows typically commits,
1, 1.35, 1.75 and 2.1 tokens. Attention, which ours bring along in half the time, is not timed.

The choice is all or nothing for one file, on purpose: a row has the same bits at every width only where all matrices
are ours.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import os
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from esp_edge._runtime import llama_cpp, native
from esp_edge.models import gguf
from esp_edge.models.cache import ModelCache
from esp_edge.models.device import cpu_name, usable_cores

__all__ = ["SIZES", "Choice", "Matrices", "choose", "forget", "has_raced", "lookups_of", "matrices_of", "measure"]

Matrices = Mapping[tuple[str, int, int], int]  # (ggml type, rows, length of a row) -> how many
Race = Callable[..., tuple[list[list[float]], list[list[float]], bool]]  # native.race_kernels

SIZES = (1, 2, 4, 8)
_TOKENS = {1: 1.0, 2: 1.35, 4: 1.75, 8: 2.1}  # that a pass commits; typical of SmolLM2 and Spec-Bench
_KEY, _VERSION = "kernel_choice", 3
_MOST_STORED = 8
_BUDGET_MS = 600.0  # of timed products; with what stands around them a second for a small model
_BYTES = 64 << 20  # of weights a side at most: more than caches hold, so that they come from memory as in a pass
_ENOUGH = 0.95  # of all weights are in the matrices that are timed
_BUSY = 1.25  # spread of times that are not worth keeping
# tables that rows are looked up in
_TABLES = ("position_embd.", "per_layer_token_embd.", "token_types.")
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
# what changes the times from outside
_ENVIRONMENT = ("OMP_WAIT_POLICY", "OMP_PROC_BIND", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "GGML_CPU_TILED_MM")

_lock = threading.RLock()
_chosen: dict[Any, Choice | None] = {}
_raced = threading.Event()


@dataclass(frozen=True, slots=True)
class Choice:
    """What the products of a pass take with either kernels.

    Attributes:
        ours: milliseconds with our kernels, for each of ``SIZES``.
        stock: the same with llama.cpp's.
    """

    ours: tuple[float, ...]
    stock: tuple[float, ...]

    @property
    def takes_ours(self) -> bool:
        """Whether ours decode at least as fast."""
        return _speed(self.ours) >= _speed(self.stock)

    def __str__(self) -> str:
        sizes = ", ".join(map(str, SIZES))
        ours, stock = (", ".join(f"{ms:.3g}" for ms in times) for times in (self.ours, self.stock))
        return f"the products of passes of {sizes} rows take {stock} ms with llama.cpp's, {ours} ms with ours"


def _speed(times: Sequence[float]) -> float:
    """Tokens a millisecond at the best size."""
    return max(_TOKENS[n] / ms for n, ms in zip(SIZES, times, strict=True))


def matrices_of(tensors: Collection[gguf.TensorInfo], suits: Callable[[gguf.TensorInfo], bool]) -> Matrices:
    """The matrices that every pass multiplies with, by shape: a tied embedding is one of them.

    Args:
        tensors: all matrices of a model.
        suits: whether our kernels would compute one, which then has two dimensions.
    """
    lookups = lookups_of(tensors)
    multiplied = (tensor for tensor in tensors if tensor.name not in lookups)
    return Counter((t.type_name, t.shape[1], t.shape[0]) for t in multiplied if suits(t))


def lookups_of(tensors: Collection[gguf.TensorInfo]) -> frozenset[str]:
    """Names of the matrices whose rows are looked up and that no pass multiplies with."""
    tables = _TABLES if all(tensor.name != _HEAD for tensor in tensors) else (*_TABLES, _EMBEDDING)
    return frozenset(tensor.name for tensor in tensors if tensor.name.startswith(tables))


def choose(
    matrices: Matrices, isa: str, n_threads: int, cache: ModelCache, *, complete: bool, repack: bool
) -> Choice | None:
    """The measured times: from this process, from the disk, or now. None where they could not be had.

    A process that has decided keeps to it for all files with these matrices, so that a model that is loaded twice
    has the same kernels. What was measured beside a busy program is not used, nor stored.

    Args:
        matrices: that our kernels would compute.
        isa: instruction set of ours.
        n_threads: of the passes.
        cache: of the model file.
        complete: no other matrices are in the file; otherwise llama.cpp repacks what it can, out of reach of ours.
        repack: ours read repacked weights.
    """
    key = (isa, complete, repack, tuple(sorted(matrices.items())))
    with _lock:
        if key not in _chosen:
            settings = _settings(matrices, isa, n_threads, complete, repack)
            found = _stored_choice(cache, settings)
            if found is None:
                found = measure(matrices, isa, n_threads, complete=complete, repack=repack)
                _store(cache, settings, found)
            _chosen[key] = found
        return _chosen[key]


def forget() -> None:
    """Drop what this process decided; the disk keeps it."""
    with _lock:
        _chosen.clear()


def has_raced() -> bool:
    """Whether this process has multiplied matrices to compare kernels."""
    return _raced.is_set()


# -- the cache -------------------------------------------------------------------------------------------------------


def _settings(matrices: Matrices, isa: str, n_threads: int, complete: bool, repack: bool) -> dict[str, Any]:
    """JSON-ready: everything that stored times depend on."""
    return {
        "version": _VERSION,
        "llama_cpp_python": importlib.metadata.version("llama-cpp-python"),
        "ggml": native.ggml_version(),
        "build": llama_cpp.llama_print_system_info().decode("utf-8", "replace").strip(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "isa": isa,
        "threads": n_threads,
        "complete": complete,
        "repack": repack,
        "matrices": [[*shape, n] for shape, n in sorted(matrices.items())],
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    }


def _entries(cache: ModelCache) -> list[dict[str, Any]]:
    entries = cache.get(_KEY)
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _stored_choice(cache: ModelCache, settings: Mapping[str, Any]) -> Choice | None:
    for entry in _entries(cache):
        if entry.get("settings") == settings:
            ours, stock = (_read_times(entry.get(side)) for side in ("ours", "stock"))
            if ours and stock:
                return Choice(ours, stock)
    return None


def _read_times(value: Any) -> tuple[float, ...]:
    """The stored times of one side; () where they were cut off or written by hand."""
    whole = isinstance(value, list) and len(value) == len(SIZES)
    return tuple(value) if whole and all(type(ms) in (int, float) and 0.0 < ms < math.inf for ms in value) else ()


def _store(cache: ModelCache, settings: Mapping[str, Any], choice: Choice | None) -> None:
    if choice is None:
        return
    others = [entry for entry in _entries(cache) if entry.get("settings") != settings]
    newest = {"settings": settings, "ours": list(choice.ours), "stock": list(choice.stock)}
    cache.put(_KEY, [*others, newest][-_MOST_STORED:])


# -- measuring -------------------------------------------------------------------------------------------------------


def measure(
    matrices: Matrices,
    isa: str,
    n_threads: int,
    *,
    complete: bool = True,
    repack: bool = True,
    race: Race | None = None,
) -> Choice | None:
    """Time the products of the matrices that make up nearly all weights.

    Args:
        race: instead of ``native.race_kernels``.

    Returns:
        None beside a busy program, where memory is short, and where no matrix is computed in two ways.
    """
    heavy = _heaviest(matrices)
    totals = ([0.0] * len(SIZES), [0.0] * len(SIZES))
    spreads: list[float] = []
    n_weights = sum(n * shape[1] * shape[2] for shape, n in matrices.items())
    n_bytes = min(_BYTES, n_weights // 4)  # both sides together take no more than the model will
    for shape in heavy:
        ask = functools.partial(race or native.race_kernels, *shape, list(SIZES), isa, repack, n_threads)
        found = _times(functools.partial(ask, n_bytes, _BUDGET_MS / len(heavy)))
        if found is None:
            return None
        *sides, repacked = found
        if not sides[0] or (repacked and not complete):
            continue
        spreads += [_spread(times) for side in sides for times in side]
        if statistics.median(spreads) >= _BUSY:
            return None
        for total, side in zip(totals, sides, strict=True):
            for place, times in enumerate(side):
                total[place] += matrices[shape] * _typical(times) / 1000.0
    return Choice(tuple(totals[0]), tuple(totals[1])) if spreads else None


def _times(race: Race) -> tuple[list[list[float]], list[list[float]], bool] | None:
    """Microseconds of ours and of llama.cpp's; none where both are the same, None where ggml could not be asked."""
    _raced.set()
    try:
        return race()
    except ValueError:  # the instruction set lacks the format: llama.cpp's compute it on both sides
        return [], [], False
    except (RuntimeError, MemoryError):
        return None


def _heaviest(matrices: Matrices) -> list[tuple[str, int, int]]:
    """Shapes with the most weights, the heaviest first, until little is left."""
    weights = {shape: n * shape[1] * shape[2] for shape, n in matrices.items()}
    found: list[tuple[str, int, int]] = []
    left = (1.0 - _ENOUGH) * sum(weights.values())
    rest = sum(weights.values())
    for shape in sorted(weights, key=lambda shape: (-weights[shape], shape)):
        if rest <= left:
            break
        found.append(shape)
        rest -= weights[shape]
    return found


def _typical(times: Sequence[float]) -> float:
    """Mean of the faster half: other programs only ever make a product slower."""
    kept = sorted(times)[: (len(times) + 1) // 2]
    return sum(kept) / len(kept)


def _spread(times: Sequence[float]) -> float:
    """The second best time as a multiple of the best; infinite where there was no time for a second."""
    ordered = sorted(times)
    return ordered[1] / ordered[0] if len(ordered) > 1 else math.inf
