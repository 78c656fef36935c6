"""Replays on a simulated device: speeds, bounds, calibration, the half that taught, and a table along a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Program, make_program, one_error

from esp_edge.bench.ablate import TABLES
from esp_edge.bench.calibration import Calibration, Tally
from esp_edge.bench.halves import HALVES, half_of, has_taught, is_in_half
from esp_edge.bench.questions import Question
from esp_edge.bench.replay import Replayed, replay_lanes
from esp_edge.bench.replay_report import overview, replay_document
from esp_edge.bench.run import ModelFile
from esp_edge.bench.simulate import Device, read_device
from esp_edge.bench.spec import Lane, make_lanes, parse_drafters
from esp_edge.bench.trace import TracePlan, record_trace
from esp_edge.bench.trace_file import Trace
from esp_edge.config import GenerationParams, ModelConfig
from esp_edge.errors import ConfigError
from esp_edge.planner.curve import CostCurve
from esp_edge.tree import DraftTree, Verdict

QUESTIONS = (
    Question(1, "qa", ("the rain in the rain in the",)),
    Question(2, "qa", ("an owl and an owl and an owl", "and an owl")),
    Question(3, "rag", ("a letter",)),
    Question(4, "rag", ("one and two and one and two",)),
)
STAIRS = {rows: 1.0 if rows <= 4 else 10.0 for rows in range(1, 65)}


def device_of(points: dict[int, float], **host: float) -> Device:
    return Device("made up", CostCurve({256: points}), **host)


def lanes_of(text: str, *blocks: int) -> list[Lane]:
    return make_lanes(parse_drafters(text), blocks)[1:]


def found_of(replayed: Sequence[Replayed]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(one.label, one.block_complexity): one.total for one in replayed}


@pytest.fixture(scope="module")
def trace(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    plan = TracePlan(
        ModelFile.read(tiny("llama")),
        ModelConfig(n_ctx=256, n_threads=1, exact=True),
        QUESTIONS,
        GenerationParams(max_tokens=30, seed=1),
        ("auto", "vocab-mean"),
    )
    return record_trace(plan, tmp_path_factory.mktemp("trace"))


# -- halves ----------------------------------------------------------------------------------------------------------


def test_the_rule_of_the_halves() -> None:
    assert [has_taught(number) for number in range(480, 488)] == [True, True, False, False] * 2
    assert not has_taught("480")
    assert [is_in_half(482, half) for half in HALVES] == [True, False, True]


def test_a_half_of_a_trace(trace: Trace, tmp_path: Path) -> None:
    ids = {half: [one.question_id for one in half_of(trace, half)] for half in HALVES}
    assert ids == {"untaught": [2, 2, 3], "taught": [1, 4], "all": [1, 2, 2, 3, 4]}
    with pytest.raises(ConfigError, match="untaught, taught, all, but 'best' was given"):
        half_of(trace, "best")
    only = Trace(trace.path)
    only.files = trace.files[:1]
    with pytest.raises(ConfigError, match="has no answer of the half of the questions that taught auto nothing"):
        half_of(only, "untaught")
    only.files = [tmp_path / "00000-0.npz"]
    only.files[0].write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="is no whole answer"):
        list(half_of(only, "untaught"))


# -- the device ------------------------------------------------------------------------------------------------------


def cost_file(path: Path, points: dict[int, float], threads: Sequence[int] = (2,)) -> str:
    rows = [{"rows": n, "context": 300, "threads": t, "ms": ms} for t in threads for n, ms in points.items()]
    machine = {"quant": "Q4_0", "cpu": "a CPU", "date": "2026-01-01"}
    path.write_text(json.dumps({"machine": machine, "rows": rows}), "utf-8")
    return str(path)


def test_a_device_from_a_file(tmp_path: Path) -> None:
    device = read_device(cost_file(tmp_path / "cost.json", {1: 2.0, 2: 3.0}), "0.25, 0.5")
    assert device.name == "cost.json (Q4_0, a CPU, 2026-01-01, 2 threads)"
    assert (device.model_ms(2, 100), device.host_ms(drafts=True)) == (3.0, 0.5)
    assert device.plain_ms(10, 4) == 4 * 2.25
    assert device.as_dict()["cost"] == {"300": {"1": 2.0, "2": 3.0}}
    flat = read_device("flat")
    assert flat.model_ms(64, 0) == flat.model_ms(1, 0)


@pytest.mark.parametrize(
    ("content", "host", "why"),
    [
        (None, None, "there is no file"),
        ("[", None, "has no times of passes"),
        ('{"rows": []}', None, "has no times of passes"),
        ('{"rows": [{"rows": 1}]}', None, "has no times of passes"),
        ("flat", "1", "--host-ms needs two times"),
        ("flat", "1,-1", "--host-ms needs two times"),
    ],
)
def test_what_is_no_device(tmp_path: Path, content: str | None, host: str | None, why: str) -> None:
    file = tmp_path / "cost.json"
    if content not in (None, "flat"):
        file.write_text(str(content), "utf-8")
    with pytest.raises(ConfigError, match=why):
        read_device("flat" if content == "flat" else str(file), host)


def test_one_thread_count(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="of 1 and 2 threads: measure one"):
        read_device(cost_file(tmp_path / "cost.json", {1: 1.0}, (1, 2)))


# -- speeds ----------------------------------------------------------------------------------------------------------


def test_where_rows_are_free_the_speed_is_tau(trace: Trace) -> None:
    device = read_device("flat", "1,3")  # T(1) is 1 ms
    plain, *drafting = replay_lanes(trace, make_lanes(parse_drafters("pld,stand,auto"), [10]), device=device)
    assert (plain.label, plain.total["simulated_speed"]) == ("none", 1.0)
    for one in drafting:
        assert one.total["simulated_speed"] == pytest.approx(one.tau * (1 + 1) / (1 + 3), rel=1e-4)


def test_every_row_is_paid(trace: Trace) -> None:
    line = device_of({1: 1.0, 2: 2.0, 64: 64.0})
    pld = found_of(replay_lanes(trace, lanes_of("pld", 10), device=line))["pld", 10]
    assert pld["tau"] > 1
    assert pld["simulated_speed"] == pytest.approx(pld["tau"] / pld["rows_per_pass"], rel=1e-4)  # its draft is one path
    assert "simulated_speed" in pld
    assert found_of(replay_lanes(trace, lanes_of("pld", 10)))["pld", 10]["simulated_speed"] is None


def test_auto_plans_with_the_cost(trace: Trace) -> None:
    lanes = lanes_of("auto,auto[cost=flat]", 30)
    steep = found_of(replay_lanes(trace, lanes, device=device_of({1: 1.0, 64: 640.0})))
    assert steep["auto", 30]["rows_per_pass"] < 1.1
    assert steep["auto", 30]["mask_init"] is None  # probing cannot pay
    assert steep["auto", 30]["simulated_speed"] > 0.9
    assert steep["auto[cost=flat]", 30]["simulated_speed"] < 0.1
    free = found_of(replay_lanes(trace, lanes, device=read_device("flat")))
    names = ("tau", "rows_per_pass", "passes", "mask_init")
    assert [free["auto", 30][name] for name in names] == [free["auto[cost=flat]", 30][name] for name in names]
    with pytest.raises(ConfigError, match="give --cost FILE"):
        replay_lanes(trace, lanes)


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_perfect_drafts_take_the_best_size_of_every_pass(trace: Trace) -> None:
    lanes = lanes_of("pld", 2, 10)
    replayed = replay_lanes(trace, lanes, device=device_of(STAIRS), bounds=True)
    left = [len(one.token_ids) - 1 for one in trace]  # the first token belongs to the prefill
    for size, best in ((2, 2), (10, 4)):
        row = found_of(replayed)["perfect drafts", size]
        assert row["passes"] == sum(math.ceil(n / best) for n in left)
        assert row["simulated_speed"] == pytest.approx(sum(left) / row["passes"], rel=1e-4)
        assert (row["exact"], row["bound"]) == (True, True)
    line = replay_lanes(trace, lanes, device=device_of({1: 1.0, 2: 2.0, 64: 64.0}), bounds=True)
    assert found_of(line)["perfect drafts", 10]["simulated_speed"] == pytest.approx(1.0)  # rows are never cheaper


def test_the_perfect_planner_wastes_nothing(trace: Trace) -> None:
    device = device_of({1: 1.0, 2: 1.5, 64: 20.0})
    found = found_of(replay_lanes(trace, lanes_of("auto,auto[cost=flat]", 30), device=device, bounds=True))
    perfect, greedy = found["perfect planner", 30], found["auto[cost=flat]", 30]
    assert perfect["tau"] == greedy["tau"] == pytest.approx(perfect["rows_per_pass"])
    assert perfect["simulated_speed"] >= found["auto", 30]["simulated_speed"] > greedy["simulated_speed"]
    assert found["perfect drafts", 30]["simulated_speed"] >= perfect["simulated_speed"]


# -- calibration -----------------------------------------------------------------------------------------------------


def test_drafts_below_reached_nodes_count() -> None:
    """The model chose 7, then 3: node 1 is right, its sibling and its child wrong; below the sibling nobody knows."""
    tree = DraftTree.from_lists([5, 7, 9, 8, 4], [-1, 0, 0, 1, 2], [1.0, 0.6, 0.25, 0.3, 0.1])
    calibration = Calibration()
    calibration.note_pass(tree, Verdict((1,), (7, 3)))
    calibration.rated.add([[0.0, 0.0, 0.0]] * 9 + [[1.9, 1.0, 2.0]])
    document = calibration.document()
    assert document is not None
    drafted = document["drafted"]
    assert [(band["from"], band["candidates"]) for band in drafted["bands"]] == [(0.2, 1), (0.5, 1), (0.6, 1)]
    assert [(band["predicted"], band["observed"]) for band in drafted["bands"]] == [(0.25, 0.0), (0.5, 0.0), (0.6, 1.0)]
    assert drafted["largest_gap"] == 0.5
    assert document["rated"] == {
        "bands": [{"from": 0.9, "to": 1.0, "predicted": 0.95, "observed": 0.5, "candidates": 2}],
        "largest_gap": 0.45,
    }
    assert Tally().document() == {"bands": [], "largest_gap": 0.0}
    assert Calibration().document() is None


def test_what_auto_predicts_is_counted(trace: Trace) -> None:
    pld, auto, keeping = replay_lanes(trace, lanes_of("pld,auto[cost=flat],auto[cost=flat,keep=on]", 30))
    assert pld.calibration.document() is None
    for one in (auto, keeping):
        accepted = sum(turn.accepted_tokens for record in one.records.values() for turn in record.turns)
        rated, drafted = one.calibration.rated.sums, one.calibration.drafted.sums
        assert drafted[:, 1].sum() >= accepted > 0  # an answer's last token may be a draft, too
        assert rated[:, 1].sum() <= sum(len(recording.token_ids) for recording in trace)
        assert rated[:, 2].sum() > 0
    document = replay_document(trace, [pld, auto])
    assert [one["drafter"] for one in document["calibration"]] == ["auto[cost=flat]"]
    assert "auto[cost=flat] @ 30: predicted and observed acceptance are at most" in overview(document)


# -- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    return make_program(monkeypatch, capsys)


def test_replay_on_a_device(program: Program, trace: Trace, tmp_path: Path) -> None:
    folder, cost = tmp_path / "out", cost_file(tmp_path / "cost.json", {1: 2.0, 64: 9.0})
    flags = ["--half", "untaught", "--cost", cost, "--host-ms", "0.1,0.2", "--block-complexity", "10"]
    code, text, err = program(
        "bench", "replay", str(trace.path), *flags, "--drafters", "pld,auto", "--out", str(folder)
    )
    assert code == 0, err
    assert "3 of 5 answers" in text
    assert "id // 2 is odd; passes take the time of cost.json (Q4_0" in text
    assert "0.1 ms (plain) or 0.2 ms (drafting) of our own" in text
    assert "of the perfect planner's speed" in text
    document = json.loads((folder / "replay.json").read_text("utf-8"))
    assert (document["half"], document["device"]["host_ms"]) == ("untaught", [0.1, 0.2])
    assert [(one["drafter"], one["block_complexity"]) for one in document["reached"]] == [("auto", 10)]
    assert 0 < document["reached"][0]["perfect_planner"] <= 1
    assert [row["drafter"] for row in document["rows"] if row["category"] == "all"] == [
        *("pld", "auto", "perfect planner", "perfect drafts")
    ]
    report = (folder / "replay.md").read_text("utf-8")
    assert "## Simulated speed by category" in report
    assert "### auto @ 10" in report
    for name in ("calibration", "simulated-speed"):
        assert f"plots/{name}-llama.png" in report
        assert (folder / "plots" / f"{name}-llama.png").stat().st_size
    code, text, _ = program("bench", "replay", str(trace.path), "--cost", "flat", "--block-complexity", "10", "--json")
    assert "auto" in {row["drafter"] for row in json.loads(text)["rows"]}  # a default, with a device


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--host-ms", "1,1"], "it needs --cost FILE"),
        (["--cost", "nowhere.json"], "there is no file nowhere.json"),
        (["--half", "best"], "untaught, taught, all"),
    ],
)
def test_usage_of_replay(program: Program, trace: Trace, flags: list[str], why: str) -> None:
    code, _, err = program("bench", "replay", str(trace.path), *flags)
    assert code != 0
    assert why in one_error(err)


def test_the_table_auto_along_a_trace(program: Program, trace: Trace, tmp_path: Path) -> None:
    out, cost = tmp_path / "out", cost_file(tmp_path / "cost.json", {1: 2.0, 64: 9.0})
    flags = ["--trace", str(trace.path), "--cost", cost, "--half", "untaught", "--out", str(out)]
    code, text, err = program("bench", "ablate", "auto", *flags)
    assert code == 0, err
    assert "Replayed: 3 recorded answers of the half of the questions that taught auto nothing" in text
    assert "LLaMA" not in text
    assert "same as plain" not in text
    document = json.loads((out / "ablate-auto.json").read_text("utf-8"))
    assert [row["configuration"] for row in document["rows"]] == [entry.name for entry in TABLES["auto"].entries]
    rows = {row["configuration"]: row for row in document["rows"]}
    assert rows["all sources"]["tau"] >= rows["esp alone"]["tau"] >= 1
    assert rows["planned size"]["speedup"] > 0.9
    assert all(pair["questions"]["of"] == 2 for pair in document["pairs"])
    assert (out / "plots" / "ablate-auto-llama.png").stat().st_size
    for more, why in ((["--cost", "flat", "--questions", "q"], "no --questions"), ([], "it needs --cost")):
        code, _, err = program("bench", "ablate", "auto", "--trace", str(trace.path), "--out", str(out), *more)
        assert code != 0
        assert why in one_error(err)
    code, _, err = program("bench", "ablate", "temperature", *flags)
    assert code == 1
    assert "but the trace is of temperature 0 in exact mode" in one_error(err)
    code, _, err = program("bench", "ablate", "auto", "--out", str(out))
    assert "give it alone, or --trace DIR with --cost FILE" in one_error(err)


def test_masks_that_the_trace_lacks_are_named(trace: Trace) -> None:
    recorded = Trace(trace.path)
    recorded.settings = replace(trace.settings, masks=1)
    with pytest.raises(ConfigError, match="needs 2 masks"):
        replay_lanes(recorded, lanes_of("auto[masks=2]", 10), device=read_device("flat"))
