"""The target model's choice at a row: llama.cpp's samplers, then one keyed draw per position."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from esp_edge._runtime import captured_log, json_schema_to_gbnf, native
from esp_edge.config import GenerationParams
from esp_edge.errors import ConfigError, GrammarError
from esp_edge.models.schema import require_expressible

if TYPE_CHECKING:
    from esp_edge.models.model import TargetModel

__all__ = ["Sampler", "schema_to_grammar"]

MAX_GRAMMAR_BYTES = 1 << 20
MAX_NESTING = 1000  # llama.cpp's parser recurses: a deeper grammar would overflow a small native stack
MAX_SCHEMA_NESTING = 200  # the converter recurses in Python
MAX_REPEATS = 900  # the converter nests one bracket a repetition
_COLDEST = 1e-6
MAX_RULES = 4096  # so does its search for left recursion, one level a rule

_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
_COUNTS = re.compile(r'"((?:min|max)(?:Items|Length))": (\d+)')
_PATTERN = re.compile(r'"pattern": "((?:\\.|[^"\\])*)"')
_QUANTITY = re.compile(r"\{(?:\d*,)?(\d+)")
_RANGE = re.compile(r"\{\s*(\d{1,9})\s*,\s*(\d{1,9})\s*\}")


def _nesting(text: str) -> int:
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth -= 1
    return deepest


def check_grammar(grammar: str) -> str:
    """The grammar, unless its size or nesting could harm the parser.

    Raises:
        GrammarError: says which.
    """
    if not grammar.strip():
        raise GrammarError('the grammar is empty: it needs at least a rule such as root ::= "yes" | "no"')
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"a grammar may have {MAX_GRAMMAR_BYTES} bytes, this one has {len(grammar)}")
    if _nesting(grammar) > MAX_NESTING:
        raise GrammarError(f"a grammar may nest {MAX_NESTING} brackets deep; flatten it with more rules")
    if "\0" in grammar:
        raise GrammarError("a grammar cannot contain NUL characters")
    if any("\ud800" <= char <= "\udfff" for char in grammar):
        raise GrammarError("a grammar must be valid Unicode, but this one has half of a surrogate pair")
    if grammar.count("::=") > MAX_RULES:
        raise GrammarError(f"a grammar may have {MAX_RULES} rules, this one has {grammar.count('::=')}")
    for low, high in _RANGE.findall(_LITERAL.sub("", grammar)):  # llama.cpp would repeat almost without end
        if int(low) > int(high):
            raise GrammarError(f"a grammar cannot repeat an item {{{low},{high}}} times: the first is larger")
    return grammar


def schema_to_grammar(schema: Any) -> str:
    """GBNF of a JSON schema (a mapping, or True for any JSON value).

    Raises:
        GrammarError: the schema is not one, or uses what the converter does not know.
    """
    try:
        text = json.dumps({} if schema is True else schema)
        if _nesting(text) > MAX_SCHEMA_NESTING:
            raise GrammarError(f"a JSON schema may nest {MAX_SCHEMA_NESTING} levels deep; use $defs and $ref")
        for keyword, count in _COUNTS.findall(text):
            if len(count) > len(str(MAX_REPEATS)) or int(count) > MAX_REPEATS:
                raise GrammarError(f"{keyword} in a JSON schema may be {MAX_REPEATS} at most, but is {count[:20]}")
        for pattern in _PATTERN.findall(text):
            if math.prod(int(count[:9]) for count in _QUANTITY.findall(pattern)) > MAX_GRAMMAR_BYTES:
                raise GrammarError(f"the repetitions in the pattern {pattern[:60]!r} multiply to too many; use fewer")
        require_expressible(schema)
        return check_grammar(json_schema_to_gbnf(text))
    except GrammarError:
        raise
    except RecursionError:
        raise GrammarError("the JSON schema nests too deep or refers to itself without end") from None
    except Exception as error:  # the converter raises whatever it meets
        raise GrammarError(f"the JSON schema cannot be used: {str(error) or type(error).__name__}") from error


_stderr = threading.Lock()
_PARSER = "error parsing grammar: "
_MOST_HEARD = 1 << 16


def _scratch() -> IO[bytes]:
    """A temporary file, or the null device where none can be made."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return Path(os.devnull).open("w+b")


