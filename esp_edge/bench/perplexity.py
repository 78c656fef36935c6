"""Perplexity of a model on a text by llama.cpp's protocol (tools/perplexity in its sources).

The text is cut into windows of ``n_ctx`` tokens that do not overlap. Where the model wants a BOS token it takes the
place of each window's first one. The first half of a window is context only, and so is the first token of the second
half; the others, ``n_ctx - 1 - n_ctx // 2``, are scored. Perplexity is exp of their mean negative log-likelihood.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from esp_edge.bench.questions import Question
from esp_edge.bench.results import write_json
from esp_edge.config import MAX_EXACT_BLOCK, ModelConfig
from esp_edge.errors import ConfigError, PromptError
from esp_edge.models.cache import fingerprint
from esp_edge.models.model import TargetModel
from esp_edge.models.tokenizer import Tokenizer
from esp_edge.step import Step
from esp_edge.tree import DraftTree

__all__ = ["Corpus", "Perplexity", "perplexity", "questions_text", "read_stored", "relative", "store", "windows_of"]

LEAST_CONTEXT = 8
LEAST_WINDOWS = 2  # as llama.cpp asks for
CHAIN_ROWS = MAX_EXACT_BLOCK  # as decode passes have: from 64 rows on llama.cpp's attention is another kernel
DIGITS = 6  # of a stored likelihood, and of a fresh one, so that both give the same perplexity


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text and how much of it is read.

    Attributes:
        name: for reports and messages.
        text: plain; special tokens in it stay text.
        n_ctx: tokens of a window.
        windows: at most so many, from the beginning; 0 = all.
    """

    name: str
    text: str
    n_ctx: int = 512
    windows: int = 0

    def __post_init__(self) -> None:
        if self.n_ctx < LEAST_CONTEXT:
            raise ConfigError(f"perplexity needs windows of {LEAST_CONTEXT} tokens or more, but {self.n_ctx} was given")

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the result, JSON-ready: the text by its digest."""
        digest = hashlib.blake2b(self.text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        return {"name": self.name, "digest": digest, "n_ctx": self.n_ctx, "windows": self.windows}


@dataclass(frozen=True, slots=True)
class Perplexity:
    """A result.

    Attributes:
        nll: negative log-likelihood of each scored token, natural logarithm, in the order of the text.
        windows: how many were read.
    """

    nll: tuple[float, ...]
    windows: int

    @property
    def value(self) -> float:
        """exp of the mean."""
        return math.exp(float(np.mean(self.nll)))

    @property
    def error(self) -> float:
        """Standard error of the value, its tokens taken as independent (llama.cpp's ``+/-``)."""
        return self.value * _standard_error(self.nll)

    @property
    def n_tokens(self) -> int:
        """Scored tokens."""
        return len(self.nll)


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values) / math.sqrt(len(values) - 1))


def relative(found: Perplexity, base: Perplexity) -> tuple[float, float]:
    """How many times ``base``'s perplexity another one is, and the standard error of that.

    Both read the same tokens, so the error is that of the differences token by token: much smaller than what the errors
    of the two values suggest (llama.cpp's ``PPL(Q)/PPL(base)``).

    Raises:
        ConfigError: they scored different numbers of tokens.
    """
    if found.n_tokens != base.n_tokens:
        raise ConfigError(
            f"perplexities of one text are needed, but one has {found.n_tokens} scored tokens and the other "
            f"{base.n_tokens}: compare models of one vocabulary"
        )
    difference = np.subtract(found.nll, base.nll)
    ratio = math.exp(float(difference.mean()))
    return ratio, ratio * _standard_error(difference.tolist())


# -- the text --------------------------------------------------------------------------------------------------------


def questions_text(questions: Sequence[Question]) -> str:
    """All turns as one text: the first question of every category, then the second of each, and so on.

    So that the first windows have something of every category.
    """
    seen: dict[str, int] = {}
    places = []
    for question in questions:
        seen[question.category] = seen.get(question.category, 0) + 1
        places.append(seen[question.category])
    ordered = sorted(zip(places, questions, strict=True), key=lambda pair: pair[0])
    return "\n\n".join(turn for _, question in ordered for turn in question.turns)


