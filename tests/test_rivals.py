"""The rival drafters: worked examples, the same trees as their slow twins, budgets, what is kept, and host time."""

from __future__ import annotations

import doctest
import importlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes import FakeOutputs
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import walk
from reference_rivals import TWINS, Path, Twin, longest_repeat, paths_of, rate, substring_count

from esp_edge.config import DraftConfig
from esp_edge.drafters import Budget, Drafter, make_drafter
from esp_edge.drafters.adjacency import Adjacency
from esp_edge.drafters.builder import TreeBuilder
from esp_edge.drafters.lade import LadeDrafter, NgramPool, lade_shape
from esp_edge.drafters.ngram_trie import NgramTrie
from esp_edge.drafters.racer import grow_by_breadth
from esp_edge.drafters.recycling import template_paths
from esp_edge.drafters.stand import StandTable, accept_rate
from esp_edge.drafters.suffix_automaton import SuffixAutomaton
from esp_edge.drafters.template import likeliest
from esp_edge.errors import ConfigError
from esp_edge.tree import DraftTree, Verdict

PLENTY = Budget(rows=1000, depth=1000, sequences=1000)
NAMES = sorted(TWINS)
WITH_LOGITS = ("recycling", "racer")


def drafter_of(name: str, rows: int = 10, temperature: float = 0.0, **options: object) -> Drafter:
    config = DraftConfig(name, block_complexity=rows, **options)  # type: ignore[arg-type]
    return make_drafter(config, None, None, temperature)


def answering(*rows: Sequence[int], n_vocab: int = 30) -> FakeOutputs:
    """Outputs whose best tokens of each row are the given ones, in that order, probabilities 1/2, 1/4, ..."""
    logits = np.full((len(rows), n_vocab), -100.0)
    for row, tokens in zip(logits, rows, strict=True):
        for rank, token in enumerate(tokens):
            row[token] = -rank * np.log(2.0)
    return FakeOutputs(logits)


def commit(drafter: Drafter, *token_ids: int) -> None:
    """Root-only passes in which each token is chosen."""
    for token in token_ids:
        drafter.observe(drafter.probe(), answering([token]), Verdict((), (token,)))


def drafted(drafter: Drafter, budget: Budget = PLENTY) -> list[Path]:
    """Paths of the next tree, the root's left out."""
    tree = drafter.draft(budget)
    tree.check()
    return paths_of(tree)[1:]


def chain_of(drafter: Drafter, budget: Budget = PLENTY) -> list[int]:
    """The next tree, which must be a chain, root left out."""
    tree = drafter.draft(budget)
    assert tree.parents.tolist() == list(range(-1, tree.n_nodes - 1))
    return tree.token_ids.tolist()[1:]


# ------------------------------------------------------------------------------------------------ prompt lookup


def test_pld_copies_ten_tokens_from_the_first_place() -> None:
    drafter = drafter_of("pld", rows=30)
    drafter.begin([7, 1, 2, 3, *range(10, 22), 1, 2, 3, 9, *range(30, 42), 1, 2, 3])
    assert chain_of(drafter) == list(range(10, 20))
    commit(drafter, 10)  # now "2 3 10"
    assert chain_of(drafter) == list(range(11, 21))


def test_pld_needs_the_whole_chain_behind_a_match() -> None:
    drafter = drafter_of("pld", rows=4)  # 3 tokens
    drafter.begin([1, 2, 3, 4, 5, 1, 2])
    assert chain_of(drafter) == [3, 4, 5]
    drafter.begin([8, 1, 2, 1, 2])  # behind the first "1 2" there are 2 tokens only; behind the first "2" as well
    assert chain_of(drafter) == []
    drafter.begin([2, 6, 6, 6, 8, 1, 2, 1, 2])  # no full chain behind "1 2", but behind a lone 2
    assert chain_of(drafter) == [6, 6, 6]


