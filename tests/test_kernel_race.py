"""Our products beside llama.cpp's on random blocks, what they take, and which kernels follow from that."""

from __future__ import annotations

import functools
import json
import os
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from esp_edge import ModelConfig
from esp_edge._runtime import native
from esp_edge.models import gguf, kernel_choice, kernels
from esp_edge.models.cache import ModelCache
from esp_edge.models.kernel_choice import SIZES, Choice, choose, lookups_of, matrices_of, measure
from esp_edge.models.kernels import ISA_VARIABLE, Kernels, plan_kernels
from esp_edge.models.model import TargetModel

Floats = npt.NDArray[np.float64]

BEST = native.install_kernels()
LIMITS = {"avx512": ("avx512", "avx2")}.get(BEST, (BEST,))
# where a unit has half-precision numbers, in bytes; the second one is of the minima
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
UNITS = {"Q4_K": 256, "Q6_K": 256, "BF16": 32, "F16": 32, "F32": 32}  # weights that a row's length is a multiple of
ROWS = (2, 8, 15, 16, 24, 33, 64)  # multiples of 8 are what llama.cpp repacks
LARGEST = 1000.0  # of a column: the sum of 32 must fit into half precision for llama.cpp
HALF_SUMS = platform.machine().lower() in ("aarch64", "arm64")  # llama.cpp adds up F16 in half precision there


