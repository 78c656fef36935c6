"""Mask vectors: the raw input embeddings that probe the target model (ESP paper section 3.2, Eq 4 and Eq 5).

A mask row carries no token. Its vector decides how well the model's logits behind it guess the token two places
after the owner, so the initialisation is chosen per model (``drafters.calibrate``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from esp_edge.errors import ConfigError, PromptError
from esp_edge.tree import FloatArray, Int32Array

__all__ = ["ComposedMasks", "Embeddings", "MaskVectors", "SlotGuesser", "Tokenize", "make_masks"]

Tokenize = Callable[[str], Sequence[int]]
_Start = Callable[[Sequence[int]], FloatArray]

PROMPT_MEAN_UPDATE = 0.1  # lambda of Eq 5
_PROMPT_CHUNK = 256  # rows of the embedding table in memory at once
_MAX_SUFFIX = 8
# How often the token after the newest match of this length is right (measured on Spec-Bench prompts; 8 = 8 or more).
_SUFFIX_CONFIDENCE = (0.0, 0.24, 0.49, 0.62, 0.68, 0.80, 0.80, 0.80, 0.93)


class Embeddings(Protocol):
    """The model's token embeddings, exactly as llama.cpp feeds them to the first layer."""

    @property
    def n_embd(self) -> int:
        """Length of a row."""

    @property
    def n_vocab(self) -> int:
        """Number of rows."""

    def rows(self, token_ids: Sequence[int] | Int32Array) -> FloatArray:
        """float32[len(token_ids), n_embd]."""

    def mean(self) -> FloatArray:
        """float32[n_embd], mean over the vocabulary; computed once and cached."""

    def std(self) -> FloatArray:
        """float32[n_embd], standard deviation over the vocabulary, per dimension; cached like the mean."""


class MaskVectors:
    """The k mask vectors of one generation: an initialisation and the running update.

    Lifecycle: ``begin(prompt)``, then ``commit(tokens)`` after every pass, the prefill's included, so the vectors
    of a block already contain its root (algorithms A.2). Rejected drafts never enter.

    Attributes:
        guess_width: logits per node that ``learn`` wants, best first; 0 = ``learn`` need not be called.
    """

    guess_width = 0

    def __init__(self, embeddings: Embeddings, k: int, start: _Start, update: float) -> None:
        self._embeddings = embeddings
        self._start = start
        self._update = update
        self._vectors: FloatArray = np.zeros((k, embeddings.n_embd), np.float32)

    @property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""
        return self._embeddings.n_vocab

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a generation from the whole prompt, chat template included.

        Raises:
            PromptError: the prompt has no token.
        """
        if len(prompt_ids) == 0:
            raise PromptError("mask vectors need a prompt of at least one token, but it has none; give some text")
        self._vectors = self._start(prompt_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Running update (Eq 5), once a token in commit order: ``m <- m + lambda (e - m)``, here in closed form."""
        n = len(token_ids)
        if self._update == 0 or n == 0:
            return
        keep = 1.0 - self._update
        weights = self._update * keep ** np.arange(n - 1, -1, -1, dtype=np.float64)
        news = weights.astype(np.float32) @ self._embeddings.rows(token_ids)
        # a new array: trees of earlier passes keep the vectors they were built with
        self._vectors = np.float32(keep**n) * self._vectors + news

    def vectors(self) -> FloatArray:
        """float32[k, n_embd]; the same object until the next ``begin`` or effective ``commit``."""
        return self._vectors

    def for_tree(self, token_ids: Int32Array, parents: Int32Array, masks: Int32Array) -> FloatArray | None:
        """``mask_vectors`` of a draft tree: float32[max(masks), n_embd] shared by all owners; None without masks.

        Never more rows than the largest owner uses: that keeps shared vectors and one-a-row vectors apart.
        """
        del token_ids, parents
        most = max(masks.tolist())  # quicker than numpy for the few nodes of a tree
        return self._vectors[:most] if most else None

    def learn(self, token_ids: Int32Array, ids: Int32Array, log_probs: FloatArray) -> None:
        """Nothing to learn: these vectors do not depend on what the model answered."""


