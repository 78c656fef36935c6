"""A model for the command line that repeats what it was told, and a way to call the program inside the test."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from esp_edge.cli import answer as answer_module
from esp_edge.cli.app import main
from esp_edge.config import DraftConfig, GenerationParams, ModelConfig
from esp_edge.errors import ContextLengthError
from esp_edge.metrics import GenerationStats
from esp_edge.models.kernels import Kernels
from esp_edge.session import Chunk, TokenLogprob

__all__ = ["FakeModel", "FakeSession", "Program", "make_program", "one_error"]


class FakeSession:
    """Answers with the words of ``script(prompt)``, a word a pass; token ids are word lengths.

    Attributes:
        asked: (prompt, params) of every generation.
        closed_early: generations that were closed before their end.
    """

    def __init__(self, model: FakeModel, draft: DraftConfig) -> None:
        self.model = model
        self.draft = draft
        self.token_ids: list[int] = []
        self.asked: list[tuple[Any, GenerationParams]] = []
        self.closed = False
        self.closed_early = 0

    def generate(self, prompt: Any, params: GenerationParams | None = None) -> Generator[Chunk, None, None]:
        params = params or GenerationParams()
        self.asked.append((prompt, params))
        last = prompt if isinstance(prompt, str) else prompt[-1]
        text = str(last["content"] if isinstance(last, dict) else last)
        if len(text) >= self.model.n_ctx:
            raise ContextLengthError(len(text), self.model.n_ctx)
        return self._run(text, params)

    def _run(self, text: str, params: GenerationParams) -> Generator[Chunk, None, None]:
        words = self.model.script(text)
        stats = GenerationStats(drafter=self.draft.drafter, prompt_tokens=len(text), note=self.model.note)
        limit = len(words) if params.max_tokens is None else params.max_tokens
        self.token_ids = [len(text)]
        finished = False
        try:
            for i, word in enumerate(words[:limit], start=1):
                self.model.on_chunk(i)
                last = i == min(limit, len(words))
                reason = ("stop" if limit >= len(words) else "length") if last else None
                finished = last
                stats.count(4, [0, 1], [False])
                logprobs = () if params.logprobs is None else (TokenLogprob(len(word), -0.5, ((1, float("-inf")),)),)
                self.token_ids.append(len(word))
                yield Chunk(word, (len(word),), (False,), ("",), logprobs, reason, stats)
        finally:
            self.closed_early += not finished

    def explain(self, _stats: GenerationStats) -> None:
        """Only the drafter auto explains."""

    def close(self) -> None:
        self.closed = True


class FakeModel:
    """What the command line uses of ``esp_edge.Model``.

    Attributes:
        on_chunk: called before each chunk with its number.
    """

    def __init__(self, config: ModelConfig | None = None) -> None:
        self.path = Path("models/fake.gguf")
        self.config = config or ModelConfig()
        self.n_ctx = self.config.n_ctx or 200
        self.template_warning: str | None = None
        self.note: str | None = None
        self.kernels = Kernels()
        self.capability = SimpleNamespace(masks=True, reason=None)
        self.tokenizer = SimpleNamespace(raw_piece=lambda token_id: b"<%d>" % token_id)
        self.script: Callable[[str], list[str]] = lambda text: ["You ", "said ", text]
        self.on_chunk: Callable[[int], None] = lambda _: None
        self.sessions: list[FakeSession] = []
        self.closed = False

    def session(self, draft: DraftConfig, *, progress: Callable[[int, int], None] | None = None) -> FakeSession:
        if progress is not None:
            progress(1, 1)
        self.sessions.append(FakeSession(self, draft))
        return self.sessions[-1]

    def close(self) -> None:
        assert all(session.closed for session in self.sessions), "a session outlives its model"
        self.closed = True


class Program:
    """``program("generate", "hi")`` runs the command line on a fake model: (exit code, stdout, stderr).

    Attributes:
        model: of the last run.
        loads: (spec, config) of every model load.
        prepare: called with each new model.
    """

    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch = patch
        self._capsys = capsys
        self.model = FakeModel()
        self.loads: list[tuple[str, ModelConfig]] = []
        self.prepare: Callable[[FakeModel], None] = lambda _: None
        patch.setattr(answer_module, "load_model", self._load)
        patch.setenv("COLUMNS", "200")

    def _load(self, spec: str, config: ModelConfig) -> FakeModel:
        self.loads.append((spec, config))
        self.model = FakeModel(config)
        self.prepare(self.model)
        return self.model

    @property
    def session(self) -> FakeSession:
        return self.model.sessions[-1]

    def __call__(self, *argv: str, stdin: bytes = b"") -> tuple[int, str, str]:
        self._patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as leaving:
            main(argv)
        out, err = self._capsys.readouterr()
        return int(leaving.value.code or 0), out, err


def make_program(patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """For a fixture; the environment holds no flag."""
    for name in list(os.environ):
        if name.startswith("ESP_EDGE_") and name not in ("ESP_EDGE_CACHE", "ESP_EDGE_KERNELS_ISA"):
            patch.delenv(name)
    patch.setenv("ESP_EDGE_CONFIG", os.devnull)  # not the file of whoever runs the tests
    return Program(patch, capsys)


def one_error(err: str) -> str:
    """The text behind ``esp-edge: error:``, when stderr holds that one line and nothing else."""
    lines: Sequence[str] = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("esp-edge: error: ")
    assert "Traceback" not in err
    return lines[0].removeprefix("esp-edge: error: ")
