"""The GGUF reader and the preflight: what is read, and one exact line for every broken file."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_gguf import ARCHITECTURES, write_tiny

from esp_edge._runtime import captured_log, llama_cpp
from esp_edge.errors import ConfigError, ModelError, ModelFileError, UnsupportedModelError
from esp_edge.models import gguf

DECODERS = [arch for arch in ARCHITECTURES if arch != "bert"]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama")


def broken(path: Path, error: type[ModelError] = ModelFileError) -> str:
    """The message of a refused file, without its path."""
    with pytest.raises(ModelError) as caught:
        gguf.preflight(path)
    assert type(caught.value) is error
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def changed(healthy: Path, tmp_path: Path, *edits: tuple[int, bytes]) -> Path:
    """A copy with bytes replaced at offsets."""
    data = bytearray(healthy.read_bytes())
    for offset, new in edits:
        data[offset : offset + len(new)] = new
    path = tmp_path / "changed.gguf"
    path.write_bytes(data)
    return path


def written(tmp_path: Path, data: bytes, name: str = "model.gguf") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


# ---------------------------------------------------------------------------------------------------- what is read


def test_header_agrees_with_the_reference_reader(healthy: Path) -> None:
    header = gguf.preflight(healthy)
    reference = GGUFReader(healthy)
    assert header.version == 3
    assert header.alignment == 32
    assert header.data_offset == reference.data_offset
    assert {t.name: (t.offset, t.n_bytes, t.shape) for t in header.tensors.values()} == {
        t.name: (int(t.data_offset), int(t.n_bytes), tuple(map(int, t.shape))) for t in reference.tensors
    }
    for key, field in reference.fields.items():
        if key.startswith("GGUF.") or field.types[0] == GGUFValueType.ARRAY:
            continue
        assert header.metadata[key] == field.contents()


def test_tokenizer_arrays_stay_in_the_file(healthy: Path) -> None:
    header = gguf.read_header(healthy)
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, gguf.ArrayInfo)
    assert tokens.count == header.n_vocab == 300
    assert gguf.read_array(tokens)[-3:] == [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"]
    assert gguf.read_array(header.metadata["tokenizer.ggml.token_type"])[-4:] == [1, 3, 3, 3]


def test_small_arrays_are_lists(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "a.gguf", "llama", metadata={"general.tags": ["a", "b"], "x.floats": [0.5, 1.5]})
    metadata = gguf.read_header(path).metadata
    assert metadata["general.tags"] == ["a", "b"]
    assert metadata["x.floats"] == [0.5, 1.5]


@pytest.mark.model
def test_bundled_model(model_path: Path) -> None:
    header = gguf.preflight(model_path)
    path, tensor = gguf.embedding_tensor(header)
    assert (path, tensor.shape, tensor.type_name) == (model_path, (576, 49152), "Q8_0")
    assert gguf.quant_name(header) == "Q4_1"
    estimate = gguf.memory_estimate(header, 4096)
    assert estimate["kv_cache"] == 4096 * 30 * 2 * 3 * 64 * 2
    assert estimate["total"] == estimate["weights"] + estimate["kv_cache"] + estimate["compute"]


def test_quant_name_falls_back_to_the_largest_type(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "a.gguf", "llama", dtype="Q8_0", metadata={"general.file_type": None})
    assert gguf.quant_name(gguf.read_header(path)) == "Q8_0"
    path = write_tiny(tmp_path / "b.gguf", "llama", metadata={"general.file_type": 1024 + 15})
    assert gguf.quant_name(gguf.read_header(path)) == "Q4_K_M"


@pytest.mark.parametrize(
    ("arch", "metadata", "expected"),
    [
        ("llama", {}, 100 * 2 * 2 * (16 + 16) * 2),
        ("llama", {"llama.attention.head_count_kv": [4, 1]}, 100 * 5 * (16 + 16) * 2),
        ("mamba", {}, 4 * 2 * (3 * 128 + 128 * 16)),
        ("qwen2", {"qwen2.attention.key_length_mla": 16}, 100 * 2 * 2 * 16 * 2),
        ("qwen2", {"qwen2.attention.key_length": None, "qwen2.attention.value_length": None}, 100 * 2 * 2 * 32 * 2),
    ],
)
def test_kv_cache_estimate(tmp_path: Path, arch: str, metadata: dict[str, Any], expected: int) -> None:
    header = gguf.read_header(write_tiny(tmp_path / "a.gguf", arch, metadata=metadata))
    assert gguf.memory_estimate(header, 100)["kv_cache"] == expected


def test_quantised_cache_needs_less_and_unknown_types_are_refused(healthy: Path) -> None:
    header = gguf.read_header(healthy)
    f16, q8 = gguf.memory_estimate(header, 512), gguf.memory_estimate(header, 512, "q8_0", "q8_0")
    assert q8["kv_cache"] == f16["kv_cache"] * 34 // 64
    with pytest.raises(ConfigError, match="such as f16 or q8_0, but 'q9' was given"):
        gguf.memory_estimate(header, 512, "q9")


# ------------------------------------------------------------------------------------------- tiny models really run


def decode(path: Path, text: str = "hello the world") -> np.ndarray[Any, Any]:
    """Logits after a text, through llama.cpp's own tokenizer and one batch."""
    with captured_log() as log:
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        assert model, log[-3:]
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_threads, params.n_threads_batch = 128, 128, 1, 1
        context = llama_cpp.llama_init_from_model(model, params)
        assert context, log[-3:]
    vocab = llama_cpp.llama_model_get_vocab(model)
    ids = (llama_cpp.llama_token * 64)()
    n = llama_cpp.llama_tokenize(vocab, text.encode(), len(text.encode()), ids, 64, True, True)
    assert 0 < n < 64
    assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, n)) == 0
    pointer = ctypes.cast(llama_cpp.llama_get_logits_ith(context, -1), ctypes.POINTER(ctypes.c_float))
    logits = np.ctypeslib.as_array(pointer, (llama_cpp.llama_vocab_n_tokens(vocab),)).copy()
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return logits