class ComposedMasks(MaskVectors):
    """One vector a mask row: the expected embedding of what we already guess for its slot.

    ``m = sum_x p(x) e(x) + (1 - sum_x p(x)) * base`` with the guesses of ``SlotGuesser`` and the vocabulary mean
    as base, so a mask behind a token with no guess is the plain base.
    """

    guess_width = 8

    def __init__(self, embeddings: Embeddings, k: int, update: float) -> None:
        super().__init__(embeddings, k, lambda _: np.tile(embeddings.mean(), (k, 1)), update)
        self._guesser = SlotGuesser()

    def begin(self, prompt_ids: Sequence[int]) -> None:
        super().begin(prompt_ids)
        self._guesser.begin(prompt_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        super().commit(token_ids)
        self._guesser.commit(token_ids)

    def learn(self, token_ids: Int32Array, ids: Int32Array, log_probs: FloatArray) -> None:
        """Note the best next tokens of every node of a pass; ids and log_probs are [n_nodes, guess_width]."""
        self._guesser.learn(token_ids, ids, log_probs)

    def for_tree(self, token_ids: Int32Array, parents: Int32Array, masks: Int32Array) -> FloatArray | None:
        """float32[n_mask_rows, n_embd] in row order; None without masks."""
        slots: list[int] = []  # which mask of its owner a row is
        rows: list[int] = []  # row of every guessed token
        tokens: list[int] = []
        probs: list[float] = []
        paths: list[list[int]] = [[]]  # tokens between the root and each node; the root is history already
        nodes = zip(token_ids.tolist(), parents.tolist(), masks.tolist(), strict=True)
        for node, (token, parent, count) in enumerate(nodes):
            if node:
                paths.append([*paths[parent], token])
            for slot, guess in enumerate(self._guesser.guess(paths[node], count)):
                rows += [len(slots)] * len(guess)
                tokens += guess.keys()
                probs += guess.values()
                slots.append(slot)
        if not slots:
            return None
        return self._mix(np.array(slots), np.array(rows, np.intp), tokens, np.array(probs, np.float32))

    def _mix(
        self, slots: npt.NDArray[np.intp], rows: npt.NDArray[np.intp], tokens: list[int], probs: FloatArray
    ) -> FloatArray:
        weights = np.zeros((len(slots), len(tokens)), np.float32)
        weights[rows, np.arange(len(tokens))] = probs
        rest = 1.0 - weights.sum(axis=1, keepdims=True)
        mixed: FloatArray = np.maximum(rest, 0.0) * self._vectors[slots]
        if tokens:
            mixed += weights @ self._embeddings.rows(tokens)
        return mixed


class SlotGuesser:
    """Guesses the tokens after a node from what this generation has already shown.

    Two sources: copying (the newest earlier occurrence of the longest suffix, with a confidence by its length) and
    adjacency (the best next tokens the model gave the last time this token was a row). Later rows overwrite.

    >>> guesser = SlotGuesser()
    >>> guesser.begin([1, 2, 3, 9, 2])
    >>> guesser.guess([], 2)  # after "2" came "3 9": match of length 1, then of length 2
    [{3: 0.24}, {9: 0.1176}]
    """

    def __init__(self) -> None:
        self._history: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> where its newest continuation stands
        self._adjacent: dict[int, tuple[list[int], list[float]]] = {}

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Forget the last generation and read the prompt."""
        self._history.clear()
        self._next.clear()
        self._adjacent.clear()
        self.commit(prompt_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens; every n-gram of up to 8 tokens before each now has a known continuation."""
        history = self._history
        for token in token_ids:
            end = len(history)
            for start in range(end - 1, max(end - _MAX_SUFFIX, 0) - 1, -1):
                self._next[tuple(history[start:end])] = end
            history.append(int(token))

    def learn(self, token_ids: Int32Array, ids: Int32Array, log_probs: FloatArray) -> None:
        """Store the best next tokens of every row token: ids and log_probs are [len(token_ids), m], best first."""
        rows = zip(token_ids.tolist(), ids.tolist(), np.exp(log_probs).tolist(), strict=True)
        self._adjacent.update((token, (nexts, probs)) for token, nexts, probs in rows)

    def guess(self, path: Sequence[int], n_slots: int) -> list[dict[int, float]]:
        """For each of the slots after ``history + path``: token -> probability, at most 1 in sum."""
        if n_slots == 0:
            return []
        context = [*self._history[-_MAX_SUFFIX:], *path]
        copied = self._copied(context, n_slots)
        last, sure = context[-1], 1.0
        slots: list[dict[int, float]] = []
        for slot in range(n_slots):
            guess = self._mixed(copied[slot] if slot < len(copied) else None, last, sure)
            slots.append(guess)
            last = max(guess, key=guess.__getitem__, default=-1)  # -1: no token, so no adjacency
            sure = guess.get(last, 0.0)
        return slots

    def _mixed(self, copied: tuple[int, float] | None, last: int, sure: float) -> dict[int, float]:
        """Confidence goes to the copied token, the rest to the adjacency of the token before, if that is right."""
        token, confidence = copied or (-1, 0.0)
        ids, probs = self._adjacent.get(last, ([], []))
        guess = {x: (1.0 - confidence) * sure * p for x, p in zip(ids, probs, strict=True)}
        if copied:
            guess[token] = guess.get(token, 0.0) + confidence
        return guess

    def _copied(self, context: list[int], n_slots: int) -> list[tuple[int, float]]:
        """Tokens after the newest match of the longest suffix, with the probability that the run holds so far."""
        length, where = 0, 0
        while length < min(_MAX_SUFFIX, len(context)):
            found = self._next.get(tuple(context[-length - 1 :]))
            if found is None:  # a longer n-gram cannot occur where a shorter one does not
                break
            length, where = length + 1, found
        run = self._history[where : where + n_slots] if length else []
        confidence, copied = 1.0, []
        for offset, token in enumerate(run):
            confidence *= _SUFFIX_CONFIDENCE[min(length + offset, _MAX_SUFFIX)]
            copied.append((token, confidence))
        return copied


def make_masks(
    init: str,
    k: int,
    embeddings: Embeddings,
    update: float | None = None,
    *,
    seed: int = 0,
    tokenize: Tokenize | None = None,
) -> MaskVectors:
    """Mask vectors for an initialisation by name.

    ====================  ==========================================================================
    ``prompt-mean``       mean of the prompt's embeddings (Eq 4)
    ``vocab-mean``        mean of the whole embedding table
    ``sample``            independent normal draws with the table's mean and per-dimension deviation
    ``last-k``            embeddings of the last k prompt tokens; a shorter prompt repeats its first
    ``token:TEXT``        mean of the embeddings of the tokens of TEXT
    ``sigma:C``           table mean + C standard deviations (paper G.8)
    ``composed``          what is already guessed for each slot (``ComposedMasks``)
    ====================  ==========================================================================

    Args:
        k: number of vectors.
        update: lambda of Eq 5; 0 = frozen, None = 0.1 for ``prompt-mean`` and frozen for the others.
        seed: of ``sample``.
        tokenize: text -> token ids without special tokens; only ``token:TEXT`` needs it.

    Raises:
        ConfigError: unknown name, unresolved ``auto``, or an argument that cannot be used.
    """
    if update is None:
        update = PROMPT_MEAN_UPDATE if init == "prompt-mean" else 0.0
    if init == "composed":
        return ComposedMasks(embeddings, k, update)
    if init == "prompt-mean":
        return MaskVectors(embeddings, k, lambda ids: np.tile(_prompt_mean(ids, embeddings), (k, 1)), update)
    if init == "last-k":
        return MaskVectors(embeddings, k, lambda ids: embeddings.rows(_last_k(ids, k)), update)
    constant = _constant_vectors(init, k, embeddings, seed, tokenize)
    return MaskVectors(embeddings, k, lambda _: constant, update)


def _constant_vectors(init: str, k: int, embeddings: Embeddings, seed: int, tokenize: Tokenize | None) -> FloatArray:
    """float32[k, n_embd] for the initialisations that do not look at the prompt."""
    name, _, argument = init.partition(":")
    if init == "vocab-mean":
        return np.tile(embeddings.mean(), (k, 1))
    if init == "sample":
        draws = np.random.default_rng(seed).standard_normal((k, embeddings.n_embd), np.float32)
        return embeddings.mean() + draws * embeddings.std()
    if name == "token":
        return np.tile(_text_mean(argument, embeddings, tokenize), (k, 1))
    if name == "sigma":
        return np.tile(embeddings.mean() + _number(argument) * embeddings.std(), (k, 1))
    raise ConfigError(
        f"mask-init must be a known, resolved initialisation, but {init!r} was given; calibrate 'auto' first"
    )


def _prompt_mean(token_ids: Sequence[int], embeddings: Embeddings) -> FloatArray:
    """Eq 4 in bounded memory: float32[n_embd]."""
    total = np.zeros(embeddings.n_embd, np.float64)
    for first in range(0, len(token_ids), _PROMPT_CHUNK):
        total += embeddings.rows(token_ids[first : first + _PROMPT_CHUNK]).sum(axis=0, dtype=np.float64)
    return (total / len(token_ids)).astype(np.float32)


def _last_k(token_ids: Sequence[int], k: int) -> list[int]:
    last = [int(token) for token in token_ids[-k:]]
    return [last[0]] * (k - len(last)) + last


def _text_mean(text: str, embeddings: Embeddings, tokenize: Tokenize | None) -> FloatArray:
    if tokenize is None:
        raise ConfigError("mask-init token:TEXT needs the model's tokenizer, but none was given; pass tokenize")
    token_ids = tokenize(text)
    if len(token_ids) == 0:
        raise ConfigError(f"mask-init token:TEXT needs a text with tokens, but {text!r} has none; use another text")
    return _prompt_mean(token_ids, embeddings)


def _number(argument: str) -> np.float32:
    try:
        with np.errstate(over="ignore"):
            value = np.float32(argument)
    except ValueError:
        value = np.float32("nan")
    if not np.isfinite(value):
        raise ConfigError(f"mask-init sigma:C needs a number, but {argument!r} was given; try sigma:5")
    return value
