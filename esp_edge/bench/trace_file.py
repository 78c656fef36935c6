"""Recorded answers on disk: one ``.npz`` file an answer, in a directory whose ``run.json`` holds the settings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from esp_edge.drafters.calibrate import split_candidate
from esp_edge.errors import ConfigError
from esp_edge.masks import PROMPT_MEAN_UPDATE
from esp_edge.tree import FloatArray, Int32Array

__all__ = ["MaskRows", "Ranked", "Recording", "Trace", "TraceSettings", "is_frozen", "mask_label"]

_KINDS: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool, "str": str}  # of simple settings
_SMALL_VOCABULARY = 1 << 16  # token ids are stored in two bytes up to here


def mask_label(init: str, update: float | None) -> str:
    """One name for an initialisation and its running update, as ``--mask-init`` of ``bench trace`` takes it.

    >>> mask_label("prompt-mean", 0.1), mask_label("prompt-mean", 0.0), mask_label("vocab-mean", None)
    ('prompt-mean', 'prompt-mean@0', 'vocab-mean')
    """
    usual = PROMPT_MEAN_UPDATE if init == "prompt-mean" else 0.0
    return init if update is None or update == usual else f"{init}@{update:g}"


def is_frozen(label: str) -> bool:
    """Whether the vectors of a generation never change; then it does not matter from which pass they are."""
    init, update = split_candidate(label)
    return init != "composed" and mask_label(init, 0.0) == mask_label(init, update)


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """What all answers of a trace have in common; JSON-ready but for the tuples.

    Attributes:
        model, quant, fingerprint: the file the trace was made with.
        questions: how many, and a digest of them.
        n_answers: answers of a whole trace.
        mask_inits: the recorded initialisations, labels of :func:`mask_label`; empty = the model cannot be probed.
        auto: the label that ``mask-init auto`` stands for on this model; None without masks.
        masks: mask rows of each chain.
        top: candidates kept of each row.
        n_ctx: context length of the sessions that are replayed.
        in_order: whether cells stay in position order (:class:`esp_edge.step.Step`).
        config: of the model load.
    """

    model: str
    quant: str
    fingerprint: str
    questions: str
    n_answers: int
    max_tokens: int
    temperature: float
    seed: int
    mask_inits: tuple[str, ...]
    auto: str | None
    masks: int
    top: int
    n_vocab: int
    n_ctx: int
    exact: bool
    in_order: bool
    config: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The ``settings`` of ``run.json``."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> TraceSettings:
        """Raise KeyError or TypeError when the document is none."""
        settings = cls(**{**document, "mask_inits": tuple(document["mask_inits"])})
        values = [(one.type, getattr(settings, one.name)) for one in fields(cls)]
        if not all(isinstance(value, _KINDS.get(str(kind), object)) for kind, value in values):
            raise TypeError("a value is of another kind")
        return settings


@dataclass(frozen=True, slots=True)
class Ranked:
    """Best tokens of some rows, best first.

    Attributes:
        ids: int32[n_rows, top].
        log_probs: float32[n_rows, top], at temperature 1.
    """

    ids: Int32Array
    log_probs: FloatArray


@dataclass(frozen=True, slots=True)
class MaskRows:
    """What the masks of one initialisation said behind every root.

    A live pass makes its vectors when it is drafted and reads them behind the deepest accepted node, ``lag`` tokens
    later. So chain ``i`` stands behind the root of position ``positions[i]``, with the vectors of ``lags[i]`` tokens
    before. Lag 0 is always there; others where the vectors differ and a draft of that length could have been accepted.

    Attributes:
        positions, lags: int32[n_chains].
        ids: int32[n_chains, masks, top].
        log_probs: float32[n_chains, masks, top].
    """

    positions: Int32Array
    lags: Int32Array
    ids: Int32Array
    log_probs: FloatArray
    _places: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    def find(self, position: int, lag: int) -> tuple[int, int]:
        """(chain, its lag): the largest recorded lag up to ``lag``."""
        if not self._places:
            pairs = zip(self.positions.tolist(), self.lags.tolist(), strict=True)
            self._places.update({pair: chain for chain, pair in enumerate(pairs)})
        for nearest in range(lag, -1, -1):
            chain = self._places.get((position, nearest))
            if chain is not None:
                return chain, nearest
        raise ConfigError(f"the trace has no mask rows at token {position}: record it again with bench trace")


@dataclass(frozen=True, slots=True)
class Recording:
    """One answer. Row ``t`` of ``roots`` is the row that chose ``token_ids[t]``.

    Attributes:
        settings: of the trace.
        turn: from 0.
        finish_reason: ``stop`` when the last token ends the answer, else ``length``; "" after an error.
        error: why the question could not be answered; everything else is empty then.
        roots: [len(token_ids), top].
        prompt: [len(prompt_ids) - 1, top], the rows of all prompt tokens but the last, whose row is ``roots[0]``.
        masks: label -> its rows.
    """

    settings: TraceSettings
    question_id: int | str
    category: str
    turn: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: str
    roots: Ranked
    prompt: Ranked
    masks: Mapping[str, MaskRows]
    error: str | None = None

    @classmethod
    def failed(cls, settings: TraceSettings, question_id: int | str, category: str, turn: int, error: str) -> Recording:
        """A question that cannot be answered."""
        none = Ranked(np.empty((0, settings.top), np.int32), np.empty((0, settings.top), np.float32))
        return cls(settings, question_id, category, turn, (), (), "", none, none, {}, error)

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        small = np.uint16 if self.settings.n_vocab <= _SMALL_VOCABULARY else np.int32
        about = {name: getattr(self, name) for name in ("question_id", "category", "turn", "finish_reason", "error")}
        arrays: dict[str, Any] = {
            "about": np.frombuffer(json.dumps(about).encode("ascii"), np.uint8),
            "prompt_ids": np.array(self.prompt_ids, small),
            "token_ids": np.array(self.token_ids, small),
            **_packed("root", self.roots, small),
            **_packed("prompt", self.prompt, small),
        }
        for number, label in enumerate(self.settings.mask_inits if self.error is None else ()):
            rows = self.masks[label]
            arrays |= {f"mask{number}_positions": rows.positions, f"mask{number}_lags": rows.lags}
            arrays |= _packed(f"mask{number}", rows, small)
        unfinished = path.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            np.savez_compressed(file, **arrays)
        os.replace(unfinished, path)

    @classmethod
    def read(cls, path: Path, settings: TraceSettings) -> Recording:
        """Read a file that :meth:`write` wrote.

        Raises:
            ConfigError: it is damaged, or of another version.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return cls._unpacked(arrays, settings)
        except Exception:  # numpy, zipfile and tokenize raise a dozen kinds for damaged bytes
            raise ConfigError(f"{path} is no whole answer of a trace: delete it and run bench trace again") from None

    @classmethod
    def _unpacked(cls, arrays: Mapping[str, Any], settings: TraceSettings) -> Recording:
        about = json.loads(arrays["about"].tobytes())
        labels = settings.mask_inits if about["error"] is None else ()
        recording = cls(
            settings=settings,
            prompt_ids=tuple(arrays["prompt_ids"].tolist()),
            token_ids=tuple(arrays["token_ids"].tolist()),
            roots=_ranked(arrays, "root"),
            prompt=_ranked(arrays, "prompt"),
            masks={label: _mask_rows(arrays, f"mask{number}") for number, label in enumerate(labels)},
            **about,
        )
        if len(recording.roots.ids) != len(recording.token_ids):
            raise ValueError("rows and tokens do not belong together")
        return recording


