"""Benchmarks: what is parsed and selected, the arithmetic, resuming after a kill, and the files that come out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Program, make_program, one_error

from esp_edge.bench import machine, plots, specbench
from esp_edge.bench.cost import cost_rows
from esp_edge.bench.identity import Parting, converse, explain, parting
from esp_edge.bench.machine import describe_run
from esp_edge.bench.questions import Question, load_questions, select
from esp_edge.bench.report import markdown_table, overview, report
from esp_edge.bench.results import Difference, Record, RunDirectory, Turn
from esp_edge.bench.run import ModelFile, Plan, open_run, run_all
from esp_edge.bench.spec import Lane, make_lanes, parse_drafters, parse_numbers
from esp_edge.bench.summary import ALL, complete_rounds, failures, skipped_questions, summary_rows
from esp_edge.config import DRAFTERS, DraftConfig, GenerationParams, ModelConfig
from esp_edge.errors import ConfigError, PromptError
from esp_edge.models import model as model_module
from esp_edge.models.cache import ModelCache
from esp_edge.models.device import remember_threads
from esp_edge.session import load

ROW_KEYS = [
    *["model", "quant", "drafter", "block_complexity", "category", "n_prompts", "n_tokens", "passes", "tau"],
    *["rows_per_pass", "tokens_per_second", "speedup", "speedup_min", "speedup_max", "identical", "near_ties"],
    *["host_ms_per_pass", "model_ms_per_pass"],
]
MACHINE_KEYS = {
    "cpu",
    "cores",
    "threads",
    "memory_bytes",
    "os",
    "llama_cpp_python",
    "esp_edge",
    "quant",
    "n_ctx",
    "date",
}
PLAIN_LANE, FAST_LANE = ("none", 1), ("fast", 8)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    return make_program(monkeypatch, capsys)


def write_questions(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return path


# -- --drafters ------------------------------------------------------------------------------------------------------


def test_drafters_with_and_without_options() -> None:
    specs = parse_drafters("esp[mask-init=prompt-mean, mask-update=0.1], none ,esp[tree=15+4,prune=off]")
    assert [spec.label for spec in specs] == [
        "esp[mask-init=prompt-mean,mask-update=0.1]",
        "none",
        "esp[tree=15+4,prune=off]",
    ]
    assert specs[0].options == {"drafter": "esp", "mask_init": "prompt-mean", "mask_update": 0.1}
    assert specs[2].options == {"drafter": "esp", "tree": (15, 4), "masks": 2, "prune": False}


def test_every_known_drafter_can_be_named() -> None:
    assert [spec.label for spec in parse_drafters(",".join(DRAFTERS))] == list(DRAFTERS)


def test_values_have_the_type_of_their_setting() -> None:
    options = parse_drafters("esp[seed=7,masks=2,impl=naive,mask-update=none,tree=dynamic,prune]")[0].options
    assert options == {
        **{"drafter": "esp", "seed": 7, "masks": 2, "impl": "naive"},
        **{"mask_update": None, "tree": None, "prune": True},
    }
    assert parse_drafters("esp[tree=[15,4]]")[0].options["tree"] == (15, 4)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "needs names"),
        ("magic", "known are auto, esp, none"),
        ("esp[mask-init", "brackets"),
        ("esp]", "brackets"),
        ("esp[a=b]x", "NAME"),
        ("esp[colour=red]", "known are block-complexity"),
        ("esp[drafter=none]", "no option"),
        ("esp[masks]", "masks=VALUE"),
        ("esp[masks=two]", "type int"),
        ("esp[mask-update=often]", "type float"),
        ("esp[prune=maybe]", "on or off"),
        ("esp[tree=wide]", "tree must be"),
    ],
)
def test_a_wrong_drafter_says_what_is_possible(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_drafters(text)


def test_lanes_are_plain_decoding_then_every_drafter_at_every_size() -> None:
    lanes = make_lanes(parse_drafters("esp,none,esp[block-complexity=7],esp[tree=3+2]"), [10, 30])
    assert [lane.key for lane in lanes] == [
        *[("none", 1), ("esp", 10), ("esp", 30)],
        *[("esp[block-complexity=7]", 7), ("esp[tree=3+2]", 18)],
    ]
    assert [lane.keep for lane in lanes] == [False] * 5
    assert make_lanes(parse_drafters("recycling[keep]"), [10])[1].keep
    with pytest.raises(ConfigError, match="block-complexity must be"):
        make_lanes(parse_drafters("esp"), [1000])


def test_numbers_and_ranges() -> None:
    assert parse_numbers("10, 30,60", "--rows") == [10, 30, 60]
    assert parse_numbers("1-4,16,3", "--rows") == [1, 2, 3, 4, 16]
    assert parse_numbers("0", "--threads", least=0) == [0]
    for wrong in ("", "0", "4-2", "ten", "1-", "-3", "1-9999999"):
        with pytest.raises(ConfigError, match="--rows must be whole numbers from 1 on"):
            parse_numbers(wrong, "--rows")


# -- questions -------------------------------------------------------------------------------------------------------


def question(question_id: Any = 1, category: Any = "qa", turns: Any = ("a",), **more: Any) -> dict[str, Any]:
    return {"question_id": question_id, "category": category, "turns": turns, **more}


def test_the_first_of_each_category(tmp_path: Path) -> None:
    lines = [question(i, category, ["one", "two"]) for i, category in enumerate(("a", "b", "a", "a", "b"))]
    questions = load_questions(
        write_questions(tmp_path / "q.jsonl", *lines, "", question("x", "c", ["1"], reference=[]))
    )
    assert [one.question_id for one in select(questions, 2)] == [0, 1, 2, 4, "x"]
    assert [one.question_id for one in select(questions, 1)] == [0, 1, "x"]
    assert len(select(questions)) == 6
    assert [one.turns for one in select(questions, 1)] == [("one",), ("one",), ("1",)]
    assert [one.turns for one in select(questions, 1, "all")] == [("one", "two"), ("one", "two"), ("1",)]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", ":2: "),
        ("[1]", ":2: a question must be a JSON object"),
        (question(True), ":2: question_id must be"),
        (question(2, ""), ":2: category must be"),
        (question(2, "all"), "other than 'all'"),
        (question(2, turns=[]), ":2: turns must be"),
        (question(2, turns=["a", ""]), ":2: turns must be"),
        (question(1), "was used in line 1"),
    ],
)
def test_a_broken_question_file_names_the_line(tmp_path: Path, line: Any, why: str) -> None:
    with pytest.raises(PromptError, match=why):
        load_questions(write_questions(tmp_path / "q.jsonl", question(1), line))


def test_adversarial_questions_are_built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    questions = load_questions(Path("adversarial"))
    assert questions == load_questions(Path("adversarial"))
    assert [question.question_id for question in questions] == list(range(1, 31))
    assert {question.category for question in questions} >= {"random words", "digits", "code", "scripts"}
    assert len({question.turns for question in questions}) == 30
    (tmp_path / "adversarial").write_text('{"question_id": 1, "category": "a", "turns": ["b"]}', "utf-8")
    assert len(load_questions(Path("adversarial"))) == 1


def test_a_missing_or_empty_question_file(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="cannot be read"):
        load_questions(tmp_path / "none.jsonl")
    with pytest.raises(PromptError, match="holds no question"):
        load_questions(write_questions(tmp_path / "q.jsonl", ""))


# -- arithmetic ------------------------------------------------------------------------------------------------------


def turn(tokens: int, passes: int, decode_ms: float, prefill_ms: float = 100.0, **more: Any) -> Turn:
    """An answer of 1 + ``tokens`` tokens; the first belongs to the prefill."""
    settings: dict[str, Any] = {
        **{"token_ids": tuple(range(tokens + 1)), "finish_reason": "length", "prompt_tokens": 10, "prefill_tokens": 1},
        **{"passes": passes, "rows": 4 * passes, "draft_tokens": 3 * passes, "accepted_tokens": tokens - passes},
        **{"committed_tokens": tokens, "prefill_ms": prefill_ms, "decode_ms": decode_ms, "model_ms": 0.75 * decode_ms},
    }
    return Turn(**settings, **more)


def record(lane: tuple[str, int], question_id: int, category: str, *turns: Turn, **more: Any) -> Record:
    settings: dict[str, Any] = {"model": "m", "quant": "Q8_0", "repeat": 0} | more
    return Record(
        question_id=question_id, category=category, drafter=lane[0], block_complexity=lane[1], turns=turns, **settings
    )


def by_unit(*items: Any) -> dict[Any, Any]:
    return {item.unit: item for item in items}


def difference(of: Record, kind: str, margin: float | None = 0.1) -> Difference:
    return Difference(
        **{"model": of.model, "repeat": of.repeat, "question_id": of.question_id, "category": of.category},
        **{"drafter": of.drafter, "block_complexity": of.block_complexity, "turn": 0, "position": 3},
        **{"expected": 3, "found": 5, "top2_margin": margin, "margin": margin, "kind": kind},
    )


def example() -> tuple[dict[Any, Record], dict[Any, Difference]]:
    """Plain decoding and a drafter on two questions, the first of two turns."""
    depth = {"accepted_by_depth": (20, 10), "drafted_by_depth": (40, 40)}
    fast = record(FAST_LANE, 1, "qa", turn(60, 40, 400.0, **depth), turn(40, 20, 200.0, accepted_by_depth=(15, 5, 1)))
    other = record(FAST_LANE, 2, "rag", turn(100, 90, 2000.0))
    plain = record(PLAIN_LANE, 1, "qa", turn(60, 60, 600.0), turn(40, 40, 400.0))
    slow = record(PLAIN_LANE, 2, "rag", turn(100, 100, 1000.0))
    return by_unit(fast, plain, other, slow), by_unit(difference(other, "near-tie"))


def row_of(rows: list[dict[str, Any]], drafter: str, category: str = "all") -> dict[str, Any]:
    return next(row for row in rows if (row["drafter"], row["category"]) == (drafter, category))


def test_summary_rows_pool_tokens_and_times() -> None:
    records, differences = example()
    rows = summary_rows(records, differences, [PLAIN_LANE, FAST_LANE])
    assert [(row["drafter"], row["category"]) for row in rows] == [
        (drafter, category) for drafter in ("none", "fast") for category in ("qa", "rag", "all")
    ]
    assert all(list(row)[: len(ROW_KEYS)] == ROW_KEYS for row in rows)
    total = row_of(rows, "fast")
    assert total["n_prompts"] == 2
    assert total["n_tokens"] == 203
    assert total["passes"] == 150
    assert total["tau"] == pytest.approx(200 / 150, abs=1e-6)
    assert total["rows_per_pass"] == 4
    assert total["tokens_per_second"] == pytest.approx(200 / 2.6, abs=1e-5)
    assert total["speedup"] == pytest.approx(2000 / 2600, abs=1e-6)
    assert total["host_ms_per_pass"] == pytest.approx(0.25 * 2600 / 150, abs=1e-6)
    assert total["model_ms_per_pass"] == pytest.approx(0.75 * 2600 / 150, abs=1e-6)
    assert (total["identical"], total["near_ties"]) == (1, 1)
    assert row_of(rows, "fast", "qa")["speedup"] == pytest.approx(1000 / 600, abs=1e-6)
    assert row_of(rows, "none")["speedup"] == 1
    assert total["accepted_by_depth"] == [35, 15, 1]


def test_the_other_conventions() -> None:
    records, differences = example()
    total = row_of(summary_rows(records, differences, [PLAIN_LANE, FAST_LANE]), "fast")
    # question 1: 102 tokens in 600 + 200 ms; question 2: 101 in 2000 + 100; plain: 102 in 1200, 101 in 1100
    fast, plain = (102 / 0.8 + 101 / 2.1) / 2, (102 / 1.2 + 101 / 1.1) / 2
    assert total["specbench_tokens_per_second"] == pytest.approx(fast, abs=1e-5)
    assert total["specbench_speedup"] == pytest.approx(fast / plain, abs=1e-6)
    assert total["specbench_speedup_decode"] == pytest.approx((100 / 0.6 + 100 / 2.0) / (2 * 100), abs=1e-6)
    assert total["speedup_end_to_end"] == pytest.approx((203 / 2.9) / (203 / 2.3), abs=1e-6)
    assert total["tau_mean_of_prompts"] == pytest.approx((100 / 60 + 100 / 90) / 2, abs=1e-6)


def test_repetitions_give_the_spread_and_must_all_agree() -> None:
    records = [record(PLAIN_LANE, 1, "qa", turn(10, 10, 100.0), repeat=repeat) for repeat in range(3)]
    fast = [
        record(FAST_LANE, 1, "qa", turn(10, 5, ms), repeat=repeat) for repeat, ms in enumerate((50.0, 100.0, 200.0))
    ]
    lanes = [PLAIN_LANE, FAST_LANE]
    total = row_of(summary_rows(by_unit(*records, *fast), {}, lanes), "fast")
    assert (total["speedup_min"], total["speedup_max"]) == (0.5, 2)
    assert total["speedup"] == pytest.approx(300 / 350, abs=1e-6)
    assert (total["n_prompts"], total["identical"], total["repeats"]) == (1, 1, 3)
    for kind, expected in (("near-tie", (0, 1)), ("different", (0, 0)), ("sampled", (0, 0))):
        rows = summary_rows(by_unit(*records, *fast), by_unit(difference(fast[1], kind)), lanes)
        found = row_of(rows, "fast")
        assert (found["identical"], found["near_ties"]) == expected


def test_only_rounds_that_every_lane_finished_count() -> None:
    records, _ = example()
    lanes = [PLAIN_LANE, FAST_LANE]
    half = {unit: one for unit, one in records.items() if unit[2:] != (2, *FAST_LANE)}
    assert {one.question_id for one in complete_rounds(half, lanes)} == {1}
    unit = ("m", 0, 2, *FAST_LANE)
    failed = {**records, unit: replace(records[unit], turns=(), error="too long")}
    assert {one.question_id for one in complete_rounds(failed, lanes)} == {1}
    assert skipped_questions(failed) == {2: "too long"}


def test_an_answer_of_one_token_has_no_rate() -> None:
    records = by_unit(
        record(PLAIN_LANE, 1, "qa", turn(0, 0, 0.0, accepted_by_depth=())), record(FAST_LANE, 1, "qa", turn(0, 0, 0.0))
    )
    total = row_of(summary_rows(records, {}, [PLAIN_LANE, FAST_LANE]), "fast")
    assert (total["tau"], total["speedup"], total["specbench_speedup_decode"], total["identical"]) == (0, 0, 0, 1)


def test_what_fails_a_run() -> None:
    records, _ = example()
    of = next(iter(records.values()))
    found = [difference(of, kind) for kind in ("near-tie", "sampled", "different")]
    assert [one.kind for one in failures(found, exact=False)] == ["different"]
    assert [one.kind for one in failures(found, exact=True)] == ["near-tie", "sampled", "different"]


# -- identity --------------------------------------------------------------------------------------------------------


def test_where_answers_part() -> None:
    def answer(*turns: tuple[int, ...]) -> Record:
        return record(FAST_LANE, 1, "qa", *(replace(turn(1, 1, 1.0), token_ids=ids) for ids in turns))

    assert parting(answer((1, 2), (3,)), answer((1, 2), (3,))) is None
    assert parting(answer((1, 2, 3)), answer((1, 5, 3))) == Parting(0, 1, 2, 5)
    assert parting(answer((1, 2), (3, 4)), answer((1, 2), (3, 9))) == Parting(1, 1, 4, 9)
    assert parting(answer((1, 2)), answer((1,))) == Parting(0, 1, 2, None)
    assert parting(answer((1,)), answer((1, 2))) == Parting(0, 1, None, 2)


def test_a_difference_is_judged_by_the_lag_of_the_token_that_was_found(tiny: Callable[..., Path]) -> None:
    params = GenerationParams(max_tokens=6)
    with (
        load(str(tiny("llama")), ModelConfig(n_ctx=256, n_threads=1)) as model,
        model.session(DraftConfig("none")) as plain,
    ):
        answer = converse(plain, ("hello there",), replace(params, logprobs=16))[0]
        found = record(FAST_LANE, 1, "qa", turn(5, 5, 1.0))
        for rank in (1, 9):
            top = answer.logprobs[4].top
            at = Parting(0, 4, answer.token_ids[4], top[rank][0])
            judged = explain(plain, ("hello there",), params, found, at)
            lag = top[0][1] - top[rank][1]
            assert judged.margin == pytest.approx(lag, abs=1e-5)
            assert judged.top2_margin == pytest.approx(top[0][1] - top[1][1], abs=1e-5)
            assert judged.kind == ("near-tie" if lag <= 0.25 else "different")
        unlikely = next(i for i in range(300) if i not in dict(answer.logprobs[4].top))
        for token in (unlikely, None):
            judged = explain(plain, ("hello there",), params, found, Parting(0, 4, answer.token_ids[4], token))
            assert (judged.margin, judged.kind) == (None, "different")
        drawn = explain(plain, ("hello there",), replace(params, temperature=1.0), found, at)
        assert (drawn.margin, drawn.kind) == (None, "sampled")


# -- the directory ---------------------------------------------------------------------------------------------------


def test_a_directory_of_another_run_is_refused_and_says_why(tmp_path: Path) -> None:
    machine = {"cpu": "A", "date": "today", "memory_bytes": 1}
    drafters = [{"label": "esp", "block_complexity": 10}]
    settings: dict[str, Any] = {"max_tokens": 100, "drafters": drafters}
    RunDirectory(tmp_path, settings, machine)
    again = RunDirectory(tmp_path, settings, {"cpu": "A", "date": "tomorrow", "memory_bytes": 2})
    assert again.machine == machine
    with pytest.raises(ConfigError, match="max_tokens was 100, now 50"):
        RunDirectory(tmp_path, {**settings, "max_tokens": 50}, machine)
    more = [*drafters, {"label": "pld", "block_complexity": 10}]
    with pytest.raises(ConfigError, match="drafters had nothing else, now pld at 10"):
        RunDirectory(tmp_path, {**settings, "drafters": more}, machine)
    with pytest.raises(ConfigError, match=r"machine.cpu was \"A\", now \"B\""):
        RunDirectory(tmp_path, settings, {**machine, "cpu": "B"})


def test_a_directory_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text("[]")
    with pytest.raises(ConfigError, match="not of a benchmark run"):
        RunDirectory(tmp_path / "a", {}, {})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "results.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"no run\.json"):
        RunDirectory(tmp_path / "b", {}, {})
    RunDirectory(tmp_path / "c", {}, {})
    (tmp_path / "c" / "results.jsonl").write_text('{"turns": []}\n')
    with pytest.raises(ConfigError, match=r"results\.jsonl:1 is no result"):
        RunDirectory(tmp_path / "c", {}, {})


def test_lines_come_back_and_a_torn_one_is_dropped(tmp_path: Path) -> None:
    records, differences = example()
    first = RunDirectory(tmp_path, {}, {})
    for one in records.values():
        first.add(one)
    for found in differences.values():
        first.add_difference(found)
    whole = (tmp_path / "results.jsonl").read_bytes()
    (tmp_path / "results.jsonl").write_bytes(whole + whole[:50])
    again = RunDirectory(tmp_path, {}, {})
    assert (again.records, again.differences) == (records, differences)
    assert (tmp_path / "results.jsonl").read_bytes() == whole


# -- a run -----------------------------------------------------------------------------------------------------------

QUESTIONS = (
    Question(1, "qa", ("the rain in the rain", "again")),
    Question(2, "rag", ("an owl and an owl",)),
    Question(3, "qa", ("the rain in the rain",)),
)


def a_plan(path: Path, lanes: str = "esp[mask-init=vocab-mean],recycling[keep]", **more: Any) -> Plan:
    settings: dict[str, Any] = {"params": GenerationParams(max_tokens=6), "repeat": 2} | more
    return Plan(
        models=[ModelFile.read(path)],
        config=ModelConfig(n_ctx=256, n_threads=1, exact=True),
        lanes=make_lanes(parse_drafters(lanes), [6]),
        questions=QUESTIONS,
        **settings,
    )


def untimed(results: RunDirectory) -> dict[Any, Record]:
    """Records without their times."""
    still = {"prefill_ms": 0.0, "decode_ms": 0.0, "model_ms": 0.0}
    return {
        unit: replace(one, turns=tuple(replace(answer, **still) for answer in one.turns))
        for unit, one in results.records.items()
    }


class KilledError(Exception):
    """Stands for a kill."""


def test_a_killed_run_goes_on_where_it_stopped(tiny: Callable[..., Path], tmp_path: Path) -> None:
    plan = a_plan(tiny("llama"), params=GenerationParams(max_tokens=12))
    wanted = RunDirectory(tmp_path / "whole", plan.settings(), {})
    run_all(plan, wanted)
    assert len(wanted.records) == plan.n_units == 2 * 3 * 3

    def kill_after(n: int) -> Callable[[int, int, str], None]:
        def progress(_done: int, _total: int, text: str) -> None:
            if "question" in text:
                left.append(text)
            if len(left) > n:
                raise KilledError

        left: list[str] = []
        return progress

    for n in (4, 4, 3):  # the second run starts with question 2, and question 3's kept tables must know question 1
        results = RunDirectory(tmp_path / "torn", plan.settings(), {})
        with pytest.raises(KilledError):
            run_all(plan, results, progress=kill_after(n))
        with (tmp_path / "torn" / "results.jsonl").open("a") as file:
            file.write('{"model": "to')
    results = RunDirectory(tmp_path / "torn", plan.settings(), {})
    assert len(results.records) == 11
    run_all(plan, results)
    assert untimed(results) == untimed(wanted)
    assert results.differences == wanted.differences == {}


def test_lanes_take_turns_and_a_finished_run_asks_nothing(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = a_plan(tiny("llama"), repeat=1)
    results = RunDirectory(tmp_path, plan.settings(), {})
    run_all(plan, results)
    order = [one.drafter for one in results.records.values()]
    assert [order[i] for i in (0, 3, 6)] == ["none", "esp[mask-init=vocab-mean]", "recycling[keep]"]
    assert all(set(order[i : i + 3]) == {lane.label for lane in plan.lanes} for i in (0, 3, 6))
    assert [len(one.turns) for one in results.records.values()] == [2] * 3 + [1] * 6
    monkeypatch.setattr("esp_edge.bench.run.converse", None)
    run_all(plan, RunDirectory(tmp_path, plan.settings(), {}))


def test_kept_tables_know_the_earlier_questions(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Question 3 repeats question 1: a table that was kept has seen its answer, a cold one has not."""
    plan = a_plan(tiny("llama"), "recycling,recycling[keep]", repeat=1, params=GenerationParams(max_tokens=12))
    results = RunDirectory(tmp_path, plan.settings(), {})
    run_all(plan, results)
    file = plan.models[0].name
    cold, kept = (results.records[file, 0, 3, label, 6].turns[0] for label in ("recycling", "recycling[keep]"))
    assert kept.token_ids == cold.token_ids
    assert kept.accepted_tokens > cold.accepted_tokens


