"""Recorded answers and replays along them: the same counters as live sessions, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_fakes import Program, make_program, one_error

from esp_edge.bench import trace as trace_module
from esp_edge.bench.identity import converse
from esp_edge.bench.questions import Question, load_questions
from esp_edge.bench.replay import RecordedOutputs, Replayed, replay, replay_lanes
from esp_edge.bench.replay_report import overview, replay_document
from esp_edge.bench.results import Turn
from esp_edge.bench.run import ModelFile
from esp_edge.bench.spec import Lane, make_lanes, parse_drafters
from esp_edge.bench.trace import TracePlan, record_trace
from esp_edge.bench.trace_file import Recording, Trace, is_frozen, mask_label
from esp_edge.config import DraftConfig, GenerationParams, ModelConfig
from esp_edge.drafters.base import Budget
from esp_edge.drafters.esp import EspDrafter
from esp_edge.drafters.fused import FusedDrafter
from esp_edge.drafters.suffix import SuffixDrafter
from esp_edge.errors import ConfigError
from esp_edge.masks import make_masks
from esp_edge.planner.curve import CostCurve
from esp_edge.planner.plan import Planner
from esp_edge.session import Model, load
from esp_edge.step import Outputs, Step
from esp_edge.tree import DraftTree, Verdict

QUESTIONS = (
    Question(1, "qa", ("the rain in the rain in the", "and again")),
    Question("b", "rag", ("an owl and an owl and an owl",)),
    Question(3, "qa", ("a letter",)),
)
EXACT = ModelConfig(n_ctx=256, n_threads=1, exact=True)
ESP = "esp[mask-init=vocab-mean],esp[mask-init=prompt-mean],esp[mask-init=prompt-mean,masks=2],esp[mask-init=sample]"
RIVALS = "pld,suffix,stand,stand[keep=on]"


def a_plan(path: Path, **more: Any) -> TracePlan:
    settings: dict[str, Any] = {
        **{"config": EXACT, "questions": QUESTIONS, "params": GenerationParams(max_tokens=30, seed=1)},
        **{"mask_inits": ("vocab-mean", "prompt-mean", "sample")},
    }
    return TracePlan(ModelFile.read(path), **(settings | more))


def lanes_of(text: str, *blocks: int) -> list[Lane]:
    return [lane for lane in make_lanes(parse_drafters(text), blocks) if lane.label != "none"]


@pytest.fixture(scope="module")
def trace(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return record_trace(a_plan(tiny("llama")), tmp_path_factory.mktemp("trace"))


def counters(turn: Turn) -> tuple[Any, ...]:
    """Everything that does not depend on time."""
    return (
        *(turn.token_ids, turn.finish_reason, turn.prompt_tokens, turn.prefill_tokens, turn.passes, turn.rows),
        *(turn.draft_tokens, turn.accepted_tokens, turn.committed_tokens),
        *(turn.accepted_by_depth, turn.drafted_by_depth),
    )


def live(model: Model, plan: TracePlan, lane: Lane) -> list[tuple[Any, ...]]:
    """Counters of all answers of sessions that are alike but for what the lane keeps."""
    found, session = [], model.session(lane.draft)
    for question in plan.questions:
        if not lane.keep:
            session.close()
            session = model.session(lane.draft)
        answers = converse(session, question.turns, plan.params)
        found += [counters(Turn.from_stats(one.token_ids, one.finish_reason, one.stats)) for one in answers]
    session.close()
    return found


def replayed_counters(one: Replayed) -> list[tuple[Any, ...]]:
    return [counters(turn) for record in one.records.values() for turn in record.turns]


def agree(plan: TracePlan, trace: Trace, lanes: Sequence[Lane]) -> list[Replayed]:
    """Replay and run live; every counter of every answer is the same."""
    replayed = replay_lanes(trace, lanes)
    with load(str(plan.file.path), plan.config) as model:
        for lane, one in zip(lanes, replayed, strict=True):
            assert replayed_counters(one) == live(model, plan, lane), lane.key
    return replayed


# -- the same as live ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [lanes_of(ESP, 10, 30), lanes_of(RIVALS, 30, 60)], ids=["esp", "rivals"])
def test_a_replay_counts_what_a_live_session_counts(trace: Trace, tiny: Callable[..., Path], lanes: list[Lane]) -> None:
    replayed = agree(a_plan(tiny("llama")), trace, lanes)
    assert all(one.total["exact"] and one.total["note"] is None for one in replayed)
    assert any(one.tau > 1 for one in replayed), "nothing was ever accepted: the test shows nothing"


def test_a_sampled_trace_follows_the_drawn_tokens(tiny: Callable[..., Path], tmp_path: Path) -> None:
    params = GenerationParams(max_tokens=30, temperature=0.7, seed=5)
    plan = a_plan(tiny("llama"), params=params, questions=QUESTIONS[:2], mask_inits=("prompt-mean@0.3", "vocab-mean"))
    trace = record_trace(plan, tmp_path)
    assert trace.settings.mask_inits == ("prompt-mean@0.3", "vocab-mean")
    agree(plan, trace, lanes_of("esp[mask-init=prompt-mean,mask-update=0.3],stand,pld", 30))


def test_an_answer_that_fills_the_context(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = replace(EXACT, n_ctx=64)
    plan = a_plan(tiny("llama"), config=config, params=GenerationParams(max_tokens=200, seed=1))
    trace = record_trace(plan, tmp_path)
    answered = [recording for recording in trace if recording.error is None]
    assert all(len(one.prompt_ids) + len(one.token_ids) == 64 for one in answered if one.finish_reason == "length")
    agree(replace(plan, questions=QUESTIONS[2:]), _only(trace, 3), lanes_of("esp[mask-init=vocab-mean],stand", 30, 60))


def _only(trace: Trace, question_id: int) -> Trace:
    found = Trace(trace.path)
    pairs = zip(trace.files, trace, strict=True)
    found.files = [file for file, recording in pairs if recording.question_id == question_id]
    return found


@pytest.mark.model
def test_the_bundled_model_replays_as_it_runs(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what auto stands for takes seconds to measure and is not the point here
    monkeypatch.setattr(trace_module, "resolve_mask_init", lambda _, config: replace(config, mask_init="vocab-mean"))
    texts = ("Name three colours.", "Repeat after me: the rain in Spain, the rain in Spain.", "Why is the sky blue?")
    questions = [Question(number, "qa", (text,)) for number, text in enumerate(texts)]
    plan = a_plan(
        model_path,
        config=ModelConfig(n_ctx=512, exact=True),
        questions=questions,
        params=GenerationParams(max_tokens=8, seed=1),
        mask_inits=("vocab-mean", "prompt-mean"),
    )
    trace = record_trace(plan, tmp_path)
    lanes = lanes_of("esp[mask-init=vocab-mean],esp[mask-init=prompt-mean]", 10, 30) + lanes_of("pld,suffix,stand", 30)
    replayed = agree(plan, trace, lanes)
    assert replayed[1].tau > 1


# -- what is recorded ------------------------------------------------------------------------------------------------


def test_every_row_is_what_a_plain_pass_says(trace: Trace, tiny: Callable[..., Path]) -> None:
    recording = next(iter(trace))
    top = trace.settings.top
    text = [*recording.prompt_ids, *recording.token_ids]
    n_prompt = len(recording.prompt_ids)
    assert recording.prompt.ids.shape == (n_prompt - 1, top)
    assert recording.roots.ids.shape == (len(recording.token_ids), top)
    assert recording.roots.ids[:, 0].tolist() == list(recording.token_ids)
    with load(str(tiny("llama")), EXACT) as model:
        context = model.new_context(1)
        step = Step(context)
        for at, row in ((3, 3), (n_prompt - 2, n_prompt - 2), (n_prompt + 5, 6)):
            step.reset()
            step.prefill(text[:at])
            ids, log_probs = step.run(DraftTree.root_only(text[at])).top_k(np.array([0], np.int32), top)
            rows = recording.prompt if at < n_prompt - 1 else recording.roots
            np.testing.assert_allclose(rows.log_probs[row], log_probs[0], atol=1e-4)
            assert rows.ids[row, 0] == ids[0, 0]
        context.close()


def test_mask_rows_are_those_of_the_vectors(trace: Trace, tiny: Callable[..., Path]) -> None:
    """Chains in one pass do not see each other: alone each says the same."""
    recording = next(iter(trace))
    text = [*recording.prompt_ids, *recording.token_ids]
    n_prompt, position = len(recording.prompt_ids), 7
    with load(str(tiny("llama")), EXACT) as model:
        assert model.embeddings is not None
        context = model.new_context(4)
        step = Step(context)
        for label, rows in recording.masks.items():
            masks = make_masks(label, 2, model.embeddings)
            masks.begin(text[:n_prompt])
            masks.commit(text[n_prompt : n_prompt + position])
            step.reset()
            step.prefill(text[: n_prompt + position - 1])
            tree = DraftTree.root_only(text[n_prompt + position - 1], 2, masks.vectors())
            ids, log_probs = step.run(tree).top_k(tree.mask_rows(0), trace.settings.top)
            place, lag = rows.find(position, 0)
            assert lag == 0
            np.testing.assert_allclose(rows.log_probs[place], log_probs, atol=1e-3)
            assert rows.ids[place, :, 0].tolist() == ids[:, 0].tolist()
        context.close()
    assert set(recording.masks["vocab-mean"].lags.tolist()) == {0}
    assert max(recording.masks["prompt-mean"].lags.tolist()) >= 1


def test_names_of_mask_vectors() -> None:
    assert mask_label("prompt-mean", None) == mask_label("prompt-mean", 0.1) == "prompt-mean"
    assert mask_label("last-k", 0.1) == "last-k@0.1"
    assert is_frozen("vocab-mean")
    assert is_frozen("prompt-mean@0")
    assert not is_frozen("prompt-mean")
    assert not is_frozen("last-k@0.1")
    assert not is_frozen("composed")


def test_a_question_that_does_not_fit_is_left_out(tiny: Callable[..., Path], tmp_path: Path) -> None:
    questions = (*QUESTIONS[2:], Question(9, "qa", ("long " * 200, "more")))
    trace = record_trace(a_plan(tiny("llama"), questions=questions), tmp_path)
    assert [recording.error is None for recording in trace] == [True, False, False]
    document = replay_document(trace, replay_lanes(trace, lanes_of("pld", 10)))
    assert list(document["skipped"]) == ["9"]
    assert "context" in document["skipped"]["9"]
    assert [row["n_prompts"] for row in document["rows"]] == [1, 1]


# -- the directory ---------------------------------------------------------------------------------------------------


def same_recording(mine: Recording, theirs: Recording) -> bool:
    arrays = [
        (getattr(a, name), getattr(b, name))
        for a, b in ((mine.roots, theirs.roots), (mine.prompt, theirs.prompt))
        for name in ("ids", "log_probs")
    ]
    for label, rows in mine.masks.items():
        arrays += [
            (getattr(rows, name), getattr(theirs.masks[label], name))
            for name in ("positions", "lags", "ids", "log_probs")
        ]
    return mine.token_ids == theirs.token_ids and all(np.array_equal(a, b) for a, b in arrays)


def test_a_stopped_recording_goes_on(trace: Trace, tiny: Callable[..., Path], tmp_path: Path) -> None:
    class KilledError(Exception):
        pass

    def stop(done: int, _total: int, _text: str) -> None:
        if done:
            raise KilledError

    with pytest.raises(KilledError):
        record_trace(a_plan(tiny("llama")), tmp_path, progress=stop)
    assert len(Trace(tmp_path)) == 2  # the first question has two turns
    partial = replay_document(Trace(tmp_path), replay_lanes(Trace(tmp_path), lanes_of("pld", 10)))
    assert "2 of 4 answers" in overview(partial)
    again = record_trace(a_plan(tiny("llama")), tmp_path)
    assert [file.name for file in again.files] == [file.name for file in trace.files]
    assert all(same_recording(mine, theirs) for mine, theirs in zip(again, trace, strict=True))


def test_other_settings_are_refused(trace: Trace, tiny: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="masks was 2, now 1"):
        record_trace(a_plan(tiny("llama"), masks=1), trace.path)
    with pytest.raises(ConfigError, match="mask_inits had"):
        record_trace(a_plan(tiny("llama"), mask_inits=("vocab-mean",)), trace.path)


def test_settings_that_cannot_be_recorded(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama")
    for more, why in (({"masks": 4}, "1, 2 or 3"), ({"top": 0}, "at least 1"), ({"masks": 3}, "fewer mask-inits")):
        with pytest.raises(ConfigError, match=why):
            a_plan(path, mask_inits=("vocab-mean",) * 6, **more)
    with pytest.raises(ConfigError, match="nonsense"):
        record_trace(a_plan(path, mask_inits=("nonsense",)), tmp_path)


def test_a_damaged_file_is_one_line(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes((trace.path / "run.json").read_bytes())
    whole = trace.files[0].read_bytes()
    spoiled = whole[:2000] + bytes(200) + whole[2200:]
    for content in (b"", b"no archive", whole[: len(whole) // 2], spoiled):
        (tmp_path / "00000-0.npz").write_bytes(content)
        with pytest.raises(ConfigError, match=r"00000-0\.npz is no whole answer of a trace: delete it") as failed:
            list(Trace(tmp_path))
        assert "\n" not in str(failed.value)


def test_a_directory_that_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no run\.json"):
        Trace(tmp_path)
    for content in ("[", "{}", '{"settings": {"mask_inits": []}}'):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(ConfigError, match="not of bench trace"):
            Trace(tmp_path)


# -- what cannot be replayed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "why"),
    [
        ("lade", "lookahead window"),
        ("draft-model[draft-model=x.gguf]", "second model"),
        ("auto", r"give --cost FILE .* or auto\[cost=flat\]"),
        (
            "esp[mask-init=vocab-mean,masks=3]",
            "needs 3 masks of vocab-mean, but the trace has 2 masks of vocab-mean, .*--masks 3",
        ),
        ("esp[mask-init=last-k]", "needs 1 masks of last-k, .*--mask-init vocab-mean,prompt-mean,sample,last-k"),
        ("esp[mask-init=prompt-mean,mask-update=0.5]", "prompt-mean@0.5"),
        ("esp[mask-init=sample,seed=3]", "seed 3"),
        ("esp[mask-init=vocab-mean,block-complexity=100]", "exact mode, which allows 60"),
    ],
)
def test_what_was_not_recorded_is_named(trace: Trace, drafter: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        replay_lanes(trace, lanes_of(drafter, 10))


def test_auto_is_what_the_model_was_measured_to_like(trace: Trace) -> None:
    recorded = Trace(trace.path)
    recorded.settings = replace(trace.settings, auto="prompt-mean")
    auto, named = replay_lanes(recorded, lanes_of("esp,esp[mask-init=prompt-mean]", 30))
    assert replayed_counters(auto) == replayed_counters(named)
    recorded.settings = replace(trace.settings, auto=None, mask_inits=())
    with pytest.raises(ConfigError, match="cannot be probed"):
        replay_lanes(recorded, lanes_of("esp", 30))


def test_drafters_that_learn_from_rejected_rows_say_so(trace: Trace) -> None:
    for one in replay_lanes(trace, lanes_of("recycling,racer,auto[cost=flat]", 10)):
        assert one.tau > 1
        assert one.total["exact"] is False
        assert "rejected drafts" in one.total["note"]


# -- drafters of one's own -------------------------------------------------------------------------------------------


class Listener(SuffixDrafter):
    """Suffix drafting that notes what it is shown.

    Attributes:
        prompts: arguments of ``learn_prompt``.
        seen: (path tokens, best token of each of its rows, committed tokens) of every pass.
    """

    def __init__(self) -> None:
        super().__init__(DraftConfig("suffix", block_complexity=20))
        self.prompts: list[tuple[Any, ...]] = []
        self.seen: list[tuple[list[int], list[int], list[int]]] = []

    def learn_prompt(self, *rows: Any) -> None:
        self.prompts.append(rows)

    def observe(self, tree: DraftTree, outputs: Outputs, verdict: Verdict) -> None:
        best = [outputs.argmax(row) for row in range(tree.n_nodes)]
        self.seen.append((tree.token_ids[1:].tolist(), best, list(verdict.token_ids)))
        super().observe(tree, outputs, verdict)


def test_a_drafter_of_ones_own_sees_the_path_and_the_prompt(trace: Trace) -> None:
    recordings, listener = list(trace), Listener()
    mine = replay(recordings, listener, sequences=1, label="mine", block_complexity=20)
    assert replayed_counters(mine) == replayed_counters(replay_lanes(trace, lanes_of("suffix", 20))[0])
    assert (mine.total["drafter"], mine.total["exact"]) == ("mine", True)
    assert [len(ids) for ids, *_ in listener.prompts] == [len(one.prompt_ids) - 1 for one in recordings]
    assert all(rows.shape == (len(ids), trace.settings.top) for ids, rows, _ in listener.prompts)
    for path, best, committed in listener.seen:
        assert path == committed[:-1]
        assert best == committed  # greedy


def test_a_planner_sizes_the_trees_and_the_prompt_may_be_left_out(trace: Trace) -> None:
    steep = CostCurve({0: {1: 1.0, 60: 60.0}})  # every row costs a whole pass: nothing can pay
    found = {}
    for name, curve in (("flat", CostCurve.flat()), ("steep", steep)):
        drafter = FusedDrafter(DraftConfig("auto"), trace.settings.n_vocab, None)
        planner = Planner(curve, refine=False)
        found[name] = replay(
            trace, drafter, block_complexity=60, exact=False, planner=planner, teach_prompt=name == "flat"
        ).total
    assert found["flat"]["rows_per_pass"] > 2 * found["steep"]["rows_per_pass"]
    assert found["flat"]["tau"] > 1
    listener = Listener()
    replay(trace, listener, teach_prompt=False)
    assert not listener.prompts


def test_masks_of_a_drafter_of_ones_own_must_be_recorded(trace: Trace, tiny: Callable[..., Path]) -> None:
    with load(str(tiny("llama")), EXACT) as model:
        assert model.embeddings is not None
        drafter = EspDrafter(DraftConfig("esp", mask_init="vocab-mean"), make_masks("vocab-mean", 1, model.embeddings))
        assert replay(trace, drafter, masks="vocab-mean").tau >= 1
        with pytest.raises(ConfigError, match="1 masks of None, but the trace has 2 masks of vocab-mean"):
            replay(trace, drafter)


class Prober:
    """Drafts what comes next in the recorded answer, ``depth`` tokens deep, with a mask behind each."""

    name = "prober"

    def __init__(self, text: Sequence[int], depth: int) -> None:
        self._text = list(text)
        self._depth = depth

    def begin(self, token_ids: Sequence[int]) -> None:
        self._at = 0
        self._root = int(token_ids[-1])

    def probe(self) -> DraftTree:
        return self._chain([])

    def draft(self, budget: Budget) -> DraftTree:
        return self._chain(self._text[self._at : self._at + min(self._depth, budget.depth)])

    def observe(self, tree: DraftTree, outputs: Outputs, verdict: Verdict) -> None:
        assert outputs.top_k(tree.mask_rows(verdict.anchor), 100)[0].shape == (1, 100)
        self._at += len(verdict.token_ids)
        self._root = verdict.bonus_token

    def _chain(self, tokens: list[int]) -> DraftTree:
        n = len(tokens) + 1
        return DraftTree.from_lists([self._root, *tokens], range(-1, n - 1), masks=[1] * n)


def test_deep_anchors_take_the_nearest_vectors_and_say_so(trace: Trace) -> None:
    recording = next(iter(trace))
    frozen, updated = (
        replay([recording], Prober(recording.token_ids, 5), masks=masks) for masks in ("vocab-mean", "prompt-mean")
    )
    assert frozen.tau == updated.tau > 5
    assert "larger --top" in frozen.total["note"]
    assert "some tokens" not in frozen.total["note"]
    assert "some tokens" in updated.total["note"]
    assert not updated.total["exact"]


def test_candidates_beyond_the_recorded_ones() -> None:
    outputs = RecordedOutputs(np.array([[5, 3]], np.int32), np.array([[-0.5, -1.0]], np.float32))
    assert outputs.argmax(0) == 5
    assert outputs.logprob(0, 3) == -1
    assert outputs.logprob(0, 4) == float("-inf")
    ids, log_probs = outputs.top_k(np.array([0, 0], np.int32), 2)
    assert ids.tolist() == [[5, 3], [5, 3]]
    assert not outputs.padded
    ids, log_probs = outputs.top_k(np.array([0], np.int32), 4)
    assert ids.tolist() == [[5, 3, -1, -2]]
    assert log_probs.tolist() == [[-0.5, -1.0, float("-inf"), float("-inf")]]
    assert outputs.padded


# -- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    return make_program(monkeypatch, capsys)


def test_the_commands(program: Program, tiny: Callable[..., Path], tmp_path: Path) -> None:
    lines = [{"question_id": one.question_id, "category": one.category, "turns": one.turns} for one in QUESTIONS]
    questions = tmp_path / "q.jsonl"
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(load_questions(questions)) == 3
    out = tmp_path / "trace"
    flags = ["-m", tiny("llama"), "--questions", questions, "--out", out, "-n", 8, "-c", 256, "--exact"]
    code, _, told = program("bench", "trace", *map(str, flags), "--mask-init", "auto,vocab-mean", "--per-category", "1")
    assert (code, len(Trace(out))) == (0, 2)
    assert "2 answers in" in told
    folder = tmp_path / "replayed"
    code, text, _ = program("bench", "replay", str(out), "--drafters", "esp,racer", "--out", str(folder))
    assert code == 0
    assert "2 of 2 answers, up to 8 tokens, greedy, exact mode" in text
    assert "not exact, racer:" in text
    rows = json.loads((folder / "replay.json").read_text())["rows"]
    assert [(row["drafter"], row["block_complexity"]) for row in rows if row["category"] == "all"] == [
        (drafter, rows) for drafter in ("esp", "racer") for rows in (10, 30, 60)
    ]
    keys = "model quant drafter block_complexity category n_prompts n_tokens passes tau tau_mean_of_prompts"
    more = "rows_per_pass accepted_by_depth drafted_by_depth exact note"
    assert set(rows[0]) >= set(f"{keys} {more}".split())
    assert not any("speedup" in name or "_ms" in name for name in rows[0])
    for name in ("tau", "tau-by-category"):
        assert all((folder / "plots" / f"{name}-llama.{suffix}").stat().st_size for suffix in ("png", "svg"))
        assert f"plots/{name}-llama.png" in (folder / "replay.md").read_text()
    code, text, _ = program("bench", "replay", str(out), "--drafters", "none,pld", "--json")
    assert [row["tau"] for row in json.loads(text)["rows"] if row["drafter"] == "none"] == [1.0] * 3
    code, _, told = program("bench", "replay", str(out), "--drafters", "lade")
    assert (code, one_error(told).count("lookahead window")) == (1, 1)
