"""One copy of the weights for two owners of contexts: the engine loads them, llama-cpp-python's objects borrow them."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

from esp_edge._runtime import captured_log, llama_cpp, llama_cpp_python
from esp_edge.config import ModelConfig
from esp_edge.errors import ModelLoadError
from esp_edge.models.model import Context
from esp_edge.session import Model

__all__ = ["BorrowedModel", "LazyContext", "Weights"]

_ParentModel: Any = llama_cpp_python.internals.LlamaModel
_ParentContext: Any = llama_cpp_python.internals.LlamaContext

CatchUp: TypeAlias = "weakref.WeakMethod[Callable[[], None]]"

# of a context, what changes the logits or the device they are computed on
_SAME = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
    "offload_kqv",
    "op_offload",
    "flash_attn_type",
)


class _EngineContext(Context):
    """A context of the engine with the RoPE, offload and attention settings of a ``llama_cpp.Llama``."""

    def _params(self, config: ModelConfig, n_ctx: int, n_sequences: int) -> Any:  # type: ignore[override]
        params = Context._params(config, n_ctx, n_sequences)
        if isinstance(self.model, Weights):
            for name in _SAME:
                setattr(params, name, getattr(self.model.context_params, name))
        return params


class Weights(Model):
    """The engine's model, loaded with the ``llama_model_params`` of a ``llama_cpp.Llama``.

    Attributes:
        context_params: its ``llama_context_params``, which contexts made here follow.
    """

    def __init__(self, path: str, config: ModelConfig, model_params: Any, context_params: Any) -> None:
        self._model_params = model_params
        self.context_params = context_params
        super().__init__(path, config)

    def _load(self) -> Any:
        params = type(self._model_params).from_buffer_copy(self._model_params)
        params.vocab_only = False
        with captured_log() as log:
            pointer = llama_cpp.llama_model_load_from_file(os.fsencode(self.path), params)
        if not pointer:
            last = next((line for line in reversed(log) if line.strip(" .")), "it gave no reason")
            raise ModelLoadError(f"{self.path}: llama.cpp cannot load this model ({last.strip()})")
        return pointer

    def new_context(self, n_sequences: int, *, n_ctx: int | None = None, hidden_states: Any = None) -> Context:
        """As :meth:`TargetModel.new_context`, with llama-cpp-python's settings."""
        return _EngineContext(self, n_sequences, n_ctx or self.n_ctx, self.embeddings, hidden_states)


class BorrowedModel(_ParentModel):  # type: ignore[misc]
    """llama-cpp-python's model object over weights that are not its own. ConfigError once they are freed."""

    def __init__(self, weights: Weights, path: str, params: Any, verbose: bool) -> None:
        self.path_model, self.params, self.verbose = path, params, verbose
        self.sampler: Any = None
        self.custom_samplers: list[Any] = []
        self._exit_stack = ExitStack()
        self._weights = weights
        self._vocab = llama_cpp.llama_model_get_vocab(weights.pointer)
        self._pieces: dict[tuple[int, bool], bytes] = {}

    @property
    def model(self) -> Any:
        """The llama_model."""
        _ = self._weights.address  # raises when closed
        return self._weights.pointer

    @property
    def vocab(self) -> Any:
        """Its llama_vocab."""
        _ = self._weights.address
        return self._vocab

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> bytes:
        """Bytes of tokens. llama-cpp-python asks for the whole answer after every token, so pieces are kept."""
        text = b"".join([self._piece(token, special) for token in tokens])
        return text[1:] if text[:1] == b" " and tokens[0] == self.token_bos() else text

    def _piece(self, token: int, special: bool) -> bytes:
        piece = self._pieces.get((token, special))
        if piece is None:
            piece = self._pieces[token, special] = self._read_piece(token, special)
        return piece

    def _read_piece(self, token: int, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n


class LazyContext(_ParentContext):  # type: ignore[misc]
    """llama-cpp-python's context object, whose llama_context exists once somebody asks for it.

    Attributes:
        touched: somebody asked for it; the owner resets this.
    """

    def __init__(self, model: BorrowedModel, params: Any, verbose: bool, n_ctx: int, catch_up: CatchUp) -> None:
        """Args: n_ctx: cells it will have; catch_up: what it calls before anybody gets at the llama_context."""
        self.model, self.params, self.verbose = model, params, verbose
        self.sampler: Any = None
        self.touched = False
        self._n_ctx = n_ctx
        self._catch_up = catch_up
        self._made: Any = None

    @property
    def made(self) -> bool:
        """Whether it exists."""
        return self._made is not None

    @property
    def ctx(self) -> Any:
        """The llama_context."""
        if self._made is None:
            self._made = _ParentContext(model=self.model, params=self.params, verbose=self.verbose)
        self.touched = True
        catch_up = self._catch_up()
        if catch_up is not None:
            catch_up()
        return self._made.ctx

    @property
    def memory(self) -> Any:
        """Its KV cache."""
        return llama_cpp.llama_get_memory(self.ctx)

    def n_ctx(self) -> int:
        """Cells."""
        return self._n_ctx

    def reset_timings(self) -> None:
        """Start llama.cpp's own clock, where it runs."""
        if self._made is not None:
            self._made.reset_timings()

    def print_timings(self) -> None:
        """Log llama.cpp's own timings, where it ran."""
        if self._made is not None:
            self._made.print_timings()

    def close(self) -> None:
        """Free it; asked for again, it is made again."""
        made, self._made = self._made, None
        if made is not None:
            made.close()
