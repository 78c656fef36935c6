"""The paper's tables 1 and 4 on one device within a given time: what ``scripts/gpu_parity`` runs.

A short trial of every lane tells how many questions the time is enough for; if it was too hopeful, the run is cut at
the last question that every lane has answered, and reported all the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from esp_edge._runtime import captured_log, llama_cpp
from esp_edge.bench.ablate import (
    Ask,
    Document,
    Measured,
    ablation_document,
    find_ablations,
    make_runs,
    write_ablation,
)
from esp_edge.bench.identity import converse
from esp_edge.bench.questions import Question, select
from esp_edge.bench.results import RunDirectory, write_json
from esp_edge.bench.run import ModelFile, Plan
from esp_edge.bench.spec import PLAIN
from esp_edge.bench.specbench import measure
from esp_edge.config import GenerationParams, ModelConfig
from esp_edge.errors import ConfigError
from esp_edge.metrics import GenerationStats
from esp_edge.session import load

__all__ = ["OWN_QUESTIONS", "Clock", "has_gpu", "in_turn", "parity", "parity_plan"]

TABLES = ("table1", "table4")
TRIAL_TOKENS = 24
MARGIN = 1.3  # other questions may be longer than that of the trial
RESERVE = 0.12  # of the time: warming up, T(n), plots
Say: TypeAlias = Callable[[str], None]

OWN_QUESTIONS = tuple(
    Question(number, category, (text,))
    for number, (category, text) in enumerate(
        (
            ("writing", "Describe a walk along the coast in autumn for a travel magazine, in two paragraphs."),
            ("reasoning", "Why does ice float on water, and what would happen to lakes if it did not? Step by step."),
            ("coding", "Write a Python function that reverses a linked list, with comments and a short example."),
            ("math", "A train leaves at 14:35 and needs 2 hours and 50 minutes. When does it arrive? Show your work."),
            ("translation", "Translate to English: Die Fähre fährt bei starkem Wind nicht, deshalb warten wir hier."),
            ("extraction", "List every person and place: Anna met Luca in Porto and they drove on to Lisbon."),
            ("qa", "What is the difference between a virus and a bacterium, and why does it matter for treatment?"),
            (
                "summarization",
                "Summarize in two sentences: The library will close for six months while its roof is repaired. Books "
                "can be ordered online and collected at the town hall. Members need not renew their cards meanwhile.",
            ),
        ),
        start=1,
    )
)


class _OutOfTimeError(Exception):
    """The run must end now."""


@dataclass(slots=True)
class Clock:
    """Counts down from ``seconds``."""

    seconds: float
    _start: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds; negative when the time is over."""
        return self.seconds - (time.monotonic() - self._start)

    @property
    def is_up(self) -> bool:
        """Whether only the reserve is left."""
        return self.left < RESERVE * self.seconds


def has_gpu() -> bool:
    """Whether this llama.cpp can offload layers, and a device is there to take them."""
    return bool(llama_cpp.llama_supports_gpu_offload())


def in_turn(questions: Sequence[Question]) -> list[Question]:
    """One question of each category, then the next one of each: any first part of it is balanced."""
    waiting, ordered = list(questions), list[Question]()
    while waiting:
        first = select(waiting, 1)
        ordered += first
        waiting = [question for question in waiting if question not in first]
    return ordered


def parity_plan(file: ModelFile, questions: Sequence[Question], max_tokens: int, n_threads: int = 0) -> Plan:
    """Tables 1 and 4 with all layers on the GPU, where there is one. The paper's masks, and auto beside them.

    Args:
        n_threads: CPU threads; 0 = one a physical core.
    """
    (lanes,) = make_runs(find_ablations(TABLES), Ask()).values()
    config = ModelConfig(n_threads=n_threads, n_gpu_layers=-1 if has_gpu() else 0)
    return Plan([file], config, lanes, questions, GenerationParams(max_tokens=max_tokens, seed=1))