def test_a_second_turn_sees_the_own_first_answer(tiny: Callable[..., Path]) -> None:
    params = GenerationParams(max_tokens=4)
    with (
        load(str(tiny("llama")), ModelConfig(n_ctx=256, n_threads=1)) as model,
        model.session(DraftConfig("none")) as plain,
    ):
        first, second = converse(plain, ("hello", "more"), params)
        conversation = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "more"},
        ]
        assert second.stats.prompt_tokens == len(model.encode_chat(conversation))
        assert second.stats.cached_tokens == 0


def test_a_question_that_does_not_fit_is_left_out_everywhere(tiny: Callable[..., Path], tmp_path: Path) -> None:
    long = Question(9, "rag", ("word " * 300,))
    plan = replace(a_plan(tiny("llama"), repeat=1), questions=[QUESTIONS[1], long])
    summary = specbench.measure(plan, tmp_path, plots=False, progress=lambda *_: None)
    assert summary["failures"] == 0
    assert list(summary["skipped"]) == ["9"]
    assert row_of(summary["rows"], "none")["n_prompts"] == 1
    assert "## Questions left out" in (tmp_path / "report.md").read_text("utf-8")
    alone = replace(plan, questions=[long])
    with pytest.raises(ConfigError, match="no question could be answered"):
        specbench.measure(alone, tmp_path / "alone", plots=False, progress=lambda *_: None)