def random_weights(name: str, rng: np.random.Generator, n_rows: int, n_k: int, kind: str) -> npt.NDArray[np.uint8]:
    """uint8[n_rows, bytes of a row]: any bytes, but finite numbers. ``kind`` says how large the scales are."""
    if name in ("F32", "F16", "BF16"):
        return random_numbers(name, rng, n_rows * n_k, kind).reshape(n_rows, -1)
    unit, unit_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = rng.integers(0, 256, (n_rows * n_k // unit, unit_bytes), np.uint8)
    for at in HALVES[name]:
        blocks[:, at : at + 2] = random_numbers("F16", rng, len(blocks), kind).reshape(-1, 2)
    blocks[rng.random(len(blocks)) < 0.1] = 0
    return blocks.reshape(n_rows, -1)


def random_numbers(name: str, rng: np.random.Generator, n: int, kind: str) -> npt.NDArray[np.uint8]:
    """Bytes of numbers: ordinary ones, or of any size there is in half precision, subnormal ones and zeros included."""
    if kind == "extreme":
        bits = rng.integers(0, 1 << 16, n, np.uint16)
        bits[(bits & 0x7C00) == 0x7C00] = 0x7BFF  # not finite: the largest
        halves = bits.view(np.float16)
    else:
        halves = rng.normal(0.0, 0.05, n).astype(np.float16)
    if name == "F16":
        return halves.view(np.uint8)
    wide = halves.astype(np.float32).view(np.uint32)
    return wide.view(np.uint8) if name == "F32" else (wide >> 16).astype(np.uint16).view(np.uint8)


def random_columns(rng: np.random.Generator, n: int, n_k: int, kind: str) -> npt.NDArray[np.float32]:
    """float32[n, n_k]: noise, with spikes that leave the rest little room, or in very small numbers; zeros, too."""
    x = rng.normal(0.0, 1.0, (n, n_k))
    if kind == "spikes":
        x[rng.random(x.shape) < 0.02] *= 200.0
    if kind == "small":
        x *= 1e-5
    x.reshape(-1, 32)[rng.random(x.size // 32) < 0.1] = 0.0
    return np.clip(x, -LARGEST, LARGEST).astype(np.float32)


# -- how far they may be apart ---------------------------------------------------------------------------------------


def half_error(numbers: Floats) -> Floats:
    """What rounding to half precision moves a number by, at most."""
    return np.maximum(np.abs(numbers) * 2.0**-11, 2.0**-25)


def int8_error(x: Floats, block: int, half_scale: bool) -> Floats:
    """What rounding to int8 with one scale a block moves each number by at most: half a step and the scale error."""
    largest = np.abs(x).reshape(len(x), -1, block).max(axis=2)
    step = largest / 127.0
    error = 0.5001 * step + (127.0 * half_error(step) if half_scale else 0.0)
    return np.repeat(np.where(largest > 0.0, error, 0.0), block, axis=1)


def int8_difference(x: Floats) -> Floats:
    """How far apart two roundings with the same step can be: llama.cpp's scale is in half precision, and at ties the
    last bits of a quotient may decide for another number."""
    step = np.repeat(np.abs(x).reshape(len(x), -1, 32).max(axis=2) / 127.0, 32, axis=1)
    quotients = np.abs(x) / np.where(step > 0.0, step, 1.0)
    at_tie = np.abs(quotients % 1.0 - 0.5) < 127.0 * 2.0**-20
    return np.where(step > 0.0, 127.0 * half_error(step) + 1.001 * step * at_tie, 0.0)


def column_error(name: str, x: Floats) -> Floats:
    """What the roundings of both sides move each number of the columns by, at most."""
    if name == "F32":
        return np.zeros_like(x)
    if name == "F16":
        return half_error(x)  # llama.cpp's side only
    if name == "BF16":
        return 2.0 * np.abs(x) * 2.0**-8  # ours as well, where the processor multiplies BF16
    if name in ("Q4_K", "Q6_K"):
        return int8_error(x, 32, False) + int8_error(x, 256, False)  # llama.cpp's blocks are larger
    return int8_difference(x)


def largest_minima(name: str, weights: npt.NDArray[np.uint8], n_k: int) -> Floats:
    """float64[rows, n_k]: how large the minima are that the weights are counted from."""
    if name not in ("Q4_1", "Q4_K"):
        return np.zeros((len(weights), n_k))
    unit, unit_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    numbers = weights.reshape(-1, unit_bytes)[:, 2:4].copy().view(np.float16).astype(np.float64)
    return np.repeat(np.abs(numbers) * (63.0 if name == "Q4_K" else 1.0), unit).reshape(len(weights), n_k)


def tolerance(name: str, weights: npt.NDArray[np.uint8], w: Floats, x: Floats, error: Floats) -> Floats:
    """float64[columns, rows]: how far apart two right results can be.

    ``error`` is what their columns differ by after rounding: each product may be off by |w| times that. Sums are in
    single precision: each of the n_k terms, minima apart, is rounded at most that often. llama.cpp keeps the sums that
    Q4_1's minima are multiplied with in half precision.
    """
    n_k = x.shape[1]
    minima = largest_minima(name, weights, n_k)
    size = np.abs(w) + 2.0 * minima
    found = error @ np.abs(w).T + (n_k + 16) * 2.0**-23 * ((np.abs(x) + error) @ size.T)
    if name == "Q4_1":
        sums = (np.abs(x) + error).reshape(len(x), -1, 32).sum(axis=2)
        found = found + half_error(sums) @ minima[:, ::32].T
    if name == "F16" and HALF_SUMS:
        found = found + n_k / 8 * 2.0**-11 * (np.abs(x) @ np.abs(w).T)
    return np.asarray(found) + 1e-30  # BF16 instructions take subnormal numbers for zero


@st.composite
def products(draw: st.DrawFn, name: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Weights and columns of some shape."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    unit = UNITS.get(name, 32)
    n_k = unit * draw(st.integers(1, 1280 // unit))
    weights = random_weights(name, rng, draw(st.sampled_from(ROWS)), n_k, draw(st.sampled_from(("usual", "extreme"))))
    return weights, random_columns(
        rng, draw(st.integers(1, 16)), n_k, draw(st.sampled_from(("noise", "spikes", "small")))
    )


def multiply(
    name: str,
    weights: npt.NDArray[np.uint8],
    x: npt.NDArray[np.float32],
    limit: str | None,
    n_threads: int = 2,
    *,
    repack: bool = True,
) -> npt.NDArray[np.float32]:
    """float32[columns, rows], by our kernels or, without a limit, by llama.cpp's."""
    y: npt.NDArray[np.float32] = native.kernel_product(
        name, weights.reshape(-1), x, len(weights), limit is not None, repack, limit, n_threads
    )
    return y


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", sorted(kernels.FORMATS))
def test_products_of_random_blocks_are_llama_cpps(name: str, limit: str) -> None:
    @hypothesis_settings(max_examples=40)
    @given(products(name))
    def check(task: tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]) -> None:
        weights, x = task
        before = native.kernel_products()
        stock = multiply(name, weights, x, None)
        assert native.kernel_products() == before
        ours = multiply(name, weights, x, limit)
        assert native.kernel_products() == before + 1
        w = dequantize(weights, GGMLQuantizationType[name]).astype(np.float64)
        wide = x.astype(np.float64)
        allowed = tolerance(name, weights, w, wide, column_error(name, wide))
        assert np.all(np.abs(ours.astype(np.float64) - stock) <= allowed)
        rounded = int8_error(wide, 32, False) if name in HALVES else column_error(name, wide)
        assert np.all(np.abs(ours - wide @ w.T) <= tolerance(name, weights, w, wide, rounded))
        assert_array_equal(multiply(name, weights, x[-1:], limit, 1), ours[-1:])  # a column alone, in one thread
        from_file = [multiply(name, weights, part, limit, 3, repack=False) for part in (x, x[:1])]
        assert_array_equal(from_file[0], ours)
        assert_array_equal(from_file[1], ours[:1])

    check()


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "BF16"])
def test_threads_that_take_rows_over_from_others_change_no_bit(name: str, limit: str) -> None:
    """More threads than cores: some are always late. As many rows as are dealt out in several parts, and odd ones."""
    rng = np.random.default_rng(4)
    for n_rows in (3, 17, 1003):
        weights = random_weights(name, rng, n_rows, 512, "usual")
        for n_columns in (1, 5, 33):
            x = random_columns(rng, n_columns, 512, "noise")
            wanted = multiply(name, weights, x, limit, 1)
            for n_threads in (2, 3, 5):
                for repack in (True, False):
                    assert_array_equal(multiply(name, weights, x, limit, n_threads, repack=repack), wanted)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_roundings_add_up_like_noise(name: str, limit: str) -> None:
    """On noise the errors of rounding are independent and even: their root mean square is known, not just the worst."""
    rng = np.random.default_rng(3)
    weights = random_weights(name, rng, 64, 1024, "usual")
    x = rng.normal(0.0, 1.0, (16, 1024)).astype(np.float32)
    w = dequantize(weights, GGMLQuantizationType[name]).astype(np.float64)
    blocks = (32, 256 if name in ("Q4_K", "Q6_K") else 32)
    steps = [np.abs(x).reshape(16, -1, block).max(axis=2).repeat(block, axis=1) / 127.0 for block in blocks]
    expected = np.sqrt(np.mean((steps[0] ** 2 + steps[1] ** 2) / 12.0 @ (w**2).T))
    found = np.sqrt(np.mean((multiply(name, weights, x, limit) - multiply(name, weights, x, None)) ** 2))
    assert found <= 1.3 * expected


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"type": "Q5_K"}, "no kernel of ours for the type Q5_K"),
        ({"n_rows": 1}, "2 to 2\\^24 rows"),
        ({"n_rows": -8}, "2 to 2\\^24 rows"),
        ({"n_rows": 9}, "another size"),
        ({"x": np.zeros((1, 48), np.float32)}, "a multiple of 32"),
        ({"x": np.zeros((1, 0), np.float32)}, "a multiple of 32"),
        ({"x": np.zeros((0, 64), np.float32)}, "between 1 and 512"),
        ({"x": np.zeros((513, 64), np.float32)}, "between 1 and 512"),
        ({"n_threads": 0}, "between 1 and 512"),
        ({"n_threads": 513}, "between 1 and 512"),
        ({"limit": "sse2"}, "no kernel of ours"),
        ({"weights": np.zeros(8, np.uint8)}, "another size"),
    ],
)
def test_what_ggml_would_end_the_process_for_is_refused(change: dict[str, Any], told: str) -> None:
    good: dict[str, Any] = {
        "type": "Q4_0",
        "weights": np.zeros(8 * 2 * 18, np.uint8),
        "x": np.zeros((1, 64), np.float32),
    }
    good |= {"n_rows": 8, "ours": True, "limit": None, "n_threads": 1}
    for repack in (True, False):
        assert native.kernel_product(**good, repack=repack).shape == (1, 8)
        with pytest.raises(ValueError, match=told):
            native.kernel_product(**(good | change), repack=repack)


