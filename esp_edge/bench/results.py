"""What a run leaves in its directory: settings, a record a (prompt, drafter), and where answers differed.

``results.jsonl`` and ``differences.jsonl`` grow by whole lines and are flushed at once, so that a run that was killed
goes on where it stopped. ``run.json`` holds the settings; a directory made with others is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from esp_edge.bench.spec import is_peer
from esp_edge.errors import ConfigError
from esp_edge.metrics import GenerationStats

__all__ = [
    "NEAR_TIE",
    "STOCK_KIND",
    "Difference",
    "Record",
    "RunDirectory",
    "Turn",
    "Unit",
    "make_folder",
    "write_json",
]

NEAR_TIE = 0.25  # log-probability between plain decoding's token and the other one (docs: exactness)
STOCK_KIND = "stock"
VERSION = 1
RECORDS, DIFFERENCES = "results.jsonl", "differences.jsonl"
SHOWN = 4  # entries of a list in a message
_Line = TypeVar("_Line")
Unit: TypeAlias = tuple[str, int, int | str, str, int]  # model, repeat, question id, drafter, block complexity


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer; the counters are those of :class:`esp_edge.metrics.GenerationStats`, times in milliseconds."""

    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    prefill_tokens: int
    passes: int
    rows: int
    draft_tokens: int
    accepted_tokens: int
    committed_tokens: int
    prefill_ms: float
    decode_ms: float
    model_ms: float
    accepted_by_depth: tuple[int, ...] = ()
    drafted_by_depth: tuple[int, ...] = ()

    @classmethod
    def from_stats(cls, token_ids: Sequence[int], finish_reason: str, stats: GenerationStats) -> Turn:
        """The record of a finished generation."""
        return cls(
            token_ids=tuple(token_ids),
            finish_reason=finish_reason,
            prompt_tokens=stats.prompt_tokens,
            prefill_tokens=stats.prefill_tokens,
            passes=stats.passes,
            rows=stats.rows,
            draft_tokens=stats.draft_tokens,
            accepted_tokens=stats.accepted_tokens,
            committed_tokens=stats.committed_tokens,
            prefill_ms=round(stats.prefill_ms, 4),
            decode_ms=round(stats.decode_ms, 4),
            model_ms=round(stats.model_ms, 4),
            accepted_by_depth=tuple(stats.accepted_by_depth),
            drafted_by_depth=tuple(stats.drafted_by_depth),
        )


@dataclass(frozen=True, slots=True)
class Record:
    """One line of ``results.jsonl``: a drafter's answers to a question.

    Attributes:
        model: file name without ``.gguf``; quant: its quantisation.
        repeat: from 0.
        drafter: label of the lane, options included.
        turns: one answer a turn; empty when there was an error.
        mask_init: what ``auto`` became, None for drafters without masks.
        note: why speculation was off; None when it was not.
        error: why the question could not be answered, such as a prompt too long for the context.
    """

    model: str
    quant: str
    repeat: int
    question_id: int | str
    category: str
    drafter: str
    block_complexity: int
    turns: tuple[Turn, ...]
    mask_init: str | None = None
    note: str | None = None
    error: str | None = None

    @property
    def unit(self) -> Unit:
        """Identifies the record."""
        return self.model, self.repeat, self.question_id, self.drafter, self.block_complexity

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Record:
        """Raise KeyError or TypeError when the document is none."""
        turns = tuple(Turn(**{name: _tupled(value) for name, value in turn.items()}) for turn in document["turns"])
        return cls(**{**document, "turns": turns})


@dataclass(frozen=True, slots=True)
class Difference:
    """One line of ``differences.jsonl``: where an answer first differs from plain decoding's.

    Attributes:
        turn, position: of the first differing token, both from 0.
        expected, found: token of plain decoding and of the drafter; None where an answer had ended.
        top2_margin: log-probability between plain decoding's first and second choice there; None when sampled.
        margin: between its choice and the drafter's token; None when sampled, or when that was far from likely.
        kind: ``near-tie`` (margin up to 0.25), ``different``, ``sampled`` (a drawn token has no margin), or ``stock``
            (the default mode's plain decoding beside an exact run).
    """

    model: str
    repeat: int
    question_id: int | str
    category: str
    drafter: str
    block_complexity: int
    turn: int
    position: int
    expected: int | None
    found: int | None
    top2_margin: float | None
    margin: float | None
    kind: str

    @property
    def unit(self) -> Unit:
        """Identifies the record it belongs to."""
        return self.model, self.repeat, self.question_id, self.drafter, self.block_complexity

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Difference:
        """Raise TypeError when the document is none."""
        return cls(**document)

    def is_failure(self, exact: bool) -> bool:
        """Whether the run must not pass: any difference in exact mode, else one that is no near-tie.

        What another program answers is counted and explained, but it is not ours to fail for.
        """
        return not is_peer(self.drafter) and self.kind != STOCK_KIND and (exact or self.kind == "different")


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def make_folder(path: Path) -> None:
    """Make a directory for results, if it is not there; commands do it before they measure.

    Raises:
        ConfigError: there is a file.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"--out needs a directory, but {path} is a file; name another") from None


def write_json(path: Path, document: Any) -> None:
    """Write a document under its final name at once: never half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", "utf-8")
    os.replace(temporary, path)