def test_two_models_of_one_name_are_refused(tiny: Callable[..., Path]) -> None:
    plan = a_plan(tiny("llama"))
    with pytest.raises(ConfigError, match="given twice"):
        replace(plan, models=[*plan.models, *plan.models])


def test_exact_runs_are_prepared_for_every_model_before_the_first(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library reads the variable at its first product, so a second file's k-quants must be known by then."""
    monkeypatch.setenv("GGML_CPU_TILED_MM", "1")  # put back at the end
    monkeypatch.delenv("GGML_CPU_TILED_MM")
    monkeypatch.setattr(model_module.Context, "made", False)
    tiled = {tiny("llama"): set[str](), tiny("qwen2"): {"Q4_K"}}
    monkeypatch.setattr(model_module, "_tiled_types", lambda header: tiled[Path(header.path)])
    plan = replace(
        a_plan(tiny("llama"), repeat=1), models=[ModelFile.read(path) for path in tiled], questions=QUESTIONS[1:2]
    )
    summary = specbench.measure(plan, tmp_path, plots=False, progress=lambda *_: None)
    assert {row["model"] for row in summary["rows"]} == {"llama", "qwen2"}
    assert os.environ["GGML_CPU_TILED_MM"] == "0"


def test_the_machine_of_a_run_has_the_tuned_threads(tiny: Callable[..., Path], tmp_path: Path) -> None:
    plan = a_plan(tiny("llama"))
    plan = replace(plan, config=replace(plan.config, n_threads=0))
    cache = ModelCache(tiny("llama"))
    assert remember_threads(cache, 3)
    try:
        assert open_run(plan, tmp_path).machine["threads"] == 3
        with load(str(tiny("llama")), plan.config) as model:
            assert describe_run(model)["threads"] == 3
            assert describe_run(model, n_threads=2, n_ctx=64)["threads"] == 2
    finally:
        remember_threads(cache, 0)


@pytest.mark.parametrize(
    ("layers", "gpus", "told"),
    [(0, ("NVIDIA H200",), None), (-1, ("NVIDIA H200", "NVIDIA H200"), "NVIDIA H200, NVIDIA H200"), (3, (), "unknown")],
)
def test_the_machine_names_the_gpu_that_layers_go_to(
    monkeypatch: pytest.MonkeyPatch, layers: int, gpus: tuple[str, ...], told: str | None
) -> None:
    monkeypatch.setattr(machine, "gpu_names", lambda: gpus)
    monkeypatch.setattr(machine, "offloads", lambda config: config.n_gpu_layers != 0)  # as a build with a GPU
    found = machine.describe_machine(ModelConfig(n_gpu_layers=layers), quant="Q4_0", n_ctx=64, n_threads=2)
    assert found.get("gpu") == told
    assert found["n_gpu_layers"] == layers


# -- report and plots ------------------------------------------------------------------------------------------------


def a_summary(**more: Any) -> dict[str, Any]:
    records, differences = example()
    settings = {"exact": False, "temperature": 0.0, "max_tokens": 100, "repeat": 1, "questions": "2 questions (ab)"}
    cost = [
        {"rows": n, "context": 64, "threads": 2, "ms": 3.0 + n, "ms_min": 2.0 + n, "ms_max": 5.0 + n} for n in (1, 2, 4)
    ]
    return {
        "machine": {"cpu": "A", "memory_bytes": 2**31},
        "settings": settings,
        "command": "esp-edge bench specbench",
        "rows": summary_rows(records, differences, [PLAIN_LANE, FAST_LANE]),
        "cost": {"m": cost},
        "differences": [vars_of(one) for one in differences.values()],
        "failures": 0,
        "skipped": {},
        **more,
    }


def vars_of(one: Difference) -> Mapping[str, Any]:
    return {name: getattr(one, name) for name in Difference.__slots__}


def test_a_table_lines_up() -> None:
    assert markdown_table(["a", "bcd"], [["x", "1"], ["y|z", "10.5"]]).splitlines() == [
        "| a    |  bcd |",
        "| ---- | ---: |",
        "| x    |    1 |",
        "| y\\|z | 10.5 |",
    ]


def test_every_speedup_stands_beside_its_identity() -> None:
    text = report(a_summary(), {"m": ["plots/tau-m.png"]})
    main = next(line for line in text.splitlines() if line.startswith("| fast @ 8"))
    assert [cell.strip() for cell in main.strip("|").split("|")][:9] == [
        *["fast @ 8", "1.333", "4.0", "76.9", "0.77x", "0.77..0.77", "1/2", "1", "0"]
    ]
    assert "| 1.67x 1/1 | 0.50x 0/1 | 0.77x 1/2 |" in text
    assert "near-tie" in text
    assert "![tau-m.png](plots/tau-m.png)" in text
    assert "7.00 (1.75x)" in text
    assert "2.0 GiB" in text
    assert "DIFFERENT" not in text


def test_a_difference_is_told_first() -> None:
    summary = a_summary(failures=2)
    assert "DIFFERENT OUTPUT: 2 answers" in report(summary, {}).splitlines()[2]
    assert overview(summary).startswith("**DIFFERENT OUTPUT")


def test_plots_are_written_as_png_and_svg(tmp_path: Path) -> None:
    summary = a_summary()
    names = [*plots.plot_summary(summary["rows"], tmp_path, "m"), plots.plot_cost(summary["cost"]["m"], tmp_path, "m")]
    kinds = ("tau", "speedup", "tau-by-category", "speedup-by-category", "acceptance", "cost")
    assert names == [f"{kind}-m.png" for kind in kinds]
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / name.replace(".png", ".svg")).read_text("utf-8")


