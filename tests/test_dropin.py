"""``esp_edge.Llama`` beside ``llama_cpp.Llama``: the same replies key by key, and the same greedy text."""

from __future__ import annotations

import asyncio
import copy
import ctypes
import gc
import inspect
import itertools
import json
import pickle
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import llama_cpp
import numpy as np
import pytest
from gguf import GGUFWriter
from llama_cpp import LlamaCache, LlamaGrammar, LogitsProcessorList, StoppingCriteriaList
from llama_cpp.llama_chat_format import Jinja2ChatFormatter
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from llama_cpp.llama_tokenizer import LlamaTokenizer

from esp_edge import DraftConfig, Llama
from esp_edge.dropin import FallbackWarning
from esp_edge.dropin.llama import _Wish
from esp_edge.errors import ConfigError, GrammarError, PromptError
from esp_edge.session import common_prefix

FLAT = DraftConfig("auto", cost="flat", mask_init="vocab-mean", block_complexity=20)  # nothing to measure
NARROW = replace(FLAT, block_complexity=6)  # passes of the bundled model are not free
SMALL = {"n_ctx": 256, "n_threads": 2, "verbose": False}
GREEDY = {"temperature": 0.0}
COLOUR = {
    "type": "object",
    "properties": {"colour": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
    "required": ["colour", "n"],
}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": COLOUR}}
PAINT = {"type": "function", "function": {"name": "paint"}}
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the rain"}]

Pair = tuple[Any, Llama]


def pair(path: Path, draft: DraftConfig = FLAT, **options: Any) -> Pair:
    """The same model in both classes."""
    settings = SMALL | options
    return llama_cpp.Llama(str(path), **settings), Llama(str(path), draft=draft, **settings)


@pytest.fixture(scope="module")
def both(tiny: Callable[..., Path]) -> Iterator[Pair]:
    parent, ours = pair(tiny())
    yield parent, ours
    assert_still_equal(parent, ours)
    ours.close()
    parent.close()


@pytest.fixture
def fresh(tiny: Callable[..., Path]) -> Iterator[Pair]:
    parent, ours = pair(tiny())
    yield parent, ours
    ours.close()
    parent.close()


@pytest.fixture(scope="module")
def bundled(model_path: Path) -> Iterator[Pair]:
    parent, ours = pair(model_path, NARROW, n_ctx=512)
    yield parent, ours
    ours.close()
    parent.close()


def assert_still_equal(parent: Any, ours: Llama) -> None:
    assert plain(ours("the rain", max_tokens=12, **GREEDY)) == plain(parent("the rain", max_tokens=12, **GREEDY))


def plain(reply: Any) -> Any:
    """A reply without what differs from call to call; a stream as the list of its chunks."""
    if not isinstance(reply, dict):
        return [plain(chunk) for chunk in reply]
    assert reply["id"].startswith(("cmpl-", "chatcmpl-"))
    assert isinstance(reply["created"], int)
    copied = copy.deepcopy({key: value for key, value in reply.items() if key not in ("id", "created")})
    for choice in copied["choices"]:
        for call in (choice.get("message") or choice.get("delta") or {}).get("tool_calls") or []:
            assert call.pop("id").startswith("call_")
    return copied


def outcome(work: Callable[[], Any]) -> Any:
    """What a call gives, an error as its type and text."""
    try:
        return plain(work())
    except Exception as error:
        return type(error), str(error)


def engine_made(llm: Llama) -> bool:
    """Whether the last answer came from the engine."""
    return llm.stats is not None


@pytest.fixture(autouse=True)
def _no_unexpected_fallback() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield


# -- completions -----------------------------------------------------------------------------------------------------

NEARLY_FULL = [5, 17, 42] * 78
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 40},
    "echo": {"max_tokens": 8, "echo": True},
    "suffix": {"max_tokens": 8, "suffix": " and so on"},
    "usual": {},
    "one": {"max_tokens": 1},
    "zero": {"prompt": NEARLY_FULL, "max_tokens": 0},
    "none": {"prompt": NEARLY_FULL, "max_tokens": None},
    "negative": {"prompt": NEARLY_FULL, "max_tokens": -1},
    "more than fits": {"prompt": NEARLY_FULL, "max_tokens": 10_000},
    "stop": {"max_tokens": 60, "stop": ["e", "th"]},
    "stop text": {"max_tokens": 60, "stop": "a"},
    "stop none": {"max_tokens": 8, "stop": None},
    "stop never": {"max_tokens": 12, "stop": ["does not occur"]},
    "bias": {"max_tokens": 12, "logit_bias": {"70": 100.0, 71: -100.0}},
    "bias of nothing": {"max_tokens": 6, "logit_bias": {}},
    "repeat penalty": {"max_tokens": 30, "repeat_penalty": 1.5},
    "other penalties": {"max_tokens": 30, "frequency_penalty": 0.9, "presence_penalty": 0.6},
    "filters that do nothing": {"max_tokens": 12, "top_k": -1, "top_p": 2.0, "min_p": -1.0, "typical_p": 3.0},
    "filters": {"max_tokens": 12, "top_k": 3, "top_p": 0.1, "min_p": 0.5, "typical_p": 0.2},
    "unused": {"max_tokens": 8, "tfs_z": 0.5, "mirostat_mode": 2},
    "name": {"max_tokens": 3, "model": "a name"},
    "seed": {"max_tokens": 8, "seed": 7},
    "criteria": {"max_tokens": 30, "stopping_criteria": StoppingCriteriaList([lambda ids, _: len(ids) >= 14])},
    "ids": {"prompt": [5, 17, 42, 8], "max_tokens": 10},
    "long": {"prompt": "the rain on the hill " * 9, "max_tokens": 12},
    "fills the context": {"prompt": [40, 41, 42] * 85, "max_tokens": None},
    "too long": {"prompt": "the rain " * 200, "max_tokens": 4},
    "too many ids": {"prompt": [40] * 256},
    "logprobs": {"logprobs": 3},
    "half characters": {"prompt": "\u00e9\u4e2d\U0001f600", "max_tokens": 30},
    "no grammar": {"grammar": "root ::= x"},
}


