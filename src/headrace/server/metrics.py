"""Counters and histograms as plain lists, written on the event loop's thread and read at a scrape.

Nothing here allocates or locks when a token passes; the exposition library sees the numbers only when somebody asks for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headrace import __version__
from headrace.request import EngineStats

if TYPE_CHECKING:
    from prometheus_client import Metric

# Seconds; a processor answers in milliseconds or, under load, in minutes.
TIME_BUCKETS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 600.0,
)  # fmt: skip
SIZE_BUCKETS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 512.0)
OUTCOMES = ("stop", "length", "aborted", "refused", "failed")
ENDPOINTS = ("chat", "completions", "responses", "messages", "embeddings")


class Histogram:
    """Counts per bucket; `bounds` are inclusive upper limits, one more bucket takes the rest."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = TIME_BUCKETS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound as text, observations up to it), +Inf last."""
        rows: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*(str(b) for b in self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            rows.append((bound, float(running)))
        return rows


class Metrics:
    """Everything /metrics tells. A request is counted once, by the outcome it ended with."""

    def __init__(self) -> None:
        self.requests = {(endpoint, outcome): 0 for endpoint in ENDPOINTS for outcome in OUTCOMES}
        self.errors: Counter[str] = Counter()  # by code, of which there are a few
        self.queue = Histogram()
        self.prefill = Histogram()
        self.first_token = Histogram()
        self.inter_token = Histogram()
        self.total = Histogram()
        self.refusal = Histogram()
        self.queue_expected_s = 0.0  # of a newcomer, at the scrape
        self.step = Histogram()
        self.batch = Histogram(SIZE_BUCKETS)
        self.prompt_tokens = 0  # of admitted requests, cached ones included
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.open_requests = 0  # accepted and not yet ended
        self.stats = _idle(0)
        self.engine_up = False
        self.engine_restarts = 0
        self.memory: list[tuple[str, int]] = []  # the memory ledger: bytes by purpose

    def ended(self, endpoint: str, outcome: str, code: str = "") -> None:
        """`code`: of the error, where it ended with one."""
        self.requests[endpoint, outcome] += 1
        if code:
            self.errors[code] += 1

    def start_engine(self, num_blocks: int) -> None:
        """A fresh engine has everything free, and counts from nothing."""
        self.stats = _idle(num_blocks)

    def observe_step(self, stats: EngineStats) -> None:
        self.stats = stats
        if stats.step_tokens:
            self.step.observe(stats.step_seconds)
            self.batch.observe(float(stats.step_rows))


def _idle(num_blocks: int) -> EngineStats:
    return EngineStats(0, 0, num_blocks, 0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0)


class Collector:
    """Gives `Metrics` to a prometheus registry."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        m, model = self._metrics, self._model

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(f"headrace_{name}", text, labels=["model"])
            family.add_metric([model], value)
            return family

        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(f"headrace_{name}", text, labels=["model"])
            family.add_metric([model], value)
            return family

        def histogram(name: str, text: str, source: Histogram) -> Metric:
            family = HistogramMetricFamily(f"headrace_{name}", text, labels=["model"])
            family.add_metric([model], buckets=source.cumulative(), sum_value=source.total)
            return family

        info = GaugeMetricFamily("headrace_build_info", "The running version", labels=["version", "model"])
        info.add_metric([__version__, model], 1)
        yield info
        requests = CounterMetricFamily("headrace_requests", "Requests by the way they ended", labels=["model", "endpoint", "outcome"])
        for (endpoint, outcome), count in m.requests.items():
            requests.add_metric([model, endpoint, outcome], count)
        yield requests
        errors = CounterMetricFamily("headrace_request_errors", "Requests refused or failed, by the error's code", labels=["model", "code"])
        for code, count in m.errors.items():
            errors.add_metric([model, code], count)
        yield errors
        yield gauge("requests_open", "Requests accepted and not yet ended", m.open_requests)
        yield histogram("request_queue_seconds", "From sent to the engine until first scheduled", m.queue)
        yield histogram("request_prefill_seconds", "From first scheduled until the first token", m.prefill)
        yield histogram("time_to_first_token_seconds", "From received until the first token", m.first_token)
        yield histogram("inter_token_seconds", "Gap before each token after the first of its sample", m.inter_token)
        yield histogram("refusal_seconds", "From received until a 429 was written", m.refusal)
        yield gauge("queue_expected_seconds", "How long a newcomer would wait in the queue", m.queue_expected_s)
        yield histogram("request_seconds", "From received until the answer was complete", m.total)
        yield counter("prompt_tokens", "Prompt tokens of scheduled requests, cached ones included", m.prompt_tokens)
        yield counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache", m.cached_tokens)
        yield counter("generation_tokens", "Tokens generated", m.generated_tokens)
        yield gauge("engine_up", "1 while an engine with a loaded model runs", int(m.engine_up))
        memory = GaugeMetricFamily("headrace_memory_planned_bytes", "The memory ledger, by purpose", labels=["model", "purpose"])
        for purpose, size in m.memory:
            memory.add_metric([model, purpose], size)
        yield memory
        yield counter("engine_restarts", "Engine processes started after a crash", m.engine_restarts)
        yield histogram("engine_step_seconds", "Duration of a step", m.step)
        yield histogram("batch_size", "Samples in a step", m.batch)
        yield from self._engine(m.stats, counter, gauge)

    def _engine(self, s: EngineStats, counter: Any, gauge: Any) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        yield gauge("requests_running", "Samples the engine is working on", s.running)
        yield gauge("requests_waiting", "Requests in the engine's queue", s.waiting)
        blocks = GaugeMetricFamily("headrace_kv_blocks", "KV blocks by state", labels=["model", "state"])
        for state, count in (("free", s.blocks_free), ("cached", s.blocks_cached), ("held", s.blocks_held)):
            blocks.add_metric([self._model, state], count)
        yield blocks
        total = s.blocks_free + s.blocks_cached + s.blocks_held
        yield gauge("kv_cache_usage_ratio", "Held blocks out of all", s.blocks_held / total if total else 0.0)
        yield counter("preemptions", "Samples put back into the queue for want of blocks", s.preemptions)
        yield counter("recomputed_tokens", "Tokens computed again after a preemption", s.recomputed_tokens)
        yield counter("engine_steps", "Steps run by this engine process", s.steps)


def exposition(metrics: Metrics, model: str, accept: str) -> tuple[bytes, str]:
    """The text of /metrics and its content type, in the format the scraper asks for."""
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(Collector(metrics, model))
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