@pytest.mark.filterwarnings("error")
def test_plots_have_room_for_long_names(tmp_path: Path) -> None:
    long = "esp[mask-init=prompt-mean,mask-update=0.1,tree=15+4,prune=off,impl=naive]"
    rows = [row for row in a_summary()["rows"] if row["category"] in ("qa", ALL)]
    rows = [{**row, "drafter": long} if row["drafter"] == "fast" else row for row in rows]
    assert len(plots.plot_summary(rows, tmp_path, "m")) == 5


def test_nothing_but_plain_decoding_has_nothing_to_plot(tmp_path: Path) -> None:
    rows = [row for row in a_summary()["rows"] if row["drafter"] == "none"]
    assert plots.plot_summary(rows, tmp_path, "m") == []


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install \"esp-edge\[bench\]\""):
        plots.require_matplotlib()


# -- cost ------------------------------------------------------------------------------------------------------------


def test_cost_measures_every_combination(tiny: Callable[..., Path]) -> None:
    seen = []
    with load(str(tiny("llama")), ModelConfig(n_ctx=128, n_threads=1)) as model:
        rows = cost_rows(model, [1, 3, 8], [0, 40], [1, 2], repeat=3, progress=lambda *state: seen.append(state))
        assert model.config.n_threads == 1
        assert not list(model.contexts)
    assert {(row["rows"], row["context"], row["threads"]) for row in rows} == {
        (n, context, threads) for n in (1, 3, 8) for context in (0, 40) for threads in (1, 2)
    }
    assert all(0 < row["ms_min"] <= row["ms"] <= row["ms_max"] for row in rows)
    assert seen[-1] == (36, 36)


