"""The target model: weights, vocabulary, template, embeddings, and what it can and cannot do."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from gguf.constants import GGMLQuantizationType

from esp_edge._runtime import captured_log, llama_cpp, native
from esp_edge.config import KV_TYPES, ModelConfig
from esp_edge.errors import ConfigError, ModelLoadError, PromptError, UnsupportedModelError
from esp_edge.models import gguf, hub, kernel_choice
from esp_edge.models.cache import ModelCache
from esp_edge.models.device import tuned_threads
from esp_edge.models.embeddings import EmbeddingTable
from esp_edge.models.exact import lone_rows_differ, require_width_invariance
from esp_edge.models.kernels import plan_kernels
from esp_edge.models.rpc import RpcServers
from esp_edge.models.template import ChatTemplate
from esp_edge.models.tokenizer import Tokenizer

__all__ = [
    "BATCH_ROWS",
    "DEFAULT_CONTEXT",
    "Capability",
    "Context",
    "TargetModel",
    "default_threads",
    "offloads",
    "prepare_exact",
    "threads_for",
]

BATCH_ROWS = 512  # rows of one prefill chunk, and an upper bound for every pass
DEFAULT_CONTEXT = 4096
MAX_OUTPUT_ROWS = 256
_LOG_LINES = 3
_KV_TYPES = {name: int(GGMLQuantizationType[name.upper()]) for name in KV_TYPES}
_TILED_TYPES = frozenset(
    [
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_XS",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ2_S",
        "IQ3_XXS",
        "IQ3_S",
        "IQ1_S",
        "IQ1_M",
    ]
)
# graphs that assert on what a probe does; asking them would end the process
_NO_EMBEDDING_ROWS = frozenset(("graniteswitch",))
_NO_SHARED_ROWS = frozenset(("qwen4exp",))
_Self = TypeVar("_Self", bound="TargetModel")
_FLASH_ON, _FLASH_OFF, _FLASH_AUTO = 1, 0, -1


@dataclass(frozen=True, slots=True)
class Capability:
    """What speculation may use on this model.

    Attributes:
        masks: embedding rows give the logits of token ids, so mask rows can be injected.
        speculation: rejected branches can be removed from the memory.
        scale: factor on embedding rows that makes the two paths agree.
        bit_equal: the two paths agree to the last bit.
        reason: why something is off, in one line; None when nothing is.
    """

    masks: bool
    speculation: bool
    scale: float = 1.0
    bit_equal: bool = True
    reason: str | None = None


class Context:
    """A llama_context with a unified KV cache."""

    made = False  # whether this process has one or had one

    def __init__(
        self,
        model: TargetModel,
        n_sequences: int,
        n_ctx: int,
        embeddings: EmbeddingTable | None,
        hidden_states: Any = None,
    ) -> None:
        self.model = model
        self.n_ctx = n_ctx
        self.n_sequences = n_sequences
        self.lock = threading.RLock()  # held around everything that touches the llama_context
        self._pointer: Any = None
        params = self._params(model.config, n_ctx, n_sequences)
        params.n_threads = params.n_threads_batch = model.threads
        self._hidden_states = hidden_states  # llama.cpp holds its address
        if hidden_states is not None:
            params.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(hidden_states.callback)
            params.cb_eval_user_data = hidden_states.address
        with model.lifetime:  # the weights must not go while a context is made from them
            _ = model.address  # raises when closed
            model.check_memory(n_ctx)
            Context.made = True
            with captured_log() as log:
                self._pointer = llama_cpp.llama_init_from_model(model.pointer, params)
            if not self._pointer:
                raise ModelLoadError(f"{model.path}: no context of {n_ctx} tokens could be made ({_tail(log)})")
            address = ctypes.cast(self._pointer, ctypes.c_void_p).value
            self._embeddings = embeddings  # owns the mapping that the compiled table reads
            self._native = native.DecodeStep(address, embeddings.native if embeddings else None, 0, n_sequences)
            model.contexts.add(self)

    @property
    def native(self) -> Any:
        """The compiled step.

        Raises:
            ConfigError: the context was closed.
        """
        if self._pointer is None:
            raise ConfigError("the session or its model was closed: make a new one")
        return self._native

    @staticmethod
    def _params(config: ModelConfig, n_ctx: int, n_sequences: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = BATCH_ROWS
        params.n_seq_max = n_sequences
        params.n_outputs_max = MAX_OUTPUT_ROWS
        params.flash_attn_type = _flash_attention(config)
        params.type_k = _KV_TYPES[config.type_k]
        params.type_v = _KV_TYPES[config.type_v]
        params.kv_unified = True  # one row may belong to several sequences: the tree
        params.swa_full = True  # a sliding window that drops cells cannot roll a branch back
        params.no_perf = True
        return params

    @property
    def pointer(self) -> Any:
        """The llama_context; ConfigError once it is closed."""
        _ = self.native
        return self._pointer

    @property
    def closed(self) -> bool:
        """Whether it was freed."""
        return self._pointer is None

    def close(self) -> None:
        """Free the context; waits for a pass that another thread runs. Calling it twice is harmless."""
        with self.lock:
            if self._pointer:
                self._native = None
                llama_cpp.llama_free(self._pointer)
                self._pointer = None

    def __del__(self) -> None:
        if getattr(self, "_pointer", None) and llama_cpp is not None:
            self.close()


def offloads(config: ModelConfig) -> bool:
    """Whether layers really go to a GPU: a build without one ignores the setting."""
    return config.n_gpu_layers != 0 and bool(llama_cpp.llama_supports_gpu_offload())


def _flash_attention(config: ModelConfig) -> int:
    if not config.flash_attn:
        return _FLASH_OFF
    return _FLASH_AUTO if offloads(config) else _FLASH_ON


def default_threads() -> int:
    """Physical cores this process may use, as far as the system tells."""
    affinity = getattr(os, "sched_getaffinity", None)
    logical = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        smt = Path("/sys/devices/system/cpu/smt/active").read_text("ascii").strip() == "1"
    except OSError:
        smt = False
    return max(1, logical // 2 if smt else logical)


def threads_for(config: ModelConfig, cache: ModelCache) -> int:
    """CPU threads for a file: as configured, else as tuned for it on this machine, else one a physical core."""
    return config.n_threads or tuned_threads(cache) or default_threads()


def _tail(log: Sequence[str]) -> str:
    lines = [line.strip() for line in log if line.strip() and line.strip(". ")]
    return "llama.cpp: " + " | ".join(lines[-_LOG_LINES:]) if lines else "llama.cpp gave no reason"


class TargetModel:
    """A loaded GGUF model. A context manager: closing it closes its contexts.

    Attributes:
        path: the file.
        header: its metadata (:mod:`esp_edge.models.gguf`).
        config: how it was loaded.
        tokenizer: its vocabulary.
        n_ctx: context length of new contexts.
        contexts: those made from it and still alive.
        lifetime: held while a context is made and while closing begins.
        capability: what speculation may use; found out at load.
        kernels: what the CPU computes with.
        pads_lone_rows: exact mode: a pass of one row has other bits than one of several, so it gets a second row.
        cache: facts measured about this file.
        curve: what passes cost here, once a session has measured it (:mod:`esp_edge.planner`).
        remember: whether sessions store there what they learned about drafting, for the next program that loads it.
    """

    def __init__(self, spec: str, config: ModelConfig | None = None, *, progress: hub.Progress | None = None) -> None:
        self.config = config or ModelConfig()
        self.lifetime = threading.RLock()
        self.pointer: Any = None
        self.remember = False
        self.pads_lone_rows = False
        self.curve: object = None
        self._tokenizer: Tokenizer | None = None
        self._taken: object = None  # weights of our kernels: goes after the model
        self.contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self.path: Path = hub.resolve(spec, progress=progress)
        self.header = gguf.preflight(self.path)
        self.cache = ModelCache(self.path)
        self.kernels = plan_kernels(self.config, self.header, n_threads=self.threads, cache=self.cache)
        if self.config.exact and not self.kernels.complete:
            prepare_exact(self.header)
        self._rpc = RpcServers(self.config.rpc)
        try:
            self.pointer = self._load()
            self.kernels, self._taken = self.kernels.take_over(self.address, self.threads)
            self._tokenizer = Tokenizer(llama_cpp.llama_model_get_vocab(self.pointer))
            self._refuse_unsupported()
            self.n_ctx = self._context_length()
            self._template: tuple[ChatTemplate, str | None] | None = None
            self.capability = self._find_capability()
            self.embeddings = self._open_embeddings(self.capability.scale) if self.capability.masks else None
            if self.config.exact:
                require_width_invariance(self)
                self.pads_lone_rows = lone_rows_differ(self)
        except BaseException:
            self.close()
            raise

    # -- loading ---------------------------------------------------------------------------------------------------

    def _load(self) -> Any:
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = self.config.n_gpu_layers
        params.devices = self._rpc.devices
        # repacked weights are out of reach of our kernels, and repacked k-quants have others for a few rows
        tiled = self.config.exact and bool(_tiled_types(self.header))
        params.use_extra_bufts = not (self.kernels.complete or tiled)
        with captured_log() as log:
            pointer = llama_cpp.llama_model_load_from_file(os.fsencode(self.path), params)
        if not pointer:
            raise ModelLoadError(f"{self.path}: llama.cpp cannot load this model ({_tail(log)})")
        return pointer

    def _refuse_unsupported(self) -> None:
        if llama_cpp.llama_model_has_encoder(self.pointer) or not llama_cpp.llama_model_has_decoder(self.pointer):
            raise UnsupportedModelError(f"{self.path}: an encoder model cannot generate text; use a decoder-only model")
        if llama_cpp.llama_model_is_diffusion(self.pointer):
            raise UnsupportedModelError(f"{self.path}: diffusion models are not supported; use an autoregressive model")

    def _context_length(self) -> int:
        trained = int(llama_cpp.llama_model_n_ctx_train(self.pointer))
        return self.config.n_ctx or min(trained, DEFAULT_CONTEXT) or DEFAULT_CONTEXT

    def check_memory(self, n_ctx: int) -> None:
        """Raise ConfigError when the KV cache alone exceeds the machine's memory: the system would kill us instead."""
        if self.config.rpc:
            return  # most of it is on other machines
        try:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            return
        needed = gguf.memory_estimate(self.header, n_ctx, self.config.type_k, self.config.type_v)["kv_cache"]
        if needed > total:
            raise ConfigError(
                f"a context of {n_ctx} tokens needs {needed / 2**30:.1f} GiB of KV cache, but this machine has "
                f"{total / 2**30:.1f} GiB; use a smaller --ctx-size"
            )

    # -- capability ------------------------------------------------------------------------------------------------

    def _find_capability(self) -> Capability:
        pointer = self.pointer
        if llama_cpp.llama_model_is_recurrent(pointer) or llama_cpp.llama_model_is_hybrid(pointer):
            return Capability(False, False, reason="a recurrent memory cannot drop a rejected branch: speculation off")
        architecture = self.header.architecture
        if architecture in _NO_SHARED_ROWS:
            return Capability(False, False, reason=f"{architecture} takes one sequence per row: speculation off")
        if architecture in _NO_EMBEDDING_ROWS:
            return Capability(False, True, reason=f"{architecture} takes token ids only: masks off")
        rope = llama_cpp.llama_model_rope_type(pointer)
        if rope in (llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE):
            return Capability(False, True, reason="M-RoPE reads four positions per embedding row: masks off")
        if llama_cpp.llama_model_n_embd_inp(pointer) != llama_cpp.llama_model_n_embd(pointer):
            return Capability(False, True, reason="input rows are wider than token embeddings: masks off")
        return self._compare_paths()

    def _compare_paths(self) -> Capability:
        """Feed the same tokens as ids and as embedding rows: masks need the logits to agree."""
        n_embd = int(llama_cpp.llama_model_n_embd(self.pointer))
        ids = np.linspace(0, self.tokenizer.n_vocab - 1, 6).astype(np.int32)[1:-1]
        try:
            table = self._open_embeddings(1.0)
        except UnsupportedModelError as error:
            return Capability(False, True, reason=f"{error}: masks off")
        wanted, _ = self._probe_logits(ids, None)
        tolerance = 1e-3 * float(wanted.std() + 1e-9)
        for scale in (1.0, float(np.float32(np.sqrt(np.float32(n_embd))))):
            found, can_roll_back = self._probe_logits(ids, table if scale == 1.0 else self._open_embeddings(scale))
            if np.abs(found - wanted).max() <= tolerance:
                return self._agreed(scale, bool(np.array_equal(found, wanted)), can_roll_back)
        return Capability(False, True, reason="embedding rows do not give the logits of token ids: masks off")

    @staticmethod
    def _agreed(scale: float, bit_equal: bool, can_roll_back: bool) -> Capability:
        if not can_roll_back:
            return Capability(False, False, reason="the memory cannot drop a rejected branch: speculation off")
        return Capability(True, True, scale, bit_equal)

    def _probe_logits(self, ids: Any, table: EmbeddingTable | None) -> tuple[Any, bool]:
        """Logits of a chain of tokens, float32[len(ids), n_vocab], and whether the memory can roll back."""
        context = Context(self, 1, 256, table)
        try:
            step, n = context.native, len(ids)
            layout = native.TreeLayout.build(np.arange(-1, n - 1, dtype=np.int32), np.zeros(n, np.int32))
            if step.run(layout, ids, np.empty(0, np.int32), None, None, 0, table is None) != 0:
                raise ModelLoadError(f"{self.path}: llama.cpp cannot run this model")
            logits = np.stack([step.logits(row) for row in range(n)])
            step.commit(np.arange(1, n, dtype=np.int32), False)
            return logits, bool(step.truncate(1)) and step.stored(0) == (0, 0)
        finally:
            context.close()

    def _open_embeddings(self, scale: float) -> EmbeddingTable:
        path, tensor = gguf.embedding_tensor(self.header)
        return EmbeddingTable(path, tensor, scale=scale, cache=self.cache)

    # -- use -------------------------------------------------------------------------------------------------------

    def new_context(self, n_sequences: int, *, n_ctx: int | None = None, hidden_states: Any = None) -> Context:
        """A fresh KV cache of ``n_ctx`` cells (default: the model's) for up to ``n_sequences`` owners and leaves.

        Args:
            hidden_states: from :meth:`new_hidden_states`; records what every layer gives out in this context's passes.

        Raises:
            ConfigError: the machine has not enough memory.
            ModelLoadError: llama.cpp cannot make it.
        """
        return Context(self, n_sequences, n_ctx or self.n_ctx, self.embeddings, hidden_states)

    def new_hidden_states(self) -> Any:
        """A compiled recorder of hidden states for one new context (``native.HiddenStates``)."""
        _ = self.address  # raises when closed
        n_layers, n_embd = (f(self.pointer) for f in (llama_cpp.llama_model_n_layer, llama_cpp.llama_model_n_embd))
        return native.HiddenStates(n_layers, n_embd)

    @property
    def threads(self) -> int:
        """CPU threads of new contexts (:func:`threads_for`)."""
        return threads_for(self.config, self.cache)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's vocabulary."""
        if self._tokenizer is None:
            raise ConfigError("the model is not loaded")
        return self._tokenizer

    @property
    def template(self) -> ChatTemplate:
        """The chat template of the file, or the named fallback (see ``template_warning``)."""
        return self._load_template()[0]

    @property
    def template_warning(self) -> str | None:
        """One line when the file has no usable chat template of its own."""
        return self._load_template()[1]

    @property
    def address(self) -> int:
        """Address of the llama_model; ConfigError once the model is closed."""
        if not self.pointer:
            raise ConfigError("the model was closed: load it again")
        return ctypes.cast(self.pointer, ctypes.c_void_p).value or 0

    def _load_template(self) -> tuple[ChatTemplate, str | None]:
        if self._template is None:
            self._template = ChatTemplate.from_metadata(self.header.metadata, self.tokenizer.special_texts())
        return self._template

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **template_args: Any) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer. Special tokens in message text stay text.

        Raises:
            PromptError: a message is malformed, or the template refuses the conversation.
        """
        ids: list[int] = []
        known: dict[tuple[str, bool], list[int]] = {}  # a text of many special tokens is cut into as many pieces
        for piece in self.template.render(messages, **template_args):
            key = piece.text, not piece.literal
            if key not in known:
                known[key] = self.tokenizer.encode(piece.text, parse_special=not piece.literal)
            ids += known[key]
        if self.tokenizer.adds_bos and self.tokenizer.bos >= 0 and ids[:1] != [self.tokenizer.bos]:
            ids.insert(0, self.tokenizer.bos)
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a raw prompt: special tokens in it are read as such.

        Raises:
            PromptError: the text has no token.
        """
        ids = self.tokenizer.encode(text, add_special=True, parse_special=True)
        if not ids:
            raise PromptError("the prompt is empty: give at least one character")
        return ids

    def close(self) -> None:
        """Free the weights, after every context made from them; calling it twice is harmless."""
        with self.lifetime:  # from here on no other thread can make a context
            pointer, self.pointer = self.pointer, None
            contexts = list(self.contexts)
        for context in contexts:
            context.close()
        if pointer:
            if self._tokenizer is not None:
                self._tokenizer.close()
            llama_cpp.llama_model_free(pointer)
        self._taken = None
        self._rpc.close()

    def __del__(self) -> None:
        if getattr(self, "pointer", None) and llama_cpp is not None:  # modules go first when the interpreter ends
            self.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tiled_types(header: gguf.GGUFHeader) -> set[str]:
    return {tensor.type_name for tensor in header.tensors.values()} & _TILED_TYPES


def prepare_exact(header: gguf.GGUFHeader) -> None:
    """Switch off llama.cpp's tiled matmul for the k-quants, which starts at 8 rows and changes bits.

    The library reads the variable once, at its first matrix product, so it must be set before any context exists: who
    runs several models in one process calls this for all of them first.

    Raises:
        ConfigError: a context was made before, and the variable was not set.
    """
    tiled = _tiled_types(header)
    if not tiled or os.environ.get("GGML_CPU_TILED_MM") == "0":
        return
    if Context.made or kernel_choice.has_raced():
        raise ConfigError(
            f"exact mode on {', '.join(sorted(tiled))} weights must be chosen before the process runs another model: "
            f"load this model first, or set GGML_CPU_TILED_MM=0 in the environment"
        )
    os.environ["GGML_CPU_TILED_MM"] = "0"
