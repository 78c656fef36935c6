"""What went wrong once in the benchmarks, the planner and their commands, each as a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli_fakes import Program, make_program, one_error
from script_modules import load_script

from esp_edge.bench.parity import Clock, parity, parity_plan
from esp_edge.bench.questions import Question
from esp_edge.bench.results import RunDirectory
from esp_edge.bench.run import ModelFile, Plan
from esp_edge.bench.spec import make_lanes, parse_drafters, parse_threads
from esp_edge.bench.trace import TracePlan, record_trace
from esp_edge.bench.trace_file import Recording, Trace
from esp_edge.cli.output import _explained
from esp_edge.config import DraftConfig, GenerationParams, ModelConfig
from esp_edge.drafters.fused import FusedDrafter, prior_weights
from esp_edge.errors import ConfigError
from esp_edge.models.cache import ModelCache
from esp_edge.planner import measure
from esp_edge.planner.curve import CostCurve
from esp_edge.session import load

HUGE = 10**400  # JSON has such numbers, floats have not
QUESTIONS = (Question(1, "qa", ("an owl and an owl",)),)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    return make_program(monkeypatch, capsys)


def a_plan(path: Path, *mask_inits: str) -> TracePlan:
    config, params = ModelConfig(n_ctx=64, n_threads=1), GenerationParams(max_tokens=3, seed=1)
    return TracePlan(ModelFile.read(path), config, QUESTIONS, params, mask_inits or ("vocab-mean",), masks=1, top=4)


# -- a cache with anything in it -------------------------------------------------------------------------------------


def test_a_cache_that_nests_too_deeply_is_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESP_EDGE_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model.gguf"
    model.write_bytes(b"model")
    cache = ModelCache(model)
    cache.put("a", 1)
    (file,) = (tmp_path / "cache" / "models").iterdir()
    file.write_text("[" * 100_000, "utf-8")
    assert cache.get("a") is None


@pytest.mark.parametrize(
    "points", [{"256": {"1": HUGE}}, {"256": {"1": 1.0, str(HUGE): 2.0}}, {str(HUGE): {"1": 1.0, "2": 2.0}}]
)
def test_a_stored_curve_with_numbers_too_large_is_none(points: dict[str, dict[str, Any]]) -> None:
    own = [0.0] * len(next(iter(points.values())))
    with pytest.raises(ConfigError, match="no cost curve"):
        CostCurve.from_document({"version": 2, "points": points, "own": own, "switch_ms": 0.0})


def test_stored_weights_too_large_are_left_alone() -> None:
    drafter = FusedDrafter(DraftConfig("auto"), 16, None)
    before = drafter.learned()
    drafter.recall({**before, "weights": [HUGE] * len(prior_weights())})
    assert drafter.learned() == before


@pytest.mark.parametrize("bad", [HUGE, float("nan")])
def test_stored_moments_that_are_no_numbers_are_computed_again(tiny: Callable[..., Path], bad: float) -> None:
    with load(str(tiny("llama")), ModelConfig(n_ctx=64, n_threads=1)) as model:
        assert model.embeddings is not None
        n = model.embeddings.n_embd
        model.cache.put("embedding_moments", {"scale": 1.0, "mean": [bad] * n, "std": [1.0] * n})
        assert np.array_equal(model.embeddings.mean(), model.embeddings.native.moments()[0])


def _methods(stored: dict[str, Any]) -> dict[str, Any]:
    return {"get": stored.get, "put": stored.__setitem__}


def test_a_session_does_not_store_a_curve_that_was_measured_beside_a_busy_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored: dict[str, Any] = {}
    model: Any = SimpleNamespace(cache=SimpleNamespace(**_methods(stored)))
    monkeypatch.setattr(measure, "curve_settings", lambda _model: {})
    measure.save_curve(model, CostCurve({256: {1: 1.0, 2: 1.5}}, spread=1.5))
    assert stored == {}
    measure.save_curve(model, CostCurve({256: {1: 1.0, 2: 1.5}}))
    assert list(stored) == ["cost_curve"]


# -- traces ----------------------------------------------------------------------------------------------------------


def test_mask_inits_that_cannot_be_leave_no_directory(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The next attempt, with the right name, was refused as a trace of other settings."""
    for wrong, why in (("foo", "mask-init must be one of"), ("vocab-mean@7", "mask-update"), ("token:", "a text")):
        with pytest.raises(ConfigError, match=why):
            record_trace(a_plan(tiny("llama"), wrong), tmp_path / "trace")
    assert len(record_trace(a_plan(tiny("llama")), tmp_path / "trace")) == 1


def test_damaged_traces_are_one_line(tiny: Callable[..., Path], tmp_path: Path) -> None:
    trace = record_trace(a_plan(tiny("llama")), tmp_path)
    (file,) = trace.files
    whole = file.read_bytes()
    directory = whole.rindex(b"PK\x01\x02")
    for flag, byte in ((8, 1), (8, 32), (10, 99)):  # encrypted, patched, an unknown compression
        file.write_bytes(whole[: directory + flag] + bytes([byte]) + whole[directory + flag + 1 :])
        with pytest.raises(ConfigError, match="no whole answer"):
            Recording.read(file, trace.settings)
    run = json.loads((tmp_path / "run.json").read_text("utf-8"))
    for name, value in (("masks", "x"), ("top", None), ("temperature", "hot"), ("exact", "yes"), ("quant", 4)):
        document = {**run, "settings": {**run["settings"], name: value}}
        (tmp_path / "run.json").write_text(json.dumps(document), "utf-8")
        with pytest.raises(ConfigError, match="is not of bench trace"):
            Trace(tmp_path)
    with pytest.raises(ConfigError, match="is no trace"):
        Trace(file)


