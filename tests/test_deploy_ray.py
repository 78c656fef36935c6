"""Replicas on Ray Serve: which one answers, what clients see when one is lost, and a real local cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest

from esp_edge.config import DraftConfig, ModelConfig
from esp_edge.deploy.affinity import prefix_key, ranked
from esp_edge.deploy.asgi import Messages, call, portable
from esp_edge.deploy.gateway import BusyError, LostError, gateway
from esp_edge.deploy.settings import RaySettings
from esp_edge.errors import ConfigError
from esp_edge.server.settings import ServerSettings

# Ray reads these when it is imported, so it is imported late
os.environ.update(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # everything stays on 127.0.0.1
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN=uuid4().hex,  # else Ray writes one into the home directory
    RAY_USAGE_STATS_ENABLED="0",
    RAY_SERVE_LOG_TO_STDERR="0",
)
CHAT = "/v1/chat/completions"
Message = dict[str, Any]


# -- which replica ---------------------------------------------------------------------------------------------------


def chat_key(*texts: str, path: str = CHAT, **fields: Any) -> str:
    """Of a conversation of user, assistant, user..."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return prefix_key(path, json.dumps({"messages": messages, **fields}).encode())


def test_turns_of_a_conversation_stay_together() -> None:
    key = chat_key("What is a cat?")
    assert key
    assert key == chat_key("What is a cat?", "An animal.", "And a dog?", path="/chat/completions/", temperature=1)
    assert key != chat_key("What is a dog?")


def test_questions_on_one_document_stay_together() -> None:
    document = "word " * 100
    assert chat_key(document + "Question one") == chat_key(document + "Question two")
    parts = [{"type": "text", "text": document + "Question"}]
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    assert prefix_key(CHAT, body) == chat_key(document)


def test_a_system_prompt_alone_does_not_hold_conversations_together() -> None:
    def key(system: str, user: str, **fields: Any) -> str:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return prefix_key(CHAT, json.dumps({"messages": messages, **fields}).encode())

    system = "You are a helpful assistant. " * 50
    assert len({key(system, str(i)) for i in range(20)}) == 20
    assert key(system, "hi") != key(system + "!", "hi")
    assert key(system, "hi") != key(system, "hi", tools=[{"type": "function"}])


def test_prompts_of_completions_and_named_keys() -> None:
    def key(path: str = "/v1/completions", **fields: Any) -> str:
        return prefix_key(path, json.dumps(fields).encode())

    assert (
        key(prompt="a" * 300)
        == key(prompt="a" * 400)
        == key(prompt=["a" * 256, "b"])
        == key("/completions", prompt="a" * 256)
    )
    assert key(prompt=[1, 2, 3]) == key(prompt=[[1, 2, 3], [4]]) != key(prompt=[1, 2])
    assert (
        key(prompt="a", prompt_cache_key="k")
        == key(prompt="b", prompt_cache_key="k")
        == chat_key("c", prompt_cache_key="k")
    )


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"{}", b'{"messages": 1}', b'{"messages": []}', b'{"prompt": null}', b"[" * 5000, b'"\xff"'],
)
def test_a_request_without_a_beginning_goes_anywhere(body: bytes) -> None:
    assert prefix_key(CHAT, body) == prefix_key("/v1/completions", body) == ""
    assert prefix_key("/v1/embeddings", b'{"input": "a"}') == ""


def test_odd_messages_have_keys_as_well() -> None:
    for messages in ([1], ["a"], [{"role": "user"}], [{"role": "user", "content": [1, None, {"a": "\ud800"}]}]):
        assert prefix_key(CHAT, json.dumps({"messages": messages}).encode())


def test_only_the_keys_of_a_lost_replica_move() -> None:
    names = [f"replica-{i}" for i in range(5)]
    keys = [str(i) for i in range(500)]
    before = {key: ranked(key, names) for key in keys}
    assert all(before[key] == ranked(key, random.sample(names, 5)) for key in keys)
    first = Counter(order[0] for order in before.values())
    assert all(60 <= first[name] <= 140 for name in names)
    for key in keys:
        assert ranked(key, names[1:]) == [name for name in before[key] if name != names[0]]


