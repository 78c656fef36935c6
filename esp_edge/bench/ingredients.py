"""What each ingredient of ``auto`` brings: the table ``auto`` of ``bench ablate``. The paper has nothing to compare."""

from __future__ import annotations

from esp_edge.bench.paper import Ablation, Entry, Pair
from esp_edge.config import FUSED_SOURCES, PLANNED_BLOCK

__all__ = ["INGREDIENTS"]

ROWS = 30
ALL, PLANNED = "all sources", "planned size"


def _flat(name: str, *options: str) -> Entry:
    """Rows are free, so that every variant uses as many: what counts is what is in them."""
    return Entry(name, f"auto[{','.join(('cost=flat', f'block-complexity={ROWS}', *options))}]")


def _planned(name: str, *options: str) -> Entry:
    """As many rows as are worth their time here: what counts is the speed."""
    return Entry(name, f"auto[{','.join((f'block-complexity={PLANNED_BLOCK}', *options))}]")


def _without(source: str) -> str:
    return f"sources={'+'.join(name for name in FUSED_SOURCES if name != source)}"


_FLAT = (
    _flat(ALL),
    *(_flat(f"without {source}", _without(source)) for source in FUSED_SOURCES),
    _flat("esp alone", "sources=esp"),
    _flat("prior only, no learning or calibration", "learn=off"),
    _flat("no re-ranking", "apart"),
    _flat("dense masks", "dense"),
    _flat("two masks", "masks=2"),
)
_MEASURED = (
    _planned(PLANNED),
    *(_planned(f"{PLANNED}, without {source}", _without(source)) for source in FUSED_SOURCES),
    _planned(f"{PLANNED}, prior only", "learn=off"),
    _planned(f"{PLANNED}, no re-ranking", "apart"),
    *(Entry(f"at most {rows} rows", f"auto[block-complexity={rows}]") for rows in (4, 10)),
    *(Entry(f"always {rows} rows", f"auto[cost=flat,block-complexity={rows}]") for rows in (4, 10)),
)

INGREDIENTS = Ablation(
    "auto",
    f"The ingredients of auto: at {ROWS} rows that are free, and with the size that is planned for this device",
    (*_FLAT, *_MEASURED),
    (
        *(Pair(ALL, entry.name) for entry in _FLAT[1:]),
        *(Pair(PLANNED, entry.name, "speedup") for entry in _MEASURED[1:]),
    ),
    "These are this project's own; the paper has no such table.",
)
