"""The command line: text and results on stdout, everything else on stderr.

Modules here import the model code inside functions only: ``esp-edge --help`` must not wait for llama.cpp.
"""

from __future__ import annotations

__all__: list[str] = []