# -- an application behind a one-way line ----------------------------------------------------------------------------


def request(path: str = CHAT, method: str = "POST", headers: Any = (), root_path: str = "") -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": root_path,
        "headers": list(headers),
        "client": ["127.0.0.1", 1],
        "server": None,
        "extensions": {"http.response.pathsend": {}},
        "app": object(),
    }


def start(status: int = 200, kind: str = "application/json") -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]}


def part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def test_a_scope_travels_without_what_is_of_this_process() -> None:
    scope = portable(request(headers=[[b"a", b"b"]]))
    assert scope["headers"] == [(b"a", b"b")]
    assert scope["client"] == ("127.0.0.1", 1)
    assert not {"extensions", "app"} & set(scope)


def test_messages_come_as_they_are_sent() -> None:
    release = asyncio.Event()

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        assert await receive() == {"type": "http.request", "body": b"hi", "more_body": False}
        await send(start())
        await release.wait()
        await send(part(b"a"))
        await send(part(b"", more=False))

    async def run() -> list[Messages]:
        found = []
        async for messages in call(app, request(), b"hi"):
            found.append(messages)
            if messages == [start()]:
                release.set()
        return found

    assert asyncio.run(run()) == [[], [start()], [part(b"a"), part(b"", more=False)]]


def test_closing_the_line_cancels_the_application() -> None:
    ended = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(start())
        try:
            await receive()
        finally:
            ended.append(True)

    async def run() -> None:
        async with contextlib.aclosing(call(app, request(), b"")) as line:
            async for messages in line:
                if messages:
                    return

    asyncio.run(run())
    assert ended == [True]


@pytest.mark.parametrize("complete", [False, True])
def test_a_failure_counts_unless_the_answer_is_complete(complete: bool) -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send(start())
        await send(part(b"", more=not complete))
        raise RuntimeError("broken")

    async def run() -> list[Messages]:
        return [messages async for messages in call(app, request(), b"")]

    if complete:
        assert asyncio.run(run()) == [[], [start(), part(b"", more=False)]]
    else:
        with pytest.raises(RuntimeError, match="broken"):
            asyncio.run(run())


# -- the gateway -----------------------------------------------------------------------------------------------------


@dataclass
class FakeBackend:
    """Answers with parts, of which an exception is raised.

    Attributes:
        asked: (path, body, key) of the requests.
    """

    parts: list[Any]
    asked: list[tuple[str, bytes, str]] = field(default_factory=list)
    closed: bool = False

    async def __call__(self, scope: Any, body: bytes, key: str) -> AsyncGenerator[Messages, None]:
        self.asked.append((scope["path"], body, key))
        try:
            for item in self.parts:
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    await asyncio.Event().wait()
                yield item
        finally:
            self.closed = True


def through(
    *parts: Any, body: bytes = b'{"messages": []}', leave: bool = False, settings: Any = None, **scope: Any
) -> tuple[list[Message], FakeBackend]:
    """What a client gets from a gateway over a backend that does ``parts``."""
    backend, sent = FakeBackend(list(parts)), []
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.sleep(0.05 if leave else 60)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(gateway(backend, settings or ServerSettings())(request(**scope), receive, send))
    return sent, backend


def error_of(body: bytes) -> dict[str, Any]:
    return dict(json.loads(body)["error"])


def test_an_answer_passes_unchanged() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    messages = [start(kind="text/event-stream"), part(b"data: 1\n\n"), part(b"", more=False)]
    sent, backend = through([], messages[:2], messages[2:], body=body)
    assert sent == messages
    assert backend.asked == [(CHAT, body, prefix_key(CHAT, body))]
    assert backend.closed


@pytest.mark.parametrize(
    ("error", "code"),
    [(LostError(), "replica_lost"), (BusyError("no replica"), "queue_full"), (ValueError(), "internal_error")],
)
def test_a_failure_before_the_answer_has_a_status(error: Exception, code: str) -> None:
    sent, _ = through([], error)
    assert sent[0]["status"] == (500 if code == "internal_error" else 503)
    assert ((b"retry-after", b"1") in sent[0]["headers"]) == (code != "internal_error")
    assert error_of(sent[1]["body"])["code"] == code


