"""The Spec-Bench runner: one model load, all lanes interleaved prompt by prompt, every answer recorded at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from esp_edge.bench.identity import Answer, Talker, converse, explain, parting, stock_difference
from esp_edge.bench.machine import describe_machine
from esp_edge.bench.peer_server import PeerServers
from esp_edge.bench.peers import Peer
from esp_edge.bench.questions import Question
from esp_edge.bench.results import Record, RunDirectory, Turn, Unit
from esp_edge.bench.spec import PEER, PLAIN, Lane
from esp_edge.config import MAX_EXACT_BLOCK, DraftConfig, GenerationParams, ModelConfig
from esp_edge.errors import ConfigError, ContextLengthError
from esp_edge.models import gguf
from esp_edge.models.cache import ModelCache, fingerprint
from esp_edge.models.model import DEFAULT_CONTEXT, prepare_exact, threads_for
from esp_edge.session import Model, load

__all__ = ["ModelFile", "Plan", "Progress", "Runner", "open_run", "prepare_models", "run_all"]

WARM_UP = "Hello"
WARM_UP_TOKENS = 4
Progress: TypeAlias = Callable[[int, int, str], None]  # answers recorded, answers, what is being done


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model to measure.

    Attributes:
        path: the file.
        name: without folder and suffix; it names the model in all results.
        quant: its quantisation.
        n_ctx_train: tokens it was trained for; 0 = the file does not say.
    """

    path: Path
    name: str
    quant: str
    n_ctx_train: int = 0

    @classmethod
    def read(cls, path: Path) -> ModelFile:
        """What the header of a file says; ModelFileError when it is no model."""
        header = gguf.read_header(path)
        trained = int(header.hyperparameter("context_length") or 0)
        return cls(path, path.name.removesuffix(".gguf"), gguf.quant_name(header), trained)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides what a run measures.

    Attributes:
        models: one after the other, loaded once each.
        lanes: plain decoding first.
        questions: those selected, with the turns to ask.
        params: of every generation; its seed is the same everywhere.
        repeat: repetitions of the whole list.
        peer: the program of the lanes that are not ours; None when there are none.
    """

    models: Sequence[ModelFile]
    config: ModelConfig
    lanes: Sequence[Lane]
    questions: Sequence[Question]
    params: GenerationParams
    repeat: int = 1
    peer: Peer | None = None

    def __post_init__(self) -> None:
        if any(lane.peer for lane in self.lanes) and not self.params.is_greedy:
            raise ConfigError(
                f"{PEER} draws with a generator of its own, so sampled answers cannot be compared: use --temp 0 or "
                f"drop --peer"
            )
        rows = max((lane.draft.rows for lane in self.lanes if not lane.stock and lane.peer is None), default=1)
        if self.config.exact and rows > MAX_EXACT_BLOCK:
            raise ConfigError(
                f"exact mode allows a block complexity of {MAX_EXACT_BLOCK}, but {rows} was given; lower "
                "--block-complexity or the tree widths"
            )
        names = [model.name for model in self.models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"models are told apart by file name, but {twice[0]} is given twice; rename one")

    @property
    def n_units(self) -> int:
        """Answers to record."""
        return len(self.models) * self.repeat * len(self.questions) * len(self.lanes)

    def settings(self) -> dict[str, Any]:
        """What a directory must have been made with to be continued, JSON-ready."""
        questions = json.dumps([asdict(question) for question in self.questions]).encode()
        digest = hashlib.blake2b(questions, digest_size=6).hexdigest()
        return {
            "models": [f"{model.name} ({model.quant}, {fingerprint(model.path)})" for model in self.models],
            "drafters": [lane.settings for lane in self.lanes],
            "questions": f"{len(self.questions)} questions, {self.n_turns} turns ({digest})",
            "max_tokens": self.params.max_tokens,
            "temperature": self.params.temperature,
            "seed": self.params.seed,
            "repeat": self.repeat,
            **({"peer": f"{PEER} {self.peer.version}, {fingerprint(self.peer.path)}"} if self.peer else {}),
            **asdict(self.config),
        }

    @property
    def n_turns(self) -> int:
        """Turns of all questions."""
        return sum(len(question.turns) for question in self.questions)


def prepare_models(plan: Plan) -> None:
    """Settle what exact mode needs of any of the models, before the first of them runs.

    Raises:
        ConfigError: this process has run another model already, and a file here needs what it did not (k-quants).
    """
    if plan.config.exact:
        for file in plan.models:
            prepare_exact(gguf.preflight(file.path))


def open_run(plan: Plan, out: Path) -> RunDirectory:
    """The directory of a plan's run, new or to be continued.

    Raises:
        ConfigError: it belongs to another run.
    """
    config, files = plan.config, plan.models
    machine = describe_machine(
        config,
        quant=", ".join(dict.fromkeys(file.quant for file in files)),
        n_ctx=max(config.n_ctx or min(file.n_ctx_train or DEFAULT_CONTEXT, DEFAULT_CONTEXT) for file in files),
        n_threads=max(threads_for(config, ModelCache(file.path)) for file in files),
    )
    return RunDirectory(out, plan.settings(), machine)


def run_all(
    plan: Plan,
    results: RunDirectory,
    *,
    progress: Progress | None = None,
    after: Callable[[ModelFile, Model], None] | None = None,
) -> None:
    """Measure what is missing in the directory. Stopping it anywhere loses at most the answer being made.

    Args:
        progress: called before each answer.
        after: called with each model when its answers are there and it is still loaded.
    """
    for file in plan.models:
        with load(str(file.path), plan.config) as model, _stock_model(plan, file) as stock:
            with _peer_servers(plan, model) as peers:
                Runner(plan, file, model, results, progress, stock=stock, peers=peers).run()
            if after is not None:
                after(file, model)


def _stock_model(plan: Plan, file: ModelFile) -> AbstractContextManager[Model | None]:
    """The same file in the default mode, with llama.cpp's kernels, where a lane wants it."""
    if not any(lane.stock for lane in plan.lanes):
        return nullcontext()
    return load(str(file.path), replace(plan.config, exact=False, kernels="stock"))


