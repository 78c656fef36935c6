"""The output head computed after the pass, for the rows that are read: the same bits, fewer rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from script_modules import load_script

import esp_edge
from esp_edge import DraftConfig, GenerationParams, ModelConfig
from esp_edge._runtime import native
from esp_edge.drafters.esp import EspDrafter
from esp_edge.engine import Engine
from esp_edge.engine.cache import Part, SharedCache
from esp_edge.models.model import TargetModel
from esp_edge.session import Chunk, Session
from esp_edge.step import Step
from esp_edge.tree import DraftTree, FloatArray

FAST = ModelConfig(n_ctx=512, n_threads=2, kernels="fast")
EXACT = ModelConfig(n_ctx=1024, n_threads=2, exact=True)
DECODERS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmoe", "mixtral")
CAPPED = ("gemma2", "gemma3")  # something is computed from what the head gives
PREFIX = list(range(20, 60))
AT_ONCE = 8  # rows that are computed together


def chain(n: int, first: int = 30) -> DraftTree:
    return DraftTree.from_lists(range(first, first + n), range(-1, n - 1))


def probing(model: TargetModel, n_nodes: int, n_masks: int) -> DraftTree:
    """Every node has children or not, and masks: node i has the children 2 i + 1 and 2 i + 2."""
    parents = [-1, *((i - 1) // 2 for i in range(1, n_nodes))]
    table = model.embeddings
    assert table is not None
    vectors = table.rows(np.arange(90, 90 + n_masks, dtype=np.int32))
    return DraftTree.from_lists(range(40, 40 + n_nodes), parents, masks=[n_masks] * n_nodes, mask_vectors=vectors)


@contextmanager
def steps(model: TargetModel) -> Iterator[tuple[Step, Step]]:
    """Two steps that stand behind the same cells; the second may defer heads."""
    with closing(model.new_context(64)) as one, closing(model.new_context(64)) as other:
        found = Step(one), Step(other, defer_head=True)
        for step in found:
            step.prefill(PREFIX)
        yield found


def rows(step: Step, numbers: Sequence[int]) -> FloatArray:
    return np.stack([step.native.logits(number) for number in numbers])


def run_anew(step: Step, tree: DraftTree) -> Any:
    """A pass whose rows cannot be those that lay there before, and that is deferred in parts where it can be.

    The first pass of a size computes all rows when the first is asked for, to see what that takes.
    """
    shape = tree.parents.tolist(), tree.masks.tolist()
    step.run(DraftTree.from_lists(range(200, 200 + tree.n_nodes), shape[0], None, shape[1], tree.mask_vectors))
    step.native.argmax(0)
    assert step.native.n_head_rows == tree.n_rows
    step.rollback()
    return step.run(tree)


@pytest.mark.parametrize("arch", DECODERS)
@pytest.mark.parametrize("dtype", ["Q8_0", "BF16"])
def test_rows_have_the_bits_they_have_in_the_pass(tiny: Callable[..., Path], arch: str, dtype: str) -> None:
    with TargetModel(str(tiny(arch, dtype=dtype)), FAST) as model, steps(model) as (whole, deferring):
        tree = probing(model, 9, 3) if model.capability.masks else chain(36)
        for step in (whole, deferring):
            run_anew(step, tree)
        waiting = deferring.native.n_head_rows == 0
        assert waiting == (arch not in CAPPED), "a head with something behind it is computed in the pass"
        order = [0, 2, 6, *range(tree.n_rows - 1, -1, -1)]
        assert_array_equal(rows(deferring, order), rows(whole, order))
        assert deferring.native.n_head_rows == whole.native.n_head_rows == tree.n_rows


def test_no_more_rows_are_computed_than_may_be_read_soon(tiny: Callable[..., Path]) -> None:
    with TargetModel(str(tiny("llama", dtype="Q4_0")), FAST) as model, steps(model) as (_, step):
        tree = probing(model, 12, 3)
        outputs = run_anew(step, tree)
        assert step.native.n_head_rows == 0
        outputs.argmax(0)
        assert step.native.n_head_rows == 8, "not all nodes of the last pass were read"
        outputs.argmax(9)
        assert step.native.n_head_rows == 11
        outputs.top_k(tree.mask_rows(2), 4)
        assert step.native.n_head_rows == 14, "with the masks of one owner"
        outputs.logprob(int(tree.mask_rows(2)[1]), 5)
        assert step.native.n_head_rows == 14
        outputs.argmax(int(tree.mask_rows(3)[1]))
        assert step.native.n_head_rows == 16, "this mask and the ones behind it"


def test_what_was_read_last_tells_what_will_be(tiny: Callable[..., Path]) -> None:
    """Drafters that learn from every node get all at once, others the first ones."""
    with TargetModel(str(tiny("llama", dtype="Q4_0")), FAST) as model, steps(model) as (_, step):
        step.run(chain(20)).argmax(0)
        assert step.native.n_head_rows == 20, "the first pass expects that all nodes are read"
        step.rollback()
        outputs = run_anew(step, chain(20))
        assert step.native.n_head_rows == 0
        assert [outputs.argmax(row) >= 0 and step.native.n_head_rows for row in (0, 7, 8, 19)] == [8, 8, 16, 17]
        outputs.top_k(np.arange(20, dtype=np.int32), 2)
        assert step.native.n_head_rows == 20
        step.rollback()
        step.run(chain(20))
        assert step.native.n_head_rows == 20, "all of them were read: nothing is won by waiting"


def test_rows_asked_for_together_are_computed_together(tiny: Callable[..., Path]) -> None:
    with TargetModel(str(tiny("llama", dtype="Q8_0")), FAST) as model, steps(model) as (whole, step):
        for each in (whole, step):
            each.run(chain(30)).argmax(0)
            each.rollback()
        tree, wanted = chain(30), np.array([3, 4, 5, 20, 21, 9], np.int32)
        found = [run_anew(each, tree).top_k(wanted, 5) for each in (whole, step)]
        assert step.native.n_head_rows == 6
        for mine, theirs in zip(*found, strict=True):
            assert_array_equal(mine, theirs)


def test_products_are_saved(tiny: Callable[..., Path]) -> None:
    """The head's product is not computed in the pass, and once for each part that is read."""
    with TargetModel(str(tiny("llama", dtype="Q8_0")), FAST) as model, steps(model) as (whole, step):
        counts = []
        for each in (whole, step):
            before = native.kernel_products()
            each.run(probing(model, 8, 3))
            counts.append(native.kernel_products() - before)
        assert counts[1] == counts[0] - 1
        step.native.argmax(0)
        assert native.kernel_products() - before == counts[0]


