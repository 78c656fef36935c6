"""How far a mask row becomes the token it stands for: the paper's Figure 2 and Lemma 3.1, on any model.

A mask behind the root stands in the slot of the bonus token, which nobody knows yet; its logits guess the token after
it. The next pass has that bonus token as its root, at the same position: layer by layer, the cosine between the two
hidden states says how far the model pulled the mask towards the true token. A step counts as accepted when the token
that follows is among the first K of the mask's logits, which is when a tree ``[K]`` would have held it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from esp_edge.config import DraftConfig
from esp_edge.drafters.auto_mask import resolve_mask_init
from esp_edge.errors import ConfigError, ContextLengthError, UnsupportedModelError
from esp_edge.masks import MaskVectors, make_masks
from esp_edge.models.model import TargetModel
from esp_edge.step import Step
from esp_edge.tree import DraftTree, Int32Array

__all__ = ["PROMPTS", "Alignment", "Threshold", "built_in_prompts", "measure", "summarize", "threshold"]

Float64Array = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]
_Seen = tuple[Float64Array, int]  # a step: cosine after each layer, rank of the token after the true one

_PAD = 4  # cells besides prompt and answer: the mask row, and those that exact mode pads
_BIN = 0.05  # width of a bin of cosines
_FORMS = (
    "Write a short story about",
    "Write a poem about",
    "Write the first paragraph of a novel about",
    "Write a letter to a friend about",
    "Write a dialogue between two people about",
    "Write a bedtime story about",
    "Write a diary entry about",
    "Write a humorous sketch about",
    "Write a song about",
    "Write a legend about",
)
_SUBJECTS = (
    "a lighthouse keeper who finds a message in a bottle.",
    "a train that is three hours late.",
    "the last tree in a city.",
    "a cat that moves into a library.",
    "a baker who forgets his best recipe.",
    "a journey across a frozen lake.",
    "an old clock that runs backwards.",
    "a garden that only blooms at night.",
    "two neighbours who have never met.",
    "the first morning of a holiday by the sea.",
)
PROMPTS = tuple(  # any first N of them vary in both
    f"{_FORMS[i % 10]} {_SUBJECTS[(i + i // 10) % 10]}" for i in range(len(_FORMS) * len(_SUBJECTS))
)


def built_in_prompts(n: int) -> list[str]:
    """The first ``n`` creative-writing prompts (Figure 2 of the paper used 100 of that kind).

    Raises:
        ConfigError: fewer than 1 or more than there are.
    """
    if not 1 <= n <= len(PROMPTS):
        raise ConfigError(f"there are {len(PROMPTS)} built-in prompts, but {n} were asked for; give more with a file")
    return list(PROMPTS[:n])


# -- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Alignment:
    """What was seen, a row a step: one decode position whose next two tokens became known.

    Attributes:
        cosines: float64[n_steps, n_layers], mask row against the true token in its slot, after each layer.
        ranks: int32[n_steps], rank (0 = first) of the token after that one in the mask's logits; ``top_k`` = beyond.
        top_k: ranks looked at.
        n_prompts: answers.
        mask_init, mask_update: of the mask vectors, ``auto`` resolved.
    """

    cosines: Float64Array
    ranks: Int32Array
    top_k: int
    n_prompts: int
    mask_init: str
    mask_update: float | None


def measure(
    model: TargetModel,
    prompts: Sequence[str],
    *,
    max_tokens: int = 64,
    top_k: int = 14,
    mask_init: str = "auto",
    mask_update: float | None = None,
    progress: Progress | None = None,
) -> Alignment:
    """Answer every prompt greedily, with one mask behind the root of every pass.

    Args:
        prompts: what the user says; the chat template is applied.
        max_tokens: steps of an answer at most.
        top_k: proposals of a mask that count as accepted; 14 = the paper's BC30 tree [14].
        mask_init, mask_update: see :func:`esp_edge.masks.make_masks`.
        progress: called with (done, of how many): candidates while ``auto`` is measured, then prompts.

    Raises:
        ConfigError: a setting out of range.
        ContextLengthError: a prompt does not fit the context.
        UnsupportedModelError: no mask rows on this model, or no hidden states from its graph.
    """
    n_vocab = model.tokenizer.n_vocab
    if not 1 <= top_k <= n_vocab or max_tokens < 1 or not prompts:
        raise ConfigError(
            f"a prompt, 1 <= top-k <= {n_vocab} and max-tokens >= 1 are needed, but {len(prompts)} prompts, top-k "
            f"{top_k} and max-tokens {max_tokens} were given"
        )
    if model.embeddings is None:
        raise UnsupportedModelError(f"{model.path}: this model cannot be probed: {model.capability.reason}")
    wanted = DraftConfig("esp", mask_init=mask_init, mask_update=mask_update)
    draft = resolve_mask_init(model, wanted, progress=progress)
    masks = make_masks(draft.mask_init, 1, model.embeddings, draft.mask_update, tokenize=model.tokenizer.encode)
    encoded, n_ctx = _encode(model, prompts, max_tokens)
    states = model.new_hidden_states()
    found: list[_Seen] = []
    with closing(model.new_context(1, n_ctx=n_ctx, hidden_states=states)) as context:
        walk = _Walk(Step(context), masks, states, top_k)
        for number, ids in enumerate(encoded, start=1):
            limit = min(max_tokens, n_ctx - len(ids) - _PAD + 1)
            found += walk.answer(ids, limit, model.tokenizer.eog_ids)
            if progress is not None:
                progress(number, len(encoded))
    cosines = np.array([row for row, _ in found], np.float64).reshape(len(found), states.n_layers)
    ranks = np.array([rank for _, rank in found], np.int32)
    return Alignment(cosines, ranks, top_k, len(encoded), draft.mask_init, draft.mask_update)


def _encode(model: TargetModel, prompts: Sequence[str], max_tokens: int) -> tuple[list[list[int]], int]:
    """Token ids of every prompt, and a context that holds each with its answer."""
    encoded = [model.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    longest = max(map(len, encoded))
    if longest + _PAD > model.n_ctx:
        raise ContextLengthError(longest, model.n_ctx)
    return encoded, min(model.n_ctx, longest + max_tokens + _PAD)


class _Walk:
    """Greedy answers, a token a pass, each pass with a mask behind its root."""

    def __init__(self, step: Step, masks: MaskVectors, states: Any, top_k: int) -> None:
        self._step = step
        self._masks = masks
        self._states = states
        self._top_k = top_k

    def answer(self, prompt_ids: Sequence[int], limit: int, ends: frozenset[int]) -> Iterator[_Seen]:
        """Every step of an answer, ``limit`` at most."""
        self._step.reset()
        self._step.prefill(prompt_ids[:-1])
        self._masks.begin(prompt_ids)
        root, proposed = int(prompt_ids[-1]), None
        for _ in range(limit + 1):
            token, proposals = self._pass(root)
            if proposed is not None:
                # row 0 is the true token in the slot of the last pass's mask, and `token` is what follows it
                yield self._states.cosines(0), _rank(proposed, token)
            if token in ends:
                return
            self._states.keep(1)
            root, proposed = token, proposals
            self._masks.commit([token])

    def _pass(self, root: int) -> tuple[int, Int32Array]:
        """The model's next token, and the best ``top_k`` proposals of the mask behind the root."""
        shape = np.array([root], np.int32), np.array([-1], np.int32), np.ones(1, np.int32)
        tree = DraftTree.root_only(root, 1, self._masks.for_tree(*shape))
        self._states.start()
        try:
            outputs = self._step.run(tree)
        finally:
            self._states.stop()
        _check_states(self._states, tree.n_rows)
        token = outputs.argmax(0)
        proposals = outputs.top_k(tree.mask_rows(0), self._top_k)[0][0]
        width = min(self._masks.guess_width, self._masks.n_vocab)
        if width:
            self._masks.learn(tree.token_ids, *outputs.top_k(np.zeros(1, np.int32), width))
        self._step.commit(())
        return token, proposals