def test_pld_prefers_the_longer_match() -> None:
    drafter = drafter_of("pld", rows=3)
    drafter.begin([3, 9, 9, 2, 3, 8, 8, 1, 2, 3, 7, 7, 1, 2, 3])
    assert chain_of(drafter) == [7, 7]
    drafter.begin([3, 9, 9, 2, 3, 8, 8, 2, 3])
    assert chain_of(drafter) == [8, 8]


# ------------------------------------------------------------------------------------------------ suffix automaton


def test_suffix_copies_the_newest_or_the_first_occurrence() -> None:
    text = [1, 2, 7, 9, 1, 2, 8, 1, 2]
    newest, first = drafter_of("suffix"), drafter_of("suffix", occurrence="first")
    for drafter in (newest, first):
        drafter.begin(text)
    assert chain_of(newest) == [8, 1, 2]
    assert chain_of(first) == [7, 9, 1, 2, 8, 1, 2]


def test_suffix_length_follows_the_match() -> None:
    drafter = drafter_of("suffix", rows=30)
    drafter.begin([1, *range(10, 29), 1])
    assert chain_of(drafter) == list(range(10, 15))  # 1 + 4 * 1
    commit(drafter, 10)
    assert chain_of(drafter) == list(range(11, 20))  # 1 + 4 * 2
    commit(drafter, 3)
    assert chain_of(drafter) == []
    short = drafter_of("suffix", rows=4)
    short.begin([1, *range(10, 29), 1])
    assert chain_of(short) == [10, 11, 12]


@settings(max_examples=200)
@given(
    parts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=8),
)
def test_the_automaton_knows_the_longest_repeated_suffix(parts: list[list[int]]) -> None:
    automaton = SuffixAutomaton()
    for part in parts:
        automaton.extend(part)
        length, places = longest_repeat([automaton.text])
        match = automaton.match()
        assert match.length == length
        if length:
            assert (match.first, match.newest) == (places[0][1], places[-1][1])


def test_the_automaton_stays_small_and_quick() -> None:
    automaton = SuffixAutomaton()
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    automaton.extend([1] * 4000)
    automaton.extend(rng.integers(0, 50, 4000).tolist())
    assert time.perf_counter() - start < 2
    assert len(automaton._link) <= 2 * 8000


# --------------------------------------------------------------------------------------------------------- LADE


@pytest.mark.parametrize(("rows", "shape"), [(10, (3, 4, 1)), (29, (3, 4, 1)), (30, (4, 5, 5)), (60, (5, 8, 7))])
def test_lade_settings(rows: int, shape: tuple[int, int, int]) -> None:
    n, w, g = lade_shape(rows)
    assert (n, w, g) == shape
    assert (n - 1) * (w + g) <= rows
    assert ((n - 1) * (w + g) == rows) == (rows in (10, 30, 60))


def test_lade_fits_every_block_complexity() -> None:
    for rows in range(4, 241):
        n, w, g = lade_shape(rows)
        assert (n - 1) * (w + g) <= rows


def test_the_pool_keeps_the_newest() -> None:
    pool = NgramPool(2)
    for following in [(1, 2), (3, 4), (1, 2), (5, 6)]:
        pool.add(9, following)
    assert pool.after(9) == [(5, 6), (1, 2)]
    assert pool.after(8) == []


