"""Questions that draft sources cannot know the answers of, or that invite wrong drafts: ``--questions adversarial``.

``auto`` must not lose here either. All texts are made from a fixed seed, so that runs can be compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from esp_edge.bench.questions import Question

__all__ = ["adversarial_questions"]

PER_CATEGORY = 5
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SCRIPTS = (
    "请用中文写一段关于秋天的短文,描述天气、树叶和人们的心情。",
    "اكتب فقرة قصيرة عن مدينة قديمة على البحر وعن سكانها.",
    "Напишите короткий рассказ о поезде, который опоздал на целый день.",  # noqa: RUF001
    "पहाड़ों में एक छोटे गाँव की सुबह के बारे में कुछ वाक्य लिखिए।",
    "海辺の町で過ごした夏休みについて、短い日記を書いてください。",
)
_CODE = (
    "Write a C function that multiplies two sparse matrices in compressed row format, with error checks.",
    "Write a regular expression for ISO 8601 dates, and explain every part of it.",
    "Write a bash script that renames all files of a directory to their SHA-256 sums.",
    "Write an SQL query for the three best-paid employees of every department, ties included.",
    "Write a Haskell parser for arithmetic expressions without any library.",
)


def _word(draw: random.Random) -> str:
    return "".join(draw.choice(_LETTERS) for _ in range(draw.randint(2, 9)))


def _random_words(draw: random.Random, _number: int) -> str:
    return " ".join(_word(draw) for _ in range(draw.randint(30, 90)))


def _digits(draw: random.Random, _number: int) -> str:
    numbers = " ".join(str(draw.randint(0, 10**9)) for _ in range(30))
    return f"Go on with this list of random numbers: {numbers}"


def _shuffled(draw: random.Random, _number: int) -> str:
    """Every n-gram occurs often and is followed by something else each time."""
    words = [_word(draw) for _ in range(5)]
    return "Repeat in a new random order, again and again: " + " ".join(draw.choice(words) for _ in range(120))


def _near_copies(draw: random.Random, _number: int) -> str:
    """Long matches that end wrong: lines that differ in one number each."""
    name = _word(draw)
    lines = [f"{name} {i} has {draw.randint(10, 99)} boxes of {draw.randint(100, 999)} parts" for i in range(12)]
    return "Write twelve more lines of this kind with other numbers:\n" + "\n".join(lines)


def _code(_draw: random.Random, number: int) -> str:
    return _CODE[number]


def _scripts(_draw: random.Random, number: int) -> str:
    return _SCRIPTS[number]


_MAKERS: dict[str, Callable[[random.Random, int], str]] = {
    "random words": _random_words,
    "digits": _digits,
    "shuffled": _shuffled,
    "near copies": _near_copies,
    "code": _code,
    "scripts": _scripts,
}


def adversarial_questions() -> list[Question]:
    """Five questions of each of six categories, ids 1 to 30."""
    questions: list[Question] = []
    for category, make in _MAKERS.items():
        for number in range(PER_CATEGORY):
            question_id = len(questions) + 1
            questions.append(Question(question_id, category, (make(random.Random(question_id), number),)))
    return questions
