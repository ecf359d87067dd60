"""Traces of requests for an OpenTelemetry collector: the optional part of the package, imported only when it is asked for.

A request is one span with its phases as children, made after its end from the times that are kept anyway: nothing is added while it runs.
"""

from __future__ import annotations

from typing import Any

from headrace import __version__
from headrace.errors import UsageError
from headrace.server.report import Ended

_OPERATIONS = {"chat": "chat", "completions": "text_completion", "responses": "chat", "messages": "chat"}
_PHASES = ("accept", "queue", "prefill", "decode", "stalled", "deliver")


def open_tracer(endpoint: str, exporter: Any = None) -> OpenTelemetry:
    """Send spans to `endpoint` (OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces). Raises UsageError without the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise UsageError("--trace: the OpenTelemetry packages are not installed: pip install 'headrace[trace]'") from None
    if not endpoint.startswith(("http://", "https://")):
        raise UsageError(f"--trace: expected an address such as http://127.0.0.1:4318/v1/traces, got {endpoint!r}")
    provider = TracerProvider(resource=Resource.create({"service.name": "headrace", "service.version": __version__}))
    provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint, timeout=5)))
    return OpenTelemetry(provider)


class OpenTelemetry:
    """Spans of ended requests, under the client's trace if it sent one (W3C traceparent)."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("headrace", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._in_span = trace.set_span_in_context
        self._kind = trace.SpanKind.SERVER
        self._error = trace.Status(trace.StatusCode.ERROR)

    def record(self, ended: Ended, at: float) -> None:
        """`at`: the end, in seconds since 1970."""
        parent = self._propagator.extract({"traceparent": ended.traceparent})
        stop = round(at * 1e9)
        clock = stop - round(ended.timings.get("total", 0.0) * 1e6)
        operation = _OPERATIONS.get(ended.endpoint, ended.endpoint)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation, "gen_ai.provider.name": "headrace", "gen_ai.request.model": ended.model,
            "gen_ai.response.id": ended.request_id, "gen_ai.usage.input_tokens": ended.prompt_tokens,
            "gen_ai.usage.output_tokens": ended.completion_tokens, "gen_ai.response.finish_reasons": [ended.outcome],
            "http.response.status_code": ended.status, "headrace.cached_tokens": ended.cached_tokens,
        }  # fmt: skip
        span = self._tracer.start_span(f"{operation} {ended.model}", parent, self._kind, attributes, start_time=clock)
        if ended.status >= 500:
            span.set_attribute("error.type", ended.outcome)
            span.set_status(self._error)
        for phase in _PHASES:
            duration = round(ended.timings.get(phase, 0.0) * 1e6)
            if duration:
                child = self._tracer.start_span(phase, self._in_span(span), start_time=clock)
                clock += duration
                child.end(end_time=clock)
        span.end(end_time=stop)

    def close(self) -> None:
        """Send what is left; waits some seconds at most."""
        self._provider.shutdown()
