"""The alignment analysis in words and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["machine_table", "markdown_table", "overview", "report"]

Document = Mapping[str, Any]
LUCK = 0.05  # a threshold that blind picks reach this often is said to be luck
PAPER = (
    "The paper's Figure 2 (LLaMA-3.2-3B, prompt-mean masks, 100 creative-writing prompts) has accepted steps rise from "
    "about layer 15 to a cosine of about 0.45, while rejected ones stay at about 0.35. This is another model with its "
    "own number of layers and its own scale of cosines: compare the order of the two curves and where they part, not "
    "the heights."
)
METHOD = (
    "Greedy answers, a token a pass, with one mask behind the root. The mask stands in the slot of the bonus token; "
    "the cosine is that of its hidden state and of that token's in the next pass, same position, after each layer. A "
    "step is accepted when the token after that one is among the first K of the mask's logits. Standard errors and "
    "probabilities take steps as independent, which those of one answer are not quite."
)
LAYERS = (
    "Mean ± standard error, and the probability that an accepted step has the higher cosine (AUC, 0.5 = the cosine "
    "tells nothing). Layer 1 is the first."
)


def overview(document: Document) -> str:
    """What the command prints: the findings, then the layers."""
    return "\n\n".join([_settings(document), *_findings(document), _layer_table(document).rstrip("\n")]) + "\n"


def report(document: Document, figure: str | None = None) -> str:
    """The whole ``alignment.md``.

    Args:
        document: what ``alignment.json`` holds.
        figure: file name of the plot, if it was drawn.
    """
    parts = ["# Alignment of mask rows with the tokens they stand for", _settings(document), METHOD]
    parts += ["## Findings", *_findings(document), PAPER]
    if figure:
        parts.append(f"![alignment]({figure})")
    parts += ["## Cosine after each layer", LAYERS, _layer_table(document)]
    parts += ["## Share of true tokens in the Top-K by cosine after the last layer", _bin_table(document)]
    if "machine" in document:
        parts += ["## Machine", machine_table(document["machine"])]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


# -- words -----------------------------------------------------------------------------------------------------------


def _settings(document: Document) -> str:
    update = document["mask_update"]
    masks = document["mask_init"] + ("" if update is None else f", update {update:g}")
    names = [f"{document[key]}" for key in ("model", "prompts") if key in document]
    counts = f"{document['n_prompts']} prompts, {document['n_steps']} steps"
    return ", ".join([*names, counts, f"{document['n_layers']} layers", f"masks {masks}"])


def _findings(document: Document) -> list[str]:
    return [sentence for result in document["results"] for sentence in _result(result)]


def _result(result: Document) -> list[str]:
    k, accepted = result["top_k"], result["accepted"]
    steps = accepted + result["rejected"]
    if not steps:
        return ["No step was seen: every answer ended at once."]
    last = result["layers"][-1]
    text = f"Top-{k}: {accepted} of {steps} steps accepted ({accepted / steps:.0%}). Cosine after the last layer: "
    text += f"{_cell(last['accepted'])} accepted, {_cell(last['rejected'])} rejected. {_parting(result)}"
    return [text, f"{_delta_star(result)} {_delta_95(result)}"]


def _parting(result: Document) -> str:
    if result["parts_from"] is None:
        return "The means are not two standard errors apart after the last layer."
    return f"Accepted steps lie two standard errors above rejected ones from layer {result['parts_from']} to the last."


def _delta_star(result: Document) -> str:
    found, name = result["delta_star"], f"delta* of Lemma 3.1 for Top-{result['top_k']}"
    if found is None:
        return f"{name}: no such threshold in these data, the step with the highest cosine was rejected."
    text = f"{name}: {found['cosine']:.3f}; the {found['n_steps']} steps from there on were all accepted."
    if found["luck"] > LUCK:
        text += f" As many steps picked blindly are all accepted with probability {found['luck']:.2f}: this proves"
        text += " nothing."
    return text


def _delta_95(result: Document) -> str:
    found = result["delta_95"]
    if found is None:
        return "No cosine from which on 95 % were accepted either."
    return f"95 % were accepted from {found['cosine']:.3f} on ({found['n_steps']} steps)."


# -- tables ----------------------------------------------------------------------------------------------------------


def machine_table(machine: Document) -> str:
    """What a document says about its machine, a row an entry."""
    shown = dict(machine)
    memory = shown.pop("memory_bytes", None)
    if memory:
        shown["memory"] = f"{memory / 2**30:.1f} GiB"
    return markdown_table(["machine", ""], [[name.replace("_", " "), str(value)] for name, value in shown.items()])


def _layer_table(document: Document) -> str:
    results = document["results"]
    head = ["layer"]
    for result in results:
        head += [f"accepted, K = {result['top_k']}", "rejected", "AUC"]
    rows = []
    for number in range(document["n_layers"]):
        cells = [str(number + 1)]
        for result in results:
            layer = result["layers"][number]
            cells += [_cell(layer["accepted"]), _cell(layer["rejected"]), _number(layer["auc"])]
        rows.append(cells)
    return markdown_table(head, rows)


def _bin_table(document: Document) -> str:
    results = document["results"]
    head = ["cosine", "steps"]
    for result in results:
        head += [f"in Top-{result['top_k']}", "share"]
    rows = []
    for bins in zip(*(result["bins"] for result in results), strict=True):  # the same steps for every K
        cells = [f"{bins[0]['low']:.2f} to {bins[0]['high']:.2f}", str(bins[0]["steps"])]
        for each in bins:
            cells += [str(each["accepted"]), f"{each['share']:.0%}"]
        rows.append(cells)
    return markdown_table(head, rows)


def _cell(group: Document) -> str:
    error = "" if group["se"] is None else f" ± {group['se']:.3f}"
    return _number(group["mean"]) + error


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table whose columns line up as text, too, all right-aligned but the first."""
    cells = [list(head), *map(list, rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(row: Sequence[str]) -> str:
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        return f"| {' | '.join([row[0].ljust(widths[0]), *rest])} |"

    return "\n".join(map(line, [cells[0], rule, *cells[1:]])) + "\n"