def test_lade_step_by_step() -> None:
    """N = 3, W = 4, G = 1: after one pass of warm-up 8 rows of window and a guess of 2."""
    drafter = drafter_of("lade", rows=10)
    assert isinstance(drafter, LadeDrafter)
    drafter.begin([5])
    assert drafter.levels == [[5, 5, 5, 5]]  # W + N - 3 draws from a prompt of one token
    drafter.levels = [[11, 12, 13, 14]]
    commit(drafter, 10)  # the probe has no window, so the window waits
    assert drafter.levels == [[11, 12, 13, 14]]

    tree = drafter.draft(PLENTY)
    assert tree.token_ids.tolist() == [10, 11, 12, 13, 14]
    outputs = answering([20], [21], [22], [23], [24])
    drafter.observe(tree, outputs, Verdict((), (20,)))
    assert drafter.levels == [[12, 13, 14], [21, 22, 23, 24]]  # the window moved on by one

    tree = drafter.draft(PLENTY)
    assert paths_of(tree) == [(), (12,), (12, 13), (12, 13, 14), (12, 13, 14, 24), (12, 13, 23), (12, 22), (21,)]
    assert tree.n_rows == 8
    assert tree.depths[-1] == 1
    outputs = answering([21], [0], [0], [0], [6], [7], [8], [9])
    drafter.observe(tree, outputs, Verdict((7,), (21, 9)))
    assert drafter.levels == [[22, 23, 24], [9, 8, 7, 6]]

    commit(drafter, 13)  # root-only: the window rests
    assert drafter.levels == [[22, 23, 24], [9, 8, 7, 6]]
    tree = drafter.draft(PLENTY)  # column 2 was "13 23 7"
    assert paths_of(tree)[1:3] == [(23,), (23, 7)]
    assert tree.sources == ("", "lade", "lade", *["lade-window"] * 7)
    commit(drafter, 12)  # column 1 was "12 22 8", and there the window stands again: the rows are shared
    assert drafter.draft(PLENTY).n_rows == 8


def test_lade_rests_where_the_window_does_not_fit() -> None:
    drafter = drafter_of("lade", rows=10)
    assert isinstance(drafter, LadeDrafter)
    drafter.begin([5, 6])
    commit(drafter, 6)
    before = drafter.levels
    for budget in (Budget(4, 100, 100), Budget(100, 3, 100)):
        tree = drafter.draft(budget)
        assert tree.n_rows == 1
        drafter.observe(tree, answering([6]), Verdict((), (6,)))
        assert drafter.levels == before


def test_lade_replaces_the_end_of_generation() -> None:
    drafter = LadeDrafter(DraftConfig("lade", block_complexity=10), frozenset([2]))
    drafter.begin([5])
    commit(drafter, 5)
    tree = drafter.draft(PLENTY)
    drafter.observe(tree, answering(*[[2]] * tree.n_rows), Verdict((), (2,)))
    assert drafter.levels[1] == [5, 5, 5, 5]


# -------------------------------------------------------------------------------------------------------- STAND


def test_stand_tables_average() -> None:
    table = StandTable()
    table.learn([1, 2], [(5, 0.8), (6, 0.2)])
    table.learn([3, 2], [(6, 1.0)])
    table.learn([4, 2], [(7, 0.5)])
    assert table.after([1, 2]) == ((5, 0.8), (6, 0.2))
    assert dict(table.after([9, 2])) == pytest.approx({6: 0.4, 5: 0.8 / 3, 7: 0.5 / 3})
    assert [token for token, _ in table.after([9, 2])] == [6, 5, 7]
    assert table.after([2, 9]) == ()


def test_stand_forgets_the_oldest_context() -> None:
    table = StandTable(most=2)
    table.learn([1], [(5, 1.0)])
    table.learn([2], [(6, 1.0)])
    table.learn([1], [(5, 1.0)])
    table.learn([3], [(7, 1.0)])
    assert [table.after([token]) for token in (1, 2, 3)] == [((5, 1.0),), (), ((7, 1.0),)]


def test_stand_tree_has_the_best_paths() -> None:
    paths = likeliest(9, accept_rate)
    worst = min(rate(path) for path in paths)
    others = {(*path, 0) for path in paths} | {(*path[:-1], path[-1] + 1) for path in paths} | {(0,)}
    assert all(rate(path) <= worst for path in others - {*paths})
    assert all(accept_rate(depth, rank) >= accept_rate(depth, rank + 1) for depth in range(1, 15) for rank in range(12))


