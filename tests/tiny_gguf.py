"""Tiny random GGUF models that llama.cpp really loads and decodes: a few layers of noise and a vocabulary of letters.

``write_tiny(path, "llama")`` writes about 200 kB in well under half a second. ``metadata`` and ``tensors`` replace,
add or (with None) leave out single entries, which is how the tests make broken files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

__all__ = ["ARCHITECTURES", "CHATML", "Shape", "write_tiny"]

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmoe", "mixtral", "mamba", "bert")
SPM_ARCHITECTURES = ("gemma2", "gemma3", "phi3")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3}

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny model; head_dim is that of keys and values."""

    n_vocab: int = 300
    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 16
    n_ff: int = 128
    n_ctx: int = 512
    n_expert: int = 4
    n_expert_used: int = 2
    window: int = 8


# ------------------------------------------------------------------------------------------------------- vocabulary


def _byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each byte, in byte order."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in shown}
    symbols |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in symbols)}
    return [symbols[byte] for byte in range(256)]


def _merges(count: int) -> list[tuple[str, str]]:
    """Merges whose parts exist: some English ones, then pairs of letters."""
    known = ["Ġ t", "h e", "Ġt he", "i n", "a n", "Ġ a", "e r", "o n", "r e", "Ġ s", "a t", "Ġ w", "o r", "Ġan d"]
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    pairs = [f"{a} {b}" for a in letters for b in letters]
    parts = [tuple(text.split(" ")) for text in dict.fromkeys(known + pairs)]
    unique = {a + b: (a, b) for a, b in parts}
    return list(unique.values())[:count]


def _bpe_vocabulary(n_vocab: int) -> dict[str, Any]:
    symbols = _byte_symbols()
    if n_vocab < 256 + len(SPECIALS):  # only the commonest letters
        wanted = b" etaoinshrdlucmfwypvbgkjqxz\n.,!?'-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        symbols = [symbols[byte] for byte in wanted][: n_vocab - len(SPECIALS)]
    merges = _merges(n_vocab - len(SPECIALS) - len(symbols))
    tokens = [*symbols, *(a + b for a, b in merges), *SPECIALS]
    types = [NORMAL] * (len(tokens) - len(SPECIALS)) + [CONTROL] * len(SPECIALS)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges] or ["e t"],
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
    }


def _spm_vocabulary(n_vocab: int) -> dict[str, Any]:
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", *"etaoinshrdlucmfwypvbgkjqxz", "th", "he", "▁t", "▁th", "▁the", "in", "an", "▁a", "er", "on", "re"]
    words += [a + b for a in "etaoinshrdlu" for b in "etaoinshrdlu"]
    words = list(dict.fromkeys(words))[: n_vocab - len(head) - 2]
    tokens = [*head, *words, *SPECIALS[1:]]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(head) + [-float(i) for i in range(len(words))] + [0.0, 0.0],
        "tokenizer.ggml.token_type": [UNKNOWN, *[CONTROL] * 2, *[BYTE] * 256, *[NORMAL] * len(words), *[CONTROL] * 2],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def _bert_vocabulary(n_vocab: int) -> dict[str, Any]:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"▁word{i}" for i in range(n_vocab - 5))]
    names = {"padding": 0, "unknown": 1, "bos": 2, "eos": 3, "seperator": 3, "mask": 4, "cls": 2}
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 5 + [NORMAL] * (len(tokens) - 5),
        "tokenizer.ggml.token_type_count": 2,
    } | {f"tokenizer.ggml.{name}_token_id": value for name, value in names.items()}


def _vocabulary(arch: str, n_vocab: int, tokenizer: str | None) -> dict[str, Any]:
    kind = tokenizer or ("bert" if arch == "bert" else "llama" if arch in SPM_ARCHITECTURES else "gpt2")
    return {"bert": _bert_vocabulary, "llama": _spm_vocabulary, "gpt2": _bpe_vocabulary}[kind](n_vocab)


# -------------------------------------------------------------------------------------------------- hyperparameters


