"""``Llama``: llama-cpp-python's class, whose tokens come from this package's loop.

llama-cpp-python builds every reply, stream chunk, stop, log-probability and tool call around one method,
:meth:`Llama.generate`, which yields tokens. That method is replaced, and nothing else of the replies is: their shapes
are llama-cpp-python's because its own code makes them. What the loop cannot do goes to the parent's ``generate``.

The weights are loaded once (:mod:`esp_edge.dropin.weights`). The parent's own llama_context is made when somebody asks
for it (``eval``, ``save_state``, ``embed``, an image, a fallback) and then catches up with what was decoded here.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from esp_edge._runtime import llama_cpp, llama_cpp_python
from esp_edge.config import KV_TYPES, DraftConfig, GenerationParams, ModelConfig
from esp_edge.dropin.answers import AnswerSession, Sessions
from esp_edge.dropin.weights import BorrowedModel, LazyContext, Weights
from esp_edge.errors import ConfigError, EspEdgeError, ModelError
from esp_edge.metrics import GenerationStats
from esp_edge.models import gguf
from esp_edge.session import common_prefix

__all__ = ["FallbackWarning", "Llama"]

_Parent: Any = llama_cpp_python.Llama
_internals = llama_cpp_python.internals
_GENERATE = inspect.signature(_Parent.generate)
_RANDOM_SEED: int = llama_cpp.LLAMA_DEFAULT_SEED
_ALL_LAYERS = 1 << 16  # llama-cpp-python writes -1 as the largest int
_KV_NAMES = {int(GGMLQuantizationType[name.upper()]): name for name in KV_TYPES}
_NO_ENGINE = {
    "vocab_only": "vocab_only loads no weights",
    "lora_path": "a LoRA adapter acts on llama-cpp-python's own context",
    "draft_model": "draft_model asks for llama-cpp-python's own speculative decoding; without it esp_edge drafts",
    "attention_type": "attention_type is not the model's own",
}


class FallbackWarning(UserWarning):
    """Something runs on llama-cpp-python itself, as fast as there; the message says why."""


class _Wish(llama_cpp_python.LogitsProcessorList):  # type: ignore[misc]
    """What ``generate`` should know beyond its arguments.

    llama-cpp-python hands logits processors on untouched, from its completion to ``generate``, so the wish travels as
    one; there it still works as one.

    Attributes:
        own: the caller's processors.
        bias: token id -> what is added to its logit.
        max_tokens: tokens that will be taken at most; None = unknown.
        seed: None = the object's own.
    """

    def __init__(
        self, own: Sequence[Any] | None, bias: Mapping[Any, Any] | None, max_tokens: int | None, seed: int | None
    ) -> None:
        self.own = list(own or ())
        self.bias = {int(token): float(value) for token, value in (bias or {}).items()}
        self.max_tokens, self.seed = max_tokens, seed
        super().__init__([*self.own, self._add] if self.bias else self.own)

    def _add(self, _input_ids: Any, scores: Any) -> Any:
        changed = np.copy(scores)
        for token, value in self.bias.items():
            changed[token] += value
        return changed


class Llama(_Parent):  # type: ignore[misc]
    """``llama_cpp.Llama`` with several tokens a pass; see there for what it does and takes.

    Args:
        draft: how drafts are made; default ``auto``. The only argument that llama-cpp-python does not know.

    Attributes:
        stats: of the last answer that was made here; None before it, and after an answer of llama-cpp-python's own.
    """

    # the parent's
    input_ids: Any
    n_tokens: int
    scores: Any

    def __init__(self, model_path: str | os.PathLike[str], *, draft: DraftConfig | None = None, **kwargs: Any) -> None:
        model_path = os.fspath(model_path)
        if draft is not None and not isinstance(draft, DraftConfig):
            raise ConfigError(f"draft must be a DraftConfig, such as DraftConfig('none'), but {draft!r} was given")
        self.stats: GenerationStats | None = None
        self._draft = draft or DraftConfig()
        self._asked_threads = kwargs.get("n_threads")
        self._warned: set[str] = set()
        self._answering: object = None  # the generation whose tokens input_ids shows
        self._stale: int | None = None  # from this token on, the parent's context lacks what input_ids shows
        self._sessions: Sessions | None = None
        self._why_plain = next((why for name, why in _NO_ENGINE.items() if _asks(kwargs, name)), None)
        if self._why_plain is None:
            self._why_plain = self._start(model_path, kwargs)
        if self._why_plain is not None:
            super().__init__(model_path, **kwargs)

    # -- loading ---------------------------------------------------------------------------------------------------

    def _start(self, model_path: str, kwargs: dict[str, Any]) -> str | None:
        """Load the model for the engine; why that cannot be, in which case nothing is left of it."""
        try:
            n_ctx = kwargs.get("n_ctx", 512) or _trained_context(model_path)
            super().__init__(model_path, **(kwargs | {"n_ctx": n_ctx, "vocab_only": True}))
            if self._is_recurrent or self._is_hybrid:
                raise ModelError("a recurrent memory cannot drop a rejected branch")
            config = self._config(kwargs)
            weights = Weights(model_path, config, self.model_params, self.context_params)
        except (EspEdgeError, ValueError) as error:  # the parent's own constructor will say what is wrong with the rest
            self._drop()
            return str(error)
        if not weights.capability.speculation:
            self._drop()
            weights.close()
            return weights.capability.reason
        self._adopt(weights, kwargs)
        return None

    def _config(self, kwargs: Mapping[str, Any]) -> ModelConfig:
        params, n_gpu_layers = self.context_params, int(self.model_params.n_gpu_layers)
        if params.type_k not in _KV_NAMES or params.type_v not in _KV_NAMES:
            raise ConfigError(f"a KV cache type must be one of {', '.join(KV_TYPES)}")
        return ModelConfig(
            n_ctx=int(self._n_ctx),
            n_threads=kwargs.get("n_threads") or 0,
            n_gpu_layers=-1 if n_gpu_layers > _ALL_LAYERS else n_gpu_layers,
            flash_attn=bool(kwargs.get("flash_attn", False)),
            type_k=_KV_NAMES[params.type_k],
            type_v=_KV_NAMES[params.type_v],
        )

    def _adopt(self, weights: Weights, kwargs: Mapping[str, Any]) -> None:
        """Let the parent's objects, made for the vocabulary alone, use the engine's weights."""
        self._drop()
        self._stack = ExitStack()  # closed backwards
        self._stack.callback(weights.close)
        self.model_params.vocab_only = False
        self._model = BorrowedModel(weights, self.model_path, self.model_params, self.verbose)
        catch_up = weakref.WeakMethod(self._catch_up)
        self._ctx = LazyContext(self._model, self.context_params, self.verbose, self._n_ctx, catch_up)
        self._stack.enter_context(closing(self._ctx))
        batch = _internals.LlamaBatch(
            n_tokens=self.n_batch, embd=0, n_seq_max=self.context_params.n_ctx, verbose=self.verbose
        )
        self._batch = self._stack.enter_context(closing(batch))
        self._sessions = Sessions(functools.partial(AnswerSession, weights, self._draft, int(self.n_threads_batch)))
        self._stack.callback(self._sessions.close)
        if kwargs.get("tokenizer") is None:
            self.tokenizer_ = llama_cpp_python.LlamaTokenizer(self)
        # llama.cpp rounds n_ctx up, and so does the limit of an answer
        self.input_ids = np.zeros(self._n_ctx, np.intc)
        rows = self._n_ctx if self._logits_all else self.scores.shape[0]
        self.scores = np.zeros((rows, self._n_vocab), np.single)

    def _drop(self) -> None:
        """Free what the parent's constructor made."""
        stack = self.__dict__.get("_stack")
        if stack is not None:
            stack.close()

    # -- answers ---------------------------------------------------------------------------------------------------

    def _create_completion(self, prompt: str | list[int], **call: Any) -> Iterator[Any]:
        if self._sessions is not None:
            self._require_fit(prompt, call.get("suffix"))
        processors, bias = call.get("logits_processor"), call.get("logit_bias")
        wish = _Wish(processors, bias, call.get("max_tokens"), call.get("seed"))
        call |= {"logits_processor": wish, "logit_bias": None}
        yield from super()._create_completion(prompt, **call)

    def _require_fit(self, prompt: str | list[int], suffix: str | None) -> None:
        """The parent makes its context to say that a prompt does not fit into it: say it before."""
        if suffix is not None:
            return
        n = len(prompt)
        if isinstance(prompt, str):
            data = prompt.encode("utf-8")
            if len(data) + 2 < self._n_ctx:  # a byte is a token at most; then there are BOS and a leading space
                return
            n = len(self.tokenize(data, add_bos=False, special=True)) + int(self._model.add_bos_token())
        if n >= self._n_ctx:
            raise ValueError(f"Requested tokens ({n}) exceed context window of {self._n_ctx}")

    @functools.wraps(_Parent.create_chat_completion)
    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """As the parent's."""
        wanted = kwargs.get("response_format")
        if isinstance(wanted, Mapping) and wanted.get("type") == "json_schema":
            self._warn(
                'llama-cpp-python ignores a response_format of type json_schema: write {"type": "json_object", '
                '"schema": ...}'
            )
        return super().create_chat_completion(*args, **kwargs)

    @functools.wraps(_Parent.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """Tokens that follow a prompt, as the parent's."""
        bound = _GENERATE.bind(self, *args, **kwargs)
        bound.apply_defaults()
        call = dict(bound.arguments)
        del call["self"]
        ids = [int(token) for token in call["tokens"]]
        wish = call["logits_processor"]
        if not isinstance(wish, _Wish):
            wish = _Wish(wish, None, None, None)
        found = self._plan(ids, call, wish)
        if isinstance(found, GenerationParams):
            yield from self._answer(ids, found, call["stopping_criteria"])
        else:
            call |= {"tokens": ids, "logits_processor": wish if len(wish) else None}
            yield from self._fall_back(found, call)

    def _plan(self, ids: Sequence[int], call: Mapping[str, Any], wish: _Wish) -> GenerationParams | str:
        """What to ask of the engine, or why it cannot be asked."""
        reason = self._why_plain or self._why_not(ids, call, wish)
        if reason is not None:
            return reason
        try:
            return self._params(call, wish)
        except ConfigError as error:
            return str(error)

    def _why_not(self, ids: Sequence[int], call: Mapping[str, Any], wish: _Wish) -> str | None:
        root = getattr(call["grammar"], "_root", "root")
        filled = self._ctx.touched and self.n_tokens > 0 and list(ids[: self.n_tokens]) == self._input_ids.tolist()
        reasons = (
            (wish.own, "logits_processor is code that must see the logits of every token"),
            (call["mirostat_mode"] in (1, 2) and call["temp"] > 0, "mirostat changes its mind with every token"),
            (root != "root", f"the grammar starts with {root!r}, not with root"),
            (self.cache, "set_cache keeps states of llama-cpp-python's own context"),
            (not call["reset"], "reset=False goes on with llama-cpp-python's own context"),
            (filled, "the prompt goes on with what eval, load_state or an image put into llama-cpp-python's context"),
        )
        return next((why for found, why in reasons if found), None)

    def _params(self, call: Mapping[str, Any], wish: _Wish) -> GenerationParams:
        """llama-cpp-python's sampling: filters only where it also divides by a temperature, penalties always.

        Raises:
            ConfigError: a value that the engine does not take.
        """
        temperature = call["temp"]
        filters = temperature > 0
        seed = (self._seed if wish.seed is None else wish.seed) & 0xFFFFFFFF
        most = wish.max_tokens
        grammar = call["grammar"]
        return GenerationParams(
            max_tokens=most if most is not None and 0 < most < self._n_ctx else None,
            temperature=1.0 if temperature < 0 else temperature,
            top_k=max(0, call["top_k"]) if filters else 0,
            top_p=min(1.0, call["top_p"]) if filters else 1.0,
            min_p=max(0.0, call["min_p"]) if filters else 0.0,
            typical_p=min(1.0, call["typical_p"]) if filters else 1.0,
            repeat_penalty=call["repeat_penalty"],
            repeat_last_n=max(0, self.last_n_tokens_size),
            presence_penalty=call["presence_penalty"],
            frequency_penalty=call["frequency_penalty"],
            logit_bias=wish.bias,
            grammar=None if grammar is None else grammar._grammar,
            seed=None if seed == _RANDOM_SEED else seed,
        )

    def _answer(
        self, ids: list[int], params: GenerationParams, criteria: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """Tokens from the engine, until the consumer has enough; like the parent it goes on behind an end of text."""
        turn = self._claim(ids)
        answered: list[int] = []
        while True:
            sent: Sequence[int] | None = None
            with closing(self._tokens(ids, params, answered)) as tokens:
                for token in tokens:
                    self._show(turn, ids)
                    if criteria is not None and criteria(self._shown(turn, ids), self._scores[0]):
                        return
                    sent = yield token
                    ids.append(token)
                    answered.append(token)
                    if sent:
                        ids.extend(int(one) for one in sent)
                        break
            params = replace(params, max_tokens=None)

    def _tokens(
        self, ids: Sequence[int], params: GenerationParams, answered: Sequence[int]
    ) -> Generator[int, None, None]:
        sessions = self._sessions
        if sessions is None:
            raise ConfigError("the model is not loaded")
        if answered and len(ids) >= self._n_ctx:
            raise RuntimeError(f"the context of {self._n_ctx} tokens is full: raise n_ctx")
        session = sessions.take()
        try:
            scores = self.scores if self._logits_all else None
            for chunk in session.answer(ids, params, answered=answered, scores=scores):
                self.stats = chunk.stats
                yield from chunk.token_ids
        finally:
            sessions.give_back(session)
            if self.verbose and self.stats is not None:
                print(_summary(self.stats), file=sys.stderr)

    def _fall_back(self, reason: str, call: dict[str, Any]) -> Generator[int, Sequence[int] | None, None]:
        self._warn(f"this answer runs on llama-cpp-python itself, without drafts: {reason}")
        self.stats, self._answering = None, None
        if self._sessions is None:
            yield from super().generate(**call)
            return
        if call["reset"] and self._stale is not None:  # its context need not catch up with what may not be reused
            self.n_tokens, self._stale = min(self.n_tokens, self._stale), None
            self._requires_eval = True
        try:
            yield from super().generate(**call)
        finally:
            self._ctx.touched = False

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, FallbackWarning, stacklevel=_level_of_caller())

    # -- what the parent shows of its context ------------------------------------------------------------------------

    def _claim(self, ids: Sequence[int]) -> object:
        """A new answer: ``input_ids`` shows its tokens from now on."""
        turn = self._answering = object()
        n = common_prefix(self._input_ids.tolist(), ids)
        valid = self.n_tokens if self._stale is None else self._stale
        self.n_tokens, self._stale = n, min(valid, n)
        self._ctx.touched = False
        if self._logits_all:
            self._read_prompt(ids)
        return turn

    def _read_prompt(self, ids: Sequence[int]) -> None:
        """``logits_all`` promises the logits of every prompt token: the parent's context gives them."""
        self.n_tokens, self._stale = min(self._stale or 0, len(ids) - 1), None
        super().eval(list(ids[self.n_tokens :]))
        self._stale = len(ids)
        self._ctx.touched = False

    def _show(self, turn: object, ids: Sequence[int]) -> None:
        """The tokens whose cells the parent would hold now, unless a newer answer shows its own."""
        if self._answering is turn:
            self.input_ids[self.n_tokens : len(ids)] = ids[self.n_tokens :]
            self.n_tokens = len(ids)
            self._requires_eval = True

    def _shown(self, turn: object, ids: Sequence[int]) -> Any:
        return self._input_ids if self._answering is turn else np.array(ids, np.intc)

    def _catch_up(self) -> None:
        """Somebody asks for the parent's context: let it read what was decoded without it."""
        start, self._stale = self._stale, None
        if start is not None and self.n_tokens:
            n = int(self.n_tokens)
            self.n_tokens = min(start, n - 1)  # at least one token, so that there are logits to sample from
            super().eval(self.input_ids[self.n_tokens : n].tolist())

    # -- the object itself -----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | {"n_threads": self._asked_threads, "draft": self._draft}

    def __enter__(self) -> Llama:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model; calling it twice is harmless."""
        self._drop()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._drop()


def _with_draft(signature: inspect.Signature) -> inspect.Signature:
    """The parent's constructor, with ``draft``: some programs look up which arguments there are."""
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    others = list(signature.parameters.values())[len(parameters) :]
    draft = inspect.Parameter("draft", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="DraftConfig | None")
    return signature.replace(parameters=[*parameters, draft, *others])


Llama.__init__.__signature__ = _with_draft(inspect.signature(_Parent.__init__))  # type: ignore[attr-defined]


def _asks(kwargs: Mapping[str, Any], name: str) -> bool:
    if name == "attention_type":
        return bool(kwargs.get(name, llama_cpp.LLAMA_ATTENTION_TYPE_UNSPECIFIED) >= 0)
    return bool(kwargs.get(name))


def _trained_context(model_path: str) -> int:
    """What ``n_ctx=0`` means.

    Raises:
        ModelError: the file does not say.
    """
    n_ctx = gguf.preflight(model_path).hyperparameter("context_length")
    if not isinstance(n_ctx, int) or n_ctx <= 0:
        raise ModelError(f"{model_path}: the file does not say how long its context is")
    return n_ctx


def _level_of_caller() -> int:
    """``stacklevel`` of the code that uses llama-cpp-python's interface: a warning should point there."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith((__name__, "llama_cpp.")):
        frame, level = frame.f_back, level + 1
    return level


def _summary(stats: GenerationStats) -> str:
    n, passes = stats.committed_tokens + stats.prefill_tokens, stats.passes + 1
    return f"esp_edge: {n} tokens in {passes} passes, {stats.tokens_per_second:.1f} tokens a second after the prompt"