def test_changed_settings_of_the_load_are_named_one_by_one(tmp_path: Path) -> None:
    RunDirectory(tmp_path, {"config": {"n_ctx": 0, "exact": True, "type_k": "f16"}}, {})
    (tmp_path / "00000-0.npz").touch()
    with pytest.raises(ConfigError, match=r"settings: config\.exact was true, now false; repeat"):
        RunDirectory(tmp_path, {"config": {"n_ctx": 0, "exact": False, "type_k": "f16"}}, {})


def test_what_exact_mode_cannot_do_fails_before_a_directory_is_made(tiny: Callable[..., Path]) -> None:
    """The run ended at its first wide pass, and its directory refused the right settings."""
    lanes = make_lanes(parse_drafters("auto"), [10, 100])
    file, params = ModelFile.read(tiny("llama")), GenerationParams(max_tokens=3, seed=1)
    assert Plan([file], ModelConfig(), lanes, QUESTIONS, params).lanes == lanes
    with pytest.raises(ConfigError, match="exact mode allows a block complexity of 60, but 100"):
        Plan([file], ModelConfig(exact=True), lanes, QUESTIONS, params)


# -- commands --------------------------------------------------------------------------------------------------------


def test_more_threads_than_can_be_are_refused() -> None:
    """llama.cpp crashed on them."""
    assert parse_threads("1,512") == [1, 512]
    with pytest.raises(ConfigError, match="threads must be between 0 and 512, but 100000"):
        parse_threads("1,100000")


@pytest.mark.parametrize(
    "command",
    ["tune -t 100000", "bench cost -t 100000", "bench cost --no-plots --out FILE", "analyze alignment --out FILE"],
)
def test_wrong_settings_fail_before_a_model_is_loaded(program: Program, tmp_path: Path, command: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine", "utf-8")
    code, _out, err = program(*command.replace("FILE", str(file)).split(), "-m", str(tmp_path / "none.gguf"))
    assert code == 1
    assert ("between 0 and 512" if "-t" in command.split() else "--out needs a directory") in one_error(err)
    assert file.read_text("utf-8") == "mine"


def test_a_table_of_a_command_whose_name_is_a_flag_too(program: Program, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[bench.quants]\nppl-ctx = 64\n[bench.replay]\ndrafters = 'nobody'\n", "utf-8")
    code, _out, err = program("--config", str(file), "bench", "replay", str(tmp_path))
    assert code == 1
    assert "'nobody' is no drafter" in one_error(err)


def test_an_explanation_says_less_where_drafting_lost_and_nothing_without_passes() -> None:
    told: dict[str, Any] = {"cost": {"1": 10.0}, "price": 0.1, "plain_ms": 200.0, "saved_ms": -20.0, "reason": None}
    told |= {"calibration": [], "mask_gain": None}
    assert dict(_explained(told))["plain decoding would take"] == "200 ms, 20 ms less"
    assert list(dict(_explained(told | {"plain_ms": 0.0}))) == ["ms of a pass by rows", "worth of a millisecond"]


# -- the GPU parity run ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_parity() -> Any:
    return load_script("gpu_parity")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--minutes", "-1"), "--minutes must be above 0, but -1.0"),
        (("--minutes", "nan"), "--minutes must be above 0, but nan"),
        (("-n", "0"), "--max-tokens must be at least 1, but 0"),
        (("--out", "FILE"), "--out needs a directory"),
        (("MODEL",), "two are called llama"),
    ],
)
def test_parity_settings_that_cannot_be(
    gpu_parity: Any, tiny: Callable[..., Path], tmp_path: Path, words: tuple[str, ...], why: str
) -> None:
    (tmp_path / "file").write_text("mine", "utf-8")
    model = str(tiny("llama"))
    given = [{"FILE": str(tmp_path / "file"), "MODEL": model}.get(word, word) for word in words]
    argv = [*given, model, "--tiny", "--no-plots"]
    if "--out" not in given:
        argv += ["--out", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match=why):
        gpu_parity.run(gpu_parity.arguments(argv))


def test_a_parity_run_that_is_stopped_says_so(
    gpu_parity: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(_given: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_parity, "run", stopped)
    monkeypatch.setattr("sys.argv", ["gpu_parity"])
    assert gpu_parity.main() == 130
    assert "goes on where it was" in capsys.readouterr().err


def test_damaged_notes_of_a_parity_run_are_one_line(tiny: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "parity.json").write_text("{", "utf-8")
    plan = parity_plan(ModelFile.read(tiny("llama")), QUESTIONS, 2, 1)
    with pytest.raises(ConfigError, match=r"parity\.json is damaged"):
        parity(plan, tmp_path, Clock(1e6), lambda _text: None, plots=False)
