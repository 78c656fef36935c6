"""The drafter ``auto``: it plans with what passes cost, explains itself, and remembers what it learned."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from adversarial import answer, collect

from esp_edge.config import DraftConfig, GenerationParams, ModelConfig
from esp_edge.drafters.base import Budget
from esp_edge.drafters.fused import FusedDrafter, prior_weights
from esp_edge.errors import ConfigError
from esp_edge.metrics import GenerationStats
from esp_edge.planner.curve import CostCurve
from esp_edge.planner.plan import Planner
from esp_edge.session import Model, Session, load
from esp_edge.step import Outputs, Step
from esp_edge.tree import DraftTree, FloatArray, Int32Array, Verdict

AUTO = DraftConfig("auto")
FLAT = replace(AUTO, cost="flat", block_complexity=30)
GREEDY = GenerationParams(max_tokens=48, ignore_eos=True)
PROMPT = [7, 8, 9, 7, 8, 9, 7, 8]


class Nothing:
    """Outputs of a model that always wants token 7 and is not sure."""

    def top_k_sketch(self, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The same row everywhere."""
        ids = np.tile(np.arange(7, 7 + k, dtype=np.int32), (len(rows), 1))
        return ids, np.full(ids.shape, -3.0, np.float32)


STEEP = CostCurve({256: {1: 1.0, 64: 64.0}})


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Iterator[Model]:
    with load(tiny("llama", n_vocab=100), ModelConfig(n_ctx=256, n_threads=1, exact=True)) as loaded:
        yield loaded


# -------------------------------------------------------------------------------------------------- the planner


def test_the_price_is_the_speed_reached_so_far() -> None:
    planner = Planner(STEEP, refine=False)
    assert planner.price(0) == pytest.approx(1.0)
    for _ in range(200):
        planner.observe(2, 0, 2.0, 3)  # three tokens in two milliseconds
    assert planner.price(0) == pytest.approx(1.5, rel=0.05)
    for _ in range(400):
        planner.observe(4, 0, 4.0, 1)  # slower than plain decoding: never below what that makes
    assert planner.price(0) == pytest.approx(1.0)


def test_costs_count_from_one_row() -> None:
    costs = Planner(STEEP).cost(5, 100)
    assert costs.shape == (5,)
    assert costs.dtype == np.float32
    assert costs.tolist() == pytest.approx([1, 2, 3, 4, 5])
    assert not Planner(STEEP).masks_may_pay
    assert Planner(CostCurve.flat()).masks_may_pay


def test_another_size_than_the_last_one_costs_more() -> None:
    planner = Planner(CostCurve({0: {1: 1.0, 8: 8.0}}, switch_ms=0.5))
    assert planner.cost(4, 0).tolist() == pytest.approx([1, 2, 3, 4])  # nothing ran yet
    planner.observe(2, 0, 2.0, 1)
    assert planner.cost(4, 0).tolist() == pytest.approx([1.5, 2, 3.5, 4.5])
    assert planner.cost(1, 0).tolist() == pytest.approx([1.5])
    assert planner.cost(4, 0, shared=True).tolist() == pytest.approx([1, 2, 3, 4])
    assert planner.explain(GenerationStats(), 0)["switch_ms"] == 0.5


def test_a_switch_is_paid_and_does_not_make_its_size_dearer() -> None:
    planner = Planner(CostCurve({0: {1: 1.0, 2: 1.2, 8: 2.0}}, switch_ms=1.0))
    for i in range(400):
        rows = 1 + i % 2
        planner.observe(rows, 0, planner.curve.ms(rows, 0) + (1.0 if i else 0.0), 4)
    assert planner.curve.ratio(2, 0) == pytest.approx(1.2, rel=0.01)
    assert planner.price(0) == pytest.approx(4 / 2.1, rel=0.05)


def test_a_refined_curve_follows_the_passes() -> None:
    for refine in (True, False):
        planner = Planner(CostCurve({256: {1: 1.0, 8: 4.0, 64: 32.0}}), refine=refine)
        before = planner.curve.ratio(8, 0)
        for i in range(4000):
            rows = (8, 1, 1)[i % 3]
            planner.observe(rows, 100, float(rows), 2)
        assert (planner.curve.ratio(8, 0) > 1.5 * before) == refine


# -------------------------------------------------------------------------------------------------- in a session


