"""Settings: frozen dataclasses, checked when they are made. Units and defaults stand here and nowhere else."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from esp_edge.errors import ConfigError

__all__ = ["DraftConfig", "GenerationParams", "ModelConfig", "parse_rpc", "parse_tree"]

DRAFTERS = ("auto", "esp", "none", "pld", "lade", "stand", "recycling", "suffix", "racer", "draft-model")
FUSED_SOURCES = ("suffix", "adjacency", "esp", "last")  # of the drafter auto
COSTS = ("measured", "flat")
OCCURRENCES = ("newest", "first")
IMPLEMENTATIONS = ("efficient", "naive")
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
KERNELS = ("auto", "fast", "stock")
MASK_INITS = ("auto", "prompt-mean", "vocab-mean", "sample", "last-k", "composed")
MAX_EXACT_BLOCK = 60  # exact mode keeps every pass, re-fed tokens included, below the 64 rows of the tiled kernel
MAX_BLOCK = 240
FIXED_BLOCK = 10  # block complexity of the drafters that do not plan
PLANNED_BLOCK = 60  # what auto plans within
MAX_RPC_SERVERS = 16  # llama.cpp's own limit


def _require(ok: bool, what: str, found: object) -> None:
    if not ok:
        raise ConfigError(f"{what}, but {found!r} was given")


def _is_finite(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_text(value: object) -> bool:
    """A str that has a UTF-8 form: no half of a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """How a model is loaded.

    Attributes:
        n_ctx: context length in tokens; 0 = the model's training length, at most 4096.
        n_threads: CPU threads; 0 = one a physical core.
        n_gpu_layers: layers on the GPU; -1 = all.
        flash_attn: use flash attention (needed by exact mode and by quantised V caches).
        type_k, type_v: KV cache types, llama.cpp's names.
        exact: bit-exact decoding on the CPU (docs: exactness).
        kernels: on the CPU, ``fast`` = our own where known to work (docs: performance), ``stock`` = llama.cpp's,
            ``auto`` = the faster ones, measured when a file is first loaded; ``fast`` in exact mode.
        repack: our kernels keep weights of less than 32 bits in memory as they want them, which is faster; False = they
            read the file's pages, which stay shared with other programs and can be dropped when memory is short.
        defer_head: with our kernels, large passes compute the output head only for the rows that are read,
            where that is measured to cost less (docs: performance); False = for every row.
        rpc: llama.cpp RPC servers that take layers, ``HOST:PORT`` joined by commas; "" = none (docs: scale).
    """

    n_ctx: int = 0
    n_threads: int = 0
    n_gpu_layers: int = 0
    flash_attn: bool = True
    type_k: str = "f16"
    type_v: str = "f16"
    exact: bool = False
    kernels: str = "auto"
    repack: bool = True
    defer_head: bool = True
    rpc: str = ""

    def __post_init__(self) -> None:
        _require(_is_int(self.n_ctx, 0, 1 << 24), "ctx-size must be between 0 and 16777216", self.n_ctx)
        _require(_is_int(self.n_threads, 0, 512), "threads must be between 0 and 512", self.n_threads)
        _require(_is_int(self.n_gpu_layers, -1, 1 << 16), "n-gpu-layers must be -1 or more", self.n_gpu_layers)
        for value in (self.type_k, self.type_v):
            _require(value in KV_TYPES, f"a KV cache type must be one of {', '.join(KV_TYPES)}", value)
        _require(self.kernels in KERNELS, f"kernels must be one of {', '.join(KERNELS)}", self.kernels)
        if parse_rpc(self.rpc):
            if self.exact:
                raise ConfigError("exact mode holds on this machine's CPU only: drop --rpc or --exact")
            if self.n_gpu_layers == 0:
                raise ConfigError("rpc servers take layers, but n-gpu-layers is 0: add -ngl -1, or how many they take")
        if self.exact and self.n_gpu_layers != 0:
            raise ConfigError("exact mode holds on the CPU only: use --n-gpu-layers 0 or drop --exact")
        if self.exact and not self.flash_attn:
            raise ConfigError("exact mode needs flash attention: drop --no-flash-attn or --exact")
        if not self.flash_attn and self.type_v not in ("f32", "f16", "bf16"):
            raise ConfigError("a quantised V cache needs flash attention: drop --no-flash-attn or use -ctv f16")


