"""A server that really listens, over a real engine or one that answers from a script."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import openai
import uvicorn

from esp_edge.config import DraftConfig, GenerationParams
from esp_edge.metrics import GenerationStats
from esp_edge.server.app import create_app, service_of
from esp_edge.server.settings import ServerSettings
from esp_edge.session import Chunk, Model

__all__ = ["Running", "ScriptedEngine", "ScriptedTicket", "events", "running"]


class Running:
    """A server in a thread of this process.

    Attributes:
        http: a client of it.
        engine: what it serves.
    """

    def __init__(self, engine: Any, settings: ServerSettings | None = None, **config: Any) -> None:
        self.engine = engine
        app = create_app(engine, settings)
        self.service = service_of(app)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        options = {
            "loop": "asyncio",
            "http": "h11",
            "ws": "none",
            "log_level": "warning",
            "timeout_graceful_shutdown": 2,
        } | config
        self.server = uvicorn.Server(uvicorn.Config(app, **options))
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        while not self.server.started:
            time.sleep(0.005)
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def openai(self, **options: Any) -> openai.OpenAI:
        """OpenAI's own client; it does not repeat what failed."""
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options})

    def chat(self, text: str = "the rain", **fields: Any) -> dict[str, Any]:
        """The reply to one message; the status must be 200."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}
        response = self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def text(self, text: str = "the rain", **fields: Any) -> str:
        """Its text."""
        return self.chat(text, **fields)["choices"][0]["message"]["content"]

    def stream(self, text: str = "the rain", **fields: Any) -> list[dict[str, Any]]:
        """All events of a stream but the last, which must be [DONE]."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "stream": True, **fields}
        with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            found = list(events(response))
        assert found[-1] == "[DONE]"
        return found[:-1]

    def error(self, path: str, status: int = 400, **request: Any) -> dict[str, Any]:
        """The error object of a request that is refused."""
        response = self.http.post(path, **request)
        assert response.status_code == status, (response.status_code, response.text[:300])
        found = response.json()["error"]
        assert set(found) >= {"message", "type", "param", "code"}
        assert "\n" not in found["message"]
        return found

    def wait_idle(self, seconds: float = 5.0) -> None:
        """Until no answer is being made."""
        end = time.monotonic() + seconds
        while self.engine.status()["active"] or self.service.batches:
            assert time.monotonic() < end, "an answer goes on"
            time.sleep(0.005)

    def hold_little(self) -> None:
        """The system keeps only a few kilobytes that the clients of new connections have not read."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)

    def close(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()


@contextmanager
def running(engine: Any, settings: ServerSettings | None = None, **config: Any) -> Iterator[Running]:
    """A server for one test."""
    server = Running(engine, settings, **config)
    try:
        yield server
    finally:
        server.close()


def events(response: httpx.Response) -> Iterator[Any]:
    """Data of server-sent events, parsed; the last one is ``[DONE]``."""
    for line in response.iter_lines():
        assert not line.startswith(("id:", "event:"))
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


class ScriptedTicket:
    """Emits parts one after the other from a thread of its own; a part that is an exception ends it.

    Attributes:
        cancelled: the server gave it up.
        done: no part will follow.
    """

    def __init__(self, model: Model, parts: Sequence[str | Exception], params: GenerationParams, delay: float) -> None:
        self.stats = GenerationStats(drafter="script", prompt_tokens=3)
        self.params = params
        self.cancelled = threading.Event()
        self.done = threading.Event()
        self._model, self._parts, self._delay = model, parts, delay

    def add_listener(self, callback: Callable[[Any], None]) -> None:
        threading.Thread(target=self._run, args=(callback,), daemon=True).start()

    def cancel(self) -> None:
        self.cancelled.set()

    def _run(self, callback: Callable[[Any], None]) -> None:
        last = len(self._parts) - 1
        for i, part in enumerate(self._parts):
            if self.cancelled.wait(self._delay):
                break
            if isinstance(part, Exception):
                self.done.set()
                callback(part)
                return
            ids = tuple(self._model.tokenizer.encode(part))
            self.stats.count(2, [0, 1], [True] * len(ids))
            sources = ("suffix",) * len(ids)
            callback(Chunk(part, ids, (True,) * len(ids), sources, (), "stop" if i == last else None, self.stats))
        self.done.set()
        callback(None)


class ScriptedEngine:
    """Answers with the parts of ``script(prompt text)``; one that is an exception at the start is raised by submit.

    Attributes:
        tickets: of all requests.
        prompts: their texts.
        drafts: how they were to be drafted.
    """

    def __init__(self, model: Model, script: Callable[[str], Sequence[str | Exception]], delay: float = 0.0) -> None:
        self.model = model
        self.delay = delay
        self.tickets: list[ScriptedTicket] = []
        self.prompts: list[str] = []
        self.drafts: list[DraftConfig | None] = []
        self._script = script

    def submit(self, prompt: Any, params: GenerationParams, *, draft: DraftConfig | None = None) -> ScriptedTicket:
        text = b"".join(map(self.model.tokenizer.raw_piece, prompt)).decode("utf-8", "replace")
        parts = self._script(text)
        if isinstance(parts, Exception):
            raise parts
        self.prompts.append(text)
        self.drafts.append(draft)
        self.tickets.append(ScriptedTicket(self.model, parts, params, self.delay))
        return self.tickets[-1]

    def status(self) -> dict[str, Any]:
        active = sum(not ticket.done.is_set() and not ticket.cancelled.is_set() for ticket in self.tickets)
        return {"active": active, "queue": 0, "totals": {"requests": len(self.tickets)}}

    def close(self, timeout: float | None = None) -> None:
        del timeout
        for ticket in self.tickets:
            with suppress(Exception):
                ticket.cancel()