def test_stand_reads_the_accepted_path() -> None:
    drafter = drafter_of("stand", rows=20)
    drafter.begin([1])
    commit(drafter, 2)
    drafter.observe(drafter.probe(), answering([3, 4]), Verdict((), (3,)))
    commit(drafter, 2)  # "2" is known: 3 with 2/3, then 4 with 1/3
    assert drafted(drafter)[0] == (3,)
    assert (4,) in drafted(drafter)
    tree = drafter.draft(PLENTY)
    assert tree.probs[1] == pytest.approx(2 / 3)


def test_stand_draws_in_proportion() -> None:
    """Gumbel-top-K: the first draw follows the stored probabilities, at T = 1."""
    drafter = drafter_of("stand", rows=2, temperature=1.0)
    drafter.begin([1])
    drafter.observe(drafter.probe(), answering([2, 3]), Verdict((), (1,)))
    first = [drafted(drafter)[0][0] for _ in range(1200)]
    assert first.count(2) / len(first) == pytest.approx(2 / 3, abs=0.04)
    cold = drafter_of("stand", rows=2, temperature=0.05)
    cold.begin([1])
    cold.observe(cold.probe(), answering([2, 3]), Verdict((), (1,)))
    assert [drafted(cold)[0][0] for _ in range(50)].count(2) == 50


# ----------------------------------------------------------------------------------------------- Token Recycling


def test_the_template_has_80_nodes() -> None:
    every = template_paths(1000)
    assert len(every) == len({*every}) == 80
    assert [sum(len(path) == depth for path in every) for depth in range(1, 7)] == [8, 21, 25, 15, 8, 3]
    assert max(every) < (8,)
    for n in range(80):
        kept = template_paths(n)
        assert kept == every[:n]
        assert all(len(path) == 1 or path[:-1] in kept for path in kept)


def test_recycling_follows_the_rows() -> None:
    drafter = drafter_of("recycling", rows=4)
    drafter.begin([1])
    drafter.observe(drafter.probe(), answering([2, 3, 4]), Verdict((), (2,)))
    assert drafted(drafter) == []  # 2 was no row yet
    tree = DraftTree.from_lists([2, 8, 1], [-1, 0, 1])  # whatever the pass held: rejected rows count as well
    drafter.observe(tree, answering([1, 9], [7], [2, 5, 6]), Verdict((), (1,)))
    assert drafted(drafter) == [(2,), (2, 1), (5,)]  # 1 -> 2 5 6, 2 -> 1 9


# -------------------------------------------------------------------------------------------------------- RACER


def test_racer_figure_9() -> None:
    """The paper's logits tree with 4 next tokens and 21 rows."""
    config = DraftConfig("racer", block_complexity=21)
    adjacency = Adjacency(400)
    for token in range(90):
        tree = DraftTree.root_only(token)
        adjacency.learn(tree, answering([4 * token + j for j in range(1, 5)], n_vocab=400))
    builder = TreeBuilder(0, config.rows, PLENTY)
    grow_by_breadth(builder, adjacency, "racer-logits", breadth=4)
    paths = paths_of(builder.tree())
    leaves = {path for path in paths if not any(other[:-1] == path and other for other in paths)}
    assert len(paths) == 21
    assert leaves == {
        (4, 17),
        (1, 5, 21),
        (1, 5, 22),
        (1, 6, 25),
        (1, 7, 29),
        (1, 8, 33),
        (2, 9, 37),
        (2, 10, 41),
        (3, 13, 53),
    }


