"""One pass over a tree against plain decoding, and the KV cache afterwards. Tiny random models, real llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import draft_trees
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from esp_edge.config import MAX_BLOCK, MAX_EXACT_BLOCK, ModelConfig
from esp_edge.errors import ConfigError, DecodeError
from esp_edge.models.model import BATCH_ROWS, MAX_OUTPUT_ROWS, TargetModel
from esp_edge.step import NoRoomError, Step
from esp_edge.tree import DraftTree, FloatArray

PREFIX = (3, 14, 15, 92, 65, 35, 89, 79, 32, 38)
N_SEQUENCES = 64
# flash attention adds up in 16 bits, in the order of the cells, which is not that of the positions after a branch
PRECISE = ModelConfig(n_ctx=256, flash_attn=False, type_k="f32", type_v="f32")
HOLES = replace(PRECISE, n_gpu_layers=1)  # as on a GPU: accepted rows stay where they are (see lab_of)
KINDS = ("F32", "F32 exact", "F32 holes", "Q8_0", "Q8_0 exact")

few = settings(max_examples=15, database=None)
trees = draft_trees(max_nodes=12, n_vocab=300)
small_trees = draft_trees(max_nodes=9, max_masks=2, n_vocab=300)


@dataclass
class Lab:
    """A model with two steps over caches of their own: one under test, one that decodes plainly.

    ``tolerance`` is that of logits whose standard deviation is about 5: a bit that flips while activations are rounded
    to 8 bits moves them visibly.
    """

    model: TargetModel
    step: Step
    plain: Step
    tolerance: float

    @property
    def exact(self) -> bool:
        return self.step.exact

    @property
    def n_embd(self) -> int:
        assert self.model.embeddings is not None
        return self.model.embeddings.n_embd

    def fresh(self, prefix: Sequence[int] = PREFIX) -> Step:
        """The step under test, its cache holding ``prefix`` alone."""
        self.step.reset()
        self.step.prefill(prefix)
        return self.step

    def agree(self, found: FloatArray, wanted: FloatArray) -> None:
        """To the last bit in exact mode, else up to rounding."""
        if self.exact:
            assert_array_equal(found, wanted)
        else:
            assert_allclose(found, wanted, rtol=0, atol=self.tolerance)

    def decode(self, tokens: Sequence[int], prefix: Sequence[int] = PREFIX) -> list[FloatArray]:
        """Logits after each token, one plain pass a token (padded to two rows in exact mode)."""
        self.plain.reset()
        self.plain.prefill(prefix)
        return [plain_pass(self.plain, token) for token in tokens]


def plain_pass(step: Step, token: int) -> FloatArray:
    step.run(DraftTree.root_only(token))
    logits = row(step, 0)
    step.commit(())
    return logits


def row(step: Step, index: int) -> FloatArray:
    logits: FloatArray = step.native.logits(index)
    return logits


def rows(step: Step, tree: DraftTree) -> FloatArray:
    """Logits of every row of the tree: float32[n_rows, n_vocab]."""
    step.run(tree)
    return np.stack([row(step, index) for index in range(tree.n_rows)])


def noise(tree: DraftTree, n_embd: int, seed: int, scale: float = 1.0) -> DraftTree:
    """The tree with a random vector for each of its mask rows."""
    rng = np.random.default_rng(seed)
    vectors = (scale * rng.standard_normal((tree.n_mask_rows, n_embd))).astype(np.float32)
    return replace(tree, mask_vectors=vectors if tree.n_mask_rows else None)


def ancestors(tree: DraftTree, node: int) -> list[int]:
    """Nodes from the root down to ``node``."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(tree.parents[node])
    return path[::-1]


def chain(tokens: Sequence[int], masks: Sequence[int] | None = None, vectors: FloatArray | None = None) -> DraftTree:
    return DraftTree.from_lists(tokens, range(-1, len(tokens) - 1), masks=masks, mask_vectors=vectors)


def deepest_path(tree: DraftTree, leaf: int) -> list[int]:
    return ancestors(tree, leaf)[1:]


def lab_of(path: Path, config: ModelConfig, tolerance: float = 1e-4) -> Iterator[Lab]:
    with TargetModel(str(path), config) as model:
        contexts = [model.new_context(N_SEQUENCES), model.new_context(1)]
        try:
            tested, plain = Step(contexts[0]), Step(contexts[1])
            tested.in_order = plain.in_order = config.n_gpu_layers == 0  # a build without a GPU ignores the setting
            yield Lab(model, tested, plain, tolerance)
        finally:
            for context in contexts:
                context.close()


