"""Questions in Spec-Bench's format: loading and selection (algorithms E)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esp_edge.errors import PromptError

__all__ = ["ADVERSARIAL", "Question", "load_questions", "select"]

ADVERSARIAL = "adversarial"  # the name of the built-in questions that are hard to draft for


@dataclass(frozen=True, slots=True)
class Question:
    """One line of ``question.jsonl``.

    Attributes:
        question_id: unique in the file.
        category: one of Spec-Bench's labels, or any other text.
        turns: what the user says, one text a turn.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]


def load_questions(path: Path) -> list[Question]:
    """All questions of a file, one JSON object a line; keys other than the three are ignored.

    ``adversarial``, where no file has that name, is :func:`esp_edge.bench.adversarial.adversarial_questions`.

    Raises:
        PromptError: ``FILE:LINE: what is wrong``, or the file cannot be read or is empty.
    """
    if str(path) == ADVERSARIAL and not path.exists():
        from esp_edge.bench.adversarial import adversarial_questions  # noqa: PLC0415 - it needs this module

        return adversarial_questions()
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror or error}") from None
    questions: list[Question] = []
    seen: dict[int | str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            question = _question(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:  # PromptError and UnicodeDecodeError are ValueErrors
            raise PromptError(f"{path}:{number}: {error}") from None
        if question.question_id in seen:
            first = seen[question.question_id]
            raise PromptError(f"{path}:{number}: question_id {question.question_id!r} was used in line {first}")
        seen[question.question_id] = number
        questions.append(question)
    if not questions:
        raise PromptError(f"{path} holds no question; Spec-Bench's question.jsonl is needed")
    return questions


def _question(line: str) -> Question:
    document = json.loads(line)
    if not isinstance(document, Mapping):
        raise PromptError(f"a question must be a JSON object, but a {type(document).__name__} was found")
    question_id, category, turns = (document.get(name) for name in ("question_id", "category", "turns"))
    if not isinstance(question_id, int | str) or isinstance(question_id, bool):
        raise PromptError(f"question_id must be a whole number or a text, but {question_id!r} was found")
    if not isinstance(category, str) or not category or category == "all":
        raise PromptError(f"category must be a text other than 'all', but {category!r} was found")
    return Question(question_id, category, _turns(turns))


def _turns(turns: Any) -> tuple[str, ...]:
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise PromptError("turns must be a non-empty list of non-empty texts")
    return tuple(turns)


def select(questions: Sequence[Question], per_category: int = 0, turns: str = "first") -> list[Question]:
    """The first ``per_category`` questions of every category label (0 = all), in file order.

    Args:
        turns: ``first`` keeps the first turn of each question, ``all`` every turn.
    """
    taken: Counter[str] = Counter()
    chosen = []
    for question in questions:
        taken[question.category] += 1
        if per_category and taken[question.category] > per_category:
            continue
        kept = question.turns if turns == "all" else question.turns[:1]
        chosen.append(Question(question.question_id, question.category, kept))
    return chosen