def test_a_stream_that_had_begun_ends_in_an_error_event() -> None:
    sent, _ = through([], [start(kind="text/event-stream; charset=utf-8"), part(b"data: 1\n\n")], LostError())
    assert sent[:2] == [start(kind="text/event-stream; charset=utf-8"), part(b"data: 1\n\n")]
    assert error_of(sent[2]["body"].removeprefix(b"data: "))["code"] == "replica_lost"
    assert sent[2]["body"].endswith(b"\n\n")
    assert not sent[2]["more_body"]


def test_a_document_that_had_begun_is_cut() -> None:
    with pytest.raises(LostError):
        through([], [start(), part(b"{")], LostError())


def test_a_loss_after_the_answer_is_none() -> None:
    messages = [start(), part(b"{}", more=False)]
    assert through([], messages, LostError())[0] == messages


def test_a_client_that_leaves_ends_its_answer() -> None:
    sent, backend = through([], [start()], None, leave=True)
    assert sent == [start()]
    assert backend.closed


def test_what_must_not_reach_a_replica_is_refused_before() -> None:
    settings = ServerSettings(api_keys=("secret",), max_body_bytes=100)
    sent, backend = through(settings=settings)
    assert sent[0]["status"] == 401
    key = [(b"authorization", b"Bearer secret")]
    sent, backend = through(settings=settings, headers=key, body=b"x" * 101, leave=True)
    assert sent[0]["status"] == 413
    assert backend.asked == []
    sent, backend = through(
        [], [start(), part(b"", more=False)], settings=settings, path="/health", method="GET", body=b""
    )
    assert sent[0]["status"] == 200
    assert backend.asked == [("/health", b"", "")]


def test_the_prefix_of_a_route_is_taken_off() -> None:
    found = []
    for root, path in (("", "/health"), ("/small", "/small/health"), ("/small", "/smaller"), ("/a b", "/a b/é")):
        _, backend = through([], [start(), part(b"", more=False)], method="GET", body=b"", root_path=root, path=path)
        found.append(backend.asked[0][0])
    assert found == ["/health", "/health", "/smaller", "/é"]


def test_the_life_of_a_gateway() -> None:
    incoming = [{"type": "lifespan.shutdown"}, {"type": "lifespan.startup"}]
    sent = []

    async def receive() -> Message:
        return incoming.pop()

    async def send(message: Message) -> None:
        sent.append(message["type"])

    asyncio.run(gateway(FakeBackend([]), ServerSettings())({"type": "lifespan"}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


# -- settings --------------------------------------------------------------------------------------------------------


def test_settings_have_the_names_of_the_flags() -> None:
    texts = {
        "model": "m.gguf",
        "replicas": "2",
        "cpus": "1.5",
        "gpus": "0.5",
        "ctx_size": "512",
        "flash_attn": "on",
        "exact": "true",
        "drafter": "none",
        "temp": "0.5",
        "parallel": "3",
        "api_key": "secret",
        "stop": "END",
        "no_web": "yes",
        "alias": "mine",
        "shutdown_timeout": "7",
    }
    settings = RaySettings.from_args(texts)
    assert (settings.model, settings.replicas, settings.cpus, settings.gpus) == ("m.gguf", 2, 1.5, 0.5)
    assert settings.load == ModelConfig(n_ctx=512, exact=True)
    assert settings.draft == DraftConfig("none")
    assert (settings.parallel, settings.shutdown_timeout, settings.server.model_id) == (3, 7, "mine")
    assert (settings.server.api_keys, settings.server.web, settings.server.metrics) == (("secret",), False, False)
    assert (settings.server.defaults.temperature, settings.server.defaults.stop) == (0.5, ("END",))
    typed = {"replicas": 2, "exact": True, "api_key": ["a", "b"], "cpus": 2, "threads": 1}
    settings = RaySettings.from_args(typed)
    assert (settings.replicas, settings.load.exact, settings.server.api_keys) == (2, True, ("a", "b"))
    assert (settings.cpus_of_replica, settings.model_config.n_threads) == (2, 1)
    assert "secret" not in repr(RaySettings.from_args(texts))


def test_threads_are_the_cpus_of_a_replica() -> None:
    assert RaySettings(cpus=3).model_config.n_threads == 3
    assert RaySettings(cpus=0.5).model_config.n_threads == 1
    assert RaySettings(load=ModelConfig(n_threads=4)).cpus_of_replica == 4
    assert RaySettings(replicas=1000).cpus_of_replica == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"replica": 2}, "there is no setting replica; did you mean replicas?"),
        ({"port": 80}, "port is not a setting of the replicas: set it in Ray's configuration"),
        ({"replicas": 0}, "replicas must be 1 or more, but 0 was given"),
        ({"replicas": "many"}, "replicas = 'many': "),
        ({"cpus": -1}, "cpus must be 0 or more, but -1"),
        ({"cpus": "nan"}, "cpus must be 0 or more, but nan"),
        ({"parallel": 0}, "parallel must be 1 or more"),
        ({"ctx_size": "x"}, "ctx_size = 'x': "),
        ({"drafter": "magic"}, "drafter must be one of"),
        ({"max_body_size": 0}, "max_body_size must be above 0"),
        ({"rpc": "a:1", "n_gpu_layers": -1, "replicas": 2}, "an rpc server serves one replica, but replicas is 2"),
        ({"exact": True, "n_gpu_layers": 1}, "exact mode holds on the CPU only"),
    ],
)
def test_settings_that_do_not_fit(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RaySettings.from_args(args)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_without_ray_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['ray'] = None; import esp_edge.deploy.settings, esp_edge.deploy.ray"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: esp_edge.deploy.ray needs Ray Serve (")
    assert last.endswith("): pip install 'esp-edge[ray]'")


