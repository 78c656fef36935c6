"""Is it the same answer? Where two answers part, and whether that was a near-tie of the model itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Protocol

from esp_edge.bench.results import NEAR_TIE, STOCK_KIND, Difference, Record
from esp_edge.config import GenerationParams
from esp_edge.metrics import GenerationStats
from esp_edge.session import Chunk, Prompt, Session, TokenLogprob

__all__ = ["Answer", "Parting", "Talker", "converse", "explain", "parting", "stock_difference"]

RIVALS = 16  # likeliest tokens looked at where an answer differs


class Talker(Protocol):
    """Whoever is asked: a :class:`esp_edge.session.Session`, or another program behind the same methods."""

    token_ids: list[int]

    def generate(self, prompt: Prompt, params: GenerationParams | None = None) -> Iterable[Chunk]:
        """The chunks of an answer."""
        ...

    def __enter__(self) -> Talker: ...

    def __exit__(self, *exc: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """All of one generation."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    stats: GenerationStats


def converse(session: Talker, turns: Sequence[str], params: GenerationParams) -> list[Answer]:
    """Ask turn by turn; later turns see the session's own earlier answers.

    Every turn starts on an empty KV cache, so that its time has the whole prefill in it (algorithms E).
    """
    messages: list[dict[str, str]] = []
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        session.token_ids.clear()
        answers.append(_answer(session, messages, params))
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


def _answer(session: Talker, messages: Sequence[dict[str, str]], params: GenerationParams) -> Answer:
    chunks = list(session.generate(messages, params))
    return Answer(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        finish_reason=chunks[-1].finish_reason or "",
        stats=chunks[-1].stats,
    )


@dataclass(frozen=True, slots=True)
class Parting:
    """First place where two answers differ.

    Attributes:
        turn, position: both from 0.
        expected, found: the two tokens; None where an answer had ended.
    """

    turn: int
    position: int
    expected: int | None
    found: int | None


def parting(expected: Record, found: Record) -> Parting | None:
    """Where a record first differs from the one it should equal; None = nowhere."""
    for turn, (mine, theirs) in enumerate(zip(expected.turns, found.turns, strict=True)):
        for position, (a, b) in enumerate(zip_longest(mine.token_ids, theirs.token_ids)):
            if a != b:
                return Parting(turn, position, a, b)
    return None


def explain(plain: Session, turns: Sequence[str], params: GenerationParams, found: Record, at: Parting) -> Difference:
    """Ask plain decoding again, with log-probabilities, how sure it was where the answers part.

    A near-tie is a place where the drafter's token is at most 0.25 behind plain decoding's in log-probability. This is
    stricter than a small margin to the second choice, which any wrong token would have as well.

    Args:
        plain: a session that drafts nothing.
        turns: of the question.
    """
    top2 = margin = None
    kind = "sampled"
    if params.is_greedy:
        rivals = min(RIVALS, plain.model.tokenizer.n_vocab)
        answer = converse(plain, turns[: at.turn + 1], replace(params, logprobs=rivals))[-1]
        top2, margin = _margins(answer, at)
        kind = "near-tie" if margin is not None and margin <= NEAR_TIE else "different"
    return _difference(found, at, kind, top2, margin)


def stock_difference(found: Record, at: Parting) -> Difference:
    """A difference of stock plain decoding from the exact one: both are the model's own choices, nothing failed."""
    return _difference(found, at, STOCK_KIND)


def _difference(
    found: Record, at: Parting, kind: str, top2: float | None = None, margin: float | None = None
) -> Difference:
    return Difference(
        model=found.model,
        repeat=found.repeat,
        question_id=found.question_id,
        category=found.category,
        drafter=found.drafter,
        block_complexity=found.block_complexity,
        turn=at.turn,
        position=at.position,
        expected=at.expected,
        found=at.found,
        top2_margin=top2,
        margin=margin,
        kind=kind,
    )


def _margins(answer: Answer, at: Parting) -> tuple[float | None, float | None]:
    """(first to second choice, first choice to the token found); None where there is none, or it is no rival."""
    if at.position >= len(answer.logprobs):
        return None, None
    top = answer.logprobs[at.position].top
    values = dict(top)
    second = round(top[0][1] - top[1][1], 6) if len(top) > 1 else None
    if answer.token_ids[at.position] != at.expected or at.found not in values:
        return second, None
    return second, round(top[0][1] - values[at.found], 6)
