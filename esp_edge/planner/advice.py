"""What the measured cost of a pass means for the user: threads, quant, build, and how far speculation can go here."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

__all__ = [
    "Advice",
    "best_threads",
    "break_even",
    "most_speedup",
    "on_build",
    "on_device",
    "on_environment",
    "on_kernels",
    "on_quant",
    "on_threads",
    "thread_counts",
]

ThreadTimes = Mapping[int, Mapping[int, float]]  # thread count -> rows -> milliseconds

_FEW = (4, 8)  # smallest and largest of the passes that drafts make on a CPU
_GAIN = 1.03  # a smaller one may be noise
_CPU_BATCHED, _GPU_BATCHED = "Q4_0", "Q4_K_M"
# of the processor in /proc/cpuinfo -> of the build in llama_print_system_info
_FEATURES = {
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx_vnni": "AVX_VNNI",
    "asimddp": "DOTPROD",
    "i8mm": "MATMUL_INT8",
    "sve": "SVE",
}
_REBUILD = "pip install --force-reinstall --no-deps --no-cache-dir --no-binary llama-cpp-python llama-cpp-python=={}"


@dataclass(frozen=True, slots=True)
class Advice:
    """One line for the user.

    Attributes:
        kind: ``threads``, ``kernels``, ``quant``, ``build``, ``device`` or ``environment``.
        text: what was found, with its figures.
        command: what to run, None when all is well.
    """

    kind: str
    text: str
    command: str | None = None


def break_even(ratio: Callable[[int], float], sizes: tuple[int, ...] = (2, 4, 8, 16)) -> dict[int, float]:
    """Rows -> T(rows) / T(1): a tree of so many rows pays when it commits more tokens a pass."""
    return {n: ratio(n) for n in sizes}


def most_speedup(ratio: Callable[[int], float], longest: int = 16) -> float:
    """How many times faster drafts that are always right would decode, with passes of up to ``longest`` rows."""
    return max(n / ratio(n) for n in range(1, longest + 1))


# -- threads ---------------------------------------------------------------------------------------------------------


def thread_counts(physical: int, logical: int) -> list[int]:
    """Counts worth comparing, rising: one, half of the cores (some may be slow ones), all, and all their threads."""
    return sorted({1, max(1, physical // 2), physical, logical})


def best_threads(times: ThreadTimes) -> int:
    """The count with the least time over single rows and passes of 4 to 8, each weighing half."""

    def cost(count: int) -> float:
        return math.log(times[count][1]) + math.log(_few_ms(times[count]))

    return min(times, key=cost)


def _few_ms(found: Mapping[int, float]) -> float:
    """Mean time of passes of 4 to 8 rows; of single rows where no other is measured."""
    chosen = [ms for n, ms in found.items() if _FEW[0] <= n <= _FEW[1]] or [found[1]]
    return sum(chosen) / len(chosen)


def on_threads(times: ThreadTimes, in_use: int, command: str) -> Advice:
    """Whether another thread count is better than the one in use; ``command`` remembers it.

    Raises:
        KeyError: the count in use was not measured.
    """
    best = best_threads(times)
    used, other = times[in_use], times[best]
    plain, few = used[1] / other[1], _few_ms(used) / _few_ms(other)
    if best == in_use or math.sqrt(plain * few) < _GAIN:
        told = (
            f"{_threads(in_use)} (in use) is best: {used[1]:.1f} ms a token, {_few_ms(used):.1f} ms a pass of 4-8 rows"
        )
        return Advice("threads", told)
    told = (
        f"{_threads(best)} instead of {in_use}: plain decoding {plain:.2f}x as fast ({other[1]:.1f} instead of "
        f"{used[1]:.1f} ms a token), passes of 4-8 rows {few:.2f}x "
        f"({_few_ms(other):.1f} instead of {_few_ms(used):.1f} ms)"
    )
    return Advice("threads", told, command)


def _threads(n: int) -> str:
    return f"{n} thread{'s' * (n != 1)}"


# -- kernels ---------------------------------------------------------------------------------------------------------


def on_kernels(ours: Mapping[int, float], stock: Mapping[int, float], isa: str, command: str) -> Advice:
    """Whether our kernels (rows -> milliseconds) or llama.cpp's are faster here; ``command`` takes the latter."""
    few_ours, few_stock = _few_ms(ours), _few_ms(stock)
    faster = stock[1] * few_stock > ours[1] * few_ours
    plain, few = stock[1] / ours[1], few_stock / few_ours
    if not faster:
        plain, few = 1 / plain, 1 / few
    told = (
        f"{f'ours ({isa}) are' if faster else 'llama.cpp is'} faster here: plain decoding {plain:.2f}x as fast "
        f"({ours[1]:.1f} ms a token with ours, {stock[1]:.1f} with llama.cpp's), passes of 4-8 rows {few:.2f}x "
        f"({few_ours:.1f} and {few_stock:.1f} ms)"
    )
    clear = math.sqrt(plain * few) >= _GAIN
    return Advice("kernels", told, None if faster or not clear else command)


