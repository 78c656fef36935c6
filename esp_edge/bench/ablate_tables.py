"""The tables of ``bench ablate``, what a user sets for all of them, and the runs that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from esp_edge.bench.ingredients import INGREDIENTS
from esp_edge.bench.paper import ABLATIONS, Ablation, Entry
from esp_edge.bench.spec import DrafterSpec, Lane, make_lanes, parse_drafters
from esp_edge.config import MAX_EXACT_BLOCK
from esp_edge.errors import ConfigError

__all__ = ["ALL_TABLES", "TABLES", "Ask", "RunKey", "find_ablations", "make_runs"]

TABLES = {**ABLATIONS, INGREDIENTS.key: INGREDIENTS}  # the paper's, and our own
ALL_TABLES = "all"
DEFAULT_MASK_INIT = "prompt-mean"  # the paper's
RunKey: TypeAlias = tuple[float, bool]  # temperature, exact


@dataclass(frozen=True, slots=True)
class Ask:
    """What a user sets for all tables.

    Attributes:
        mask_init: of every ESP lane that does not fix its own.
        temperature: of every entry that does not fix its own.
        exact: where the table's passes are small enough for it.
    """

    mask_init: str = DEFAULT_MASK_INIT
    temperature: float = 0.0
    exact: bool = False

    def spec(self, entry: Entry) -> DrafterSpec:
        """An entry as a drafter with all its options.

        Raises:
            ConfigError: no such mask initialisation.
        """
        text = entry.drafter
        if text.startswith("esp[") and "mask-init=" not in text:
            text = f"{text[:-1]},mask-init={self.mask_init}]"
        return parse_drafters(text)[0]

    def lane(self, entry: Entry) -> Lane:
        """An entry as a lane of the runner."""
        return make_lanes([self.spec(entry)], [1])[-1]  # every entry fixes its own block complexity

    def run_key(self, ablation: Ablation, entry: Entry) -> RunKey:
        """The run in which an entry is measured."""
        temperature = self.temperature if entry.temperature is None else entry.temperature
        return temperature, self.exact and self.largest(ablation) <= MAX_EXACT_BLOCK

    def largest(self, ablation: Ablation) -> int:
        """Rows of a table's largest pass."""
        return max(self.lane(entry).block_complexity for entry in ablation.entries)


def find_ablations(names: Sequence[str]) -> list[Ablation]:
    """Tables by name, each once; ``all`` is every one.

    Raises:
        ConfigError: an unknown name, or none.
    """
    known = f"{', '.join(TABLES)} or {ALL_TABLES}"
    if not names:
        raise ConfigError(f"a table is needed: {known}")
    unknown = [name for name in names if name not in TABLES and name != ALL_TABLES]
    if unknown:
        raise ConfigError(f"a table must be one of {known}, but {unknown[0]!r} was given")
    chosen = TABLES if ALL_TABLES in names else dict.fromkeys(names)
    return [TABLES[name] for name in chosen]


def make_runs(ablations: Sequence[Ablation], ask: Ask) -> dict[RunKey, list[Lane]]:
    """(temperature, exact) -> lanes of one run, plain decoding first; a lane that several tables share runs once."""
    runs: dict[RunKey, list[DrafterSpec]] = {}
    for ablation in ablations:
        for entry in ablation.entries:
            runs.setdefault(ask.run_key(ablation, entry), []).append(ask.spec(entry))
    return {key: make_lanes(specs, [1]) for key, specs in runs.items()}
