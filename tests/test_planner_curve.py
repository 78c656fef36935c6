"""T(n): the shape of a cost curve, what passes teach it, how it is measured and stored. Times are scripted."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esp_edge.config import MAX_BLOCK, ModelConfig
from esp_edge.errors import ConfigError
from esp_edge.models.model import TargetModel
from esp_edge.planner import measure
from esp_edge.planner.curve import CostCurve, extend, isotonic
from esp_edge.planner.measure import load_curve, plausible, save_curve, time_rounds, time_sizes, typical
from esp_edge.planner.online import OnlineCost
from esp_edge.step import Step

Q4_0 = {1: 7.1, 2: 11.1, 3: 14.2, 4: 15.0, 5: 20.4, 6: 22.9, 8: 23.4, 12: 34.7, 16: 38.6, 32: 67.7, 63: 137.1}
FAR = {1: 11.0, 2: 18.0, 4: 32.0, 8: 56.0}


def q4_0() -> CostCurve:
    return CostCurve({256: Q4_0, 1792: FAR})


# -- the shape -------------------------------------------------------------------------------------------------------


def test_measured_points_are_kept_as_stairs() -> None:
    curve = CostCurve({256: Q4_0})
    assert [curve.ms(n, 256) for n in Q4_0] == pytest.approx(list(Q4_0.values()), rel=1e-6)
    assert curve.ms(10, 0) == pytest.approx((23.4 + 34.7) / 2)
    assert curve.ratio(4, 256) == pytest.approx(15.0 / 7.1)


def test_a_dip_is_levelled() -> None:
    curve = CostCurve({256: {1: 7.0, 7: 26.0, 8: 24.0, 16: 40.0}})
    assert curve.ms(7, 256) == curve.ms(8, 256) == 25.0


def test_beyond_the_largest_size_the_slope_of_the_upper_half_goes_on() -> None:
    curve = CostCurve({256: {1: 7.0, 4: 16.0, 32: 60.0, 64: 124.0}})
    assert curve.ms(96, 0) == pytest.approx(124.0 + 32 * 2.0)
    assert curve.ms(MAX_BLOCK + 10, 0) == pytest.approx(124.0 + 2.0 * (MAX_BLOCK + 10 - 64))


def test_one_size_alone_is_no_promise_that_rows_are_free() -> None:
    assert CostCurve({1: {1: 5.0}}).ms(4, 0) == pytest.approx(20.0)


def test_contexts_in_between_and_beyond() -> None:
    curve = q4_0()
    near, middle, far, beyond = (curve.ms(8, context) for context in (256, 1024, 1792, 6000))
    assert near < middle < far < beyond
    assert curve.ms(8, 1024) == pytest.approx((23.4 + 56.0) / 2, rel=0.1)  # of its step of 256
    slope = (56.0 - 23.4) / 1536
    assert curve.ms(8, 7000) == pytest.approx(23.4 + slope * (27.5 * 256 - 256), rel=0.01)
    # the far context was measured at four sizes only: the stairs between them, and larger sizes, come from the near one
    assert curve.ms(5, 1792) - curve.ms(4, 1792) > curve.ms(4, 1792) - curve.ms(3, 1792)
    assert curve.ms(32, 1792) == pytest.approx(67.7 + 32.6 * 4, rel=0.15)


def test_a_context_below_the_measured_ones_costs_something() -> None:
    curve = CostCurve({1000: {1: 10.0, 4: 20.0}, 2000: {1: 30.0, 4: 60.0}})
    assert curve.ms(1, 0) == pytest.approx(5.0)


def test_the_context_of_most_sizes_gives_the_shape() -> None:
    curve = CostCurve({64: {1: 6.0, 4: 14.0}, 256: Q4_0})
    assert curve.ms(63, 256) == pytest.approx(137.1, rel=0.02)


def test_flat_device() -> None:
    curve = CostCurve.flat(2.5)
    assert {curve.ms(n, context) for n in (1, 60, MAX_BLOCK) for context in (0, 9000)} == {2.5}


def test_tables_are_cached_and_cannot_be_written() -> None:
    curve = q4_0()
    table = curve.table(300, 16)
    assert table.dtype == np.float32
    assert table.shape == (17,)
    assert table[0] == 0
    assert np.shares_memory(table, curve.table(500, 60))
    assert not np.shares_memory(table, curve.table(600, 16))
    with pytest.raises(ValueError, match="read-only"):
        table[1] = 0.0
    assert curve.table(0, 300).shape == (301,)


def test_a_table_behind_a_pass_knows_what_a_switch_costs_now() -> None:
    curve = CostCurve({0: {1: 1.0, 8: 8.0}}, switch_ms=0.5)
    plain, after = curve.table(0, 4), curve.table(0, 4, 2)
    assert after.tolist() == pytest.approx([0, 1.5, 2, 3.5, 4.5])
    assert np.shares_memory(after, curve.table(0, 4, 2))
    assert curve.table(0, 4, 300).tolist() == pytest.approx([0, 1.5, 2.5, 3.5, 4.5])
    curve.observe(1, 0, 1.01)  # too little for new tables
    assert np.shares_memory(plain, curve.table(0, 4))
    assert curve.switch_now > 0.504
    assert curve.table(0, 4, 2)[1] == pytest.approx(1.0 + curve.switch_now, rel=1e-6)


@given(
    st.dictionaries(st.integers(1, 64), st.floats(0.1, 500.0), min_size=1),
    st.dictionaries(st.integers(1, 16), st.floats(0.1, 500.0), min_size=1),
    st.integers(0, 20000),
    st.lists(st.tuples(st.integers(1, 240), st.floats(0.01, 1000.0))),
)
def test_more_rows_never_cost_less(
    near: dict[int, float], far: dict[int, float], context: int, passes: list[tuple[int, float]]
) -> None:
    curve = CostCurve({256: near, 1024: far})
    for rows, ms in passes:
        curve.observe(rows, context, ms)
    table = curve.table(context)
    assert np.isfinite(table).all()
    assert table[1] > 0
    assert (np.diff(table) >= -1e-4 * table[1:]).all()


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30))
def test_isotonic_is_the_nearest_rising_sequence(values: list[float]) -> None:
    found = isotonic(np.array(values))
    assert (np.diff(found) >= 0).all()
    assert found.sum() == pytest.approx(sum(values))  # blocks keep their mean
    minimax = [max(np.mean(values[: i + 1][j:]) for j in range(i + 1)) for i in range(len(values))]
    assert found[-1] == pytest.approx(minimax[-1])


def test_extend_interpolates() -> None:
    assert extend(np.array([2, 4]), np.array([6.0, 10.0]), np.array([1, 2, 3, 4, 8])).tolist() == [6, 6, 8, 10, 18]


@pytest.mark.parametrize(
    "points", [{}, {256: {}}, {256: {0: 1.0}}, {256: {1: 0.0}}, {256: {1: math.nan}}, {-1: {1: 1.0}}]
)
def test_impossible_points(points: Any) -> None:
    with pytest.raises(ConfigError, match="a cost curve needs"):
        CostCurve(points)


# -- what passes teach -----------------------------------------------------------------------------------------------


def noise(seed: int, spread: float = 0.05) -> Iterator[float]:
    draw = np.random.default_rng(seed)
    while True:
        yield float(np.exp(draw.normal(0.0, spread)))


def run_passes(curve: CostCurve, sizes: Sequence[int], n: int, factor: Callable[[int], float]) -> None:
    """``n`` passes that take ``factor(rows)`` times what was measured, and a little noise."""
    truth, wobble = q4_0(), noise(n)
    for i in range(n):
        rows = sizes[i % len(sizes)]
        curve.observe(rows, 300, truth.ms(rows, 300) * factor(rows) * next(wobble))


def ratios(curve: CostCurve) -> list[float]:
    truth = q4_0()
    return [curve.ratio(n, 300) / truth.ratio(n, 300) for n in range(2, 64)]


def test_a_slower_machine_changes_no_ratio() -> None:
    curve = q4_0()
    run_passes(curve, (1, 1, 4, 8), 200, lambda _: 1.0)
    for factor in (2.0, 1.0, 3.0):
        run_passes(curve, (1, 1, 4, 8), 60, {1: factor, 4: factor, 8: factor}.__getitem__)
        assert curve.drift == pytest.approx(factor, rel=0.15)
        assert ratios(curve) == pytest.approx([1.0] * 62, abs=0.08)


def test_a_slower_machine_seen_at_one_size_only_changes_no_ratio() -> None:
    curve = q4_0()
    run_passes(curve, (8,), 100, lambda _: 2.0)
    assert curve.ms(8, 300) == pytest.approx(2.0 * q4_0().ms(8, 300), rel=0.1)
    assert ratios(curve) == pytest.approx([1.0] * 62, abs=0.08)


def test_one_size_dearer_than_measured_is_learned_and_shared_with_neighbours() -> None:
    curve = q4_0()
    run_passes(curve, (1, 8), 60, lambda n: 1.5 if n == 8 else 1.0)
    truth = q4_0()
    assert curve.ratio(8, 300) == pytest.approx(1.5 * truth.ratio(8, 300), rel=0.08)
    assert curve.ratio(6, 300) > 1.15 * truth.ratio(6, 300)
    assert curve.ratio(2, 300) < 1.3 * truth.ratio(2, 300)


def test_a_disturbed_pass_has_little_influence() -> None:
    curve = q4_0()
    run_passes(curve, (1, 4, 8), 120, lambda _: 1.0)
    before, factor = ratios(curve), curve.drift
    curve.observe(8, 300, 1000.0)
    curve.observe(1, 300, 500.0)
    assert ratios(curve) == pytest.approx(before, abs=0.02)
    assert curve.drift < 1.5 * factor


def test_times_that_are_none_teach_nothing() -> None:
    curve = q4_0()
    for ms in (0.0, -1.0, math.nan, math.inf):
        curve.observe(1, 300, ms)
    curve.observe(0, 300, 5.0)
    assert curve.drift == 1.0


def test_uncertainty_stays_bounded() -> None:
    online = OnlineCost([1, 2, 4])
    for i in range(3000):
        online.observe(1 + i % 4, 50.0 * (-1) ** i)
    assert np.isfinite(online.log_factor).all()
    assert np.abs(online.log_factor).max() < 3.5


# -- storing ---------------------------------------------------------------------------------------------------------


def test_a_document_brings_back_the_curve_without_the_drift() -> None:
    curve = q4_0()
    run_passes(curve, (1, 8), 60, lambda n: 2.0 * (1.4 if n == 8 else 1.0))
    again = CostCurve.from_document(json.loads(json.dumps(curve.to_document())))
    assert again.points == curve.points
    assert again.drift == 1.0
    assert again.switch_ms == 0.0
    assert CostCurve.from_document(CostCurve({8: {1: 1.0}}, switch_ms=0.25).to_document()).switch_ms == 0.25
    assert [again.ratio(n, 300) for n in (2, 8, 40)] == pytest.approx(
        [curve.ratio(n, 300) for n in (2, 8, 40)], rel=0.02
    )


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0},
        {"points": {"256": {"1": -1}}},
        {"points": {"x": {"1": 1.0}}},
        {"points": []},
        {"own": [0.0]},
        {"own": [9.0] * len(Q4_0)},
        {"own": None},
        {"switch_ms": -1.0},
        {"switch_ms": math.nan},
        {"switch_ms": None},
    ],
)
def test_a_document_that_is_none(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cost curve"):
        CostCurve.from_document({**q4_0().to_document(), **change})
    documents: tuple[Any, ...] = (None, [], {}, "x")
    for document in documents:
        with pytest.raises(ConfigError, match="cost curve"):
            CostCurve.from_document(document)


# -- measuring, with scripted times ----------------------------------------------------------------------------------


class Passes:
    """A device whose pass of n rows takes ``ms(n)``, except those in ``disturbed``: (number of the pass, factor)."""

    def __init__(self, ms: Callable[[int], float], disturbed: dict[int, float] | None = None) -> None:
        self._ms, self._disturbed = ms, disturbed or {}
        self.sizes: list[int] = []

    def __call__(self, n: int) -> float:
        self.sizes.append(n)
        return self._ms(n) * self._disturbed.get(len(self.sizes), 1.0)

    @property
    def total(self) -> float:
        return sum(map(self._ms, self.sizes))


SIZES = [n for n in measure._SIZES if n <= 63]


def test_every_size_is_timed_when_there_is_time() -> None:
    passes = Passes(lambda n: 0.5 + 0.01 * n)
    times = time_sizes(passes, SIZES, 1600.0)
    assert list(times) == SIZES
    assert all(len(found) >= 9 for found in times.values())
    assert plausible(times) == pytest.approx({n: 0.5 + 0.01 * n for n in SIZES})


def test_the_budget_holds_and_small_sizes_come_first() -> None:
    passes = Passes(lambda n: 5.0 + 2.1 * n)
    times = time_sizes(passes, SIZES, 1600.0)
    assert 1000.0 < passes.total < 1750.0
    assert len(times[1]) >= 3
    assert len(times[1]) > len(times[32])
    assert {1, 2, 3, 4, 5, 6, 7, 8, 16, 32} <= set(times)


def test_a_slow_device_times_what_is_needed_and_no_more() -> None:
    passes = Passes(lambda n: 500.0 + 200.0 * n)
    times = time_sizes(passes, SIZES, 1600.0)
    assert {n: len(found) for n, found in times.items()} == {1: 2, 2: 1, 4: 1, 8: 1}
    assert passes.sizes == [1, 1, 2, 4, 8, 1]  # the first one warms up, the last one tells whether all was calm


def test_later_rounds_are_shuffled() -> None:
    passes = Passes(lambda _: 1.0)
    time_sizes(passes, [1, 2, 4, 8], 100.0)
    rounds = passes.sizes[9:]
    assert rounds[:4] != rounds[4:8]
    assert sorted(rounds[:4]) == sorted(rounds[4:8]) == [1, 2, 4, 8]


def test_a_disturbed_first_time_is_repeated() -> None:
    passes = Passes(lambda n: 5.0 + 2.0 * n, {8: 30.0})
    found = plausible(time_sizes(passes, [1, 2, 4, 8], 400.0))
    assert found == pytest.approx({n: 5.0 + 2.0 * n for n in (1, 2, 4, 8)}, rel=0.4)


def test_times_that_cannot_be_are_cut() -> None:
    found = plausible({1: [70.0], 2: [10.0], 4: [14.0], 8: [700.0]})
    assert found[1] == pytest.approx(13.0)  # not dearer than two rows
    assert found[8] == pytest.approx(1.3 * 28.0)  # nor than two passes of four
    assert found[2] == 10.0


def test_a_busy_machine_is_noticed() -> None:
    calm = time_sizes(Passes(lambda n: 500.0 + n), [1, 2, 4, 8], 100.0)
    assert measure._spread(calm) == 1.0
    busy = time_sizes(Passes(lambda n: 500.0 + n, {2: 2.0}), [1, 2, 4, 8], 100.0)
    assert measure._spread(busy) == pytest.approx(2.0)
    assert measure._contradiction({256: {1: 8.0, 2: 9.0, 3: 1.0}, 1792: {1: 4.0, 2: 20.0}}) == 2.0
    assert measure._contradiction({256: {1: 8.0}}) == 1.0


def test_typical_is_the_mean_of_the_faster_half() -> None:
    assert typical([9.0]) == 9.0
    assert typical([30.0, 9.0]) == 9.0
    assert typical([30.0, 9.0, 10.0]) == 9.5


def test_thread_counts_are_interleaved() -> None:
    seen: list[tuple[int, int]] = []

    def run(count: int, n: int) -> float:
        seen.append((count, n))
        return 4.0 * n / count

    assert time_rounds(run, [1, 2], [1, 4], 100.0) == {1: {1: 4.0, 4: 16.0}, 2: {1: 2.0, 4: 8.0}}
    changes = sum(a[0] != b[0] for a, b in itertools.pairwise(seen))
    assert changes >= 3
    assert len(seen) == 3 * 6  # 30 ms a round: a fourth does not fit; a pass to warm up before each count


# -- the cache, on a tiny model --------------------------------------------------------------------------------------


@pytest.fixture
def model(tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TargetModel]:
    monkeypatch.setenv("ESP_EDGE_CACHE", str(tmp_path))
    with TargetModel(str(tiny("llama")), ModelConfig(n_ctx=128, n_threads=1)) as model:
        yield model


class Measure:
    """Stands in for ``measure_curve``: 1 ms a row the first time, 2 ms the second..."""

    def __init__(self, spread: float = 1.0) -> None:
        self.calls, self._spread = 0, spread

    def __call__(self, _model: TargetModel, **_options: Any) -> CostCurve:
        self.calls += 1
        return CostCurve({64: {1: 1.0 * self.calls, 2: 2.0 * self.calls}}, spread=self._spread)


def test_a_curve_is_measured_once(model: TargetModel) -> None:
    stub = Measure()
    assert [load_curve(model, measure=stub).ms(1, 0) for _ in range(3)] == [1.0] * 3
    assert stub.calls == 1
    assert load_curve(model, redo=True, measure=stub).ms(1, 0) == 2.0
    assert load_curve(model, measure=stub).ms(1, 0) == 2.0


def test_a_curve_beside_a_busy_program_is_not_kept(model: TargetModel) -> None:
    stub = Measure(spread=1.4)
    assert [load_curve(model, measure=stub).ms(1, 0) for _ in range(2)] == [1.0, 2.0]


def test_settings_have_curves_of_their_own(
    model: TargetModel, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = Measure()
    load_curve(model, measure=stub)
    for config in (
        ModelConfig(n_threads=2),
        ModelConfig(n_threads=1, type_k="f32"),
        ModelConfig(n_threads=1, exact=True),
    ):
        with TargetModel(str(tiny("llama")), config) as other:
            load_curve(other, measure=stub)
    assert stub.calls == 4
    for target, value in (("cpu_name", lambda: "another"), ("usable_cores", lambda: 99)):
        with monkeypatch.context() as patch:
            patch.setattr(measure, target, value)
            load_curve(model, measure=stub)
    with monkeypatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "somehow")
        load_curve(model, measure=stub)
    assert stub.calls == 7
    assert load_curve(model, measure=stub).ms(1, 0) == 1.0


def test_few_curves_are_kept(model: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for cores in range(20):
        monkeypatch.setattr(measure, "usable_cores", lambda cores=cores: cores)
        load_curve(model, measure=Measure())
    assert len(model.cache.get("cost_curve")) == 8


@pytest.mark.parametrize("stored", ["x", [], [1], [{"settings": 1}], None, {"a": 1}])
def test_a_damaged_cache_is_an_empty_one(model: TargetModel, stored: Any) -> None:
    model.cache.put("cost_curve", stored)
    stub = Measure()
    assert load_curve(model, measure=stub).ms(1, 0) == 1.0
    assert load_curve(model, measure=stub).ms(1, 0) == 1.0
    assert stub.calls == 1


def test_a_damaged_curve_is_measured_again(model: TargetModel) -> None:
    model.cache.put("cost_curve", [{"settings": measure.curve_settings(model), "curve": {"version": 1}}])
    assert load_curve(model, measure=Measure()).ms(1, 0) == 1.0


def test_what_passes_taught_can_be_kept(model: TargetModel) -> None:
    curve = load_curve(model, measure=Measure())
    for _ in range(20):
        curve.observe(1, 10, 1.0)
        curve.observe(2, 10, 3.0)
    save_curve(model, curve)
    assert load_curve(model, measure=Measure()).ratio(2, 0) == pytest.approx(3.0, rel=0.1)


def test_a_real_measurement_leaves_nothing_behind(model: TargetModel) -> None:
    reports: list[tuple[int, int]] = []
    curve = measure.measure_curve(model, budget_ms=40.0, progress=lambda *state: reports.append(state))
    assert list(curve.points) == [64]
    assert set(curve.points[64]) >= {1, 2, 4, 8}
    assert not list(model.contexts)
    assert reports[-1] == (40, 40)
    assert all(done <= total for done, total in reports)


def test_exact_mode_stays_below_its_limit(tiny: Callable[..., Path]) -> None:
    with TargetModel(str(tiny("llama")), ModelConfig(n_ctx=256, n_threads=1, exact=True)) as model:
        assert max(measure.measure_curve(model, budget_ms=200.0).points[128]) <= 63


def test_a_second_context_costs_no_prefill(tiny: Callable[..., Path]) -> None:
    with TargetModel(str(tiny("llama")), ModelConfig(n_ctx=2048, n_threads=1)) as model:
        curve = measure.measure_curve(model, budget_ms=60.0)
    assert list(curve.points) == [256, 1792]
    assert set(curve.points[1792]) == {1, 2, 4, 8}


def test_what_another_size_costs_is_measured(model: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    last = 0

    def scripted(_step: Step, n: int, _tokens: Sequence[int]) -> float:  # rows cost 1 ms, another size 0.5 ms
        nonlocal last
        last, switched = n, n != last
        return n + 0.5 * switched

    monkeypatch.setattr(measure, "pass_ms", scripted)
    curve = measure.measure_curve(model, budget_ms=400.0)
    assert curve.switch_ms == pytest.approx(0.5)
    assert [curve.points[64][n] for n in (1, 2, 4, 8)] == pytest.approx([1, 2, 4, 8])
    assert measure.measure_curve(model, budget_ms=10.0).switch_ms == 0.0  # no time to ask twice


@pytest.mark.model
def test_the_bundled_model(model_path: Path) -> None:
    with TargetModel(str(model_path), ModelConfig(n_threads=1)) as model:  # one thread waits for no other
        curve = measure.measure_curve(model)
    assert list(curve.points) == [256, 1792]
    assert 1.0 < curve.ratio(8, 300) < 12.0
    assert curve.ms(16, 300) > curve.ms(2, 300)
    assert curve.ms(8, 4000) > curve.ms(8, 300)
