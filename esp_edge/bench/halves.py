"""The questions that taught the weights ``auto`` starts with, and the others: figures are to be of those alone.

``scripts/learn_prior`` teaches with every Spec-Bench question whose id, halved and rounded down, is even. So the
questions 480 and 481 teach, 482 and 483 do not, 484 and 485 teach again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np

from esp_edge.bench.trace_file import Trace
from esp_edge.errors import ConfigError

__all__ = ["ALL_QUESTIONS", "HALVES", "half_of", "has_taught", "is_in_half", "told_half"]

ALL_QUESTIONS: Final = "all"
_RULES: Final = {
    "untaught": "the half of the questions that taught auto nothing: id // 2 is odd",
    "taught": "the half of the questions that taught auto's starting weights: id // 2 is even",
    ALL_QUESTIONS: "all questions, those that taught auto's starting weights (id // 2 is even) among them",
}
HALVES: Final = tuple(_RULES)


def has_taught(question_id: int | str) -> bool:
    """Whether a Spec-Bench question taught the shipped weights; one with a name for an id is of no such file."""
    return isinstance(question_id, int) and question_id // 2 % 2 == 0


def is_in_half(question_id: int | str, half: str) -> bool:
    """Whether a question is one of a half.

    Raises:
        ConfigError: no such half.
    """
    _check(half)
    return half == ALL_QUESTIONS or has_taught(question_id) == (half == "taught")


def told_half(half: str) -> str:
    """A half and its rule, for reports.

    >>> told_half("untaught")
    'the half of the questions that taught auto nothing: id // 2 is odd'
    """
    return _RULES[half]


def half_of(trace: Trace, half: str) -> Trace:
    """The trace with the answers of one half only.

    Raises:
        ConfigError: no such half, or it has no answer.
    """
    _check(half)
    if half == ALL_QUESTIONS:
        return trace
    chosen = Trace(trace.path)
    chosen.settings = trace.settings
    chosen.files = [file for file in trace.files if _is_wanted(file, half)]
    if not chosen.files:
        raise ConfigError(f"{trace.path} has no answer of {told_half(half)}; give --half {ALL_QUESTIONS}")
    return chosen


def _check(half: str) -> None:
    if half not in HALVES:
        raise ConfigError(f"--half must be one of {', '.join(HALVES)}, but {half!r} was given")


def _is_wanted(file: Path, half: str) -> bool:
    """Only the small entry is read; a damaged file stays in, so that reading it says what is wrong."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            question_id = json.loads(arrays["about"].tobytes())["question_id"]
    except Exception:  # numpy, zipfile and tokenize raise a dozen kinds for damaged bytes
        return True
    return is_in_half(question_id, half)
