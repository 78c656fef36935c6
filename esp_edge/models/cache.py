"""Small measured facts about a model file, kept on disk between runs."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["ModelCache", "cache_root", "fingerprint"]

_HEAD = 1 << 22
_TAIL = 1 << 20


def cache_root() -> Path:
    """``$ESP_EDGE_CACHE``, else the platform's cache directory."""
    chosen = os.environ.get("ESP_EDGE_CACHE")
    if chosen:
        return Path(chosen)
    try:
        home = Path.home()
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / "esp_edge"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home)) / "esp_edge" / "cache"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "esp_edge"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "esp_edge"


def fingerprint(path: Path) -> str:
    """Identifies a model file by size, first 4 MiB and last 1 MiB: the same file under two names is one model."""
    digest = hashlib.blake2b(digest_size=16)
    size = path.stat().st_size
    digest.update(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEAD))
        if size > _HEAD:
            file.seek(max(_HEAD, size - _TAIL))
            digest.update(file.read())
    return digest.hexdigest()


class ModelCache:
    """A JSON document per model file. An unreadable or unwritable cache is an empty one: it only saves time."""

    def __init__(self, path: Path) -> None:
        self._file = cache_root() / "models" / f"{fingerprint(path)}.json"

    def get(self, key: str) -> Any:
        """The stored value or None."""
        return self._read().get(key)

    def put(self, key: str, value: Any) -> None:
        """Store a JSON value; other keys stay."""
        document = self._read()
        document[key] = value
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False, suffix=".tmp") as file:
                json.dump(document, file)
            os.replace(file.name, self._file)
        except OSError:
            pass

    def _read(self) -> dict[str, Any]:
        try:
            document = json.loads(self._file.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}
