"""The paper's tables: their lanes, the verdicts, and one of them measured from end to end on a random model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Program, make_program, one_error

from esp_edge.bench.ablate import TABLES, Ask, ablation_text, find_ablations, make_runs, verdict
from esp_edge.bench.paper import Ablation
from esp_edge.bench.spec import Lane
from esp_edge.errors import ConfigError

PAPER = Ask()
BLOCKS = {
    "table1": [30, 30, 30, 30, 30, 60, 60, 60, 60, 60],
    "table2": [60] * 6 + [30] * 4,
    "table3": [60, 60, 64],
    "table4": [30, 30, 60, 60],
    "table5": [60] * 8,
    "lambda": [60] * 4,
    "pruning": [60] * 4,
    "temperature": [60] * 4,
    "bc120": [60, 120],
    "bc": [10, 30, 60, 60],
    "auto": [30] * 10 + [60] * 7 + [4, 10, 4, 10],
}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    return make_program(monkeypatch, capsys)


# -- the tables ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.key)
def test_every_table_has_the_papers_block_complexities(table: Ablation) -> None:
    lanes = [PAPER.lane(entry) for entry in table.entries]
    assert [lane.block_complexity for lane in lanes] == BLOCKS[table.key]
    for lane in lanes:
        if lane.draft.tree is not None:
            assert lane.draft.masks == len(lane.draft.tree)


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.key)
def test_every_pair_names_two_entries_of_its_table(table: Ablation) -> None:
    names = [entry.name for entry in table.entries]
    assert len(set(names)) == len(names)
    keys = [(*PAPER.lane(entry).key, entry.temperature) for entry in table.entries]
    assert len(set(keys)) == len(keys)
    for pair in table.pairs:
        assert table.entry(pair.left) != table.entry(pair.right)


def test_masks_are_the_papers_unless_told_otherwise() -> None:
    def inits(table: str, ask: Ask) -> list[str]:
        lanes = [ask.lane(entry) for entry in TABLES[table].entries]
        return [lane.draft.mask_init for lane in lanes if lane.draft.drafter == "esp"]

    assert set(inits("table2", PAPER)) == {"prompt-mean"}
    assert set(inits("table2", Ask("vocab-mean"))) == {"vocab-mean"}
    assert inits("table1", Ask("vocab-mean")) == ["vocab-mean", "auto"] * 2
    wanted = ["prompt-mean", "sample", "last-k", "sigma:5", "sigma:10", "vocab-mean", "composed", "auto"]
    assert inits("table5", PAPER) == inits("table5", Ask("vocab-mean")) == wanted
    with pytest.raises(ConfigError, match="mask-init must be one of"):
        inits("table2", Ask("nice"))


def test_settings_that_are_compared_differ_only_in_what_the_table_is_about() -> None:
    def drafts(table: str, name: str) -> list[Any]:
        return [getattr(PAPER.lane(entry).draft, name) for entry in TABLES[table].entries]

    assert drafts("table2", "tree")[:2] == [None, (15, 4)]
    assert drafts("table3", "masks") == [1, 2, 3]
    assert drafts("table4", "impl") == ["efficient", "naive"] * 2
    assert drafts("table5", "mask_update") == [None, 0.1, 0.1, 0.1, 0.1, None, None, None]
    assert drafts("lambda", "mask_update") == [0.01, 0.1, 0.5, 0.0]
    assert drafts("pruning", "prune") == [True, False] * 2
    assert drafts("bc120", "tree") == [(15, 4), (15, 10, 4)]


def test_tables_by_name() -> None:
    assert [table.key for table in find_ablations(["bc", "table3", "bc"])] == ["bc", "table3"]
    assert find_ablations(["table3", "all"]) == list(TABLES.values())
    with pytest.raises(ConfigError, match="'table9' was given"):
        find_ablations(["table9"])
    with pytest.raises(ConfigError, match="a table is needed"):
        find_ablations([])


# -- runs ------------------------------------------------------------------------------------------------------------


def labels(lanes: list[Lane]) -> list[str]:
    return [lane.label for lane in lanes]


def test_a_lane_that_tables_share_runs_once() -> None:
    runs = make_runs(find_ablations(["table3", "bc"]), PAPER)
    assert list(runs) == [(0.0, False)]
    trees = ["29", "15+4", "7+5+3", "4", "14"]
    assert labels(runs[0.0, False]) == ["none", *(f"esp[tree={tree},mask-init=prompt-mean]" for tree in trees)]


def test_temperatures_have_runs_of_their_own() -> None:
    runs = make_runs(find_ablations(["temperature", "bc120"]), Ask(temperature=0.5))
    assert {key: len(lanes) for key, lanes in runs.items()} == {(0.0, False): 3, (1.0, False): 3, (0.5, False): 3}


def test_exact_mode_leaves_out_tables_with_larger_passes() -> None:
    runs = make_runs(find_ablations(["table3", "bc120", "bc"]), Ask(exact=True))
    assert {exact: max(lane.block_complexity for lane in lanes) for (_, exact), lanes in runs.items()} == {
        False: 120,
        True: 60,
    }


# -- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "wanted"),
    [
        (1.2, (1.1, 1.05), "same direction"),
        (0.9, (0.95, None), "same direction"),
        (0.9, (None, 1.05), "opposite"),
        (1.2, (0.97, 0.98), "opposite"),
        (1.009, (1.2, 1.2), "within 1 %"),
        (1.2, (1.002, 0.999), "within 1 %"),
        (1.011, (1.0112, 1.0112), "same direction"),
        (1.2, (None, None), "paper gives no figure"),
        (None, (1.2, 1.2), "paper gives no figure"),
    ],
)
def test_verdict(ours: float | None, theirs: tuple[float | None, ...], wanted: str) -> None:
    assert verdict(ours, theirs) == wanted


def test_the_papers_own_findings() -> None:
    """One mask is best, the dynamic tree equals [15,4], the mean is the best mask, the efficient code is faster."""

    def ratios(table: str, left: str, right: str, metric: str = "tau") -> list[float | None]:
        entries = [TABLES[table].entry(name) for name in (left, right)]
        values = [[getattr(figure, metric) for figure in entry.figures] for entry in entries]
        return [a / b if a and b else None for a, b in zip(*values, strict=True)]

    assert verdict(1.05, ratios("table3", "1 mask, [29]", "2 masks, [15,4]")) == "same direction"
    assert verdict(1.05, ratios("table3", "2 masks, [15,4]", "3 masks, [7,5,3]")) == "same direction"
    assert verdict(1.05, ratios("table2", "dynamic, BC 60", "[15,4]")) == "within 1 %"
    assert verdict(1.05, ratios("table2", "dynamic, BC 30", "[7,2]")) == "within 1 %"
    assert verdict(1.05, ratios("table5", "prompt-mean", "sample")) == "same direction"
    assert verdict(0.95, ratios("table5", "prompt-mean", "last-k")) == "opposite"
    assert verdict(1.05, ratios("table4", "[15,4], efficient", "[15,4], naive", "speedup")) == "same direction"


def test_the_papers_models_agree_with_each_other() -> None:
    """The mean of two models that go different ways would be no direction."""
    for table in TABLES.values():
        for pair in table.pairs:
            entries = [table.entry(name) for name in (pair.left, pair.right)]
            both = zip(*(entry.figures for entry in entries), strict=True)
            values = [[getattr(figure, pair.metric, None) for figure in figures] for figures in both]
            signs = {math.copysign(1, a - b) for a, b in values if a and b and abs(a / b - 1) > 0.01}
            assert len(signs) <= 1, pair


# -- the command -----------------------------------------------------------------------------------------------------

LINES = (
    {"question_id": 1, "category": "qa", "turns": ["the rain in the rain"]},
    {"question_id": 2, "category": "rag", "turns": ["an owl and an owl"]},
)


def arguments(model: Path, folder: Path, *tables: str) -> list[str]:
    questions = folder / "q.jsonl"
    questions.write_text("".join(json.dumps(line) + "\n" for line in LINES), "utf-8")
    common = ["-m", str(model), "--questions", str(questions), "--out", str(folder / "out"), "-c", "256", "-t", "1"]
    return ["bench", "ablate", *tables, *common, "-n", "8"]


def one(rows: list[dict[str, Any]], **wanted: str) -> dict[str, Any]:
    return next(row for row in rows if all(row[name] == value for name, value in wanted.items()))


def test_a_table_from_end_to_end(program: Program, tiny: Callable[..., Path], tmp_path: Path) -> None:
    command = arguments(tiny("llama"), tmp_path, "table3")
    code, out, err = program(*command)
    assert code == 0, err
    assert "The paper's figures are for LLaMA-3.2-3B and LLaMA-3.1-8B on a data-centre GPU" in out
    document = json.loads((tmp_path / "out" / "ablate-table3.json").read_text("utf-8"))
    assert [row["block_complexity"] for row in document["rows"]] == [60, 60, 64]
    assert [row["identical"] + row["near_ties"] for row in document["rows"]] == [2, 2, 2]
    assert one(document["rows"], configuration="1 mask, [29]")["paper"] == {
        "LLaMA-3.2-3B": {"tau": 1.65, "speedup": None},
        "LLaMA-3.1-8B": {"tau": 1.73, "speedup": None},
    }
    taus = {row["configuration"]: row["tau"] for row in document["rows"]}
    for pair in document["pairs"]:
        assert pair["ratio"] == pytest.approx(taus[pair["left"]] / taus[pair["right"]], abs=1e-5)
        assert pair["verdict"] == verdict(pair["ratio"], list(pair["paper"].values()))
        assert pair["questions"]["of"] == 2
        assert pair["questions"]["for"] + pair["questions"]["against"] <= 2
    assert (tmp_path / "out" / "ablate-table3.md").read_text("utf-8").startswith("# Table 3")
    assert ablation_text(document) == out
    plots = sorted(path.name for path in (tmp_path / "out" / "plots").iterdir())
    assert plots == ["ablate-table3-llama.png", "ablate-table3-llama.svg"]

    records = tmp_path / "out" / "run-table3" / "results.jsonl"
    before = records.read_bytes()
    code, out, _ = program(*command, "--json", "--no-plots")  # everything is there already
    assert code == 0
    assert records.read_bytes() == before
    assert json.loads(out)["ablations"][0]["pairs"] == document["pairs"]


def test_exact_mode_and_two_temperatures(program: Program, tiny: Callable[..., Path], tmp_path: Path) -> None:
    command = arguments(tiny("llama"), tmp_path, "temperature", "bc120")
    code, out, err = program(*command, "--exact", "--no-plots", "--mask-init", "vocab-mean", "--json")
    assert code == 0, err
    temperature, bc120 = json.loads(out)["ablations"]
    runs = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    base = "run-temperature+bc120"
    assert runs == [base, f"{base}-default-mode", f"{base}-temp-1"]
    assert [(part["temperature"], part["exact"]) for part in temperature["settings"]] == [(0.0, True), (1.0, True)]
    assert [(part["temperature"], part["exact"]) for part in bc120["settings"]] == [(0.0, False)]
    assert all(row["identical"] == 2 for row in temperature["rows"])
    assert all(pair["questions"] is None for pair in temperature["pairs"])
    assert {pair["verdict"] for pair in temperature["pairs"]} == {"paper gives no figure"}
    assert any(note.startswith("NOT EXACT: exact mode allows passes of 60 rows") for note in bc120["notes"])
    assert any("a pass of 64 rows or more takes another attention kernel" in note for note in bc120["notes"])
    assert len(temperature["notes"]) == 2
    assert "T = 1, seed 1, exact mode" in (tmp_path / "out" / "ablate-temperature.md").read_text("utf-8")


def test_different_answers_are_an_alarm() -> None:
    document = {**EMPTY, "failures": 3}
    assert "**DIFFERENT OUTPUT: 3 answers are not plain decoding's.**" in ablation_text(document)
    assert "DIFFERENT" not in ablation_text(EMPTY)


EMPTY: dict[str, Any] = {
    "table": "bc",
    "title": "Block complexity",
    "notes": [],
    "machine": {"cpu": "c", "threads": 1, "date": "d", "n_gpu_layers": -1},
    "command": "",
    "settings": [],
    "failures": 0,
    "rows": [],
    "pairs": [],
}


@pytest.mark.parametrize(
    ("more", "why"),
    [(("table9",), "'table9' was given"), (("bc", "--mask-init", "nice"), "mask-init must be one of")],
)
def test_usage(program: Program, tiny: Callable[..., Path], tmp_path: Path, more: tuple[str, ...], why: str) -> None:
    table, *flags = more
    code, _, err = program(*arguments(tiny("llama"), tmp_path, table), *flags)
    assert code == 1
    assert why in one_error(err)
    assert not (tmp_path / "out").exists()


def test_help_lists_every_table(program: Program) -> None:
    code, out, _ = program("bench", "ablate", "-h")
    assert code == 0
    words = out.replace(",", " ").replace(".", " ").split()
    assert set(TABLES) | {"all"} <= set(words)