def test_racer_copies_first_and_fills_up_with_logits() -> None:
    drafter = drafter_of("racer", rows=6)
    drafter.begin([1, 2, 3, 9, 1, 2, 3, 8, 1])
    drafter.observe(drafter.probe(), answering([2, 5]), Verdict((), (2,)))
    tree = drafter.draft(PLENTY)  # "1 2" itself and "1 2 3" stood there twice, the rest once, shallow first
    assert paths_of(tree)[1:] == [(3,), (3, 8), (3, 8, 1), (3, 9), (3, 9, 1)]
    assert set(tree.sources[1:]) == {"racer-copy"}
    tree = DraftTree.from_lists([2, 3], [-1, 0])
    drafter.observe(tree, answering([3, 7], [6]), Verdict((), (6,)))
    commit(drafter, 2)  # "6 2" is new: adjacency alone
    tree = drafter.draft(PLENTY)
    assert {(3,), (7,)} <= {*paths_of(tree)}
    assert set(tree.sources[1:]) == {"racer-logits"}


@settings(max_examples=60)
@given(
    parts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=4),
    n=st.integers(2, 4),
    most=st.integers(8, 60),
)
def test_the_trie_counts_its_windows(parts: list[list[int]], n: int, most: int) -> None:
    """With eviction: every count is that of the windows that are left, and windows leave oldest first."""
    trie = NgramTrie(n, most)
    windows: list[list[int]] = []
    for part in parts:
        trie.cut()
        trie.extend(part)
        windows += [part[i : i + n] for i in range(len(part))]
    left = [*trie._windows]
    assert left == windows[len(windows) - len(left) :]
    prefixes = [tuple(window[:length]) for window in left for length in range(1, len(window) + 1)]
    assert trie.n_nodes == len({*prefixes})
    assert trie.n_nodes <= most or len(left) <= n
    for prefix in {*prefixes}:
        node = trie._find(prefix)
        assert node is not None
        assert node.count == prefixes.count(prefix)


def test_the_trie_counts_places() -> None:
    text = [1, 2, 1, 2, 1, 2, 3]
    trie = NgramTrie()
    trie.extend(text)
    for length in (1, 2, 3):
        for i in range(len(text) - length + 1):
            node = trie._find(text[i : i + length])
            assert node is not None
            assert node.count == substring_count([text], tuple(text[i : i + length]))


# ---------------------------------------------------------------------------------------------- the same as the twin


class ScriptedModel:
    """Logits that depend on the row's token and, a little, on chance; a small vocabulary, so that text repeats."""

    def __init__(self, seed: int, n_vocab: int = 12, noise: float = 0.7) -> None:
        self.rng = np.random.default_rng(seed)
        self.table = self.rng.standard_normal((n_vocab, n_vocab)) * 2
        self.noise = noise

    def run(self, tree: DraftTree) -> FakeOutputs:
        rows = self.table[tree.token_ids]
        return FakeOutputs(rows + self.noise * self.rng.standard_normal(rows.shape))


BUDGETS = st.builds(Budget, rows=st.integers(1, 70), depth=st.integers(0, 20), sequences=st.integers(1, 70))
STREAMS = st.tuples(
    st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=25), min_size=1, max_size=3),  # prompts
    st.integers(0, 1 << 16),  # seed of the model
    st.lists(st.one_of(st.just(PLENTY), BUDGETS), min_size=1, max_size=10),
)
CONFIGS = st.builds(
    DraftConfig,
    drafter=st.just("pld"),
    block_complexity=st.sampled_from([1, 2, 5, 10, 30, 60]),
    keep=st.booleans(),
    occurrence=st.sampled_from(["newest", "first"]),
    seed=st.integers(0, 3),
)


def compare(drafter: Drafter, twin: Twin, prompts: Sequence[Sequence[int]], seed: int, budgets: list[Budget]) -> int:
    """Run both over the same generations; the number of accepted nodes."""
    model, accepted = ScriptedModel(seed), 0
    for prompt in prompts:
        drafter.begin(prompt)
        twin.begin(prompt)
        tree = drafter.probe()
        assert (tree.token_ids.tolist(), tree.n_rows) == ([prompt[-1]], 1)
        for budget in budgets:
            outputs = model.run(tree)
            path, tokens = walk(tree, outputs.argmax)
            verdict = Verdict(tuple(path), tuple(tokens))
            accepted += len(path)
            twin.observe(tree, outputs, verdict)
            drafter.observe(tree, outputs, verdict)
            tree = drafter.draft(budget)
            check_budget(tree, budget, twin.config.rows)
            assert tree.token_ids[0] == tokens[-1]
            found = paths_of(tree)
            assert sorted(found) == sorted(twin.expect(budget).found)
    return accepted