@pytest.mark.parametrize("dtype", ["F32", "Q8_0"])
@pytest.mark.parametrize("arch", DECODERS)
def test_tiny_models_pass_the_preflight_and_decode(tmp_path: Path, arch: str, dtype: str) -> None:
    path = write_tiny(tmp_path / "a.gguf", arch, dtype=dtype)
    assert path.stat().st_size < 2_000_000
    assert gguf.preflight(path).architecture == ("llama" if arch == "mixtral" else arch)
    logits = decode(path)
    assert np.isfinite(logits).all()
    assert logits.std() > 0.1


@pytest.mark.parametrize(("dtype", "sizes"), [("F16", {}), ("BF16", {"n_vocab": 32}), ("Q4_0", {"n_layer": 1})])
def test_tiny_model_options(tmp_path: Path, dtype: str, sizes: dict[str, int]) -> None:
    path = write_tiny(tmp_path / "a.gguf", "llama", dtype=dtype, seed=3, **sizes)
    header = gguf.preflight(path)
    assert header.n_vocab == sizes.get("n_vocab", 300)
    assert np.isfinite(decode(path)).all()
    assert path.read_bytes() == write_tiny(tmp_path / "b.gguf", "llama", dtype=dtype, seed=3, **sizes).read_bytes()


def test_sentencepiece_vocabulary_on_any_architecture(tmp_path: Path) -> None:
    assert np.isfinite(decode(write_tiny(tmp_path / "a.gguf", "qwen3", tokenizer="llama"), "é")).all()


# -------------------------------------------------------------------------------------------- files that are no GGUF


def test_missing_file(tmp_path: Path) -> None:
    expected = "no such file; check the path (models from Hugging Face are written owner/repo)"
    assert broken(tmp_path / "none.gguf") == expected


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    assert "cannot be opened (File name too long)" in broken(tmp_path / ("x" * 300))
    with pytest.raises(ModelFileError, match=r"a\\x00b: cannot be opened \(.*null byte.*\); check the path"):
        gguf.preflight("a\0b")
    assert "cannot be opened (Not a directory)" in broken(written(tmp_path, b"x") / "model.gguf")


