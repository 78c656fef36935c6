"""The flags that several commands share, each declared once.

A command takes the dataclasses below as parameters; :func:`expand_options` turns every field into a flag. Names are
llama.cpp's where it has one, defaults come from :mod:`esp_edge.config`, and every flag is also read from the
environment: ``--ctx-size`` from ``ESP_EDGE_CTX_SIZE``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from esp_edge.cli.inputs import read_text
from esp_edge.config import DraftConfig, GenerationParams, ModelConfig, parse_tree
from esp_edge.errors import ConfigError, GrammarError

__all__ = [
    "DraftOptions",
    "LoadOptions",
    "ModelName",
    "SamplingOptions",
    "command_line_first",
    "expand_options",
    "option",
    "with_tree",
]

ENV_PREFIX = "ESP_EDGE_"
_MODEL, _DRAFT, _PARAMS = ModelConfig(), DraftConfig(), GenerationParams()


def option(*names: str, text: str, panel: str | None = None, env: bool = True, **more: Any) -> Any:
    """A typer option whose environment variable is named after its first long name.

    Args:
        names: as on the command line, ``-c`` and ``--ctx-size``.
        text: for ``--help``.
        panel: heading it stands under there.
        env: False = not from the environment.
        more: passed to ``typer.Option``.
    """
    long_name = next(name for name in names if name.startswith("--")).split("/")[0]
    envvar = ENV_PREFIX + long_name[2:].upper().replace("-", "_") if env else None
    return typer.Option(*names, help=text, envvar=envvar, show_envvar=False, rich_help_panel=panel, **more)


_load = functools.partial(option, panel="Model")
_sample = functools.partial(option, panel="Sampling")
_spec = functools.partial(option, panel="Speculation")

ModelName = Annotated[
    str,
    _load("-m", "--model", "-hf", "--hf-repo", text="File, owner/repo[:QUANT] on Hugging Face, or smollm2 (bundled)."),
]


def expand_options(function: Callable[..., None]) -> Callable[..., None]:
    """Replace every dataclass parameter of a command by its fields, for typer; the rest comes first in ``--help``."""
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    groups = {p.name: hints[p.name] for p in parameters if dataclasses.is_dataclass(hints[p.name])}
    flags = [p.replace(annotation=hints[p.name]) for p in parameters if p.name not in groups]
    for group in groups.values():
        flags += _fields(group)

    @functools.wraps(function)
    def command(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        function(**values)

    keyword_only = [flag.replace(kind=inspect.Parameter.KEYWORD_ONLY) for flag in flags]
    command.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    command.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return command


# Flags that exclude each other: the one nearest to the user counts, the others are as if they were not given.
_RIVALS: tuple[dict[str, Any], ...] = (
    {"flash_attn": "on", "no_flash_attn": False},
    {"grammar": None, "grammar_file": None, "json_schema": None, "json_schema_file": None},
    {"prompt": None, "file": None, "jsonl": None},
    {"raw": False, "system": None},
)
_SOURCES = ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP")


def command_line_first(values: Mapping[str, Any], source: Callable[[str], str]) -> dict[str, Any]:
    """Values of a command without those that clash with one from nearer: command line > environment > file.

    Args:
        values: of all its parameters.
        source: of a parameter, in click's words.
    """
    found = dict(values)
    if "stop" in found and source("stop") == "DEFAULT_MAP" and os.environ.get("ESP_EDGE_STOP"):
        found["stop"] = None  # SamplingOptions reads that variable
    for rivals in _RIVALS:
        sources = {name: source(name) for name in rivals if name in found}
        nearest = next((kind for kind in _SOURCES if kind in sources.values()), None)
        found |= {name: rivals[name] for name, kind in sources.items() if kind != nearest}
    return found


def _fields(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(field.name, kind, default=_default(field), annotation=hints[field.name])
        for field in dataclasses.fields(group)
    ]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How the model is loaded: :class:`esp_edge.config.ModelConfig`."""

    ctx_size: Annotated[int, _load("-c", "--ctx-size", text="Context in tokens; 0 = as trained, at most 4096.")] = (
        _MODEL.n_ctx
    )
    threads: Annotated[int, _load("-t", "--threads", text="CPU threads; 0 = one a physical core.")] = _MODEL.n_threads
    n_gpu_layers: Annotated[int, _load("-ngl", "--n-gpu-layers", text="Layers on the GPU; -1 = all.")] = (
        _MODEL.n_gpu_layers
    )
    flash_attn: Annotated[str, _load("-fa", "--flash-attn", metavar="on|off", text="Flash attention.")] = "on"
    no_flash_attn: Annotated[bool, _load("--no-flash-attn", text="Same as -fa off.")] = False
    cache_type_k: Annotated[str, _load("-ctk", "--cache-type-k", text="KV cache type of K.")] = _MODEL.type_k
    cache_type_v: Annotated[str, _load("-ctv", "--cache-type-v", text="KV cache type of V.")] = _MODEL.type_v
    exact: Annotated[bool, _load("--exact", text="Bit-exact decoding on the CPU.")] = _MODEL.exact
    kernels: Annotated[
        str,
        _load(
            "--kernels",
            metavar="auto|fast|stock",
            text="CPU kernels: ours, where they work (fast), llama.cpp's (stock), or what is measured as faster.",
        ),
    ] = _MODEL.kernels
    no_repack: Annotated[
        bool, _load("-nr", "--no-repack", text="Our kernels read the file's own pages: slower, and shared memory.")
    ] = False
    no_defer_head: Annotated[
        bool, _load("--no-defer-head", text="Compute the output head for all rows of a pass, read or not.")
    ] = False
    rpc: Annotated[
        str, _load("--rpc", metavar="HOST:PORT,...", text="llama.cpp RPC servers that take layers; with -ngl.")
    ] = _MODEL.rpc

    def config(self) -> ModelConfig:
        """Checked settings.

        Raises:
            ConfigError: out of range or contradictory.
        """
        if self.flash_attn not in ("on", "off"):
            raise typer.BadParameter(f"on or off is needed, but {self.flash_attn!r} was given", param_hint="'-fa'")
        return ModelConfig(
            n_ctx=self.ctx_size,
            n_threads=self.threads,
            n_gpu_layers=self.n_gpu_layers,
            flash_attn=self.flash_attn == "on" and not self.no_flash_attn,
            type_k=self.cache_type_k,
            type_v=self.cache_type_v,
            exact=self.exact,
            kernels=self.kernels,
            repack=not self.no_repack,
            defer_head=not self.no_defer_head,
            rpc=self.rpc,
        )


