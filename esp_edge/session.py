"""One conversation: prefill, then draft -> step -> verify -> commit until the answer ends. Read this file first.

Plain decoding is the same loop with a one-node tree, so a losslessness test compares like with like.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from esp_edge.config import MAX_EXACT_BLOCK, DraftConfig, GenerationParams, ModelConfig
from esp_edge.drafters import make_drafter
from esp_edge.drafters.auto_mask import resolve_mask_init
from esp_edge.drafters.base import Budget, Drafter
from esp_edge.drafters.draft_model import DraftModelDrafter
from esp_edge.drafters.fused import FusedDrafter
from esp_edge.drafters.none import NoneDrafter
from esp_edge.errors import ConfigError, ContextLengthError, PromptError
from esp_edge.metrics import GenerationStats
from esp_edge.models.hub import Progress
from esp_edge.models.model import Context, TargetModel
from esp_edge.models.sampler import Sampler
from esp_edge.models.tokenizer import StopMatcher, TextDecoder
from esp_edge.planner.curve import CostCurve
from esp_edge.planner.measure import load_curve, save_curve
from esp_edge.planner.plan import Planner
from esp_edge.step import Outputs, Step
from esp_edge.tree import DraftTree, Verdict
from esp_edge.verify import verify

__all__ = [
    "BATCH_SEQUENCES",
    "Chunk",
    "Drafting",
    "Generation",
    "Message",
    "Model",
    "Prompt",
    "Session",
    "TokenLogprob",
    "common_prefix",
    "load",
    "sequences_for",
]

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
BATCH_SEQUENCES = 64  # for a drafter whose trees are not known beforehand
ONE_PATH = ("none", "pld", "suffix", "draft-model")  # they draft chains: one sequence, and a cheaper commit
_MOST_SEQUENCES = 255
_LEARNED = "auto_drafter"  # in the model's cache
_ENOUGH_PASSES = 20  # fewer teach nothing worth keeping
_UNLIMITED = 1 << 31


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of an emitted token under the target model, at temperature 1, and of its likeliest rivals.

    Attributes:
        token_id, logprob: the emitted token.
        top: (token id, log-probability), best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one pass emitted.

    Attributes:
        text: new text; may be empty while half a character or a possible stop text is held back.
        token_ids: emitted tokens, an end-of-generation token included.
        accepted: for each token, whether it was an accepted draft.
        sources: for each token, the draft source that proposed it, "" where none did.
        logprobs: one entry a token when asked for, else empty.
        finish_reason: None, ``stop`` or ``length``; set on the last chunk.
        stats: running statistics; the same object in all chunks of a generation.
    """

    text: str
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]
    sources: tuple[str, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    stats: GenerationStats


class _Answer:
    """The text side of a generation: tokens in, text out, and the decision where it ends."""

    def __init__(self, model: TargetModel, stop: Sequence[str], limit: int) -> None:
        self._tokenizer = model.tokenizer
        self._decoder = TextDecoder()
        self._stop = StopMatcher(stop)
        self._left = limit
        self.finish_reason: str | None = None

    @property
    def left(self) -> int:
        """Tokens that may still be emitted."""
        return self._left

    def is_end(self, token_id: int) -> bool:
        """Whether a token ends the generation."""
        return token_id in self._tokenizer.eog_ids

    def push(self, token_ids: Sequence[int]) -> tuple[int, str]:
        """Emit tokens until the answer ends: (how many were emitted, new text)."""
        text = ""
        for n, token_id in enumerate(token_ids, start=1):
            self._left -= 1
            if self.is_end(token_id):
                return n, text + self._finish("stop")
            text += self._stop.push(self._decoder.push(self._tokenizer.piece(token_id)))
            if self._stop.hit:
                self.finish_reason = "stop"
                return n, text
            if self._left == 0:
                return n, text + self._finish("length")
        return len(token_ids), text

    def _finish(self, reason: str) -> str:
        """Release what was held back: half a character, then what might have become a stop text."""
        text = self._stop.push(self._decoder.flush())
        self.finish_reason = "stop" if self._stop.hit else reason
        return text + self._stop.flush()


class Generation:
    """One answer in the making: the tree of its next pass, and what a pass makes of the text. Owns no cache.

    Attributes:
        params: what was asked for.
        token_ids: prompt and answer so far; the last one has no cell yet.
        n_prompt: tokens of the prompt.
        limit: tokens that may be emitted in all.
        tree: what the next pass verifies; after :meth:`begin`.
        drafter, stats: after :meth:`use`; before it, ``stats`` knows the prompt only.
    """

    def __init__(self, model: TargetModel, prompt: Prompt, params: GenerationParams | None = None) -> None:
        """Check and encode a prompt.

        Raises:
            PromptError: an empty or malformed prompt, or one too long (ContextLengthError).
            GrammarError: the grammar or JSON schema cannot be used.
        """
        self.model = model
        self.params = params = params or GenerationParams()
        self.token_ids = _encode(model, prompt)
        self.n_prompt = len(self.token_ids)
        if self.n_prompt >= model.n_ctx:
            raise ContextLengthError(self.n_prompt, model.n_ctx)
        self.seed = params.seed if params.seed is not None else secrets.randbits(63)
        self.limit = min(model.n_ctx - self.n_prompt, _UNLIMITED if params.max_tokens is None else params.max_tokens)
        self.stats = GenerationStats(prompt_tokens=self.n_prompt)
        self.drafter: Drafter = NoneDrafter()
        self._sampler = Sampler(model, params, self.seed, model.n_ctx)
        self._answer = _Answer(model, params.stop, self.limit)
        self._n_top = None if params.logprobs is None else min(params.logprobs, model.tokenizer.n_vocab)

    @property
    def ended(self) -> bool:
        """Whether the last token was emitted."""
        return self._answer.finish_reason is not None

    @property
    def left(self) -> int:
        """Tokens that may still be emitted."""
        return self._answer.left

    def use(self, drafter: Drafter, stats: GenerationStats) -> None:
        """Draft with this drafter and count in these statistics."""
        params = self.params
        if isinstance(drafter, FusedDrafter):
            drafter.expect(self.model.tokenizer.encode(params.prediction or ""), params.temperature, self.seed)
        stats.seed = None if params.is_greedy else self.seed
        self.drafter, self.stats = drafter, stats

    def nothing(self) -> Chunk:
        """The only chunk of an answer of which no token is wanted."""
        return Chunk("", (), (), (), (), "length", self.stats)

    def begin(self, max_rows: int) -> None:
        """The prompt but for its last token is in the cache: make the tree of the first pass."""
        for token_id in self.token_ids:
            self._sampler.accept(token_id, generated=False)
        self.drafter.begin(self.token_ids)
        self.tree = self.drafter.probe()
        if self.limit == 1 or self.tree.n_rows > max_rows:
            self.plain()  # nothing will be drafted, or there is no room to ask

    def plain(self) -> None:
        """Let the next pass be the root alone."""
        self.tree = DraftTree.root_only(self.token_ids[-1])

    def take(self, step: Step, outputs: Outputs) -> Chunk:
        """Verify the pass that ran over the tree, commit what was accepted and let the drafter learn from it.

        Raises:
            GrammarError, ConfigError: the grammar or the logit bias leaves no token.
        """
        with step.lock:  # logits may be computed while they are read, and other threads run meanwhile
            return self._take(step, outputs)

    def _take(self, step: Step, outputs: Outputs) -> Chunk:
        tree, answer = self.tree, self._answer
        verdict = self._verify(step)
        n_emitted, text = answer.push(verdict.token_ids)
        emitted = _emitted(tree, verdict, outputs, n_emitted, self._n_top)
        chunk = Chunk(text, *emitted, answer.finish_reason, self.stats)
        verdict = verdict.first(n_emitted)
        step.commit(verdict.path)
        self.token_ids.extend(verdict.token_ids)
        self.stats.count(tree.n_rows, tree.depths.tolist(), chunk.accepted, tree.sources, chunk.sources)
        if answer.finish_reason is None:
            self.drafter.observe(tree, outputs, verdict)
        return chunk

    def draft(self, budget: Budget) -> None:
        """Make the tree of the next pass."""
        self.tree = self.drafter.draft(budget)

    def _verify(self, step: Step) -> Verdict:
        def choose(row: int, position: int) -> int:
            token_id = self._sampler.pick(step.native, row, position)
            self._sampler.accept(token_id, generated=True)
            return token_id

        answer = self._answer
        return verify(self.tree, choose, position=len(self.token_ids), limit=answer.left, is_end=answer.is_end)


class Drafting:
    """The draft side of a session: the settings, and the drafter and planner that live on from answer to answer."""

    def __init__(
        self,
        model: TargetModel,
        drafter: Drafter | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.model = model
        self._custom = drafter
        self._progress = progress
        self._kept: tuple[DraftConfig, float, Drafter] | None = None  # the drafter of the last generation
        self._planner: Planner | None = None  # of the drafter that sizes its trees

    def _configure(self, config: DraftConfig) -> None:
        if self.model.config.exact and config.rows > MAX_EXACT_BLOCK:
            raise ConfigError(
                f"exact mode allows a block complexity of {MAX_EXACT_BLOCK}, but {config.rows} was given; lower "
                f"--block-complexity or the tree widths"
            )
        plans = config.drafter == "auto" and self.model.capability.speculation and not self._custom
        self._planner = self._make_planner(config) if plans else None
        if not self._custom and (self._planner is None or self._planner.masks_may_pay):
            config = resolve_mask_init(self.model, config, progress=self._progress)
        self._draft = config

    def _make_planner(self, config: DraftConfig) -> Planner:
        if config.cost == "flat":
            return Planner(CostCurve.flat(), refine=False)
        curve = self.model.curve
        if not isinstance(curve, CostCurve):  # sessions of one model share it, and what passes taught it
            curve = self.model.curve = load_curve(self.model, progress=self._progress)
        return Planner(curve)

    def _start(self, params: GenerationParams, n_prompt: int) -> tuple[Drafter, GenerationStats]:
        draft, note = self._draft, None
        if draft.drafter != "none" and not _is_able(self.model, draft):
            draft, note = replace(draft, drafter="none"), self.model.capability.reason
        custom = self._custom
        if custom and not self.model.capability.speculation:
            custom, note = None, self.model.capability.reason
        drafter = custom or self._drafter(draft, params.temperature)
        stats = GenerationStats(drafter=drafter.name, prompt_tokens=n_prompt, note=note, block_complexity=draft.rows)
        if draft.drafter == "esp" or (draft.drafter == "auto" and draft.mask_init != "auto"):
            stats.masks, stats.mask_init = draft.masks, draft.mask_init
        return drafter, stats

    def _drafter(self, draft: DraftConfig, temperature: float) -> Drafter:
        """The last generation's drafter while the settings are the same: ``begin`` decides what it still knows."""
        if self._kept is None or self._kept[:2] != (draft, temperature):
            self._drop_drafter()
            model = self.model
            made = make_drafter(draft, model.embeddings, model.tokenizer.encode, temperature, target=model)
            if isinstance(made, FusedDrafter) and model.remember:
                made.recall(model.cache.get(_LEARNED))
            self._kept = draft, temperature, made
        return self._kept[2]

    def _drop_drafter(self) -> None:
        kept, self._kept = self._kept, None
        if kept is None:
            return
        if isinstance(kept[2], DraftModelDrafter):
            kept[2].close()
        elif isinstance(kept[2], FusedDrafter) and self.model.remember:
            self._remember(kept[2])

    def _remember(self, drafter: FusedDrafter) -> None:
        """Store what this session taught about the sources and the cost of passes."""
        if drafter.n_learned >= _ENOUGH_PASSES:
            self.model.cache.put(_LEARNED, drafter.learned())
            if self._planner is not None and self._draft.cost == "measured":
                save_curve(self.model, self._planner.curve)


class Session(Drafting):
    """A KV cache with its tokens. Not thread-safe; close it before its model.

    Stopping a generation anywhere leaves the cache right, and the next prompt reuses the longest common prefix.

    Attributes:
        model: the target model.
        token_ids: the tokens of the conversation so far; the last one has no cell yet.
    """

    def __init__(
        self,
        model: TargetModel,
        draft: DraftConfig | None = None,
        *,
        drafter: Drafter | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(model, drafter, progress)
        self.token_ids: list[int] = []
        self._context: Context | None = None
        self._turn: object = None  # of the generation that may go on; a newer one ends it
        self.draft = draft or DraftConfig("none" if drafter else DraftConfig().drafter)

    @property
    def draft(self) -> DraftConfig:
        """How drafts are made, ``auto`` resolved. Assign between generations; a larger tree starts a new cache.

        Raises (on assignment):
            ConfigError: exact mode with a block complexity above 60.
        """
        return self._draft

    @draft.setter
    def draft(self, config: DraftConfig) -> None:
        self._configure(config)
        self._turn = None
        needed = BATCH_SEQUENCES if self._custom else sequences_for(config)
        if not self.model.capability.speculation:
            needed = 1  # every pass will be a single row
        if self._context is None or self._context.n_sequences < needed:
            self.close()
            self._context = self.model.new_context(needed)
            self.token_ids = []
            self._step = Step(self._context, config.impl, defer_head=self.model.config.defer_head)
        elif self._step.impl != config.impl:
            self._step.impl = config.impl

    def generate(self, prompt: Prompt, params: GenerationParams | None = None) -> Generator[Chunk, None, None]:
        """Answer a prompt: raw text, token ids, or messages for the chat template.

        The prompt is checked at once; the passes run as the chunks are taken. Closing the generator ends the answer,
        and so does the first chunk of a newer one: the older generator raises ConfigError when it is resumed.

        Raises:
            ConfigError: the session is closed.
            PromptError: an empty or malformed prompt, or one too long (ContextLengthError).
            GrammarError: the grammar or JSON schema cannot be used.
        """
        self._require_open()
        generation = Generation(self.model, prompt, params)
        generation.use(*self._start(generation.params, generation.n_prompt))
        return self._run(generation)

    def explain(self, stats: GenerationStats) -> dict[str, Any] | None:
        """Why ``auto`` drafted as it did in the answer that ``stats`` are of, JSON-ready; None with other drafters.

        Keys: ``cost`` (rows -> milliseconds, as measured and refined), ``price`` (tokens a millisecond is worth),
        ``calibration`` (per tenth of probability: predicted, observed, candidates), ``mask_gain`` (tokens that a probed
        anchor brings), ``plain_ms`` and ``saved_ms`` (what plain decoding would have taken, and the difference), and
        ``reason`` where speculation was off or hardly used.
        """
        if self._planner is None or self._kept is None or not isinstance(self._kept[2], FusedDrafter):
            return None
        context = stats.prompt_tokens + stats.committed_tokens // 2
        return self._planner.explain(stats, context) | self._kept[2].explain()

    def close(self) -> None:
        """Free the KV cache; calling it twice is harmless."""
        self._turn = None
        self._drop_drafter()
        if self._context is not None:
            self._context.close()
            self._context = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the loop --------------------------------------------------------------------------------------------------

    def _run(self, generation: Generation) -> Generator[Chunk, None, None]:
        self._require_open()
        turn = self._turn = object()
        if generation.limit == 0:
            yield generation.nothing()
            return
        clock = _Clock(generation.stats, self._step)
        self._prefill(generation)
        generation.begin(self._step.max_rows)
        try:
            while not generation.ended:
                in_prefill = generation.stats.prefill_tokens == 0  # the first pass belongs to it
                timing = self._time_pass(generation.tree)
                chunk = generation.take(self._step, self._step.run(generation.tree))
                if not in_prefill:
                    timing(len(chunk.token_ids))
                if not generation.ended:
                    generation.draft(self._budget(generation.left))
                clock.stop()
                yield chunk
                self._require_turn(turn, generation)
                clock.start()
        finally:
            if self._turn is turn and self._context is not None and not self._context.closed:
                self._step.rollback()

    def _require_open(self) -> None:
        if self._context is None:
            raise ConfigError("the session is closed: make a new one with model.session()")

    def _require_turn(self, turn: object, generation: Generation) -> None:
        """Raise ConfigError when an unfinished generation is resumed after the cache went to another one."""
        if self._turn is not turn and not generation.ended:
            raise ConfigError(
                "this answer cannot go on: a newer generation, a new draft setting or close() took its cache; take all "
                "its chunks first, or use a second session"
            )

    def _prefill(self, generation: Generation) -> None:
        """Bring every prompt token but the last into the cache, reusing the common prefix."""
        ids = generation.token_ids
        self._step.truncate(self._step.reusable(common_prefix(self.token_ids, ids[:-1])))
        generation.stats.cached_tokens = self._step.n_past
        self.token_ids = ids[: self._step.n_past]
        self._step.prefill(ids[self._step.n_past : -1])
        self.token_ids = ids

    def _time_pass(self, tree: DraftTree) -> Callable[[int], None]:
        """Call it with the tokens that the pass emitted, once it ran: the planner learns what it cost and brought."""
        planner, step = self._planner, self._step
        if planner is None:
            return lambda _n_emitted: None
        rows, n_past, before = tree.n_rows + len(step.refeed), step.n_past, step.model_ms
        return lambda n_emitted: planner.observe(rows, n_past, step.model_ms - before, n_emitted)

    def _budget(self, left: int) -> Budget:
        """What the next pass may use when ``left`` tokens are still wanted."""
        context = self._context
        sequences = context.n_sequences if context else 1
        rows = self._step.max_rows
        if self._planner is None:
            return Budget(rows=rows, depth=left - 1, sequences=sequences)
        n_past, refeed = self._step.n_past, len(self._step.refeed)
        cost = self._planner.cost(min(rows, self._draft.rows) + refeed, n_past)[refeed:]
        return Budget(rows, left - 1, sequences, cost, self._planner.price(n_past))


class _Clock:
    """Splits wall time into prefill (up to the first chunk) and decode, leaving out the consumer's own time."""

    def __init__(self, stats: GenerationStats, step: Step) -> None:
        self._stats = stats
        self._step = step
        self._first = True
        self.start()

    def start(self) -> None:
        self._time = time.perf_counter()
        self._model_ms = self._step.model_ms

    def stop(self) -> None:
        elapsed = 1000.0 * (time.perf_counter() - self._time)
        if self._first:
            self._stats.prefill_ms += elapsed
        else:
            self._stats.decode_ms += elapsed
            self._stats.model_ms += self._step.model_ms - self._model_ms
        self._first = False


def _encode(model: TargetModel, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return model.encode_prompt(prompt)
    items = list(prompt)
    if not items:
        raise PromptError("the prompt is empty: give text, token ids or messages")
    if not all(isinstance(item, int | np.integer) for item in items):
        return model.encode_chat(items)  # type: ignore[arg-type]
    n_vocab = model.tokenizer.n_vocab
    bad = [item for item in items if not 0 <= item < n_vocab]  # type: ignore[operator]
    if bad:
        raise PromptError(f"token ids must be between 0 and {n_vocab - 1}, but {bad[0]} was given")
    return [int(item) for item in items]  # type: ignore[call-overload]


def common_prefix(stored: Sequence[int], wanted: Sequence[int]) -> int:
    """How many tokens two sequences share from the start."""
    for n, (mine, theirs) in enumerate(zip(stored, wanted, strict=False)):
        if mine != theirs:
            return n
    return min(len(stored), len(wanted))


def _is_able(model: TargetModel, draft: DraftConfig) -> bool:
    return model.capability.masks if draft.drafter == "esp" else model.capability.speculation


def sequences_for(config: DraftConfig) -> int:
    """Owners and leaves of the largest tree a configuration draws; with ESP every node owns masks."""
    if config.drafter == "esp":
        return max(1, config.rows // (config.masks + 1))
    return 1 if config.drafter in ONE_PATH else min(config.rows, _MOST_SEQUENCES)


def _logprob(outputs: Outputs, row: int, token_id: int, n_top: int) -> TokenLogprob:
    top: tuple[tuple[int, float], ...] = ()
    if n_top:
        ids, values = outputs.top_k(np.array([row], np.int32), n_top)
        top = tuple(zip(ids[0].tolist(), values[0].tolist(), strict=True))
    return TokenLogprob(token_id, outputs.logprob(row, token_id), top)


_Emitted: TypeAlias = tuple[tuple[int, ...], tuple[bool, ...], tuple[str, ...], tuple[TokenLogprob, ...]]


def _emitted(tree: DraftTree, verdict: Verdict, outputs: Outputs, n: int, n_top: int | None) -> _Emitted:
    """Ids, accepted, sources and logprobs of a verdict's first ``n`` tokens; token ``i`` was chosen at ``rows[i]``."""
    tokens = verdict.token_ids[:n]
    hits = verdict.path[:n]
    rest = n - len(hits)
    accepted = (True,) * len(hits) + (False,) * rest
    sources = tuple([tree.sources[node] for node in hits] if tree.sources else [""] * len(hits)) + ("",) * rest
    if n_top is None:
        return tokens, accepted, sources, ()
    rows = (0, *verdict.path)
    return tokens, accepted, sources, tuple(_logprob(outputs, rows[i], token, n_top) for i, token in enumerate(tokens))


class Model(TargetModel):
    """A loaded model. Close it after its sessions, or use it as a context manager."""

    def session(
        self, draft: DraftConfig | None = None, *, progress: Callable[[int, int], None] | None = None
    ) -> Session:
        """A new conversation with a KV cache of its own.

        Args:
            draft: how drafts are made; default ``auto``.
            progress: called with (done, total) while ``mask_init="auto"`` is measured, once per model file.
        """
        return Session(self, draft, progress=progress)


def load(
    model: str | os.PathLike[str] = "smollm2", config: ModelConfig | None = None, *, progress: Progress | None = None
) -> Model:
    """Load a GGUF model: a path, ``owner/repo[:QUANT]`` on Hugging Face, or ``smollm2`` (bundled).

    Raises:
        ModelFileError: no such file, or a broken one.
        ModelDownloadError: the hub did not deliver.
        ModelLoadError: llama.cpp refused it.
        UnsupportedModelError: not a text-generating decoder.
    """
    return Model(os.fspath(model), config, progress=progress)