def test_directory(tmp_path: Path) -> None:
    assert broken(tmp_path) == (
        "is a directory, a GGUF file was expected (it holds no .gguf file); name the file itself"
    )
    written(tmp_path, b"x", "b.gguf")
    written(tmp_path, b"x", "a.gguf")
    assert "(it holds a.gguf, b.gguf)" in broken(tmp_path)


def test_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert broken(tmp_path / "pipe.gguf") == "is not a regular file; copy the model to a file first"


def test_unreadable_file(healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, healthy.read_bytes())

    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # file modes do not stop root
    assert broken(path) == "may not be read by this user; change its permissions"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "is empty (0 bytes); download it again"),
        (
            b"\n<!DOCTYPE html><html>404</html>",
            "is a web page, not a GGUF file; download the file itself (the 'resolve' link, not the 'blob' page)",
        ),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n",
            "is a Git LFS pointer, not the model itself; run 'git lfs pull' beside it or download the file",
        ),
        (
            b'\x40\x00\x00\x00\x00\x00\x00\x00{"__metadata__":{}}',
            "is a safetensors file; use a GGUF of this model or convert it with convert_hf_to_gguf.py",
        ),
        (
            b"PK\x03\x04archive/data.pkl",
            "is a zip archive (a PyTorch checkpoint?); use a GGUF of this model or convert it",
        ),
        (b"\x80\x02}q\x00.", "is a Python pickle (a PyTorch checkpoint?); use a GGUF of this model or convert it"),
        (b"tjgg\x03\x00\x00\x00", "is in a format older than GGUF; get a GGUF of this model"),
        (b"\x1f\x8b\x08\x00", "is compressed; unpack it first"),
        (
            b'{"error":"Access denied"}',
            "is a JSON document (an error message of the server?), not a GGUF file; download it again",
        ),
        (bytes(64), "starts with zeros, so its download never finished; download it again"),
        (
            b"\xb8GUF" + bytes(60),
            "is damaged: it starts with the bytes b8 47 55 46 instead of 47 47 55 46 ('GGUF'); download it again",
        ),
        (
            b"hello",
            "is not a GGUF file: it starts with the bytes 68 65 6c 6c instead of 47 47 55 46 ('GGUF'); check the path",
        ),
        (b"GG", "is not a GGUF file: it starts with the bytes 47 47 instead of 47 47 55 46 ('GGUF'); check the path"),
        (b"GGUF", "is truncated or damaged: its 4 bytes end inside the version; download it again"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, data: bytes, expected: str) -> None:
    assert broken(written(tmp_path, data)) == expected


# ------------------------------------------------------------------------------------------------ damaged structure


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (
            99,
            "is GGUF version 99, this program reads 2 and 3; "
            "update esp-edge, or download it again if it should not be that new",
        ),
        (1, "is GGUF version 1, this program reads 2 and 3; convert the model again"),
        (0x03000000, "was written for a big-endian machine; get the little-endian GGUF of this model"),
    ],
)
def test_versions(healthy: Path, tmp_path: Path, version: int, expected: str) -> None:
    assert broken(changed(healthy, tmp_path, (4, struct.pack("<I", version)))) == expected


def test_absurd_counts_are_refused_at_once(healthy: Path, tmp_path: Path) -> None:
    size = healthy.stat().st_size
    for offset, what in ((8, "tensors"), (16, "metadata entries")):
        message = broken(changed(healthy, tmp_path, (offset, struct.pack("<Q", 1 << 60))))
        assert message == f"is damaged: it claims {1 << 60} {what} in {size} bytes; download it again"
    message = broken(changed(healthy, tmp_path, (24, struct.pack("<Q", 1 << 60))))
    assert message == f"is damaged: metadata key 0 claims a text of {1 << 60} bytes; download it again"


def test_absurd_array_length(healthy: Path, tmp_path: Path) -> None:
    place = healthy.read_bytes().index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    message = broken(changed(healthy, tmp_path, (place, struct.pack("<Q", 1 << 60))))
    assert message == f"is damaged: metadata key 'tokenizer.ggml.tokens' claims {1 << 60} elements; download it again"


