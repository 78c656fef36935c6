"""Replays on a simulated device: its passes take as long as a measured T(n) says. And drafts that are never wrong.

The simulated speed of some answers is what plain decoding would take, a pass of one row a token, over what the replayed
passes take. On a flat device, T(n) = T(1), it is tau.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from esp_edge.drafters.base import Budget
from esp_edge.errors import ConfigError
from esp_edge.planner.curve import CostCurve
from esp_edge.step import Outputs
from esp_edge.tree import DraftTree, Verdict

__all__ = ["FLAT", "Device", "PerfectDrafts", "read_device"]

FLAT = "flat"


@dataclass(frozen=True, slots=True)
class Device:
    """What passes cost.

    Attributes:
        name: of the file and what it was measured on.
        curve: T(n); passes teach it nothing, they take as long as it says.
        plain_host_ms, draft_host_ms: our own time of a pass of plain decoding, and of one with drafts.
    """

    name: str
    curve: CostCurve
    plain_host_ms: float = 0.0
    draft_host_ms: float = 0.0

    def model_ms(self, rows: int, context: int) -> float:
        """Milliseconds of a pass of so many rows after ``context`` tokens, without the host's."""
        return self.curve.ms(rows, context)

    def host_ms(self, *, drafts: bool) -> float:
        """Our own milliseconds of a pass."""
        return self.draft_host_ms if drafts else self.plain_host_ms

    def plain_ms(self, context: int, n_tokens: int) -> float:
        """Milliseconds that plain decoding takes for the next tokens."""
        passes = sum(self.curve.ms(1, context + token) for token in range(n_tokens))
        return passes + n_tokens * self.plain_host_ms

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: the name, context -> rows -> milliseconds, and the host's times."""
        points = {str(at): {str(n): ms for n, ms in found.items()} for at, found in self.curve.points.items()}
        return {"name": self.name, "cost": points, "host_ms": [self.plain_host_ms, self.draft_host_ms]}


def read_device(cost: str, host_ms: str | None = None) -> Device:
    """A device from the flags of a command.

    Args:
        cost: ``flat``, or a file that ``bench cost`` or ``bench specbench`` wrote.
        host_ms: ``PLAIN,DRAFTING``, milliseconds of a pass; None = 0,0.

    Raises:
        ConfigError: the file is none, has several thread counts, or a time is none.
    """
    plain, drafting = _host_times(host_ms)
    if cost == FLAT:
        return Device("a device on which rows are free, T(n) = T(1)", CostCurve.flat(), plain, drafting)
    path = Path(cost)
    document = _read(path)
    return Device(_named(path, document), _curve(path, document["rows"]), plain, drafting)


def _host_times(text: str | None) -> tuple[float, float]:
    if text is None:
        return 0.0, 0.0
    try:
        plain, drafting = (float(part) for part in text.split(","))
    except ValueError:
        plain = drafting = -1.0
    if not (0 <= plain < math.inf and 0 <= drafting < math.inf):
        raise ConfigError(f"--host-ms needs two times such as 0.25,0.5 (plain, drafting), but {text!r} was given")
    return plain, drafting


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text("utf-8"))
        if not document["rows"]:
            raise ValueError
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"--cost needs flat or a file of bench cost, but there is no file {path}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} has no times of passes: make it with esp-edge bench cost --out DIR") from None
    return dict(document)


def _curve(path: Path, rows: Sequence[dict[str, Any]]) -> CostCurve:
    points: dict[int, dict[int, float]] = {}
    try:
        threads = sorted({int(row["threads"]) for row in rows})
        for row in rows:
            points.setdefault(int(row["context"]), {})[int(row["rows"])] = float(row["ms"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} has no times of passes: make it with esp-edge bench cost --out DIR") from None
    if len(threads) > 1:
        counts = " and ".join(map(str, threads))
        raise ConfigError(f"a simulated device has one T(n), but {path} has those of {counts} threads: measure one")
    return CostCurve(points)


def _named(path: Path, document: dict[str, Any]) -> str:
    machine = document.get("machine")
    found = machine if isinstance(machine, dict) else {}
    about = [f"{found[name]}{unit}" for name, unit in (("quant", ""), ("cpu", ""), ("date", "")) if name in found]
    return path.name + (f" ({', '.join([*about, _threads(document)])})" if about else "")


def _threads(document: dict[str, Any]) -> str:
    n = document["rows"][0]["threads"]
    return f"{n} thread{'s' * (n != 1)}"


class PerfectDrafts:
    """A drafter that knows the answer: every pass has as many of the next tokens as bring most tokens a millisecond.

    It bounds every drafter on this device. :meth:`know` tells it the answer before :meth:`begin`.
    """

    name = "perfect drafts"

    def __init__(self, rows: int, host_ms: float) -> None:
        """``rows``: the block complexity; ``host_ms``: our own time of a pass."""
        self._rows = rows
        self._host_ms = host_ms
        self._text: Sequence[int] = ()

    def know(self, token_ids: Sequence[int]) -> None:
        """The next answer."""
        self._text = token_ids

    def begin(self, token_ids: Sequence[int]) -> None:
        """Start a generation; its last token is the first root."""
        self._done = 0
        self._root = int(token_ids[-1])

    def probe(self) -> DraftTree:
        """The root alone."""
        return DraftTree.root_only(self._root)

    def draft(self, budget: Budget) -> DraftTree:
        """A chain of the next tokens; the last one is the bonus token of the pass and needs no row."""
        most = max(1, min(self._rows, budget.rows, budget.depth + 1, len(self._text) - self._done))
        sizes = np.arange(1, min(most, len(budget.cost)) + 1)
        best = int(np.argmax(sizes / (budget.cost[: len(sizes)] + self._host_ms))) + 1
        tokens = [self._root, *self._text[self._done : self._done + best - 1]]
        return DraftTree.from_lists(tokens, range(-1, len(tokens) - 1))

    def observe(self, tree: DraftTree, outputs: Outputs, verdict: Verdict) -> None:
        """Go on behind what was committed."""
        del tree, outputs
        self._done += len(verdict.token_ids)
        self._root = verdict.bonus_token