# -- the parts that know Ray -----------------------------------------------------------------------------------------


def test_a_stalled_engine_is_noticed() -> None:
    from esp_edge.deploy.ray import Watch  # noqa: PLC0415 - imports Ray, which takes a second

    watch = Watch(10)
    assert not watch.is_stalled("a", busy=True, now=100)
    assert not watch.is_stalled("a", busy=True, now=109)
    assert watch.is_stalled("a", busy=True, now=111)
    assert not watch.is_stalled("b", busy=True, now=112)
    assert not watch.is_stalled("b", busy=False, now=200)
    assert not watch.is_stalled("b", busy=True, now=209)
    assert watch.is_stalled("b", busy=True, now=211)


def test_a_full_replica_hands_over_to_the_next() -> None:
    from esp_edge.deploy.ray import PrefixRouter  # noqa: PLC0415

    names = ["a", "b", "c"]
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]
    running = dict.fromkeys(names, 0)
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state(parallel=2)
    router._replica_queue_len_cache = SimpleNamespace(get=lambda replica_id: running[replica_id.unique_id])

    def pending(key: str) -> Any:
        return SimpleNamespace(
            kwargs={"key": key},
            routing_context=SimpleNamespace(should_backoff=False),
            metadata=SimpleNamespace(internal_request_id=uuid4().hex),
            future=asyncio.get_running_loop().create_future(),
        )

    def complete(request: Any) -> None:
        router.on_request_completed(replicas[0].replica_id, request.metadata.internal_request_id)

    async def order(request: Any) -> list[str]:
        chosen = await router.choose_replicas(replicas, request)
        assert all(len(rank) == 1 for rank in chosen)
        assert request.routing_context.should_backoff
        return [rank[0].replica_id.unique_id for rank in chosen]

    async def ask(key: str) -> list[str]:
        request = pending(key)
        found = await order(request)
        complete(request)
        return found

    async def run() -> None:
        first, second, third = wanted = ranked("k", names)
        assert await ask("k") == wanted
        running[first] = 2  # as Ray knows
        assert await ask("k") == [second, third, first]
        running.update(dict.fromkeys(names, 5))
        assert await ask("k") == wanted
        running.update(dict.fromkeys(names, 0))

        burst = [pending("k") for _ in range(5)]  # before Ray knows anything
        assert [(await order(request))[0] for request in burst] == [first, first, second, second, third]
        complete(burst[0])
        burst[4].future.cancel()
        await asyncio.sleep(0)
        assert await ask("k") == [first, third, second]
        router.on_request_routed(burst[2], SimpleNamespace(unique_id=first), None)  # it was taken by another one
        assert await ask("k") == [second, third, first]
        for request in burst:
            complete(request)
        assert {(await ask(""))[0] for _ in range(100)} == set(names)
        assert router._sent == {}

    asyncio.run(run())


