"""Mask vectors: initialisations, running update, composed vectors."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from fakes import FakeEmbeddings
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from reference import prompt_mean, running_update

import esp_edge.masks
from esp_edge.config import MASK_INITS
from esp_edge.errors import ConfigError, PromptError
from esp_edge.masks import MaskVectors, SlotGuesser, make_masks
from esp_edge.tree import FloatArray

# three tokens: 0 -> (0, 0), 1 -> (4, 0), 2 -> (2, 6)
SMALL = FakeEmbeddings(table=[[0, 0], [4, 0], [2, 6]])
TOKENS = st.lists(st.integers(0, 49), min_size=1, max_size=30)


def tokenize(text: str) -> list[int]:
    return [{"a": 1, "b": 2}[letter] for letter in text if letter in "ab"]


@pytest.mark.parametrize(
    ("init", "prompt", "expected"),
    [
        ("prompt-mean", [1, 1, 2, 0], [[2.5, 1.5], [2.5, 1.5]]),
        ("vocab-mean", [1], [[2, 2], [2, 2]]),
        ("last-k", [1, 0, 2], [[0, 0], [2, 6]]),
        ("last-k", [2], [[2, 6], [2, 6]]),
        ("token:a", [0], [[4, 0], [4, 0]]),
        ("token:a b", [0], [[3, 3], [3, 3]]),
        ("sigma:2", [0], [[2 + 2 * math.sqrt(8 / 3), 2 + 2 * math.sqrt(8)]] * 2),
        ("sigma:-1", [0], [[2 - math.sqrt(8 / 3), 2 - math.sqrt(8)]] * 2),
        ("composed", [1], [[2, 2], [2, 2]]),
    ],
)
def test_initialisations(init: str, prompt: list[int], expected: list[list[float]]) -> None:
    masks = make_masks(init, 2, SMALL, None, seed=0, tokenize=tokenize)
    masks.begin(prompt)
    assert masks.vectors().dtype == np.float32
    assert_allclose(masks.vectors(), expected, rtol=1e-6)
    assert masks.n_vocab == 3


def test_short_prompt_repeats_its_first_token() -> None:
    masks = make_masks("last-k", 3, SMALL)
    masks.begin([1, 2])
    assert masks.vectors().tolist() == [[4, 0], [4, 0], [2, 6]]


def test_every_configured_initialisation_exists() -> None:
    for init in [name for name in MASK_INITS if name != "auto"]:
        masks = make_masks(init, 3, FakeEmbeddings())
        masks.begin([1, 2, 3, 4])
        assert masks.vectors().shape == (3, 6)


def test_sample_follows_the_table_per_dimension_and_the_seed() -> None:
    table = np.random.default_rng(1).standard_normal((400, 3)) * [1.0, 5.0, 0.1] + [0.0, 9.0, -3.0]
    embeddings = FakeEmbeddings(table=table)
    masks = make_masks("sample", 3000, embeddings, seed=7)
    masks.begin([0])
    drawn = masks.vectors()
    assert_allclose(drawn.mean(axis=0), embeddings.mean(), atol=0.3)
    assert_allclose(drawn.std(axis=0), embeddings.std(), rtol=0.06)
    assert not np.array_equal(drawn[0], drawn[1])
    again, other = (make_masks("sample", 3000, embeddings, seed=seed) for seed in (7, 8))
    again.begin([5, 5])
    other.begin([0])
    assert np.array_equal(again.vectors(), drawn)
    assert not np.array_equal(other.vectors(), drawn)


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("auto", "calibrate"),
        ("median", "'median' was given"),
        ("token:xyz", "'xyz' has none"),
        ("sigma:much", "needs a number, but 'much'"),
        ("sigma:nan", "needs a number"),
    ],
)
def test_unusable_initialisations(init: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_masks(init, 1, SMALL, None, seed=0, tokenize=tokenize)


def test_token_text_needs_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        make_masks("token:a", 1, SMALL)


@pytest.mark.parametrize("init", ["prompt-mean", "vocab-mean", "last-k", "composed"])
def test_an_empty_prompt_is_refused(init: str) -> None:
    with pytest.raises(PromptError, match="at least one token"):
        make_masks(init, 1, SMALL).begin([])


def test_running_update_worked_example() -> None:
    masks = make_masks("vocab-mean", 1, SMALL, 0.5)
    masks.begin([0])
    masks.commit([1, 2])  # (2,2) -> (3,1) -> (2.5,3.5)
    assert masks.vectors().tolist() == [[2.5, 3.5]]
    masks.begin([0])  # a new generation starts afresh
    assert masks.vectors().tolist() == [[2, 2]]


@pytest.mark.parametrize("init", ["vocab-mean", "last-k", "sample", "token:a", "sigma:1"])
def test_only_the_prompt_mean_moves_by_default(init: str) -> None:
    masks = make_masks(init, 2, SMALL, None, seed=0, tokenize=tokenize)
    masks.begin([0, 2])
    before = masks.vectors()
    masks.commit([1, 2])
    assert masks.vectors() is before
    moving = make_masks("prompt-mean", 2, SMALL)
    moving.begin([0])
    moving.commit([1])
    assert_allclose(moving.vectors(), [[0.4, 0.0]] * 2, rtol=1e-6)
    frozen = make_masks("prompt-mean", 2, SMALL, 0.0)
    frozen.begin([0])
    frozen.commit([1])
    assert frozen.vectors().tolist() == [[0, 0], [0, 0]]


def test_update_by_one_is_the_last_token() -> None:
    masks = make_masks("prompt-mean", 1, SMALL, 1.0)
    masks.begin([0])
    masks.commit([1, 2])
    masks.commit([])
    assert masks.vectors().tolist() == [[2, 6]]


@given(TOKENS, st.lists(st.lists(st.integers(0, 49), max_size=5), max_size=6), st.floats(0, 1), st.integers(1, 3))
def test_update_over_blocks_equals_the_loop_over_tokens(
    prompt: list[int], blocks: list[list[int]], update: float, k: int
) -> None:
    embeddings = FakeEmbeddings()
    for init in ("prompt-mean", "last-k"):
        masks = make_masks(init, k, embeddings, update)
        masks.begin(prompt)
        expected = masks.vectors()
        for block in blocks:
            masks.commit(block)
        expected = running_update(expected, embeddings.rows([token for block in blocks for token in block]), update)
        assert_allclose(masks.vectors(), expected, rtol=1e-5, atol=1e-6)


@given(TOKENS)
def test_prompt_mean_equals_eq_4(prompt: list[int]) -> None:
    embeddings = FakeEmbeddings()
    masks = make_masks("prompt-mean", 2, embeddings)
    masks.begin(prompt)
    assert_allclose(masks.vectors(), np.tile(prompt_mean(embeddings.rows(prompt)), (2, 1)), rtol=1e-6, atol=1e-7)


def test_a_long_prompt_is_read_in_pieces() -> None:
    embeddings = FakeEmbeddings()
    prompt = list(range(50)) * 100
    masks = make_masks("prompt-mean", 1, embeddings)
    masks.begin(prompt)
    assert embeddings.n_reads == 5000
    assert embeddings.most_at_once <= 256
    assert_allclose(masks.vectors()[0], embeddings.mean(), atol=1e-6)


def test_tree_vectors_are_shared_and_as_many_as_the_largest_owner_uses() -> None:
    masks = make_masks("sample", 3, FakeEmbeddings())
    masks.begin([1])
    for counts, rows in [([3, 3], 3), ([2, 1], 2), ([0, 1], 1)]:
        assert np.array_equal(vectors_of(masks, [1, 2], [-1, 0], counts), masks.vectors()[:rows])
    none = np.zeros(1, np.int32)
    assert masks.for_tree(none, none - 1, none) is None


def test_earlier_trees_keep_their_vectors() -> None:
    masks = make_masks("prompt-mean", 1, SMALL)
    masks.begin([0])
    vectors = vectors_of(masks, [0], [-1], [1])
    masks.commit([1])
    assert vectors.tolist() == [[0, 0]]


# Composed masks. One-hot embeddings: a vector shows the weight of every token; the mean is 1/8 everywhere.

ONE_HOT = FakeEmbeddings(table=np.eye(8))


def composed(prompt: list[int], k: int = 1) -> MaskVectors:
    masks = make_masks("composed", k, ONE_HOT)
    masks.begin(prompt)
    return masks


def vectors_of(masks: MaskVectors, token_ids: list[int], parents: list[int], counts: list[int]) -> FloatArray:
    arrays = (np.array(values, np.int32) for values in (token_ids, parents, counts))
    vectors = masks.for_tree(*arrays)
    assert vectors is not None
    return vectors


def learn(masks: MaskVectors, nexts: dict[int, dict[int, float]]) -> None:
    """Row token -> {next token: probability}, all rows of equal length."""
    ids = np.array([list(row) for row in nexts.values()], np.int32)
    log_probs = np.log(np.array([list(row.values()) for row in nexts.values()], np.float32))
    masks.learn(np.array(list(nexts), np.int32), ids, log_probs)


def hot(weights: dict[int, float]) -> list[float]:
    """Vector with these token weights, the rest spread evenly by the vocabulary mean."""
    rest = (1 - sum(weights.values())) / 8
    return [weights.get(token, 0.0) + rest for token in range(8)]


def test_composed_without_a_guess_is_the_vocabulary_mean() -> None:
    vectors = vectors_of(composed([1, 2, 3], k=2), [3], [-1], [2])
    assert_allclose(vectors, [hot({}), hot({})], rtol=1e-6)


def test_composed_copies_after_the_longest_suffix() -> None:
    # "1 2" occurs at the start with "3 4" behind it, "2" alone last with "6": the longer match wins
    masks = composed([1, 2, 3, 4, 2, 6, 1, 2], k=2)
    vectors = vectors_of(masks, [2], [-1], [2])
    assert_allclose(vectors, [hot({3: 0.49}), hot({4: 0.49 * 0.62})], rtol=1e-6)


def test_composed_mixes_copy_and_adjacency() -> None:
    masks = composed([1, 2, 1])
    learn(masks, {1: {5: 0.5, 6: 0.25}})
    vectors = vectors_of(masks, [1], [-1], [1])
    assert_allclose(vectors, [hot({2: 0.24, 5: 0.76 * 0.5, 6: 0.76 * 0.25})], rtol=1e-6)


def test_composed_second_slot_follows_the_best_guess_of_the_first() -> None:
    masks = composed([1], k=2)
    learn(masks, {1: {5: 0.5}, 5: {7: 0.8}})
    vectors = vectors_of(masks, [1], [-1], [2])
    assert_allclose(vectors, [hot({5: 0.5}), hot({7: 0.5 * 0.8})], rtol=1e-6)


def test_composed_gives_every_owner_its_own_vector() -> None:
    masks = composed([1, 2, 3, 1])
    learn(masks, {5: {6: 0.5}})
    learn(masks, {5: {7: 0.5}})  # later rows overwrite
    # root 1 -> 2 -> 5, and 0 beside; no mask behind node 0
    vectors = vectors_of(masks, [1, 2, 0, 5], [-1, 0, 0, 1], [1, 1, 0, 1])
    assert_allclose(vectors, [hot({2: 0.24}), hot({3: 0.49}), hot({7: 0.5})], rtol=1e-6)


def test_composed_forgets_at_begin() -> None:
    masks = composed([1, 2, 1])
    learn(masks, {3: {6: 1.0}})
    masks.begin([3])
    assert_allclose(vectors_of(masks, [0], [-1], [1]), [hot({})], rtol=1e-6)


def test_guesser_doctest() -> None:
    assert doctest.testmod(esp_edge.masks).failed == 0


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.lists(st.integers(0, 2), max_size=3))
def test_copied_token_follows_the_newest_longest_match(history: list[int], path: list[int]) -> None:
    """Against a scan: longest suffix of up to 8 tokens, newest place, its continuation inside the history."""
    text = history[-8:] + path
    length, copied = 0, None
    for n in range(min(8, len(text)), 0, -1):
        places = [i for i in range(n, len(history)) if history[i - n : i] == text[-n:]]
        if places:
            length, copied = n, history[places[-1]]
            break
    guesser = SlotGuesser()
    guesser.begin(history[:3])
    guesser.commit(history[3:])
    (guess,) = guesser.guess(path, 1)
    confidence = [0.0, 0.24, 0.49, 0.62, 0.68, 0.80, 0.80, 0.80, 0.93][length]
    assert guess == ({} if copied is None else {copied: confidence})


@given(st.lists(st.integers(0, 7), min_size=1, max_size=20), st.integers(1, 3), st.integers(0, 1000))
def test_guesses_never_exceed_certainty(history: list[int], n_slots: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    guesser = SlotGuesser()
    guesser.begin(history)
    probs = rng.dirichlet(np.ones(4), size=8)
    guesser.learn(
        np.arange(8, dtype=np.int32), np.tile(np.arange(4, dtype=np.int32), (8, 1)), np.log(probs).astype(np.float32)
    )
    slots = guesser.guess([], n_slots)
    assert len(slots) == n_slots
    assert all(sum(slot.values()) <= 1 + 1e-6 for slot in slots)
