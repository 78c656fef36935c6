"""Quantising with llama.cpp: names, files, progress, and what stays when something goes wrong."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from test_gguf import decode, split
from tiny_gguf import write_tiny

from esp_edge.errors import ConfigError, ModelFileError, UnsupportedModelError
from esp_edge.models import gguf
from esp_edge.models.quantize import TARGETS, QuantizationWarning, output_path, quantize, target_names


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "toy-F32.gguf", "llama")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct-Q8_0.gguf"),
        ("model-F16.gguf", "model-Q8_0.gguf"),
        ("model.fp16.gguf", "model-Q8_0.gguf"),
        ("model_q4_k_m.gguf", "model-Q8_0.gguf"),
        ("model-IQ2_XXS.gguf", "model-Q8_0.gguf"),
        ("model.gguf", "model-Q8_0.gguf"),
        ("model", "model-Q8_0.gguf"),
        ("model-BF16-00001-of-00003.gguf", "model-Q8_0.gguf"),
        ("Q4_0.gguf", "Q4_0-Q8_0.gguf"),
        ("v1.5.gguf", "v1.5-Q8_0.gguf"),
    ],
)
def test_output_name(name: str, expected: str) -> None:
    assert output_path(Path("d") / name, "Q8_0") == Path("d") / expected
    assert output_path(Path("d") / name, "Q8_0", Path("out")) == Path("out") / expected


def test_target_names() -> None:
    assert target_names(["q4_0", " Q8_0", "fp16", "Q4_0", "iq4_nl"]) == ["Q4_0", "Q8_0", "F16", "IQ4_NL"]
    assert {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K", "IQ4_XS"} <= TARGETS.keys()
    with pytest.raises(ConfigError, match=r"^a quantisation must be one of BF16, F16, .*TQ2_0, but 'Q9\\n' was given$"):
        target_names(["Q9\n"])
    with pytest.raises(ConfigError, match="name at least one quantisation, such as Q4_0"):
        target_names([])


@pytest.mark.parametrize("name", ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_M", "IQ3_XXS", "IQ3_XS", "Q2_K_S"])
def test_types_that_need_an_importance_matrix(name: str) -> None:
    expected = f"{name} needs an importance matrix, which esp-edge cannot make; use IQ4_XS, Q3_K_S or Q2_K instead"
    with pytest.raises(ConfigError) as caught:
        target_names([name])
    assert str(caught.value) == expected


# ------------------------------------------------------------------------------------------------------------ files


def test_files_and_progress(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    made = quantize(source, ["q8_0", "BF16"], tmp_path / "out" / "deep", progress=lambda *state: seen.append(state))
    assert made == [tmp_path / "out/deep/toy-Q8_0.gguf", tmp_path / "out/deep/toy-BF16.gguf"]
    assert [gguf.quant_name(gguf.preflight(path)) for path in made] == ["Q8_0", "BF16"]
    assert names(tmp_path / "out/deep") == ["toy-BF16.gguf", "toy-Q8_0.gguf"]
    for name in ("toy-Q8_0.gguf", "toy-BF16.gguf"):
        done = [fraction for file, fraction in seen if file == name]
        assert done == sorted(done)
        assert done[-1] == 1.0
        assert all(0 <= fraction <= 1 for fraction in done)


def test_values_are_those_of_the_type(source: Path) -> None:
    path = quantize(source, ["Q8_0"])[0]
    before = {t.name: np.array(t.data) for t in GGUFReader(source).tensors}
    for tensor in GGUFReader(path).tensors:
        wanted = before[tensor.name]
        if tensor.data.dtype == np.float32:
            assert np.array_equal(tensor.data, wanted)
        else:
            found = dequantize(tensor.data, tensor.tensor_type)
            assert np.abs(found - wanted).max() <= np.abs(wanted).max() / 127
    assert np.isfinite(decode(path)).all()


@pytest.mark.parametrize("name", ["F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"])
def test_types_that_fit_the_tiny_rows(source: Path, name: str) -> None:
    path = quantize(source, [name])[0]
    assert gguf.quant_name(gguf.preflight(path)) == name
    assert np.isfinite(decode(path)).all()


@pytest.mark.parametrize("name", sorted({"Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_S", "Q6_K", "IQ4_XS", "IQ3_S", "TQ2_0"}))
def test_k_quants_fall_back_where_rows_are_short(source: Path, name: str) -> None:
    path = quantize(source, [name])[0]  # rows of 64 and 128; k-quants need 256
    assert np.isfinite(decode(path)).all()


def test_k_quants(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "a-F32.gguf", "llama", n_embd=256, head_dim=64, n_ff=256, n_layer=1)
    path = quantize(source, ["Q4_K_M"])[0]
    assert gguf.read_header(path).tensors["blk.0.attn_q.weight"].type_name == "Q4_K"
    assert np.isfinite(decode(path)).all()


def test_mixture_of_experts_and_recurrent_models(tmp_path: Path) -> None:
    for arch in ("mixtral", "mamba"):
        path = quantize(write_tiny(tmp_path / f"{arch}.gguf", arch), ["Q8_0"])[0]
        assert np.isfinite(decode(path)).all()


def test_split_source(tmp_path: Path) -> None:
    parts = split(tmp_path)
    path = quantize(parts[0], ["F16"])[0]
    assert path == tmp_path / "big-F16.gguf"
    assert len(gguf.preflight(path).tensors) == len(gguf.read_header(tmp_path / "whole.gguf").tensors)


def test_threads(source: Path, tmp_path: Path) -> None:
    one, two = (
        quantize(source, ["Q4_0"], tmp_path / "a", threads=1),
        quantize(source, ["Q4_0"], tmp_path / "b", threads=2),
    )
    assert one[0].read_bytes() == two[0].read_bytes()


# ------------------------------------------------------------------------------------------------- again and again


def test_healthy_output_is_kept(source: Path) -> None:
    path = quantize(source, ["Q4_0"])[0]
    first = path.stat()
    seen: list[tuple[str, float]] = []
    assert quantize(source, ["Q4_0"], progress=lambda *state: seen.append(state)) == [path]
    assert seen == [("toy-Q4_0.gguf", 1.0)]
    assert path.stat().st_mtime_ns == first.st_mtime_ns
    assert quantize(source, ["Q4_0"], overwrite=True) == [path]
    assert path.stat().st_ino != first.st_ino


def test_damaged_or_foreign_output_is_made_again(source: Path) -> None:
    path = quantize(source, ["Q4_0"])[0]
    good = path.read_bytes()
    for content in (good[:-100], b"", source.read_bytes()):
        path.write_bytes(content)
        quantize(source, ["Q4_0"])
        assert path.read_bytes() == good


def test_output_that_is_the_input(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "toy-Q8_0.gguf", "llama", dtype="Q8_0")
    data = source.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        assert quantize(source, ["Q8_0"]) == [source]
        with pytest.raises(ConfigError, match=r"toy-Q8_0\.gguf: would replace its own input; choose another output"):
            quantize(source, ["Q8_0"], overwrite=True)
    assert source.read_bytes() == data


def test_requantising_warns(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "toy-Q8_0.gguf", "llama", dtype="Q8_0")
    with pytest.warns(
        QuantizationWarning, match=r"^toy-Q8_0\.gguf is quantised already \(Q8_0\): quantising again loses q"
    ):
        path = quantize(source, ["Q4_0"])[0]
    assert gguf.quant_name(gguf.preflight(path)) == "Q4_0"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize(source, ["F16"])


# --------------------------------------------------------------------------------------------------- what goes wrong


def test_broken_source(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        quantize(tmp_path / "none.gguf", ["Q4_0"])
    with pytest.raises(UnsupportedModelError, match="is an embedding model"):
        quantize(write_tiny(tmp_path / "b.gguf", "bert"), ["Q4_0"])
    assert names(tmp_path) == ["b.gguf"]


def test_failure_shows_the_log_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        quantize(source, ["Q1_0"])  # rows of 64 do not fill its blocks of 128, and it has no smaller kin
    assert str(caught.value).startswith(f"{source}: llama.cpp cannot write toy-Q1_0.gguf (")
    assert "no tensor type fallback is defined for type q1_0" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["toy-F32.gguf"]


def test_unknown_architecture_is_told_by_llama_cpp(tmp_path: Path) -> None:
    odd = {"general.architecture": "zzz"}
    odd |= {
        f"zzz.{key}": value for key, value in (("block_count", 2), ("context_length", 64), ("embedding_length", 64))
    }
    path = write_tiny(tmp_path / "a.gguf", "llama", metadata={**odd, "zzz.attention.head_count": 4})
    with pytest.raises(UnsupportedModelError, match=r"llama\.cpp cannot write a-Q4_0\.gguf"):
        quantize(path, ["Q4_0"])
    assert names(tmp_path) == ["a.gguf"]


def test_full_disk(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(
        ModelFileError, match=r"toy-Q4_0\.gguf: needs 0\.0 GB but the disk has 0\.0 GB free; make room or"
    ):
        quantize(source, ["Q4_0"])


def test_output_directory_that_cannot_be(source: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelFileError, match=r"toy-F32\.gguf: cannot be made \(File exists\); choose another output dir"
    ):
        quantize(source, ["Q4_0"], source)
    assert names(tmp_path) == ["toy-F32.gguf"]


def test_output_that_cannot_be_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", denied)
    with pytest.raises(ModelFileError, match=r"toy-Q4_0\.gguf: cannot be written \(Permission denied\)"):
        quantize(source, ["Q4_0"])
    assert names(tmp_path) == ["toy-F32.gguf"]


def test_interruption_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, ["Q4_0"], progress=stop)
    for thread in threading.enumerate():
        if thread.name.startswith("quantize"):
            thread.join()
    assert names(tmp_path) == ["toy-F32.gguf"]