def test_the_time_of_the_head_is_that_of_the_pass(tiny: Callable[..., Path]) -> None:
    with TargetModel(str(tiny("llama", dtype="Q8_0", n_vocab=900)), FAST) as model, steps(model) as (_, step):
        step.run(probing(model, 12, 3))
        before = step.model_ms
        step.native.argmax(0)
        computed = step.model_ms
        step.native.argmax(1)
        assert before < computed == step.model_ms


def test_small_passes_are_left_alone(tiny: Callable[..., Path]) -> None:
    with TargetModel(str(tiny("llama", dtype="Q8_0")), FAST) as model, steps(model) as (_, step):
        for tree in (chain(1), chain(8), chain(40)):  # until something was read in part, all nodes are expected to be
            step.run(tree)
            assert step.native.n_head_rows == tree.n_rows
            step.native.top_k(np.arange(tree.n_rows, dtype=np.int32), 1)
            step.rollback()


def test_rows_outside_of_the_pass_are_refused(tiny: Callable[..., Path]) -> None:
    with TargetModel(str(tiny("llama", dtype="Q8_0")), FAST) as model, steps(model) as (_, step):
        tree = probing(model, 8, 3)
        step.run(tree)
        for row in (-1, tree.n_rows):
            with pytest.raises(IndexError, match=f"row {row} is not in the last pass"):
                step.native.argmax(row)
            with pytest.raises(IndexError):
                step.native.top_k(np.array([0, row], np.int32), 1)
        step.prefill([5])
        with pytest.raises(IndexError, match="row 0 is not in the last pass"):
            step.native.argmax(0)


@pytest.mark.parametrize("config", [replace(FAST, kernels="stock"), replace(FAST, n_threads=1)])
def test_only_our_kernels_defer(tiny: Callable[..., Path], config: ModelConfig) -> None:
    with TargetModel(str(tiny("llama", dtype="Q8_0")), config) as model, steps(model) as (whole, deferring):
        tree = probing(model, 9, 3)
        for step in (whole, deferring):
            run_anew(step, tree)
        assert (deferring.native.n_head_rows == 0) == (config.kernels == "fast")
        assert_array_equal(rows(deferring, range(36)), rows(whole, range(36)))