def test_free_rows_are_all_used_and_masks_among_them(model: Model) -> None:
    found = answer(model, PROMPT, GREEDY, FLAT)
    stats = found.chunks[-1].stats
    assert found.token_ids == answer(model, PROMPT, GREEDY).token_ids
    assert (stats.drafter, stats.block_complexity, stats.masks) == ("auto", 30, 1)
    assert stats.mask_init is not None
    assert max(stats.sizes) <= 30
    assert sum(stats.sizes.values()) == stats.passes
    assert stats.rows_per_pass > 15
    assert sum(stats.accepted_by_source.values()) == stats.accepted_tokens > 0
    assert stats.draft_tokens == sum(stats.drafted_by_source.values())
    assert set(stats.drafted_by_source) <= {"suffix", "adjacency", "esp1", "esp2", "last"}


def test_rows_that_cannot_pay_are_left_out_and_the_reason_is_told(model: Model) -> None:
    with Session(model, AUTO) as session:
        session._planner = Planner(STEEP, refine=False)
        found = collect(session, [5, 17, 42, 8, 61, 3], replace(GREEDY, max_tokens=12))
        stats = found.chunks[-1].stats
        explained = session.explain(stats)
    assert stats.rows_per_pass < 1.5
    assert explained is not None
    assert explained["cost"]["1"] == pytest.approx(1.0)
    if stats.rows_per_pass < 1.1:
        assert "a second row costs 1.00 of a pass here" in explained["reason"]


def test_explain_is_a_document(model: Model) -> None:
    with Session(model, FLAT) as session:
        stats = collect(session, PROMPT, GREEDY).chunks[-1].stats
        explained = session.explain(stats)
        assert json.loads(json.dumps(explained)) == explained
        assert explained is not None
        assert explained["reason"] is None
        assert explained["plain_ms"] == pytest.approx(stats.committed_tokens)
        assert all(0 <= band["predicted"] <= 1 for band in explained["calibration"])
        session.draft = DraftConfig("pld")
        assert session.explain(collect(session, PROMPT, GREEDY).chunks[-1].stats) is None
    assert Planner(STEEP).explain(GenerationStats(note="it is blind"), 5)["reason"] == "it is blind"


@pytest.mark.parametrize("source", ["suffix", "adjacency", "esp", "last"])
def test_one_source_alone(model: Model, source: str) -> None:
    found = answer(model, PROMPT, GREEDY, replace(FLAT, sources=source))
    assert found.token_ids == answer(model, PROMPT, GREEDY).token_ids
    assert set(found.chunks[-1].stats.drafted_by_source) <= {source, "esp1", "esp2"}


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"sources must be some of suffix, adjacency, esp, last"):
        replace(AUTO, sources="suffix+magic")
    with pytest.raises(ConfigError, match="cost must be measured or flat"):
        replace(AUTO, cost="free")
    assert (AUTO.rows, DraftConfig("esp").rows, replace(AUTO, block_complexity=7).rows) == (60, 10, 7)


def test_drafts_that_disappoint_raise_the_price() -> None:
    """Free to plan again after every pass: the promise is what counts, whether or not its tree was run."""
    drafter = FusedDrafter(AUTO, 100, None)
    drafter.begin(PROMPT)
    cost = np.arange(1, 61, dtype=np.float32) * 0.01 + 1
    budget = Budget(60, 10, 60, cost, 1.0)
    first = drafter._price(budget)
    prices = []
    for _ in range(30):
        drafter.observe(drafter.draft(budget), Nothing(), Verdict((), (7,)))
        prices.append(drafter._price(budget))
    assert max(prices) > 1.3 * first
    for _ in range(600):  # nothing is drafted meanwhile: it is forgiven
        drafter.observe(drafter.draft(replace(budget, rows=1)), Nothing(), Verdict((), (7,)))
    assert drafter._price(budget) < 1.05 * first


