"""``esp-edge bench ablate``: the paper's tables on a model of one's own, side by side with the paper's figures.

A table is a set of lanes for the Spec-Bench runner. All lanes of the asked tables run in one interleaved run where
they can; tables that exact mode cannot hold, and other temperatures, get a run of their own. The figures are for other
models on another device, so what is judged is the direction of each comparison, not its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from esp_edge.bench.ablate_compare import CAVEAT, Document, Measured, ablation_document, verdict
from esp_edge.bench.ablate_replay import replay_ablation
from esp_edge.bench.ablate_report import ablation_text, write_ablation
from esp_edge.bench.ablate_tables import ALL_TABLES, TABLES, Ask, RunKey, find_ablations, make_runs
from esp_edge.bench.paper import Ablation
from esp_edge.bench.run import Plan, Progress, prepare_models
from esp_edge.bench.spec import Lane, with_stock
from esp_edge.bench.specbench import measure

__all__ = [
    "CAVEAT",
    "TABLES",
    "Ask",
    "Document",
    "Measured",
    "ablate",
    "ablation_document",
    "ablation_text",
    "find_ablations",
    "make_runs",
    "replay_ablation",
    "verdict",
    "write_ablation",
]


def ablate(
    ablations: Sequence[Ablation],
    plan: Plan,
    ask: Ask,
    out: Path,
    *,
    command: str = "",
    plots: bool = True,
    progress: Progress | None = None,
) -> list[Document]:
    """Measure what is missing in the directory, then write one report, JSON document and plot a table.

    Args:
        plan: models, questions, parameters and repetitions; its lanes are replaced by those of the tables.
        out: the runs are folders in it, named after the tables.
        progress: called with (answers recorded, answers, what is being done), run by run.

    Raises:
        ConfigError: a folder of the directory belongs to another run.
    """
    prepare_models(plan)  # a run in the default mode may come before an exact one
    runs = make_runs(ablations, ask)
    base = ALL_TABLES if len(ablations) == len(TABLES) else "+".join(ablation.key for ablation in ablations)
    measured = {}
    for key, lanes in runs.items():
        folder = out / _folder(base, key, ask)
        part = _part(plan, key, lanes)
        measure(part, folder, command=command, plots=False, progress=progress or (lambda _done, _total, _text: None))
        measured[key] = Measured.read(folder)
    documents = [ablation_document(ablation, ask, measured) for ablation in ablations]
    for document in documents:
        write_ablation(document, out, plots=plots)
    return documents


def _folder(base: str, key: RunKey, ask: Ask) -> str:
    temperature, exact = key
    at = f"-temp-{temperature:g}" if temperature != ask.temperature else ""
    return f"run-{base}{at}{'-default-mode' if ask.exact and not exact else ''}"


def _part(plan: Plan, key: RunKey, lanes: Sequence[Lane]) -> Plan:
    """The plan of one run. Draws are from the whole distribution, as the paper's are, with no filter."""
    temperature, exact = key
    params = replace(plan.params, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    config = replace(plan.config, exact=exact)
    stock = exact or config.kernels != "stock"
    return replace(plan, lanes=with_stock(lanes) if stock else lanes, params=params, config=config)
