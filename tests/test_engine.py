"""Many sessions in one context: each answer is its solo answer, and nothing is left behind. Tiny random models."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esp_edge.config import DraftConfig, GenerationParams, ModelConfig
from esp_edge.drafters.base import Budget
from esp_edge.engine import Engine, Ticket
from esp_edge.engine.cache import Part, SharedCache
from esp_edge.errors import (
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    GrammarError,
    PromptError,
    QueueFullError,
)
from esp_edge.session import Chunk, Generation, Model, Session, load
from esp_edge.step import NoRoomError, SavedTrunk, Step
from esp_edge.tree import DraftTree, FloatArray

PLAIN = DraftConfig("none")
DRAFTS = (
    DraftConfig("esp", mask_init="vocab-mean"),
    DraftConfig("auto", cost="flat", mask_init="vocab-mean", block_complexity=30),
    DraftConfig("suffix"),
    PLAIN,
    DraftConfig("esp", masks=2, tree=(7, 2), mask_init="sample"),
    DraftConfig("auto", cost="flat", mask_init="vocab-mean", masks=2),
)
LONG = GenerationParams(max_tokens=400, ignore_eos=True)
SHORT = GenerationParams(max_tokens=6, ignore_eos=True)


@dataclass
class Answer:
    """A ticket's chunks, joined."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    def add(self, chunk: Chunk) -> None:
        self.token_ids += chunk.token_ids
        self.text += chunk.text
        self.finish_reason = chunk.finish_reason


def joined(chunks: Iterator[Chunk] | Ticket) -> Answer:
    answer = Answer()
    for chunk in chunks:
        answer.add(chunk)
    return answer


@pytest.fixture(scope="module")
def exact_model(tiny: Callable[..., Path]) -> Iterator[Model]:
    with load(tiny("llama", n_vocab=100, n_ctx=2048), ModelConfig(n_ctx=1024, exact=True)) as model:
        yield model


@pytest.fixture(scope="module")
def fast_model(tiny: Callable[..., Path]) -> Iterator[Model]:
    with load(tiny("llama", n_vocab=100, n_ctx=2048), ModelConfig(n_ctx=1024)) as model:
        yield model


@pytest.fixture(params=["exact", "fast"])
def model(request: pytest.FixtureRequest) -> Model:
    found: Model = request.getfixturevalue(f"{request.param}_model")
    return found


def prompt(seed: int, length: int = 12) -> list[int]:
    """Text that repeats itself here and there, so that copying drafts something."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 96, (4, 5))
    tokens: list[int] = words[rng.integers(0, 4, length // 5 + 1)].reshape(-1).tolist()
    return tokens[:length]


def solo(model: Model, ids: Sequence[int], params: GenerationParams, draft: DraftConfig = PLAIN) -> Answer:
    with Session(model, draft) as session:
        return joined(session.generate(list(ids), params))


@contextmanager
def paused(engine: Engine) -> Iterator[None]:
    """Keep the engine's thread from its next round, so that requests meet in one."""
    with engine._changed:
        yield


def passes(engine: Engine) -> list[list[Part]]:
    """A list that every later pass of the engine is added to."""
    seen: list[list[Part]] = []
    run = engine._cache.run

    def recording(parts: Sequence[Part]) -> bool:
        seen.append(list(parts))
        return run(parts)

    engine._cache.run = recording  # type: ignore[method-assign]
    return seen


def used_cells(engine: Engine) -> int:
    return sum(step.n_past for step in engine._cache.steps)


def stored(engine: Engine) -> list[tuple[int, int]]:
    """Lowest and highest position in every sequence of the context that has cells."""
    native = engine._cache.steps[0].native
    n = engine.n_slots * engine._cache.width + (1 if engine.model.config.exact else 0)
    found = [native.stored(sequence) for sequence in range(n)]
    return [pair for pair in found if pair != (-1, -1)]


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


# ------------------------------------------------------------------------------------------------ the shared pass


@pytest.fixture
def shared(exact_model: Model) -> Iterator[SharedCache]:
    cache = SharedCache(exact_model, 3)
    yield cache
    cache.close()


def rows_of(step: Step, tree: DraftTree) -> list[FloatArray]:
    return [step.native.logits(row) for row in range(tree.n_rows)]