def check_budget(tree: DraftTree, budget: Budget, rows: int) -> None:
    tree.check()
    assert tree.n_rows <= min(budget.rows, rows)
    assert tree.depths.max() <= budget.depth
    assert len({*range(tree.n_nodes)} - {*tree.parents.tolist()}) <= budget.sequences
    assert tree.n_mask_rows == 0
    assert np.all(tree.probs[1:] <= tree.probs[tree.parents[1:]] * (1 + 1e-6))
    assert len(tree.sources) in (0, tree.n_nodes)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(
    stream=STREAMS,
    config=CONFIGS,
    temperature=st.sampled_from([0.0, 0.8]),
)
def test_the_same_trees_as_the_twin(
    name: str, stream: tuple[list[list[int]], int, list[Budget]], config: DraftConfig, temperature: float
) -> None:
    config = replace(config, drafter=name)
    compare(make_drafter(config, None, None, temperature), TWINS[name](config, temperature), *stream)


@pytest.mark.parametrize("rows", [10, 30, 60])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_accepted(name: str, rows: int) -> None:
    """A long run: the drafters do guess, and the window of LADE is full."""
    config = DraftConfig(name, block_complexity=rows)
    twin = TWINS[name](config, ends=frozenset([3]))
    drafter = LadeDrafter(config, frozenset([3])) if name == "lade" else make_drafter(config, None, None)
    assert compare(drafter, twin, [[1, 2, 3, 4, 5, 6, 7, 8, 9]], 1, [PLENTY] * 60) > 5


# ----------------------------------------------------------------------------------------------- lifecycle, settings


def run(drafter: Drafter, prompt: Sequence[int], n_passes: int, seed: int = 5) -> list[list[Path]]:
    """Trees of one generation."""
    model = ScriptedModel(seed)
    drafter.begin(prompt)
    tree, trees = drafter.probe(), []
    for _ in range(n_passes):
        outputs = model.run(tree)
        path, tokens = walk(tree, outputs.argmax)
        drafter.observe(tree, outputs, Verdict(tuple(path), tuple(tokens)))
        tree = drafter.draft(PLENTY)
        trees.append(paths_of(tree))
    return trees


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", NAMES)
def test_begin_forgets_unless_told_to_keep(name: str, temperature: float) -> None:
    prompt = [1, 2, 3, 4, 1, 2]
    fresh = run(drafter_of(name, 30, temperature), prompt, 20)
    for keep in (False, True):
        drafter = drafter_of(name, 30, temperature, keep=keep)
        assert run(drafter, prompt, 20) == fresh
        run(drafter, [5, 6, 7, 8, 5, 6], 20, seed=9)
        again = run(drafter, prompt, 20)
        assert (again == fresh) is not keep


@pytest.mark.parametrize("name", ["lade", "stand"])
def test_the_seed_decides(name: str) -> None:
    def trees(seed: int) -> list[list[Path]]:
        return run(drafter_of(name, 30, 0.8, seed=seed), [*range(12)], 20)

    assert trees(1) == trees(1) != trees(2)


def test_copies_do_not_run_from_one_request_into_the_next() -> None:
    for name in ("pld", "suffix"):
        drafter = drafter_of(name, rows=3, keep=True)
        drafter.begin([1, 2, 3])
        drafter.begin([4, 5, 6, 7, 3])
        assert chain_of(drafter) == []  # 3 ended the first request: "4 5" did not follow it
        drafter.begin([8, 2])
        assert chain_of(drafter) == ([3] if name == "suffix" else [])