def test_truncated_header(healthy: Path, tmp_path: Path) -> None:
    data = healthy.read_bytes()
    place = data.index(b"tokenizer.ggml.merges")
    assert broken(written(tmp_path, data[: place + 40])) == (
        f"is truncated or damaged: its {place + 40} bytes end inside metadata key 'tokenizer.ggml.merges'; "
        "download it again"
    )


def test_truncated_tensor_data(healthy: Path, tmp_path: Path) -> None:
    data = healthy.read_bytes()
    assert broken(written(tmp_path, data[:-1000])) == (
        f"is truncated: it has {len(data) - 1000} of {len(data)} bytes "
        "and tensor 'blk.1.ffn_gate.weight' is not complete; download it again"
    )


def test_tensor_outside_the_file(healthy: Path, tmp_path: Path) -> None:
    place = healthy.read_bytes().index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8 + 4
    message = broken(changed(healthy, tmp_path, (place, struct.pack("<Q", 1 << 40))))
    assert (
        message
        == f"is damaged: the data of tensor 'output_norm.weight' is at {1 << 40}, not at 76800; download it again"
    )


def test_unknown_tensor_type(healthy: Path, tmp_path: Path) -> None:
    place = healthy.read_bytes().index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    for kind in (4, 31, 43, 1 << 31):  # dropped types, one too many, negative
        message = broken(changed(healthy, tmp_path, (place, struct.pack("<I", kind))))
        assert message == (
            f"tensor 'output_norm.weight' has the unknown type {kind}; "
            "the file is damaged or newer than this program: download it again or update esp-edge"
        )


def test_row_that_is_no_multiple_of_the_block(healthy: Path, tmp_path: Path) -> None:
    place = healthy.read_bytes().index(b"output_norm.weight") + len("output_norm.weight") + 4
    message = broken(changed(healthy, tmp_path, (place, struct.pack("<QI", 60, 2))))
    assert message == (
        "is damaged: rows of tensor 'output_norm.weight' have 60 elements, Q4_0 needs a multiple of 32; "
        "download it again"
    )


def test_repeated_tensor_and_repeated_key(healthy: Path, tmp_path: Path) -> None:
    data = healthy.read_bytes()
    place = data.index(b"blk.1.attn_q.weight")
    assert broken(changed(healthy, tmp_path, (place, b"blk.0.attn_q.weight"))) == (
        "is damaged: tensor 'blk.0.attn_q.weight' is there twice; download it again"
    )
    place = data.index(b"llama.context_length")
    assert broken(changed(healthy, tmp_path, (place, b"general.architecture"))) == (
        "is damaged: metadata key 'general.architecture' is repeated; download it again"
    )


@pytest.mark.parametrize("alignment", [0, 48, 3])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    path = write_tiny(tmp_path / "a.gguf", "llama", metadata={"general.alignment": 32})
    place = path.read_bytes().index(b"general.alignment") + len("general.alignment") + 4
    message = broken(changed(path, tmp_path, (place, struct.pack("<I", alignment))))
    assert message == f"is damaged: its alignment is {alignment}, a power of two was expected; download it again"


def test_bad_names_cannot_break_the_line(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "a\nb.gguf", "llama", tensors={"evil\n\x1b[31m": np.ones(4, np.float32)})
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    with pytest.raises(
        ModelFileError, match=r"a\\nb\.gguf: is truncated: .*tensor 'evil\\n\\x1b\[31m' is not complete"
    ):
        gguf.preflight(path)


# ------------------------------------------------------------------------------------------------------ split files


