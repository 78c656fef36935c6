"""The answers of one request: tickets of the engine on one side, an async iterator on the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from esp_edge.config import DraftConfig, GenerationParams
from esp_edge.metrics import GenerationStats
from esp_edge.server.errors import to_api_error
from esp_edge.server.metrics import AnswerTimer
from esp_edge.server.service import FieldsAtFault, Service, TicketLike, in_thread

if TYPE_CHECKING:
    from esp_edge.session import Chunk

__all__ = ["Ask", "Batch"]

_Item: TypeAlias = "Chunk | BaseException | None"
AT_ONCE = 4  # answers of one request that are queued together: a large request must not fill the queue


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer that is wanted."""

    token_ids: list[int]
    params: GenerationParams


class Batch:
    """Submits the asks of a request, a few at a time, and yields their chunks as (index of the ask, chunk).

    Close it whatever happens: that ends the answers that are still being made. Lives on the event loop.

    Args:
        fields: the field of the request that is at fault for a kind of error.

    Attributes:
        stats: of each ask, once it has begun.
        failed: done with the error that ended them all.
    """

    def __init__(
        self, service: Service, asks: Sequence[Ask], draft: DraftConfig | None, fields: FieldsAtFault, start: float
    ) -> None:
        self._service, self._asks, self._draft, self._fields = service, asks, draft, fields
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, _Item]] = asyncio.Queue()
        self._tickets: list[TicketLike] = []
        self._timers: list[AnswerTimer] = []
        self._running = 0
        self._closed = False
        self.stats: dict[int, GenerationStats] = {}
        self.failed: asyncio.Future[Exception] = self._loop.create_future()
        service.batches.add(self)

    async def chunks(self) -> AsyncIterator[tuple[int, Chunk]]:
        """Chunks of all answers until the last one ends.

        Raises:
            ApiError: an ask was refused, or an answer failed.
        """
        await self._submit()
        while self._running:
            index, item = await self._queue.get()
            if item is None:
                self._running -= 1
                self._timers[index].end("finished")
                await self._submit()
            elif isinstance(item, BaseException):
                self._timers[index].end("failed")
                raise to_api_error(item, self._fields)
            else:
                self.stats[index] = item.stats
                self._timers[index].count(item)
                yield index, item

    async def _submit(self) -> None:
        while self._running < AT_ONCE and len(self._tickets) < len(self._asks):
            index = len(self._tickets)
            try:
                await in_thread(self._submit_one, index)
            except Exception as error:
                raise to_api_error(error, self._fields) from error
            self._running += 1
            self._timers.append(AnswerTimer(self._service.metrics, self._start if index == 0 else time.perf_counter()))
            self._tickets[index].add_listener(self._listener(index))

    def _submit_one(self, index: int) -> None:
        """Runs in a thread; a client may leave meanwhile, and the ticket must not be lost then."""
        ask = self._asks[index]
        ticket = self._service.engine.submit(ask.token_ids, ask.params, draft=self._draft)
        self._tickets.append(ticket)
        if self._closed:
            ticket.cancel()

    def _listener(self, index: int) -> Callable[[_Item], None]:
        def listen(item: _Item) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, item))

        return listen

    @property
    def closed(self) -> bool:
        """Whether nobody waits for the answers any more."""
        return self._closed

    def fail(self, error: Exception) -> None:
        """End all answers with an error."""
        self._queue.put_nowait((0, error))
        if not self.failed.done():
            self.failed.set_result(error)

    def close(self) -> None:
        """Cancel what is still being made; calling it twice is harmless."""
        self._closed = True
        for ticket in self._tickets:
            ticket.cancel()
        for timer in self._timers:
            timer.end("cancelled")
        self._service.batches.discard(self)
