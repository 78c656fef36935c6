"""What once went wrong in the server, a test each."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fakes import Running, ScriptedEngine, running

from esp_edge.errors import DecodeError
from esp_edge.models import sampler
from esp_edge.server.errors import ApiError, shown
from esp_edge.server.pages import STATIC
from esp_edge.server.schemas import FunctionSpec, Tool
from esp_edge.server.service import check_ids
from esp_edge.server.tools import make_offer
from esp_edge.session import Model, load

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Iterator[Model]:
    with load(tiny()) as model:
        yield model


@pytest.fixture
def server(model: Model) -> Iterator[Running]:
    with running(ScriptedEngine(model, lambda _: ["ok"])) as server:
        yield server


def test_the_header_has_the_policy_of_the_page(server: Running) -> None:
    """It once allowed styles in the text and images from blobs, which the page's own policy does not."""
    page = server.http.get("/")
    own = re.search(r'Content-Security-Policy" content="([^"]*)"', page.text)
    assert own is not None
    assert page.headers["content-security-policy"] == f"{own[1]}; frame-ancestors 'none'"
    names = [path.name for path in STATIC.iterdir() if path.suffix == ".js"]
    assert "frame-ancestors 'none'" in server.http.get(f"/static/{names[0]}").headers["content-security-policy"]


def test_large_headers_are_refused_also_in_one_piece(server: Running) -> None:
    """h11 compares with its limit only while a request is incomplete: 70 kB in one read passed."""
    for request in ({"headers": {"X": "a" * 70_000}}, {"headers": [(b"a", b"b" * 9)] * 4000}, {"params": "q" * 40_000}):
        response = server.http.get("/health", **request)
        assert response.status_code == 431
        assert response.json()["error"]["code"] == "headers_too_large"
        assert response.headers["connection"] == "close"
    assert server.http.get("/health", headers={"X": "a" * 30_000}).status_code == 200


def test_answers_that_fail_are_counted_as_such(model: Model) -> None:
    """They counted as cancelled."""
    with running(ScriptedEngine(model, lambda _: ["some ", DecodeError("status -3")])) as server:
        assert server.http.post(CHAT, json=HI).status_code == 500
        text = server.http.get("/metrics").text
    assert 'esp_edge_answers_total{outcome="failed"} 1.0' in text
    assert 'outcome="cancelled"' not in text


