"""Quantise a GGUF into others, with llama.cpp's own quantiser."""

from __future__ import annotations

import math
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from esp_edge._runtime import captured_log, llama_cpp
from esp_edge.errors import ConfigError, ModelError, ModelFileError, UnsupportedModelError
from esp_edge.models import gguf
from esp_edge.models.gguf_checks import one_line

__all__ = ["TARGETS", "QuantizationWarning", "output_path", "quantize", "target_names"]

TARGETS: dict[str, int] = {
    name: number
    for number, name in gguf.FILE_TYPES.items()
    if not name.startswith(("IQ1", "IQ2", "IQ3_XXS", "IQ3_XS", "Q2_K_S", "NVFP4"))
}
"""Names that can be asked for -> llama.cpp's file types."""

NEEDS_IMATRIX = frozenset(
    name for name in gguf.FILE_TYPES.values() if name.startswith(("IQ1", "IQ2", "IQ3_X", "Q2_K_S"))
)
FULL_PRECISION = frozenset({"F32", "F16", "BF16"})

PART_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")
QUANT_SUFFIX = re.compile(
    rf"[.\-_](?:{'|'.join(sorted(gguf.FILE_TYPES.values(), key=len, reverse=True))}|FP16|FP32)$", re.IGNORECASE
)
PROGRESS_LINE = re.compile(r"^\[\s*(\d+)/\s*(\d+)\]")
POLL_SECONDS = 0.05
LOG_LINES = 3


class QuantizationWarning(UserWarning):
    """The source is quantised already, so the outputs are worse than those made from F16, BF16 or F32."""


@dataclass
class _Run:
    """One call of llama.cpp's quantiser in a thread of its own."""

    source: Path
    target: Path
    file_type: int
    threads: int
    requantize: bool
    status: int | None = None
    abandoned: bool = False
    log: list[str] = field(default_factory=list)

    def __call__(self) -> None:
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread, params.allow_requantize = self.file_type, self.threads, self.requantize
        self.status = llama_cpp.llama_model_quantize(os.fsencode(self.source), os.fsencode(self.target), params)
        if self.abandoned:
            self.target.unlink(missing_ok=True)

    def fraction(self) -> float:
        """Tensors done, 0..1, as the log tells."""
        for line in reversed(self.log[-50:]):
            match = PROGRESS_LINE.match(line)
            if match:
                return (int(match[1]) - 1) / max(1, int(match[2]))
        return 0.0

    def reason(self) -> str:
        """The last log lines, joined."""
        lines = [line.strip() for line in self.log if line.strip() and not PROGRESS_LINE.match(line)]
        return one_line(" | ".join(lines[-LOG_LINES:])) if lines else "llama.cpp gave no reason"


# ------------------------------------------------------------------------------------------------------------ names


def target_names(targets: Sequence[str]) -> list[str]:
    """Names of quantisations as llama.cpp writes them, each once.

    Raises:
        ConfigError: unknown, or one that needs an importance matrix.
    """
    names = []
    for target in targets:
        name = re.sub(r"^FP(?=16|32)", "F", target.strip().upper())
        if name in NEEDS_IMATRIX:
            raise ConfigError(
                f"{name} needs an importance matrix, which esp-edge cannot make; use IQ4_XS, Q3_K_S or Q2_K instead"
            )
        if name not in TARGETS:
            known = ", ".join(sorted(TARGETS))
            raise ConfigError(f"a quantisation must be one of {known}, but {one_line(repr(target), 40)} was given")
        names.append(name)
    if not names:
        raise ConfigError("name at least one quantisation, such as Q4_0")
    return list(dict.fromkeys(names))


def output_path(source: Path, name: str, out_dir: Path | None = None) -> Path:
    """``STEM-NAME.gguf`` beside the source or in ``out_dir``.

    >>> output_path(Path("m/SmolLM2-135M-Instruct.Q4_1.gguf"), "Q8_0").as_posix()
    'm/SmolLM2-135M-Instruct-Q8_0.gguf'
    """
    stem = PART_SUFFIX.sub("", source.name.removesuffix(".gguf"))
    stem = QUANT_SUFFIX.sub("", stem) or stem
    return (source.parent if out_dir is None else out_dir) / f"{stem}-{name}.gguf"


# ------------------------------------------------------------------------------------------------------------- work


