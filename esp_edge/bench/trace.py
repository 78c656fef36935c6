"""``esp-edge bench trace``: follow plain decoding once and keep what every row said, for ``bench replay``.

Decoding is lossless, so every drafter follows the same tokens. A pass here is the root with the mask rows of all asked
initialisations behind it, each chain of masks in a sequence of its own, so that none sees another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from esp_edge._runtime import native
from esp_edge.bench.machine import describe_run
from esp_edge.bench.questions import Question
from esp_edge.bench.results import RunDirectory
from esp_edge.bench.run import ModelFile
from esp_edge.bench.trace_file import MaskRows, Ranked, Recording, Trace, TraceSettings, mask_label
from esp_edge.config import DraftConfig, GenerationParams, ModelConfig
from esp_edge.drafters.auto_mask import resolve_mask_init
from esp_edge.drafters.calibrate import split_candidate
from esp_edge.errors import ConfigError, ContextLengthError
from esp_edge.masks import MaskVectors, make_masks
from esp_edge.models.cache import fingerprint
from esp_edge.models.model import Context, TargetModel, offloads
from esp_edge.models.sampler import Sampler
from esp_edge.models.tokenizer import TextDecoder
from esp_edge.session import load
from esp_edge.step import Step
from esp_edge.tree import DraftTree, FloatArray, Int32Array

__all__ = ["Recorder", "TracePlan", "record_trace"]

_MOST_ROWS = 63  # exact passes have no more
_EXTRA_CELLS = 64  # so that mask rows have room behind the last token of a full context
Progress: TypeAlias = Callable[[int, int, str], None]  # answers recorded, answers, what is being done


@dataclass(frozen=True, slots=True)
class TracePlan:
    """Everything that decides what is recorded.

    Attributes:
        questions: those selected, with the turns to ask.
        params: of every answer; ``max_tokens`` and ``seed`` are set.
        mask_inits: names for ``esp_edge.drafters.calibrate.split_candidate``, or ``auto``.
        masks: mask rows behind every root, 1 to 3.
        top: candidates to keep of each row.
    """

    file: ModelFile
    config: ModelConfig
    questions: Sequence[Question]
    params: GenerationParams
    mask_inits: Sequence[str] = ("vocab-mean", "prompt-mean")
    masks: int = 2
    top: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.masks <= 3:
            raise ConfigError(f"--masks must be 1, 2 or 3, but {self.masks} was given")
        if self.top < 1:
            raise ConfigError(f"--top must be at least 1, but {self.top} was given")
        for name in self.mask_inits:
            init, update = split_candidate(name)
            DraftConfig("esp", mask_init=init, mask_update=update)
        rows = 1 + len(self.mask_inits) * (self.masks + 1) * self.masks
        if rows > _MOST_ROWS:
            raise ConfigError(
                f"{len(self.mask_inits)} mask-inits of {self.masks} masks take up to {rows} rows a pass, but "
                f"{_MOST_ROWS} are possible; record fewer mask-inits in one trace"
            )

    @property
    def n_answers(self) -> int:
        """Files of a whole trace."""
        return sum(len(question.turns) for question in self.questions)


def record_trace(plan: TracePlan, out: Path, *, progress: Progress | None = None) -> Trace:
    """Record what is missing in the directory; stopping it anywhere loses at most the answer being made.

    Raises:
        ConfigError: the directory was made with other settings, or a mask-init cannot be used.
    """
    tell = progress or (lambda _done, _total, _text: None)
    tell(0, plan.n_answers, f"{plan.file.name}: loading")
    with load(str(plan.file.path), plan.config) as model:
        settings = _settings(plan, model)
        recorder = Recorder(model, settings, plan.params)
        try:
            RunDirectory(out, settings.as_dict(), describe_run(model))
            done = 0
            for number, question in enumerate(plan.questions):
                tell(done, plan.n_answers, f"{plan.file.name}: question {question.question_id}")
                _converse(recorder, question, out, number)
                done += len(question.turns)
            tell(done, plan.n_answers, f"{plan.file.name}: done")
        finally:
            recorder.close()
    return Trace(out)


def _settings(plan: TracePlan, model: TargetModel) -> TraceSettings:
    auto, labels = None, []
    if model.capability.masks:
        found = resolve_mask_init(model, DraftConfig("esp"))
        auto = mask_label(found.mask_init, found.mask_update)
        labels = [auto if name == "auto" else mask_label(*split_candidate(name)) for name in plan.mask_inits]
    questions = json.dumps([asdict(question) for question in plan.questions]).encode()
    digest = hashlib.blake2b(questions, digest_size=6).hexdigest()
    return TraceSettings(
        model=plan.file.name,
        quant=plan.file.quant,
        fingerprint=fingerprint(plan.file.path),
        questions=f"{len(plan.questions)} questions, {plan.n_answers} turns ({digest})",
        n_answers=plan.n_answers,
        max_tokens=plan.params.max_tokens or model.n_ctx,
        temperature=plan.params.temperature,
        seed=plan.params.seed or 0,
        mask_inits=tuple(dict.fromkeys(labels)),
        auto=auto,
        masks=plan.masks,
        top=min(plan.top, model.tokenizer.n_vocab),
        n_vocab=model.tokenizer.n_vocab,
        n_ctx=model.n_ctx,
        exact=plan.config.exact,
        in_order=plan.config.exact or not offloads(plan.config),
        config=asdict(plan.config),
    )


def _converse(recorder: Recorder, question: Question, out: Path, number: int) -> None:
    """All turns of a question; later turns see the earlier answers."""
    messages: list[dict[str, str]] = []
    for turn, text in enumerate(question.turns):
        messages.append({"role": "user", "content": text})
        file = Trace.file_of(out, number, turn)
        if file.exists():
            recording = Recording.read(file, recorder.settings)
        else:
            recording = recorder.answer(question, turn, messages)
            recording.write(file)
        messages.append({"role": "assistant", "content": recorder.text(recording.token_ids)})


class Recorder:
    """Answers questions one after the other on a KV cache of its own; close it before its model.

    Attributes:
        settings: of the trace.
    """

    def __init__(self, model: TargetModel, settings: TraceSettings, params: GenerationParams) -> None:
        self.settings = settings
        self._model = model
        self._params = params
        self._masks = [_MaskSource(label, settings, model) for label in settings.mask_inits]
        n_chains = max(1, len(self._masks) * (settings.masks + 1))
        self._context: Context = model.new_context(n_chains, n_ctx=model.n_ctx + _EXTRA_CELLS)
        self._step = _ChainStep(self._context, settings.masks)

    def close(self) -> None:
        """Free the KV cache."""
        self._context.close()

    def text(self, token_ids: Sequence[int]) -> str:
        """An answer as the next turn's prompt has it."""
        tokenizer, decoder = self._model.tokenizer, TextDecoder()
        kept = [token for token in token_ids if token not in tokenizer.eog_ids]
        return "".join(decoder.push(tokenizer.piece(token)) for token in kept) + decoder.flush()

    def answer(self, question: Question, turn: int, messages: Sequence[dict[str, str]]) -> Recording:
        """Answer the last message and keep what every row said."""
        ids = self._model.encode_chat(messages)
        about = (question.question_id, question.category, turn)
        if len(ids) >= self._model.n_ctx:
            return Recording.failed(self.settings, *about, str(ContextLengthError(len(ids), self._model.n_ctx)))
        prompt = self._prompt_rows(ids)
        tokens, roots, reason = self._decode(ids)
        masks = {source.label: source.rows() for source in self._masks}
        return Recording(self.settings, *about, tuple(ids), tuple(tokens), reason, _ranked(roots), prompt, masks)

    # -- prompt ------------------------------------------------------------------------------------------------------

    def _prompt_rows(self, ids: Sequence[int]) -> Ranked:
        """What the row of every prompt token but the last says; afterwards these tokens are in the cache.

        They run as chains of draft nodes, since a prefill computes no logits. An exact session's cells come from a
        prefill, whose bits differ, so in exact mode the prompt runs a second time; until then wide passes will do.
        """
        step, found, first = self._step, [], 0
        step.reset()
        step.exact = False
        while first < len(ids) - 1:
            tokens = np.array(ids[first : min(first + step.max_rows, len(ids) - 1)], np.int32)
            n = len(tokens)
            ones, none = np.ones(n, np.float32), np.zeros(n, np.int32)
            outputs = step.run(DraftTree(tokens, np.arange(-1, n - 1, dtype=np.int32), ones, none))
            found.append(outputs.top_k(np.arange(n, dtype=np.int32), self.settings.top))
            step.commit(range(1, n))
            first += n
        step.exact = self.settings.exact
        if step.exact:
            step.reset()
            step.prefill(ids[:-1])
        if not found:
            return Ranked(np.empty((0, self.settings.top), np.int32), np.empty((0, self.settings.top), np.float32))
        return Ranked(np.concatenate([top for top, _ in found]), np.concatenate([values for _, values in found]))

    # -- answer ------------------------------------------------------------------------------------------------------

    def _decode(self, ids: Sequence[int]) -> tuple[list[int], list[_Row], str]:
        """(tokens, their rows, finish reason); the mask sources collect their own rows."""
        model, step = self._model, self._step
        sampler = Sampler(model, self._params, self.settings.seed, model.n_ctx)
        for token in ids:
            sampler.accept(token, generated=False)
        for source in self._masks:
            source.begin(ids)
        limit = min(model.n_ctx - len(ids), self.settings.max_tokens)
        tokens: list[int] = []
        roots: list[_Row] = []
        while True:
            root = tokens[-1] if tokens else ids[-1]
            roots.append(self._pass(root))
            token = sampler.pick(step.native, 0, len(ids) + len(tokens))
            sampler.accept(token, generated=True)
            step.commit(())
            tokens.append(token)
            if token in model.tokenizer.eog_ids or len(tokens) == limit:
                return tokens, roots, "stop" if token in model.tokenizer.eog_ids else "length"
            for source in self._masks:
                source.commit(root, roots[-1], token)

    def _pass(self, root: int) -> _Row:
        """Run the root with all mask chains; the row of the root."""
        chains = [(source, lag, vectors) for source in self._masks for lag, vectors in source.chains(root)]
        k = self.settings.masks
        vectors = np.concatenate([vectors for *_, vectors in chains]) if chains else None
        tree = DraftTree.root_only(root, k * len(chains), vectors)
        ids, log_probs = self._step.run(tree).top_k(np.arange(tree.n_rows, dtype=np.int32), self.settings.top)
        for number, (source, lag, _) in enumerate(chains):
            mine = slice(1 + number * k, 1 + (number + 1) * k)
            source.note(lag, ids[mine], log_probs[mine])
        return ids[0], log_probs[0]