@pytest.mark.parametrize("name", COMPLETIONS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_completion_is_the_parents(both: Pair, name: str, stream: bool) -> None:
    call = {"prompt": "the rain", "stream": stream, **GREEDY, **COMPLETIONS[name]}
    if stream and name in ("suffix", "echo"):
        call.pop("echo", None)
    parent, ours = both
    assert outcome(lambda: ours.create_completion(**call)) == outcome(lambda: parent.create_completion(**call))
    assert ours.n_tokens == parent.n_tokens
    assert ours._input_ids.tolist() == parent._input_ids.tolist()


def test_drafts_are_made_and_the_parents_context_is_not(fresh: Pair) -> None:
    _, ours = fresh
    ours("the rain on the hill the rain on the", max_tokens=60, **GREEDY)
    assert ours.stats is not None
    assert ours.stats.draft_tokens > 0
    assert not ours._ctx.made


def test_calling_and_positional_arguments(both: Pair) -> None:
    parent, ours = both
    assert plain(ours("the rain", None, 9, 0.0)) == plain(parent("the rain", None, 9, 0.0))
    call = ("the rain", " end", 5, 0.0)
    assert plain(ours.create_completion(*call)) == plain(parent.create_completion(*call))


def test_signatures_are_the_parents() -> None:
    for name in ("__call__", "create_completion", "create_chat_completion", "generate", "eval", "sample", "embed"):
        assert inspect.signature(getattr(Llama, name)) == inspect.signature(getattr(llama_cpp.Llama, name))
    mine, theirs = (inspect.signature(kind.__init__).parameters for kind in (Llama, llama_cpp.Llama))
    assert {name: mine[name] for name in theirs} == dict(theirs)
    assert set(mine) - set(theirs) == {"draft"}
    assert list(inspect.signature(Llama).parameters)[:2] == ["model_path", "n_gpu_layers"]


def test_the_parents_sampling_defaults_are_kept(fresh: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = fresh
    asked = []
    plan = Llama._plan
    monkeypatch.setattr(Llama, "_plan", lambda self, *rest: asked.append(plan(self, *rest)) or asked[-1])
    ours("the rain", max_tokens=2)
    ours.create_chat_completion(MESSAGES, max_tokens=2)
    ours("the rain", max_tokens=2, temperature=-1.0)
    text, chat, unfiltered = asked
    assert (text.temperature, chat.temperature) == (0.8, 0.2)
    for params in (text, chat):
        assert (params.top_k, params.top_p, params.min_p, params.typical_p) == (40, 0.95, 0.05, 1.0)
        assert (params.repeat_penalty, params.repeat_last_n) == (1.0, 64)
    assert (unfiltered.temperature, unfiltered.top_k, unfiltered.top_p, unfiltered.min_p) == (1.0, 0, 1.0, 0.0)


def test_seeds_repeat(fresh: Pair) -> None:
    _, ours = fresh

    def text(**call: Any) -> str:
        return str(ours("the rain", max_tokens=30, temperature=1.5, **call)["choices"][0]["text"])

    assert text(seed=1) == text(seed=1) != text(seed=2)
    ours.set_seed(5)
    first = [text() for _ in range(3)]
    ours.set_seed(5)
    assert [text() for _ in range(3)] == first
    assert len(set(first)) == 3
    assert text(seed=-1) != text(seed=-1)  # as fresh as in llama.cpp


def test_penalties_hear_the_answer_only(both: Pair) -> None:
    parent, ours = both
    call = {"prompt": [40, 41, 42, 43, 44] * 8, "max_tokens": 20, "repeat_penalty": 3.0, **GREEDY}
    assert plain(ours(**call)) == plain(parent(**call))


# -- chat ------------------------------------------------------------------------------------------------------------

CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop": {"stop": ["e"], "max_tokens": 60},
    "json": {"response_format": {"type": "json_object"}, "max_tokens": 30},
    "schema": {"response_format": {"type": "json_object", "schema": COLOUR}, "max_tokens": 80},
    "json and bias": {"response_format": {"type": "json_object"}, "logit_bias": {"70": 5.0}, "max_tokens": 20},
    "tool": {"tools": [TOOL], "tool_choice": PAINT, "max_tokens": 80},
    "tools that nobody chose": {"tools": [TOOL], "tool_choice": "auto", "max_tokens": 12},
    "function": {"functions": [TOOL["function"]], "function_call": {"name": "paint"}, "max_tokens": 80},
    "unknown tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
    "grammar": {"grammar": LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)},
}


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_chat_is_the_parents(both: Pair, name: str, stream: bool) -> None:
    call = {"messages": MESSAGES, "max_tokens": 16, "stream": stream, **GREEDY, **CHATS[name]}
    parent, ours = both
    assert outcome(lambda: ours.create_chat_completion(**call)) == outcome(
        lambda: parent.create_chat_completion(**call)
    )


