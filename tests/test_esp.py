"""EspDrafter: trees against the reference, budgets, accounting, and a whole decode against a scripted model."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from fakes import FakeEmbeddings, FakeOutputs
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from reference import Candidates, RefTree, block_complexity, dynamic_tree, positions, running_update, static_tree, walk

import esp_edge.drafters.esp
from esp_edge.config import DraftConfig
from esp_edge.drafters import Budget, Drafter, EspDrafter, NoneDrafter, make_drafter
from esp_edge.errors import ConfigError, UnsupportedModelError
from esp_edge.masks import make_masks
from esp_edge.tree import DraftTree, Verdict

PLENTY = Budget(rows=1000, depth=100, sequences=1000)
LOW = -200.0  # softmax gives exactly 0


def drafter_of(
    config: DraftConfig, n_vocab: int = 10, temperature: float = 0.0, init: str = "vocab-mean"
) -> EspDrafter:
    embeddings = FakeEmbeddings(n_vocab=n_vocab)
    drafter = EspDrafter(config, make_masks(init, config.masks, embeddings), temperature)
    drafter.begin([1, 2])
    return drafter


def observed(drafter: EspDrafter, mask_logits: np.ndarray, bonus: int) -> None:
    """One probe pass whose masks answer ``mask_logits``: float[k, n_vocab]."""
    tree = drafter.probe()
    drafter.observe(tree, FakeOutputs(np.vstack([mask_logits[:1] * 0, mask_logits])), Verdict((), (bonus,)))


def logits_of(rows: list[dict[int, float]], n_vocab: int = 10) -> np.ndarray:
    """Logits whose softmax is the given probabilities, next to nothing elsewhere."""
    logits = np.full((len(rows), n_vocab), LOW)
    for row, probs in zip(logits, rows, strict=True):
        for token, p in probs.items():
            row[token] = math.log(p)
    return logits


def as_ref(tree: DraftTree) -> RefTree:
    logs = np.log(tree.probs, where=tree.probs > 0, out=np.full(tree.n_nodes, -np.inf, np.float32))
    return RefTree(tree.token_ids.tolist(), tree.parents.tolist(), logs.tolist(), tree.depths.tolist())


# Worked examples


def test_probe_is_the_last_prompt_token_and_k_masks() -> None:
    tree = drafter_of(DraftConfig("esp", masks=2)).probe()
    tree.check()
    assert (tree.token_ids.tolist(), tree.masks.tolist(), tree.n_rows) == ([2], [2], 3)
    assert tree.mask_vectors is not None
    assert tree.mask_vectors.shape == (2, 6)


def test_static_tree_worked_example() -> None:
    drafter = drafter_of(DraftConfig("esp", masks=2, tree=(2, 2)))
    observed(drafter, logits_of([{4: 0.5, 7: 0.3, 9: 0.2}, {8: 0.6, 3: 0.4}]), bonus=5)
    tree = drafter.draft(PLENTY)
    tree.check()
    assert tree.token_ids.tolist() == [5, 4, 7, 8, 3]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1]
    assert tree.masks.tolist() == [2] * 5
    assert tree.sources == ("", "esp1", "esp1", "esp2", "esp2")
    assert_allclose(tree.probs, [1, 0.5, 0.3, 0.3, 0.2], rtol=1e-5)
    assert tree.n_rows == 15


def test_dynamic_tree_worked_example() -> None:
    # pool: .5 (4), .3 (7), .2 (9) | .5 x .8 = .4 (8), .5 x .2 = .1 (3); N = 8 // 2 - 1 = 3
    drafter = drafter_of(DraftConfig("esp", masks=2, block_complexity=12))
    observed(drafter, logits_of([{4: 0.5, 7: 0.3, 9: 0.2}, {8: 0.8, 3: 0.2}]), bonus=5)
    tree = drafter.draft(PLENTY)
    assert tree.token_ids.tolist() == [5, 4, 7, 8]
    assert tree.parents.tolist() == [-1, 0, 0, 1]
    assert_allclose(tree.probs, [1, 0.5, 0.3, 0.4], rtol=1e-5)


def test_equal_probabilities_go_by_depth_then_rank() -> None:
    drafter = drafter_of(DraftConfig("esp", masks=2, block_complexity=12))
    observed(drafter, logits_of([{4: 0.5, 7: 0.5}, {8: 1.0}]), bonus=5)  # 7 and 8 both stand at .5; 8 comes deeper
    assert drafter.draft(PLENTY).token_ids.tolist() == [5, 4, 7, 8]
    assert drafter.draft(Budget(rows=9, depth=9, sequences=9)).token_ids.tolist() == [5, 4, 7]
    drafter = drafter_of(DraftConfig("esp", masks=2, block_complexity=60), n_vocab=40)
    observed(drafter, logits_of([dict.fromkeys(range(10, 35), 1 / 25), {8: 1.0}], 40), bonus=5)  # a tie of 26
    assert drafter.draft(PLENTY).token_ids.tolist() == [5, *range(10, 29)]


def test_candidates_that_repeat_their_parent_are_skipped() -> None:
    answers = logits_of([{5: 0.6, 4: 0.3, 7: 0.1}, {4: 0.7, 8: 0.2, 3: 0.1}])
    pruned = drafter_of(DraftConfig("esp", masks=2, tree=(2, 2)))
    observed(pruned, answers, bonus=5)
    assert pruned.draft(PLENTY).token_ids.tolist() == [5, 4, 7, 8, 3]  # no 5 below root 5, no 4 below 4
    plain = drafter_of(DraftConfig("esp", masks=2, tree=(2, 2), prune=False))
    observed(plain, answers, bonus=5)
    assert plain.draft(PLENTY).token_ids.tolist() == [5, 5, 4, 4, 8]


def test_the_anchors_masks_seed_the_next_tree() -> None:
    drafter = drafter_of(DraftConfig("esp", masks=1, tree=(2,)))
    observed(drafter, logits_of([{4: 0.5, 7: 0.4}]), bonus=5)
    tree = drafter.draft(PLENTY)  # rows: 5, 4, 7, then their masks
    rows = logits_of([{7: 1.0}, {0: 1.0}, {3: 1.0}, {0: 1.0}, {0: 1.0}, {8: 0.9, 9: 0.1}])
    drafter.observe(tree, FakeOutputs(rows), Verdict((2,), (7, 3)))
    assert drafter.draft(PLENTY).token_ids.tolist() == [3, 8, 9]


def test_an_anchor_without_masks_leads_to_a_probe() -> None:
    drafter = drafter_of(DraftConfig("esp", masks=1, tree=(2,)))
    observed(drafter, logits_of([{4: 0.5, 7: 0.4}]), bonus=5)
    tree = drafter.draft(Budget(rows=2, depth=1, sequences=1))
    assert (tree.n_rows, tree.token_ids.tolist(), tree.masks.tolist()) == (2, [5], [1])
    bare = drafter.draft(Budget(rows=1, depth=5, sequences=5))
    assert (bare.n_rows, bare.mask_vectors) == (1, None)
    drafter.observe(bare, FakeOutputs(np.zeros((1, 10))), Verdict((), (6,)))
    tree = drafter.draft(PLENTY)
    assert (tree.token_ids.tolist(), tree.masks.tolist()) == ([6], [1])


def test_masks_end_where_positions_end() -> None:
    drafter = drafter_of(DraftConfig("esp", masks=3, tree=(2, 1, 1)))
    observed(drafter, logits_of([{4: 0.5, 7: 0.4}, {8: 0.9}, {3: 0.9}]), bonus=5)
    shapes = {depth: drafter.draft(Budget(1000, depth, 1000)).masks.tolist() for depth in range(7)}
    assert shapes == {
        0: [0],
        1: [1, 0, 0],
        2: [2, 1, 1, 0],
        3: [3, 2, 2, 1, 0],
        4: [3, 3, 3, 2, 1],
        5: [3, 3, 3, 3, 2],
        6: [3, 3, 3, 3, 3],
    }


def test_fewer_rows_than_masks_need_leave_plain_nodes() -> None:
    drafter = drafter_of(DraftConfig("esp", masks=2, tree=(2, 2)))
    observed(drafter, logits_of([{4: 0.5, 7: 0.3}, {8: 0.8}]), bonus=5)
    tree = drafter.draft(Budget(rows=2, depth=9, sequences=9))
    assert (tree.token_ids.tolist(), tree.masks.tolist(), tree.mask_vectors) == ([5, 4], [0, 0], None)


def test_static_trees_shrink_from_the_end() -> None:
    drafter = drafter_of(DraftConfig("esp", masks=1, tree=(4,)))
    observed(drafter, logits_of([{4: 0.4, 7: 0.3, 8: 0.2, 9: 0.1}]), bonus=5)
    lengths = [drafter.draft(Budget(rows, 9, 99)).n_nodes for rows in range(1, 13)]
    assert lengths == [1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5]
    assert drafter.draft(Budget(99, 9, 3)).n_nodes == 3


def test_begin_forgets_the_last_generation() -> None:
    drafter = drafter_of(DraftConfig("esp", masks=1, tree=(2,)))
    observed(drafter, logits_of([{4: 0.5, 7: 0.4}]), bonus=5)
    drafter.begin([3, 8])
    assert drafter.draft(PLENTY).token_ids.tolist() == [8]


def test_masks_follow_the_committed_tokens() -> None:
    config = DraftConfig("esp", masks=1, tree=(2,), mask_init="prompt-mean")
    embeddings = FakeEmbeddings(n_vocab=10)
    drafter = EspDrafter(config, make_masks("prompt-mean", 1, embeddings))
    drafter.begin([1, 2])
    observed(drafter, logits_of([{4: 0.5, 7: 0.4}]), bonus=5)
    start = embeddings.rows([1, 2]).mean(axis=0, keepdims=True)
    vectors = drafter.draft(PLENTY).mask_vectors
    assert vectors is not None
    assert_allclose(vectors, running_update(start, embeddings.rows([5]), 0.1), rtol=1e-5)


# Against the reference


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, np.ndarray, int, bool]:
    """k, mask logits with many ties, the bonus token, pruning."""
    k, n_vocab = draw(st.integers(1, 3)), draw(st.integers(2, 12))
    values = st.one_of(st.integers(-3, 3).map(float), st.floats(-4, 4, width=32))
    flat = draw(st.lists(values, min_size=k * n_vocab, max_size=k * n_vocab))
    return k, np.array(flat).reshape(k, n_vocab), draw(st.integers(0, n_vocab - 1)), draw(st.booleans())


def candidates_of(logits: np.ndarray) -> list[Candidates]:
    ids, log_probs = FakeOutputs(logits).top_k(range(len(logits)), logits.shape[1])
    return [list(zip(i.tolist(), lp.tolist(), strict=True)) for i, lp in zip(ids, log_probs, strict=True)]


def assert_same(tree: DraftTree, expected: RefTree) -> None:
    tree.check()
    got = as_ref(tree)
    assert (got.token_ids, got.parents, got.depths) == (expected.token_ids, expected.parents, expected.depths)
    assert_allclose(tree.probs, np.exp(expected.log_probs), rtol=1e-5, atol=1e-30)


@given(cases(), st.integers(2, 60))
def test_dynamic_trees_equal_algorithm_1(case: tuple[int, np.ndarray, int, bool], rows: int) -> None:
    k, logits, bonus, prune = case
    drafter = drafter_of(DraftConfig("esp", masks=k, block_complexity=rows, prune=prune), logits.shape[1])
    observed(drafter, logits, bonus)
    n_nodes = rows // (k + 1) - 1
    if rows > k:
        assert_same(drafter.draft(PLENTY), dynamic_tree(bonus, candidates_of(logits), n_nodes, prune))


@given(cases(), st.lists(st.integers(1, 8), min_size=1, max_size=3))
def test_static_trees_equal_the_reference(case: tuple[int, np.ndarray, int, bool], widths: list[int]) -> None:
    k, logits, bonus, prune = case
    config = DraftConfig("esp", masks=k, tree=tuple(widths[:k]), prune=prune)
    drafter = drafter_of(config, logits.shape[1])
    observed(drafter, logits, bonus)
    assert_same(drafter.draft(PLENTY), static_tree(bonus, candidates_of(logits), widths[:k], prune))


BUDGETS = st.builds(Budget, rows=st.integers(0, 70), depth=st.integers(0, 7), sequences=st.integers(1, 40))


@given(cases(), st.integers(1, 60), st.booleans(), BUDGETS)
def test_drafts_never_exceed_the_budget(
    case: tuple[int, np.ndarray, int, bool], block: int, is_static: bool, budget: Budget
) -> None:
    k, logits, bonus, prune = case
    widths = tuple(range(4, 4 - k, -1)) if is_static else None
    config = DraftConfig("esp", masks=k, block_complexity=block, prune=prune, tree=widths)
    drafter = drafter_of(config, logits.shape[1])
    observed(drafter, logits, bonus)
    tree = drafter.draft(budget)
    tree.check()
    owners = np.flatnonzero(tree.masks)
    leaves = set(range(tree.n_nodes)) - set(tree.parents.tolist()) - set(owners.tolist())
    assert tree.n_rows <= max(1, min(budget.rows, config.rows))
    assert max(positions(tree)) <= budget.depth
    assert len(owners) + len(leaves) <= budget.sequences
    assert int(tree.token_ids[0]) == bonus
    assert len(tree.sources) == tree.n_nodes
    assert (tree.mask_vectors is None) == (tree.n_mask_rows == 0)
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        assert tree.probs[node] <= tree.probs[parent]
        assert not (prune and tree.token_ids[node] == tree.token_ids[parent])


@given(cases(), st.floats(0.05, 5))
def test_temperature_ranks_depths_by_the_sharpened_distribution(
    case: tuple[int, np.ndarray, int, bool], temperature: float
) -> None:
    """With all candidates read, the renormalised distribution is softmax(logits / T) itself."""
    k, logits, bonus, _ = case
    n_vocab = logits.shape[1]
    config = DraftConfig("esp", masks=k, block_complexity=(k + 1) * n_vocab, prune=False)
    drafter = drafter_of(config, n_vocab, temperature)
    observed(drafter, logits, bonus)
    tree = drafter.draft(PLENTY)
    scaled = candidates_of(logits / temperature)
    exact = {(token, depth): value for depth, row in enumerate(scaled, start=1) for token, value in row}
    above = [0.0, *np.cumsum([row[0][1] for row in scaled])]
    for token, depth, prob in zip(tree.token_ids.tolist()[1:], tree.depths.tolist()[1:], tree.probs[1:], strict=True):
        assert_allclose(prob, math.exp(above[depth - 1] + exact[token, depth]), rtol=1e-3, atol=1e-6)


# Accounting (Eq 7)


@pytest.mark.parametrize(
    ("k", "widths", "rows"),
    [(1, (4,), 10), (1, (14,), 30), (2, (7, 2), 30), (2, (15, 4), 60), (1, (29,), 60), (3, (7, 5, 3), 64),
     (3, (15, 10, 4), 120)],
)  # fmt: skip
def test_block_complexity_of_the_papers_trees(k: int, widths: tuple[int, ...], rows: int) -> None:
    config = DraftConfig("esp", masks=k, tree=widths)
    drafter = drafter_of(config, n_vocab=40)
    observed(drafter, np.random.default_rng(0).standard_normal((k, 40)), bonus=5)
    tree = drafter.draft(PLENTY)
    assert tree.n_rows == config.rows == rows == block_complexity(k, widths)
    assert np.bincount(tree.depths)[1:].tolist() == list(widths)


@pytest.mark.parametrize(("k", "block", "nodes"), [(1, 10, 4), (1, 30, 14), (1, 31, 14), (2, 60, 19), (3, 60, 14)])
def test_dynamic_trees_use_their_block_complexity(k: int, block: int, nodes: int) -> None:
    drafter = drafter_of(DraftConfig("esp", masks=k, block_complexity=block), n_vocab=40)
    observed(drafter, np.random.default_rng(0).standard_normal((k, 40)), bonus=5)
    tree = drafter.draft(PLENTY)
    assert (tree.n_nodes - 1, tree.n_rows) == (nodes, (k + 1) * (nodes + 1))


def test_equal_shapes_share_their_arrays() -> None:
    drafter = drafter_of(DraftConfig("esp", masks=1, tree=(2,)))
    observed(drafter, logits_of([{4: 0.5, 7: 0.4}]), bonus=5)
    first, second = drafter.draft(PLENTY), drafter.draft(PLENTY)
    assert first.parents is second.parents
    assert first.depths is second.depths


def test_doctests() -> None:
    assert doctest.testmod(esp_edge.drafters.esp).failed == 0


# A whole decode


class ScriptedModel:
    """The next token depends on the last one only; mask j behind token x guesses the token j + 1 after x."""

    def __init__(self, n_vocab: int = 40, noise: float = 0.0, seed: int = 0) -> None:
        self.n_vocab, self.noise = n_vocab, noise
        self.rng = np.random.default_rng(seed)

    def next(self, token: int) -> int:
        return (5 * token + 3) % self.n_vocab

    def run(self, tree: DraftTree) -> FakeOutputs:
        logits = self.rng.standard_normal((tree.n_rows, self.n_vocab))
        for node, token in enumerate(tree.token_ids.tolist()):
            guess = self.next(token)
            logits[node, guess] += 20
            for row in tree.mask_rows(node):
                guess = self.next(guess)
                logits[row] *= self.noise
                logits[row, guess] += 3
        return FakeOutputs(logits)


def decode(drafter: Drafter, model: ScriptedModel, prompt: list[int], n_passes: int) -> tuple[list[int], list[int]]:
    """Committed tokens, and how many each pass committed (the prefill's first)."""
    drafter.begin(prompt)
    tree = drafter.probe()
    tokens: list[int] = []
    counts: list[int] = []
    for _ in range(n_passes):
        tree.check()
        outputs = model.run(tree)
        path, committed = walk(tree, outputs.argmax)
        drafter.observe(tree, outputs, Verdict(tuple(path), tuple(committed)))
        tokens += committed
        counts.append(len(committed))
        tree = drafter.draft(Budget(rows=64, depth=16, sequences=64))
    return tokens, counts


@pytest.mark.parametrize("init", ["vocab-mean", "prompt-mean", "last-k", "sample", "composed"])
@pytest.mark.parametrize(("k", "tree"), [(1, None), (2, None), (3, None), (1, (4,)), (2, (15, 4)), (3, (7, 5, 3))])
def test_every_drafter_commits_what_plain_decoding_commits(init: str, k: int, tree: tuple[int, ...] | None) -> None:
    config = DraftConfig("esp", masks=k, tree=tree, block_complexity=30, mask_init=init)
    plain, counts = decode(make_drafter(DraftConfig(drafter="none"), None, None), ScriptedModel(), [1, 2], 80)
    assert counts == [1] * 80
    drafter = make_drafter(config, FakeEmbeddings(n_vocab=40), None)
    tokens, _ = decode(drafter, ScriptedModel(noise=2.0), [1, 2], 30)
    assert tokens == plain[: len(tokens)]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_perfect_masks_commit_k_plus_one_tokens_a_pass(k: int) -> None:
    config = DraftConfig("esp", masks=k, tree=(2,) * k, mask_init="vocab-mean")
    _, counts = decode(make_drafter(config, FakeEmbeddings(n_vocab=40), None), ScriptedModel(), [1, 2], 20)
    assert counts == [1] + [k + 1] * 19


# The factory


def test_factory() -> None:
    esp = make_drafter(DraftConfig("esp", mask_init="token:a", masks=2), FakeEmbeddings(), lambda _: [4])
    none = make_drafter(DraftConfig(drafter="none"), None, None)
    assert (type(esp), esp.name, type(none), none.name) == (EspDrafter, "esp", NoneDrafter, "none")
    none.begin([3, 4])
    assert none.probe().token_ids.tolist() == none.draft(PLENTY).token_ids.tolist() == [4]
    assert none.draft(PLENTY).n_rows == 1


def test_factory_refuses_what_it_cannot_build() -> None:
    with pytest.raises(ConfigError, match="must be resolved"):
        make_drafter(DraftConfig("esp"), FakeEmbeddings(), None)
    with pytest.raises(UnsupportedModelError, match="--drafter none"):
        make_drafter(DraftConfig("esp", mask_init="vocab-mean"), None, None)
