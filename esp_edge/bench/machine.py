"""What a measurement was made on. Names no host, user or path."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from esp_edge.models.model import default_threads

__all__ = ["describe_machine"]


def describe_machine(*, quant: str, n_ctx: int, n_threads: int, n_gpu_layers: int = 0) -> dict[str, Any]:
    """JSON-ready; ``n_threads`` 0 is told as what it stands for, memory in bytes, the date in UTC."""
    return {
        "cpu": _cpu(),
        "cores": _cores(),
        "threads": n_threads or default_threads(),
        "memory_bytes": _memory(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "llama_cpp_python": importlib.metadata.version("llama-cpp-python"),
        "esp_edge": importlib.metadata.version("esp-edge"),
        "quant": quant,
        "n_ctx": n_ctx,
        "n_gpu_layers": n_gpu_layers,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _cores() -> int:
    """Logical cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _memory() -> int | None:
    try:
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return None


def _cpu() -> str:
    """The processor's name as far as the system tells it."""
    name = _cpu_of_linux() if sys.platform.startswith("linux") else _cpu_of_macos() if sys.platform == "darwin" else ""
    return name or platform.processor() or platform.machine()


def _cpu_of_linux() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return next((fields[key] for key in ("model name", "Model", "Hardware", "cpu model") if fields.get(key)), "")


def _cpu_of_macos() -> str:
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