@pytest.mark.parametrize("name", ["chatml-function-calling", "llama-2", "gemma"])
def test_chat_formats(tiny: Callable[..., Path], name: str) -> None:
    parent, ours = pair(tiny(), chat_format=name, n_ctx=2048)
    call = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": PAINT, "max_tokens": 60, **GREEDY}
    assert plain(ours.create_chat_completion(**call)) == plain(parent.create_chat_completion(**call))
    assert ours.chat_format == parent.chat_format == name
    assert engine_made(ours)
    ours.close()


def test_a_json_schema_that_the_parent_ignores_is_told(fresh: Pair) -> None:
    parent, ours = fresh
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": COLOUR}}
    call = {"messages": MESSAGES, "max_tokens": 8, "response_format": wanted, **GREEDY}
    with pytest.warns(FallbackWarning, match="json_object"):
        mine = ours.create_chat_completion(**call)
    assert plain(mine) == plain(parent.create_chat_completion(**call))


def test_openai_objects(both: Pair) -> None:
    parent, ours = both
    whole = ours.create_chat_completion_openai_v1(MESSAGES, max_tokens=8, **GREEDY)
    chunks = list(ours.create_chat_completion_openai_v1(MESSAGES, max_tokens=8, stream=True, **GREEDY))
    assert whole.choices[0].message.content == "".join(c.choices[0].delta.content or "" for c in chunks)
    assert plain(whole.model_dump()) == plain(
        parent.create_chat_completion_openai_v1(MESSAGES, max_tokens=8, **GREEDY).model_dump()
    )


# -- log-probabilities -----------------------------------------------------------------------------------------------


def assert_close(mine: Any, theirs: Any) -> None:
    """Equal, numbers up to the rounding of other kernels."""
    if isinstance(theirs, dict):
        assert list(mine) == list(theirs)
        for key in theirs:
            assert_close(mine[key], theirs[key])
    elif isinstance(theirs, list):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_close(one, other)
    elif isinstance(theirs, float | np.floating):
        assert mine == pytest.approx(theirs, abs=1e-3)
    else:
        assert mine == theirs


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_logprobs(tiny: Callable[..., Path], echo: bool, stream: bool) -> None:
    parent, ours = pair(tiny(), logits_all=True)
    for prompt in ("the rain", "the rain on", "the rain"):
        call = {"prompt": prompt, "max_tokens": 7, "logprobs": 2, "echo": echo, "stream": stream, **GREEDY}
        assert_close(plain(ours(**call)), plain(parent(**call)))
        assert engine_made(ours)
    assert np.abs(ours._scores - parent._scores).max() < 1e-3
    assert len(ours.eval_logits) == len(parent.eval_logits)
    ours.close()