class Recorder:
    """Outputs that are no compiled step, and what was asked of them."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self.asked: list[tuple[list[int], int]] = []

    def top_k_sketch(self, rows: Int32Array, k: int) -> tuple[Int32Array, FloatArray]:
        self.asked.append((rows.tolist(), k))
        return self._outputs.top_k_sketch(rows, k)


def test_a_compiled_step_is_read_as_other_outputs_are(model: Model) -> None:
    assert model.embeddings is not None
    vectors = model.embeddings.rows([1, 2, 3])
    tree = DraftTree.from_lists([7, 8, 9, 5], [-1, 0, 1, 0], masks=[1, 2, 3, 0], mask_vectors=vectors)
    verdict = Verdict((1, 2), (8, 9, 33))
    plans = []
    with closing(model.new_context(64)) as context:
        step = Step(context)
        step.prefill(PROMPT[:-1])
        outputs = step.run(tree)
        recorder = Recorder(outputs)
        for seen in (outputs, recorder):
            drafter = FusedDrafter(FLAT, 100, None)
            drafter.begin(PROMPT)
            drafter.observe(tree, seen, verdict)
            plan = drafter.draft(Budget(30, 10, 30))
            plans.append((plan.token_ids.tolist(), plan.probs.tolist(), drafter.core.corrections.tolist()))
    assert plans[0] == plans[1]
    assert recorder.asked == [([0, 1, 2, 3], 16), ([7, 8], 48)]  # of the anchor's three masks two are read


def test_passes_that_cannot_be_are_not_learned() -> None:
    drafter = FusedDrafter(FLAT, 100, None)
    drafter.begin(PROMPT)
    tree = DraftTree.from_lists([7, 8, 9], [-1, 0, 0])
    with pytest.raises(ValueError, match="the path does not run through the tree"):
        drafter.observe(tree, Nothing(), Verdict((1, 2), (8, 9, 7)))
    fewer = Nothing()
    fewer.top_k_sketch = lambda rows, k: Nothing().top_k_sketch(rows[1:], k)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="another number was found"):
        drafter.observe(tree, fewer, Verdict((1,), (8, 7)))


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_sampled_answers_are_those_of_plain_decoding(model: Model, temperature: float) -> None:
    params = replace(GREEDY, temperature=temperature, seed=4, top_k=0, top_p=1.0, min_p=0.0)
    plain = answer(model, PROMPT, params)
    found = answer(model, PROMPT, params, FLAT)
    assert found.token_ids == plain.token_ids


def test_a_prediction_is_copied(model: Model) -> None:
    """The answer itself as its prediction: nearly every draft is right."""
    plain = answer(model, PROMPT, GREEDY)
    params = replace(GREEDY, prediction="".join(chunk.text for chunk in plain.chunks))
    only = replace(FLAT, sources="suffix")
    found, without = answer(model, PROMPT, params, only), answer(model, PROMPT, GREEDY, only)
    assert found.token_ids == plain.token_ids
    assert found.chunks[-1].stats.tau >= without.chunks[-1].stats.tau
    with pytest.raises(ConfigError, match="a prediction must be a text"):
        replace(GREEDY, prediction=b"bytes")  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------- memory


def test_what_was_learned_survives_the_session(model: Model) -> None:
    model.remember = True
    with Session(model, FLAT) as session:
        collect(session, PROMPT, replace(GREEDY, max_tokens=150))
        assert session._kept is not None
        assert isinstance(session._kept[2], FusedDrafter)
        weights = session._kept[2].core.weights
    assert not np.array_equal(weights, prior_weights())
    with Session(model, FLAT) as session:
        session._start(GREEDY, 1)
        assert session._kept is not None
        assert isinstance(session._kept[2], FusedDrafter)
        assert np.allclose(session._kept[2].core.weights, weights, atol=1e-4)
    model.remember = False
    with Session(model, FLAT) as session:
        session._start(GREEDY, 1)
        assert session._kept is not None
        assert isinstance(session._kept[2], FusedDrafter)
        assert np.array_equal(session._kept[2].core.weights, prior_weights())


@pytest.mark.parametrize(
    "document",
    [None, [], {}, {"version": 2}, {"version": 2, "weights": "x"}, {"version": 2, "weights": [1.0]}, {"version": 1}],
)
def test_stored_weights_that_are_none(document: object) -> None:
    drafter = FusedDrafter(FLAT, 100, None)
    drafter.recall(document)
    assert np.array_equal(drafter.core.weights, prior_weights())


@pytest.mark.parametrize(
    ("name", "number"), [("weights", float("nan")), ("corrections", float("inf")), ("corrections", -1.0)]
)
def test_numbers_that_cannot_be_are_refused(name: str, number: float) -> None:
    drafter = FusedDrafter(FLAT, 100, None)
    bad = drafter.learned()
    bad[name][3] = number
    drafter.recall(bad)
    assert np.array_equal(drafter.core.weights, prior_weights())
    assert not drafter.core.corrections.any()


def test_what_calibration_observed_is_kept_as_well(model: Model) -> None:
    with Session(model, FLAT) as session:
        collect(session, PROMPT, replace(GREEDY, max_tokens=60))
        assert session._kept is not None
        assert isinstance(session._kept[2], FusedDrafter)
        learned = session._kept[2].learned()
    assert sum(learned["corrections"]) > 0.0
    drafter = FusedDrafter(FLAT, 100, None)
    drafter.recall(json.loads(json.dumps(learned)))
    assert drafter.learned() == learned


def test_a_model_that_cannot_speculate_plans_nothing(tiny: Callable[..., Path]) -> None:
    with load(tiny("mamba"), ModelConfig(n_ctx=256, n_threads=1)) as mamba, Session(mamba) as session:
        found = collect(session, [1, 2, 3], replace(GREEDY, max_tokens=8))
        assert session.explain(found.chunks[-1].stats) is None
        assert found.chunks[-1].stats.drafter == "none"