def windows_of(tokenizer: Tokenizer, corpus: Corpus) -> list[list[int]]:
    """The windows as token ids, ``n_ctx`` each; what is left at the end is dropped.

    Raises:
        PromptError: the text has fewer than two windows.
    """
    ids = tokenizer.encode(corpus.text, add_special=True)
    n_ctx, least = corpus.n_ctx, LEAST_WINDOWS * corpus.n_ctx
    if len(ids) < least:
        raise PromptError(
            f"perplexity over windows of {n_ctx} tokens needs a text of at least {least} tokens, but {corpus.name} has "
            f"{len(ids)}; give a longer text or smaller windows"
        )
    n = min(len(ids) // n_ctx, corpus.windows or len(ids))
    windows = [ids[i * n_ctx : (i + 1) * n_ctx] for i in range(n)]
    if tokenizer.adds_bos and tokenizer.bos >= 0:
        windows = [[tokenizer.bos, *window[1:]] for window in windows]
    return windows


# -- measuring -------------------------------------------------------------------------------------------------------


def perplexity(model: TargetModel, corpus: Corpus, *, progress: Callable[[int, int], None] | None = None) -> Perplexity:
    """Read the windows, each on an empty KV cache: its first half as prefill, its second as chains of rows.

    Args:
        progress: called with (windows done, windows).

    Raises:
        PromptError: the text is too short.
        ConfigError: windows longer than the model was trained for.
        DecodeError: llama.cpp failed.
    """
    trained = int(model.header.hyperparameter("context_length") or 0)
    if trained and corpus.n_ctx > trained:
        raise ConfigError(
            f"the model was trained for {trained} tokens, but windows of {corpus.n_ctx} were asked for; lower it"
        )
    windows = windows_of(model.tokenizer, corpus)
    nll: list[float] = []
    with closing(model.new_context(1, n_ctx=corpus.n_ctx)) as context:
        step = Step(context)
        for n, window in enumerate(windows, start=1):
            step.reset()
            nll += _window(step, window, one_by_one=not model.capability.speculation)
            if progress is not None:
                progress(n, len(windows))
    return Perplexity(tuple(nll), len(windows))


def _window(step: Step, ids: Sequence[int], *, one_by_one: bool) -> Iterator[float]:
    """Negative log-likelihood of each token behind the first half; the window's last token is read only as a target."""
    first, end = len(ids) // 2, len(ids) - 1
    step.prefill(ids[:first])
    while first < end:
        width = 1 if one_by_one else min(CHAIN_ROWS, step.max_rows, end - first)
        outputs = step.run(DraftTree.from_lists(ids[first : first + width], range(-1, width - 1)))
        for row in range(width):
            yield round(-outputs.logprob(row, ids[first + row + 1]), DIGITS)
        step.commit(range(1, width))
        first += width


# -- results kept in a directory -------------------------------------------------------------------------------------


def _file(folder: Path, path: Path, corpus: Corpus, config: ModelConfig) -> Path:
    """Named by everything that decides the result: the model file, the text, the windows, how the model is loaded."""
    loaded = {name: value for name, value in asdict(config).items() if name not in ("n_ctx", "n_threads")}
    key = json.dumps([fingerprint(path), corpus.settings | {"name": ""}, loaded])
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return folder / f"perplexity-{path.name.removesuffix('.gguf')}-{digest}.json"


def read_stored(folder: Path, path: Path, corpus: Corpus, config: ModelConfig) -> Perplexity | None:
    """The result :func:`store` left for this model file, text and settings; None when there is none."""
    try:
        document = json.loads(_file(folder, path, corpus, config).read_text("utf-8"))
        return Perplexity(tuple(map(float, document["nll"])), int(document["windows"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(folder: Path, path: Path, corpus: Corpus, config: ModelConfig, found: Perplexity) -> None:
    """Keep a result for the next run."""
    document = {"text": corpus.settings, "perplexity": found.value, "error": found.error, **asdict(found)}
    write_json(_file(folder, path, corpus, config), document)