def _rank(proposals: Int32Array, token: int) -> int:
    """Place of a token among the proposals; their number when it is not there."""
    places = np.flatnonzero(proposals == token)
    return int(places[0]) if len(places) else len(proposals)


def _check_states(states: Any, n_rows: int) -> None:
    """Raise UnsupportedModelError unless every layer gave a row for each row of the pass."""
    rows = [states.n_rows(layer) for layer in range(states.n_layers)]
    what = "the analysis needs the output of every layer (tensors l_out-<layer> of llama.cpp's graph), but"
    if states.problem:
        raise UnsupportedModelError(f"{what} {states.problem}; use a model of another architecture")
    missing = sum(n == 0 for n in rows)
    if missing:
        raise UnsupportedModelError(
            f"{what} this model's graph names none for {missing} of {len(rows)} layers; use another architecture"
        )
    if any(n != n_rows for n in rows):
        raise UnsupportedModelError(f"{what} {min(rows)} to {max(rows)} rows came out of a pass of {n_rows}")


# -- arithmetic ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Threshold:
    """A cosine from which on enough steps were accepted.

    Attributes:
        cosine: the lowest such cosine.
        n_steps: steps at or above it.
        share: of them that were accepted.
        luck: probability that as many steps picked blindly would all be accepted.
    """

    cosine: float
    n_steps: int
    share: float
    luck: float


