"""What a caller holds while the engine answers: chunks to iterate, and a way to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

from esp_edge.metrics import GenerationStats
from esp_edge.session import Chunk, Generation

__all__ = ["Listener", "Ticket"]

Listener: TypeAlias = Callable[[Chunk | Exception | None], None]


class Ticket:
    """An answer that the engine makes. All methods may be called from any thread.

    Iterating gives the chunks as they come, from the first one on, and ends after the last one or a cancellation; an
    error of the answer is raised there. Chunks are never held back for a slow reader.
    """

    def __init__(self, generation: Generation, position: Callable[[Ticket], int | None]) -> None:
        self._generation = generation
        self._position = position
        self._changed = threading.Condition(threading.RLock())
        self._chunks: list[Chunk] = []
        self._listeners: list[Listener] = []
        self._error: Exception | None = None
        self._done = False
        self._cancelled = False
        self._wake: Callable[[], None] = lambda: None

    @property
    def stats(self) -> GenerationStats:
        """Statistics of the answer so far."""
        return self._generation.stats

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._generation.n_prompt

    @property
    def seed(self) -> int:
        """Of the keyed draw."""
        return self._generation.seed

    @property
    def queue_position(self) -> int | None:
        """0 = next to get a slot; None = not waiting any more."""
        return self._position(self)

    @property
    def done(self) -> bool:
        """Whether no chunk will follow."""
        return self._done

    @property
    def cancelled(self) -> bool:
        """Whether :meth:`cancel` was called before the answer was complete."""
        return self._cancelled

    @property
    def error(self) -> Exception | None:
        """What ended the answer, if an error did."""
        return self._error

    def cancel(self) -> None:
        """End the answer within one pass. Calling it twice, or after the end, is harmless."""
        with self._changed:
            if self._done:
                return
            self._cancelled = True
        self._wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no chunk will follow; False when ``timeout`` seconds passed before."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done, timeout)

    def add_listener(self, listener: Listener) -> None:
        """Call ``listener`` with every chunk, those there already included, then with the error, or None at the end.

        Calls come in order, one at a time, mostly from the engine's thread, so a listener must not block. One that
        raises is not called again.
        """
        with self._changed:
            ended: tuple[Exception | None, ...] = (self._error,) if self._done else ()
            if all(_call(listener, item) for item in (*self._chunks, *ended)):
                self._listeners.append(listener)

    def __iter__(self) -> Iterator[Chunk]:
        n = 0
        while True:
            with self._changed:
                while not self._done and len(self._chunks) == n:
                    self._changed.wait()
                new = self._chunks[n:]
                if not new:
                    break
            yield from new
            n += len(new)
        if self._error is not None:
            raise self._error

    # -- the engine's side -----------------------------------------------------------------------------------------

    def on_cancel(self, wake: Callable[[], None]) -> None:
        """What :meth:`cancel` calls so that the engine looks."""
        self._wake = wake

    def push(self, chunk: Chunk) -> None:
        """Hand out a chunk."""
        with self._changed:
            self._chunks.append(chunk)
            self._tell(chunk)

    def finish(self, error: Exception | None = None) -> None:
        """No chunk will follow; only the first call counts."""
        with self._changed:
            if self._done:
                return
            self._error = error
            self._done = True
            self._tell(error)

    def _tell(self, item: Chunk | Exception | None) -> None:
        self._changed.notify_all()
        for listener in tuple(self._listeners):
            if not _call(listener, item):
                self._listeners.remove(listener)


def _call(listener: Listener, item: Chunk | Exception | None) -> bool:
    try:
        listener(item)
    except Exception:  # the listener's own affair: the other answers go on
        return False
    return True