@dataclasses.dataclass(frozen=True)
class DraftOptions:
    """How drafts are made: :class:`esp_edge.config.DraftConfig`."""

    drafter: Annotated[
        str,
        _spec(
            "--drafter",
            metavar="NAME",
            text="auto, esp, none (plain decoding), pld, lade, stand, recycling, suffix, racer or draft-model.",
        ),
    ] = _DRAFT.drafter
    block_complexity: Annotated[
        int | None,
        _spec("--block-complexity", text="Rows of one pass, root and masks included. (default: 10; auto: at most 60)"),
    ] = None
    masks: Annotated[
        int | None, _spec("--masks", text="Mask rows behind every node, 1..3. (default: 1, or one a tree width)")
    ] = None
    tree: Annotated[str, _spec("--tree", metavar="dynamic|K1,K2", text="dynamic, or static widths such as 15,4.")] = (
        "dynamic"
    )
    mask_init: Annotated[
        str,
        _spec(
            "--mask-init",
            text="auto, prompt-mean, vocab-mean, sample, last-k, composed, token:TEXT or sigma:C.",
        ),
    ] = _DRAFT.mask_init
    mask_update: Annotated[
        float | None, _spec("--mask-update", text="Running update, 0 (frozen) to 1. (default: as the init wants)")
    ] = _DRAFT.mask_update
    prune: Annotated[bool, _spec("--prune/--no-prune", text="Skip candidates that repeat their parent.")] = _DRAFT.prune
    impl: Annotated[
        str, _spec("--impl", metavar="efficient|naive", text="naive rebuilds the tree layout every pass.")
    ] = _DRAFT.impl
    keep: Annotated[
        bool, _spec("--keep/--no-keep", text="Drafters other than esp: what one answer taught serves the next ones.")
    ] = _DRAFT.keep
    occurrence: Annotated[
        str, _spec("--occurrence", metavar="newest|first", text="Where --drafter suffix copies from.")
    ] = _DRAFT.occurrence
    draft_seed: Annotated[
        int, _spec("--draft-seed", text="Of draws that only make drafts: --mask-init sample, lade and stand.")
    ] = _DRAFT.seed
    sources: Annotated[
        str, _spec("--sources", metavar="A+B", text="Drafter auto: suffix, adjacency, esp, last. (default: all)")
    ] = _DRAFT.sources
    draft_model: Annotated[
        str | None,
        _spec("--draft-model", "-md", "--model-draft", text="Second, smaller model for --drafter draft-model."),
    ] = _DRAFT.draft_model

    def config(self) -> DraftConfig:
        """Checked settings.

        Raises:
            ConfigError: out of range or contradictory.
        """
        tree = parse_tree(self.tree)
        masks = self.masks if self.masks is not None else len(tree) if tree else _DRAFT.masks
        return DraftConfig(
            drafter=_drafter_of(self.drafter, tree),
            block_complexity=self.block_complexity,
            masks=masks,
            tree=tree,
            mask_init=self.mask_init,
            mask_update=self.mask_update,
            prune=self.prune,
            impl=self.impl,
            seed=self.draft_seed,
            keep=self.keep,
            occurrence=self.occurrence,
            draft_model=self.draft_model,
            sources=self.sources,
        )


