"""Choosing the mask initialisation: exact vectors, exact counts, equal positions, deadline."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from fakes import FakeEmbeddings, FakeOutputs
from numpy.testing import assert_allclose
from reference import running_update

import esp_edge.drafters.calibrate
from esp_edge.drafters.calibrate import CANDIDATES, RANKS, Hits, best, calibrate, split_candidate
from esp_edge.errors import ConfigError
from esp_edge.tree import DraftTree

N_VOCAB = 40
EMBEDDINGS = FakeEmbeddings(n_vocab=N_VOCAB)
TEXT = np.random.default_rng(3).integers(0, N_VOCAB, 60).tolist()
N_PROMPT = 9


class ScriptedStep:
    """Knows the text. A mask puts the true token at the rank that ``rank_of(vector)`` says."""

    def __init__(self, rank_of: Callable[[np.ndarray], int] = lambda _: 0, cost: float = 0.0) -> None:
        self.rank_of = rank_of
        self.cost = cost
        self.now = 0.0
        self.cells = 0
        self.n_resets = 0
        self.vectors: list[np.ndarray] = []
        self.tree: DraftTree | None = None

    def clock(self) -> float:
        return self.now

    def reset(self) -> None:
        self.n_resets += 1
        self.cells = 0

    def prefill(self, token_ids: Sequence[int]) -> None:
        assert list(token_ids) == TEXT[: len(token_ids)]
        self.cells += len(token_ids)

    def run(self, tree: DraftTree) -> FakeOutputs:
        tree.check()
        n = tree.n_nodes
        assert tree.token_ids.tolist() == TEXT[self.cells : self.cells + n]
        assert tree.masks.tolist() == [1] * n
        assert tree.mask_vectors is not None
        self.now += self.cost
        self.tree = tree
        logits = np.tile(-np.arange(N_VOCAB, dtype=np.float32), (tree.n_rows, 1))
        for node in range(n):
            truth = TEXT[self.cells + node + 2]
            order = [token for token in range(N_VOCAB) if token != truth]
            order.insert(self.rank_of(tree.mask_vectors[node]), truth)
            logits[tree.mask_rows(node)[0], order] = -np.arange(N_VOCAB)
            self.vectors.append(tree.mask_vectors[node])
        return FakeOutputs(logits)

    def commit(self, path: Sequence[int]) -> None:
        assert self.tree is not None
        assert list(path) == list(range(1, self.tree.n_nodes))
        self.cells += 1 + len(path)


@pytest.mark.parametrize("chunk", [1, 5, 12, 100])
def test_every_labelled_position_is_probed_once_a_candidate(chunk: int) -> None:
    step = ScriptedStep()
    results = calibrate(step, EMBEDDINGS, TEXT, N_PROMPT, ["vocab-mean", "sample"], chunk=chunk)
    n = len(TEXT) - N_PROMPT - 1  # the last prompt token up to the last but two of the text
    assert results == {name: Hits(n, (n,) * len(RANKS)) for name in ("vocab-mean", "sample")}
    assert (step.n_resets, len(step.vectors)) == (2, 2 * n)


def test_the_vectors_are_those_a_pass_rooted_at_each_token_would_use() -> None:
    step = ScriptedStep()
    calibrate(step, EMBEDDINGS, TEXT, N_PROMPT, ["prompt-mean"], chunk=7)
    expected = EMBEDDINGS.rows(TEXT[:N_PROMPT]).mean(axis=0, keepdims=True)
    for i, vector in enumerate(step.vectors):
        if i:
            expected = running_update(expected, EMBEDDINGS.rows([TEXT[N_PROMPT - 1 + i]]), 0.1)
        assert_allclose(vector, expected[0], rtol=1e-4, atol=1e-5)


def test_ranks_are_counted_and_the_best_guesser_wins() -> None:
    mean, start = EMBEDDINGS.mean(), EMBEDDINGS.rows(TEXT[:N_PROMPT]).mean(axis=0)

    def rank_of(vector: np.ndarray) -> int:
        if np.allclose(vector, start, atol=1e-6):
            return 1
        return 5 if np.allclose(vector, mean, atol=1e-6) else 30

    results = calibrate(ScriptedStep(rank_of), EMBEDDINGS, TEXT, N_PROMPT)
    n = len(TEXT) - N_PROMPT - 1
    assert list(results) == list(CANDIDATES)
    assert results["vocab-mean"].hits == (0, 0, 0, n, n, n)
    assert results["prompt-mean@0"].hits == (0, n, n, n, n, n)
    assert results["prompt-mean"].hits == (0, 1, 1, 1, 1, 1)  # the update moves it away after the first token
    assert results["sample"].hits == (0, 0, 0, 0, 0, 0)
    assert best(results) == "prompt-mean@0"
    assert results["vocab-mean"].rates[8] == 1.0
    assert results["vocab-mean"].score == pytest.approx(1 / 3)


def test_equal_scores_go_to_the_first() -> None:
    assert best({"vocab-mean": Hits(2, (1,) * 6), "sample": Hits(2, (1,) * 6)}) == "vocab-mean"
    with pytest.raises(ConfigError, match="at least one candidate"):
        best({})


def test_composed_learns_on_the_way() -> None:
    step = ScriptedStep()
    calibrate(step, EMBEDDINGS, TEXT, N_PROMPT, ["composed"], chunk=4)
    moved = [not np.allclose(vector, EMBEDDINGS.mean(), atol=1e-5) for vector in step.vectors]
    assert any(moved)


def test_a_slow_device_measures_fewer_but_equal_positions() -> None:
    step = ScriptedStep(cost=1.0)
    results = calibrate(step, EMBEDDINGS, TEXT, N_PROMPT, ["vocab-mean", "last-k"], deadline_s=6, clock=step.clock)
    assert [hits.positions for hits in results.values()] == [36, 36]  # 3 passes of 12 each
    step = ScriptedStep(cost=100.0)
    results = calibrate(step, EMBEDDINGS, TEXT, N_PROMPT, ["vocab-mean", "last-k"], deadline_s=6, clock=step.clock)
    assert [hits.positions for hits in results.values()] == [12, 12]


def test_a_device_that_warms_up_still_compares_equal_positions() -> None:
    step = ScriptedStep(cost=5.0)
    original = step.reset

    def reset() -> None:
        original()
        step.cost = 5.0 if step.n_resets == 1 else 0.1

    step.reset = reset  # type: ignore[method-assign]
    results = calibrate(step, EMBEDDINGS, TEXT, N_PROMPT, ["vocab-mean", "last-k"], deadline_s=10, clock=step.clock)
    assert [hits.positions for hits in results.values()] == [12, 12]


def test_progress_and_a_prompt_of_one_token() -> None:
    seen: list[tuple[int, int]] = []
    results = calibrate(
        ScriptedStep(), EMBEDDINGS, TEXT, 1, ["vocab-mean", "last-k"], progress=lambda done, n: seen.append((done, n))
    )
    assert seen == [(1, 2), (2, 2)]
    assert results["last-k"].positions == len(TEXT) - 2


def test_too_little_text_or_an_unknown_candidate() -> None:
    for n_prompt in (0, len(TEXT) - 1):
        with pytest.raises(ConfigError, match="at least 2 tokens"):
            calibrate(ScriptedStep(), EMBEDDINGS, TEXT, n_prompt)
    with pytest.raises(ConfigError, match="prompt-mean@0"):
        calibrate(ScriptedStep(), EMBEDDINGS, TEXT, N_PROMPT, ["prompt-mean@much"])


def test_candidate_names() -> None:
    assert split_candidate("token:a@b") == ("token:a@b", None)
    assert split_candidate("sigma:5@0.5") == ("sigma:5", 0.5)
    assert doctest.testmod(esp_edge.drafters.calibrate).failed == 0