def split(tmp_path: Path, count: int = 3) -> list[Path]:
    """A llama in parts: everything but two layers' worth of tensors in the first."""
    paths = [tmp_path / f"big-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    whole = gguf.read_header(write_tiny(tmp_path / "whole.gguf", "llama", n_layer=count - 1))
    reader = {t.name: np.array(t.data) for t in GGUFReader(whole.path).tensors}
    for index, path in enumerate(paths):
        mine = {n for n in reader if (int(n.split(".")[1]) + 1 if n.startswith("blk.") else 0) == index}
        entries: dict[str, Any] = {
            "split.no": (index, GGUFValueType.UINT16),
            "split.count": (count, GGUFValueType.UINT16),
            "split.tensors.count": (len(reader), GGUFValueType.INT32),
        }
        write_tiny(
            path, "llama", n_layer=count - 1, metadata=entries, tensors={n: None for n in reader if n not in mine}
        )
    return paths


def test_split_model_is_read_whole(tmp_path: Path) -> None:
    paths = split(tmp_path)
    header = gguf.preflight(paths[0])
    whole = gguf.read_header(tmp_path / "whole.gguf")
    assert [part.path for part in gguf.read_parts(header)] == paths
    assert gguf.embedding_tensor(header)[0] == paths[0]
    assert gguf.memory_estimate(header, 64) == gguf.memory_estimate(whole, 64)
    assert np.array_equal(decode(paths[0]), decode(whole.path))


def test_part_2_of_3(tmp_path: Path) -> None:
    paths = split(tmp_path)
    assert broken(paths[1]) == "is part 2 of 3; give the first part: big-00001-of-00003.gguf"


def test_missing_and_foreign_parts(tmp_path: Path) -> None:
    paths = split(tmp_path)
    data = paths[2].read_bytes()
    paths[2].unlink()
    assert broken(paths[0]) == (
        "is part 1 of 3, but 1 of the others are not beside it; download big-00003-of-00003.gguf"
    )
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(ModelFileError, match=r"00003-of-00003\.gguf: is not part 3 of this model; download it again"):
        gguf.preflight(paths[0])
    paths[2].write_bytes(data[:-10])
    with pytest.raises(ModelFileError, match=r"00003-of-00003\.gguf: is truncated"):
        gguf.preflight(paths[0])
    paths[2].write_bytes(data)
    paths[0].rename(tmp_path / "renamed.gguf")
    assert broken(tmp_path / "renamed.gguf") == (
        "is part 1 of 3 but its name does not say so; give it back the name that ends in -00001-of-00003.gguf"
    )


# -------------------------------------------------------------------------------- healthy files of the wrong kind


@pytest.mark.parametrize(
    ("arch", "metadata", "expected"),
    [
        (
            "bert",
            {},
            "is an embedding model (architecture bert) and cannot generate text; "
            "use a text-generating model such as Llama, Qwen, Gemma, Phi or SmolLM",
        ),
        ("llama", {"general.architecture": "clip"}, "is the vision or audio part of a multimodal model (mmproj) (arch"),
        ("llama", {"general.architecture": "nomic-bert"}, "is an embedding model (architecture nomic-bert)"),
        ("llama", {"general.architecture": "t5"}, "is an encoder-decoder model (architecture t5)"),
        ("llama", {"general.architecture": "dream"}, "is a diffusion model"),
        ("llama", {"general.architecture": "eagle3"}, "is a drafter that only runs beside its target model"),
        ("llama", {"general.type": "adapter"}, "is a LoRA adapter, not a model; give the model it belongs to"),
        ("llama", {"general.type": "imatrix"}, "is an importance matrix for quantising, not a model"),
        ("llama", {"general.type": "mmproj"}, "is the vision or audio part of a multimodal model (mmproj); give the"),
        ("llama", {"llama.attention.causal": False}, "is an embedding model (its attention is not causal)"),
        ("llama", {"tokenizer.ggml.model": "none"}, "has no tokenizer for generating (tokenizer.ggml.model is 'none')"),
        (
            "llama",
            {"tokenizer.ggml.model": None},
            "has no tokenizer; get a GGUF of this model that includes its tokenizer",
        ),
        ("llama", {"llama.nextn_predict_layers": 2}, "holds only layers for multi-token prediction"),
    ],
)
def test_unsupported_models(tmp_path: Path, arch: str, metadata: dict[str, Any], expected: str) -> None:
    path = write_tiny(tmp_path / "a.gguf", arch, metadata=metadata)
    assert broken(path, UnsupportedModelError).startswith(expected)


def test_vocabulary_without_weights(tmp_path: Path, healthy: Path) -> None:
    names = dict.fromkeys(gguf.read_header(healthy).tensors)
    path = write_tiny(tmp_path / "a.gguf", "llama", tensors=names)
    expected = "holds a vocabulary but no weights; give the GGUF with the weights"
    assert broken(path, UnsupportedModelError) == expected


# --------------------------------------------------------------------------- contents llama.cpp would abort or die on


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (
            {"general.architecture": ""},
            "does not say its architecture (general.architecture); get another GGUF of this model",
        ),
        ({"llama.block_count": 0}, "claims 0 layers, 1 to 512 were expected; get another GGUF of this model"),
        ({"llama.block_count": 10**9}, "claims 1000000000 layers, 1 to 512 were expected"),
        ({"llama.block_count": None}, "lacks the number llama.block_count"),
        ({"llama.block_count": "two"}, "llama.block_count is 'two', a whole number was expected"),
        ({"llama.context_length": 0}, "context_length is 0, a positive number was expected"),
        (
            {"llama.embedding_length": 32},
            "token_embd.weight has the shape [64, 300] but embedding length and vocabulary say [32, 300]",
        ),
        ({"llama.attention.head_count": 0}, "claims 0 attention heads over 2 key-value heads"),
        (
            {"llama.attention.head_count": 3},
            "claims 3 attention heads over 2 key-value heads, which do not fit together",
        ),
        ({"llama.attention.head_count_kv": 0}, "claims 4 attention heads over 0 key-value heads"),
        ({"llama.attention.head_count_kv": [2, 0]}, "claims 4 attention heads over 0 key-value heads"),
        (
            {"llama.attention.head_count_kv": [2, 2, 2]},
            "llama.attention.head_count_kv is [2, 2, 2], one whole number or 2 of",
        ),
        ({"llama.attention.head_count": 2}, "layer 0 takes 64 numbers from its attention heads, which give 32"),
        ({"llama.attention.value_length": 8}, "claims keys of 16 and values of 8 numbers, which do not fit together"),
        ({"llama.rope.dimension_count": 32}, "rotates 32 of the 16 numbers of a key, which is impossible here"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of the 16 numbers of a key, which is impossible here"),
        (
            {"llama.rope.scaling.type": "su"},
            "rope.scaling.type is 'su', one of none, linear, yarn, longrope was expected",
        ),
        ({"llama.expert_count": 4}, "claims 4 experts, 0 used, in 0 groups, which do not fit together"),
        ({"llama.expert_count": 5000, "llama.expert_used_count": 2}, "claims 5000 experts, 2 used, in 0 groups"),
        (
            {"llama.attention.layer_norm_rms_epsilon": -1.0},
            "attention.layer_norm_rms_epsilon is -1.0, a small positive",
        ),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "attention.layer_norm_rms_epsilon is nan, a small"),
        (
            {"llama.attention.sliding_window": 8, "llama.attention.sliding_window_pattern": 1},
            "has a sliding window of 8 tokens",
        ),
        ({"tokenizer.ggml.eos_token_id": 300}, "tokenizer.ggml.eos_token_id is 300 but the vocabulary has 300 tokens"),
        (
            {"tokenizer.ggml.bos_token_id": 10**6},
            "tokenizer.ggml.bos_token_id is 1000000 but the vocabulary has 300 tokens",
        ),
        (
            {"tokenizer.ggml.tokens": None},
            "token_embd.weight has the shape [64, 300] but embedding length and vocabulary say [64, 0]",
        ),
        (
            {"tokenizer.ggml.pre": "glm4", "tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True},
            "wants BOS in front or at the end of every prompt but has no such token",
        ),
    ],
)
def test_hyperparameters(tmp_path: Path, metadata: dict[str, Any], expected: str) -> None:
    assert broken(write_tiny(tmp_path / "a.gguf", "llama", metadata=metadata)).startswith(expected)