def threshold(cosines: Float64Array, accepted: npt.NDArray[np.bool_], target: float = 1.0) -> Threshold | None:
    """The lowest cosine at or above which a share of at least ``target`` was accepted; None where there is none.

    With target 1 this is delta* of Lemma 3.1 as the data shows it.

    >>> threshold(np.array([0.9, 0.8, 0.7, 0.6]), np.array([True, True, False, True]))
    Threshold(cosine=0.8, n_steps=2, share=1.0, luck=0.5)
    """
    if len(cosines) == 0:
        return None
    order = np.argsort(-cosines, kind="stable")
    sorted_cosines, hits = cosines[order], np.cumsum(accepted[order])
    counts = np.arange(1, len(order) + 1)
    is_last = np.append(sorted_cosines[1:] != sorted_cosines[:-1], True)  # of steps with an equal cosine
    fits = np.flatnonzero(is_last & (hits >= target * counts))
    if len(fits) == 0:
        return None
    at = int(fits[-1])
    n = at + 1
    luck = math.prod((int(hits[-1]) - i) / (len(order) - i) for i in range(n))
    return Threshold(float(sorted_cosines[at]), n, float(hits[at] / n), luck)


def summarize(alignment: Alignment) -> dict[str, Any]:
    """JSON-ready statistics, for the alignment's K and for K = 1.

    Returns:
        ``top_k``, ``n_prompts``, ``n_steps``, ``n_layers``, ``mask_init``, ``mask_update`` and ``results``, one entry a
        K: ``top_k``, ``accepted``, ``rejected`` (steps), ``layers`` (``layer`` from 1; ``accepted`` and ``rejected``,
        each ``mean`` and standard error ``se``; ``auc``, the probability that an accepted step has the higher cosine),
        ``parts_from`` (the first layer from which on the means stay two standard errors apart, or None), ``bins`` of
        the last layer (``low``, ``high``, ``steps``, ``accepted``, ``share``), ``delta_star`` and ``delta_95``
        (``cosine``, ``n_steps``, ``share``, ``luck``, or None). None stands for what too few steps cannot tell.
    """
    ks = dict.fromkeys((alignment.top_k, 1))
    return {
        "mask_init": alignment.mask_init,
        "mask_update": alignment.mask_update,
        "top_k": alignment.top_k,
        "n_prompts": alignment.n_prompts,
        "n_steps": len(alignment.ranks),
        "n_layers": alignment.cosines.shape[1],
        "results": [_result(alignment.cosines, alignment.ranks < k, k) for k in ks],
    }


def _result(cosines: Float64Array, accepted: npt.NDArray[np.bool_], top_k: int) -> dict[str, Any]:
    layers = [_layer(number, column, accepted) for number, column in enumerate(cosines.T, start=1)]
    last = cosines[:, -1]
    return {
        "top_k": top_k,
        "accepted": int(accepted.sum()),
        "rejected": int((~accepted).sum()),
        "layers": layers,
        "parts_from": _parts_from(layers),
        "bins": _bins(last, accepted),
        "delta_star": _document(threshold(last, accepted)),
        "delta_95": _document(threshold(last, accepted, 0.95)),
    }


def _layer(number: int, cosines: Float64Array, accepted: npt.NDArray[np.bool_]) -> dict[str, Any]:
    hits, misses = cosines[accepted], cosines[~accepted]
    return {"layer": number, "accepted": _mean(hits), "rejected": _mean(misses), "auc": _auc(hits, misses)}


def _mean(values: Float64Array) -> dict[str, float | None]:
    n = len(values)
    mean = float(values.mean()) if n else None
    return {"mean": mean, "se": float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else None}


def _auc(hits: Float64Array, misses: Float64Array) -> float | None:
    """Probability that a random hit lies above a random miss, ties by half: 0.5 = the cosine tells nothing."""
    if len(hits) == 0 or len(misses) == 0:
        return None
    ordered = np.sort(misses)
    below, up_to = np.searchsorted(ordered, hits, "left"), np.searchsorted(ordered, hits, "right")
    return float((below + up_to).mean() / (2 * len(misses)))


def _parts_from(layers: Sequence[dict[str, Any]]) -> int | None:
    first = None
    for layer in reversed(layers):
        hits, misses = layer["accepted"], layer["rejected"]
        if hits["se"] is None or misses["se"] is None:
            return None
        if hits["mean"] - misses["mean"] <= 2 * math.hypot(hits["se"], misses["se"]):
            break
        first = layer["layer"]
    return first


def _bins(cosines: Float64Array, accepted: npt.NDArray[np.bool_]) -> list[dict[str, Any]]:
    """Steps by cosine, lowest first; empty bins are left out."""
    numbers = np.floor(cosines / _BIN).astype(int)
    bins = []
    for number in sorted(set(numbers.tolist())):
        inside = numbers == number
        steps, hits = int(inside.sum()), int(accepted[inside].sum())
        low, high = round(number * _BIN, 4), round((number + 1) * _BIN, 4)
        bins.append({"low": low, "high": high, "steps": steps, "accepted": hits, "share": hits / steps})
    return bins


def _document(found: Threshold | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"cosine": found.cosine, "n_steps": found.n_steps, "share": found.share, "luck": found.luck}
