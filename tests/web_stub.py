"""A server for the page alone: its files, and the API answered from a script. Standard library only.

``python tests/web_stub.py`` serves it on port 8777 to look at.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["Reply", "WebStub"]

STATIC = Path(__file__).parent.parent / "esp_edge" / "server" / "static"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
SOURCES = ("suffix", "adjacency", "esp1", "esp2", "last")
PASS_WIDTHS = (1, 3, 2, 1, 4, 2, 1, 2)  # tokens a pass commits with speculation, over and over


@dataclass
class Reply:
    """What one request is answered.

    Attributes:
        text: the answer.
        delay: seconds between passes.
        status: of an error sent instead; ``error`` is its error object.
        breaks_after: passes after which the connection breaks off; ``fails_after``: after which an error event comes.
        plain: no extension, timings or statistics, as another server would answer.
        sources: draft sources, by turns.
    """

    text: str = "Done."
    delay: float = 0.0
    status: int = 200
    error: dict[str, Any] = field(default_factory=dict)
    breaks_after: int | None = None
    fails_after: int | None = None
    plain: bool = False
    sources: tuple[str, ...] = SOURCES


class WebStub:
    """The server; a context manager.

    Attributes:
        answer: request body -> Reply.
        requests: bodies of the chat requests so far.
        n_gone: streams whose client left.
        key: the API key that is wanted, "" = none.
        is_loading: health says 503.
        connections: that are open.
        model: the name that it goes by.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Reply] | None = None, port: int = 0) -> None:
        self.answer = answer or (lambda _: Reply())
        self.requests: list[dict[str, Any]] = []
        self.n_gone = 0
        self.key = ""
        self.is_loading = False
        self.model = "scripted-135M"
        self._port = port
        self.connections: set[socket.socket] = set()
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://127.0.0.1:{self._port}/"

    def start(self) -> WebStub:
        """Listen; after a stop, on the same port as before."""
        handler = type("Handler", (_Handler,), {"stub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        self._server.daemon_threads = True
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        """Nobody answers any more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> WebStub:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Handler(BaseHTTPRequestHandler):
    stub: WebStub
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        """A connection, kept in mind so that it can be cut."""
        super().setup()
        self.stub.connections.add(self.connection)

    def finish(self) -> None:
        """It is over."""
        self.stub.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""

    def do_GET(self) -> None:
        """Files and facts."""
        path = self.path.split("?")[0]
        if path == "/" or path.startswith("/static/"):
            self._send_file(STATIC / ("index.html" if path == "/" else path.removeprefix("/static/")))
        elif path == "/health":
            loading = {"error": {"message": "the model is loading: ask again in a moment"}}
            self._send_json(503 if self.stub.is_loading else 200, loading if self.stub.is_loading else {"status": "ok"})
        elif not self._has_key():
            self._send_json(401, {"error": {"message": "a valid API key is needed", "code": "invalid_api_key"}})
        elif path == "/v1/models":
            model = {"id": self.stub.model, "object": "model", "created": 0, "owned_by": "esp-edge"}
            self._send_json(200, {"object": "list", "data": [model]})
        elif path == "/props":
            defaults = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 512, "seed": None}
            draft = {"drafter": "auto", "block_complexity": None}
            props = {"n_ctx": 2048, "draft": draft, "drafters": ["auto", "esp", "none", "suffix", "pld"]}
            self._send_json(200, props | {"model_id": self.stub.model, "default_generation_settings": defaults})
        else:
            self._send_json(404, {"error": {"message": "not found"}})

    def do_POST(self) -> None:
        """A chat completion."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._has_key():
            self._send_json(401, {"error": {"message": "a valid API key is needed", "code": "invalid_api_key"}})
            return
        self.stub.requests.append(body)
        reply = self.stub.answer(body)
        if reply.status != 200:
            self._send_json(reply.status, {"error": reply.error})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            self._stream(body, reply)
        except OSError:
            self.stub.n_gone += 1

    def _has_key(self) -> bool:
        return not self.stub.key or self.headers.get("Authorization") == f"Bearer {self.stub.key}"

    def _send_file(self, path: Path) -> None:
        if path.parent != STATIC or not path.is_file():
            self._send_json(404, {"error": {"message": "not found"}})
            return
        self._send(200, path.read_bytes(), TYPES[path.suffix])

    def _send_json(self, status: int, data: Any) -> None:
        self._send(status, json.dumps(data).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _event(self, data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def _chunk(self, delta: dict[str, str], finish: str | None = None, **more: Any) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        self._event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": self.stub.model}
                    | {"choices": [choice]} | more)  # fmt: skip

    def _stream(self, body: dict[str, Any], reply: Reply) -> None:
        self._chunk({"role": "assistant", "content": ""})
        passes = _passes(reply, body.get("speculative", {}).get("enabled", True))
        start, n_tokens = time.perf_counter(), 0
        for number, pieces in enumerate(passes):
            if number == reply.breaks_after:
                return
            if number == reply.fails_after:
                self._event({"error": {"message": "the model ran out of memory", "type": "server_error"}})
                return
            if reply.delay:
                self.wfile.write(b": ping\n\n")
                time.sleep(reply.delay)
            n_tokens += len(pieces)
            seconds = max(time.perf_counter() - start, 1e-3)
            live = {"pieces": pieces, "tau": n_tokens / (number + 1), "tokens_per_second": n_tokens / seconds}
            text = "".join(piece["text"] for piece in pieces)
            self._chunk({"content": text}, **({} if reply.plain else {"esp_edge": live}))
        ms = 1000 * (time.perf_counter() - start) + 1
        self._chunk({}, "stop", **({} if reply.plain else _statistics(passes, ms)))
        if body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": 9, "completion_tokens": n_tokens, "total_tokens": 9 + n_tokens}
            self._event({"id": "chatcmpl-1", "choices": [], "usage": usage})
        self._event("[DONE]")


def _passes(reply: Reply, speculate: bool) -> list[list[dict[str, str]]]:
    """The answer's tokens (words), by the pass that commits them; the last of a pass is the model's own."""
    words = re.findall(r"\s*\S+|\s+$", reply.text)
    passes: list[list[dict[str, str]]] = []
    while words:
        width = PASS_WIDTHS[len(passes) % len(PASS_WIDTHS)] if speculate else 1
        sources = [reply.sources[(len(passes) + i) % len(reply.sources)] for i in range(width - 1)] + [""]
        passes.append([{"text": word, "source": source} for word, source in zip(words, sources, strict=False)])
        del words[:width]
    return passes


def _statistics(passes: list[list[dict[str, str]]], ms: float) -> dict[str, Any]:
    n, accepted = sum(map(len, passes)), [sum(1 for piece in one if piece["source"]) for one in passes]
    histogram = [accepted.count(i) for i in range(max(accepted, default=0) + 1)]
    timings = {
        "prompt_n": 9, "prompt_ms": 12.5, "predicted_n": n, "predicted_ms": ms, "predicted_per_second": 1000 * n / ms,
        "draft_n": 5 * sum(accepted), "draft_n_accepted": sum(accepted),
    }  # fmt: skip
    speculation = {
        "mean_acceptance_length": n / max(len(passes), 1), "draft_acceptance_rate": 0.2,
        "num_spec_steps": len(passes), "num_draft_tokens": 5 * sum(accepted),
        "num_accepted_draft_tokens": sum(accepted), "acceptance_histogram": histogram,
    }  # fmt: skip
    return {"timings": timings, "speculative_decoding_stats": speculation}


if __name__ == "__main__":
    print(WebStub(lambda _: Reply("Some *scripted* words. " * 20, delay=0.05), port=8777).start().url)
    threading.Event().wait()