@pytest.mark.parametrize(
    "change",
    [
        {"type": "nonsense"},
        {"columns": []},
        {"columns": [0]},
        {"columns": [1] * 17},
        {"n_k": 1 << 21},
        {"n_rows": 1 << 25},
        {"n_bytes": 1 << 40},
        {"n_threads": -1},
    ],
)
def test_races_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    good: dict[str, Any] = {"type": "Q8_0", "n_rows": 100, "n_k": 64, "columns": [1, 2], "limit": None}
    good |= {"n_threads": 1, "n_bytes": 1 << 20, "budget_ms": 5.0}
    for repack in (True, False):
        ours, stock, repacked = native.race_kernels(**good, repack=repack)
        assert len(ours) == len(stock) == 2
        assert all(us > 0.0 for times in (*ours, *stock) for us in times)
        assert isinstance(repacked, bool)
        with pytest.raises(ValueError, match=r".+"):
            native.race_kernels(**(good | change), repack=repack)


# -- the choice ------------------------------------------------------------------------------------------------------

OURS_FLAT = Choice((5.0, 5.2, 6.0, 8.0), (6.0, 9.0, 13.0, 20.0))
OURS_SLOW = Choice((9.0, 13.0, 18.0, 30.0), (6.0, 9.0, 13.0, 20.0))


