"""The examples of docs/clients.md, run as they stand there."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_fakes import Running, running

import esp_edge
from esp_edge.config import DraftConfig, ModelConfig
from esp_edge.dropin import FallbackWarning
from esp_edge.engine import Engine
from esp_edge.server.settings import ServerSettings
from esp_edge.session import load

pytestmark = pytest.mark.model
PAGE = Path(__file__).parent.parent / "docs" / "clients.md"
ADDRESS = "http://127.0.0.1:8080"
DRAFT = DraftConfig("auto", block_complexity=8, cost="flat", mask_init="vocab-mean")


def example(first_line: str) -> str:
    """The Python example that starts so."""
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (found,) = [code for code in examples if code.startswith(first_line)]
    return str(found)


def run(code: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """Its names and what it printed."""
    names: dict[str, Any] = {"__name__": "example"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        warnings.filterwarnings("ignore", "`langchain-community` is being sunset", DeprecationWarning)
        exec(compile(code, str(PAGE), "exec"), names)
    return names, capsys.readouterr().out


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[Running]:
    with (
        load(str(model_path), ModelConfig(n_ctx=1024)) as model,
        Engine(model, draft=DRAFT, n_slots=2) as engine,
        running(engine, ServerSettings(draft=DRAFT)) as server,
    ):
        yield server


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured in the examples of the drop-in."""
    start = esp_edge.Llama.__init__
    monkeypatch.setattr(esp_edge.Llama, "__init__", lambda self, *args, **more: start(self, *args, draft=DRAFT, **more))


def served(code: str, server: Running) -> str:
    assert ADDRESS in code
    return code.replace(ADDRESS, server.url)


def local(code: str, path: Path) -> str:
    assert '"model.gguf"' in code
    return code.replace('"model.gguf"', repr(str(path)))


def test_every_example_is_run() -> None:
    assert len(re.findall(r"```python", PAGE.read_text("utf-8"))) == 4


def test_openai_python(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    names, out = run(served(example("from openai"), server), capsys)
    text = names["reply"].choices[0].message.content
    assert "sky" in text.lower()
    assert out.count(text) == 2  # whole and streamed
    assert re.search(r"^\d\.\d+ tokens a pass$", out, re.MULTILINE)
    assert re.fullmatch("#[0-9a-f]{6}", names["parsed"].choices[0].message.parsed.hex)


def test_langchain_and_the_server(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run(served(example("from langchain_core"), server), capsys)
    first, *_, last = out.splitlines()
    assert first
    assert re.search(r"name='[^']*' legs=\d+$", last)


@pytest.mark.usefixtures("drafts")
def test_langchain_and_the_dropin(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, out = run(local(example("from langchain_community"), model_path), capsys)
    assert "Paris" in out
    assert names["llm"].stats.draft_tokens > 0
    names["llm"].close()


@pytest.mark.usefixtures("drafts")
def test_llama_cpp_python(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, out = run(local(example("from esp_edge"), model_path), capsys)
    assert out.startswith("Q: Name the planets in the solar system? A: ")
    assert out.endswith(" tokens a pass\n")
    assert names["llm"].stats.tau >= 1
    names["llm"].close()