def test_tokens(tmp_path: Path, healthy: Path) -> None:
    tokens = [t.decode() for t in gguf.read_array(gguf.read_header(healthy).metadata["tokenizer.ggml.tokens"])]
    twice = [*tokens[:20], tokens[3], *tokens[21:]]
    path = write_tiny(tmp_path / "a.gguf", "llama", metadata={"tokenizer.ggml.tokens": twice})
    assert broken(path) == (
        f"tokens 3 and 20 are both {tokens[3]!r}; llama.cpp needs each text once; get another GGUF of this model"
    )
    same_to_c = [*tokens[:20], tokens[3] + "\0x", *tokens[21:]]
    path = write_tiny(tmp_path / "a.gguf", "llama", metadata={"tokenizer.ggml.tokens": same_to_c})
    assert broken(path).startswith("tokens 3 and 20 are both")
    path = write_tiny(tmp_path / "a.gguf", "llama", metadata={"tokenizer.ggml.tokens": tokens[:-1]})
    assert "embedding length and vocabulary say [64, 299]" in broken(path)


def test_sentencepiece_needs_its_byte_tokens(tmp_path: Path) -> None:
    whole = gguf.read_header(write_tiny(tmp_path / "a.gguf", "gemma2"))
    tokens = [t.decode() for t in gguf.read_array(whole.metadata["tokenizer.ggml.tokens"])]
    tokens[tokens.index("<0xC3>")] = "<0xZZ>"
    path = write_tiny(tmp_path / "a.gguf", "gemma2", metadata={"tokenizer.ggml.tokens": tokens})
    assert broken(path) == "its vocabulary lacks the byte tokens <0xC3>; get another GGUF of this model"


