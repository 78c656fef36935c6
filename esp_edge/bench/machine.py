"""What a measurement was made on. Names no host, user or path."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import datetime, timezone
from typing import Any

from esp_edge.config import ModelConfig
from esp_edge.models import gguf
from esp_edge.models.device import cpu_name, gpu_names, usable_cores
from esp_edge.models.model import TargetModel, offloads

__all__ = ["describe_machine", "describe_run"]


def describe_run(model: TargetModel, *, n_ctx: int = 0, n_threads: int = 0) -> dict[str, Any]:
    """:func:`describe_machine` for a loaded model; 0 = what the model has."""
    quant = gguf.quant_name(model.header)
    return describe_machine(
        model.config,
        quant=quant,
        n_ctx=n_ctx or model.n_ctx,
        n_threads=n_threads or model.threads,
        kernels=str(model.kernels),
    )


def describe_machine(
    config: ModelConfig, *, quant: str, n_ctx: int, n_threads: int, kernels: str | None = None
) -> dict[str, Any]:
    """JSON-ready; memory in bytes, the date in UTC, the GPUs only where layers go to one.

    Args:
        kernels: what a loaded model computes with; None = none is loaded yet, so the setting is told.
    """
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": n_threads,
        **({"gpu": ", ".join(gpu_names()) or "unknown"} if offloads(config) else {}),
        "memory_bytes": _memory(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "llama_cpp_python": importlib.metadata.version("llama-cpp-python"),
        "esp_edge": importlib.metadata.version("esp-edge"),
        "quant": quant,
        "n_ctx": n_ctx,
        "n_gpu_layers": config.n_gpu_layers,
        "kernels": kernels or config.kernels,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _memory() -> int | None:
    try:
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return None
