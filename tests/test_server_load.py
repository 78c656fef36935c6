"""Many clients, clients that leave, failures, and the two ends of a server's life."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_fakes import Running, ScriptedEngine, events, running

from esp_edge.config import DraftConfig, ModelConfig
from esp_edge.engine import Engine
from esp_edge.errors import DecodeError, GrammarError, QueueFullError
from esp_edge.server.settings import ServerSettings
from esp_edge.session import Model, load

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Iterator[Model]:
    with load(tiny()) as model:
        yield model


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[Running]:
    draft = DraftConfig("auto", cost="flat")
    settings = ServerSettings(draft=draft)
    with Engine(model, draft=draft, n_slots=4, max_queue=64) as engine, running(engine, settings) as server:
        yield server


def scripted(model: Model, *parts: Any, delay: float = 0.0, **settings: Any) -> Any:
    engine = ScriptedEngine(model, lambda _prompt: parts, delay)
    return running(engine, ServerSettings(**settings))


# -- many clients ----------------------------------------------------------------------------------------------------


@pytest.fixture
def exact(tiny: Callable[..., Path]) -> Iterator[Running]:
    draft = DraftConfig("auto", block_complexity=16, cost="flat")
    with (
        load(tiny(), ModelConfig(exact=True)) as model,
        Engine(model, draft=draft, n_slots=4) as engine,
        running(engine, ServerSettings(draft=draft)) as server,
    ):
        yield server


def test_answers_of_many_threads_are_those_of_one(exact: Running) -> None:
    server = exact
    texts = [f"Say only the number {k}" for k in range(12)]
    alone = [server.text(text, max_tokens=12) for text in texts]
    stop = threading.Event()
    healthy: list[int] = []

    def look() -> None:
        while not stop.is_set():
            healthy.append(server.http.get("/health").status_code)

    watcher = threading.Thread(target=look)
    watcher.start()
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda text: server.text(text, max_tokens=12), texts))
    stop.set()
    watcher.join()
    assert set(healthy) == {200}
    assert together == alone
    server.wait_idle()


def test_a_full_queue_says_when_to_come_back(model: Model) -> None:
    def full(_prompt: str) -> Any:
        return QueueFullError(4, 2.4)

    with running(ScriptedEngine(model, full)) as server:
        for stream in (False, True):
            response = server.http.post(CHAT, json={**HI, "stream": stream})
            assert response.status_code == 503
            assert response.headers["Retry-After"] == "3"
            assert response.json()["error"]["code"] == "queue_full"
        with pytest.raises(openai.InternalServerError):
            server.openai().chat.completions.create(model="x", messages=HI["messages"])  # type: ignore[arg-type]


# -- clients that leave ----------------------------------------------------------------------------------------------


def test_after_twenty_aborted_streams_the_next_request_is_answered_at_once(server: Running) -> None:
    server.text()
    begin = time.perf_counter()
    server.text()
    usual = time.perf_counter() - begin
    for _ in range(20):
        body = {**HI, "stream": True, "max_tokens": 400, "ignore_eos": True}
        with server.http.stream("POST", CHAT, json=body) as response:
            assert next(iter(events(response)))
    begin = time.perf_counter()
    server.text()
    assert time.perf_counter() - begin < 2 + 5 * usual
    server.wait_idle()


def test_a_stream_that_is_left_is_cancelled(model: Model) -> None:
    with scripted(model, *["word "] * 400, delay=0.02) as server:
        with server.http.stream("POST", CHAT, json={**HI, "stream": True}) as response:
            next(iter(events(response)))
        (ticket,) = server.engine.tickets
        assert ticket.cancelled.wait(2)
        server.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token(model: Model, stream: bool) -> None:
    with scripted(model, "never", delay=30) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + CHAT, json={**HI, "stream": stream}, timeout=0.3)
        (ticket,) = server.engine.tickets
        assert ticket.cancelled.wait(2)
        server.wait_idle()


def test_all_answers_of_a_request_are_cancelled(model: Model) -> None:
    with scripted(model, *["word "] * 400, delay=0.02) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": ["a"] * 6, "n": 2}, timeout=0.4)
        assert all(ticket.cancelled.wait(2) for ticket in server.engine.tickets)
        assert len(server.engine.tickets) == 4  # the others were not even asked for


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [(GrammarError("no token fits"), 400, "invalid_grammar"), (DecodeError("status -3"), 500, "decode_failed")],
)
def test_a_failure_before_the_first_token_has_its_status(
    model: Model, failure: Exception, status: int, code: str
) -> None:
    with scripted(model, failure) as server:
        for stream in (False, True):
            error = server.error(CHAT, status, json={**HI, "stream": stream})
            assert error["code"] == code


def test_a_failure_after_it_is_an_event(model: Model) -> None:
    with scripted(model, "some ", DecodeError("status -3")) as server:
        with server.http.stream("POST", CHAT, json={**HI, "stream": True}) as response:
            assert response.status_code == 200
            found = list(events(response))
        assert found[-1]["error"]["code"] == "decode_failed"
        with pytest.raises(openai.APIError, match="status -3"):
            for _ in server.openai().chat.completions.create(model="x", messages=HI["messages"], stream=True):  # type: ignore[call-overload]
                pass
        assert server.http.get("/health").status_code == 200


def test_what_nobody_expected_is_told_without_details(model: Model) -> None:
    with scripted(model, RuntimeError("secret of the house")) as server:
        error = server.error(CHAT, 500, json=HI)
        assert "secret" not in json.dumps(error)


# -- keep-alive ------------------------------------------------------------------------------------------------------


def test_a_slow_first_token_is_waited_for_with_pings(model: Model) -> None:
    with scripted(model, "at last", delay=0.7, ping_seconds=0.2) as server:
        with server.http.stream("POST", CHAT, json={**HI, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[0] == ": ping"
        assert lines[-1] == "data: [DONE]"
        assert all(line.startswith(("data: ", ": ping")) for line in lines)
        stream = server.openai().chat.completions.create(model="x", messages=HI["messages"], stream=True)  # type: ignore[call-overload]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "at last"


# -- beginning and end -----------------------------------------------------------------------------------------------


def test_while_the_model_loads_everything_says_so(model: Model) -> None:
    with running(None) as server:
        health = server.http.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "loading"
        assert server.error(CHAT, 503, json=HI)["code"] == "loading"
        assert server.http.get("/v1/models").status_code == 503
        assert server.http.get("/props").status_code == 503
        assert server.http.get("/metrics").status_code == 200
        server.service.attach(ScriptedEngine(model, lambda _: ["ready"]))
        assert server.http.get("/health").status_code == 200
        assert server.text() == "ready"


def test_answers_end_with_a_word_when_the_server_goes(model: Model) -> None:
    with scripted(model, *["word "] * 1000, delay=0.02) as server:
        with server.http.stream("POST", CHAT, json={**HI, "stream": True}) as response:
            lines = events(response)
            next(lines)
            (batch,) = server.service.batches
            batch._loop.call_soon_threadsafe(server.service.stop_answers)
            *_, last = lines
        assert last["error"]["code"] == "shutting_down"
        assert server.engine.tickets[0].cancelled.wait(2)
