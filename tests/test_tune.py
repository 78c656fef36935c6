"""``esp-edge tune``: what measured times make it say, what it remembers, and who uses that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Program, make_program, one_error

from esp_edge.config import ModelConfig
from esp_edge.models import device
from esp_edge.models.cache import ModelCache
from esp_edge.models.device import remember_threads, tuned_threads
from esp_edge.models.model import TargetModel, default_threads
from esp_edge.planner import advice, measure
from esp_edge.planner.curve import CostCurve

ONE = {1: 12.6, 2: 24.3, 4: 39.2, 6: 58.5, 8: 68.8, 16: 126.8}
TWO = {1: 7.0, 2: 10.5, 4: 15.4, 6: 22.8, 8: 24.5, 16: 42.0}
FOUR = {1: 7.1, 2: 10.4, 4: 15.5, 6: 22.7, 8: 24.4, 16: 41.9}
SYSTEM = "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 1 | FMA = 1 | F16C = 1 | AVX512_VNNI = 1 | OPENMP = 1 | REPACK = 1 | "
FLAGS = ("fpu", "avx2", "fma", "f16c", "avx512f", "avx512_vnni")

# -- advice ----------------------------------------------------------------------------------------------------------


def test_counts_to_compare() -> None:
    assert advice.thread_counts(1, 1) == [1]
    assert advice.thread_counts(2, 2) == [1, 2]
    assert advice.thread_counts(6, 12) == [1, 3, 6, 12]


def test_a_better_thread_count_is_told_with_figures_and_command() -> None:
    told = advice.on_threads({1: ONE, 2: TWO}, 1, "esp-edge tune -m m.gguf --apply")
    assert told.text == (
        "2 threads instead of 1: plain decoding 1.80x as fast (7.0 instead of 12.6 ms a token), "
        "passes of 4-8 rows 2.66x (20.9 instead of 55.5 ms)"
    )
    assert told.command == "esp-edge tune -m m.gguf --apply"


def test_the_best_count_in_use_and_a_gain_within_the_noise_need_no_command() -> None:
    told = advice.on_threads({1: ONE, 2: TWO}, 2, "x")
    assert (told.text, told.command) == ("2 threads (in use) is best: 7.0 ms a token, 20.9 ms a pass of 4-8 rows", None)
    assert advice.on_threads({2: TWO, 4: {n: ms * 0.99 for n, ms in TWO.items()}}, 2, "x").command is None


def test_plain_decoding_and_small_passes_weigh_alike() -> None:
    assert advice.best_threads({2: {1: 7.0, 8: 30.0}, 4: {1: 8.0, 8: 20.0}}) == 4
    assert advice.best_threads({2: {1: 7.0}, 4: {1: 8.0}}) == 2


def ratio_of(*ratios: float) -> Callable[[int], float]:
    return dict(zip((2, 4, 8), ratios, strict=True)).__getitem__


@pytest.mark.parametrize(("quant", "ratios"), [("Q4_0", (1.5, 2.1, 3.3)), ("BF16", (1.4, 1.8, 2.3))])
def test_a_quant_that_shares_work(quant: str, ratios: tuple[float, float, float]) -> None:
    told = advice.on_quant(quant, ratio_of(*ratios), "m.gguf")
    assert told.command is None
    assert f"{ratios[0]:.2f}, {ratios[1]:.2f} and {ratios[2]:.2f} times one" in told.text


def test_a_quant_without_a_batched_kernel() -> None:
    told = advice.on_quant("Q4_1", ratio_of(1.72, 2.59, 4.36), "m.gguf")
    assert told.text.startswith("Q4_1 has no batched kernel here: 2, 4 and 8 rows cost 1.72, 2.59 and 4.36 times one")
    assert told.command == "esp-edge model quantize m.gguf --to Q4_0"
    on_gpu = advice.on_quant("Q4_0", ratio_of(1.9, 3.7, 7.2), "m.gguf", on_gpu=True)
    assert on_gpu.command == "esp-edge model quantize m.gguf --to Q4_K_M"
    assert advice.on_quant("Q4_0", ratio_of(1.9, 3.7, 7.2), "m.gguf").command is None


def test_builds() -> None:
    assert advice.on_build(SYSTEM, FLAGS, "0.3.36").command is None
    assert advice.on_build(SYSTEM, (), "0.3.36").command is None
    missing = advice.on_build(SYSTEM.replace("AVX2 = 1 | ", ""), FLAGS, "0.3.36")
    assert "this CPU has AVX2," in missing.text
    assert missing.command is not None
    assert missing.command.startswith("CMAKE_ARGS=-DGGML_NATIVE=on pip install")
    assert missing.command.endswith("llama-cpp-python==0.3.36")
    assert "OpenMP" in advice.on_build(SYSTEM.replace("OPENMP = 1 | ", ""), FLAGS, "0.3.36").text


def test_device_and_environment() -> None:
    assert advice.on_device(False, False, "x") is None
    assert advice.on_device(True, True, "x") is None
    found = advice.on_device(True, False, "esp-edge tune -ngl -1")
    assert found is not None
    assert found.command == "esp-edge tune -ngl -1"
    assert advice.on_environment({}) is None
    passive = advice.on_environment({"OMP_WAIT_POLICY": "PASSIVE"})
    assert passive is not None
    assert passive.command == "unset OMP_WAIT_POLICY"


def test_how_far_speculation_can_go() -> None:
    curve = CostCurve({256: {1: 10.0, 2: 15.0, 4: 20.0, 8: 30.0, 16: 80.0}})

    def ratio(n: int) -> float:
        return curve.ratio(n, 256)

    assert advice.break_even(ratio) == pytest.approx({2: 1.5, 4: 2.0, 8: 3.0, 16: 8.0})
    assert advice.most_speedup(ratio) == pytest.approx(8 / 3)
    assert advice.most_speedup(lambda _: 1.0) == 16


# -- what is remembered ----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> ModelCache:
    monkeypatch.setenv("ESP_EDGE_CACHE", str(tmp_path))
    return ModelCache(tiny("llama"))


def test_threads_hold_for_one_machine(cache: ModelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned_threads(cache) == 0
    assert remember_threads(cache, 3)
    assert tuned_threads(cache) == 3
    with monkeypatch.context() as patch:
        patch.setattr(device, "usable_cores", lambda: 99)
        assert tuned_threads(cache) == 0
        assert remember_threads(cache, 50)
    assert tuned_threads(cache) == 3
    assert remember_threads(cache, 0)
    assert tuned_threads(cache) == 0


@pytest.mark.parametrize("stored", [True, -1, 0, 4096, "4", None])
def test_a_damaged_entry_counts_as_none(cache: ModelCache, stored: Any) -> None:
    assert remember_threads(cache, 2)
    cache.put("threads", dict.fromkeys(cache.get("threads"), stored))
    assert tuned_threads(cache) == 0
    cache.put("threads", stored)
    assert tuned_threads(cache) == 0


def test_models_use_what_was_remembered(cache: ModelCache, tiny: Callable[..., Path]) -> None:
    path = str(tiny("llama"))
    with TargetModel(path, ModelConfig(n_ctx=64)) as model:
        assert model.threads == default_threads()
        remember_threads(cache, 3)
        assert model.threads == 3
    with TargetModel(path, ModelConfig(n_ctx=64, n_threads=1)) as model:
        assert model.threads == 1


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """The command line on real tiny models, with scripted times; one thread is in use."""
    made = make_program(monkeypatch, capsys)
    monkeypatch.setattr("esp_edge.models.model.default_threads", lambda: 1)
    monkeypatch.setattr(measure, "measure_threads", scripted_threads)
    monkeypatch.setattr(measure, "measure_models", lambda *_args, **_options: [TWO, ONE])
    monkeypatch.setattr(measure, "measure_curve", lambda *_args, **_options: CostCurve({256: TWO}))
    return made


def scripted_threads(_model: TargetModel, counts: list[int], **_options: Any) -> dict[int, dict[int, float]]:
    known = {1: ONE, 2: TWO, 4: FOUR}
    return {count: known[count] for count in counts}


def test_tune_says_what_is_better(program: Program, tiny: Callable[..., Path]) -> None:
    path = str(tiny("llama"))
    code, out, _ = program("tune", "-m", path, "-t", "1,2")
    assert code == 0
    assert "2 threads instead of 1: plain decoding 1.80x as fast" in out
    assert f"run: esp-edge tune -m {path} --apply" in out
    assert "a tree pays from a tau of 1.50 at 2 rows, 2.20 at 4, 3.50 at 8, 6.00 at 16" in out
    assert "2.67x" in out
    assert "| 16   |" in out


def test_tune_writes_json(program: Program, tiny: Callable[..., Path]) -> None:
    code, out, _ = program("tune", "-m", str(tiny("llama")), "-t", "2", "--json")
    document = json.loads(out)
    assert code == 0
    assert (document["in_use"], document["best"], document["applied"]) == (1, 2, False)
    assert document["break_even"] == {"2": 1.5, "4": 2.2, "8": 3.5, "16": 6.0}
    assert {row["threads"] for row in document["threads"]} == {1, 2}
    assert document["curve"] == {"256": {str(n): ms for n, ms in TWO.items()}}
    assert [line["kind"] for line in document["advice"]][:3] == ["threads", "kernels", "quant"]
    assert document["machine"]["threads"] == 1


def test_apply_remembers_and_reset_forgets(program: Program, cache: ModelCache, tiny: Callable[..., Path]) -> None:
    path = str(tiny("llama"))
    code, out, err = program("tune", "-m", path, "-t", "1,2", "--apply", "--json")
    assert code == 0
    assert json.loads(out)["applied"] is True
    assert "remembered: 2 threads" in err
    assert tuned_threads(cache) == 2
    stored = cache.get("cost_curve")
    assert [entry["settings"]["model"]["n_threads"] for entry in stored] == [2]  # measured as it will be used
    code, out, err = program("tune", "-m", path, "-t", "1,2", "--apply")
    assert "2 threads (in use) is best" in out
    assert "nothing to remember" in err
    assert tuned_threads(cache) == 2
    code, out, err = program("tune", "-m", path, "--reset")
    assert (code, out) == (0, "")
    assert tuned_threads(cache) == 0


def test_a_cache_that_cannot_be_written_is_told(
    program: Program, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ESP_EDGE_CACHE", str(tmp_path / "file"))
    code, out, err = program("tune", "-m", str(tiny("llama")), "-t", "1,2", "--apply", "--json")
    assert code == 0
    assert json.loads(out)["applied"] is False
    assert "cannot be written" in err


def test_wrong_command_lines(program: Program) -> None:
    code, _, err = program("tune", "--apply", "--reset")
    assert code == 2
    assert "either --apply or --reset" in one_error(err)
    code, _, err = program("tune", "-t", "0")
    assert code == 1
    assert "--threads must be whole numbers" in one_error(err)


@pytest.mark.model
def test_the_bundled_model_for_real(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    program = make_program(monkeypatch, capsys)
    monkeypatch.setattr("esp_edge.models.model.default_threads", lambda: 1)  # other programs do not hold one thread up
    code, out, err = program("tune", "-t", "1", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["break_even"]["8"] > 1.0
    assert all(row["ms"] > 0 for row in document["threads"])