# -- a cluster -------------------------------------------------------------------------------------------------------

PARALLEL = 2
LONG = 160  # tokens of an answer that takes a while


@dataclass
class Cluster:
    """Two replicas on this machine. Their answers are exact, so that the same request has the same answer always."""

    url: str
    http: httpx.Client

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options})

    def ask(self, *texts: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        """(replica, reply) of a conversation."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        response = self.http.post(CHAT, json={"messages": messages, "max_tokens": 4, **fields})
        assert response.status_code == 200, response.text
        return response.headers["x-esp-edge-replica"], response.json()

    def replicas(self) -> set[str]:
        """Names of those that answer."""
        return {self.http.get("/health").headers["x-esp-edge-replica"] for _ in range(20)}

    def stream(self, text: str, begun: threading.Event) -> tuple[str, str, Any]:
        """(replica, text, last event) of a long answer; the last event is [DONE] or an error object."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": LONG, "ignore_eos": True, "stream": True}
        found = ""
        with self.http.stream("POST", CHAT, json=body) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return response.headers["x-esp-edge-replica"], found, "[DONE]"
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return response.headers["x-esp-edge-replica"], found, event["error"]
                    found += event["choices"][0]["delta"].get("content") or ""
                    if found:
                        begun.set()
        raise AssertionError(f"the stream ended without [DONE] or an error after {found!r}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(model_path: Path) -> Iterator[Cluster]:
    import ray  # noqa: PLC0415 - takes a second, and see above
    from ray import serve  # noqa: PLC0415

    from esp_edge.deploy.ray import app  # noqa: PLC0415

    memory = 80 << 20  # of the object store: messages are small
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=memory, log_to_driver=False, logging_level="error"
    )
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        settings = {
            "model": str(model_path),
            "ctx_size": 1024,
            "exact": True,
            "drafter": "none",
            "shutdown_timeout": 30,
        }
        args = {"replicas": "2", "cpus": "1", "parallel": PARALLEL, "max_body_size": 1, **settings}
        serve.run(app(args), name="esp")
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=60) as http:
            yield Cluster(url, http)
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.mark.model
def test_the_routes_of_the_server_are_there(cluster: Cluster) -> None:
    client = cluster.openai()
    assert [model.id for model in client.models.list()] == ["SmolLM2-135M-Instruct.Q4_1"]
    reply = client.completions.create(model="m", prompt="One, two, three, four,", max_tokens=3)
    assert reply.choices[0].text.strip().startswith("five")
    with pytest.raises(openai.BadRequestError, match="temperature must be a number"):
        cluster.openai().chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            temperature="hot",  # type: ignore[arg-type]
        )
    assert cluster.http.get("/health").json() == {"status": "ok"}
    assert "<!doctype html>" in cluster.http.get("/").text.lower()
    assert cluster.http.get("/no/such").status_code == 404
    too_large = cluster.http.post(CHAT, content=b"x" * ((1 << 20) + 1))
    assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.model
def test_a_conversation_stays_and_conversations_are_spread(cluster: Cluster) -> None:
    seen = Counter[str]()
    for i in range(8):
        question = f"Number {i}: tell me something about it."
        replica, reply = cluster.ask(question)
        seen[replica] += 1
        again, _ = cluster.ask(question, reply["choices"][0]["message"]["content"], "Go on.")
        assert again == replica
    assert set(seen) == cluster.replicas()
    assert len(seen) == 2


@pytest.mark.model
def test_the_second_question_on_a_document_finds_it_in_the_cache(cluster: Cluster) -> None:
    document = "The quick brown fox jumps over the lazy dog. " * 56  # more than 512 tokens, exact mode's step
    _, reply = cluster.ask(document + "Who jumps?")
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    _, reply = cluster.ask(document + "Over whom?")
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 512