def _listening(make: Callable[[], Any]) -> tuple[Any, ValueError | None, str]:
    """(what was made, or the error, and what was said meanwhile).

    llama.cpp's grammar parser says why it refuses on the process's standard error, its check for left recursion in the
    log.
    """
    made, failed = None, None
    with _stderr, _scratch() as file, captured_log() as log:
        saved = os.dup(2)
        try:
            os.dup2(file.fileno(), 2)
            made = make()
        except ValueError as error:
            failed = error
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        file.seek(0)
        heard = file.read(_MOST_HEARD)
        if failed is None and heard:
            with suppress(OSError):
                os.write(2, heard)
    # other threads write there too: their lines are not this caller's
    lines = [line for line in heard.decode("utf-8", "replace").splitlines() if _PARSER in line]
    said = next((line for line in (*lines, *log) if line.strip()), "")
    return made, failed, said.rpartition(_PARSER)[2].strip()[:200]


class Sampler:
    """One generation's choices. ``pick`` is pure; ``accept`` advances penalties, DRY and grammar.

    The draw is ``argmax(logit / T + gumbel(seed, position, token))`` over what the filters leave: the same token for
    the same logits, whatever tree they came from.
    """

    def __init__(self, model: TargetModel, params: GenerationParams, seed: int, n_ctx: int) -> None:
        settings = native.SamplerParams()
        # below this a logit divided by it is no float any more
        settings.temperature = max(params.temperature, _COLDEST) if params.temperature else 0.0
        settings.top_k = params.top_k
        settings.top_p = params.top_p
        settings.min_p = params.min_p
        settings.typical_p = params.typical_p
        settings.penalty_last_n = n_ctx if params.repeat_last_n < 0 else min(params.repeat_last_n, n_ctx)
        settings.repeat_penalty = params.repeat_penalty
        settings.frequency_penalty = params.frequency_penalty
        settings.presence_penalty = params.presence_penalty
        settings.dry_multiplier = params.dry_multiplier
        settings.dry_base = params.dry_base
        settings.dry_allowed_length = max(params.dry_allowed_length, 0)
        settings.dry_penalty_last_n = n_ctx if params.dry_penalty_last_n < 0 else min(params.dry_penalty_last_n, n_ctx)
        settings.dry_breakers = list(params.dry_sequence_breakers)
        settings.logit_bias = self._bias(model, params)
        settings.grammar = self._grammar(params)
        settings.seed = seed
        self._constrained = bool(settings.grammar)
        self._native, error, said = self._make(lambda: native.Sampler(model.address, settings))
        if error is not None and "grammar" in str(error):
            reason = f"{error} ({said})" if said else str(error)
            hint = "check the GBNF: it needs a root rule, every rule defined and no left recursion"
            raise GrammarError(f"{reason}; {hint}") from error
        if error is not None:
            raise ConfigError(str(error)) from error

    def _make(self, make: Callable[[], Any]) -> tuple[Any, ValueError | None, str]:
        if self._constrained:
            return _listening(make)
        try:
            return make(), None, ""
        except ValueError as error:
            return None, error, ""

    @staticmethod
    def _bias(model: TargetModel, params: GenerationParams) -> list[tuple[int, float]]:
        bias = dict(params.logit_bias)
        if params.ignore_eos:
            bias.update(dict.fromkeys(model.tokenizer.eog_ids, float("-inf")))
        return list(bias.items())

    @staticmethod
    def _grammar(params: GenerationParams) -> str:
        if params.json_schema is not None:
            return schema_to_grammar(params.json_schema)
        return check_grammar(params.grammar) if params.grammar is not None else ""

    def pick(self, step: Any, row: int, position: int) -> int:
        """Token for absolute position ``position``, given the logits of ``row`` in the compiled step.

        Raises:
            GrammarError: the grammar leaves no token.
            ConfigError: the logit bias leaves none.
        """
        try:
            token: int = self._native.pick(step, row, position)
        except RuntimeError as error:
            kind = GrammarError if self._constrained else ConfigError
            raise kind(str(error)) from error
        return token

    def accept(self, token_id: int, *, generated: bool) -> None:
        """Advance along the committed path; prompt tokens count for penalties, not for the grammar."""
        try:
            self._native.accept(token_id, generated)
        except RuntimeError as error:
            raise GrammarError(f"the grammar cannot continue after token {token_id}: {error}") from error
