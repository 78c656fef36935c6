"""What must hold in a GGUF before llama.cpp opens it.

Every check here stands for a place where llama.cpp (0c1e570) would abort the process, or refuse with a message nobody
understands. Values that llama.cpp itself refuses with a clear message are left to it, and nothing is rejected that a
converter writes on purpose. Sources: src/llama-model.cpp (load_hparams), src/llama-vocab.cpp (load), src/models/*.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from esp_edge.errors import ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from esp_edge.models.gguf import GGUFHeader, TensorInfo

__all__ = [
    "HYBRID",
    "RECURRENT",
    "TOKEN_EMBD",
    "check_hyperparameters",
    "check_kind",
    "check_tensors",
    "check_vocabulary",
    "one_line",
    "quoted",
    "some",
]

TOKEN_EMBD = "token_embd.weight"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


RECURRENT = _words("mamba mamba2 rwkv6 rwkv6qwen2 rwkv7 arwkv7")
HYBRID = _words(
    "jamba falcon-h1 plamo2 granitehybrid lfm2 lfm2moe nemotron_h nemotron_h_moe qwen3next kimi-linear bailingmoe3 "
    "kimi-k3 glm5-next qwen35 qwen35moe qwen4exp deepseek4 minimax-01"
)
NOT_GENERATING = {
    **dict.fromkeys(
        _words(
            "bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert t5encoder "
            "gemma-embedding llama-embed"
        ),
        "is an embedding model",
    ),
    "clip": "is the vision or audio part of a multimodal model (mmproj)",
    "t5": "is an encoder-decoder model",
    **dict.fromkeys(["dream", "llada", "llada-moe", "rnd1"], "is a diffusion model"),
    **dict.fromkeys(["eagle3", "dflash", "gemma4-assistant"], "is a drafter that only runs beside its target model"),
    **dict.fromkeys(["wavtokenizer-dec", "pockettts", "qwen3tts"], "is a speech model"),
}
NOT_MODEL_TYPES = {
    "adapter": ("is a LoRA adapter, not a model", "give the model it belongs to"),
    "imatrix": ("is an importance matrix for quantising, not a model", "give the model it belongs to"),
    "mmproj": ("is the vision or audio part of a multimodal model (mmproj)", "give the text model it belongs to"),
}
USE_DECODER = "use a text-generating model such as Llama, Qwen, Gemma, Phi or SmolLM"

# Architectures whose graphs assert key_length == value_length, and those that also assert rope.dimension_count == both
SAME_KEY_VALUE = _words(
    "afmoe apertus arcee arctic baichuan bailingmoe2 bitnet bloom chameleon chatglm codeshell cogvlm cohere2 "
    "cohere2moe command-r dbrx deepseek dots1 ernie4_5 ernie4_5-moe exaone exaone-moe exaone4 falcon glm4 "
    "glm4moe gpt2 gptneox granite granite_swa granitemoe graniteswitch grok grovemoe hunyuan-dense hunyuan-moe "
    "hunyuan_vl hy_v3 internlm2 jais jais2 laguna llama llama4 maincoder maple mellum minicpm minimax-m2 "
    "minimax-m3 mistral3 mpt muse-glimmer nanbeige nemotron olmo olmo2 olmoe openelm orion paddleocr "
    "pangu-embedded phi2 phi3 phimoe plamo qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe refact "
    "seed_oss smallthinker smollm3 spark2_5 stablelm starcoder starcoder2 talkie xverse"
)
FULL_ROPE = _words(
    "apertus arcee arctic baichuan chameleon codeshell cogvlm cohere2moe dbrx deepseek dots1 ernie4_5 ernie4_5-moe "
    "exaone exaone-moe exaone4 falcon granite granite_swa granitemoe graniteswitch grok grovemoe hunyuan-dense "
    "hunyuan-moe hunyuan_vl hy_v3 internlm2 jais2 llama llama4 maincoder mellum minicpm minimax-m2 mistral3 nemotron "
    "olmo olmo2 olmoe orion paddleocr pangu-embedded plamo qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe "
    "seed_oss smallthinker smollm3 starcoder2 talkie xverse"
)
NO_ROPE = _words("gptj gpt2 mpt refact bloom jais jamba nemotron_h nemotron_h_moe kimi-linear kimi-k3 glm5-next")

MAX_LAYERS, MAX_EXPERTS = 512, 1024
TENSOR_ALIGNMENT = 32  # ggml's; a mapped file hands its tensors over where they lie
ROPE_SCALING = ("none", "linear", "yarn", "longrope")
NOT_WEIGHT_TYPES = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"})  # no matrix product on the CPU
F32_ONLY = (
    *("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"),
    *("ssm_a", "ssm_d", "ssm_conv1d.weight"),
)
NO_TOKEN = 0xFFFFFFFF
INT32_MAX = (1 << 31) - 1
NOT_TOKENIZERS = ("none", "no_vocab", "bert", "test")
BPE_MODELS = ("gpt2", "hybriddna", "whitespace", "gemma4")
PATH_LIMIT = 4096
OTHER = "get another GGUF of this model"


# --------------------------------------------------------------------------------------------------------- messages


def one_line(text: str, limit: int = 300) -> str:
    """Text that cannot break a one-line message: printable, shortened."""
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def quoted(value: object) -> str:
    """A value from a file, quoted and shortened."""
    return one_line(repr(value), 80)


def some(names: Iterable[str], limit: int = 4) -> str:
    """The first few of many names."""
    listed = [one_line(name, 120) for name in names]
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


def _damaged(header: GGUFHeader, cause: str, fix: str = OTHER) -> ModelFileError:
    return ModelFileError(f"{one_line(str(header.path), PATH_LIMIT)}: {cause}; {fix}")


def _unsupported(header: GGUFHeader, cause: str, fix: str = USE_DECODER) -> UnsupportedModelError:
    return UnsupportedModelError(f"{one_line(str(header.path), PATH_LIMIT)}: {cause}; {fix}")


# ------------------------------------------------------------------------------------------------------------- kind


def check_kind(header: GGUFHeader) -> None:
    """Is it a model, and one that generates text?"""
    kind = header.metadata.get("general.type")
    if isinstance(kind, str) and kind in NOT_MODEL_TYPES:
        raise _unsupported(header, *NOT_MODEL_TYPES[kind])
    if not header.architecture:
        raise _damaged(header, "does not say its architecture (general.architecture)")
    why = NOT_GENERATING.get(header.architecture)
    if why is None and header.hyperparameter("attention.causal") is False:
        why = "is an embedding model (its attention is not causal)"
    if why is not None:
        shown = one_line(header.architecture, 40)
        raise _unsupported(header, f"{why} (architecture {shown}) and cannot generate text")
    if not header.tensors:
        raise _unsupported(header, "holds a vocabulary but no weights", "give the GGUF with the weights")


# ---------------------------------------------------------------------------------------------------------- tensors


def check_tensors(header: GGUFHeader, tensors: Mapping[str, TensorInfo]) -> None:
    """Embedding present and fitting; types that can be multiplied; data where a mapped file may have it."""
    for tensor in tensors.values():
        if tensor.offset % TENSOR_ALIGNMENT:
            raise _damaged(header, f"tensor {quoted(tensor.name)} does not start at a multiple of 32 bytes")
        _check_tensor_type(header, tensor)
    embedding = tensors.get(TOKEN_EMBD)
    if embedding is None:
        raise _damaged(header, f"has no tensor {TOKEN_EMBD}")
    expected = (header.hyperparameter("embedding_length"), header.n_vocab)
    if embedding.shape != expected:
        found = f"{TOKEN_EMBD} has the shape {list(embedding.shape)}"
        raise _damaged(header, f"{found} but embedding length and vocabulary say {list(expected)}")


def _check_tensor_type(header: GGUFHeader, tensor: TensorInfo) -> None:
    name, kind = tensor.name, tensor.type_name
    vector = len(tensor.shape) == 1 and name.endswith(("norm.weight", ".bias"))
    if kind != "F32" and (vector or name.endswith(F32_ONLY)):
        raise _damaged(header, f"tensor {quoted(name)} has the type {kind}, F32 was expected")
    if len(tensor.shape) > 1 and name.endswith(".weight") and "tid2eid" not in name and kind in NOT_WEIGHT_TYPES:
        raise _damaged(header, f"tensor {quoted(name)} has the type {kind}, which cannot hold weights")


# -------------------------------------------------------------------------------------------------- hyperparameters


def _natural(header: GGUFHeader, name: str, default: int | None = None) -> int:
    """A whole number >= 0; without a default the key must be there."""
    value = header.hyperparameter(name, default)
    key = f"{one_line(header.architecture, 40)}.{name}"
    if value is None:
        raise _damaged(header, f"lacks the number {key}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _damaged(header, f"{key} is {quoted(value)}, a whole number was expected")
    return value


def _per_layer(header: GGUFHeader, name: str, n_layer: int, default: list[int] | None = None) -> list[int]:
    """One number a layer; a single number stands for all of them."""
    value = header.hyperparameter(name, default)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return [value] * n_layer
    if isinstance(value, list) and len(value) == n_layer and all(isinstance(x, int) and x >= 0 for x in value):
        return [int(x) for x in value]
    key = f"{one_line(header.architecture, 40)}.{name}"
    if value is None:
        raise _damaged(header, f"lacks the number {key}")
    raise _damaged(header, f"{key} is {quoted(value)}, one whole number or {n_layer} of them were expected")


def check_hyperparameters(header: GGUFHeader, tensors: Mapping[str, TensorInfo]) -> None:
    """Numbers llama.cpp asserts on or divides by."""
    n_layer = _check_sizes(header)
    _check_experts(header, tensors, n_layer)
    if header.architecture not in RECURRENT:
        _check_heads(header, tensors, n_layer)
    _check_floats(header)
    _check_window(header)
    scaling = header.hyperparameter("rope.scaling.type", "linear")
    if scaling not in ROPE_SCALING:
        cause = f"rope.scaling.type is {quoted(scaling)}, one of {', '.join(ROPE_SCALING)} was expected"
        raise _damaged(header, cause, "the file is damaged or newer than this program: update esp-edge")


def _check_sizes(header: GGUFHeader) -> int:
    n_layer = _natural(header, "block_count")
    if not 1 <= n_layer <= MAX_LAYERS:
        raise _damaged(header, f"claims {n_layer} layers, 1 to {MAX_LAYERS} were expected")
    for name in ("context_length", "embedding_length"):
        value = _natural(header, name)
        if not 1 <= value <= INT32_MAX:
            raise _damaged(header, f"{name} is {value}, a positive number was expected")
    if _natural(header, "nextn_predict_layers", 0) >= n_layer:
        raise _unsupported(header, "holds only layers for multi-token prediction", "give the full model")
    return n_layer


def _check_experts(header: GGUFHeader, tensors: Mapping[str, TensorInfo], n_layer: int) -> None:
    count, groups = _natural(header, "expert_count", 0), _natural(header, "expert_group_count", 0)
    used = _per_layer(header, "expert_used_count", n_layer, [0] * n_layer)
    if header.architecture in ("hunyuan_vl", "hunyuan-dense") and count <= 1:
        return  # llama.cpp reads these as having no experts
    ok = max(used) <= count <= MAX_EXPERTS and (max(used) > 0) == (count > 0)
    ok = ok and (groups < count if count else groups == 0)
    if groups > 1:
        ok = ok and count % groups == 0 and 0 < _natural(header, "expert_group_used_count", 0) < groups
    ok = ok and all(used[i] or f"blk.{i}.ffn_gate_inp.weight" not in tensors for i in range(n_layer))
    if not ok:
        counts = f"{count} experts, {max(used)} used, in {groups} groups"
        raise _damaged(header, f"claims {counts}, which do not fit together")


def _check_heads(header: GGUFHeader, tensors: Mapping[str, TensorInfo], n_layer: int) -> None:
    heads = _per_layer(header, "attention.head_count", n_layer)
    kv_heads = _per_layer(header, "attention.head_count_kv", n_layer, heads)
    may_be_zero = header.architecture in HYBRID or header.architecture == "deci"
    for head, kv_head in zip(heads, kv_heads, strict=True):
        if head > INT32_MAX or (kv_head and head % kv_head) or (not may_be_zero and 0 in (head, kv_head)):
            counts = f"{head} attention heads over {kv_head} key-value heads"
            raise _damaged(header, f"claims {counts}, which do not fit together")
    if heads[0] == 0:
        return
    size = _natural(header, "embedding_length") // heads[0]
    key, value = _natural(header, "attention.key_length", size), _natural(header, "attention.value_length", size)
    if 0 in (key, value) or (header.architecture in SAME_KEY_VALUE and key != value):
        raise _damaged(header, f"claims keys of {key} and values of {value} numbers, which do not fit together")
    _check_rope(header, key)
    if header.architecture in SAME_KEY_VALUE and header.hyperparameter("attention.value_length_swa") is None:
        _check_output_rows(header, tensors, [head * value for head in heads])


def _check_rope(header: GGUFHeader, key: int) -> None:
    rope = _natural(header, "rope.dimension_count", key)
    window_key = _natural(header, "attention.key_length_swa", key)
    window_rope = _natural(header, "rope.dimension_count_swa", rope)
    for rotated, length in ((rope, key), (window_rope, window_key)):
        odd = not 0 < rotated <= length or rotated % 2
        if header.architecture not in NO_ROPE and (odd or (header.architecture in FULL_ROPE and rotated != length)):
            raise _damaged(header, f"rotates {rotated} of the {length} numbers of a key, which is impossible here")


def _check_output_rows(header: GGUFHeader, tensors: Mapping[str, TensorInfo], sizes: list[int]) -> None:
    """Some loaders take embedding_length for heads x size; the graph then aborts where they differ."""
    for index, size in enumerate(sizes):
        tensor = tensors.get(f"blk.{index}.attn_output.weight")
        if tensor is None or not size:
            continue
        if tensor.shape[0] != size:
            cause = f"layer {index} takes {tensor.shape[0]} numbers from its attention heads, which give {size}"
            raise _damaged(header, cause)
        if not {f"blk.{index}.attn_q.weight", f"blk.{index}.attn_qkv.weight"} & tensors.keys():
            raise _damaged(header, f"layer {index} has no tensor for its queries (attn_q or attn_qkv)")


def _check_floats(header: GGUFHeader) -> None:
    for name in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.group_norm_epsilon"):
        value = header.hyperparameter(name, 0.0)
        if not isinstance(value, float) or not math.isfinite(value) or value < 0:
            raise _damaged(header, f"{name} is {quoted(value)}, a small positive number was expected")


def _check_window(header: GGUFHeader) -> None:
    """A window without a layer that uses it trips an assertion."""
    pattern = header.hyperparameter("attention.sliding_window_pattern")
    window = header.hyperparameter("attention.sliding_window", 0)
    unused = pattern == 1 if not isinstance(pattern, list) else not any(pattern)
    if unused and (window or header.architecture == "gemma2"):
        raise _damaged(header, f"has a sliding window of {quoted(window)} tokens but no layer that uses it")


# ------------------------------------------------------------------------------------------------------- vocabulary


def check_vocabulary(header: GGUFHeader, tokens: Sequence[Any]) -> None:
    """A tokenizer, no token twice, the ids of special tokens inside the vocabulary."""
    model = header.metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model in NOT_TOKENIZERS:
        shown = "" if model is None else f" for generating (tokenizer.ggml.model is {quoted(model)})"
        raise _unsupported(header, f"has no tokenizer{shown}", "get a GGUF of this model that includes its tokenizer")
    texts = [_as_llama_cpp(token) for token in tokens if isinstance(token, bytes)]
    if not texts:
        raise _damaged(header, "has no list of tokens (tokenizer.ggml.tokens)")
    _check_unique(header, texts)
    _check_special(header, model)
    missing = _missing_bytes(model, texts)
    if missing:  # llama.cpp ends the process on the first text that needs one
        raise _damaged(header, f"its vocabulary lacks the byte tokens {some(f'<0x{byte:02X}>' for byte in missing)}")


def _as_llama_cpp(token: bytes) -> bytes:
    """llama.cpp reads tokens as C strings."""
    return token.split(b"\0", 1)[0]


def _check_unique(header: GGUFHeader, tokens: list[bytes]) -> None:
    named = [token or b"[EMPTY_%d]" % index for index, token in enumerate(tokens)]
    if len(set(named)) == len(named):
        return
    seen: dict[bytes, int] = {}
    for index, token in enumerate(named):
        if token in seen:
            shown = quoted(token.decode("utf-8", "replace"))
            raise _damaged(header, f"tokens {seen[token]} and {index} are both {shown}; llama.cpp needs each text once")
        seen[token] = index


def _check_special(header: GGUFHeader, model: str) -> None:
    for name in ("bos", "eos"):
        key = f"tokenizer.ggml.{name}_token_id"
        value = header.metadata.get(key)
        if isinstance(value, int) and value != NO_TOKEN and not 0 <= value < header.n_vocab:
            raise _damaged(header, f"{key} is {value} but the vocabulary has {header.n_vocab} tokens")
        fallback = _default_id(header, model, name)
        valid = isinstance(value, int) and value != NO_TOKEN
        if header.metadata.get(f"tokenizer.ggml.add_{name}_token") is True and not valid and fallback >= header.n_vocab:
            raise _damaged(header, f"wants {name.upper()} in front or at the end of every prompt but has no such token")


def _default_id(header: GGUFHeader, model: str, name: str) -> int:
    """The id llama.cpp takes when the file names none; NO_TOKEN = none."""
    if model in ("llama", "plamo2"):
        return 1 if name == "bos" else 2
    if model in BPE_MODELS[:3]:
        no_bos = str(header.metadata.get("tokenizer.ggml.pre", "")) in ("chatglm-bpe", "glm4", "glm5")
        return NO_TOKEN if name == "bos" and no_bos else 11
    return 1 if model == "t5" and name == "eos" else NO_TOKEN


def _missing_bytes(model: str, tokens: Iterable[bytes]) -> list[int]:
    if model not in ("llama", "plamo2"):
        return []
    known = set(tokens)
    return [byte for byte in range(256) if b"<0x%02X>" % byte not in known and bytes([byte]) not in known]