def _hyperparameters(arch: str, s: Shape) -> dict[str, Any]:
    values: dict[str, Any] = {
        "context_length": s.n_ctx,
        "embedding_length": s.n_embd,
        "block_count": s.n_layer,
        "feed_forward_length": s.n_ff,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    if arch == "mamba":
        return values | {
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 2 * s.n_embd,
            "ssm.state_size": 16,
            "ssm.time_step_rank": 4,
        }
    values |= {
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head if arch in ("bert", "olmoe") else s.n_head_kv,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "rope.dimension_count": s.head_dim,
        "rope.freq_base": 10000.0,
    }
    if arch in ("gemma2", "gemma3"):
        values |= {"attention.sliding_window": s.window, "final_logit_softcapping": 30.0}
    if arch == "gemma2":
        values |= {"attn_logit_softcapping": 50.0}
    if arch in ("olmoe", "mixtral"):
        values |= {"expert_count": s.n_expert, "expert_used_count": s.n_expert_used}
    if arch == "bert":
        values |= {"attention.causal": False, "attention.layer_norm_epsilon": 1e-12, "pooling_type": 1}
    return values


# ---------------------------------------------------------------------------------------------------------- weights


class _Noise:
    """Random tensors, numpy order: (rows, row length)."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.tensors: dict[str, Array] = {}

    def matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        scale = gain / np.sqrt(shape[-1])
        self.tensors[name] = (self.rng.standard_normal(shape) * scale).astype(np.float32)

    def vector(self, name: str, length: int, around: float = 1.0) -> None:
        self.tensors[name] = (around + 0.1 * self.rng.standard_normal(length)).astype(np.float32)


def _attention(noise: _Noise, arch: str, block: str, s: Shape) -> None:
    kv_heads = s.n_head if arch in ("bert", "olmoe") else s.n_head_kv
    q_size, kv_size = s.n_head * s.head_dim, kv_heads * s.head_dim
    if arch == "phi3":
        noise.matrix(f"{block}.attn_qkv.weight", q_size + 2 * kv_size, s.n_embd)
    else:
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            noise.matrix(f"{block}.attn_{name}.weight", size, s.n_embd)
            if arch in ("qwen2", "bert"):
                noise.vector(f"{block}.attn_{name}.bias", size, 0.0)
    noise.matrix(f"{block}.attn_output.weight", s.n_embd, q_size)
    if arch in ("qwen3", "gemma3", "olmoe"):
        whole = arch == "olmoe"
        noise.vector(f"{block}.attn_q_norm.weight", q_size if whole else s.head_dim)
        noise.vector(f"{block}.attn_k_norm.weight", kv_size if whole else s.head_dim)


def _feed_forward(noise: _Noise, arch: str, block: str, s: Shape) -> None:
    if arch in ("olmoe", "mixtral"):
        noise.matrix(f"{block}.ffn_gate_inp.weight", s.n_expert, s.n_embd)
        for name, rows, length in (("gate", s.n_ff, s.n_embd), ("up", s.n_ff, s.n_embd), ("down", s.n_embd, s.n_ff)):
            noise.matrix(f"{block}.ffn_{name}_exps.weight", s.n_expert, rows, length)
        return
    noise.matrix(f"{block}.ffn_up.weight", s.n_ff * (2 if arch == "phi3" else 1), s.n_embd)
    noise.matrix(f"{block}.ffn_down.weight", s.n_embd, s.n_ff)
    if arch not in ("phi3", "bert"):
        noise.matrix(f"{block}.ffn_gate.weight", s.n_ff, s.n_embd)


def _transformer_block(noise: _Noise, arch: str, block: str, s: Shape) -> None:
    _attention(noise, arch, block, s)
    _feed_forward(noise, arch, block, s)
    norms = ["attn_norm", "ffn_norm"]
    if arch in ("gemma2", "gemma3"):
        norms += ["post_attention_norm", "post_ffw_norm"]
    if arch == "bert":
        norms = ["attn_output_norm", "layer_output_norm"]
    for name in norms:
        noise.vector(f"{block}.{name}.weight", s.n_embd)
        if arch == "bert":
            noise.vector(f"{block}.{name}.bias", s.n_embd, 0.0)


def _mamba_block(noise: _Noise, block: str, s: Shape) -> None:
    inner, state, rank = 2 * s.n_embd, 16, 4
    noise.vector(f"{block}.attn_norm.weight", s.n_embd)
    noise.matrix(f"{block}.ssm_in.weight", 2 * inner, s.n_embd)
    noise.matrix(f"{block}.ssm_conv1d.weight", inner, 4)
    noise.vector(f"{block}.ssm_conv1d.bias", inner, 0.0)
    noise.matrix(f"{block}.ssm_x.weight", rank + 2 * state, inner)
    noise.matrix(f"{block}.ssm_dt.weight", inner, rank)
    noise.vector(f"{block}.ssm_dt.bias", inner, -1.0)
    noise.tensors[f"{block}.ssm_a"] = -np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1))
    noise.vector(f"{block}.ssm_d", inner)
    noise.matrix(f"{block}.ssm_out.weight", s.n_embd, inner)


def _weights(arch: str, s: Shape, n_vocab: int, seed: int) -> dict[str, Array]:
    noise = _Noise(seed)
    noise.matrix("token_embd.weight", n_vocab, s.n_embd, gain=2.0)
    if arch == "bert":
        noise.matrix("position_embd.weight", s.n_ctx, s.n_embd)
        noise.matrix("token_types.weight", 2, s.n_embd)
        noise.vector("token_embd_norm.weight", s.n_embd)
        noise.vector("token_embd_norm.bias", s.n_embd, 0.0)
    else:
        noise.vector("output_norm.weight", s.n_embd)
    if arch not in ("bert", "gemma2", "gemma3"):
        noise.matrix("output.weight", n_vocab, s.n_embd, gain=4.0)
    for index in range(s.n_layer):
        if arch == "mamba":
            _mamba_block(noise, f"blk.{index}", s)
        else:
            _transformer_block(noise, arch, f"blk.{index}", s)
    return noise.tensors


# ---------------------------------------------------------------------------------------------------------- writing


def _add_metadata(writer: GGUFWriter, key: str, value: Any) -> None:
    v = GGUFValueType
    kinds = {bool: v.BOOL, int: v.UINT32, float: v.FLOAT32, str: v.STRING}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], GGUFValueType):
        writer.add_key_value(key, value[0], value[1])
    elif isinstance(value, list):
        element = GGUFValueType.INT32 if value and type(value[0]) is int else None
        writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=element)
    else:
        writer.add_key_value(key, value, kinds[type(value)])


def _add_tensor(writer: GGUFWriter, name: str, data: NDArray[Any], dtype: str) -> None:
    kind = GGMLQuantizationType[dtype]
    keep = data.ndim < 2 or data.dtype != np.float32 or any(part in name for part in ("conv1d", "gate_inp", "ssm_a"))
    if keep or kind == GGMLQuantizationType.F32 or data.shape[-1] % 32:
        writer.add_tensor(name, data)
    elif kind == GGMLQuantizationType.F16:
        writer.add_tensor(name, data.astype(np.float16))
    else:
        writer.add_tensor(name, quantize(data, kind), raw_dtype=kind)


def write_tiny(
    path: str | os.PathLike[str],
    arch: str = "llama",
    *,
    seed: int = 0,
    chat_template: str | None = CHATML,
    dtype: str = "F32",
    tokenizer: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[Any] | None] | None = None,
    **sizes: int,
) -> Path:
    """Write a random model and return its path.

    Args:
        arch: one of :data:`ARCHITECTURES`; ``mixtral`` is a llama with experts, ``bert`` cannot generate.
        seed: of the weights; the same seed writes the same bytes.
        dtype: of the matrices: F32, F16, BF16, Q8_0, Q4_0 or Q4_1 (rows must be multiples of 32).
        tokenizer: ``gpt2`` or ``llama`` (SentencePiece); None = what the architecture usually has.
        metadata: entries to replace or add; None leaves one out; ``(value, GGUFValueType)`` forces a type.
        tensors: the same for tensors (numpy order).
        sizes: fields of :class:`Shape`.
    """
    shape = Shape(**sizes)
    prefix = "llama" if arch == "mixtral" else arch
    vocabulary = _vocabulary(arch, shape.n_vocab, tokenizer)
    # a name with "phi3" in it changes the tokenizer
    entries: dict[str, Any] = {"general.name": "tiny", "general.file_type": FILE_TYPES[dtype]}
    entries |= {f"{prefix}.{key}": value for key, value in _hyperparameters(arch, shape).items()} | vocabulary
    if chat_template is not None:
        entries["tokenizer.chat_template"] = chat_template
    entries |= metadata or {}
    weights = _weights(arch, shape, len(vocabulary["tokenizer.ggml.tokens"]), seed) | dict(tensors or {})
    writer = GGUFWriter(path, entries.pop("general.architecture", prefix))
    for key, value in entries.items():
        if value is not None:
            _add_metadata(writer, key, value)
    for name, data in weights.items():
        if data is not None:
            _add_tensor(writer, name, data, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)