def tree_of(root: int, seed: int, n_embd: int, n_nodes: int = 6) -> DraftTree:
    rng = np.random.default_rng(seed)
    parents = [-1, *(int(rng.integers(0, i)) for i in range(1, n_nodes))]
    masks = rng.integers(0, 2, n_nodes).tolist()
    vectors = rng.standard_normal((max(1, sum(masks)), n_embd)).astype(np.float32)
    return DraftTree.from_lists([root, *range(1, n_nodes)], parents, masks=masks, mask_vectors=vectors)


def test_a_shared_pass_gives_each_slot_the_bits_of_its_own(exact_model: Model, shared: SharedCache) -> None:
    assert exact_model.embeddings is not None
    trees = [tree_of(50 + n, n, exact_model.embeddings.n_embd) for n in range(3)]
    wanted = []
    for n, tree in enumerate(trees):
        context = exact_model.new_context(16)
        alone = Step(context)
        alone.prefill(prompt(n, 10 + 20 * n))
        alone.run(tree)
        wanted.append(rows_of(alone, tree))
        context.close()
        shared.steps[n].prefill(prompt(n, 10 + 20 * n))
    shared._top = 90
    parts = [Part(step, tree) for step, tree in zip(shared.steps, trees, strict=True)]
    assert shared.run(parts)
    for part, tree, rows in zip(parts, trees, wanted, strict=True):
        assert part.error is None
        for found, row in zip(rows_of(part.step, tree), rows, strict=True):
            np.testing.assert_array_equal(found, row)
    with pytest.raises(IndexError, match="is not in the last pass"):
        parts[0].step.native.logits(trees[0].n_rows)


def test_logits_of_a_slot_that_was_not_in_the_last_pass_cannot_be_read(shared: SharedCache) -> None:
    first, second = (Part(step, DraftTree.root_only(5)) for step in shared.steps[:2])
    assert shared.run([first])
    first.step.commit(())
    assert shared.run([second])
    assert second.step.native.argmax(0) >= 0
    with pytest.raises(IndexError, match="is not in the last pass"):
        first.step.native.argmax(0)


def test_a_part_that_cannot_run_leaves_the_others_alone(exact_model: Model, shared: SharedCache) -> None:
    assert exact_model.embeddings is not None
    good = Part(shared.steps[0], DraftTree.root_only(5))
    vectors = np.full((1, exact_model.embeddings.n_embd), np.nan, np.float32)
    bad = Part(shared.steps[1], DraftTree.root_only(6, 1, vectors))
    too_large = Part(shared.steps[2], tree_of(7, 0, exact_model.embeddings.n_embd, 70))
    assert shared.run([bad, too_large, good])
    assert good.error is None
    assert isinstance(bad.error, ValueError)
    assert isinstance(too_large.error, ConfigError)
    context = exact_model.new_context(1)
    alone = Step(context)
    alone.run(DraftTree.root_only(5))
    np.testing.assert_array_equal(good.step.native.logits(0), alone.native.logits(0))
    context.close()


def test_a_pass_without_room_is_tried_part_by_part(fast_model: Model) -> None:
    shared = SharedCache(fast_model, 2)
    parts = [Part(step, DraftTree.root_only(5)) for step in shared.steps]
    shared.steps[0].prefill([1] * (shared.n_cells - 1))
    assert not shared.run(parts)
    assert [part.error for part in parts] == [None, None]
    assert shared.run(parts[:1])
    assert parts[0].outputs is not None
    parts[0].step.commit(())
    shared.run(parts[1:])
    assert isinstance(parts[1].error, NoRoomError)
    shared.close()


@pytest.mark.parametrize("kind", ["exact", "fast"])
def test_a_trunk_survives_outside_of_the_cache(request: pytest.FixtureRequest, kind: str) -> None:
    model: Model = request.getfixturevalue(f"{kind}_model")
    assert model.embeddings is not None
    cache = SharedCache(model, 2)
    tree = tree_of(9, 3, model.embeddings.n_embd)
    step, other = cache.steps
    step.prefill(prompt(1, 40))
    step.run(tree)
    wanted = rows_of(step, tree)
    saved = step.save()
    step.reset()
    assert cache.restore(other, saved)
    assert other.n_past == 40
    other.run(tree)
    for found, row in zip(rows_of(other, tree), wanted, strict=True):
        np.testing.assert_array_equal(found, row)
    cache.close()


def random_path(tree: DraftTree, rng: np.random.Generator) -> list[int]:
    path, node = [], 0
    while rng.random() < 0.7:
        below = [child for (parent, _), child in tree.children().items() if parent == node]
        if not below:
            break
        node = int(rng.choice(below))
        path.append(node)
    return path