def test_what_nobody_expected_is_counted(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 500 is sent outside of the layer that counts, and the connection was closed without a word."""
    monkeypatch.setattr("esp_edge.server.info.check_ids", lambda *_: 1 / 0)
    response = server.http.post("/detokenize", json={"tokens": [5]})
    assert response.status_code == 500
    assert response.headers["connection"] == "close"
    assert 'http_requests_total{path="/detokenize",status="500"} 1.0' in server.http.get("/metrics").text


def test_a_long_detokenize_stops_nobody_else(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran on the event loop: a million tokens froze every stream for seconds."""
    started, go_on = threading.Event(), threading.Event()

    def slow(ids: list[int], n_vocab: int) -> list[int]:
        started.set()
        assert go_on.wait(10)
        return check_ids(ids, n_vocab)

    monkeypatch.setattr("esp_edge.server.info.check_ids", slow)
    found: list[httpx.Response] = []
    body = {"tokens": [5, 6]}
    asking = threading.Thread(target=lambda: found.append(httpx.post(f"{server.url}/detokenize", json=body)))
    asking.start()
    try:
        assert started.wait(10)
        assert server.http.get("/health", timeout=5).status_code == 200
    finally:
        go_on.set()
        asking.join()
    assert found[0].status_code == 200
    assert server.error("/detokenize", json={"tokens": [-1]})["param"] == "tokens"


def test_many_tools_are_compared_in_no_time() -> None:
    """Each name was looked for among all: twenty thousand took seconds, a full body minutes."""
    tools = [Tool(type="function", function=FunctionSpec(name=f"f{i}")) for i in range(20_000)]
    start = time.perf_counter()
    assert len(make_offer(tools, None).names) == len(tools)
    assert time.perf_counter() - start < 2
    with pytest.raises(ApiError, match="'f7' is there twice"):
        make_offer([*tools, tools[7]], None)


def test_a_large_wrong_value_is_shown_at_once() -> None:
    """All of its characters were looked at, on the event loop."""
    start = time.perf_counter()
    assert shown("x" * (8 << 20)) == "'" + "x" * 59 + "..."
    assert time.perf_counter() - start < 0.3
    assert shown("a\u2028b") == "'a\\u2028b'"


def test_the_log_of_others_is_no_part_of_a_message(capfd: pytest.CaptureFixture[str]) -> None:
    """While a grammar compiles, standard error is read for the parser's words; a line of the log got into the reply."""

    def make(text: bytes, fails: bool) -> None:
        os.write(2, b"203.0.113.9 GET /private\n" + text)
        if fails:
            raise ValueError("the grammar does not compile")

    _, failed, said = sampler._listening(lambda: make(b"parse: error parsing grammar: expecting name\n", True))
    assert failed is not None
    assert said == "expecting name"
    assert sampler._listening(lambda: make(b"", True))[2] == ""
    sampler._listening(lambda: make(b"", False))
    assert "203.0.113.9 GET /private" in capfd.readouterr().err  # and it was lost to the log


def test_a_shutdown_is_told_to_who_waits_for_a_thread(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was being submitted or scored did not see it: uvicorn cut it off, with a traceback in the log."""
    engine = ScriptedEngine(model, lambda _: ["ok"])
    submit, begun, go_on = engine.submit, threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        begun.set()
        assert go_on.wait(20)
        return submit(*args, **options)

    monkeypatch.setattr(engine, "submit", slow)
    with running(engine) as server:
        for stream in (False, True):
            found: list[httpx.Response] = []
            body = {**HI, "stream": stream}

            def ask(body: dict[str, Any] = body, found: list[httpx.Response] = found) -> None:
                found.append(httpx.post(server.url + CHAT, json=body, timeout=20))

            asking = threading.Thread(target=ask)
            asking.start()
            try:
                assert begun.wait(10)
                server.server.servers[0].get_loop().call_soon_threadsafe(server.service.stop_answers)
                asking.join(5)
                assert not asking.is_alive()
                assert found[0].status_code == 503
                assert found[0].json()["error"]["code"] == "shutting_down"
            finally:
                go_on.set()
                asking.join()
            begun.clear()
            go_on.clear()


_SLOW = """
import time
from esp_edge.cli import app, serve

load_model = serve.load_model

def slow(*options):
    print("loads", flush=True)
    time.sleep({seconds})
    model = load_model(*options)
    print("loaded", flush=True)
    return model

serve.load_model, serve.LOAD_SECONDS = slow, {patience}
app.main(["serve", "--port", "0", "-m", {path!r}, "--drafter", "pld"])
"""


@pytest.mark.parametrize(("seconds", "patience", "left"), [(1, 20, "loaded"), (60, 0.2, "")])
def test_a_signal_while_the_model_loads_ends_in_peace(
    tiny: Callable[..., Path], seconds: float, patience: float, left: str
) -> None:
    """The interpreter went away under the loading thread, which often aborted the process."""
    code = _SLOW.format(seconds=seconds, patience=patience, path=str(tiny()))
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loads\n"
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate(timeout=15)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert output.startswith(left)
    assert "terminate" not in errors


_EARLY = """
import os, signal
from esp_edge.cli import app, serve

serve.note = lambda _: os.kill(os.getpid(), signal.SIGTERM)
app.main(["serve", "--port", "0", "-m", {path!r}, "--drafter", "pld"])
"""


def test_a_signal_before_uvicorn_looks_is_not_lost(tiny: Callable[..., Path]) -> None:
    """It was, and the server went on."""
    command = [sys.executable, "-c", _EARLY.format(path=str(tiny()))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr
