"""The compiled extension against slow twins in plain Python and numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from fakes import draft_trees
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose, assert_array_equal

from esp_edge._runtime import native
from esp_edge.step import naive_layout
from esp_edge.tree import DraftTree, FloatArray

LOGITS = st.one_of(st.floats(width=32), st.integers(-3, 3).map(float))  # ties are common among the integers
ROWS = arrays(np.float32, st.integers(1, 200), elements=LOGITS)
FINITE_ROWS = arrays(np.float32, st.integers(1, 200), elements=st.floats(-1e4, 1e4, width=32))

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
N_VOCAB, N_EMBD = 37, 96


def int32(*values: int) -> Any:
    return np.array(values, np.int32)


# ----------------------------------------------------------------------------------------------------- reductions


def ranked(row: FloatArray) -> list[int]:
    """Indices, the largest value first, ties by lower index, NaN as minus infinity."""
    value = [-math.inf if math.isnan(x) else x for x in row.tolist()]
    return sorted(range(len(row)), key=lambda i: (-value[i], i))


@given(ROWS, st.integers(1, 250))
def test_top_k_is_a_stable_sort(row: FloatArray, k: int) -> None:
    ids, values = native.top_k(row, k)
    assert ids.tolist() == ranked(row)[:k]
    assert_array_equal(values, np.nan_to_num(row[ids], nan=-np.inf, posinf=np.inf, neginf=-np.inf))


@given(ROWS)
def test_argmax_is_the_first_largest_number(row: FloatArray) -> None:
    numbers = [i for i in ranked(row) if not math.isnan(row[i])]
    assert native.argmax(row) == (numbers[0] if numbers else 0)


@given(FINITE_ROWS)
def test_log_sum_exp_of_finite_rows(row: FloatArray) -> None:
    wide = row.astype(np.float64)
    expected = wide.max() + np.log(np.exp(wide - wide.max()).sum())
    assert native.log_sum_exp(row) == pytest.approx(expected, rel=1e-7, abs=1e-5)


def test_reductions_of_nothing() -> None:
    empty = np.empty(0, np.float32)
    assert native.argmax(empty) == -1
    assert native.log_sum_exp(empty) == -math.inf
    assert [part.tolist() for part in native.top_k(empty, 3)] == [[], []]


# --------------------------------------------------------------------------------------------------- keyed draws


def test_keyed_draws_follow_the_softmax() -> None:
    """Chi-square over 20000 positions: argmax(logit + gumbel) draws from the softmax (critical value at p = 0.001)."""
    logits = np.array([2.0, 1.5, 1.0, 0.0, -0.5, -1.0, 1.9, 0.3])
    probs = np.exp(logits) / np.exp(logits).sum()
    n_draws, tokens = 20000, range(len(logits))
    noise = np.array([[native.keyed_gumbel(7, position, token) for token in tokens] for position in range(n_draws)])
    counts = np.bincount((logits + noise).argmax(axis=1), minlength=len(logits))
    assert ((counts - n_draws * probs) ** 2 / (n_draws * probs)).sum() < 24.32


def test_keyed_noise_does_not_depend_on_the_order_of_calls() -> None:
    keys = [(seed, position, token) for seed in (0, 2**64 - 1) for position in (0, 1, 4095) for token in (0, 49151)]
    first = {key: native.keyed_gumbel(*key) for key in keys}
    assert {key: native.keyed_gumbel(*key) for key in reversed(keys)} == first
    assert len(set(first.values())) == len(keys)
    assert all(math.isfinite(noise) for noise in first.values())


# ------------------------------------------------------------------------------------------------------- layouts


def sequence_sets(layout: Any) -> list[tuple[int, set[int]]]:
    """For each row the sequence it sees through and all it belongs to."""
    rows = zip(layout.seq_offset[:-1], layout.seq_offset[1:], strict=True)
    return [(layout.seq_ids[start], set(layout.seq_ids[start:end])) for start, end in rows]


@given(draft_trees(max_nodes=20))
def test_layout_equals_the_one_built_node_by_node(tree: DraftTree) -> None:
    fast, slow = native.TreeLayout.build(tree.parents, tree.masks), naive_layout(tree)
    assert (fast.n_nodes, fast.n_rows, fast.n_sequences) == (slow.n_nodes, slow.n_rows, slow.n_sequences)
    assert (fast.n_nodes, fast.n_rows) == (tree.n_nodes, tree.n_rows)
    assert fast.depth == slow.depth
    assert fast.seq_offset == slow.seq_offset
    assert sequence_sets(fast) == sequence_sets(slow)


@pytest.mark.parametrize(
    ("parents", "masks"),
    [
        ([], []),
        ([0], [0]),
        ([-1, 1], [0, 0]),
        ([-1, 0], [0, -1]),
        ([-1, 0], [0]),
        ([-1] + [0] * 257, [0] * 258),
    ],
    ids=["empty", "no root", "late parent", "negative masks", "lengths differ", "too wide"],
)
def test_layout_refuses(parents: list[int], masks: list[int]) -> None:
    with pytest.raises(ValueError, match=r"root|parent|masks|sequences"):
        native.TreeLayout.build(int32(*parents), int32(*masks))


def test_layout_of_rows_refuses_what_does_not_belong_together() -> None:
    native.TreeLayout.from_rows([0, 1], [0, 1, 2], [0, 0], 2)
    for rows in (([0, 1], [0, 1], [0], 2), ([0], [0, 1], [256], 1), ([1], [0, 1], [0], 1), ([], [0], [], 0)):
        with pytest.raises(ValueError, match=r"row|sequence"):
            native.TreeLayout.from_rows(*rows)


# ---------------------------------------------------------------------------------------------------- embeddings


class Table:
    """A native table over a quantised random matrix, and what gguf-py reads from the same bytes."""

    def __init__(self, name: str, scale: float = 1.0) -> None:
        kind = GGMLQuantizationType[name]
        weights = np.random.default_rng(3).standard_normal((N_VOCAB, N_EMBD)).astype(np.float32)
        stored = weights.astype(np.float16) if name == "F16" else weights if name == "F32" else quantize(weights, kind)
        self.bytes = np.ascontiguousarray(stored).view(np.uint8).reshape(N_VOCAB, -1)
        self.expected = dequantize(stored, kind).reshape(N_VOCAB, N_EMBD) * np.float32(scale)
        self.kind = int(kind)
        self.native = native.EmbeddingTable(*self.arguments(scale=scale).values())

    def arguments(self, **changes: Any) -> dict[str, Any]:
        given = {"address": self.bytes.ctypes.data, "n_bytes": self.bytes.nbytes, "ggml_type": self.kind}
        return given | {"n_embd": N_EMBD, "n_vocab": N_VOCAB, "scale": 1.0} | changes


@pytest.mark.parametrize("name", TYPES)
def test_rows_are_dequantised_as_gguf_says(name: str) -> None:
    table = Table(name)
    ids = int32(0, 36, 5, 5, 17)
    # types with an offset may use a fused multiply-add, which rounds once instead of twice
    assert_allclose(table.native.rows(ids), table.expected[ids], rtol=1e-6, atol=1e-6 if name.endswith("_1") else 0)
    assert table.native.rows(int32()).shape == (0, N_EMBD)
    assert (table.native.n_embd, table.native.n_vocab) == (N_EMBD, N_VOCAB)


def test_the_scale_multiplies_every_value() -> None:
    assert_array_equal(Table("F32", 8.0).native.rows(int32(4))[0], Table("F32").expected[4] * np.float32(8.0))


@pytest.mark.parametrize("name", TYPES)
def test_moments_are_those_of_the_table(name: str) -> None:
    table = Table(name)
    mean, std = table.native.moments()
    wide = table.expected.astype(np.float64)
    assert_allclose(mean, wide.mean(axis=0), rtol=1e-5, atol=1e-6)
    assert_allclose(std, wide.std(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("token_id", [-1, N_VOCAB, 2**31 - 1, -(2**31)])
def test_an_id_outside_the_vocabulary_is_an_index_error(token_id: int) -> None:
    with pytest.raises(IndexError, match="outside the vocabulary"):
        Table("Q8_0").native.rows(int32(0, token_id))


@pytest.mark.parametrize(
    "changes",
    [
        {"address": 0},
        {"ggml_type": -1},
        {"ggml_type": 4},  # a type that was removed
        {"ggml_type": 10_000},
        {"n_embd": 0},
        {"n_embd": 95},  # not whole blocks
        {"n_embd": -32},
        {"n_vocab": 0},
        {"n_vocab": N_VOCAB + 1},
        {"n_vocab": 2**64 // 102 + 1},  # rows of 102 bytes: the size in bytes wraps around
        {"n_embd": 2**62},
        {"n_bytes": 100},
    ],
    ids=repr,
)
def test_a_table_that_does_not_fit_its_data_is_a_value_error(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="embedding table"):
        native.EmbeddingTable(*Table("Q8_0").arguments(**changes).values())


def test_token_ids_must_be_a_flat_array() -> None:
    table = Table("F32").native
    for ids in ([0, 1], 0, None, np.array([[0]], np.int32)):
        with pytest.raises(TypeError):
            table.rows(ids)