def parse_rpc(text: str) -> tuple[str, ...]:
    """Parse ``--rpc``: ``"10.0.0.2:50052,gpu-box:50052"`` -> ("10.0.0.2:50052", "gpu-box:50052"); "" -> ().

    Raises:
        ConfigError: something else, a server twice, or more than llama.cpp takes.
    """
    _require(isinstance(text, str), "rpc must be HOST:PORT, joined by commas", text)
    servers = tuple(part.strip() for part in text.split(",")) if text.strip() else ()
    for server in servers:
        match = re.fullmatch(r"[A-Za-z0-9._-]+:([0-9]{1,5})", server)
        ok = match is not None and 1 <= int(match[1]) <= 65535
        _require(ok, "an rpc server must be a name or IPv4 address and a port, such as 10.0.0.2:50052", server)
    _require(len(set(servers)) == len(servers), "rpc must name every server once", text)
    _require(len(servers) <= MAX_RPC_SERVERS, f"rpc takes at most {MAX_RPC_SERVERS} servers", len(servers))
    return servers


def parse_tree(text: str) -> tuple[int, ...] | None:
    """Parse ``--tree``: ``dynamic`` -> None, ``15,4`` or ``[15,4]`` -> (15, 4).

    Raises:
        ConfigError: neither of the two.
    """
    if text == "dynamic":
        return None
    try:
        return tuple(int(width) for width in text.strip().removeprefix("[").removesuffix("]").split(","))
    except ValueError:
        raise ConfigError(f"tree must be 'dynamic' or widths such as '15,4', but {text!r} was given") from None


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """How drafts are made.

    Attributes:
        drafter: ``auto`` (all free sources in one planned tree), ``esp``, ``none`` (plain decoding through the same
            loop), or one of the rivals ``pld``, ``lade``, ``stand``, ``recycling``, ``suffix``, ``racer``,
            ``draft-model``. Static trees are ESP's alone.
        block_complexity: rows of one pass, root and masks included (paper Eq 7); for ``auto`` the most it may plan.
            None = 60 for ``auto``, 10 for the others.
        masks: mask rows k behind every node, 1..3.
        tree: None = dynamic (Algorithm 1), else static widths (K1, ..., Kk).
        mask_init: ``auto``, ``prompt-mean``, ``vocab-mean``, ``sample``, ``last-k``, ``composed``,
            ``token:TEXT`` or ``sigma:C`` (vocabulary mean + C standard deviations).
        mask_update: lambda of the running update (paper Eq 5); 0 = frozen, None = 0.1 for ``prompt-mean``
            and frozen for the others.
        prune: skip candidates that repeat their parent (paper section 3.5).
        impl: ``efficient`` (layouts cached per tree shape) or ``naive`` (rebuilt every pass; paper Table 4).
        seed: of the ``sample`` initialisation, of ``lade``'s first window and of ``stand``'s draws.
        keep: what a rival learned in one generation serves the next ones of the session.
        occurrence: where ``suffix`` copies from: ``newest`` or ``first``.
        draft_model: the second model of ``draft-model``: a file, or a name as for the target model.
        sources: draft sources of ``auto``, joined by ``+``: suffix, adjacency, esp, last; "" = all.
        learn: whether ``auto`` goes on learning from every pass.
        cost: what ``auto`` takes a pass to cost: as ``measured`` here, or ``flat``, as if rows were free.
        dense: ablation of ``auto``: masks behind every node, as in the paper, instead of behind the likely ends.
        apart: ablation of ``auto``: a candidate counts with its best source alone, so none re-ranks another.
    """

    drafter: str = "auto"
    block_complexity: int | None = None
    masks: int = 1
    tree: tuple[int, ...] | None = None
    mask_init: str = "auto"
    mask_update: float | None = None
    prune: bool = True
    impl: str = "efficient"
    seed: int = 0
    keep: bool = False
    occurrence: str = "newest"
    draft_model: str | None = None
    sources: str = ""
    learn: bool = True
    cost: str = "measured"
    dense: bool = False
    apart: bool = False

    def __post_init__(self) -> None:
        _require(self.drafter in DRAFTERS, f"drafter must be one of {', '.join(DRAFTERS)}", self.drafter)
        _require(_is_int(self.masks, 1, 3), "masks must be 1, 2 or 3", self.masks)
        _require(self.impl in IMPLEMENTATIONS, f"impl must be one of {', '.join(IMPLEMENTATIONS)}", self.impl)
        _require(
            self.block_complexity is None or _is_int(self.block_complexity, 1, MAX_BLOCK),
            f"block-complexity must be between 1 and {MAX_BLOCK}",
            self.block_complexity,
        )
        _require(self.occurrence in OCCURRENCES, "occurrence must be newest or first", self.occurrence)
        _require(self.cost in COSTS, "cost must be measured or flat", self.cost)
        wanted = self.sources.split("+") if self.sources else []
        names = f"sources must be some of {', '.join(FUSED_SOURCES)}, joined by +"
        _require(all(name in FUSED_SOURCES for name in wanted), names, self.sources)
        if self.drafter == "draft-model" and not self.draft_model:
            raise ConfigError("drafter draft-model needs a second model: name its file with --draft-model")
        self._check_init()
        if self.mask_update is not None:
            ok = _is_finite(self.mask_update) and 0 <= self.mask_update <= 1
            _require(ok, "mask-update must be between 0 and 1", self.mask_update)
        if self.tree is not None:
            if self.drafter == "auto":
                raise ConfigError("drafter auto plans its trees itself: for fixed widths use --drafter esp")
            self._check_tree(self.tree)

    def _check_init(self) -> None:
        _require(isinstance(self.mask_init, str), "mask-init must be a name", self.mask_init)
        _require(_is_int(self.seed, 0, (1 << 64) - 1), "the drafter's seed must be 0 or more", self.seed)
        name, _, argument = self.mask_init.partition(":")
        if name == "token":
            _require(bool(argument), "mask-init token:TEXT needs a text", self.mask_init)
        elif name == "sigma":
            try:
                ok = math.isfinite(float(argument))
            except ValueError:
                ok = False
            _require(ok, "mask-init sigma:C needs a number", self.mask_init)
        else:
            names = f"mask-init must be one of {', '.join(MASK_INITS)}, token:TEXT or sigma:C"
            _require(self.mask_init in MASK_INITS, names, self.mask_init)

    def _check_tree(self, widths: tuple[int, ...]) -> None:
        _require(isinstance(widths, tuple), "a static tree is a tuple of widths", widths)
        ok = all(_is_int(width, 1, MAX_BLOCK) for width in widths)
        _require(ok and len(widths) > 0, "tree widths must be positive numbers such as 15,4", widths)
        if len(widths) > self.masks:
            raise ConfigError(
                f"a tree of {len(widths)} depths needs {len(widths)} masks, but masks is {self.masks}; "
                f"use --masks {len(widths)} or fewer widths"
            )
        rows = (self.masks + 1) * (1 + sum(widths))
        _require(rows <= MAX_BLOCK, f"(masks + 1) * (1 + sum of widths) must be at most {MAX_BLOCK}", rows)

    @property
    def rows(self) -> int:
        """Block complexity: (k + 1)(1 + sum K) for ESP's static trees, else the setting."""
        if self.drafter == "none":
            return 1
        if self.tree is None or self.drafter != "esp":
            return self.block_complexity or (PLANNED_BLOCK if self.drafter == "auto" else FIXED_BLOCK)
        return (self.masks + 1) * (1 + sum(self.tree))


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """What one generation may do. Sampling defaults are llama.cpp's, except that temperature 0 is the default.

    Attributes:
        max_tokens: tokens to emit at most; None = until the model stops or the context ends.
        stop: texts that end the answer; never part of it.
        temperature: 0 = greedy.
        top_k, top_p, min_p, typical_p: usual filters; 0, 1, 0 and 1 switch them off.
        repeat_penalty, repeat_last_n, presence_penalty, frequency_penalty: over the last n tokens, prompt included;
            -1 = the whole context.
        dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers: DRY.
        logit_bias: token id -> added to its logit; -inf forbids.
        grammar: GBNF text with a ``root`` rule.
        json_schema: JSON schema; excludes ``grammar``.
        seed: of the keyed draw; None = a fresh one, told in the statistics.
        logprobs: None = none; n = log-probability of each token and of the n most likely ones.
        ignore_eos: forbid the end-of-generation tokens.
        prediction: text that the answer may repeat, such as the file it is to edit: one more source for ``auto``.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str | None = None
    json_schema: Mapping[str, Any] | None = None
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    prediction: str | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _require(_is_int(self.max_tokens, 0, 1 << 31), "max-tokens must be between 0 and 2^31", self.max_tokens)
        self._check_kinds()
        if isinstance(self.stop, str):  # one text, as the OpenAI API allows; a str is a sequence of characters
            object.__setattr__(self, "stop", (self.stop,))
        _require(all(_is_text(text) and text for text in self.stop), "stop texts must be non-empty texts", self.stop)
        breakers = self.dry_sequence_breakers
        _require(all(map(_is_text, breakers)), "dry-sequence-breakers must be texts", breakers)
        self._check_filters()
        self._check_penalties()
        if self.seed is not None:
            _require(_is_int(self.seed, 0, (1 << 64) - 1), "seed must be between 0 and 2^64 - 1", self.seed)
        if self.logprobs is not None:
            _require(_is_int(self.logprobs, 0, 100), "logprobs must be between 0 and 100", self.logprobs)
        if self.grammar is not None and self.json_schema is not None:
            raise ConfigError("give either a grammar or a JSON schema, not both")

    def _check_kinds(self) -> None:
        _require(isinstance(self.stop, str | tuple | list), "stop must be a text or a list of texts", self.stop)
        _require(isinstance(self.logit_bias, Mapping), "logit-bias must map token ids to numbers", self.logit_bias)
        ok = self.grammar is None or isinstance(self.grammar, str)
        _require(ok, "a grammar must be a text", self.grammar)
        ok = self.prediction is None or _is_text(self.prediction)
        _require(ok, "a prediction must be a text", self.prediction)

    def _check_filters(self) -> None:
        _require(_is_finite(self.temperature) and 0 <= self.temperature <= 100, "temp must be 0..100", self.temperature)
        _require(_is_int(self.top_k, 0, (1 << 31) - 1), "top-k must be between 0 and 2^31 - 1", self.top_k)
        for name in ("top_p", "min_p", "typical_p"):
            value = getattr(self, name)
            _require(_is_finite(value) and 0 <= value <= 1, f"{name.replace('_', '-')} must be between 0 and 1", value)

    def _check_penalties(self) -> None:
        _require(
            _is_finite(self.repeat_penalty) and self.repeat_penalty > 0,
            "repeat-penalty must be above 0",
            self.repeat_penalty,
        )
        for name in ("presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base"):
            value = getattr(self, name)
            _require(_is_finite(value), f"{name.replace('_', '-')} must be a finite number", value)
        for name in ("repeat_last_n", "dry_penalty_last_n", "dry_allowed_length"):
            value = getattr(self, name)
            _require(_is_int(value, -1, 1 << 24), f"{name.replace('_', '-')} must be -1 or more", value)
        for token_id, bias in self.logit_bias.items():
            ok = _is_int(token_id, 0, (1 << 31) - 1) and (_is_finite(bias) or bias in (math.inf, -math.inf))
            _require(ok, "logit-bias maps token ids to numbers", (token_id, bias))

    @property
    def is_greedy(self) -> bool:
        """No randomness: the largest adjusted logit wins."""
        return self.temperature == 0