def _packed(name: str, rows: Ranked | MaskRows, small: Any) -> dict[str, Any]:
    return {f"{name}_row_ids": rows.ids.astype(small), f"{name}_row_log_probs": rows.log_probs}


def _ranked(arrays: Mapping[str, Any], name: str) -> Ranked:
    return Ranked(arrays[f"{name}_row_ids"].astype(np.int32), arrays[f"{name}_row_log_probs"])


def _mask_rows(arrays: Mapping[str, Any], name: str) -> MaskRows:
    rows = _ranked(arrays, name)
    return MaskRows(arrays[f"{name}_positions"], arrays[f"{name}_lags"], rows.ids, rows.log_probs)


class Trace:
    """The recorded answers of a directory, read one by one as they are iterated over, in the order of the questions.

    Attributes:
        path: the directory.
        settings: of the recording.
        files: of the answers that are there.
    """

    def __init__(self, path: Path) -> None:
        """Open a directory of ``bench trace``; ConfigError when it is none."""
        self.path = path
        try:
            document = json.loads((path / "run.json").read_text("utf-8"))
            self.settings = TraceSettings.from_document(document["settings"])
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{path} is no trace, it has no run.json: make one with bench trace --out DIR") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path / 'run.json'} is not of bench trace: name a directory that it made") from None
        self.files = sorted(path.glob("*.npz"))

    @staticmethod
    def file_of(path: Path, number: int, turn: int) -> Path:
        """The file of turn ``turn`` of question ``number``, both from 0."""
        return path / f"{number:05d}-{turn}.npz"

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[Recording]:
        for file in self.files:
            yield Recording.read(file, self.settings)
