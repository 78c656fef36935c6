"""``esp-edge model``: show a model, quantize its file, measure which mask vectors suit it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esp_edge.cli.answer import load_model
from esp_edge.cli.options import LoadOptions, option
from esp_edge.cli.output import Bar, note, one_line, print_json, warnings_as_notes, write_text
from esp_edge.config import DraftConfig
from esp_edge.errors import PromptError, UnsupportedModelError

if TYPE_CHECKING:
    from esp_edge.models.model import TargetModel

__all__ = ["calibrate", "describe", "quantize", "show"]

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="File, owner/repo[:QUANT] on Hugging Face, or smollm2.", envvar="ESP_EDGE_MODEL", show_envvar=False
    ),
]


# -- show ------------------------------------------------------------------------------------------------------------


def show(
    *,
    load: LoadOptions,
    model: ModelArgument = "smollm2",
    as_json: Annotated[bool, option("--json", text="Print one JSON document.")] = False,
) -> None:
    """Show what a model is, what it needs and what speculation may use on it."""
    with closing(load_model(model, load.config())) as target:
        document = describe(target)
    if as_json:
        print_json(document)
    else:
        _print_rows(_rows(document))


def describe(model: TargetModel) -> dict[str, Any]:
    """Everything ``model show`` tells, JSON-ready. Sizes are bytes."""
    from esp_edge.models import gguf  # noqa: PLC0415 - loads llama.cpp with its package

    header, tokenizer, capability = model.header, model.tokenizer, model.capability
    tensors = [tensor for part in gguf.read_parts(header) for tensor in part.tensors.values()]
    heads = header.hyperparameter("attention.head_count")
    return {
        "file": str(model.path),
        "file_size": sum(part.file_size for part in gguf.read_parts(header)),
        "name": header.metadata.get("general.name"),
        "architecture": header.architecture,
        "quant": gguf.quant_name(header),
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "n_ctx_train": header.hyperparameter("context_length"),
        "n_embd": header.hyperparameter("embedding_length"),
        "n_layer": header.hyperparameter("block_count"),
        "n_head": heads,
        "n_head_kv": header.hyperparameter("attention.head_count_kv", heads),
        "n_vocab": tokenizer.n_vocab,
        "chat_template": _first_line(header.metadata.get("tokenizer.chat_template")),
        **_template_problems(model),
        "bos": _token(model, tokenizer.bos),
        "eos": _token(model, tokenizer.eos),
        "eog": [_token(model, token_id) for token_id in sorted(tokenizer.eog_ids)],
        "capability": {
            "masks": capability.masks,
            "speculation": capability.speculation,
            "scale": capability.scale,
            "bit_equal": capability.bit_equal,
            "reason": capability.reason,
        },
        "kernels": {
            "isa": model.kernels.isa,
            "matrices": dict(model.kernels.matrices),
            "complete": model.kernels.complete,
            "repacked_bytes": model.kernels.repacked_bytes,
            "reason": model.kernels.reason,
            "text": str(model.kernels),
        },
        "memory": {
            "n_ctx": model.n_ctx,
            **gguf.memory_estimate(header, model.n_ctx, model.config.type_k, model.config.type_v),
        },
    }


def _template_problems(model: TargetModel) -> dict[str, str | None]:
    """What chats are warned of, and why they fail."""
    try:
        return {"template_warning": model.template_warning, "template_error": None}
    except PromptError as error:  # it does not compile; everything else about the file can still be told
        return {"template_warning": None, "template_error": str(error)}


def _first_line(template: Any) -> str | None:
    lines = template.strip().splitlines() if isinstance(template, str) else []
    return lines[0] if lines else None


def _token(model: TargetModel, token_id: int) -> dict[str, Any] | None:
    if token_id < 0:
        return None
    return {"id": token_id, "text": model.tokenizer.raw_piece(token_id).decode("utf-8", "replace")}


def _rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    memory, capability = document["memory"], document["capability"]
    return [
        ("file", f"{document['file']} ({_size(document['file_size'])})"),
        ("name", _or_dash(document["name"])),
        ("architecture", document["architecture"]),
        ("quantisation", document["quant"]),
        ("parameters", f"{document['parameters'] / 1e6:,.1f} million"),
        ("training context", f"{_or_dash(document['n_ctx_train'])} tokens"),
        ("embedding size", _or_dash(document["n_embd"])),
        ("layers", _or_dash(document["n_layer"])),
        ("heads", f"{_or_dash(document['n_head'])}, of keys and values {_or_dash(document['n_head_kv'])}"),
        ("vocabulary", f"{document['n_vocab']:,} tokens"),
        ("chat template", document["template_error"] or _shortened(document["chat_template"] or "none in the file")),
        *([("", document["template_warning"])] if document["template_warning"] else []),
        ("BOS, EOS", ", ".join(_token_text(document[name]) for name in ("bos", "eos"))),
        ("ends an answer", ", ".join(map(_token_text, document["eog"])) or "no token"),
        ("mask probing", _capability_text(capability)),
        ("kernels", document["kernels"]["text"]),
        (
            f"memory at {memory['n_ctx']} tokens",
            f"{_size(memory['total'])}: weights {_size(memory['weights'])}, KV cache {_size(memory['kv_cache'])}, "
            f"computing about {_size(memory['compute'])}",
        ),
    ]


def _capability_text(capability: Mapping[str, Any]) -> str:
    if not capability["masks"]:
        return f"off: {capability['reason']}"
    scale = "" if capability["scale"] == 1.0 else f", embedding rows times {capability['scale']:.4g}"
    return f"on: embedding rows give the logits of token ids{', to the last bit' * capability['bit_equal']}{scale}"


def _size(n_bytes: float) -> str:
    """Bytes for people: 1536 -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.1f} {unit}" if unit != "B" else f"{n_bytes:.0f} B"
        n_bytes /= 1024
    return f"{n_bytes:.2f} GiB"