def test_chat_logprobs(tiny: Callable[..., Path]) -> None:
    parent, ours = pair(tiny(), logits_all=True)
    call = {"messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 3, **GREEDY}
    assert_close(plain(ours.create_chat_completion(**call)), plain(parent.create_chat_completion(**call)))
    mine, theirs = (plain(llm.create_chat_completion(stream=True, **call)) for llm in (ours, parent))
    assert_close(mine, theirs)
    ours.close()


# -- what the engine cannot do ---------------------------------------------------------------------------------------


def negated(_ids: Any, scores: Any) -> Any:
    return -scores


FALLBACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "processor": ("logits_processor", {"logits_processor": LogitsProcessorList([negated])}),
    "plain list": ("logits_processor", {"logits_processor": [negated]}),
    "mirostat": ("mirostat", {"mirostat_mode": 2, "temperature": 0.8, "seed": 3}),
    "mirostat 1": ("mirostat", {"mirostat_mode": 1, "temperature": 0.8, "seed": 3}),
    "odd value": ("temp must be", {"temperature": 1000.0, "top_k": 1}),
    "repeat penalty 0": ("repeat-penalty", {"repeat_penalty": 0.0}),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_a_fallback_gives_the_parents_answer_and_one_warning(fresh: Pair, name: str) -> None:
    why, options = FALLBACKS[name]
    call = {"prompt": "the rain", "max_tokens": 12, **GREEDY, **options}
    parent, ours = fresh
    wanted = [plain(parent(**call)) for _ in range(2)]
    with pytest.warns(FallbackWarning, match=why) as caught:
        assert [plain(ours(**call)) for _ in range(2)] == wanted
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert not engine_made(ours)
    assert_still_equal(parent, ours)
    assert engine_made(ours)


def test_another_root_of_a_grammar(fresh: Pair) -> None:
    parent, ours = fresh
    grammar = LlamaGrammar.from_string('root ::= "x"\nanswer ::= "yes" | "no"', verbose=False)
    grammar._root = "answer"
    with pytest.warns(FallbackWarning, match="'answer', not with root"):
        mine = ours("the rain", grammar=grammar, **GREEDY)
    assert plain(mine) == plain(parent("the rain", grammar=grammar, **GREEDY))


def test_a_bias_beside_a_processor_is_not_lost(fresh: Pair) -> None:
    _, ours = fresh
    only = {70: 1000.0}
    with pytest.warns(FallbackWarning, match="logits_processor"):
        mine = ours("the rain", max_tokens=4, logits_processor=LogitsProcessorList([negated]), logit_bias=only)
    assert mine["choices"][0]["text"] == ours.detokenize([70] * 4).decode()


def test_a_cache_keeps_the_parents_states(fresh: Pair) -> None:
    parent, ours = fresh
    for llm in fresh:
        llm.set_cache(LlamaCache())
    for prompt in ("the rain", "the hill", "the rain"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            mine = ours(prompt, max_tokens=6, **GREEDY)
        assert plain(mine) == plain(parent(prompt, max_tokens=6, **GREEDY))
    assert ours.cache.cache_size == parent.cache.cache_size
    ours.set_cache(None)
    parent.set_cache(None)
    assert_still_equal(parent, ours)


def test_mistakes_are_said(fresh: Pair) -> None:
    _, ours = fresh
    with pytest.raises(GrammarError, match="root"):
        ours("the rain", grammar=LlamaGrammar.from_string("answer ::= nothing", verbose=False))
    with pytest.raises(ConfigError, match="9999"):
        ours("the rain", logit_bias={9999: 1.0})
    with pytest.raises(PromptError, match="empty"):
        ours("")
    with pytest.raises(PromptError, match="token ids"):
        ours([1, 2, 5000])
    with pytest.raises(ConfigError, match="DraftConfig"):
        Llama(ours.model_path, draft="none", verbose=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not exist"):
        Llama("nowhere.gguf", verbose=False)
    assert plain(ours("the rain", max_tokens=3))["choices"]


# -- models and settings that the engine cannot use -------------------------------------------------------------------


def adapter(path: Path) -> Path:
    """A LoRA adapter of the tiny llama."""
    writer = GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    rng = np.random.default_rng(0)
    for name, shape in (("a", (4, 64)), ("b", (64, 4))):
        writer.add_tensor(f"blk.0.attn_q.weight.lora_{name}", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_lora_adapter(tiny: Callable[..., Path], tmp_path: Path) -> None:
    parent, ours = pair(tiny(), lora_path=str(adapter(tmp_path / "lora.gguf")))
    with pytest.warns(FallbackWarning, match="LoRA"):
        mine = ours("the rain", max_tokens=12, **GREEDY)
    assert plain(mine) == plain(parent("the rain", max_tokens=12, **GREEDY))
    without = Llama(str(tiny()), draft=FLAT, **SMALL)
    assert plain(mine)["choices"] != plain(without("the rain", max_tokens=12, **GREEDY))["choices"]


def test_a_draft_model_of_the_parents_own(tiny: Callable[..., Path]) -> None:
    parent, ours = pair(tiny(), draft_model=LlamaPromptLookupDecoding(num_pred_tokens=2))
    with pytest.warns(FallbackWarning, match="draft_model"):
        mine = ours("the rain", max_tokens=12, **GREEDY)
    assert plain(mine) == plain(parent("the rain", max_tokens=12, **GREEDY))


def test_a_recurrent_model(tiny: Callable[..., Path]) -> None:
    parent, ours = pair(tiny("mamba"))
    with pytest.warns(FallbackWarning, match="recurrent"):
        mine = ours("the rain", max_tokens=12, **GREEDY)
    assert plain(mine) == plain(parent("the rain", max_tokens=12, **GREEDY))


def test_a_vocabulary_alone(tiny: Callable[..., Path]) -> None:
    parent, ours = pair(tiny(), vocab_only=True)
    assert ours.tokenize(b"the rain") == parent.tokenize(b"the rain")


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma2", "phi3", "olmoe"])
def test_other_architectures(tiny: Callable[..., Path], arch: str) -> None:
    parent, ours = pair(tiny(arch))
    assert_still_equal(parent, ours)
    call = {"messages": MESSAGES, "max_tokens": 10, **GREEDY}
    assert plain(ours.create_chat_completion(**call)) == plain(parent.create_chat_completion(**call))
    assert engine_made(ours)
    ours.close()


SETTINGS: dict[str, dict[str, Any]] = {
    "rope": {"rope_freq_base": 500.0, "rope_freq_scale": 0.5},
    "yarn": {"rope_scaling_type": llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN, "yarn_orig_ctx": 64, "rope_freq_scale": 0.3},
    "overrides": {"kv_overrides": {"tokenizer.ggml.add_bos_token": True, "llama.rope.freq_base": 300.0}},
    "flash": {"flash_attn": True},
    "quantised cache": {"flash_attn": True, "type_k": llama_cpp.GGML_TYPE_Q8_0, "type_v": llama_cpp.GGML_TYPE_Q4_0},
    "whole context": {"n_ctx": 0},
    "odd context": {"n_ctx": 100},
    "small batches": {"n_batch": 8},
    "all layers on the GPU": {"n_gpu_layers": -1},
    "no mmap": {"use_mmap": False},
    "short memory": {"last_n_tokens_size": 3},
    "no memory": {"last_n_tokens_size": -1},
    "unknown": {"n_parts": -1, "f16_kv": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_constructor_act(tiny: Callable[..., Path], name: str) -> None:
    sizes = {"head_dim": 32} if name == "quantised cache" else {}
    parent, ours = pair(tiny("llama", **sizes), **SETTINGS[name])
    call = {"prompt": "the rain on the hill", "max_tokens": 24, "repeat_penalty": 1.2, **GREEDY}
    assert plain(ours(**call)) == plain(parent(**call))
    assert engine_made(ours)
    assert (ours.n_ctx(), ours.n_batch) == (parent.n_ctx(), parent.n_batch)
    ours.close()


# -- the rest of the interface ----------------------------------------------------------------------------------------


def test_vocabulary_and_metadata(both: Pair) -> None:
    def facts(llm: Any) -> Any:
        text = "the rain <|im_end|> \u4e2d".encode()
        ids = llm.tokenize(text, add_bos=True, special=True)
        vocabulary = (llm.n_vocab(), llm.n_embd(), llm.n_ctx(), llm.token_eos(), llm.token_bos(), llm.token_nl())
        tokenizer = llm.tokenizer()
        pieces = (llm.detokenize(ids), llm.detokenize(ids, special=True), llm.detokenize([]))
        coded = (tokenizer.encode("the rain"), tokenizer.decode(tokenizer.encode("the rain")))
        return vocabulary, ids, llm.tokenize(text, special=False), pieces, coded, llm.metadata, llm.chat_format

    parent, ours = both
    assert facts(ours) == facts(parent)
    assert not inspect.signature(Llama.n_ctx).parameters.keys() - {"self"}


def test_sentencepiece_spaces(tiny: Callable[..., Path]) -> None:
    parent, ours = pair(tiny("gemma2"))
    for text in (b"the rain", b" the", b"a"):
        for bos in (False, True):
            ids = parent.tokenize(text, add_bos=bos)
            assert ours.tokenize(text, add_bos=bos) == ids
            assert ours.detokenize(ids) == parent.detokenize(ids)
    ours.close()


@pytest.mark.parametrize("pooling", [llama_cpp.LLAMA_POOLING_TYPE_UNSPECIFIED, llama_cpp.LLAMA_POOLING_TYPE_MEAN])
def test_embeddings(tiny: Callable[..., Path], pooling: int) -> None:
    parent, ours = pair(tiny(), embedding=True, pooling_type=pooling)
    assert_still_equal(parent, ours)
    texts = ["the rain", "on the hill"]
    mine, theirs = ours.create_embedding(texts), parent.create_embedding(texts)
    assert_close(mine, theirs)
    assert_close(ours.embed("the rain", normalize=True), parent.embed("the rain", normalize=True))
    assert ours.pooling_type() == parent.pooling_type()
    ours.close()


def test_embeddings_of_an_encoder(tiny: Callable[..., Path]) -> None:
    parent, ours = pair(tiny("bert"), embedding=True)
    assert_close(ours.create_embedding("word1 word2"), parent.create_embedding("word1 word2"))


def test_tokens_one_by_one(fresh: Pair) -> None:
    """``generate`` goes on behind an end of text, until its consumer has enough."""

    def tokens(llm: Any, n: int, **call: Any) -> Any:
        found = []
        for token in llm.generate([5, 17, 42], temp=0.0, **call):
            found.append(token)
            if len(found) == n:
                break
        return found, llm.n_tokens, llm._input_ids.tolist()

    parent, ours = fresh
    eos = parent.token_eos()
    always_ends = LogitsProcessorList([_Wish(None, {eos: 100.0}, None, None)._add])
    assert tokens(ours, 30) == tokens(parent, 30)
    wish = _Wish(None, {eos: 100.0}, None, None)
    assert tokens(ours, 5, logits_processor=wish) == tokens(parent, 5, logits_processor=always_ends)
    assert ours._input_ids.tolist()[3:] == [eos] * 4


def test_tokens_from_outside_are_taken_up(fresh: Pair) -> None:
    _, ours = fresh
    grammar = LlamaGrammar.from_string("root ::= [a-z]+", verbose=False)
    answer = ours.generate([5, 17, 42], temp=0.0, grammar=grammar, repeat_penalty=1.3)
    before = [next(answer) for _ in range(4)]
    after = [answer.send([40, 41])] + [next(answer) for _ in range(3)]
    assert ours._input_ids.tolist() == [5, 17, 42, *before, 40, 41, *after[:3]]
    assert ours.detokenize(before + after).decode().isalpha()
    answer.close()


def test_the_end_of_the_context(fresh: Pair) -> None:
    _, ours = fresh
    answer = ours.generate([40] * 250, temp=0.0)
    for _ in range(6):
        next(answer)
    with pytest.raises(RuntimeError, match="n_ctx"):
        list(answer)


def test_eval_and_sample_see_what_was_answered(fresh: Pair) -> None:
    def story(llm: Any) -> Any:
        llm("the rain", max_tokens=10, **GREEDY)
        n = llm.n_tokens
        llm.eval([40])
        first = llm.sample(temp=0.0)
        llm.reset()
        llm.eval(llm.tokenize(b"the hill"))
        return n, first, llm.n_tokens, llm.sample(temp=0.0)

    parent, ours = fresh
    assert story(ours) == story(parent)
    assert_still_equal(parent, ours)


def test_sampling_goes_on_where_an_answer_stopped(fresh: Pair) -> None:
    def story(llm: Any) -> Any:
        llm("the rain", max_tokens=10, **GREEDY)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            answer = llm.generate([40], temp=0.0, reset=False)
            return [next(answer) for _ in range(6)], llm.n_tokens

    parent, ours = fresh
    assert story(ours) == story(parent)
    assert_still_equal(parent, ours)


def test_states(fresh: Pair) -> None:
    def story(llm: Any) -> Any:
        first = plain(llm("the rain", max_tokens=8, **GREEDY))
        state = llm.save_state()
        llm("something else", max_tokens=5, **GREEDY)
        llm.load_state(state)
        n = llm.n_tokens
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            longer = llm("the rain" + first["choices"][0]["text"], max_tokens=5, **GREEDY)
        return first, state.n_tokens, state.input_ids[: state.n_tokens].tolist(), n, plain(longer)

    parent, ours = fresh
    assert story(ours) == story(parent)


def see(*, llama: Any, **call: Any) -> Any:
    """A chat handler that puts something into the context which is no token of the vocabulary's text, like an image."""
    llama.reset()
    llama._ctx.kv_cache_clear()
    llama.eval([5, 6, 7])
    batch = llama_cpp.llama_batch_init(4, llama.n_embd(), 1)
    batch.n_tokens = 4
    picture = np.linspace(-1.0, 1.0, 4 * llama.n_embd(), dtype=np.float32)
    ctypes.memmove(batch.embd, picture.ctypes.data, picture.nbytes)
    for i in range(4):
        batch.pos[i], batch.n_seq_id[i], batch.logits[i] = 3 + i, 1, 0
        batch.seq_id[i][0] = 0
    assert llama_cpp.llama_decode(llama._ctx.ctx, batch) == 0
    llama_cpp.llama_batch_free(batch)
    llama.input_ids[3:7] = 0
    llama.n_tokens = 7
    llama.eval([8, 9])
    prompt = llama.input_ids[: llama.n_tokens].tolist()
    return llama.create_completion(prompt=prompt, max_tokens=call["max_tokens"], temperature=call["temperature"])


def test_a_chat_handler_that_fills_the_context(tiny: Callable[..., Path]) -> None:
    parent, ours = pair(tiny(), chat_handler=see)
    call = {"messages": MESSAGES, "max_tokens": 10, **GREEDY}
    with pytest.warns(FallbackWarning, match="image"):
        mine = ours.create_chat_completion(**call)
    assert plain(mine) == plain(parent.create_chat_completion(**call))
    tokens_alone = plain(ours([5, 6, 7, 0, 0, 0, 0, 8, 9], max_tokens=10, **GREEDY))
    assert engine_made(ours)
    assert tokens_alone["choices"] != plain(mine)["choices"]
    ours.close()


def test_a_chat_handler_and_a_tokenizer_of_ones_own(tiny: Callable[..., Path]) -> None:
    class Shouting(LlamaTokenizer):
        def __init__(self, path: str) -> None:
            self.llama = llama_cpp.Llama(path, vocab_only=True, verbose=False)
            super().__init__(self.llama)

        def detokenize(self, tokens: Any, prev_tokens: Any = None, special: bool = False) -> bytes:
            return super().detokenize(tokens, prev_tokens, special).upper()

    template = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    handler = Jinja2ChatFormatter(template, eos_token="<|im_end|>", bos_token="").to_chat_handler()
    parent, ours = pair(tiny(), chat_handler=handler, tokenizer=Shouting(str(tiny())))
    call = {"messages": MESSAGES, "max_tokens": 10, **GREEDY}
    mine = plain(ours.create_chat_completion(**call))
    assert mine == plain(parent.create_chat_completion(**call))
    assert mine["choices"][0]["message"]["content"] == mine["choices"][0]["message"]["content"].upper()
    assert engine_made(ours)


# -- the object ------------------------------------------------------------------------------------------------------


def test_pickles(fresh: Pair) -> None:
    parent, ours = fresh
    again = pickle.loads(pickle.dumps(ours))
    assert_still_equal(parent, again)
    assert engine_made(again)
    assert again._draft == FLAT
    assert again.__getstate__()["n_threads"] == 2
    with Llama(ours.model_path, verbose=False) as unsaid:
        assert unsaid.__getstate__()["n_threads"] is None
        assert unsaid.__getstate__()["vocab_only"] is False
    again.close()


def test_from_pretrained(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """README, "Pulling models from Hugging Face Hub", with a hub of one file."""
    asked = []

    def download(**call: Any) -> str:
        asked.append(call)
        return str(tiny())

    monkeypatch.setattr(huggingface_hub.HfFileSystem, "ls", lambda *_, **__: ["someone/model/model-Q8_0.gguf"])
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with Llama.from_pretrained(repo_id="someone/model", filename="*Q8_0.gguf", draft=FLAT, **SMALL) as ours:
        assert type(ours) is Llama
        ours("the rain", max_tokens=4)
        assert engine_made(ours)
    assert asked[-1]["filename"] == "model-Q8_0.gguf"


def test_a_subclass_and_a_copy(fresh: Pair) -> None:
    class Loud(Llama):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            self.heard = 0
            for token in super().generate(*args, **kwargs):
                self.heard += 1
                yield token

    parent, ours = fresh
    with Loud(ours.model_path, draft=FLAT, **SMALL) as loud, copy.copy(loud) as other:
        for llm in (loud, other):
            assert_still_equal(parent, llm)
            assert llm.heard == 12
            assert engine_made(llm)


def test_an_interrupted_answer(fresh: Pair) -> None:
    parent, ours = fresh

    def interrupt() -> None:
        for _ in ours("the rain", max_tokens=30, stream=True):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert_still_equal(parent, ours)


def test_closing_while_threads_are_answered(tiny: Callable[..., Path]) -> None:
    ours = Llama(tiny(), draft=FLAT, **SMALL)
    ours("the rain", max_tokens=2)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            while True:
                ours("the rain", max_tokens=50)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    ours.close()
    for thread in threads:
        thread.join(30)
    assert [type(error) for error in errors] == [ConfigError] * 3


def test_closing(tiny: Callable[..., Path]) -> None:
    with Llama(tiny(n_vocab=100), draft=FLAT, **SMALL) as ours:  # letters only: no half characters are held back
        stream = ours("the rain", max_tokens=None, stream=True, **GREEDY)
        next(stream)
    ours.close()
    with pytest.raises(ConfigError, match="closed"):
        list(stream)
    with pytest.raises(ConfigError, match="closed"):
        ours("the rain")


def test_nothing_keeps_it_alive(tiny: Callable[..., Path]) -> None:
    gc.collect()
    gc.disable()
    try:
        ours = Llama(str(tiny()), draft=FLAT, **SMALL)
        ours("the rain", max_tokens=4)
        ours.save_state()
        gone = weakref.ref(ours)
        del ours
        assert gone() is None
    finally:
        gc.enable()


def test_weights_are_loaded_once(fresh: Pair) -> None:
    _, ours = fresh
    ours("the rain", max_tokens=4)
    (session,) = [ours._sessions._idle]  # type: ignore[union-attr]
    assert session is not None
    assert ours.model is session.model.pointer
    ours.eval([5])
    assert ours._ctx.model.model is session.model.pointer


def text_of(stream: Any) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in stream)


def test_half_read_streams(tiny: Callable[..., Path]) -> None:
    ours = Llama(tiny(n_vocab=100), draft=FLAT, **SMALL)
    prompts = ("the rain", "on the hill", "an open door")
    call = {"max_tokens": 20, "stream": True, **GREEDY}
    alone = [text_of(ours(prompt, **call)) for prompt in prompts]
    streams = [ours(prompt, **call) for prompt in prompts]
    texts = ["", "", ""]
    for chunks in itertools.zip_longest(*streams):
        for i, chunk in enumerate(chunks):
            texts[i] += text_of([chunk]) if chunk else ""
    assert texts == alone
    assert text_of(ours(prompts[0], **call)) == alone[0]
    ours.close()


def test_threads(fresh: Pair) -> None:
    _, ours = fresh
    prompts = [f"the rain {i}" for i in range(6)]
    call = {"max_tokens": 24, "temperature": 0.9}
    alone = [ours(prompt, seed=i, **call)["choices"] for i, prompt in enumerate(prompts)]
    found: list[Any] = [None] * len(prompts)

    def ask(i: int) -> None:
        found[i] = ours(prompts[i], seed=i, **call)["choices"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_two_models_at_once(tiny: Callable[..., Path]) -> None:
    parent, ours = pair(tiny())
    other_parent, other = pair(tiny("qwen2"))
    for _ in range(2):
        assert_still_equal(parent, ours)
        assert_still_equal(other_parent, other)
    ours.close()
    assert_still_equal(other_parent, other)
    other.close()


def test_async_streaming(tiny: Callable[..., Path]) -> None:
    """As in servers built on llama-cpp-python: the stream is read in a thread, chunk by chunk."""
    parent, ours = pair(tiny(n_vocab=100))

    async def read(llm: Any, prompt: str) -> str:
        stream = llm(prompt, max_tokens=16, stream=True, **GREEDY)
        text, end = "", object()
        while (chunk := await asyncio.to_thread(next, stream, end)) is not end:
            text += chunk["choices"][0]["text"]
        return text

    async def read_both() -> list[str]:
        return await asyncio.gather(read(ours, "the rain"), read(ours, "on the hill"))

    prompts = ("the rain", "on the hill")
    wanted = [text_of(parent(prompt, max_tokens=16, stream=True, **GREEDY)) for prompt in prompts]
    assert asyncio.run(read_both()) == wanted
    ours.close()


def test_verbose(tiny: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    with Llama(str(tiny()), draft=FLAT, n_ctx=256) as ours:
        ours("the rain", max_tokens=6, **GREEDY)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Available chat formats" in err
    assert "esp_edge: 6 tokens in" in err


def test_the_package_is_imported_without_it() -> None:
    code = "import sys, esp_edge; assert not any('llama' in name for name in sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- llama-cpp-python's own examples, on the bundled model -------------------------------------------------------------


def assert_alike(both: Pair, ask: Callable[[Any], Any]) -> None:
    """The same reply, or texts that part where the two best tokens are as good as equal."""
    parent, ours = both
    theirs, mine = (plain(ask(llm)) for llm in both)
    assert engine_made(ours)
    if mine == theirs:
        return
    n = common_prefix(parent._input_ids.tolist(), ours._input_ids.tolist())
    judge = llama_cpp.Llama(parent.model_path, n_ctx=512, n_threads=2, logits_all=True, verbose=False)
    judge.eval(parent._input_ids[:n].tolist())
    second, first = np.sort(judge._scores[-1])[-2:]
    assert first - second < 0.2


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_high_level_inference(bundled: Pair, stream: bool) -> None:
    """README, "High-level API"; examples/high_level_api: inference and streaming."""
    call: dict[str, Any] = {"max_tokens": 32, "stop": ["Q:", "\n"], "stream": stream, **GREEDY}
    if not stream:
        call["echo"] = True
    for prompt in ("Q: Name the planets in the solar system? A: ", "Question: What is the capital of France? Answer: "):
        assert_alike(bundled, lambda llm: llm(prompt, **call))  # noqa: B023


@pytest.mark.model
def test_infill(bundled: Pair) -> None:
    """examples/high_level_api/high_level_api_infill.py."""
    call = {"prompt": "def add(", "suffix": "\n    return sum\n\n", "repeat_penalty": 1.0, **GREEDY}
    assert_alike(bundled, lambda llm: llm.create_completion(**call))


@pytest.mark.model
def test_json_mode_and_schema(bundled: Pair) -> None:
    """README, "JSON and JSON Schema Mode"."""
    messages = [
        {"role": "system", "content": "You are a helpful assistant that outputs in JSON."},
        {"role": "user", "content": "Who won the world series in 2020"},
    ]
    schema = {"type": "object", "properties": {"team_name": {"type": "string"}}, "required": ["team_name"]}
    parent, ours = bundled
    call = {"messages": messages, "max_tokens": 30, **GREEDY}
    wanted = {"type": "json_object", "schema": schema}
    mine = ours.create_chat_completion(response_format=wanted, **call)
    assert plain(mine) == plain(parent.create_chat_completion(response_format=wanted, **call))
    assert list(json.loads(mine["choices"][0]["message"]["content"])) == ["team_name"]
    free = ours.create_chat_completion(messages, response_format={"type": "json_object"}, max_tokens=8, seed=1)
    assert free["choices"][0]["message"]["content"].lstrip().startswith("{")


@pytest.mark.model
def test_function_calling(model_path: Path) -> None:
    """README, "Function Calling"."""
    parent, ours = pair(model_path, NARROW, n_ctx=512, chat_format="chatml-function-calling")
    properties = {"name": {"title": "Name", "type": "string"}, "age": {"title": "Age", "type": "integer"}}
    parameters = {"type": "object", "title": "UserDetail", "properties": properties, "required": ["name", "age"]}
    call: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": "The assistant calls functions with appropriate input when necessary"},
            {"role": "user", "content": "Extract Jason is 25 years old"},
        ],
        "tools": [{"type": "function", "function": {"name": "UserDetail", "parameters": parameters}}],
        "tool_choice": {"type": "function", "function": {"name": "UserDetail"}},
        "max_tokens": 60,
        **GREEDY,
    }
    mine = ours.create_chat_completion(**call)
    assert plain(mine) == plain(parent.create_chat_completion(**call))
    (tool,) = mine["choices"][0]["message"]["tool_calls"]
    assert set(json.loads(tool["function"]["arguments"])) == {"name", "age"}
    assert engine_made(ours)
    ours.close()


@pytest.mark.model
def test_logprobs_of_the_bundled_model(model_path: Path) -> None:
    parent, ours = pair(model_path, NARROW, logits_all=True)
    call = {"prompt": "The capital of France is", "max_tokens": 3, "logprobs": 2, **GREEDY}
    mine, theirs = plain(ours(**call)), plain(parent(**call))
    assert mine["choices"][0]["text"] == theirs["choices"][0]["text"]
    found, wanted = mine["choices"][0]["logprobs"], theirs["choices"][0]["logprobs"]
    assert list(found) == list(wanted)
    assert found["tokens"] == wanted["tokens"]
    assert found["text_offset"] == wanted["text_offset"]
    # the parent computes with llama.cpp's kernels, which round activations to 8 bits in another way than ours
    assert found["token_logprobs"] == pytest.approx(wanted["token_logprobs"], abs=0.25)
    ours.close()