# -- the directory ---------------------------------------------------------------------------------------------------


class RunDirectory:
    """A directory with the results of one run.

    Attributes:
        path: the directory.
        machine: what the run was begun on.
        records, differences: unit -> line, in the order they were written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
        """Make the directory, or take up the run that is in it.

        Raises:
            ConfigError: it was made with other settings (each one is named), or holds something else.
        """
        self.path = path
        make_folder(path)
        self.settings = _plain_json(settings)
        self.machine = self._same_run(_plain_json(machine))
        self.records = {line.unit: line for line in _read_lines(path / RECORDS, Record.from_document)}
        self.differences = {line.unit: line for line in _read_lines(path / DIFFERENCES, Difference.from_document)}

    def _same_run(self, machine: dict[str, Any]) -> dict[str, Any]:
        file = self.path / "run.json"
        if not file.exists():
            if (self.path / RECORDS).exists():
                raise ConfigError(f"{self.path} has results but no run.json: use another --out directory")
            write_json(file, {"version": VERSION, "settings": self.settings, "machine": machine})
            return machine
        try:
            document = json.loads(file.read_text("utf-8"))
            settings, first = dict(document["settings"]), dict(document["machine"])
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{file} is not of a benchmark run: use another --out directory") from None
        found = [*_changes(settings, self.settings), *_changes(_comparable(first), _comparable(machine))]
        if found:
            raise ConfigError(
                f"{self.path} was made with other settings: {'; '.join(found)}; repeat them or use another --out"
            )
        return first

    def add(self, record: Record) -> None:
        """Append a record."""
        self._append(RECORDS, record)
        self.records[record.unit] = record

    def add_difference(self, difference: Difference) -> None:
        """Append a difference."""
        self._append(DIFFERENCES, difference)
        self.differences[difference.unit] = difference

    def _append(self, name: str, line: Record | Difference) -> None:
        with (self.path / name).open("a", encoding="ascii", newline="\n") as file:
            file.write(json.dumps(asdict(line), allow_nan=False) + "\n")


def _plain_json(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document as it comes back from a file: lists for tuples."""
    copy: dict[str, Any] = json.loads(json.dumps(document))
    return copy


def _comparable(machine: Mapping[str, Any]) -> dict[str, Any]:
    """What must not change between two parts of a run; free memory and dates may."""
    return {f"machine.{name}": value for name, value in machine.items() if name not in ("date", "memory_bytes")}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from (f"{name}.{change}" for change in _changes(old, new))
        elif old != new:
            yield f"{name} {_difference(old, new)}"


def _difference(old: Any, new: Any) -> str:
    """The two values, or what a list lost and gained."""
    if isinstance(old, list) and isinstance(new, list):
        gone = [_short(item) for item in old if item not in new]
        added = [_short(item) for item in new if item not in old]
        if gone or added:
            return f"had {_listed(gone)}, now {_listed(added)}"
        return "had another order"
    return f"was {_short(old)}, now {_short(new)}"


def _listed(items: Sequence[str]) -> str:
    more = [f"{len(items) - SHOWN} more"] if len(items) > SHOWN else []
    return ", ".join([*items[:SHOWN], *more]) or "nothing else"


def _short(value: Any) -> str:
    if isinstance(value, dict) and "label" in value:
        return f"{value['label']} at {value.get('block_complexity')}"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read_lines(path: Path, read: Callable[[Mapping[str, Any]], _Line]) -> Iterator[_Line]:
    """Lines of a file; a last one cut off by a crash is removed.

    Raises:
        ConfigError: a line that is no such document.
    """
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            yield read(json.loads(line))
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path}:{number} is no result of this version: use another --out directory") from None
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