def _token_text(token: Mapping[str, Any] | None) -> str:
    return "none" if token is None else f"{token['id']} {token['text']!r}"


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def _shortened(text: str, width: int = 90) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _print_rows(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        write_text(f"{name:<{width}}  {one_line(value)}\n")


# -- calibrate -------------------------------------------------------------------------------------------------------


def calibrate(*, load: LoadOptions, model: ModelArgument = "smollm2") -> None:
    """Measure again which mask initialisation guesses best on a model; --mask-init auto uses the winner."""
    from esp_edge.drafters.auto_mask import resolve_mask_init  # noqa: PLC0415 - loads llama.cpp

    with closing(load_model(model, load.config())) as target, Bar("measuring mask vectors") as bar:
        if not target.capability.masks:
            raise UnsupportedModelError(f"{target.path}: {target.capability.reason}")
        chosen = resolve_mask_init(target, DraftConfig(), redo=True, progress=bar.update)
        rates, n_positions = _hit_rates(target, bar)
    for line in hit_table(rates):
        write_text(line + "\n")
    note(f"share of {n_positions} positions whose token was among the first K proposals")
    update = "" if chosen.mask_update is None else f" --mask-update {chosen.mask_update:g}"
    write_text(f"chosen: --mask-init {chosen.mask_init}{update}\n")


def _hit_rates(model: TargetModel, bar: Bar) -> tuple[dict[str, dict[str, float]], int]:
    """Candidate -> K -> hit rate as just stored, and the number of positions; measured again if nothing is stored."""
    from esp_edge.drafters.auto_mask import measure_mask_inits  # noqa: PLC0415

    stored = model.cache.get("mask_init")
    if isinstance(stored, dict):
        return stored.get("rates", {}), stored.get("positions", 0)
    note("the result cannot be stored in the cache directory (ESP_EDGE_CACHE); measuring once more to show it")
    results = measure_mask_inits(model, progress=bar.update)
    rates = {name: {str(k): rate for k, rate in hits.rates.items()} for name, hits in results.items()}
    return rates, min((hits.positions for hits in results.values()), default=0)


def hit_table(rates: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Lines of a table: a candidate a row, a K a column, percent."""
    if not rates:
        return ["the model's answer is too short to measure on"]
    ranks = list(next(iter(rates.values())))
    width = max(len(name) for name in rates)
    lines = [" " * width + "".join(f"{f'K={rank}':>8}" for rank in ranks)]
    return lines + [
        f"{name:<{width}}" + "".join(f"{100 * found[rank]:>7.1f}%" for rank in ranks) for name, found in rates.items()
    ]


# -- quantize --------------------------------------------------------------------------------------------------------


def quantize(
    *,
    source: Annotated[str, typer.Argument(metavar="IN", help="GGUF file, best in F16, BF16 or F32.")],
    to: Annotated[str, option("--to", text="One or more types: Q4_0,Q8_0,BF16,...")],
    out: Annotated[Path | None, option("--out", text="Directory of the new files. (default: beside IN)")] = None,
    overwrite: Annotated[bool, option("--overwrite", text="Make files anew that are there and whole.")] = False,
    threads: Annotated[int, option("-t", "--threads", text="CPU threads; 0 = all.")] = 0,
) -> None:
    """Quantize a model file to STEM-TYPE.gguf; prints the new files."""
    from esp_edge.models import hub  # noqa: PLC0415 - loads llama.cpp with its package
    from esp_edge.models import quantize as quantizer  # noqa: PLC0415

    names = quantizer.target_names(to.split(","))
    with Bar(f"downloading {source}", unit="bytes") as bar:
        path = hub.resolve(source, progress=bar.update_file)
    if out is None and not Path(source).exists():
        out = Path()  # beside a bundled or downloaded file nobody would look
    with warnings_as_notes(), Bar("quantizing", unit="percent") as bar:
        written = quantizer.quantize(
            path,
            names,
            out,
            overwrite=overwrite,
            threads=threads,
            progress=lambda name, part: bar.update(round(1000 * part), 1000, f"writing {name}"),
        )
    for file in written:
        write_text(f"{file}\n")