@pytest.mark.parametrize("name", ["pld", "suffix"])
def test_kept_text_is_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"esp_edge.drafters.{name}.KEPT_TOKENS", 8)
    drafter = drafter_of(name, rows=3, keep=True)
    drafter.begin([1, 2, 3, 4, 5])
    drafter.begin([6, 7, 8, 9, 1])
    assert chain_of(drafter) == [2, 3]
    drafter.begin([6, 7, 8, 9, 1])
    assert chain_of(drafter) == []


def test_the_builder_keeps_a_path_together() -> None:
    builder = TreeBuilder(1, 10, PLENTY)
    a, b = builder.add(0, 5, "x"), builder.add(0, 6, "x")
    builder.add(b, 7, "x")
    builder.add(a, 8, "y", 0.25)
    tree = builder.tree()
    assert tree.token_ids.tolist() == [1, 5, 8, 6, 7]
    assert tree.parents.tolist() == [-1, 0, 1, 0, 3]
    assert tree.depths.tolist() == [0, 1, 2, 1, 2]
    assert (tree.sources, tree.probs.tolist()) == (("", "x", "y", "x", "x"), [1, 1, 0.25, 1, 1])


def test_settings() -> None:
    assert DraftConfig("pld", block_complexity=30, tree=(4,)).rows == 30  # widths are ESP's
    assert DraftConfig("draft-model", draft_model="x").rows == 10
    with pytest.raises(ConfigError, match=r"second model.*--draft-model"):
        DraftConfig("draft-model")
    with pytest.raises(ConfigError, match="occurrence must be newest or first"):
        DraftConfig("suffix", occurrence="last")
    with pytest.raises(ConfigError, match="drafter must be one of"):
        DraftConfig("eagle")
    with pytest.raises(ConfigError, match="needs the target model"):
        make_drafter(DraftConfig("draft-model", draft_model="x"), None, None)


@pytest.mark.parametrize("name", ["builder", "lade", "ngram_trie", "stand", "suffix_automaton", "template"])
def test_doctests(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"esp_edge.drafters.{name}"))
    assert (results.failed, results.attempted > 0) == (0, True)


# ----------------------------------------------------------------------------------------------------- host time


class Instant:
    """Outputs that cost nothing, so that only the drafter's own time is seen."""

    def __init__(self, rows: int, rng: np.random.Generator) -> None:
        self.ids = rng.integers(0, 400, (rows, 10)).astype(np.int32)
        self.log_probs = np.sort(rng.uniform(-9, 0, (rows, 10)))[:, ::-1].astype(np.float32)

    def argmax(self, row: int) -> int:
        return int(self.ids[row, 0])

    def top_k(self, rows: Sequence[int], k: int) -> tuple[np.ndarray, np.ndarray]:
        return self.ids[rows, :k], self.log_probs[rows, :k]

    def logprob(self, row: int, token_id: int) -> float:
        return float(self.log_probs[row, 0] if token_id else 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_host_time_at_60_rows(name: str) -> None:
    """Draft and observe in well under half a millisecond; the limit here leaves room for a busy machine."""
    rng = np.random.default_rng(3)
    drafter = drafter_of(name, rows=60, temperature=0.8)
    drafter.begin(rng.integers(0, 400, 600).tolist())
    tree, times = drafter.probe(), []
    for _ in range(200):
        outputs = Instant(tree.n_rows, rng)
        start = time.perf_counter()
        drafter.observe(tree, outputs, Verdict((), (int(rng.integers(0, 400)),)))
        tree = drafter.draft(PLENTY)
        times.append(1000 * (time.perf_counter() - start))
    print(f"{name}: {statistics.median(times):.3f} ms, {tree.n_rows} rows")
    assert statistics.median(times) < 1.0