# -- quant -----------------------------------------------------------------------------------------------------------


def on_quant(
    quant: str, ratio: Callable[[int], float], model: str, *, on_gpu: bool = False, ours: bool = False
) -> Advice:
    """Whether a pass shares work between rows, judged by T(n) / T(1).

    Args:
        ours: all matrices have kernels of ours, made for several rows: then another type is not the cure.
    """
    two, four, eight = ratio(2), ratio(4), ratio(8)
    figures = f"2, 4 and 8 rows cost {two:.2f}, {four:.2f} and {eight:.2f} times one"
    if four <= 3.0 and eight <= 4.0:
        return Advice("quant", f"{quant} shares work between rows here: {figures}")
    if ours:
        return Advice(
            "quant", f"{quant} has kernels for several rows, but they cost much here: {figures}; drafts will stay short"
        )
    better = _GPU_BATCHED if on_gpu else _CPU_BATCHED
    found = f"{quant} has no batched kernel here: {figures}"
    if quant == better:
        return Advice("quant", f"{found}; no other quant is known to do better, drafts will stay short")
    told = f"{found}; {better} usually has one (best made from a BF16 or F16 file)"
    return Advice("quant", told, f"esp-edge model quantize {model} --to {better}")


# -- build -----------------------------------------------------------------------------------------------------------


def on_build(system_info: str, cpu_flags: Collection[str], version: str) -> Advice:
    """Whether llama.cpp was built for less than the processor has, or without OpenMP.

    Args:
        system_info: of ``llama_print_system_info``, such as ``CPU : AVX2 = 1 | OPENMP = 1 | ``.
        cpu_flags: of the processor as Linux names them; empty = not known.
        version: of llama-cpp-python, for the command.
    """
    built = {
        part.split(":")[-1].split("=")[0].strip() for part in system_info.split("|") if part.strip().endswith("= 1")
    }
    missing = [name for flag, name in _FEATURES.items() if flag in cpu_flags and name not in built]
    rebuild = _REBUILD.format(version)
    if missing:
        told = f"this CPU has {', '.join(missing)}, but llama.cpp was built without; a build on this machine uses them"
        return Advice("build", told, f"CMAKE_ARGS=-DGGML_NATIVE=on {rebuild}")
    if "OPENMP" not in built:
        told = "llama.cpp was built without OpenMP: threads start anew for every pass"
        return Advice("build", told, f"CMAKE_ARGS=-DGGML_OPENMP=on {rebuild}")
    return Advice("build", "llama.cpp uses what this CPU has" if cpu_flags else "llama.cpp was built with OpenMP")


def on_device(can_offload: bool, offloads: bool, command: str) -> Advice | None:
    """A build that can use a GPU, and does not; ``command`` measures there. None when there is nothing to say."""
    if not can_offload or offloads:
        return None
    return Advice("device", "this build can use a GPU, but all layers run on the CPU", command)


def on_environment(environment: Mapping[str, str]) -> Advice | None:
    """A variable that makes small passes slow; None when there is none."""
    if environment.get("OMP_WAIT_POLICY", "").lower() != "passive":
        return None
    told = (
        "OMP_WAIT_POLICY=passive lets threads sleep between operations: passes of few rows take up to 3 times as long"
    )
    return Advice("environment", told, "unset OMP_WAIT_POLICY")