@pytest.fixture(scope="module", params=KINDS)
def lab(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Iterator[Lab]:
    dtype, _, kind = request.param.partition(" ")
    if dtype == "F32" and kind != "exact":
        yield from lab_of(tiny("llama"), HOLES if kind else PRECISE)
    else:
        config = ModelConfig(n_ctx=256, exact=kind == "exact")
        yield from lab_of(tiny("llama", dtype=dtype), config, 0.02 if dtype == "F32" else 0.5)


@pytest.fixture(scope="module")
def exact_lab(tiny: Callable[..., Path]) -> Iterator[Lab]:
    yield from lab_of(tiny("llama"), ModelConfig(n_ctx=256, exact=True))


@pytest.fixture(scope="module")
def fast_lab(tiny: Callable[..., Path]) -> Iterator[Lab]:
    yield from lab_of(tiny("llama"), PRECISE)


# ---------------------------------------------------------------------------------------------------- the logits


@few
@given(trees, st.integers(0, 99))
def test_every_node_is_plain_decoding_of_its_path(lab: Lab, tree: DraftTree, seed: int) -> None:
    found = rows(lab.fresh(), noise(tree, lab.n_embd, seed))
    for node in range(tree.n_nodes):
        tokens = [int(tree.token_ids[i]) for i in ancestors(tree, node)]
        lab.agree(found[node], lab.decode(tokens)[-1])


@few
@given(small_trees, st.integers(0, 99))
def test_every_mask_is_its_path_and_the_masks_before_it(lab: Lab, tree: DraftTree, seed: int) -> None:
    """The path as a chain of tokens, then the owner's masks as embedding rows, in a cache of their own."""
    tree = noise(tree, lab.n_embd, seed)
    found = rows(lab.fresh(), tree)
    for owner in range(tree.n_nodes):
        if not (count := int(tree.masks[owner])):
            continue
        assert tree.mask_vectors is not None
        first = int(tree.mask_rows(owner)[0]) - tree.n_nodes
        tokens = [int(tree.token_ids[i]) for i in ancestors(tree, owner)]
        masks = [*[0] * (len(tokens) - 1), count]
        lab.plain.reset()
        lab.plain.prefill(PREFIX)
        alone = rows(lab.plain, chain(tokens, masks, tree.mask_vectors[first : first + count]))
        lab.agree(found[tree.mask_rows(owner)], alone[len(tokens) :])


@few
@given(trees, st.integers(0, 99))
def test_masks_cannot_change_a_node(lab: Lab, tree: DraftTree, seed: int) -> None:
    n_embd = lab.n_embd
    step = lab.fresh()
    found = [rows(step, noise(tree, n_embd, seed, scale))[: tree.n_nodes] for scale in (1.0, 0.0, 50.0)]
    assert_array_equal(found[1], found[0])
    assert_array_equal(found[2], found[0])
    if lab.exact and tree.n_nodes > 1:  # another width, the same bits
        assert_array_equal(rows(step, replace(tree, masks=np.zeros_like(tree.masks))), found[0])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_masks_that_are_not_finite_are_refused(lab: Lab, value: float) -> None:
    """Attention multiplies a hidden cell by zero, and zero times infinity is not zero."""
    tree = noise(DraftTree.from_lists([5, 6, 7], [-1, 0, 0], masks=[0, 2, 0]), lab.n_embd, 0)
    assert tree.mask_vectors is not None
    clean = rows(lab.fresh(), tree)
    with pytest.raises(ValueError, match="not finite"):
        lab.step.run(replace(tree, mask_vectors=np.full_like(tree.mask_vectors, value)))
    assert_array_equal(rows(lab.step, tree), clean)  # nothing of it is left


@few
@given(trees, st.integers(0, 99))
def test_naive_and_efficient_give_the_same_bits(lab: Lab, tree: DraftTree, seed: int) -> None:
    tree = noise(tree, lab.n_embd, seed)
    step = lab.fresh()
    efficient = rows(step, tree)
    step.impl = "naive"
    try:
        assert_array_equal(rows(step, tree), efficient)
        step.commit(deepest_path(tree, tree.n_nodes - 1))
        naive_next = plain_pass(step, 7)
    finally:
        step.impl = "efficient"
    rows(lab.fresh(), tree)
    step.commit(deepest_path(tree, tree.n_nodes - 1))
    lab.agree(plain_pass(step, 7), naive_next)


def test_shared_mask_vectors_are_one_vector_a_mask(fast_lab: Lab) -> None:
    masks, n_embd = [2, 1, 0, 2], fast_lab.n_embd
    shared = np.random.default_rng(1).standard_normal((2, n_embd)).astype(np.float32)
    tree = DraftTree.from_lists([5, 6, 7, 8], [-1, 0, 0, 1], masks=masks, mask_vectors=shared)
    own = replace(tree, mask_vectors=shared[[0, 1, 0, 0, 1]])
    assert_array_equal(rows(fast_lab.fresh(), tree), rows(fast_lab.step, own))


def test_outputs_are_read_in_place(fast_lab: Lab) -> None:
    step = fast_lab.fresh()
    tree = noise(DraftTree.from_lists([5, 6, 7], [-1, 0, 0], masks=[1, 1, 1]), fast_lab.n_embd, 2)
    outputs = step.run(tree)
    logits = np.stack([row(step, index) for index in range(6)]).astype(np.float64)
    log_probs = logits - logits.max(axis=1, keepdims=True)
    log_probs -= np.log(np.exp(log_probs).sum(axis=1, keepdims=True))
    ids, values = outputs.top_k(np.array([5, 0], np.int32), 4)
    assert [outputs.argmax(index) for index in range(6)] == logits.argmax(axis=1).tolist()
    assert_array_equal(ids, np.argsort(-logits[[5, 0]], axis=1, kind="stable")[:, :4])
    assert_allclose(values, np.take_along_axis(log_probs[[5, 0]], ids, axis=1), rtol=1e-5)
    assert outputs.logprob(3, 17) == pytest.approx(log_probs[3, 17], rel=1e-5)
    for bad in (-1, 6):
        with pytest.raises(IndexError, match="row"):
            outputs.argmax(bad)


# --------------------------------------------------------------------------------------------------------- commit


@few
@given(trees, st.data())
def test_decoding_after_a_commit_is_decoding_of_the_committed_tokens(lab: Lab, tree: DraftTree, data: Any) -> None:
    tree = noise(tree, lab.n_embd, 0)
    path = deepest_path(tree, data.draw(st.integers(0, tree.n_nodes - 1)))
    step = lab.fresh()
    step.run(tree)
    step.commit(path)
    committed = [int(tree.token_ids[node]) for node in (0, *path)]
    assert step.n_past + len(step.refeed) == len(PREFIX) + len(committed)
    assert step.n_free == 256 - len(PREFIX) - len(committed)
    following = [11, 12, 13]
    found = [plain_pass(step, token) for token in following]
    for mine, theirs in zip(found, lab.decode([*committed, *following])[-3:], strict=True):
        lab.agree(mine, theirs)
    assert step.refeed == []
    assert_stored(step)


def test_exact_mode_feeds_again_what_did_not_follow_the_root(exact_lab: Lab) -> None:
    step = exact_lab.fresh()
    tree = DraftTree.from_lists([5, 6, 7, 8, 9], [-1, 0, 1, 1, 3])  # 5 -> 6 -> (7, 8 -> 9)
    step.run(tree)
    step.commit([1, 3, 4])
    assert step.refeed == [8, 9]
    assert step.n_past == len(PREFIX) + 2  # 5 and 6
    assert_array_equal(plain_pass(step, 10), exact_lab.decode([5, 6, 8, 9, 10])[-1])
    assert (step.refeed, step.n_past) == ([], len(PREFIX) + 5)


def test_a_rollback_keeps_what_must_be_fed_again(exact_lab: Lab) -> None:
    step = exact_lab.fresh()
    step.run(DraftTree.from_lists([5, 6, 7], [-1, 0, 0]))
    step.commit([2])
    step.run(DraftTree.from_lists([10, 11], [-1, 0]))
    step.rollback()
    assert step.refeed == [7]
    assert_array_equal(plain_pass(step, 10), exact_lab.decode([5, 7, 10])[-1])


def test_prefill_comes_after_what_must_be_fed_again(exact_lab: Lab) -> None:
    step = exact_lab.fresh()
    step.run(DraftTree.from_lists([5, 6, 7], [-1, 0, 0]))
    step.commit([2])
    step.prefill([20, 21])
    assert (step.refeed, step.n_past) == ([], len(PREFIX) + 4)
    assert_allclose(plain_pass(step, 10), exact_lab.decode([10], [*PREFIX, 5, 7, 20, 21])[-1], atol=1e-4)


def test_cells_may_lie_out_of_order_on_a_gpu(tiny: Callable[..., Path]) -> None:
    for config, refeed in ((HOLES, []), (PRECISE, [8, 9])):
        for lab in lab_of(tiny("llama"), config):
            step = lab.fresh()
            step.run(DraftTree.from_lists([5, 6, 7, 8, 9], [-1, 0, 1, 1, 3]))
            step.commit([1, 3, 4])
            assert step.refeed == refeed
            assert step.n_past + len(step.refeed) == len(PREFIX) + 4
            lab.agree(plain_pass(step, 10), lab.decode([5, 6, 8, 9, 10])[-1])


# --------------------------------------------------------------------------------------------- rollback, truncate


def assert_stored(step: Step) -> None:
    """Every active sequence stores positions 0..n_past-1; nothing else is known to llama.cpp."""
    wanted = (0, step.n_past - 1) if step.n_past else (-1, -1)
    assert {step.native.stored(sequence) for sequence in range(step.native.n_active)} == {wanted}
    unused = range(step.native.n_active, N_SEQUENCES)
    assert {step.native.stored(sequence) for sequence in unused} <= {(-1, -1)}


@few
@given(trees)
def test_a_rollback_leaves_no_trace(lab: Lab, tree: DraftTree) -> None:
    step = lab.fresh()
    before = plain_pass(step, 50)
    lab.fresh()
    step.run(noise(tree, lab.n_embd, 3))
    step.rollback()
    step.rollback()  # twice is harmless
    assert step.n_past == len(PREFIX)
    assert_stored(step)
    assert_array_equal(plain_pass(step, 50), before)


def test_a_second_run_replaces_the_first(lab: Lab) -> None:
    step = lab.fresh()
    wanted = rows(step, chain([5, 6, 7]))
    step.run(DraftTree.from_lists([8, 9, 10, 11], [-1, 0, 0, 0]))
    assert_array_equal(rows(step, chain([5, 6, 7])), wanted)
    step.commit([1])
    assert step.n_past == len(PREFIX) + 2


def test_truncate_forgets_the_end(lab: Lab) -> None:
    step = lab.fresh()
    wanted = plain_pass(step, 5)
    for token in range(20):
        plain_pass(step, token)
    step.run(DraftTree.from_lists([8, 9, 10, 11], [-1, 0, 0, 0]))  # a pass that waits is dropped too
    step.truncate(len(PREFIX))
    assert_stored(step)
    assert_array_equal(plain_pass(step, 5), wanted)
    step.truncate(1000)
    assert step.n_past == len(PREFIX) + 1
    step.reset()
    assert step.n_past == 0
    assert_stored(step)


def test_an_empty_cache_takes_a_tree(lab: Lab) -> None:
    """A prompt of one token has nothing to prefill."""
    step = lab.fresh(())
    tree = DraftTree.from_lists([5, 6, 7, 8], [-1, 0, 0, 2])
    found = rows(step, tree)
    lab.agree(found[3], lab.decode([5, 7, 8], ())[-1])
    step.commit([2, 3])
    lab.agree(plain_pass(step, 9), lab.decode([5, 7, 8, 9], ())[-1])


@pytest.mark.parametrize("exact", [False, True])
def test_which_prefix_may_be_reused(tiny: Callable[..., Path], exact: bool) -> None:
    """Exact mode keeps whole prefilled chunks: a decode pass writes other bits than a prefill."""
    with TargetModel(str(tiny("llama", n_ctx=2048)), ModelConfig(n_ctx=2048, exact=exact)) as model:
        context = model.new_context(1)
        step = Step(context)
        step.prefill([i % 290 for i in range(1100)])
        for _ in range(3):
            plain_pass(step, 7)
        assert [step.reusable(n) for n in (0, 511, 512, 1023, 1024, 1103, 5000)] == (
            [0, 0, 512, 512, 1024, 1024, 1024] if exact else [0, 511, 512, 1023, 1024, 1103, 1103]
        )
        step.truncate(600)
        step.prefill(range(200))  # not from the start of a chunk
        assert step.reusable(800) == (512 if exact else 800)
        context.close()


# --------------------------------------------------------------------------------------------------------- errors


def still_works(lab: Lab) -> None:
    assert lab.step.n_past == len(PREFIX)
    assert_stored(lab.step)
    lab.agree(plain_pass(lab.step, 5), lab.decode([5])[-1])


@pytest.mark.parametrize("path", [[2, 3], [2], [1, 1], [0], [-1], [3, 1], [1, 2, 3], [9]], ids=str)
def test_a_path_beside_the_tree_is_refused(lab: Lab, path: list[int]) -> None:
    tree = DraftTree.from_lists([5, 6, 7, 8], [-1, 0, 1, 1])  # 5 -> 6 -> (7, 8)
    step = lab.fresh()
    step.run(tree)
    with pytest.raises(ConfigError, match="path"):
        step.commit(path)
    step.commit([1, 3])  # the pass still waits
    step.truncate(len(PREFIX))
    still_works(lab)


def test_commit_needs_a_pass(lab: Lab) -> None:
    step = lab.fresh()
    with pytest.raises(ConfigError, match="pass"):
        step.commit([])
    step.run(chain([5, 6]))
    step.commit([1])
    with pytest.raises(ConfigError, match="pass"):
        step.commit([1])
    step.run(chain([7]))
    step.rollback()
    with pytest.raises(ConfigError, match="pass"):
        step.commit([])
    step.truncate(len(PREFIX))
    still_works(lab)


def test_a_bad_token_is_an_index_error(lab: Lab) -> None:
    step = lab.fresh()
    for token in (-1, 300, 2**31 - 1):
        with pytest.raises(IndexError, match="vocabulary"):
            step.run(noise(DraftTree.from_lists([5, token], [-1, 0], masks=[1, 0]), lab.n_embd, 0))
        with pytest.raises(IndexError, match="vocabulary"):
            step.prefill([5, token])
    still_works(lab)


def test_mask_rows_need_vectors_of_the_right_width(lab: Lab) -> None:
    step = lab.fresh()
    tree = DraftTree.from_lists([5, 6], [-1, 0], masks=[2, 1])
    with pytest.raises(ConfigError, match="mask vectors"):
        step.run(tree)
    with pytest.raises(ValueError, match="width"):
        step.run(replace(tree, mask_vectors=np.zeros((3, 7), np.float32)))
    with pytest.raises(IndexError, match="mask"):
        step.run(replace(tree, mask_vectors=np.zeros((1, lab.n_embd), np.float32)))
    still_works(lab)


def test_a_tree_wider_than_the_sequences_is_refused(lab: Lab) -> None:
    step = lab.fresh()
    wide = DraftTree.from_lists([5, *range(N_SEQUENCES + 1)], [-1, *[0] * (N_SEQUENCES + 1)])
    with pytest.raises((ValueError, ConfigError), match=r"sequences|rows"):
        step.run(wide)
    still_works(lab)


def test_an_exact_pass_stays_below_64_rows(exact_lab: Lab) -> None:
    most = MAX_EXACT_BLOCK + 3
    step = exact_lab.fresh()
    assert step.max_rows == most
    with pytest.raises(ConfigError, match="63 rows"):
        step.run(chain(range(most + 1)))
    found = rows(step, chain(range(most)))
    assert_array_equal(found[-1], exact_lab.decode(range(most))[-1])
    step.rollback()
    # rows that are fed again count
    step.run(DraftTree.from_lists([5, 6, 7, 8], [-1, 0, 0, 2]))
    step.commit([2, 3])
    assert (len(step.refeed), step.max_rows) == (2, most - 2)
    with pytest.raises(ConfigError, match="63 rows"):
        step.run(chain(range(most - 1)))
    wanted = exact_lab.decode([5, 7, 8, *range(most - 2)])[-1]
    assert_array_equal(rows(step, chain(range(most - 2)))[-1], wanted)


def test_a_pass_beyond_the_output_rows_is_refused(tiny: Callable[..., Path]) -> None:
    """llama.cpp itself would abort the process."""
    with TargetModel(str(tiny("llama", n_ctx=2048)), ModelConfig(n_ctx=1024)) as model:
        context = model.new_context(1)
        step = Step(context)
        assert step.max_rows == MAX_BLOCK
        for n_rows in (MAX_OUTPUT_ROWS + 1, BATCH_ROWS, BATCH_ROWS + 1):
            with pytest.raises(ConfigError, match="rows"):
                step.run(chain([i % 300 for i in range(n_rows)]))
        assert step.run(chain([i % 300 for i in range(MAX_OUTPUT_ROWS)])).argmax(MAX_OUTPUT_ROWS - 1) >= 0
        context.close()


def test_a_model_without_embedding_rows_takes_trees_but_no_masks(tiny: Callable[..., Path]) -> None:
    """Drafts then go through token ids; here the table is missing although the model could use it."""
    with TargetModel(str(tiny("llama")), ModelConfig(n_ctx=256)) as model:
        step = Step(context := model.new_context(N_SEQUENCES))
        step.prefill(PREFIX)
        tree = DraftTree.from_lists([5, 6, 7, 8], [-1, 0, 0, 2])
        wanted = rows(step, tree)
        context.close()
        model.capability = replace(model.capability, masks=False, reason="it is blind")
        model.embeddings = None
        step = Step(context := model.new_context(N_SEQUENCES))
        step.prefill(PREFIX)
        assert_array_equal(rows(step, tree), wanted)
        with pytest.raises(ConfigError, match="it is blind"):
            step.run(noise(replace(tree, masks=np.ones_like(tree.masks)), 64, 0))
        step.commit([2, 3])
        assert step.n_past + len(step.refeed) == len(PREFIX) + 3
        context.close()


# ----------------------------------------------------------------------------------------------------- full cache


def test_a_full_cache_is_an_error_and_changes_nothing(lab: Lab) -> None:
    step = lab.fresh()
    with pytest.raises(NoRoomError, match="ctx-size"):
        step.prefill([i % 290 for i in range(256)])
    still_works(lab)
    lab.fresh([i % 290 for i in range(254)])
    wanted = plain_pass(step, 5)
    step.truncate(254)
    with pytest.raises(NoRoomError):
        step.run(chain([5, 6, 7]))
    assert step.n_past == 254
    assert issubclass(NoRoomError, DecodeError)
    assert_array_equal(plain_pass(step, 5), wanted)


def test_a_failed_prefill_still_knows_what_to_feed_again(exact_lab: Lab) -> None:
    step = exact_lab.fresh()
    step.run(DraftTree.from_lists([5, 6, 7], [-1, 0, 0]))
    step.commit([2])
    with pytest.raises(NoRoomError):
        step.prefill([i % 290 for i in range(256)])
    assert_array_equal(plain_pass(step, 10), exact_lab.decode([5, 7, 10])[-1])


def random_tree(rng: np.random.Generator, n_nodes: int, n_embd: int) -> DraftTree:
    parents = [-1, *[int(rng.integers(0, node)) for node in range(1, n_nodes)]]
    tokens = rng.permutation(300)[:n_nodes].tolist()
    masks = rng.integers(0, 3, n_nodes).tolist()
    return noise(DraftTree.from_lists(tokens, parents, masks=masks), n_embd, int(rng.integers(1 << 30)))


def test_300_passes_with_branches_leak_nothing(lab: Lab) -> None:
    rng = np.random.default_rng(0)
    step = lab.fresh()
    passes = longest = 0
    committed = list(PREFIX)
    while passes < 300:
        tree = random_tree(rng, int(rng.integers(1, 12)), lab.n_embd)
        if tree.n_rows > step.max_rows:
            longest = max(longest, step.n_past)
            committed = committed[: int(rng.integers(0, 30))]
            step.truncate(len(committed))
            continue
        step.run(tree)
        path = deepest_path(tree, int(rng.integers(0, tree.n_nodes)))
        step.commit(path)
        committed += [int(tree.token_ids[node]) for node in (0, *path)]
        assert step.n_past + len(step.refeed) == len(committed)
        assert_stored(step)
        passes += 1
    assert longest > 200
    found = plain_pass(step, 7)
    assert_allclose(found, lab.decode([7], committed)[-1], rtol=0, atol=lab.tolerance)
    step.prefill([i % 290 for i in range(256 - step.n_past)])  # to the last cell
    assert (step.n_past, step.n_free) == (256, 0)
    with pytest.raises(NoRoomError):
        step.prefill([1])


def test_every_shape_is_laid_out_once(fast_lab: Lab) -> None:
    step = fast_lab.fresh()
    trees = [DraftTree.from_lists([5, token, 7], [-1, 0, parent]) for token in (8, 9) for parent in (0, 1)]
    layouts = [step._layout(tree) for tree in trees]
    assert layouts[0] is layouts[2]
    assert layouts[1] is layouts[3]
    assert layouts[0] is not layouts[1]
    for n in range(1, 700):  # ever new shapes must not fill the memory
        step._layout(DraftTree.root_only(5, n, np.zeros((n, 64), np.float32)))
    assert len(step._layouts) <= 512