@pytest.mark.parametrize("dtype", ["F32", "Q8_0"])
def test_any_order_of_passes_gives_each_slot_its_own_bits(tiny: Callable[..., Path], dtype: str) -> None:
    """Prefill, trees, random commits, resets and swaps on three slots, beside three caches that are alone."""
    rng = np.random.default_rng(4)
    compared = tidied = 0
    with load(tiny("llama", n_vocab=100, dtype=dtype), ModelConfig(n_ctx=256, exact=True)) as model:
        assert model.embeddings is not None
        shared = SharedCache(model, 3)
        alone = [Step(model.new_context(16)) for _ in range(3)]
        for number in range(150):
            parts: list[tuple[Step, Part]] = []
            for step, own in zip(shared.steps, alone, strict=True):
                kind = rng.random()
                if kind < 0.04 or step.n_past > 60:
                    step.truncate(keep := int(rng.integers(0, 20)))
                    own.truncate(keep)
                elif kind < 0.08:
                    assert shared.restore(step, step.save())
                elif kind < 0.25 and not step.refeed:
                    parts.append((own, Part(step, token_ids=rng.integers(0, 96, int(rng.integers(2, 12))).tolist())))
                elif kind < 0.9:
                    tree = tree_of(int(rng.integers(0, 96)), number, model.embeddings.n_embd, int(rng.integers(1, 7)))
                    parts.append((own, Part(step, tree)))
            before = shared._top
            assert not parts or shared.run([part for _, part in parts])
            tidied += shared._top < before
            for own, part in parts:
                assert part.error is None
                if part.tree is None:
                    own.prefill(part.token_ids)
                    continue
                own.run(part.tree)
                for found, wanted in zip(rows_of(part.step, part.tree), rows_of(own, part.tree), strict=True):
                    np.testing.assert_array_equal(found, wanted)
                    compared += 1
                with shared.settling(part):
                    part.step.commit(path := random_path(part.tree, rng))
                own.commit(path)
                assert (part.step.n_past, part.step.refeed) == (own.n_past, own.refeed)
            assert shared._top >= sum(step.n_past for step in shared.steps)
        shared.close()
    assert compared > 1000
    assert tidied > 3


# -------------------------------------------------------------------------------------------------- solo answers


REQUESTS = [
    (prompt(n, 4 + 7 * n), GenerationParams(max_tokens=20 + 5 * n, temperature=0.9 * (n % 2), seed=n, ignore_eos=True))
    for n in range(8)
]


def test_eight_requests_on_three_slots_are_their_solo_answers(exact_model: Model) -> None:
    with Engine(exact_model, draft=DRAFTS[0], n_slots=3) as engine:
        seen = passes(engine)
        with paused(engine):
            tickets = [
                engine.submit(ids, params, draft=DRAFTS[n % len(DRAFTS)]) for n, (ids, params) in enumerate(REQUESTS)
            ]
        found = [joined(ticket) for ticket in tickets]
        assert max(len(parts) for parts in seen) == 3
        assert all(sum(part.rows for part in parts) < 64 for parts in seen)
        assert engine.status()["totals"]["finished"] == 8
    for answer, (ids, params) in zip(found, REQUESTS, strict=True):
        assert answer == solo(exact_model, ids, params)