def test_cost_refuses_what_does_not_fit(tiny: Callable[..., Path]) -> None:
    with load(str(tiny("llama")), ModelConfig(n_ctx=128, n_threads=1, exact=True)) as model:
        with pytest.raises(ConfigError, match="--rows asks for 64"):
            cost_rows(model, [1, 64], [0])
        with pytest.raises(ConfigError, match="lower --contexts"):
            cost_rows(model, [1, 8], [510])


# -- the commands ----------------------------------------------------------------------------------------------------


def test_help(program: Program) -> None:
    for argv, word in (
        (("bench",), "specbench"),
        (("bench", "specbench", "-h"), "--per-category"),
        (("bench", "cost", "-h"), "--rows"),
    ):
        code, out, err = program(*argv)
        assert (code, err) == (0, "")
        assert word in out


def test_cost_command(program: Program, tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = str(tiny("llama"))
    code, out, _ = program(
        "bench", "cost", "-m", path, "--rows", "1-3", "--contexts", "16,32", "-t", "1", "--repeat", "2"
    )
    assert code == 0
    assert out.splitlines()[0].split("|")[1:4] == [" rows ", " context 16, 1 thread ", " context 32, 1 thread "]
    assert len(out.splitlines()) == 5
    arguments = ("--rows", "1,2", "--contexts", "16", "-t", "1", "--repeat", "1", "--json", "--out", str(tmp_path))
    code, out, _ = program("bench", "cost", "-m", path, *arguments)
    document = json.loads(out)
    assert code == 0
    assert set(document) == {"machine", "rows"}
    assert set(document["machine"]) >= MACHINE_KEYS
    assert [set(row) for row in document["rows"]] == [{"rows", "context", "threads", "ms", "ms_min", "ms_max"}] * 2
    assert json.loads((tmp_path / "cost.json").read_text("utf-8")) == document
    assert (tmp_path / "cost-llama.png").stat().st_size > 0
    assert (tmp_path / "cost-llama.svg").stat().st_size > 0


def specbench_arguments(model: Path, tmp_path: Path, *more: str) -> list[str]:
    questions = write_questions(
        tmp_path / "q.jsonl", question(1, "qa", ["the rain"]), question(2, "rag", ["an owl", "more"])
    )
    base = ["bench", "specbench", "-m", str(model), "--questions", str(questions), "--out", str(tmp_path / "out")]
    return [*base, "-c", "256", "-t", "1", "-n", "5", "--block-complexity", "4,6", *more]


def test_specbench_command(program: Program, tiny: Callable[..., Path], tmp_path: Path) -> None:
    arguments = specbench_arguments(tiny("llama"), tmp_path, "--drafters", "esp[mask-init=vocab-mean]", "--exact")
    code, out, err = program(*arguments, "--json", "--turns", "all", "--repeat", "2")
    assert code == 0, err
    summary = json.loads(out)
    folder = tmp_path / "out"
    assert json.loads((folder / "summary.json").read_text("utf-8")) == summary
    assert set(summary["machine"]) >= MACHINE_KEYS
    assert [(row["drafter"], row["block_complexity"]) for row in summary["rows"] if row["category"] == "all"] == [
        *[("none", 1), ("esp[mask-init=vocab-mean]", 4), ("esp[mask-init=vocab-mean]", 6), ("none[stock]", 1)]
    ]
    for row in summary["rows"]:
        assert list(row)[: len(ROW_KEYS)] == ROW_KEYS
        assert row["identical"] == row["n_prompts"] or row["drafter"] == "none[stock]"
        assert row["speedup_stock"] > 0
    assert len((folder / "results.jsonl").read_text("utf-8").splitlines()) == 2 * 4 * 2
    assert "# Benchmark" in (folder / "report.md").read_text("utf-8")
    assert len(list((folder / "plots").glob("*.png"))) == len(list((folder / "plots").glob("*.svg"))) == 6
    code, _, err = program(*arguments, "--turns", "first", "--repeat", "2")
    assert code == 1
    assert "was made with other settings: questions" in one_error(err)


def test_specbench_exits_with_1_when_an_answer_differs(
    program: Program, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record whose tokens were tampered with stands for a drafter that is wrong."""
    made = Turn.from_stats
    calls = []

    def wrong(ids: Any, reason: str, stats: Any) -> Turn:
        calls.append(stats.drafter)
        return made(
            [*ids[:-1], ids[-1] + 1] if calls.count("esp") == 1 and stats.drafter == "esp" else ids, reason, stats
        )

    monkeypatch.setattr(Turn, "from_stats", wrong)
    arguments = specbench_arguments(tiny("llama"), tmp_path, "--drafters", "esp[mask-init=vocab-mean]", "--exact")
    code, out, err = program(*arguments, "--no-plots")
    assert code == 1
    assert "**DIFFERENT OUTPUT: 1 answers" in out
    assert "differences.jsonl" in err
    found = json.loads((tmp_path / "out" / "differences.jsonl").read_text("utf-8"))
    assert (found["turn"], found["position"], found["found"] - found["expected"]) == (0, 4, 1)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--drafters", "magic"), "known are auto, esp"),
        (("--block-complexity", "many"), "--block-complexity must be"),
        (("--turns", "second"), "first or all"),
        (("--questions", "missing.jsonl"), "cannot be read"),
    ],
)
def test_specbench_usage(
    program: Program, tiny: Callable[..., Path], tmp_path: Path, arguments: tuple[str, ...], why: str
) -> None:
    code, _, err = program(*specbench_arguments(tiny("llama"), tmp_path), *arguments)
    assert code in (1, 2)
    assert why in one_error(err)
    assert not (tmp_path / "out").exists()


@pytest.mark.model
def test_specbench_on_the_bundled_model(program: Program, model_path: Path, tmp_path: Path) -> None:
    drafters = ("--drafters", "esp[mask-init=vocab-mean]", "--block-complexity", "6")
    code, out, err = program(*specbench_arguments(model_path, tmp_path, *drafters, "-n", "8", "--exact"))
    assert code == 0, err
    line = next(line for line in out.splitlines() if line.startswith("| esp[mask-init=vocab-mean] @ 6"))
    assert "| 2/2 |" in " ".join(line.split())


def test_lanes_know_their_settings() -> None:
    lane = Lane("esp", DraftConfig("esp", block_complexity=12))
    assert lane.settings["label"] == "esp"
    assert lane.settings["block_complexity"] == lane.block_complexity == 12
