"""A profile in words and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from esp_edge.analysis.profile import JOINT, ROLES
from esp_edge.analysis.report import machine_table, markdown_table

__all__ = ["overview", "report"]

Document = Mapping[str, Any]
_LARGEST = 3  # parts named in a finding
_NO_SHARE = " " * 6  # as wide as " 100 %"
METHOD = {
    JOINT: (
        "Every part is the time between the ends of two nodes of llama.cpp's graph, on the thread that called it, "
        "while the graph ran as always. A part holds the wait for the slowest thread of the node before it."
    ),
    "separate": (
        "Every node was computed alone, so each part holds the cost of starting and joining the threads once a node, "
        "and norms are not fused with their weights: the sum may be more than the whole pass, and rest negative."
    ),
}
WHOLE = (
    "Rows of a pass are a chain of arbitrary tokens, all with logits. The whole pass was timed by itself, with nothing "
    "recorded, in turns with the recorded passes; all times are medians. rest = whole pass - sum of parts: building "
    "the graph, inputs and outputs, the KV cache's book-keeping, our own share, and noise."
)
BOUNDS = (
    "MB: weights, K and V, each read once. memory: the time that takes at the read bandwidth measured here, a lower "
    "bound for any kernel unless a cache holds the weights. GB/s and GMAC/s: what the whole pass reached."
)
GROWTH = "Milliseconds as a multiple of those of the smallest pass."


def overview(document: Document) -> str:
    """What the command prints: the settings, a table of parts for each context, and the bounds."""
    parts = [_settings(document)]
    for passes in _by_context(document):
        parts += [f"context {passes[0]['context']}, ms and share of the whole pass", _part_table(passes)]
    parts += ["bounds", _bound_table(document["passes"])]
    return _joined(parts)


def report(document: Document, figure: str | None = None) -> str:
    """The whole ``profile.md``.

    Args:
        document: what ``profile.json`` holds.
        figure: file name of the plot, if it was drawn.
    """
    parts = ["# Where the time of a pass goes", _settings(document), METHOD[document["method"]], WHOLE]
    if figure:
        parts.append(f"![profile]({figure})")
    for passes in _by_context(document):
        parts += [f"## Context {passes[0]['context']}", _finding(passes), _part_table(passes)]
        if len(passes) > 1:
            parts += [GROWTH, _growth_table(passes)]
    parts += ["## Bounds", BOUNDS, _bound_table(document["passes"])]
    parts += ["## Parts", markdown_table(["part", "what"], _legend(document))]
    if "machine" in document:
        parts += ["## Machine", machine_table(document["machine"])]
    return _joined(parts)


def _joined(parts: Sequence[str]) -> str:
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _by_context(document: Document) -> list[list[Document]]:
    found: dict[int, list[Document]] = {}
    for one in document["passes"]:
        found.setdefault(one["context"], []).append(one)
    return list(found.values())


# -- words -----------------------------------------------------------------------------------------------------------


def _settings(document: Document) -> str:
    names = [document[key] for key in ("model",) if key in document]
    threads = f"{document['machine']['threads']} threads" if "machine" in document else ""
    rounds = f"{document['passes'][0]['repeat']} passes a size"
    speed = f"memory read at {document['read_bytes_per_s'] / 1e9:.1f} GB/s"
    return ", ".join(filter(None, [*names, threads, rounds, f"{document['method']} nodes", speed]))


def _finding(passes: Sequence[Document]) -> str:
    """The largest parts of the smallest and the largest pass."""
    ends = [passes[0], passes[-1]] if len(passes) > 1 else [passes[0]]
    told = []
    for one in ends:
        largest = sorted(one["ops"], key=lambda op: -op["ms"])[:_LARGEST]
        shares = ", ".join(f"{op['op']} {_share(op['ms'], one)}" for op in largest)
        told.append(f"{one['rows']} row{'s' * (one['rows'] > 1)}: {one['whole_ms']:.2f} ms, {shares}")
    return ". ".join(told) + "."


def _share(ms: float, one: Document) -> str:
    return f"{100 * ms / one['whole_ms']:.0f} %"


def _legend(document: Document) -> list[list[str]]:
    seen = {op["op"] for one in document["passes"] for op in one["ops"]}
    return [[name, text] for name, text in ROLES.items() if name in seen]


# -- tables ----------------------------------------------------------------------------------------------------------


def _part_names(passes: Sequence[Document]) -> list[str]:
    seen = {op["op"] for one in passes for op in one["ops"]}
    return [name for name in ROLES if name in seen]


def _times(one: Document) -> dict[str, float]:
    return {op["op"]: op["ms"] for op in one["ops"]}


def _part_table(passes: Sequence[Document]) -> str:
    """Milliseconds and shares, a column a size, with the weights' types and sizes beside them."""
    last = {op["op"]: op for one in passes for op in one["ops"]}
    times = [_times(one) for one in passes]
    rows = []
    for name in _part_names(passes):
        cells = [
            f"{found[name]:.2f} {_share(found[name], one):>5}" if name in found else "-"
            for found, one in zip(times, passes, strict=True)
        ]
        rows.append([name, *_weights(last[name]), *cells])
    rows.append(["rest", "", "", *(f"{one['rest_ms']:.2f} {_share(one['rest_ms'], one):>5}" for one in passes)])
    rows.append(["whole pass", "", "", *(f"{one['whole_ms']:.2f}{_NO_SHARE}" for one in passes)])
    first = passes[0]["whole_ms"]
    rows.append(["times the first", "", "", *(f"{one['whole_ms'] / first:.2f}{_NO_SHARE}" for one in passes)])
    return markdown_table(["part", "type", "MB", *(_n_rows(one) for one in passes)], rows)


def _weights(op: Document) -> list[str]:
    """Type and size of what a part reads, where that is worth a word."""
    return [" ".join(op["types"]), f"{op['n_bytes'] / 1e6:.1f}"] if op["macs"] else ["", ""]


def _n_rows(one: Document) -> str:
    return f"{one['rows']} row{'s' * (one['rows'] > 1)}"


def _growth_table(passes: Sequence[Document]) -> str:
    times = [_times(one) for one in passes]
    rows = []
    for name in _part_names(passes):
        first = times[0].get(name, 0.0)
        rows.append([name, *(f"{found[name] / first:.2f}" if first and name in found else "-" for found in times)])
    rows.append(["whole pass", *(f"{one['whole_ms'] / passes[0]['whole_ms']:.2f}" for one in passes)])
    return markdown_table(["part", *(_n_rows(one) for one in passes)], rows)


def _bound_table(passes: Sequence[Document]) -> str:
    rows = []
    for one in passes:
        seconds = one["whole_ms"] / 1000
        rows.append(
            [
                str(one["context"]),
                str(one["rows"]),
                f"{one['n_bytes'] / 1e6:.1f}",
                f"{one['memory_ms']:.2f}",
                f"{one['macs'] / 1e9:.3f}",
                f"{one['whole_ms']:.2f}",
                f"{one['n_bytes'] / 1e9 / seconds:.1f}",
                f"{one['macs'] / 1e9 / seconds:.1f}",
            ]
        )
    head = ["context", "rows", "MB", "memory ms", "GMAC", "whole ms", "GB/s", "GMAC/s"]
    return markdown_table(head, rows)