_Row: TypeAlias = tuple[Int32Array, FloatArray]  # ids [top], log_probs [top]


def _ranked(rows: Sequence[_Row]) -> Ranked:
    return Ranked(np.stack([ids for ids, _ in rows]), np.stack([log_probs for _, log_probs in rows]))


class _ChainStep(Step):
    """Passes whose root may own several chains of ``k`` masks that do not see each other."""

    def __init__(self, context: Context, k: int) -> None:
        super().__init__(context)
        self._k = k

    def _layout(self, tree: DraftTree) -> Any:
        n_chains = tree.n_mask_rows // self._k
        return _chains_layout(n_chains, self._k) if n_chains else super()._layout(tree)


@lru_cache(maxsize=64)
def _chains_layout(n_chains: int, k: int) -> Any:
    """The root in the sequences of all chains, each chain in its own."""
    depths = [0, *list(range(1, k + 1)) * n_chains]
    ids = [*range(n_chains), *(chain for chain in range(n_chains) for _ in range(k))]
    return native.TreeLayout.from_rows(depths, [0, *range(n_chains, len(ids) + 1)], ids, 1)


@dataclass(slots=True)
class _Chains:
    """What one initialisation's masks said so far in an answer; fields as in ``MaskRows``."""

    positions: list[int] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    ids: list[Int32Array] = field(default_factory=list)
    log_probs: list[FloatArray] = field(default_factory=list)