@pytest.mark.model
def test_a_beginning_that_many_share_is_answered_by_all(cluster: Cluster) -> None:
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda _: cluster.ask("Tell me a story.", max_tokens=32, ignore_eos=True), range(6)))
    assert {replica for replica, _ in replies} == cluster.replicas()
    assert len({reply["choices"][0]["message"]["content"] for _, reply in replies}) == 1


@pytest.mark.model
def test_a_stream_comes_piece_by_piece(cluster: Cluster) -> None:
    messages: Any = [{"role": "user", "content": "Why is the sky blue?"}]
    times, text = [], ""
    client = cluster.openai()
    for chunk in client.chat.completions.create(model="m", messages=messages, max_tokens=40, stream=True):
        if chunk.choices[0].delta.content:
            times.append(time.monotonic())
            text += chunk.choices[0].delta.content
    whole = client.chat.completions.create(model="m", messages=messages, max_tokens=40)
    assert text == whole.choices[0].message.content
    assert len(times) >= 20
    assert times[-1] - times[0] > 0.05


@pytest.mark.model
def test_a_client_that_leaves_frees_its_slot(cluster: Cluster) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 900, "ignore_eos": True, "stream": True}
    with cluster.http.stream("POST", CHAT, json=body) as response:
        name = response.headers["x-esp-edge-replica"]
        next(response.iter_lines())

    def is_idle() -> bool:
        response = cluster.http.get("/props")
        return response.headers["x-esp-edge-replica"] == name and response.json()["engine"]["active"] == 0

    wait(is_idle, 5.0)


def pids_of_replicas() -> dict[str, int]:
    """Name -> process of the replicas that run."""
    import ray  # noqa: PLC0415

    found = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["name"].startswith("SERVE_REPLICA::esp#Replica#"):
            actor = ray.get_actor(entry["name"], namespace=entry["namespace"])
            found[entry["name"].rpartition("#")[2]] = ray.get(
                actor.__ray_call__.remote(lambda _: os.getpid()), timeout=10
            )
    return found


@pytest.mark.model
def test_a_replica_that_is_killed_takes_nothing_else_along(cluster: Cluster) -> None:
    texts = [f"Tell me a long story about the number {i}." for i in range(40)]
    pids = pids_of_replicas()
    assert set(pids) == cluster.replicas()
    chosen: dict[str, list[str]] = {name: [] for name in pids}
    for text in texts:
        name = ranked(chat_key(text), pids)[0]
        if len(chosen[name]) < PARALLEL:
            chosen[name].append(text)
    victim, survivor = sorted(pids)

    begun = {text: threading.Event() for texts in chosen.values() for text in texts}
    with ThreadPoolExecutor(3 * len(begun)) as pool:
        streams: dict[str, Future[tuple[str, str, Any]]]
        streams = {text: pool.submit(cluster.stream, text, event) for text, event in begun.items()}
        assert all(event.wait(30) for event in begun.values())
        os.kill(pids[victim], signal.SIGKILL)
        # at once, and for the lost one's prefixes as well
        late = [pool.submit(cluster.ask, text, max_tokens=2) for text in begun]
        results = {text: future.result(timeout=60) for text, future in streams.items()}
        assert victim not in {future.result(timeout=60)[0] for future in late}

    wait(lambda: len(pids_of_replicas()) == 2 and len(cluster.replicas()) == 2, 60)
    assert victim not in cluster.replicas()

    with ThreadPoolExecutor(len(begun)) as pool:  # without trouble
        whole = pool.map(lambda text: cluster.stream(text, threading.Event())[1], begun)
        alone = dict(zip(begun, whole, strict=True))
    for text in chosen[survivor]:
        assert results[text] == (survivor, alone[text], "[DONE]")
    for text in chosen[victim]:
        replica, found, last = results[text]
        assert replica == victim
        assert found != alone[text]
        assert alone[text].startswith(found)
        assert last["code"] == "replica_lost"


@pytest.mark.model
def test_answers_are_complete_before_a_replica_stops(cluster: Cluster) -> None:
    from ray import serve  # noqa: PLC0415

    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(cluster.stream, "Tell me about the sea.", begun)
        assert begun.wait(30)
        serve.delete("esp")
        _, text, last = stream.result(timeout=30)
    assert last == "[DONE]"
    assert len(text) > LONG
    assert cluster.http.get("/health").status_code == 404
