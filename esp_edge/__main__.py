"""``python -m esp_edge`` is ``esp-edge``."""

from __future__ import annotations

from esp_edge.cli.app import main

if __name__ == "__main__":
    main()
