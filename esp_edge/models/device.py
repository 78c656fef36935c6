"""The device that measurements hold for, and the thread count that ``esp-edge tune --apply`` chose on it."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from pathlib import Path

from esp_edge.models.cache import ModelCache

__all__ = ["cpu_flags", "cpu_name", "gpu_names", "remember_threads", "tuned_threads", "usable_cores"]

_KEY = "threads"
_MOST_THREADS = 512
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_BOARD = Path("/proc/device-tree/model")  # of a Jetson or another single-board computer


def usable_cores() -> int:
    """Logical cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@functools.cache
def cpu_name() -> str:
    """The processor's name as far as the system tells it, the board's where the processor has none."""
    name = _cpu_of_linux() if sys.platform.startswith("linux") else _cpu_of_macos() if sys.platform == "darwin" else ""
    return name or platform.processor() or platform.machine()


def _cpu_of_linux() -> str:
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in _lines("/proc/cpuinfo"))}
    names = (fields[key] for key in ("model name", "Model", "Hardware", "cpu model") if fields.get(key))
    return next(names, "") or " ".join(_lines(_BOARD)).strip("\0 ")


def _cpu_of_macos() -> str:
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def cpu_flags() -> frozenset[str]:
    """Instruction sets of the processor as Linux names them, such as ``avx2``; empty where they are not told."""
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def gpu_names() -> tuple[str, ...]:
    """NVIDIA GPUs the driver knows, without asking CUDA; a Jetson's GPU goes by its board."""
    try:
        files = sorted(_NVIDIA.glob("*/information"))
    except OSError:
        files = []
    models = [line.partition(":")[2].strip() for file in files for line in _lines(file) if line.startswith("Model:")]
    return tuple(models) or tuple(line.strip("\0 ") for line in _lines(_BOARD)[:1])


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


# -- tuned threads ---------------------------------------------------------------------------------------------------


def _machine() -> str:
    return f"{cpu_name()}, {usable_cores()} cores"


def tuned_threads(cache: ModelCache) -> int:
    """Threads remembered for a model file on this machine; 0 = none."""
    stored = cache.get(_KEY)
    found = stored.get(_machine()) if isinstance(stored, dict) else None
    ok = isinstance(found, int) and not isinstance(found, bool) and 1 <= found <= _MOST_THREADS
    return found if ok and found is not None else 0


def remember_threads(cache: ModelCache, n_threads: int) -> bool:
    """Remember a thread count for a model file on this machine, 0 = forget; whether the cache took it."""
    stored = cache.get(_KEY)
    machines = dict(stored) if isinstance(stored, dict) else {}
    machines.pop(_machine(), None)
    if n_threads:
        machines[_machine()] = n_threads
    cache.put(_KEY, machines)
    return tuned_threads(cache) == n_threads
