"""Many clients, clients that leave, failures, and the two ends of a server's life."""

from __future__ import annotations

import json
import random
import socket
import statistics
import struct
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


# -- the bundled model -----------------------------------------------------------------------------------------------

QUESTIONS = (
    "Why is the sky blue?",
    "List five animals.",
    "Write two sentences about rain.",
    "How is bread made?",
    "Say hello in three languages.",
    "What is gravity?",
    "Describe a forest.",
    "Name four colours and a fruit for each.",
)


@pytest.fixture(scope="module")
def smollm(model_path: Path) -> Iterator[Running]:
    draft = DraftConfig("auto")
    with (
        load(str(model_path), ModelConfig(n_ctx=4096)) as model,
        Engine(model, draft=draft, n_slots=8) as engine,
        running(engine, ServerSettings(draft=draft)) as server,
    ):
        yield server


def resident_mib() -> float:
    """Of this process, server included; 0 where /proc does not tell."""
    try:
        return int(Path("/proc/self/status").read_text("ascii").split("VmRSS:")[1].split()[0]) / 1024
    except OSError:
        return 0.0


def refrain(code: int) -> dict[str, Any]:
    """A prompt that the model goes on with its own number."""
    return {"prompt": f"The code is {code}. " * 3 + "The code is", "max_tokens": 6}


def ask_for_number(server: Running, code: int, leave_after: int | None) -> str | None:
    """The answer to a number's own prompt; None when its client left in the middle."""
    if leave_after is None:
        response = server.http.post("/v1/completions", json=refrain(code))
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])
    body = refrain(code) | {"stream": True, "max_tokens": 400, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        for _, event in zip(range(leave_after), events(response), strict=False):
            assert "error" not in event
    return None


@pytest.mark.model
def test_two_hundred_requests_of_eight_clients_some_of_whom_leave(smollm: Running) -> None:
    rng = random.Random(5)
    work = [(1000 + 37 * n, rng.randint(1, 12) if rng.random() < 0.2 else None) for n in range(200)]
    before = smollm.engine.status()["totals"]
    wrong: list[tuple[int, str]] = []
    sizes: list[float] = []

    def one(job: tuple[int, int | None]) -> None:
        text = ask_for_number(smollm, *job)
        if text is not None and str(job[0]) not in text:
            wrong.append((job[0], text))
        sizes.append(resident_mib())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, work))  # raises what a request raised
    smollm.wait_idle()
    assert wrong == []
    status = smollm.engine.status()
    counted = {name: n - before[name] for name, n in status["totals"].items()}
    assert (counted["requests"], counted["failed"]) == (200, 0)
    assert counted["finished"] + counted["cancelled"] == 200
    assert counted["cancelled"] > 20
    assert (status["active"], status["queue"]) == (0, 0)
    assert {slot["state"] for slot in status["slots"]} == {"idle"}
    assert statistics.median(sizes[-40:]) - statistics.median(sizes[60:100]) < 12, "memory grows"


@pytest.mark.model
def test_eight_streams_make_more_tokens_than_one_after_the_other(smollm: Running) -> None:
    """Rounds of both alternate, so that what disturbs this machine disturbs both."""

    def seconds(n_clients: int, turn: int) -> float:
        bodies = [f"Attempt {turn}. {question}" for question in QUESTIONS]
        begin = time.perf_counter()
        with ThreadPoolExecutor(n_clients) as pool:
            replies = list(pool.map(lambda text: smollm.chat(text, max_tokens=20, ignore_eos=True), bodies))
        took = time.perf_counter() - begin
        assert [reply["usage"]["completion_tokens"] for reply in replies] == [20] * len(QUESTIONS)
        return took

    ratios: list[float] = []
    while len(ratios) < 3 or (len(ratios) < 9 and statistics.median(ratios) < 1.5):
        turn = 2 * len(ratios)
        ratios.append(seconds(1, turn) / seconds(8, turn + 1))
    assert statistics.median(ratios) >= 1.5, ratios


@pytest.mark.model
def test_twenty_killed_clients_and_the_next_request_starts_at_once(smollm: Running) -> None:
    def first_text() -> float:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 4}
        begin = time.perf_counter()
        with smollm.http.stream("POST", CHAT, json=body) as response:
            next(event for event in events(response) if event["choices"][0]["delta"].get("content"))
            return time.perf_counter() - begin

    first_text()
    usual = first_text()
    for n in range(20):
        kill_mid_stream(smollm, QUESTIONS[n % len(QUESTIONS)])
    waited = first_text()
    assert waited < max(1.0, 5 * usual)
    smollm.wait_idle()


def kill_mid_stream(server: Running, text: str) -> None:
    """A client that is gone without a word: its system resets the connection."""
    body = {"messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": 1000, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 30) as client:
        client.sendall(head.encode() + data)
        seen = b""
        while seen.count(b"data: ") < 3:
            part = client.recv(4096)
            assert part, seen
            seen += part
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.model
def test_exact_answers_under_load_are_the_solo_answers(model_path: Path) -> None:
    sampled = {"temperature": 0.8, "seed": 3}
    work = [(text, more) for text in QUESTIONS for more in ({}, sampled)]
    draft = DraftConfig("auto")
    with (
        load(str(model_path), ModelConfig(n_ctx=2048, exact=True)) as model,
        Engine(model, draft=draft, n_slots=8) as engine,
        running(engine, ServerSettings(draft=draft)) as server,
    ):

        def answer(job: tuple[str, dict[str, Any]]) -> str:
            text, more = job
            return server.text(text, max_tokens=16, **more)

        alone = [answer(job) for job in work]
        with ThreadPoolExecutor(8) as pool:
            for n in range(4):
                pool.submit(ask_for_number, server, 1000 + n, 1 + n)  # clients that leave
            together = list(pool.map(answer, work))
        assert together == alone
        server.wait_idle()


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
