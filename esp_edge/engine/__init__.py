"""Many sessions in one context: slots, continuous batching, prefix reuse, cancellation."""

from __future__ import annotations

from esp_edge.engine.engine import Engine
from esp_edge.engine.ticket import Ticket

__all__ = ["Engine", "Ticket"]