@pytest.mark.parametrize(
    ("arch", "name", "data", "expected"),
    [
        ("llama", "token_embd.weight", None, "has no tensor token_embd.weight; get another GGUF of this model"),
        ("llama", "token_embd.weight", np.ones((300, 32), np.float32), "token_embd.weight has the shape [32, 300] but"),
        (
            "llama",
            "blk.0.attn_q.weight",
            np.ones((64, 64), np.int32),
            "tensor 'blk.0.attn_q.weight' has the type I32, which",
        ),
        (
            "llama",
            "output_norm.weight",
            np.ones(64, np.float16),
            "tensor 'output_norm.weight' has the type F16, F32 was expected",
        ),
        ("llama", "rope_freqs.weight", np.ones(8, np.float16), "tensor 'rope_freqs.weight' has the type F16, F32 was"),
        (
            "mamba",
            "blk.0.ssm_a",
            np.ones((128, 16), np.float64),
            "tensor 'blk.0.ssm_a' has the type F64, F32 was expected",
        ),
        ("phi3", "blk.1.attn_qkv.weight", None, "layer 1 has no tensor for its queries (attn_q or attn_qkv)"),
    ],
)
def test_tensors(tmp_path: Path, arch: str, name: str, data: Any, expected: str) -> None:
    assert broken(write_tiny(tmp_path / "a.gguf", arch, tensors={name: data})).startswith(expected)


def test_sizes_of_layers_without_experts_used(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "a.gguf", "mixtral", metadata={"llama.expert_used_count": [2, 0]})
    assert broken(path).startswith("claims 4 experts, 2 used, in 0 groups, which do not fit together")


# --------------------------------------------------------------------------------- never anything but a ModelError


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes_give_a_header_or_a_model_error(healthy: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(healthy.read_bytes())
    end = gguf.read_header(healthy).data_offset
    interesting = st.sampled_from([0, 1, 0x7F, 0x80, 0xFF])
    for place in data.draw(st.lists(st.integers(0, end - 1), max_size=4)):
        content[place] = data.draw(interesting | st.integers(0, 255))
    for place in data.draw(st.lists(st.integers(0, end - 8), max_size=1)):
        content[place : place + 8] = struct.pack("<Q", data.draw(st.sampled_from([0, 1 << 31, 1 << 60, (1 << 64) - 1])))
    length = data.draw(st.sampled_from([len(content), len(content) - 1]) | st.integers(0, len(content)))
    path = written(tmp_path, bytes(content[:length]))
    message = f"{path}: "
    try:
        header = gguf.preflight(path)
        gguf.memory_estimate(header, 512)
        gguf.quant_name(header)
    except ModelError as error:
        message = str(error)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300), magic=st.booleans())
def test_random_bytes(tmp_path: Path, content: bytes, magic: bool) -> None:
    path = written(tmp_path, b"GGUF\x03\0\0\0" + content if magic else content)
    with pytest.raises(ModelError):
        gguf.preflight(path)