class _MaskSource:
    """The vectors of one initialisation along an answer, those of the last passes included."""

    def __init__(self, label: str, settings: TraceSettings, model: TargetModel) -> None:
        init, update = split_candidate(label)
        if model.embeddings is None:
            raise ConfigError("mask rows need a model that takes embedding rows, but this one does not")
        self.label = label
        self._k = settings.masks
        self._masks: MaskVectors = make_masks(
            init, settings.masks, model.embeddings, update, tokenize=model.tokenizer.encode
        )

    def begin(self, ids: Sequence[int]) -> None:
        """Start an answer."""
        self._masks.begin(ids)
        self._past = [self._masks.vectors()]  # before each token; the last are those of now
        self._tokens: list[int] = []
        self._proposed: list[list[Int32Array]] = []  # the chains behind every root, [k, top] each
        self._chains = _Chains()

    def chains(self, root: int) -> list[tuple[int, FloatArray]]:
        """(lag, float32[k, n_embd]) to put behind the root."""
        tree = (np.array([root], np.int32), np.array([-1], np.int32), np.array([self._k], np.int32))
        now = self._masks.for_tree(*tree)
        assert now is not None  # masks were asked for
        self._proposed.append([])
        older = [lag for lag in range(1, self._k + 1) if self._is_reachable(lag)]
        return [(0, now), *((lag, self._past[-1 - lag]) for lag in older)]

    def _is_reachable(self, lag: int) -> bool:
        """Whether a draft of the last ``lag`` tokens could have been accepted, by vectors other than those of now.

        Its token ``i`` would have come from mask ``i`` behind the token before its root. Only the best token of a depth
        has children: the first of its mask, or the second where pruning drops the first.
        """
        before = len(self._tokens) - lag - 1
        if before < 0 or self._past[-1 - lag] is self._past[-1]:
            return False
        *inner, leaf = self._tokens[before + 1 :]
        return any(
            leaf in ids[lag - 1] and all(token in ids[depth, :2] for depth, token in enumerate(inner))
            for ids in self._proposed[before]
        )

    def note(self, lag: int, ids: Int32Array, log_probs: FloatArray) -> None:
        """Keep the rows of a chain, [k, top]."""
        chains = self._chains
        chains.positions.append(len(self._tokens))
        chains.lags.append(lag)
        chains.ids.append(ids)
        chains.log_probs.append(log_probs)
        self._proposed[-1].append(ids)

    def commit(self, root: int, row: _Row, token: int) -> None:
        """The root's row chose ``token``."""
        width = self._masks.guess_width
        if width:
            self._masks.learn(np.array([root], np.int32), row[0][None, :width], row[1][None, :width])
        self._masks.commit([token])
        self._past.append(self._masks.vectors())
        self._tokens.append(token)

    def rows(self) -> MaskRows:
        """Everything noted since ``begin``."""
        chains = self._chains
        return MaskRows(
            np.array(chains.positions, np.int32),
            np.array(chains.lags, np.int32),
            np.stack(chains.ids),
            np.stack(chains.log_probs),
        )
