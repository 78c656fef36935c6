"""Whole generations on tiny random models: the same tokens with any drafter, and a cache that is right afterwards."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from adversarial import AlwaysWrong, Answer, Mixed, Oracle, ScriptedDrafter, all_drafters, answer, collect

from esp_edge.config import DraftConfig, GenerationParams, ModelConfig
from esp_edge.drafters.base import Budget
from esp_edge.errors import ConfigError, ContextLengthError, EspEdgeError, PromptError, UnsupportedModelError
from esp_edge.session import Model, Session, load
from esp_edge.tree import DraftTree

PROMPT = [5, 17, 42, 8, 61, 3]
SEEDED = (
    GenerationParams(max_tokens=32, ignore_eos=True),
    GenerationParams(max_tokens=32, ignore_eos=True, temperature=0.8, seed=1),
    GenerationParams(max_tokens=32, ignore_eos=True, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=2),
)
ESP = [
    DraftConfig("esp", masks=masks, tree=tree, block_complexity=bc, mask_init=init)
    for masks, tree, bc, init in (
        (1, None, 10, "vocab-mean"),
        (1, (4,), 10, "prompt-mean"),
        (2, None, 30, "sample"),
        (2, (7, 2), 30, "vocab-mean"),
        (3, None, 60, "composed"),
        (3, (5, 3, 2), 44, "last-k"),
    )
]
PLAIN = DraftConfig("none")


def prompts(n: int, n_vocab: int, length: int = 12) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, n_vocab - 3, int(rng.integers(1, length))).tolist() for _ in range(n)]


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Iterator[Model]:
    """Letters only, so that all text is ASCII; exact mode."""
    with load(tiny("llama", n_vocab=100), ModelConfig(n_ctx=256, exact=True)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def fast_model(tiny: Callable[..., Path]) -> Iterator[Model]:
    with load(tiny("llama", n_vocab=100), ModelConfig(n_ctx=256)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def bytes_model(tiny: Callable[..., Path]) -> Iterator[Model]:
    """A SentencePiece vocabulary in which every byte is a token."""
    with load(tiny("llama", tokenizer="llama"), ModelConfig(n_ctx=256, exact=True)) as loaded:
        yield loaded


def same(found: Answer, wanted: Answer) -> None:
    """The same answer in other portions."""
    assert found.token_ids == wanted.token_ids
    assert found.text == wanted.text
    assert found.finish_reason == wanted.finish_reason
    assert found.logprobs == wanted.logprobs
    assert found.session_ids == wanted.session_ids


def every_way(model: Model, prompt: list[int], params: GenerationParams, truth: Sequence[int] = ()) -> Answer:
    """Decode plainly, then with each adversarial drafter and with ESP; all must agree. Returns the plain answer."""
    plain = answer(model, prompt, params)
    for drafter in all_drafters(truth or prompt + plain.token_ids, model, seed=len(prompt)):
        same(answer(model, prompt, params, drafter=drafter), plain)
    for draft in ESP[:2]:
        same(answer(model, prompt, params, draft), plain)
    return plain


# -------------------------------------------------------------------------------------------------- losslessness


@pytest.mark.parametrize("params", SEEDED, ids=["greedy", "T0.8", "T1.5"])
def test_adversarial_drafters_change_nothing(model: Model, params: GenerationParams) -> None:
    accepted: dict[str, int] = {}
    for n, prompt in enumerate(prompts(6, 100)):
        plain = answer(model, prompt, params)
        for drafter in all_drafters(prompt + plain.token_ids, model, seed=n):
            found = answer(model, prompt, params, drafter=drafter)
            same(found, plain)
            accepted[drafter.name] = accepted.get(drafter.name, 0) + found.accepted
    assert accepted["wrong"] == 0
    assert min(accepted[name] for name in ("oracle", "wide", "deep", "mixed")) > 0
    assert accepted["oracle"] > 100


@pytest.mark.parametrize("impl", ["efficient", "naive"])
@pytest.mark.parametrize("draft", ESP, ids=lambda d: f"k{d.masks}-{d.tree or 'dynamic'}")
def test_esp_changes_nothing(model: Model, draft: DraftConfig, impl: str) -> None:
    accepted = 0
    with Session(model, replace(draft, impl=impl)) as session, Session(model, PLAIN) as plain:
        for params, prompt in itertools.product(SEEDED, prompts(4, 100)):
            found = collect(session, prompt, params)
            same(found, collect(plain, prompt, params))
            accepted += found.accepted
            assert found.chunks[0].stats.rows_per_pass <= draft.rows
    assert accepted > 0


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_0", "BF16", "F16"])
def test_other_weight_types(tiny: Callable[..., Path], dtype: str) -> None:
    with load(tiny("llama", dtype=dtype), ModelConfig(n_ctx=256, exact=True)) as model:
        for params in SEEDED[:2]:
            every_way(model, PROMPT, params)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "phi3", "gemma2", "gemma3", "olmoe", "mixtral"])
def test_other_architectures(tiny: Callable[..., Path], arch: str) -> None:
    with load(tiny(arch, n_vocab=300), ModelConfig(n_ctx=256, exact=True)) as model:
        assert model.capability.masks
        assert model.capability.speculation
        # gemma3 multiplies token embeddings by sqrt(n_embd) and leaves embedding rows alone; gemma2 multiplies both
        assert model.capability.scale == (8.0 if arch == "gemma3" else 1.0)
        for params in SEEDED[:2]:
            plain = answer(model, PROMPT, params)
            for draft in ESP[1:4]:
                same(answer(model, PROMPT, params, draft), plain)
            truth = PROMPT + plain.token_ids
            same(answer(model, PROMPT, params, drafter=Mixed(300, 64, truth=truth, most=20)), plain)


def test_a_long_answer_up_to_and_past_256_cells(tiny: Callable[..., Path]) -> None:
    """From 257 cells on, one row alone would take another attention kernel."""
    params = GenerationParams(max_tokens=150, ignore_eos=True)
    prompt = [i % 90 for i in range(520)]
    with load(tiny("llama", n_vocab=100, n_ctx=2048), ModelConfig(n_ctx=1024, exact=True)) as model:
        plain = answer(model, prompt, params)
        same(answer(model, prompt, params, ESP[3]), plain)
        same(answer(model, prompt, params, drafter=Mixed(100, 64, truth=prompt + plain.token_ids)), plain)
        start = prompt[:200]
        plain = answer(model, start, params)
        same(answer(model, start, params, ESP[0]), plain)


def test_default_mode_commits_the_targets_own_choices(fast_model: Model) -> None:
    """Bits may differ between widths, so only a near-tie may be decided in another way."""
    equal = 0
    for prompt in prompts(6, 100):
        params = GenerationParams(max_tokens=24, logprobs=2)
        plain = answer(fast_model, prompt, params)
        found = answer(fast_model, prompt, params, drafter=Oracle(prompt + plain.token_ids))
        for mine, theirs in zip(found.logprobs, plain.logprobs, strict=False):
            if mine.token_id != theirs.token_id:
                assert theirs.top[0][1] - theirs.top[1][1] < 0.05
                break
            assert mine.logprob == pytest.approx(theirs.logprob, abs=0.05)
            equal += 1
    assert equal > 100


def test_one_seed_three_times(model: Model) -> None:
    """Cold, with a warm prefix, with drafting off."""
    params = SEEDED[1]
    with Session(model, ESP[0]) as session:
        cold = collect(session, PROMPT, params)
        collect(session, [*PROMPT[:3], 7, 7], SEEDED[2])
        same(collect(session, PROMPT, params), cold)
    same(answer(model, PROMPT, params), cold)
    assert answer(model, PROMPT, replace(params, seed=2)).token_ids != cold.token_ids


def test_a_seed_of_ones_own_is_told(model: Model) -> None:
    params = GenerationParams(max_tokens=16, temperature=1.0)
    first = answer(model, PROMPT, params)
    seed = first.chunks[-1].stats.seed
    assert seed is not None
    same(answer(model, PROMPT, replace(params, seed=seed), ESP[1]), first)
    assert answer(model, PROMPT, params).chunks[-1].stats.seed != seed
    assert answer(model, PROMPT, GenerationParams(max_tokens=1)).chunks[-1].stats.seed is None


@pytest.mark.parametrize("params", SEEDED[:2], ids=["greedy", "T0.8"])
def test_logprobs_are_the_targets(model: Model, params: GenerationParams) -> None:
    params = replace(params, logprobs=3)
    plain = every_way(model, PROMPT, params)
    for token, entry in zip(plain.token_ids, plain.logprobs, strict=True):
        assert entry.token_id == token
        assert len(entry.top) == 3
        assert entry.logprob <= entry.top[0][1] + 1e-5 < 0
        assert dict(entry.top).get(token, entry.logprob) == pytest.approx(entry.logprob, abs=1e-5)
    bare = answer(model, PROMPT, replace(params, logprobs=0))
    assert [entry.top for entry in bare.logprobs] == [()] * len(plain.token_ids)
    assert bare.logprobs[3].logprob == plain.logprobs[3].logprob
    most = answer(model, PROMPT, replace(params, max_tokens=2, logprobs=100))
    assert {token for token, _ in most.logprobs[0].top} == set(range(100))


# ------------------------------------------------------------------------------------------------- end of answer


def ending_answer(model: Model) -> tuple[list[int], GenerationParams, Answer]:
    """A prompt whose plain answer reaches an end-of-generation token after 4 to 20 tokens."""
    eog = sorted(model.tokenizer.eog_ids)
    for prompt, bias in itertools.product(prompts(20, 100), (2.0, 4.0, 6.0, 8.0)):
        params = GenerationParams(max_tokens=60, logit_bias=dict.fromkeys(eog, bias))
        plain = answer(model, prompt, params)
        if plain.finish_reason == "stop" and 4 <= len(plain.token_ids) <= 20:
            return prompt, params, plain
    raise AssertionError("no prompt ends")


def test_the_end_inside_an_accepted_block(model: Model) -> None:
    prompt, params, plain = ending_answer(model)
    assert plain.token_ids[-1] in model.tokenizer.eog_ids
    drafter = Oracle([*prompt, *plain.token_ids, *[9] * 20], length=12)  # it drafts past the end
    with Session(model, drafter=drafter) as session:
        found = collect(session, prompt, params)
        same(found, plain)
        tail = drafter.trees[-1].token_ids.tolist()
        assert tail[tail.index(plain.token_ids[-1]) + 1 :] == [9] * (len(tail) - 1 - tail.index(plain.token_ids[-1]))
        assert tail[-1] == 9  # the end was a draft, and so were tokens behind it
        assert len(found.chunks[-1].token_ids) > 1
        assert session.token_ids == prompt + plain.token_ids
        # a second turn on top of it
        following = [*session.token_ids, 11, 12, 13]
        drafter.truth = following + answer(model, following, SEEDED[0]).token_ids
        same(collect(session, following, SEEDED[0]), answer(model, following, SEEDED[0]))
    every_way(model, prompt, params, [*prompt, *plain.token_ids, *[9] * 20])


def test_the_first_token_may_be_the_end(model: Model) -> None:
    params = GenerationParams(max_tokens=9, logit_bias={max(model.tokenizer.eog_ids): 1000.0})
    plain = every_way(model, PROMPT, params)
    assert (len(plain.token_ids), plain.text, plain.finish_reason) == (1, "", "stop")
    assert plain.chunks[-1].stats.passes == 0


@pytest.mark.parametrize("max_tokens", range(9))
def test_max_tokens_is_exact(model: Model, max_tokens: int) -> None:
    params = GenerationParams(max_tokens=max_tokens)
    truth = PROMPT + answer(model, PROMPT, GenerationParams(max_tokens=30)).token_ids
    plain = every_way(model, PROMPT, params, truth)  # an oracle that knows more than is wanted
    assert len(plain.token_ids) == max_tokens
    assert plain.finish_reason == "length"
    with Session(model, drafter=Oracle(truth, length=20)) as session:
        collect(session, PROMPT, params)
        longer = GenerationParams(max_tokens=12)
        same(collect(session, PROMPT, longer), answer(model, PROMPT, longer))


def test_nothing_is_drafted_beyond_the_last_token(model: Model) -> None:
    truth = PROMPT + answer(model, PROMPT, GenerationParams(max_tokens=30)).token_ids
    drafter = Oracle(truth, length=20)
    found = answer(model, PROMPT, GenerationParams(max_tokens=6), drafter=drafter)
    assert [len(chunk.token_ids) for chunk in found.chunks] == [1, 5]
    stats = found.chunks[-1].stats
    assert (stats.draft_tokens, stats.accepted_tokens, stats.committed_tokens) == (4, 4, 5)


# -------------------------------------------------------------------------------------------------- stop strings


def cut(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, int]:
    """What a reader of one token after the other shows, and how many tokens it takes."""
    text = ""
    for n, piece in enumerate(pieces, start=1):
        text += piece
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            return text[: min(found)], n
    return text, len(pieces)


def stop_sets(text: str) -> list[tuple[str, ...]]:
    """Stops at several places of a text and of several lengths; some start inside another one."""
    sets: list[tuple[str, ...]] = [(text[at : at + n],) for at in (0, 1, 7, 13, 20) for n in (1, 2, 3, 5, 9)]
    sets += [(text[20:23], text[9:12]), (text[9:12], text[20:23]), (text[8:14], text[10:12]), (text[5:30],)]
    return [*sets, ("never in it",), (text[7:9] + "~", text[15:18])]


def test_stop_strings(model: Model) -> None:
    params = GenerationParams(max_tokens=30, ignore_eos=True)
    full = answer(model, PROMPT, params)
    pieces = [model.tokenizer.piece(token).decode() for token in full.token_ids]
    truth = PROMPT + full.token_ids
    for stops in stop_sets(full.text):
        text, n_tokens = cut(pieces, stops)
        for drafter in (None, Oracle(truth, 12), Mixed(100, 64, truth=truth), AlwaysWrong(truth, 100)):
            found = answer(model, PROMPT, replace(params, stop=stops), drafter=drafter)
            assert (found.text, len(found.token_ids)) == (text, n_tokens), stops
            assert found.finish_reason == ("stop" if text != full.text else "length")
            shown = list(itertools.accumulate(chunk.text for chunk in found.chunks))
            assert all(text.startswith(part) for part in shown)  # nothing of a stop was ever shown
            assert found.session_ids == truth[: len(PROMPT) + n_tokens]


def test_a_stop_inside_an_accepted_block_leaves_the_state_right(model: Model) -> None:
    params = GenerationParams(max_tokens=30, ignore_eos=True)
    full = answer(model, PROMPT, params)
    drafter = Oracle(PROMPT + full.token_ids, length=20)
    with Session(model, drafter=drafter) as session:
        found = collect(session, PROMPT, replace(params, stop=(full.text[6:9],)))
        assert found.text == full.text[: full.text.index(full.text[6:9])]
        stats = found.chunks[-1].stats
        assert stats.committed_tokens + stats.prefill_tokens == len(found.token_ids)  # what was dropped is not counted
        same(collect(session, PROMPT, params), full)
        following = [*session.token_ids, 1, 2, 3]
        drafter.truth = []
        same(collect(session, following, params), answer(model, following, params))


# ------------------------------------------------------------------------------------------------------- UTF-8

EMOJI = GenerationParams(grammar='root ::= "😀é"+', seed=1)


@pytest.mark.parametrize("n", range(1, 14))
def test_half_characters_are_held_back(bytes_model: Model, n: int) -> None:
    params = replace(EMOJI, max_tokens=n)
    plain = every_way(bytes_model, [5, 6, 7], params)
    whole = ("😀é" * 3).encode()[:n].decode("utf-8", "ignore")
    half = n % 6 not in (0, 4)
    assert plain.text == whole + ("\ufffd" if half else "")
    shown = [chunk.text for chunk in plain.chunks]
    assert all("\ufffd" not in text for text in shown[:-1])


def test_a_stop_may_be_a_character_of_many_tokens(bytes_model: Model) -> None:
    plain = every_way(bytes_model, [5, 6, 7], replace(EMOJI, max_tokens=40, stop=("é😀",)))
    assert (plain.text, plain.finish_reason) == ("😀", "stop")
    plain = every_way(bytes_model, [5, 6, 7], replace(EMOJI, max_tokens=9, stop=("\ufffd",)))
    assert (plain.text, plain.finish_reason) == ("😀é", "stop")  # the half character that ends the answer


def test_broken_bytes_read_the_same_streamed_or_joined(bytes_model: Model) -> None:
    params = GenerationParams(max_tokens=60, temperature=1.5, top_k=0, seed=5, ignore_eos=True)
    for prompt in prompts(3, 300):
        plain = every_way(bytes_model, prompt, params)
        data = b"".join(bytes_model.tokenizer.piece(token) for token in plain.token_ids)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        body, tail = decoder.decode(data), decoder.decode(b"", final=True)
        assert plain.text == body + tail[:1]


# -------------------------------------------------------------------------------------------------- context end


@pytest.mark.parametrize("exact", [False, True])
def test_the_context_ends_the_answer(tiny: Callable[..., Path], exact: bool) -> None:
    prompt = [i % 90 for i in range(50)]
    params = GenerationParams(max_tokens=100, ignore_eos=True)
    wide = DraftConfig("esp", block_complexity=30, mask_init="vocab-mean")
    with load(tiny("llama", n_vocab=100), ModelConfig(n_ctx=64, exact=exact)) as model:
        plain = answer(model, prompt, params)
        assert (len(plain.token_ids), plain.finish_reason) == (14, "length")
        truth = [*prompt, *plain.token_ids, *[1] * 30]
        for drafter in all_drafters(truth, model):
            found = answer(model, prompt, params, drafter=drafter)
            assert (len(found.token_ids), found.finish_reason) == (14, "length")
            if exact:
                same(found, plain)
        found = answer(model, prompt, params, wide)
        assert len(found.token_ids) == 14
        if exact:
            same(found, plain)


def test_every_length_of_prompt_up_to_the_context(tiny: Callable[..., Path]) -> None:
    params = GenerationParams(ignore_eos=True)
    with load(tiny("llama", n_vocab=100), ModelConfig(n_ctx=64, exact=True)) as model:
        for n in (1, 2, 40, 58, 59, 60, 61, 62, 63):
            prompt = [i % 90 for i in range(n)]
            plain = every_way(model, prompt, params)
            assert (len(plain.token_ids), plain.finish_reason) == (64 - n, "length")
        with Session(model, PLAIN) as session:
            for n in (64, 65, 1000):
                with pytest.raises(ContextLengthError, match=f"{n} tokens but the context holds 64") as caught:
                    session.generate([1] * n)
                assert (caught.value.n_prompt, caught.value.n_ctx) == (n, 64)
            assert len(collect(session, [1] * 63, params).token_ids) == 1


def test_the_last_cell_of_a_256_cell_cache_is_used(tiny: Callable[..., Path]) -> None:
    """llama.cpp pads small caches to 256 cells; here there is nothing to spare."""
    params = GenerationParams(ignore_eos=True)
    prompt = [i % 90 for i in range(240)]
    for exact in (False, True):
        with load(tiny("llama", n_vocab=100), ModelConfig(n_ctx=256, exact=exact)) as model:
            plain = answer(model, prompt, params)
            for drafter in all_drafters(prompt + plain.token_ids, model):
                found = answer(model, prompt, params, drafter=drafter)
                assert len(found.token_ids) == 16
                if exact:
                    same(found, plain)
            for draft in ESP:
                assert len(answer(model, prompt, params, draft).token_ids) == 16


def test_a_prompt_that_leaves_no_room_to_probe(tiny: Callable[..., Path]) -> None:
    """The masks of the first pass do not fit: plain decoding to the end."""
    params = GenerationParams(ignore_eos=True)
    for exact in (False, True):
        with load(tiny("llama", n_vocab=100), ModelConfig(n_ctx=256, exact=exact)) as model:
            for n in (250, 252, 253, 254, 255):
                found = answer(model, [i % 90 for i in range(n)], params, ESP[4])
                assert (len(found.token_ids), found.finish_reason) == (256 - n, "length")


def test_block_complexities_too_small_for_a_tree(model: Model) -> None:
    wanted = answer(model, PROMPT, SEEDED[0])
    for rows, masks in itertools.product(range(1, 8), (1, 2, 3)):
        draft = DraftConfig("esp", block_complexity=rows, masks=masks, mask_init="vocab-mean")
        found = answer(model, PROMPT, SEEDED[0], draft)
        same(found, wanted)
        assert found.chunks[-1].stats.rows_per_pass <= rows


# ------------------------------------------------------------------------------------------------ stopping early


@pytest.mark.parametrize("taken", range(8))
def test_a_generator_may_be_closed_anywhere(model: Model, taken: int) -> None:
    full = answer(model, PROMPT, SEEDED[0])
    truth = PROMPT + full.token_ids
    drafters: list[ScriptedDrafter | None] = [None, Oracle(truth, 3), Mixed(100, 64, truth=truth, most=20)]
    for drafter in drafters:
        with Session(model, ESP[0] if drafter is None else None, drafter=drafter) as session:
            generation = session.generate(PROMPT, SEEDED[0])
            chunks = list(itertools.islice(generation, taken))
            generation.close()
            emitted = [token for chunk in chunks for token in chunk.token_ids]
            assert session.token_ids == (PROMPT + emitted if taken else [])
            assert list(generation) == []
            following = [*session.token_ids, 1, 2]
            wanted = answer(model, following, SEEDED[1])
            if drafter is not None:
                drafter.truth = following + wanted.token_ids
            same(collect(session, following, SEEDED[1]), wanted)


def test_an_exception_of_the_consumer_leaves_the_state_right(model: Model) -> None:
    with Session(model, ESP[1]) as session:
        generation = session.generate(PROMPT, SEEDED[0])
        next(generation)
        with pytest.raises(KeyError, match="mine"):
            generation.throw(KeyError("mine"))
        same(collect(session, PROMPT, SEEDED[0]), answer(model, PROMPT, SEEDED[0]))


def test_an_exception_inside_the_loop_leaves_the_state_right(model: Model) -> None:
    class Fails(Oracle):
        def draft(self, budget: Budget) -> DraftTree:
            raise ZeroDivisionError(str(budget))

    with Session(model, drafter=Fails(PROMPT)) as session:
        with pytest.raises(ZeroDivisionError):
            collect(session, PROMPT, SEEDED[0])
        session._custom = Oracle(PROMPT)
        same(collect(session, PROMPT, SEEDED[0]), answer(model, PROMPT, SEEDED[0]))


def test_a_newer_generation_ends_an_older_one(model: Model) -> None:
    wanted = answer(model, [9, 8, 7], SEEDED[1])
    with Session(model, ESP[0]) as session:
        old = session.generate(PROMPT, SEEDED[0])
        next(old)
        new = session.generate([9, 8, 7], SEEDED[1])
        next(old)  # nothing of the new one has run yet
        chunks = list(itertools.islice(new, 3))
        with pytest.raises(ConfigError, match="newer generation"):
            next(old)
        chunks += list(new)
        same(Answer(chunks, list(session.token_ids)), wanted)


def test_closing_an_older_generator_does_not_touch_a_newer_one(model: Model) -> None:
    wanted = answer(model, [9, 8, 7], SEEDED[0])
    with Session(model, ESP[0]) as session:
        old = session.generate(PROMPT, SEEDED[0])
        next(old)
        new = session.generate([9, 8, 7], SEEDED[0])
        chunks = [next(new)]
        old.close()
        chunks += list(new)
        same(Answer(chunks, list(session.token_ids)), wanted)


def test_a_finished_generator_may_be_drained_later(model: Model) -> None:
    with Session(model, PLAIN) as session:
        old = session.generate(PROMPT, GenerationParams(max_tokens=2))
        assert [next(old).finish_reason for _ in range(2)] == [None, "length"]
        collect(session, PROMPT, SEEDED[0])
        assert list(old) == []


def test_a_closed_session_says_so(model: Model) -> None:
    session = Session(model, ESP[0])
    waiting, running = session.generate(PROMPT, SEEDED[0]), session.generate(PROMPT, SEEDED[0])
    next(running)
    session.close()
    session.close()
    for use in (lambda: session.generate(PROMPT), lambda: next(waiting), lambda: next(running)):
        with pytest.raises(ConfigError, match=r"clos"):
            use()


def test_new_draft_settings_between_generations(model: Model) -> None:
    wanted = answer(model, PROMPT, SEEDED[0])
    with Session(model, PLAIN) as session:
        for draft in (*ESP, PLAIN, replace(ESP[3], impl="naive"), ESP[0]):
            session.draft = draft
            same(collect(session, PROMPT, SEEDED[0]), wanted)
        old = session.generate(PROMPT, SEEDED[0])
        next(old)
        session.draft = ESP[4]
        with pytest.raises(ConfigError, match="draft setting"):
            next(old)
        with pytest.raises(ConfigError, match="block complexity of 60"):
            session.draft = DraftConfig("esp", block_complexity=61, mask_init="vocab-mean")
        assert session.draft == ESP[4]
        same(collect(session, PROMPT, SEEDED[0]), wanted)


# ------------------------------------------------------------------------------------------------------- reuse


def test_a_second_call_reuses_the_common_prefix(fast_model: Model) -> None:
    with Session(fast_model, PLAIN) as session:
        first = collect(session, PROMPT, SEEDED[0])
        assert first.chunks[-1].stats.cached_tokens == 0
        everything = PROMPT + first.token_ids
        for prompt, cached in (
            ([*everything, 1, 2], len(everything) - 1),  # the last token has no cell yet
            (everything, len(everything) - 1),
            (PROMPT, len(PROMPT) - 1),  # the last prompt token is always computed again
            ([*PROMPT[:4], 90, 91], 4),
            ([91, *PROMPT], 0),
        ):
            session.generate([77], SEEDED[0]).close()  # a generator that never ran changes nothing
            stats = collect(session, prompt, GenerationParams(max_tokens=1)).chunks[-1].stats
            assert (stats.cached_tokens, stats.prompt_tokens) == (cached, len(prompt))
            collect(session, everything, GenerationParams(max_tokens=1))
            session.token_ids[:] = everything[: len(session.token_ids)]


def test_exact_mode_reuses_whole_chunks(tiny: Callable[..., Path]) -> None:
    prompt = [i % 90 for i in range(1100)]
    params = GenerationParams(max_tokens=8)
    calls = ((prompt, 0), (prompt, 1024), (prompt[:1000], 512), ([*prompt[:700], 5, 6], 512), ([3], 0))
    path = tiny("llama", n_vocab=100, n_ctx=2048)
    with load(path, ModelConfig(n_ctx=2048, exact=True)) as model, Session(model, ESP[0]) as session:
        for ids, cached in calls:
            found = collect(session, ids, params)
            assert found.chunks[-1].stats.cached_tokens == cached
            same(found, answer(model, ids, params))


# ------------------------------------------------------------------------------------------------------ prompts


def test_kinds_of_prompt(model: Model) -> None:
    text, messages = "the andin", [{"role": "user", "content": "hello <|im_end|> there"}]
    for prompt, ids in ((text, model.encode_prompt(text)), (messages, model.encode_chat(messages))):
        wanted = answer(model, ids, SEEDED[0])
        same(answer(model, prompt, SEEDED[0]), wanted)
        for same_ids in (tuple(ids), list(np.array(ids))):
            same(answer(model, same_ids, SEEDED[0]), wanted)
    assert model.encode_chat(messages).count(99) == 1  # the special token in the text stayed text


@pytest.mark.parametrize(
    "prompt",
    ["", [], (), [-1], [5, 100], [2**40], [1, "a"], ["text"], [1.5], [None], [{}], [{"role": "user"}], [{"role": "x"}]],
    ids=str,
)
def test_bad_prompts_are_refused_at_once(model: Model, prompt: object) -> None:
    with Session(model, PLAIN) as session:
        with pytest.raises(PromptError) as caught:
            session.generate(prompt, SEEDED[0])  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
        assert len(collect(session, PROMPT, SEEDED[0]).token_ids) == 32


# --------------------------------------------------------------------------------------------------------- stats


class Script(ScriptedDrafter):
    """Proposes, pass by pass, how many right tokens the chain begins with and how many wrong ones follow."""

    name = "script"

    def __init__(self, truth: Sequence[int], passes: Sequence[tuple[int, int]]) -> None:
        super().__init__(truth)
        self.passes = list(passes)

    def propose(self, n_nodes: int, depth: int) -> tuple[list[int], list[int]]:
        right, wrong = self.passes.pop(0)
        tokens = [*self.future[:right], *[(token + 1) % 100 for token in self.future[right : right + wrong]]]
        return self.chain(tokens[: min(n_nodes - 1, depth)])


def test_statistics_of_a_scripted_run(model: Model) -> None:
    truth = PROMPT + answer(model, PROMPT, GenerationParams(max_tokens=30, ignore_eos=True)).token_ids
    drafter = Script(truth, [(2, 1), (0, 3), (0, 0), (1, 0), (3, 0)])
    found = answer(model, PROMPT, GenerationParams(max_tokens=12, ignore_eos=True), drafter=drafter)
    # commits: 1 (prefill), 3, 1, 1, 2, 4 = 12
    assert [len(chunk.token_ids) for chunk in found.chunks] == [1, 3, 1, 1, 2, 4]
    assert [chunk.accepted for chunk in found.chunks[1:3]] == [(True, True, False), (False,)]
    assert found.chunks[1].sources == ("script", "script", "")
    stats = found.chunks[-1].stats
    assert all(chunk.stats is stats for chunk in found.chunks)
    assert (stats.drafter, stats.prompt_tokens, stats.prefill_tokens) == ("script", 6, 1)
    assert (stats.passes, stats.committed_tokens, stats.draft_tokens, stats.accepted_tokens) == (5, 11, 10, 6)
    assert (stats.rows, stats.rows_per_pass, stats.tau) == (15, 3.0, 11 / 5)
    assert stats.accepted_by_depth == [3, 2, 1]
    assert stats.drafted_by_depth == [4, 3, 3]
    assert stats.prefill_ms > 0
    assert stats.decode_ms >= stats.model_ms > 0
    assert stats.tokens_per_second == pytest.approx(1000 * 11 / stats.decode_ms)
    assert stats.as_dict()["tau"] == 2.2


def test_statistics_name_what_was_used(model: Model) -> None:
    stats = answer(model, PROMPT, SEEDED[0], ESP[3]).chunks[-1].stats
    assert (stats.drafter, stats.block_complexity, stats.masks, stats.mask_init) == ("esp", 30, 2, "vocab-mean")
    assert stats.note is None
    assert stats.rows_per_pass <= 30
    stats = answer(model, PROMPT, SEEDED[0]).chunks[-1].stats
    assert (stats.drafter, stats.block_complexity, stats.masks, stats.mask_init) == ("none", 1, 0, None)
    assert (stats.rows_per_pass, stats.tau, stats.passes) == (1.0, 1.0, 31)


def test_sources_name_the_mask_of_an_accepted_draft(model: Model) -> None:
    seen = set()
    for prompt in prompts(8, 100):
        for chunk in answer(model, prompt, SEEDED[0], ESP[3]).chunks:
            assert all(bool(source) == hit for source, hit in zip(chunk.sources, chunk.accepted, strict=True))
            seen |= set(chunk.sources)
    assert {"", "esp1"} <= seen <= {"", "esp1", "esp2"}


# ---------------------------------------------------------------------------------- models that cannot be probed


@pytest.fixture(scope="module")
def recurrent(tiny: Callable[..., Path]) -> Iterator[Model]:
    with load(tiny("mamba"), ModelConfig(n_ctx=256)) as model:
        yield model


def test_a_recurrent_model_falls_back_to_plain_decoding(recurrent: Model) -> None:
    assert not recurrent.capability.speculation
    plain = answer(recurrent, PROMPT, SEEDED[1])
    drafter = Oracle(PROMPT + plain.token_ids)
    for found in (answer(recurrent, PROMPT, SEEDED[1], ESP[3]), answer(recurrent, PROMPT, SEEDED[1], drafter=drafter)):
        same(found, plain)
        stats = found.chunks[-1].stats
        assert (stats.drafter, stats.draft_tokens, stats.block_complexity) == ("none", 0, 1)
        assert stats.note is not None
        assert "recurrent" in stats.note
    assert plain.chunks[-1].stats.note is None  # nothing was asked for


def test_a_recurrent_model_continues_or_starts_again(recurrent: Model) -> None:
    with Session(recurrent, ESP[0]) as session:
        first = collect(session, PROMPT, SEEDED[0])
        longer = [*session.token_ids, 1, 2]
        assert (found := collect(session, longer, SEEDED[0])).chunks[-1].stats.cached_tokens == len(longer) - 3
        assert found.token_ids == answer(recurrent, longer, SEEDED[0]).token_ids
        again = collect(session, PROMPT, SEEDED[0])  # cannot go back: starts again
        assert again.chunks[-1].stats.cached_tokens == 0
        same(again, first)


def test_a_recurrent_model_survives_an_error_between_pass_and_commit(recurrent: Model) -> None:
    forbidden = GenerationParams(max_tokens=4, logit_bias=dict.fromkeys(range(300), float("-inf")))
    with Session(recurrent, PLAIN) as session:
        with pytest.raises(EspEdgeError, match="forbidden"):
            collect(session, PROMPT, forbidden)
        same(collect(session, PROMPT, SEEDED[0]), answer(recurrent, PROMPT, SEEDED[0]))


def test_exact_mode_refuses_a_recurrent_model(tiny: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"recurrent.*drop --exact"):
        load(tiny("mamba"), ModelConfig(n_ctx=256, exact=True))


def test_a_model_without_masks_says_why(tiny: Callable[..., Path]) -> None:
    with load(tiny("llama", n_vocab=100), ModelConfig(n_ctx=256, exact=True)) as model:
        plain = answer(model, PROMPT, SEEDED[0])
        model.capability = replace(model.capability, masks=False, reason="it is blind")
        model.embeddings = None
        found = answer(model, PROMPT, SEEDED[0], ESP[0])
        same(found, plain)
        assert (found.chunks[-1].stats.drafter, found.chunks[-1].stats.note) == ("none", "it is blind")
        found = answer(model, PROMPT, SEEDED[0], drafter=Oracle(PROMPT + plain.token_ids))  # drafts go through ids
        same(found, plain)
        assert found.accepted > 20
