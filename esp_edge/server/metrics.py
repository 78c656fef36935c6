"""Counters for Prometheus, all named ``esp_edge_*``. Only emitted tokens count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from esp_edge.metrics import GenerationStats
    from esp_edge.session import Chunk

__all__ = ["AnswerTimer", "Metrics"]

_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_ANSWER = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_ACCEPTED = tuple(range(1, 17))


class Metrics:
    """One registry an application: two servers in a process do not share counters.

    Args:
        status: of the engine, asked at each scrape: its numbers become gauges.
    """

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(_Status(status))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"esp_edge_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(f"esp_edge_{name}", text, buckets=tuple(buckets), registry=registry)

        self.http = counter("http_requests_total", "HTTP requests.", "path", "status")
        self.answers = counter("answers_total", "Answers by how they ended.", "outcome")
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens, cached ones included.")
        self.cached_tokens = counter("cached_prompt_tokens_total", "Prompt tokens found in the KV cache.")
        self.tokens = counter("generated_tokens_total", "Emitted tokens.")
        self.passes = counter("decode_passes_total", "Decode passes.")
        self.drafted = counter("draft_tokens_total", "Draft tokens verified.")
        self.accepted = counter("accepted_draft_tokens_total", "Draft tokens emitted.")
        self.drafted_by = counter("draft_tokens_by_source_total", "Draft tokens verified, by source.", "source")
        self.accepted_by = counter("accepted_tokens_by_source_total", "Draft tokens emitted, by source.", "source")
        self.first_token = histogram("time_to_first_token_seconds", "From request to first token.", _FIRST_TOKEN)
        self.between = histogram("inter_token_seconds", "Time of a pass a token that it emitted.", _BETWEEN_TOKENS)
        self.answer_seconds = histogram("answer_seconds", "From request to the end of an answer.", _ANSWER)
        self.length = histogram("acceptance_length_tokens", "Tokens that a decode pass emitted.", _ACCEPTED)

    def count(self, stats: GenerationStats) -> None:
        """Add a finished or cancelled answer."""
        self.prompt_tokens.inc(stats.prompt_tokens)
        self.cached_tokens.inc(stats.cached_tokens)
        self.passes.inc(stats.passes)
        self.drafted.inc(stats.draft_tokens)
        self.accepted.inc(stats.accepted_tokens)
        by_source = ((self.drafted_by, stats.drafted_by_source), (self.accepted_by, stats.accepted_by_source))
        for family, counts in by_source:
            for source, n in dict(counts).items():  # a cancelled answer may still count on
                family.labels(source).inc(n)


class AnswerTimer:
    """Watches the chunks of one answer.

    Args:
        start: ``time.perf_counter()`` when the request came.
    """

    def __init__(self, metrics: Metrics, start: float) -> None:
        self._metrics, self._start = metrics, start
        self._last: float | None = None
        self._stats: GenerationStats | None = None
        self._ended = False

    def count(self, chunk: Chunk) -> None:
        """A chunk came."""
        now, n = time.perf_counter(), len(chunk.token_ids)
        metrics, self._stats = self._metrics, chunk.stats
        metrics.tokens.inc(n)
        if self._last is None and n:
            metrics.first_token.observe(now - self._start)
        elif self._last is not None and n:
            metrics.length.observe(n)
            for _ in range(n):
                metrics.between.observe((now - self._last) / n)
        self._last = now

    def end(self, outcome: str) -> None:
        """The answer is over; only the first call counts."""
        if self._ended:
            return
        self._ended = True
        self._metrics.answers.labels(outcome).inc()
        self._metrics.answer_seconds.observe(time.perf_counter() - self._start)
        if self._stats is not None:
            self._metrics.count(self._stats)


class _Status:
    """The engine's numbers: a gauge each, counters for those in ``totals``."""

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """All of them, as they are now."""
        status = self._status()
        for name, value in sorted(status.items()):
            if isinstance(value, int | float):
                yield GaugeMetricFamily(f"esp_edge_engine_{name}", f"Engine: {_words(name)}.", value=float(value))
        for name, value in sorted(status.get("totals", {}).items()):
            yield CounterMetricFamily(f"esp_edge_engine_{name}", f"Engine: {_words(name)} so far.", value=float(value))

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before the engine is there."""
        return ()


def _words(name: str) -> str:
    return name.replace("_", " ")