def _peer_servers(plan: Plan, model: Model) -> AbstractContextManager[PeerServers | None]:
    return nullcontext() if plan.peer is None else PeerServers(plan.peer, model)


class Runner:
    """All lanes on one loaded model."""

    def __init__(
        self,
        plan: Plan,
        file: ModelFile,
        model: Model,
        results: RunDirectory,
        progress: Progress | None = None,
        *,
        stock: Model | None = None,
        peers: PeerServers | None = None,
    ) -> None:
        self._plan = plan
        self._file = file
        self._model = model
        self._stock = stock
        self._peers = peers
        self._results = results
        self._progress = progress or (lambda _done, _total, _text: None)

    def run(self) -> None:
        """Answer every question with every lane, round by round."""
        if not self._is_done():
            self._warm_up()
        for repeat in range(self._plan.repeat):
            with ExitStack() as stack:
                if self._peers is not None:
                    stack.callback(self._peers.stop)  # a repetition must not know the answers of the one before it
                kept = _KeptSessions(self, self._plan, stack)
                for index, question in enumerate(self._plan.questions):
                    self._round(repeat, index, question, kept)
        self._tell("done")

    def _is_done(self) -> bool:
        n_mine = sum(unit[0] == self._file.name for unit in self._results.records)
        return n_mine * len(self._plan.models) == self._plan.n_units

    def _unit(self, repeat: int, question: Question, lane: Lane) -> Unit:
        return self._file.name, repeat, question.question_id, lane.label, lane.block_complexity

    def _warm_up(self) -> None:
        """A few uncounted tokens in every lane: the weights get into memory, and what cannot run fails now."""
        params = replace(self._plan.params, max_tokens=WARM_UP_TOKENS)
        for lane in self._plan.lanes:
            self._tell(f"warming up {lane.label} at {lane.block_complexity}")
            with self.session(lane) as session:
                if lane.peer is None:  # a new server has just warmed up
                    converse(session, (WARM_UP,), params)

    def session(self, lane: Lane) -> Talker:
        """A session of its own: an empty KV cache and, unless they are kept later, empty tables.

        A peer's server, with the tables it has, lives to the end of a repetition; the first session starts it.
        """
        if lane.peer is not None and self._peers is not None:
            return self._peers.session(lane.peer)
        model = self._stock if lane.stock and self._stock is not None else self._model
        return model.session(lane.draft)

    # -- a round -----------------------------------------------------------------------------------------------------

    def _round(self, repeat: int, index: int, question: Question, kept: _KeptSessions) -> None:
        """One question by every lane; the first lane is another one each time."""
        lanes = self._plan.lanes
        first = (index + repeat) % len(lanes)
        for lane in (*lanes[first:], *lanes[:first]):
            if self._unit(repeat, question, lane) in self._results.records:
                continue
            self._tell(f"question {question.question_id}, {lane.label}")
            if lane.keep:
                self._results.add(self._record(repeat, question, lane, kept.ready(lane, index)))
            else:
                with self.session(lane) as session:
                    self._results.add(self._record(repeat, question, lane, session))
        self._judge(repeat, question)

    def _tell(self, text: str) -> None:
        self._progress(len(self._results.records), self._plan.n_units, f"{self._file.name}: {text}")

    def _record(self, repeat: int, question: Question, lane: Lane, session: Talker) -> Record:
        answers, error = _ask(session, question, self._plan.params)
        stats = answers[-1].stats if answers else None
        return Record(
            model=self._file.name,
            quant=self._file.quant,
            repeat=repeat,
            question_id=question.question_id,
            category=question.category,
            drafter=lane.label,
            block_complexity=lane.block_complexity,
            turns=tuple(Turn.from_stats(one.token_ids, one.finish_reason, one.stats) for one in answers),
            mask_init=stats.mask_init if stats else None,
            note=stats.note if stats else None,
            error=error,
        )

    # -- identity ----------------------------------------------------------------------------------------------------

    def _judge(self, repeat: int, question: Question) -> None:
        """Note where answers differ from plain decoding's; plain decoding itself must repeat its first answer."""
        for lane in self._plan.lanes:
            is_plain = lane.label == PLAIN
            wanted = self._results.records[self._unit(0 if is_plain else repeat, question, self._plan.lanes[0])]
            found = self._results.records[self._unit(repeat, question, lane)]
            if found.unit in self._results.differences or wanted.error or found.error:
                continue
            at = parting(wanted, found)
            if at is not None and lane.stock:
                self._results.add_difference(stock_difference(found, at))
            elif at is not None:
                self._tell(f"question {question.question_id}, a difference of {lane.label}")
                with self._model.session(DraftConfig(PLAIN)) as plain:
                    difference = explain(plain, question.turns, self._plan.params, found, at)
                self._results.add_difference(difference)


def _ask(session: Talker, question: Question, params: GenerationParams) -> tuple[list[Answer], str | None]:
    """All answers, or none and why: a conversation that does not fit the context is left out of the comparison."""
    try:
        return converse(session, question.turns, params), None
    except ContextLengthError as error:
        return [], str(error)


class _KeptSessions:
    """Sessions of the lanes whose tables live on, for one repetition.

    After a restart the questions that such a lane has answered already are asked again, uncounted, so that its tables
    are those of a run that was never stopped.
    """

    def __init__(self, runner: Runner, plan: Plan, stack: ExitStack) -> None:
        self._runner = runner
        self._plan = plan
        self._stack = stack
        self._sessions: dict[tuple[str, int], Talker] = {}
        self._seen: dict[tuple[str, int], int] = {}

    def ready(self, lane: Lane, index: int) -> Talker:
        """The lane's session, having answered the first ``index`` questions, about to answer the next."""
        if lane.key not in self._sessions:
            self._sessions[lane.key] = self._stack.enter_context(self._runner.session(lane))
        session = self._sessions[lane.key]
        for question in self._plan.questions[self._seen.get(lane.key, 0) : index]:
            _ask(session, question, self._plan.params)
        self._seen[lane.key] = index + 1
        return session