def test_exact_answers_with_long_prompts_and_a_full_cache(exact_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several prefill chunks, parked cells until the cache must be put in order, trunks that are reused."""
    base = prompt(9, 530)
    work = [
        (base, replace(LONG, max_tokens=60)),
        (prompt(3, 90), replace(LONG, max_tokens=200, temperature=0.8, seed=3)),
        ([*base[:515], 4, 8], replace(LONG, max_tokens=40)),
        (prompt(4, 70), replace(LONG, max_tokens=120)),
    ]
    restored: list[int] = []
    restore = Step.restore

    def counting(step: Step, saved: SavedTrunk) -> bool:
        restored.append(saved.n_past)
        return restore(step, saved)

    monkeypatch.setattr(Step, "restore", counting)
    with Engine(exact_model, draft=DRAFTS[0], n_slots=3) as engine:
        with paused(engine):
            tickets = [engine.submit(ids, params, draft=DRAFTS[n]) for n, (ids, params) in enumerate(work)]
        found = [joined(ticket) for ticket in tickets]
        # not only finished prompts were put into the cache
        assert set(restored) - {len(ids) - 1 for ids, _ in work} - {512, 1024}
        again = engine.submit(work[2][0], work[2][1], draft=PLAIN)
        assert joined(again) == found[2]
        assert again.stats.cached_tokens == 512
    for answer, (ids, params) in zip(found, work, strict=True):
        assert answer == solo(exact_model, ids, params)


def test_a_preempted_exact_answer_is_its_solo_answer(exact_model: Model) -> None:
    """Three answers that together need more cells than there are."""
    work = [(prompt(20 + n, 150), replace(LONG, max_tokens=330, temperature=0.7 * n, seed=n)) for n in range(3)]
    with Engine(exact_model, n_slots=3, draft=DRAFTS[1]) as engine:
        with paused(engine):
            tickets = [engine.submit(ids, params) for ids, params in work]
        found = [joined(ticket) for ticket in tickets]
        assert engine.status()["totals"]["preempted"] > 0
    for answer, (ids, params) in zip(found, work, strict=True):
        assert answer == solo(exact_model, ids, params)


@pytest.mark.parametrize("arch", ["qwen2", "gemma3", "phi3", "mixtral"])
def test_other_architectures(tiny: Callable[..., Path], arch: str) -> None:
    with load(tiny(arch, n_vocab=300), ModelConfig(n_ctx=512, exact=True)) as model, Engine(model, n_slots=3) as engine:
        with paused(engine):
            tickets = [engine.submit(*REQUESTS[n], draft=DRAFTS[n]) for n in range(4)]
        for n, ticket in enumerate(tickets):
            assert joined(ticket) == solo(model, *REQUESTS[n])


@pytest.mark.parametrize("arch", ["mamba", "gemma3", "llama"])
def test_fast_mode_commits_the_targets_own_choices(tiny: Callable[..., Path], arch: str) -> None:
    """Other bits than alone, so only a near-tie may be decided in another way."""
    params = GenerationParams(max_tokens=24, logprobs=2, ignore_eos=True)
    same = 0
    with load(tiny(arch, n_vocab=300), ModelConfig(n_ctx=512)) as model, Engine(model, n_slots=3) as engine:
        with paused(engine):
            tickets = [engine.submit(REQUESTS[n][0], params, draft=DRAFTS[n]) for n in range(4)]
        for n, ticket in enumerate(tickets):
            with Session(model, PLAIN) as session:
                wanted = [entry for chunk in session.generate(REQUESTS[n][0], params) for entry in chunk.logprobs]
            for mine, theirs in zip([e for chunk in ticket for e in chunk.logprobs], wanted, strict=True):
                if mine.token_id != theirs.token_id:
                    assert theirs.top[0][1] - theirs.top[1][1] < 0.1
                    break
                assert mine.logprob == pytest.approx(theirs.logprob, abs=0.1)
                same += 1
    assert same > 40


def test_a_seed_gives_the_same_text_cold_warm_and_beside_others(exact_model: Model) -> None:
    params = replace(LONG, max_tokens=24, temperature=0.8, seed=5)
    with Engine(exact_model, draft=DRAFTS[0], n_slots=2) as engine:
        cold = joined(engine.submit(prompt(1), params))
        warm = joined(engine.submit(prompt(1), params))
        with paused(engine):
            tickets = [engine.submit(prompt(1), params), engine.submit(prompt(2), LONG, draft=PLAIN)]
        assert joined(tickets[0]) == cold == warm
        tickets[1].cancel()


# ------------------------------------------------------------------------------------------------------ the cells


def test_prefixes_are_reused_and_counted(fast_model: Model) -> None:
    first, second = prompt(1, 100), prompt(2, 100)
    with Engine(fast_model, draft=PLAIN, n_slots=2) as engine:
        one, two = (engine.submit(ids, SHORT) for ids in (first, second))
        answer = joined(one)
        joined(two)
        again = engine.submit([*second[:60], *first[:5]], SHORT)
        joined(again)
        assert again.stats.cached_tokens == 60
        following = engine.submit([*first, *answer.token_ids, 7, 8], SHORT)
        joined(following)
        assert following.stats.cached_tokens == len(first) + len(answer.token_ids) - 1
        assert engine.status()["totals"]["cached_tokens"] == 60 + following.stats.cached_tokens


@pytest.mark.parametrize("exact", [True, False])
def test_a_prefix_is_shared_between_slots(tiny: Callable[..., Path], exact: bool) -> None:
    """Of a slot that still decodes, too; in exact mode whole chunks of it."""
    base, params = prompt(5, 560), replace(LONG, max_tokens=200)
    work = [([*base[:540], *prompt(n, 9)], replace(SHORT, temperature=0.5 * n, seed=n)) for n in range(3)]
    path = tiny("llama", n_vocab=100, n_ctx=2048)
    with load(path, ModelConfig(n_ctx=2048, exact=exact)) as model, Engine(model, draft=DRAFTS[0], n_slots=3) as engine:
        talking = engine.submit(base, params)
        next(iter(talking))
        tickets = [engine.submit(*request) for request in work]
        found = [joined(ticket) for ticket in tickets]
        assert not talking.done
        answer = joined(talking)
        for ticket in tickets:
            assert ticket.stats.cached_tokens == 512 if exact else ticket.stats.cached_tokens >= 540
        engine.clear()
        assert used_cells(engine) == 0
        if exact:
            assert answer == solo(model, base, params)
            assert found == [solo(model, *request) for request in work]
        else:
            assert stored(engine) == []


def test_no_cell_is_left_behind(model: Model) -> None:
    rng = np.random.default_rng(0)
    with Engine(model, draft=DRAFTS[0], n_slots=3) as engine:
        tickets = [engine.submit(ids, params, draft=DRAFTS[n % 6]) for n, (ids, params) in enumerate(REQUESTS * 3)]
        for ticket in tickets:
            if rng.random() < 0.4:
                next(iter(ticket))
                ticket.cancel()
        assert all(ticket.wait(30) for ticket in tickets)
        wait_until(lambda: engine.status()["active"] == 0)
        for slot in engine._slots:
            assert len(slot.token_ids) == slot.step.n_past
            if model.config.exact:  # none of these prompts has a whole chunk
                assert slot.step.n_past == 0
        assert engine.status()["used_cells"] == used_cells(engine)
        engine.clear()
        assert used_cells(engine) == 0
        if model.config.exact:
            engine._cache._tidy(0)
        assert stored(engine) == []
        totals = engine.status()["totals"]
        assert totals["finished"] + totals["cancelled"] == totals["requests"] == 24


def test_the_trunk_unused_for_longest_makes_room(fast_model: Model) -> None:
    with Engine(fast_model, draft=PLAIN, n_slots=3) as engine:
        for n in range(3):
            joined(engine.submit(prompt(n, 300), SHORT))
        assert used_cells(engine) == 3 * 305
        late = engine.submit(prompt(7, 200), SHORT)
        joined(late)
        again = [engine.submit(prompt(n, 300), SHORT) for n in (2, 1, 0)]
        for ticket in again:
            joined(ticket)
        assert again[0].stats.cached_tokens == 299
        assert again[2].stats.cached_tokens < 299


def test_the_context_ends_with_length(model: Model) -> None:
    with Engine(model, draft=DRAFTS[0], n_slots=2) as engine:
        answer = joined(engine.submit(prompt(0, 1000), LONG))
        assert (len(answer.token_ids), answer.finish_reason) == (24, "length")
        last = joined(engine.submit(prompt(0, 1023), LONG))
        assert (len(last.token_ids), last.finish_reason) == (1, "length")


def test_more_than_the_cells_is_asked_of_all_slots(fast_model: Model) -> None:
    """Each gets its tokens: the youngest ones wait outside of the cache meanwhile."""
    with Engine(fast_model, draft=DRAFTS[2], n_slots=4) as engine:
        with paused(engine):
            tickets = [engine.submit(prompt(n, 200), LONG) for n in range(4)]
        answers = [joined(ticket) for ticket in tickets]
        assert [(len(answer.token_ids), answer.finish_reason) for answer in answers] == [(400, "length")] * 4
        assert engine.status()["totals"]["preempted"] > 0


# ------------------------------------------------------------------------------------------------------ requests


def test_what_cannot_be_asked_is_refused_at_once(model: Model) -> None:
    with Engine(model, draft=PLAIN, n_slots=1) as engine:
        with pytest.raises(ContextLengthError, match="1024 tokens"):
            engine.submit([1] * 1024)
        with pytest.raises(PromptError, match="empty"):
            engine.submit([])
        with pytest.raises(PromptError, match="between 0 and 99"):
            engine.submit([100])
        with pytest.raises(GrammarError):
            engine.submit([1], GenerationParams(grammar="root ::= missing"))
        if model.config.exact:
            with pytest.raises(ConfigError, match="exact mode allows"):
                engine.submit([1], draft=DraftConfig("esp", block_complexity=61, mask_init="vocab-mean"))
        assert engine.status()["totals"]["requests"] == 0
    for settings in ({"n_slots": 0}, {"n_slots": 65}, {"max_queue": -1}):
        with pytest.raises(ConfigError):
            Engine(model, draft=PLAIN, **settings)


def test_the_queue_has_a_limit(fast_model: Model) -> None:
    with Engine(fast_model, draft=PLAIN, n_slots=1, max_queue=2) as engine:
        running = engine.submit(prompt(0), LONG)
        next(iter(running))
        waiting = [engine.submit(prompt(n), SHORT) for n in (1, 2)]
        assert [ticket.queue_position for ticket in waiting] == [0, 1]
        with pytest.raises(QueueFullError, match="takes 2 waiting requests") as error:
            engine.submit(prompt(3), SHORT)
        assert error.value.retry_after > 0
        assert engine.status()["queue"] == 2
        waiting[0].cancel()
        assert waiting[0].wait(5)
        assert list(waiting[0]) == []
        running.cancel()
        assert len(joined(waiting[1]).token_ids) == 6
        assert waiting[1].queue_position is None


def test_an_empty_queue_still_serves_a_free_slot(fast_model: Model) -> None:
    with Engine(fast_model, draft=PLAIN, n_slots=1, max_queue=0) as engine:
        running = engine.submit(prompt(0), LONG)
        next(iter(running))
        with pytest.raises(QueueFullError):
            engine.submit(prompt(1), SHORT)
        running.cancel()


def test_no_token_wanted(fast_model: Model) -> None:
    with Engine(fast_model, draft=PLAIN) as engine:
        ticket = engine.submit(prompt(0), GenerationParams(max_tokens=0))
        assert ticket.done
        assert joined(ticket) == Answer([], "", "length")


def test_cancelling_ends_within_one_pass(model: Model) -> None:
    with Engine(model, draft=DRAFTS[0], n_slots=2) as engine:
        ticket = engine.submit(prompt(0), LONG)
        seen = passes(engine)
        stopped: list[int] = []

        def stop(item: Chunk | Exception | None) -> None:
            if isinstance(item, Chunk) and not stopped:
                ticket.cancel()
                stopped.append(len(seen))

        ticket.add_listener(stop)
        assert ticket.wait(10)
        ticket.cancel()
        assert len(seen) <= stopped[0] + 1
        assert ticket.cancelled
        assert ticket.error is None
        joined(ticket)
        assert engine.status()["totals"]["cancelled"] == 1
        assert len(joined(engine.submit(prompt(1), SHORT)).token_ids) == 6


def test_twenty_cancelled_streams_and_one_answer(model: Model) -> None:
    with Engine(model, draft=DRAFTS[0], n_slots=2) as engine:
        for n in range(20):
            ticket = engine.submit(prompt(n), LONG)
            next(iter(ticket))
            ticket.cancel()
        assert len(joined(engine.submit(prompt(1), SHORT)).token_ids) == 6


def test_listeners_hear_everything_in_order(fast_model: Model) -> None:
    with Engine(fast_model, draft=DRAFTS[0], n_slots=2) as engine:
        heard: list[list[Any]] = [[], [], []]
        ticket = engine.submit(prompt(0), replace(LONG, max_tokens=40))
        ticket.add_listener(heard[0].append)
        next(iter(ticket))
        ticket.add_listener(heard[1].append)

        def broken(_item: object) -> None:
            raise ValueError("a listener's own affair")

        ticket.add_listener(broken)
        chunks = list(ticket)
        ticket.add_listener(heard[2].append)
        assert heard[0] == heard[1] == heard[2] == [*chunks, None]
        assert list(ticket) == chunks
        assert ticket.prompt_tokens == 12
        assert ticket.stats is chunks[0].stats
        assert ticket.stats.prefill_ms > 0


def test_an_error_ends_only_its_own_answer(model: Model) -> None:
    """A grammar that runs out of tokens, and a drafter that breaks."""
    with Engine(model, draft=DRAFTS[0], n_slots=3) as engine:
        with paused(engine):
            forbidden = GenerationParams(logit_bias=dict.fromkeys(range(100), float("-inf")))
            tickets = [
                engine.submit(prompt(0), replace(LONG, max_tokens=50)),
                engine.submit(prompt(1), forbidden),
                engine.submit(prompt(2), replace(LONG, max_tokens=50), draft=PLAIN),
            ]
        answer = joined(tickets[0])
        assert len(answer.token_ids) == 50
        with pytest.raises(ConfigError):
            joined(tickets[1])
        assert isinstance(tickets[1].error, ConfigError)
        assert len(joined(tickets[2]).token_ids) == 50
        if model.config.exact:
            assert answer == solo(model, prompt(0), replace(LONG, max_tokens=50))
        assert engine.status()["totals"]["failed"] == 1


def test_a_drafter_that_breaks_ends_only_its_own_answer(fast_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Generation.draft

    def breaking(self: Generation, budget: Budget) -> None:
        if self.n_prompt == 13 and len(self.token_ids) > 20:
            raise RuntimeError("broken")
        draft(self, budget)

    monkeypatch.setattr(Generation, "draft", breaking)
    with Engine(fast_model, draft=PLAIN, n_slots=2) as engine:
        bad, good = engine.submit(prompt(0, 13), LONG), engine.submit(prompt(1), LONG)
        with pytest.raises(RuntimeError, match="broken"):
            joined(bad)
        assert len(joined(good).token_ids) == 400
        assert len(joined(engine.submit(prompt(0), SHORT)).token_ids) == 6


def test_many_sessions_make_drafts_dear(fast_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of four sessions that draft nothing brings four tokens in its time: a draft must be worth more than that.

    What the planner saw so far may be a session alone, whose milliseconds were worth a fourth.
    """
    budgets: list[Budget] = []
    draft = Generation.draft

    def watched(self: Generation, budget: Budget) -> None:
        budgets.append(budget)
        draft(self, budget)

    monkeypatch.setattr(Generation, "draft", watched)
    with Engine(fast_model, draft=DraftConfig("auto", cost="flat", mask_init="vocab-mean")) as engine:
        joined(engine.submit([5, 6, 7], replace(SHORT, max_tokens=4)))
        alone = budgets[0]
        budgets.clear()
        with paused(engine):  # all four are seen at once
            tickets = [engine.submit([5, 6, 7 + n], SHORT) for n in range(4)]
        for ticket in tickets:
            joined(ticket)
    assert alone.price == pytest.approx(1.0)  # a pass takes a millisecond, whatever its rows
    assert budgets[0].price == pytest.approx(4.0)


def test_a_short_request_does_not_wait_for_a_long_prompt(model: Model) -> None:
    with Engine(model, draft=PLAIN, n_slots=3) as engine:
        talking = engine.submit(prompt(1), LONG)
        next(iter(talking))
        with paused(engine):
            long = engine.submit(prompt(2, 900), SHORT)
            short = engine.submit(prompt(3, 9), replace(SHORT, max_tokens=1))
            seen = passes(engine)
            before = engine._rounds
        assert short.wait(10)
        assert engine._rounds - before <= 6
        assert long.wait(10)
        # the one that decodes is in every pass, beside at most 128 prompt rows
        assert all(
            any(part.tree is not None and part.step is engine._slots[0].step for part in parts) for parts in seen
        )
        assert max(sum(len(part.token_ids) for part in parts) for parts in seen) <= 128
        talking.cancel()


def test_the_oldest_prompt_and_the_shortest_ones_go_on_first(
    fast_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[dict[int, int]] = []
    run = Engine._pass

    def watched(self: Engine, parts: Sequence[Any]) -> None:
        passes.append({slot.request.serial: len(part.token_ids) for slot, part in parts if part.tree is None})
        run(self, parts)

    monkeypatch.setattr(Engine, "_pass", watched)
    with Engine(fast_model, draft=PLAIN) as engine:
        lengths = (400, 300, 20)
        with paused(engine):  # all are seen at once
            tickets = [engine.submit([n + 5] * length, SHORT) for n, length in enumerate(lengths)]
        for ticket in tickets:
            assert len(joined(ticket).token_ids) == 6
    assert passes[0] == {0: 256, 1: 512 - 256 - 19, 2: 19}
    # the shortest one decodes now, so a pass has fewer rows for prompts
    assert passes[1] == {0: 64 + 2, 1: 62}
    assert sum(one.get(0, 0) for one in passes) == 399
    assert sum(one.get(1, 0) for one in passes) == 299


def test_requests_start_in_their_order(fast_model: Model) -> None:
    started: list[int] = []
    with Engine(fast_model, draft=PLAIN, n_slots=2) as engine:
        with paused(engine):
            tickets = [engine.submit(prompt(n, 20 + n), SHORT) for n in range(6)]
            for n, ticket in enumerate(tickets):
                ticket.add_listener(
                    lambda item, n=n: started.append(n) if item is not None and n not in started else None
                )
        for ticket in tickets:
            ticket.wait(10)
    assert [number // 2 for number in started] == [0, 0, 1, 1, 2, 2]


def test_threads_get_their_own_answers(exact_model: Model) -> None:
    wanted = [solo(exact_model, *request) for request in REQUESTS]
    found: dict[int, Answer] = {}
    with Engine(exact_model, draft=DRAFTS[0], n_slots=3) as engine:

        def ask(n: int) -> None:
            found[n] = joined(engine.submit(*REQUESTS[n], draft=DRAFTS[n % 6]))

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        engine.status()
        for thread in threads:
            thread.join(30)
    assert [found[n] for n in range(8)] == wanted


# ------------------------------------------------------------------------------------------------------- closing


def test_closing_while_answers_run(model: Model) -> None:
    engine = Engine(model, draft=DRAFTS[0], n_slots=2)
    tickets = [engine.submit(prompt(n), LONG) for n in range(4)]
    next(iter(tickets[0]))
    engine.close()
    engine.close()
    for ticket in tickets:
        with pytest.raises(EngineClosedError, match="before this answer was complete"):
            joined(ticket)
    with pytest.raises(EngineClosedError, match="takes no more requests"):
        engine.submit(prompt(0))
    assert engine.status()["accepting"] is False


def test_draining_lets_answers_end(fast_model: Model) -> None:
    with Engine(fast_model, draft=PLAIN, n_slots=1) as engine:
        tickets = [engine.submit(prompt(n), SHORT) for n in range(3)]
        assert engine.drain(20)
        assert all(ticket.done and ticket.error is None for ticket in tickets)
        with pytest.raises(EngineClosedError):
            engine.submit(prompt(0))
    engine = Engine(fast_model, draft=PLAIN, n_slots=1)
    ticket = engine.submit(prompt(0), SHORT)
    engine.close(timeout=None)
    assert len(joined(ticket).token_ids) == 6


def test_closing_the_model_first_leaves_nobody_waiting(tiny: Callable[..., Path]) -> None:
    model = load(tiny("llama", n_vocab=100, n_ctx=2048), ModelConfig(n_ctx=1024))
    engine = Engine(model, draft=PLAIN, n_slots=2)
    ticket = engine.submit(prompt(0), LONG)
    next(iter(ticket))
    model.close()
    with pytest.raises((ConfigError, EngineClosedError)):
        joined(ticket)
    wait_until(lambda: not engine._thread.is_alive())
    engine.close()


UNCLOSED = """
import sys
from esp_edge import DraftConfig, ModelConfig, load
from esp_edge.engine import Engine
engine = Engine(load(sys.argv[1], ModelConfig(n_ctx=1024)), draft=DraftConfig("none"))
print(next(iter(engine.submit([1, 2, 3]))).finish_reason)
"""


def test_a_program_may_end_without_closing(tiny: Callable[..., Path]) -> None:
    command = [sys.executable, "-c", UNCLOSED, str(tiny("llama", n_vocab=100, n_ctx=2048))]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["None"], "")


def test_status_tells_what_happens(fast_model: Model) -> None:
    with Engine(fast_model, draft=PLAIN, n_slots=2, max_queue=7) as engine:
        ticket = engine.submit(prompt(0), LONG)
        next(iter(ticket))
        status = engine.status()
        assert [slot["state"] for slot in status["slots"]] == ["decode", "idle"]
        assert (status["active"], status["queue"], status["max_queue"], status["cells"]) == (1, 0, 7, 1024)
        assert status["totals"]["tokens"] > 0
        ticket.cancel()


# ----------------------------------------------------------------------------------------------- the bundled model


@pytest.mark.model
def test_answers_of_the_bundled_model_under_load_are_its_solo_answers(
    model_path: Path, questions: list[dict[str, Any]]
) -> None:
    texts = [question["turns"][0] for question in questions[:5]]
    work = [
        ([{"role": "user", "content": text}], GenerationParams(max_tokens=24, temperature=0.7 * (n % 2), seed=n))
        for n, text in enumerate(texts)
    ]
    with load(str(model_path), ModelConfig(n_ctx=2048, exact=True)) as model:
        with Engine(model, draft=DRAFTS[0], n_slots=3) as engine:
            with paused(engine):
                tickets = [engine.submit(*request, draft=DRAFTS[n]) for n, request in enumerate(work)]
            found = [joined(ticket) for ticket in tickets]
        with Session(model, PLAIN) as session:
            for answer, request in zip(found, work, strict=True):
                assert answer == joined(session.generate(*request))