def _drafter_of(drafter: str, tree: tuple[int, ...] | None) -> str:
    """Fixed widths are esp's: who asks for them and names no drafter means that one."""
    return "esp" if tree is not None and drafter == "auto" else drafter


def with_tree(draft: DraftConfig, text: str) -> DraftConfig:
    """The same settings with another tree, and as many masks as its depths need.

    Raises:
        ConfigError: neither ``dynamic`` nor usable widths.
    """
    tree = parse_tree(text)
    drafter = _drafter_of(draft.drafter, tree)
    return dataclasses.replace(draft, drafter=drafter, tree=tree, masks=max(draft.masks, len(tree or ())))


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """What an answer may be: :class:`esp_edge.config.GenerationParams`."""

    max_tokens: Annotated[int, _sample("-n", "--max-tokens", text="Tokens at most; -1 = until the end.")] = -1
    temp: Annotated[float, _sample("--temp", text="Temperature; 0 = greedy.")] = _PARAMS.temperature
    top_k: Annotated[int, _sample("--top-k", text="Keep the K likeliest; 0 = off.")] = _PARAMS.top_k
    top_p: Annotated[float, _sample("--top-p", text="Nucleus; 1 = off.")] = _PARAMS.top_p
    min_p: Annotated[float, _sample("--min-p", text="Relative to the likeliest; 0 = off.")] = _PARAMS.min_p
    typical: Annotated[float, _sample("--typical", text="Locally typical; 1 = off.")] = _PARAMS.typical_p
    repeat_penalty: Annotated[float, _sample("--repeat-penalty", text="Divides logits of seen tokens; 1 = off.")] = (
        _PARAMS.repeat_penalty
    )
    repeat_last_n: Annotated[
        int, _sample("--repeat-last-n", text="Tokens the penalties look back; -1 = the whole context.")
    ] = _PARAMS.repeat_last_n
    presence_penalty: Annotated[float, _sample("--presence-penalty", text="Off logits of seen tokens; 0 = off.")] = (
        _PARAMS.presence_penalty
    )
    frequency_penalty: Annotated[
        float, _sample("--frequency-penalty", text="Off logits, once a sighting; 0 = off.")
    ] = _PARAMS.frequency_penalty
    dry_multiplier: Annotated[float, _sample("--dry-multiplier", text="Strength of DRY; 0 = off.")] = (
        _PARAMS.dry_multiplier
    )
    dry_base: Annotated[float, _sample("--dry-base", text="Growth of DRY a token.")] = _PARAMS.dry_base
    dry_allowed_length: Annotated[int, _sample("--dry-allowed-length", text="Repeats shorter than this are free.")] = (
        _PARAMS.dry_allowed_length
    )
    dry_penalty_last_n: Annotated[
        int, _sample("--dry-penalty-last-n", text="Tokens DRY looks back; -1 = the whole context.")
    ] = _PARAMS.dry_penalty_last_n
    seed: Annotated[int, _sample("-s", "--seed", text="Same seed, same text; -1 = a fresh one.")] = -1
    logit_bias: Annotated[
        list[str] | None,
        _sample("--logit-bias", metavar="ID(+|-)BIAS", text="Such as 15043+1 or 15043-inf; may be repeated."),
    ] = None
    stop: Annotated[
        list[str] | None,
        _sample(
            "--stop",
            env=False,  # the environment would be split at spaces
            text="Text that ends the answer; may be repeated. (ESP_EDGE_STOP: a text or a JSON array)",
        ),
    ] = None
    grammar: Annotated[str | None, _sample("--grammar", text="GBNF text with a root rule.")] = None
    grammar_file: Annotated[Path | None, _sample("--grammar-file", text="File with such a text.")] = None
    json_schema: Annotated[
        str | None, _sample("-j", "--json-schema", metavar="TEXT_OR_FILE", text="JSON schema of the answer.")
    ] = None
    json_schema_file: Annotated[Path | None, _sample("--json-schema-file", text="File with such a schema.")] = None
    logprobs: Annotated[
        int | None, _sample("--logprobs", text="With --json: log-probabilities of each token and its N rivals.")
    ] = None
    ignore_eos: Annotated[bool, _sample("--ignore-eos", text="Go on after the end of the answer.")] = False
    prediction_file: Annotated[
        Path | None,
        _sample("--prediction-file", text="File with text that the answer may repeat; drafter auto uses it."),
    ] = None

    def params(self) -> GenerationParams:
        """Checked settings.

        Raises:
            ConfigError: out of range or contradictory.
            PromptError: a file cannot be read.
            GrammarError: a schema that is no JSON object.
        """
        if not -1 <= self.max_tokens <= 1 << 31:
            wanted = f"max-tokens must be between 0 and {1 << 31}, or -1 for no limit"
            raise ConfigError(f"{wanted}, but {self.max_tokens} was given")
        return GenerationParams(
            max_tokens=None if self.max_tokens == -1 else self.max_tokens,
            stop=tuple(self.stop or stops_from(os.environ.get("ESP_EDGE_STOP", ""))),
            temperature=self.temp,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical,
            repeat_penalty=self.repeat_penalty,
            repeat_last_n=self.repeat_last_n,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            dry_multiplier=self.dry_multiplier,
            dry_base=self.dry_base,
            dry_allowed_length=self.dry_allowed_length,
            dry_penalty_last_n=self.dry_penalty_last_n,
            logit_bias=dict(parse_logit_bias(text) for text in self.logit_bias or ()),
            grammar=_one_of("grammar", self.grammar, self.grammar_file),
            json_schema=self._schema(),
            seed=None if self.seed == -1 else self.seed,
            logprobs=self.logprobs,
            ignore_eos=self.ignore_eos,
            prediction=None if self.prediction_file is None else read_text(self.prediction_file),
        )

    def _schema(self) -> Mapping[str, Any] | None:
        text = self.json_schema
        if text is not None and not text.lstrip().startswith("{") and _is_file(text):
            text = read_text(text)
        text = _one_of("json-schema", text, self.json_schema_file)
        return None if text is None else parse_schema(text)