def quantize(
    source: Path,
    targets: Sequence[str],
    out_dir: Path | None = None,
    *,
    progress: Callable[[str, float], None] | None = None,
    overwrite: bool = False,
    threads: int = 0,
) -> list[Path]:
    """Write a model in other quantisations; returns the paths, in the order of ``targets``.

    A healthy output that is already there is kept unless ``overwrite``: a stopped run goes on with what is missing.

    Args:
        source: a GGUF; the first part of a split one.
        targets: names such as ``Q4_0`` (:data:`TARGETS`), upper or lower case.
        out_dir: where to write; None = beside the source. Made if missing.
        progress: told (file name, part done 0..1).
        threads: 0 = all cores.

    Raises:
        ConfigError: unknown target, or an output that would replace its own input.
        ModelFileError: the source is broken, or an output cannot be written.
        UnsupportedModelError: llama.cpp cannot quantise it.

    Warns:
        QuantizationWarning: the source is quantised already.
    """
    names = target_names(targets)
    source = Path(source)
    header = gguf.preflight(source)
    requantize = gguf.quant_name(header) not in FULL_PRECISION
    if requantize and not FULL_PRECISION.issuperset(names):
        found = f"{source.name} is quantised already ({gguf.quant_name(header)})"
        warnings.warn(QuantizationWarning(f"{found}: quantising again loses quality"), stacklevel=2)
    outputs = [output_path(source, name, out_dir) for name in names]
    _make_directory(outputs[0].parent)
    for name, output in zip(names, outputs, strict=True):
        _make(header, name, output, _Options(progress, overwrite, threads, requantize))
    return outputs


@dataclass(frozen=True)
class _Options:
    progress: Callable[[str, float], None] | None
    overwrite: bool
    threads: int
    requantize: bool

    def report(self, name: str, fraction: float) -> None:
        if self.progress is not None:
            self.progress(name, fraction)


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = one_line(error.strerror or str(error))
        raise ModelFileError(f"{path}: cannot be made ({reason}); choose another output directory") from None


def _make(header: gguf.GGUFHeader, name: str, output: Path, options: _Options) -> None:
    same = output.exists() and output.samefile(header.path)
    if same and options.overwrite:
        raise ConfigError(f"{output}: would replace its own input; choose another output directory")
    if same or (not options.overwrite and _is_done(output, name, header)):
        options.report(output.name, 1.0)
        return
    _check_space(header, name, output)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        _run(_Run(header.path, temporary, TARGETS[name], options.threads, options.requantize), output.name, options)
        gguf.preflight(temporary)
        temporary.replace(output)
    except OSError as error:
        raise ModelFileError(f"{output}: cannot be written ({one_line(error.strerror or str(error))})") from None
    finally:
        with suppress(OSError):
            temporary.unlink()
    options.report(output.name, 1.0)


def _is_done(output: Path, name: str, header: gguf.GGUFHeader) -> bool:
    """An earlier output is kept if it is whole and what its name says."""
    try:
        found = gguf.preflight(output)
    except ModelError:
        return False
    return gguf.quant_name(found) == name and found.architecture == header.architecture


def _bytes_per_weight(name: str) -> float:
    """Of the type that most tensors get; a low guess for mixtures."""
    sizes = [size / block for kind, block, size in gguf.GGML_TYPES.values() if name.startswith(kind)]
    return max(sizes, default=0.25)


def _check_space(header: gguf.GGUFHeader, name: str, output: Path) -> None:
    shapes = [tensor.shape for part in gguf.read_parts(header) for tensor in part.tensors.values()]
    needed = sum(math.prod(shape) for shape in shapes) * _bytes_per_weight(name)
    with suppress(OSError):
        free = shutil.disk_usage(output.parent).free
        if free < needed:
            raise ModelFileError(
                f"{output}: needs {needed / 1e9:.1f} GB but the disk has {free / 1e9:.1f} GB free; "
                "make room or choose another output directory"
            )


def _run(run: _Run, name: str, options: _Options) -> None:
    """Wait for the quantiser, which cannot be interrupted, while reporting what its log says."""
    with captured_log() as log:
        run.log = log
        worker = threading.Thread(target=run, name=f"quantize {name}", daemon=True)
        worker.start()
        try:
            while worker.is_alive():
                options.report(name, run.fraction())
                worker.join(POLL_SECONDS)
        except BaseException:  # Ctrl-C: llama.cpp goes on for a while and then cleans up
            run.abandoned = True
            raise
    if run.status != 0:
        raise UnsupportedModelError(f"{run.source}: llama.cpp cannot write {name} ({run.reason()})")
