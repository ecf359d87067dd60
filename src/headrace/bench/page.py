"""A run as one HTML page that needs no network: the figures, latency distributions, what was in flight, and the gaps between tokens."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from headrace.bench.record import FIGURES, Record
from headrace.bench.report import TITLES
from headrace.bench.statistics import quantile
from headrace.bench.window import in_flight, spread
from headrace.errors import UsageError

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}.bad{color:#b00020;font-weight:bold}"
)
BINS = 240  # of the time axis
POINTS = 400  # of a distribution
LONGEST_GAPS = 2000  # drawn one by one; the others are in the percentiles of their bin


def require_plotly() -> None:
    """Raises UsageError, saying what to install, where the charts' library is not there."""
    try:
        import plotly  # noqa: F401  # an extra: 10 MB that only a page needs
    except ImportError:
        raise UsageError("--html needs the charts' library: pip install 'headrace[report]'") from None


def page(told: dict[str, Any], records: Sequence[Record]) -> str:
    """The page of a run: its figures (bench/summary.py) and all its requests. Raises UsageError without plotly."""
    require_plotly()
    import plotly.io as io

    title = f"Load: {told['model']} at {told['url']}"
    rate = told["throughput"]
    parts = [f"<h1>{escape(title)}</h1>"]
    if not told["valid"]:
        parts.append(f"<p class=bad>Invalid: the client was the bottleneck: {escape('; '.join(told['client']['bottleneck']))}</p>")
    parts.append(
        f"<p>{escape(told['load'])}; {escape(told['asked'])}; seed {told['seed']}. <b>{rate['output_tokens_s']:,.1f} tokens/s</b>, "
        f"{rate['requests_s']:.2f} requests/s, n = {told['requests']}, {told['failed']} failed.</p>"
    )
    parts.append(_table(told))
    figures = (_distributions(told, records), _timeline(told, records), _gaps(records))
    parts += [
        io.to_html(figure, full_html=False, include_plotlyjs="inline" if i == 0 else False) for i, figure in enumerate(figures)
    ]  # fmt: skip
    return f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>{''.join(parts)}</html>\n"


def _table(told: dict[str, Any]) -> str:
    rows = []
    for name, heading in TITLES.items():
        figure = told[name]
        cells = "".join(f"<td>{_number(figure[q])}" for q in ("p50", "p95", "p99", "mean", "max"))
        rows.append(f"<tr><td>{escape(heading)}{cells}<td>{figure['n']:,}")
    head = "".join(f"<th>{cell}" for cell in ("ms", "p50", "p95", "p99", "mean", "max", "n"))
    return f"<table><tr>{head}{''.join(rows)}</table>"


def _number(value: float | None) -> str:
    return "too few" if value is None else f"{value:,.1f}"


def _distributions(told: dict[str, Any], records: Sequence[Record]) -> Any:
    """Share of the requests (of the gaps) within a time."""
    import plotly.graph_objects as go

    window = told["window"]
    good = [record for record in records if record.ok and window["begin_s"] <= record.scheduled < window["end_s"]]
    chart = go.Figure()
    for name, take in FIGURES.items():
        _distribution(chart, TITLES[f"{name}_ms"], [x for record in good if (x := take(record)) is not None])
    _distribution(chart, TITLES["itl_ms"], [gap for record in good for gap in record.token_gaps()])
    chart.update_layout(title="Latencies", xaxis_title="ms", xaxis_type="log", yaxis_title="share", yaxis_tickformat=".0%")
    return chart


def _distribution(chart: Any, name: str, values: list[float]) -> None:
    values.sort()
    if values:
        # Log axis: what is below a hundredth of a millisecond is drawn there. Finer near 1, where the tail is.
        shares = [1 - (1 - i / POINTS) ** 2 for i in range(1, POINTS + 1)]
        chart.add_scatter(x=[max(0.01, 1e3 * quantile(values, share)) for share in shares], y=shares, name=name, line_shape="hv")


def _timeline(told: dict[str, Any], records: Sequence[Record]) -> Any:
    import plotly.graph_objects as go

    end = max((record.end or 0.0 for record in records), default=0.0) or 1.0
    width = end / BINS
    queued = [0.0] * BINS
    for record in records:
        if record.queue is not None and record.sent is not None:
            spread(queued, record.sent, record.sent + record.queue, 0.0, width)
    seconds = [(i + 0.5) * width for i in range(BINS)]
    chart = go.Figure()
    chart.add_scatter(x=seconds, y=in_flight(records, 0.0, width, BINS), name="in flight")
    chart.add_scatter(x=seconds, y=in_flight(records, 0.0, width, BINS, waiting=True), name="without a first token")
    if any(queued):
        chart.add_scatter(x=seconds, y=queued, name="in the server's queue")
    window = told["window"]
    if window["kind"] != "whole":
        chart.add_vrect(x0=window["begin_s"], x1=window["end_s"], opacity=0.12, line_width=0, fillcolor="green", annotation_text="counted")
    chart.update_layout(title="Requests over time", xaxis_title="seconds", yaxis_title="requests")
    return chart


def _gaps(records: Sequence[Record]) -> Any:
    """When tokens were late: percentiles of the gaps that ended in each moment, and the longest ones by themselves."""
    import plotly.graph_objects as go

    gaps = [(time, 1e3 * gap) for record in records for time, gap in zip(record.times[1:], record.gaps(), strict=True)]
    end = max((time for time, _ in gaps), default=1.0) or 1.0
    bins: list[list[float]] = [[] for _ in range(BINS)]
    for time, gap in gaps:
        bins[min(BINS - 1, int(time / end * BINS))].append(gap)
    chart = go.Figure()
    longest = sorted(gaps, key=lambda pair: -pair[1])[:LONGEST_GAPS]
    chart.add_scatter(
        x=[time for time, _ in longest], y=[gap for _, gap in longest], mode="markers", marker={"size": 3, "opacity": 0.5}, name="longest"
    )
    filled = [(i, sorted(values)) for i, values in enumerate(bins) if values]
    for q in (0.5, 0.95):
        x, y = [(i + 0.5) * end / BINS for i, _ in filled], [quantile(values, q) for _, values in filled]
        chart.add_scatter(x=x, y=y, name=f"p{round(100 * q)}")
    chart.update_layout(title="Gaps between chunks", xaxis_title="seconds", yaxis_title="ms", yaxis_type="log")
    return chart
