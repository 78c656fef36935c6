"""llama-server processes and their answers, in the shape of a session.

One process a mode, started when it is first asked and stopped when the repetition ends; requests follow each other, so
only one program computes at a time. Prompts go over as token ids: template and tokenisation are ours.
"""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from esp_edge.bench.identity import converse
from esp_edge.bench.peers import Peer, PeerMode, last_lines, peer_environment
from esp_edge.bench.server_process import HOST, STOP_SECONDS, ServerProcess, llama_server_command
from esp_edge.config import GenerationParams, ModelConfig
from esp_edge.errors import ContextLengthError, DecodeError, PromptError
from esp_edge.metrics import GenerationStats
from esp_edge.models.tokenizer import TextDecoder
from esp_edge.session import Chunk, Model, Prompt

__all__ = ["PeerServer", "PeerServers", "PeerSession", "peer_stats"]

ANSWER_SECONDS = 24 * 3600.0
WARM_UP = ("Hello",)
WARM_UP_TOKENS = 4
_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}


# -- the server ------------------------------------------------------------------------------------------------------


class PeerServer(ServerProcess):
    """A running llama-server. Close it, or use it as a context manager."""

    def __init__(
        self, peer: Peer, mode: PeerMode, file: Path, config: ModelConfig, *, n_ctx: int, n_threads: int
    ) -> None:
        """Start it and wait until the model is loaded.

        Args:
            config: of our own model; its context and thread count are those given here.

        Raises:
            ConfigError: it ended or did not become ready; the message ends with its last lines.
        """
        settings = replace(config, n_ctx=n_ctx, n_threads=n_threads)
        command = [*llama_server_command(peer, file, settings, n_slots=1), *mode.arguments]
        super().__init__(mode.label, command, peer_environment())

    def complete(self, token_ids: Sequence[int], max_tokens: int) -> Mapping[str, Any]:
        """Answer a prompt greedily, on an empty KV cache: the document of ``POST /completion``.

        Raises:
            DecodeError: it died, refused the request, or answered something else.
        """
        request = {
            "prompt": list(token_ids),
            "n_predict": max_tokens,
            "samplers": ["top_k"],  # the likeliest token, and no further pass over the vocabulary
            "top_k": 1,
            "temperature": 0.0,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": False,
        }
        try:
            status, body = self._ask("POST", "/completion", request, seconds=ANSWER_SECONDS)
        except (OSError, http.client.HTTPException):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            raise DecodeError(f"{self.label} broke off an answer ({self.end()}): {self.said()}") from None
        document = _document(body)
        if status != http.client.OK or not {"tokens", "timings", "stop_type"} <= document.keys():
            raise DecodeError(f"{self.label} answered with status {status}: {last_lines(body)}")
        return document

    def _ask(self, method: str, path: str, document: Any, *, seconds: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=seconds)
        try:
            body = None if document is None else json.dumps(document)
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _document(body: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


# -- answers ---------------------------------------------------------------------------------------------------------


def peer_stats(document: Mapping[str, Any], label: str, rows: int, n_prompt: int) -> GenerationStats:
    """Statistics of a completion, derived from its ``timings``.

    The first token comes out of the prompt's last batch, so ``predicted_n - 1`` tokens were committed by decode passes.
    A pass commits its accepted drafts and one token more: passes = committed - ``draft_n_accepted``, and every pass
    has one row besides its drafts: rows = passes + ``draft_n``. A draft that ended exactly at an end-of-generation
    token has no token more, so such an answer may be counted one pass short. Both draft counters are missing where
    nothing was drafted.

    Prefill is ``prompt_ms``, decode ``predicted_ms``, both by the server's own clock: HTTP, JSON and detokenisation of
    the answer are in neither. Sampling of the first token falls into decode here and into prefill with us. Not known:
    time inside and outside of llama.cpp (``model_ms`` stays 0) and acceptance by depth.

    Args:
        document: of ``POST /completion``.
        label, rows: of the lane.
        n_prompt: tokens of the prompt.
    """
    timings = document["timings"]
    drafted, accepted = int(timings.get("draft_n", 0)), int(timings.get("draft_n_accepted", 0))
    n_tokens = int(timings["predicted_n"])
    committed = max(0, n_tokens - 1)
    passes = max(min(committed, 1), committed - accepted)
    return GenerationStats(
        drafter=label,
        block_complexity=rows,
        prompt_tokens=n_prompt,
        cached_tokens=int(timings.get("cache_n", 0)),
        prefill_tokens=min(1, n_tokens),
        passes=passes,
        rows=passes + drafted,
        draft_tokens=drafted,
        accepted_tokens=accepted,
        committed_tokens=committed,
        prefill_ms=float(timings["prompt_ms"]),
        decode_ms=float(timings["predicted_ms"]) if committed else 0.0,
    )


class PeerSession:
    """Asks a server like a :class:`esp_edge.session.Session`; an answer is one chunk.

    Attributes:
        token_ids: always empty: every prompt starts on an empty KV cache.
    """

    def __init__(self, server: PeerServer, mode: PeerMode, model: Model) -> None:
        self.token_ids: list[int] = []
        self._server = server
        self._mode = mode
        self._model = model

    def generate(self, prompt: Prompt, params: GenerationParams | None = None) -> Iterator[Chunk]:
        """Answer messages.

        Raises:
            ContextLengthError: the prompt is too long.
            PromptError: it is no list of messages.
            DecodeError: the server failed.
        """
        params = params or GenerationParams()
        if isinstance(prompt, str) or not all(isinstance(message, Mapping) for message in prompt):
            raise PromptError("a peer is asked with messages, but text or token ids were given")
        ids = self._model.encode_chat(prompt)  # type: ignore[arg-type]
        room = self._model.n_ctx - len(ids)
        if room <= 0:
            raise ContextLengthError(len(ids), self._model.n_ctx)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        document = self._server.complete(ids, limit)
        yield self._chunk(document, len(ids))

    def _chunk(self, document: Mapping[str, Any], n_prompt: int) -> Chunk:
        ids = tuple(int(token_id) for token_id in document["tokens"])
        stats = peer_stats(document, self._mode.label, self._mode.rows, n_prompt)
        reason = _FINISH.get(str(document["stop_type"]), "length")
        return Chunk(self._text(ids), ids, (False,) * len(ids), ("",) * len(ids), (), reason, stats)

    def _text(self, token_ids: Sequence[int]) -> str:
        """As our own sessions write it: without the token that ended the answer."""
        decoder, tokenizer = TextDecoder(), self._model.tokenizer
        pieces = (tokenizer.piece(token_id) for token_id in token_ids if token_id not in tokenizer.eog_ids)
        return "".join(map(decoder.push, pieces)) + decoder.flush()

    def close(self) -> None:
        """Nothing: the server goes on for the next question."""

    def __enter__(self) -> PeerSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class PeerServers:
    """The servers of one model, started on demand. A context manager that leaves none behind."""

    def __init__(self, peer: Peer, model: Model) -> None:
        self._peer = peer
        self._model = model
        self._running: dict[PeerMode, PeerServer] = {}

    def session(self, mode: PeerMode) -> PeerSession:
        """A session on the mode's server; a new server has given one short uncounted answer.

        Raises:
            ConfigError: the server does not start.
        """
        if mode in self._running:
            return PeerSession(self._running[mode], mode, self._model)
        model = self._model
        server = PeerServer(self._peer, mode, model.path, model.config, n_ctx=model.n_ctx, n_threads=model.threads)
        self._running[mode] = server
        session = PeerSession(server, mode, model)
        converse(session, WARM_UP, GenerationParams(max_tokens=WARM_UP_TOKENS))
        return session

    def stop(self) -> None:
        """Stop all of them: the next session starts a server that has learned nothing."""
        while self._running:
            self._running.popitem()[1].close()

    def __enter__(self) -> PeerServers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
