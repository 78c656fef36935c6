"""What all routes share: the engine once it is there, settings, counters, and the answers that are being made."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import anyio
import anyio.to_thread

from esp_edge.config import DraftConfig, GenerationParams
from esp_edge.errors import EspEdgeError, PromptError
from esp_edge.metrics import GenerationStats
from esp_edge.server.errors import ApiError
from esp_edge.server.metrics import Metrics
from esp_edge.server.settings import ServerSettings

if TYPE_CHECKING:
    from esp_edge.server.batch import Batch
    from esp_edge.session import Chunk, Model, Prompt

__all__ = ["EngineLike", "Service", "TicketLike", "in_thread"]

Item: TypeAlias = "Chunk | BaseException | None"
_Found = TypeVar("_Found")
LOADING_SECONDS = 2  # until a client should ask again


class TicketLike(Protocol):
    """An answer that the engine works on."""

    @property
    def stats(self) -> GenerationStats | None:
        """Statistics so far."""

    def cancel(self) -> None:
        """End it; calling it twice, or after the end, is harmless."""

    def add_listener(self, callback: Callable[[Item], None]) -> None:
        """Call back with every chunk, those missed first, then with None or an error; from the worker's thread."""


class EngineLike(Protocol):
    """What the server uses of :class:`esp_edge.engine.Engine`."""

    @property
    def model(self) -> Model:
        """The model that answers."""

    def submit(self, prompt: Prompt, params: GenerationParams, *, draft: DraftConfig | None = None) -> TicketLike:
        """Queue a prompt; raises at once what is wrong with it, or that the queue is full."""

    def status(self) -> dict[str, Any]:
        """Slots and queue, JSON-ready."""


async def in_thread(
    function: Callable[..., _Found], *args: Any, limiter: anyio.CapacityLimiter | None = None, **kwargs: Any
) -> _Found:
    """Run what takes longer than a millisecond beside the event loop.

    Args:
        limiter: of what takes seconds: the threads for short work must not run out.
    """
    return await anyio.to_thread.run_sync(functools.partial(function, *args, **kwargs), limiter=limiter)


class Service:
    """State of one application.

    Attributes:
        settings: as started.
        metrics: counters for Prometheus.
        created: Unix time of the start.
        batches: answers that are being made; for the shutdown.
        one_by_one: limiter of work that uses a llama_context outside of the engine.
    """

    def __init__(self, settings: ServerSettings, engine: EngineLike | None = None) -> None:
        self.settings = settings
        self.created = int(time.time())
        self.batches: set[Batch] = set()
        self.one_by_one = anyio.CapacityLimiter(1)
        self.metrics = Metrics(self.status)
        self._engine = engine
        self._failure: str | None = None

    def attach(self, engine: EngineLike) -> None:
        """The model is loaded: requests are answered from now on."""
        self._engine = engine

    def fail(self, reason: str) -> None:
        """The model will not be there; health says why."""
        self._failure = reason

    @property
    def engine(self) -> EngineLike:
        """The engine.

        Raises:
            ApiError: 503 while the model loads.
        """
        if self._engine is None:
            message = self._failure or "the model is loading: ask again in a moment"
            code = "load_failed" if self._failure else "loading"
            raise ApiError(503, message, code=code, headers={"Retry-After": str(LOADING_SECONDS)})
        return self._engine

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered."""
        return self._engine is not None

    @property
    def model(self) -> Model:
        """The model; 503 while it loads."""
        return self.engine.model

    @property
    def model_id(self) -> str:
        """What clients call the model."""
        if self.settings.model_id or self._engine is None:
            return self.settings.model_id
        return Path(self._engine.model.path).name.removesuffix(".gguf")

    def status(self) -> Mapping[str, Any]:
        """The engine's status, empty while there is none."""
        return self._engine.status() if self._engine is not None else {}

    def stop_answers(self) -> None:
        """Tell every client that is still being answered that the server goes, and stop decoding. Event loop only."""
        for batch in list(self.batches):
            batch.fail(ApiError(503, "the server is shutting down", code="shutting_down"))

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a raw prompt.

        Raises:
            PromptError: it is empty, or ids are out of range.
        """
        model = self.model
        if isinstance(prompt, str):
            return model.encode_prompt(prompt)
        return check_ids(prompt, model.tokenizer.n_vocab)


def check_ids(ids: Sequence[int], n_vocab: int) -> list[int]:
    """The ids, unless one is not in the vocabulary.

    Raises:
        PromptError: names it.
    """
    bad = next((i for i in ids if not 0 <= i < n_vocab), None)
    if bad is not None:
        raise PromptError(f"token ids must be between 0 and {n_vocab - 1}, but {bad} was given")
    return list(ids)


FieldsAtFault: TypeAlias = Mapping[type[EspEdgeError], str | None]
