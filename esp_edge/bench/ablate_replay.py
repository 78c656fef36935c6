"""``bench ablate --trace``: a table along recorded answers on a simulated device, in seconds and without the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from esp_edge.bench.ablate_compare import Document, Measured, ablation_document
from esp_edge.bench.ablate_report import write_ablation
from esp_edge.bench.ablate_tables import Ask, make_runs
from esp_edge.bench.halves import told_half
from esp_edge.bench.paper import Ablation
from esp_edge.bench.replay import Progress, Replayed, check_lanes, replay_lanes
from esp_edge.bench.results import make_folder
from esp_edge.bench.simulate import Device
from esp_edge.bench.spec import Lane
from esp_edge.bench.summary import complete_rounds, summary_rows
from esp_edge.bench.trace_file import Trace, TraceSettings
from esp_edge.errors import ConfigError

__all__ = ["replay_ablation", "trace_lanes"]


def trace_lanes(ablations: Sequence[Ablation], ask: Ask, settings: TraceSettings, device: Device) -> list[Lane]:
    """All lanes of the tables, plain decoding first.

    Raises:
        ConfigError: a table needs what the trace does not have: another temperature or mode, lade, larger masks.
    """
    runs = make_runs(ablations, ask)
    lanes = runs.pop((settings.temperature, settings.exact), [])
    if runs or not lanes:
        wanted = ", ".join(f"temperature {temperature:g}" + " in exact mode" * exact for temperature, exact in runs)
        mode = " in exact mode" if settings.exact else ""
        raise ConfigError(
            f"these tables need runs at {wanted}, but the trace is of temperature {settings.temperature:g}{mode}; "
            "measure them with --questions"
        )
    check_lanes(lanes, settings, device)
    return lanes


def replay_ablation(
    ablations: Sequence[Ablation],
    trace: Trace,
    device: Device,
    out: Path,
    *,
    mask_init: str,
    half: str,
    command: str = "",
    plots: bool = True,
    progress: Progress | None = None,
) -> list[Document]:
    """Replay the tables, then write one report, JSON document and plot a table.

    Args:
        trace: the answers to replay; ``half`` says which questions they are of.
        device: what passes cost; all speedups are simulated on it.
        mask_init: of every ESP lane that does not fix its own.

    Raises:
        ConfigError: a table that cannot be replayed.
    """
    settings = trace.settings
    ask = Ask(mask_init, settings.temperature, settings.exact)
    lanes = trace_lanes(ablations, ask, settings, device)
    make_folder(out)
    replayed = replay_lanes(trace, lanes, device=device, progress=progress)
    simulated = {"device": device.as_dict(), "answers": len(trace), "half": half, "split": told_half(half)}
    measured = {(settings.temperature, settings.exact): _measured(replayed, settings, command)}
    documents = [ablation_document(ablation, ask, measured) | {"simulated": simulated} for ablation in ablations]
    for document in documents:
        write_ablation(document, out, plots=plots)
    return documents


def _measured(replayed: Sequence[Replayed], settings: TraceSettings, command: str) -> Measured:
    """As if the lanes had run: the tokens are plain decoding's, the times those of the simulated device."""
    records = {record.unit: record for one in replayed for record in one.records.values()}
    keys = [(one.label, one.block_complexity) for one in replayed]
    told: dict[str, Any] = {
        "questions": settings.questions,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "repeat": 1,
        "exact": settings.exact,
    }
    rows = summary_rows(records, {}, keys)
    summary = {"rows": rows, "settings": told, "machine": {}, "command": command, "failures": 0}
    return Measured(summary, complete_rounds(records, keys))
