"""DraftTree and the reference reading of it."""

from __future__ import annotations

import doctest
from random import Random

import numpy as np
import pytest
from fakes import draft_trees
from hypothesis import given
from hypothesis import strategies as st
from reference import attention, positions, walk

import esp_edge.tree
from esp_edge.errors import ConfigError
from esp_edge.tree import DraftTree, Verdict

# root 5 -> 7, 9; 7 -> 8; two masks behind the root, one behind node 1
TREE = DraftTree.from_lists([5, 7, 9, 8], [-1, 0, 0, 1], masks=[2, 1, 0, 0])


def test_doctests() -> None:
    assert doctest.testmod(esp_edge.tree).failed == 0


def test_rows_are_nodes_then_masks_owner_by_owner() -> None:
    assert (TREE.n_nodes, TREE.n_mask_rows, TREE.n_rows) == (4, 3, 7)
    assert [TREE.mask_rows(owner).tolist() for owner in range(4)] == [[4, 5], [6], [], []]
    assert TREE.depths.tolist() == [0, 1, 1, 2]
    assert TREE.children() == {(0, 7): 1, (0, 9): 2, (1, 8): 3}


def test_root_only() -> None:
    plain, probe = DraftTree.root_only(5), DraftTree.root_only(5, 2, np.zeros((2, 3), np.float32))
    plain.check()
    probe.check()
    assert (plain.n_rows, probe.n_rows, plain.mask_vectors, plain.children()) == (1, 3, None, {})


@pytest.mark.parametrize(
    ("token_ids", "parents", "masks", "message"),
    [
        ([], [], [], "needs a root"),
        ([5, 7], [-1], [0, 0], "equal length"),
        ([5, 7], [-1, 1], [0, 0], "precedes"),
        ([5, 7], [0, 0], [0, 0], "precedes"),
        ([5, 7], [-1, -1], [0, 0], "precedes"),
        ([5, 7], [-1, 0], [0, -1], "negative"),
        ([5, 7, 7], [-1, 0, 0], [0, 0, 0], "siblings"),
    ],
)
def test_broken_trees_are_refused(token_ids: list[int], parents: list[int], masks: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftTree.from_lists(token_ids, parents, masks=masks)


def test_too_few_mask_vectors_are_refused() -> None:
    with pytest.raises(ConfigError, match="each of an owner's 2 masks, but has 1"):
        DraftTree.from_lists([5], [-1], masks=[2], mask_vectors=np.zeros((1, 3), np.float32))


def test_one_token_under_two_parents_is_fine() -> None:
    DraftTree.from_lists([5, 5, 6, 5], [-1, 0, 0, 2])


def test_positions_and_attention_of_the_worked_example() -> None:
    assert positions(TREE) == [0, 1, 1, 2, 1, 2, 2]
    assert attention(TREE).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0],  # root
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 0, 0, 0, 1, 0, 0],  # masks of the root
        [1, 0, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 0, 1],  # mask of node 1
    ]


@given(draft_trees())
def test_masks_are_invisible_to_nodes_and_to_other_owners(tree: DraftTree) -> None:
    sees, places = attention(tree), positions(tree)
    assert tree.depths.tolist() == places[: tree.n_nodes]
    assert not sees[: tree.n_nodes, tree.n_nodes :].any()
    rows = [tree.mask_rows(owner) for owner in range(tree.n_nodes)]
    assert np.concatenate(rows).tolist() == list(range(tree.n_nodes, tree.n_rows))
    for owner, masks in enumerate(rows):
        for j, row in enumerate(masks.tolist()):
            seen = set(np.flatnonzero(sees[row]).tolist())
            assert seen == set(np.flatnonzero(sees[owner]).tolist()) | set(masks[: j + 1].tolist())
            assert places[row] == places[owner] + j + 1
    # exactly one row a position, so a row's context is one path
    for row in range(tree.n_rows):
        assert sorted(places[i] for i in np.flatnonzero(sees[row])) == list(range(places[row] + 1))


@given(draft_trees(n_vocab=4), st.randoms(use_true_random=False))
def test_walk_commits_the_choice_of_every_reached_node(tree: DraftTree, rng: Random) -> None:
    asked: list[int] = []

    def choose(node: int) -> int:
        asked.append(node)
        return rng.randrange(4)

    path, tokens = walk(tree, choose)
    assert asked == [0, *path]
    assert [int(tree.token_ids[node]) for node in path] == tokens[:-1]
    assert (path[-1] if path else 0, tokens[-1]) not in tree.children()
    verdict = Verdict(tuple(path), tuple(tokens))
    assert (verdict.anchor, verdict.bonus_token) == (path[-1] if path else 0, tokens[-1])


def test_walk_of_the_worked_example() -> None:
    assert walk(TREE, {0: 7, 1: 8, 3: 2}.__getitem__) == ([1, 3], [7, 8, 2])
    assert walk(TREE, {0: 9, 2: 8}.__getitem__) == ([2], [9, 8])  # 8 hangs below node 1, not below node 2
    assert walk(TREE, {0: 1}.__getitem__) == ([], [1])