def test_a_pass_that_failed_leaves_nothing_to_read(tiny: Callable[..., Path]) -> None:
    with TargetModel(str(tiny("llama", dtype="Q8_0")), replace(FAST, n_ctx=256)) as model, steps(model) as (_, step):
        step.run(probing(model, 9, 3)).argmax(0)
        step.commit([])
        with pytest.raises(esp_edge.errors.DecodeError):
            step.prefill(list(range(20, 260)))
        with pytest.raises(IndexError):
            step.native.argmax(0)
        outputs = step.run(probing(model, 9, 3))
        assert outputs.argmax(0) >= 0


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many rows of each pass that is committed had no logits."""
    saved: list[int] = []
    commit = Step.commit

    def counted(self: Step, path: Sequence[int]) -> None:
        assert self._tree is not None
        saved.append(self._tree.n_rows - self.native.n_head_rows)
        commit(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "commit", counted)
        yield saved


def ids(chunks: Iterable[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def answer(path: Path, config: ModelConfig, draft: DraftConfig) -> list[int]:
    with esp_edge.load(str(path), config) as model, Session(model, draft) as session:
        return ids(session.generate("Write a list of ten animals:", GenerationParams(max_tokens=32)))


@pytest.mark.model
def test_answers_are_those_of_plain_decoding(quantized: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = quantized("Q8_0")
    plain = answer(path, EXACT, DraftConfig("none"))
    for draft in (DraftConfig("esp", block_complexity=60, masks=2), DraftConfig("pld", block_complexity=30)):
        with counting(monkeypatch) as saved:
            assert answer(path, EXACT, draft) == plain
        assert sum(saved) > 0
        with counting(monkeypatch) as saved:
            assert answer(path, replace(EXACT, defer_head=False), draft) == plain
        assert sum(saved) == 0


def test_an_engine_answers_as_plain_decoding_does(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    params = GenerationParams(max_tokens=24, ignore_eos=True)
    with esp_edge.load(str(tiny("llama", dtype="Q8_0")), EXACT) as model:
        with Session(model, DraftConfig("none")) as session:
            plain = ids(session.generate("the rain in", params))
        draft = DraftConfig("esp", block_complexity=60, masks=2)
        with Engine(model, draft=draft, n_slots=2) as engine, counting(monkeypatch) as saved:
            assert ids(engine.submit("the rain in", params)) == plain
        assert sum(saved) > 0


def test_sessions_that_share_a_pass_read_the_head_once(tiny: Callable[..., Path]) -> None:
    with TargetModel(str(tiny("llama", dtype="Q8_0")), FAST) as model, closing(SharedCache(model, 2)) as cache:
        one, other = cache.steps
        for step in cache.steps:
            step.prefill(PREFIX)
        tree = probing(model, 9, 3)

        def run(*parts: Part) -> list[int]:
            assert cache.run(parts)
            found = []
            for part in parts:
                if part.tree is not None and part.outputs is not None:
                    found.append(part.step.native.n_head_rows)
                    part.outputs.argmax(0)
                    part.step.rollback()
            return found

        together = [Part(one, tree), Part(other, tree)]
        assert run(*together) == run(*together) == [36, 36]
        assert run(Part(other, tree)) == run(Part(one, token_ids=[5, 6, 7]), Part(other, tree)) == [0]


def test_the_context_cannot_be_closed_while_logits_are_read(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computing a deferred head lets other threads run, and one of them may want to close the context."""
    could_close: list[bool] = []
    draft, path = DraftConfig("esp", block_complexity=60), str(tiny("llama", dtype="Q8_0"))
    with esp_edge.load(path, EXACT) as model, Session(model, draft) as session:
        lock, observe = session._step.lock, EspDrafter.observe

        def try_to_close() -> None:
            could_close.append(lock.acquire(blocking=False))
            if could_close[-1]:
                lock.release()

        def closing_meanwhile(self: EspDrafter, *args: Any) -> None:
            other = threading.Thread(target=try_to_close)
            other.start()
            other.join()
            observe(self, *args)

        monkeypatch.setattr(EspDrafter, "observe", closing_meanwhile)
        ids(session.generate("the rain in", GenerationParams(max_tokens=8, ignore_eos=True)))
    assert could_close
    assert not any(could_close)


def test_the_script_compares_the_two(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("compare_head")
    monkeypatch.setattr("sys.argv", ["compare_head", "-m", str(tiny("llama", dtype="Q8_0")), "--repeat", "1"])
    script.main()
    table = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| llama")]
    assert [(row[1].strip(), int(row[2])) for row in table] == [
        ("ESP, 7 nodes with 3 masks", 28),
        ("ESP, 15 nodes with 3 masks", 60),
        ("a chain of 16, 3 accepted", 16),
        ("a chain of 16, 12 accepted", 16),
        ("a chain of 32, 3 accepted", 32),
    ]
    assert all(float(row[4]) > 0 and float(row[5]) > 0 and int(row[3]) <= int(row[2]) for row in table)