@pytest.fixture(autouse=True)
def _choosing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing was decided, stored or asked for."""
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    monkeypatch.setenv("ESP_EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_choice, "_raced", threading.Event())
    kernel_choice.forget()
    yield
    kernel_choice.forget()


class Stopwatch:
    """Stands in for the race: the same times for every matrix, and what it was asked."""

    def __init__(self, choice: Choice, *, noise: float = 1.02, repacked: bool = True) -> None:
        self.choice, self.noise, self.repacked = choice, noise, repacked
        self.asked: list[tuple[str, int, int]] = []
        self.repacks: set[bool] = set()  # ours

    def __call__(
        self, name: str, n_rows: int, n_k: int, _columns: list[int], _limit: str, repack: bool, *_: Any
    ) -> tuple[list[list[float]], list[list[float]], bool]:
        self.asked.append((name, n_rows, n_k))
        self.repacks.add(repack)
        ours, stock = (
            [[1000.0 * ms, 1000.0 * ms * self.noise, 9000.0 * ms] for ms in times]
            for times in (self.choice.ours, self.choice.stock)
        )
        return ours, stock, self.repacked


def race_with(monkeypatch: pytest.MonkeyPatch, choice: Choice, **options: Any) -> Stopwatch:
    watch = Stopwatch(choice, **options)
    monkeypatch.setattr(kernel_choice, "measure", functools.partial(measure, race=watch))
    return watch


def planned(path: Path, config: ModelConfig | None = None) -> Kernels:
    return plan_kernels(config or ModelConfig(), gguf.preflight(path), n_threads=2, cache=ModelCache(path))


@pytest.mark.parametrize(
    ("ours", "stock", "wins"),
    [
        (OURS_FLAT.ours, OURS_FLAT.stock, True),
        (OURS_SLOW.ours, OURS_SLOW.stock, False),
        ((7.0, 7.1, 7.4, 9.0), (6.0, 9.0, 13.0, 20.0), True),  # slower for one row, and speculation makes up for it
        ((6.0, 9.0, 13.0, 20.0), (6.0, 9.0, 13.0, 20.0), True),  # as fast, and width-invariant
        ((6.4, 9.6, 13.9, 21.4), (6.0, 9.0, 13.0, 20.0), False),
    ],
)
def test_the_faster_at_its_best_size_wins(ours: Sequence[float], stock: Sequence[float], wins: bool) -> None:
    assert Choice(tuple(ours), tuple(stock)).takes_ours == wins


def test_where_ours_are_faster_they_run(monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path]) -> None:
    watch = race_with(monkeypatch, OURS_FLAT)
    found = planned(tiny("llama", dtype="Q4_0"))
    assert (found.isa, found.complete, found.reason) == (BEST, True, None)
    assert watch.asked


def test_where_llama_cpps_are_faster_they_run_and_the_figures_are_told(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path]
) -> None:
    race_with(monkeypatch, OURS_SLOW)
    with TargetModel(str(tiny("llama", dtype="Q4_0")), ModelConfig(n_ctx=256)) as model:
        found = model.kernels
        assert (found.isa, found.warning) == (None, None)
        assert str(found).startswith(
            "llama.cpp's (they are faster here: the products of passes of 1, 2, 4, 8 rows take "
        )
        assert str(found).endswith("ms with ours; --kernels fast uses ours)")
        assert "\n" not in str(found)
    with TargetModel(str(tiny("llama", dtype="Q4_0")), ModelConfig(n_ctx=256, kernels="fast")) as model:
        assert model.kernels.isa == BEST


def test_figures_of_all_matrices_are_added_up() -> None:
    watch = Stopwatch(Choice((1.0, 2.0, 3.0, 4.0), (2.0, 3.0, 4.0, 5.0)))
    found = measure({("Q4_0", 64, 64): 3, ("Q8_0", 128, 64): 1, ("F32", 2, 64): 1}, BEST, 2, race=watch)
    assert watch.asked == [("Q4_0", 64, 64), ("Q8_0", 128, 64)]  # the third has next to no weights
    assert found is not None
    assert found.ours == pytest.approx([4 * 1.01 * ms for ms in (1, 2, 3, 4)])
    assert found.stock == pytest.approx([4 * 1.01 * ms for ms in (2, 3, 4, 5)])


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(kernels="fast"),
        ModelConfig(kernels="stock"),
        ModelConfig(exact=True),
        ModelConfig(n_gpu_layers=-1),
    ],
    ids=["fast", "stock", "exact", "gpu"],
)
def test_nothing_is_measured_where_it_is_settled(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path], config: ModelConfig
) -> None:
    watch = race_with(monkeypatch, OURS_SLOW)
    assert (planned(tiny("llama"), config).isa is not None) == (config.kernels == "fast" or config.exact)
    assert not watch.asked


def test_a_chosen_instruction_set_is_a_choice(monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path]) -> None:
    watch = race_with(monkeypatch, OURS_SLOW)
    monkeypatch.setenv(ISA_VARIABLE, LIMITS[-1])
    assert planned(tiny("llama")).isa == LIMITS[-1]
    assert not watch.asked


def test_the_disk_remembers(monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path]) -> None:
    path = tiny("llama", dtype="Q8_0")
    race_with(monkeypatch, OURS_SLOW)
    first = planned(path)
    kernel_choice.forget()  # another process
    watch = race_with(monkeypatch, OURS_FLAT)
    assert planned(path) == first
    assert not watch.asked
    monkeypatch.setenv("OMP_WAIT_POLICY", "sideways")  # other conditions
    kernel_choice.forget()
    assert planned(path).isa == BEST
    assert watch.asked


def test_repacked_weights_and_the_files_own_are_measured_apart(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path]
) -> None:
    path = tiny("llama", dtype="Q8_0")
    watch = race_with(monkeypatch, OURS_FLAT)
    assert planned(path).repack
    assert watch.repacks == {True}
    watch = race_with(monkeypatch, OURS_SLOW)
    from_file = ModelConfig(repack=False)
    assert planned(path, from_file).isa is None
    assert watch.repacks == {False}
    kernel_choice.forget()
    watch = race_with(monkeypatch, OURS_FLAT)
    assert (planned(path).isa, planned(path, from_file).isa) == (BEST, None)  # both from the disk
    assert not watch.asked


def test_a_process_keeps_to_its_choice(monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path]) -> None:
    """With other threads, with another cache, and with nothing stored."""
    path = tiny("llama", dtype="Q8_0")
    race_with(monkeypatch, OURS_FLAT, noise=1.5)
    header = gguf.preflight(path)
    found = [plan_kernels(ModelConfig(), header, n_threads=n, cache=ModelCache(path)) for n in (1, 2)]
    race_with(monkeypatch, OURS_SLOW)
    assert [*found, planned(path)] == [found[0]] * 3


@pytest.mark.parametrize("noise", [1.3, float("inf")])
def test_beside_a_busy_program_ours_run_and_nothing_is_stored(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path], noise: float
) -> None:
    path = tiny("llama", dtype="Q8_0")
    watch = race_with(monkeypatch, OURS_SLOW, noise=noise)
    assert planned(path).isa == BEST
    assert len(watch.asked) == 1  # the first matrix tells
    assert ModelCache(path).get("kernel_choice") is None
    kernel_choice.forget()
    race_with(monkeypatch, OURS_SLOW)
    assert planned(path).isa is None


@pytest.mark.parametrize(
    "times", [[], [1, 2, 3], [1, 2, 3, 0], [1, 2, 3, "4"], [1, 2, 3, True], None, [1, 2, 3, float("nan")]]
)
def test_a_damaged_entry_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path], times: Any
) -> None:
    path = tiny("llama", dtype="Q8_0")
    race_with(monkeypatch, OURS_SLOW)
    assert planned(path).isa is None
    cache = ModelCache(path)
    entry = cache.get("kernel_choice")[0]
    cache.put("kernel_choice", ["nonsense", {"settings": 3}, {**entry, "ours": times}])
    kernel_choice.forget()
    watch = race_with(monkeypatch, OURS_FLAT)
    assert planned(path).isa == BEST
    assert watch.asked
    assert json.loads(json.dumps(cache.get("kernel_choice")))[-1]["ours"] != times


@pytest.mark.parametrize("content", ["{", "[]", '{"kernel_choice": 7}', ""])
def test_a_damaged_cache_is_an_empty_one(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path], content: str
) -> None:
    path = tiny("llama", dtype="Q8_0")
    race_with(monkeypatch, OURS_SLOW)
    planned(path)
    for file in Path(os.environ["ESP_EDGE_CACHE"]).rglob("*.json"):
        file.write_text(content, "utf-8")
    kernel_choice.forget()
    assert planned(path).isa is None


def test_no_memory_for_the_race_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path]
) -> None:
    def race(*_: Any) -> Any:
        raise RuntimeError("ggml cannot make a buffer")

    monkeypatch.setattr(kernel_choice, "measure", functools.partial(measure, race=race))
    assert planned(tiny("llama")).isa == BEST


def test_what_llama_cpp_repacks_does_not_count_beside_other_types() -> None:
    """There it repacks all that it can, and our kernels get the rest."""
    shapes = {("Q4_0", 64, 64): 4, ("F32", 64, 64): 4}
    assert measure(shapes, BEST, 1, complete=False, race=Stopwatch(OURS_SLOW)) is None
    assert measure(shapes, BEST, 1, complete=False, race=Stopwatch(OURS_SLOW, repacked=False)) is not None


def test_a_format_that_the_instruction_set_lacks_is_left_out() -> None:
    def race(name: str, *rest: Any) -> Any:
        if name == "BF16":
            raise ValueError(name)
        return Stopwatch(OURS_SLOW)(name, *rest)

    found = measure({("BF16", 64, 64): 4, ("F32", 64, 64): 4}, BEST, 1, race=race)
    assert found is not None
    assert found.ours == pytest.approx([4 * 1.01 * ms for ms in OURS_SLOW.ours])
    assert measure({("BF16", 64, 64): 4}, BEST, 1, race=race) is None


def test_a_table_is_no_matrix_unless_it_is_the_head() -> None:
    def tensor(name: str) -> gguf.TensorInfo:
        return gguf.TensorInfo(name, (64, 512), 8, "Q8_0", 0, 64 * 512)

    layer, table, head = tensor("blk.0.attn_q.weight"), tensor("token_embd.weight"), tensor("output.weight")
    assert matrices_of([layer, table], lambda _: True) == {("Q8_0", 512, 64): 2}
    assert matrices_of([layer, table, head], lambda _: True) == {("Q8_0", 512, 64): 2}
    assert matrices_of([layer, table, head], lambda t: t is not head) == {("Q8_0", 512, 64): 1}
    assert matrices_of([tensor("position_embd.weight")], lambda _: True) == {}
    assert lookups_of([layer, table]) == frozenset()
    assert lookups_of([layer, table, head]) == {"token_embd.weight"}
    assert lookups_of([layer, table, tensor("position_embd.weight")]) == {"position_embd.weight"}


def test_a_real_race(tiny: Callable[..., Path]) -> None:
    """On a tiny model, with the time that it takes: either answer is right."""
    path = tiny("llama", dtype="Q4_0")
    for repack in (True, False):
        matrices = {("Q4_0", 64, 64): 14, ("F32", 64, 64): 1}
        found = choose(matrices, BEST, 1, ModelCache(path), complete=True, repack=repack)
        assert kernel_choice.has_raced()
        assert found is None or (len(found.ours) == len(SIZES) and min(*found.ours, *found.stock) > 0.0)