def _one_of(name: str, text: str | None, file: Path | None) -> str | None:
    if text is not None and file is not None:
        raise ConfigError(f"give either --{name} or --{name}-file, not both")
    return read_text(file) if file is not None else text


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or a NUL in it
        return False


def parse_schema(text: str) -> Mapping[str, Any]:
    """A JSON schema given as text.

    Raises:
        GrammarError: not a JSON object.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it nests too deep" if isinstance(error, RecursionError) else error
        raise GrammarError(f"--json-schema needs a file or JSON text, but it is neither: {reason}") from None
    if not isinstance(schema, dict):
        raise GrammarError("--json-schema needs a JSON object; use {} for any answer in JSON")
    return schema


def parse_logit_bias(text: str) -> tuple[int, float]:
    """``ID(+|-)BIAS`` as llama.cpp writes it.

    >>> parse_logit_bias("15043+1.5"), parse_logit_bias("2-inf")
    ((15043, 1.5), (2, -inf))
    """
    match = re.fullmatch(r"(\d{1,9})([+-].+)", text.strip())
    try:
        if match:
            return int(match[1]), float(match[2])
    except ValueError:
        pass
    what = f"ID(+|-)BIAS such as 15043+1 is needed, but {text!r} was given"
    raise typer.BadParameter(what, param_hint="'--logit-bias'")


def stops_from(text: str) -> Sequence[str]:
    """Stop texts of an environment variable: a JSON array of texts, or the text itself."""
    try:
        stops = json.loads(text)
    except (ValueError, RecursionError):
        stops = None
    if isinstance(stops, list) and all(isinstance(stop, str) for stop in stops):
        return stops
    return [text] if text else []
