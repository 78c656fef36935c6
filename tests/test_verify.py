"""Sample matching: what a tree may speed up and what it may never change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from fakes import draft_trees
from hypothesis import given
from hypothesis import strategies as st
from reference import walk

from esp_edge.errors import ConfigError
from esp_edge.tree import DraftTree, Verdict
from esp_edge.verify import verify

EOS = 99
N_VOCAB = 8  # few tokens, so that random choices often hit a child

# 1 -> 2 -> 4 -> 6
#        -> 5
#   -> 3 -> 7
TREE = DraftTree.from_lists([1, 2, 3, 4, 5, 6, 7], [-1, 0, 0, 1, 1, 3, 2], masks=[1] * 7)


class Target:
    """A target model whose choice at each row is written down; records what it was asked."""

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices = list(choices)
        self.asked: list[tuple[int, int]] = []

    def __call__(self, row: int, position: int) -> int:
        self.asked.append((row, position))
        return self.choices[row]


def verified(tree: DraftTree, target: Target, limit: int = 1000, position: int = 50) -> Verdict:
    return verify(tree, target, position=position, limit=limit, is_end=lambda token: token == EOS)


def test_perfect_match() -> None:
    target = Target([2, 4, 0, 6, 0, 8, 0])
    verdict = verified(TREE, target)
    assert verdict == Verdict((1, 3, 5), (2, 4, 6, 8))
    assert (verdict.anchor, verdict.bonus_token) == (5, 8)
    assert target.asked == [(0, 50), (1, 51), (3, 52), (5, 53)]


def test_early_mismatch() -> None:
    target = Target([9, 4, 0, 6, 0, 8, 0])  # the nodes below would all have matched
    verdict = verified(TREE, target)
    assert verdict == Verdict((), (9,))
    assert verdict.anchor == 0
    assert target.asked == [(0, 50)]  # nodes that were not reached are never asked


def test_mismatch_below_an_accepted_node() -> None:
    assert verified(TREE, Target([2, 9, 0, 6, 0, 8, 0])) == Verdict((1,), (2, 9))


def test_the_branch_is_the_targets_choice() -> None:
    assert verified(TREE, Target([3, 4, 7, 0, 0, 0, 1])) == Verdict((2, 6), (3, 7, 1))
    assert verified(TREE, Target([2, 5, 0, 0, 2, 0, 0])) == Verdict((1, 4), (2, 5, 2))


def test_a_token_counts_only_below_its_own_parent() -> None:
    tree = DraftTree.from_lists([1, 2, 3, 5, 5], [-1, 0, 0, 1, 2])  # 5 below 2 and below 3
    assert verified(tree, Target([3, 0, 5, 8, 9])) == Verdict((2, 4), (3, 5, 9))
    assert verified(tree, Target([5, 0, 0, 8, 9])) == Verdict((), (5,))  # not a child of the root


def test_a_chain_may_repeat_one_token() -> None:
    tree = DraftTree.from_lists([7, 7, 7, 7], [-1, 0, 1, 2])
    assert verified(tree, Target([7, 7, 3, 0])) == Verdict((1, 2), (7, 7, 3))


def test_siblings_with_one_token_cannot_exist() -> None:
    """Two children with the same token would make the walk ambiguous."""
    for token_ids, parents in (([1, 2, 2], [-1, 0, 0]), ([1, 2, 3, 4, 4], [-1, 0, 0, 1, 1])):
        with pytest.raises(ConfigError, match="siblings"):
            DraftTree.from_lists(token_ids, parents)
    DraftTree.from_lists([1, 2, 3, 4, 4], [-1, 0, 0, 1, 2])  # cousins may


def test_a_root_alone_is_plain_decoding() -> None:
    target = Target([4])
    assert verified(DraftTree.root_only(3), target) == Verdict((), (4,))
    assert target.asked == [(0, 50)]


def test_the_end_of_the_text_ends_the_walk() -> None:
    tree = DraftTree.from_lists([1, 2, EOS, 4], [-1, 0, 1, 2])
    target = Target([2, EOS, 4, 5])
    verdict = verified(tree, target)
    assert verdict == Verdict((1,), (2, EOS))  # the drafted EOS needs no cell, nothing follows it
    assert target.asked == [(0, 50), (1, 51)]
    assert verified(DraftTree.from_lists([1, EOS], [-1, 0]), Target([EOS, 5])) == Verdict((), (EOS,))


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [
        (1, Verdict((), (2,))),
        (2, Verdict((1,), (2, 4))),
        (3, Verdict((1, 3), (2, 4, 6))),
        (4, Verdict((1, 3, 5), (2, 4, 6, 8))),
    ],
)
def test_the_limit_ends_the_walk(limit: int, wanted: Verdict) -> None:
    target = Target([2, 4, 0, 6, 0, 8, 0])
    assert verified(TREE, target, limit) == wanted
    assert len(target.asked) == limit


def test_first_cuts_a_verdict() -> None:
    verdict = Verdict((1, 3, 5), (2, 4, 6, 8))
    assert [verdict.first(n) for n in (4, 3, 1)] == [verdict, Verdict((1, 3), (2, 4, 6)), Verdict((), (2,))]


@given(draft_trees(max_nodes=20, n_vocab=N_VOCAB), st.integers(0, 2**32 - 1))
def test_equals_the_reference_walk(tree: DraftTree, seed: int) -> None:
    target = Target(np.random.default_rng(seed).integers(0, N_VOCAB, tree.n_nodes).tolist())
    path, tokens = walk(tree, lambda node: target.choices[node])
    assert verified(tree, target) == Verdict(tuple(path), tuple(tokens))
    assert target.asked == [(row, 50 + i) for i, row in enumerate((0, *path))]


@given(
    draft_trees(max_nodes=20, n_vocab=N_VOCAB), st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(0, N_VOCAB)
)
def test_limit_and_end_cut_the_reference_walk(tree: DraftTree, seed: int, limit: int, end: int) -> None:
    target = Target(np.random.default_rng(seed).integers(0, N_VOCAB, tree.n_nodes).tolist())
    path, tokens = walk(tree, lambda node: target.choices[node])
    n = min(limit, tokens.index(end) + 1 if end in tokens else len(tokens))
    verdict = verify(tree, target, position=0, limit=limit, is_end=lambda token: token == end)
    assert verdict == Verdict(tuple(path[: n - 1] if n < len(tokens) else path), tuple(tokens[:n]))


@given(draft_trees(max_nodes=20, n_vocab=N_VOCAB), st.integers(0, 2**32 - 1))
def test_the_committed_tokens_do_not_depend_on_the_tree(tree: DraftTree, seed: int) -> None:
    """A target that is a function of the text so far emits the same text through any tree, only in fewer passes."""

    def after(text: tuple[int, ...]) -> int:
        return hash((seed, text)) % N_VOCAB

    def text_to(node: int) -> tuple[int, ...]:
        return () if node < 0 else (*text_to(int(tree.parents[node])), int(tree.token_ids[node]))

    verdict = verify(tree, lambda row, _: after(text_to(row)), position=0, limit=100, is_end=lambda _: False)
    text = text_to(0)
    for token in verdict.token_ids:
        assert token == after(text)
        text = (*text, token)