def parity(
    plan: Plan, folder: Path, clock: Clock, say: Say, *, plots: bool = True
) -> tuple[dict[str, Any], list[Document]]:
    """Measure one model; what a run with the same settings left in the folder is kept.

    Args:
        plan: of :func:`parity_plan`; as many of its questions are asked as the time allows.
        folder: gets everything that ``bench specbench`` writes, and both tables beside the paper's figures.
        say: told what is being done.
        plots: draw them (needs matplotlib).

    Returns:
        The document of ``summary.json``, and those of the tables.

    Raises:
        ConfigError: not one question was finished, or the folder belongs to another run.
    """
    plan, device = _fitted(plan, folder, clock, say)
    command = f"scripts/gpu_parity {plan.models[0].name}   # device: {device}"
    try:
        measure(plan, folder, command=command, plots=plots, progress=_progress(plan, clock, say))
    except _OutOfTimeError:
        plan = _shortened(plan, folder)
        say(f"out of time: the report is of {len(plan.questions)} questions")
        measure(plan, folder, command=command, plots=plots, progress=lambda _done, _total, _text: None)
    measured = Measured.read(folder)
    documents = [ablation_document(one, Ask(), {(0.0, False): measured}) for one in find_ablations(TABLES)]
    for document in documents:
        write_ablation(document, folder, plots=plots)
    return dict(measured.summary), documents


def _progress(plan: Plan, clock: Clock, say: Say) -> Callable[[int, int, str], None]:
    def progress(done: int, total: int, text: str) -> None:
        if clock.is_up and "question" in text:
            raise _OutOfTimeError
        if done % len(plan.lanes) == 0:
            say(f"{done} of {total} answers, {clock.left:.0f} s left: {text}")

    return progress


# -- how many questions ----------------------------------------------------------------------------------------------


def _fitted(plan: Plan, folder: Path, clock: Clock, say: Say) -> tuple[Plan, str]:
    """(the plan with the questions that fit, the device); a stopped run keeps the number that it began with."""
    file = folder / "parity.json"
    if not file.exists():
        seconds, load_seconds, device = _trial(plan)
        time_left = (1 - RESERVE) * clock.left - load_seconds
        n = max(1, min(len(plan.questions), int(time_left / (MARGIN * seconds))))
        say(f"{plan.models[0].name}: {seconds:.1f} s a question, {n} of {len(plan.questions)} asked; device: {device}")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, {"questions": n, "seconds_a_question": round(seconds, 3), "device": device})
    try:
        known = json.loads(file.read_text("utf-8"))
        return replace(plan, questions=plan.questions[: known["questions"]]), known["device"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{file} is damaged: delete it, or use another --out directory") from None


def _trial(plan: Plan) -> tuple[float, float, str]:
    """(seconds that all lanes are likely to take for a question, seconds to load the model, device)."""
    start = time.monotonic()
    with captured_log() as log:
        model = load(str(plan.models[0].path), plan.config)
    load_seconds = time.monotonic() - start
    tokens = plan.params.max_tokens or TRIAL_TOKENS
    params = replace(plan.params, max_tokens=min(TRIAL_TOKENS, tokens))
    seconds = plain = 0.0
    with model:
        for lane in plan.lanes:
            with model.session(lane.draft) as session:
                converse(session, ("Hello",), replace(params, max_tokens=4))  # the first passes allocate
                took = _seconds(converse(session, plan.questions[0].turns, params)[-1].stats, tokens)
            plain = took if lane.label == PLAIN else plain
            # where an answer differs, plain decoding is asked again; half of them may
            seconds += took if lane.label == PLAIN else took + plain / 2
    return seconds, load_seconds, _device(log)


def _seconds(stats: GenerationStats, tokens: int) -> float:
    """What an answer of that many tokens would take, from a shorter one."""
    decode_ms = stats.decode_ms / stats.committed_tokens * tokens if stats.committed_tokens else 0.0
    return (stats.prefill_ms + decode_ms) / 1000.0


def _device(log: Sequence[str]) -> str:
    """What llama.cpp's log says it offloads to."""
    found = [line.partition("using device ")[2].partition(" - ")[0] for line in log]
    return ", ".join(filter(None, found)) or "CPU"


def _shortened(plan: Plan, folder: Path) -> Plan:
    """The plan without the questions that some lane has not answered; the directory is told so."""
    run = json.loads((folder / "run.json").read_text("utf-8"))
    asked = [record.question_id for record in RunDirectory(folder, run["settings"], run["machine"]).records.values()]
    done = [question for question in plan.questions if asked.count(question.question_id) == len(plan.lanes)]
    if not done:
        raise ConfigError("not one question was finished in time; give more --minutes or a lower --max-tokens")
    plan = replace(plan, questions=done)
    write_json(folder / "run.json", {**run, "settings": plan.settings()})
    notes = json.loads((folder / "parity.json").read_text("utf-8"))
    write_json(folder / "parity.json", {**notes, "questions": len(done)})
    return plan
