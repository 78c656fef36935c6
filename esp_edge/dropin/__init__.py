"""``from esp_edge import Llama``: llama-cpp-python's class, with several tokens a pass."""

from __future__ import annotations

from esp_edge.dropin.llama import FallbackWarning, Llama

__all__ = ["FallbackWarning", "Llama"]
