"""A plan as one HTML page that needs no network: demand against capacity, memory, percentiles, the options and the mistakes."""

from __future__ import annotations

from html import escape
from typing import Any

from headrace.errors import UsageError

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}.plot{height:24em}"
)


def require_plotly() -> None:
    """Raises UsageError, saying what to install, where the charts' library is not there."""
    try:
        import plotly  # noqa: F401  # an extra: 10 MB that only a page needs
    except ImportError:
        raise UsageError("--html needs the charts' library: pip install 'headrace[report]'") from None


def page(told: dict[str, Any]) -> str:
    """The page of a plan (plan/answer.py). Raises UsageError without plotly."""
    require_plotly()
    best = told["answer"]
    title = f"Plan: {told['model']['name']}, {told['traffic']['name']}"
    parts = [f"<h1>{escape(title)}</h1>"]
    if best is None:
        parts.append(f"<p><b>Cannot</b>: {escape(told['cannot'])}</p>")
    else:
        cost = "at an unknown price" if best["usd_month"] is None else f"for {best['usd_month']:,.0f} USD a month"
        parts.append(
            f"<p><b>{best['devices']} x {escape(best['device'])}</b>, weights at {best['level']}, {cost}. {escape(best['why'])}.</p>"
        )
        parts += [f"<p>{escape(reason)}</p>" for reason in best["reasons"]]
        parts += _charts(best)
        parts.append("<h2>Two common mistakes</h2>")
        for mistake in told["mistakes"]:
            usd = "?" if mistake["usd_month"] is None else f"{mistake['usd_month']:,.0f}"
            parts.append(
                f"<p><b>{escape(mistake['mistake'])}</b>: {mistake['devices']} devices, {usd} USD a month. {escape(mistake['why'])}.</p>"
            )
    parts.append("<h2>Options</h2>" + _options(told["options"]))
    return f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>{''.join(parts)}</html>\n"


def _charts(best: dict[str, Any]) -> list[str]:
    import plotly.graph_objects as go
    import plotly.io as io

    charts = best["charts"]
    demand, width = charts["demand"], charts["demand"]["seconds"]
    minutes = [i * width / 60 for i in range(len(demand["rates"]))]
    whole = go.Figure(go.Scatter(x=minutes, y=demand["rates"], name="demand", line_shape="hv"))
    whole.add_hline(y=demand["capacity"], annotation_text="all replicas")
    whole.add_hline(y=demand["after_loss"], line_dash="dash", annotation_text="after one loss")
    whole.update_layout(title="Demand against capacity", xaxis_title="minutes", yaxis_title="requests/s")

    memory = go.Figure([go.Bar(x=[best["memory_gb"][part]], y=["one device"], name=part, orientation="h") for part in
                        ("weights", "kv", "activations", "reserve")])  # fmt: skip
    memory.update_layout(title="Memory", barmode="stack", xaxis_title="GB", height=220)

    ttft, predicted = charts["ttft_ms"], best["predicted"]
    quantiles = go.Figure(go.Scatter(x=[100 * q for q in ttft["quantiles"]], y=ttft["values"], name="time to first token"))
    for metric, name in (("itl_ms", "between tokens"), ("queue_ms", "in the queue"), ("total_ms", "total")):
        points = [(float(key[1:]), value) for key, value in predicted[metric].items() if key.startswith("p")]
        quantiles.add_scatter(x=[x for x, _ in points], y=[y for _, y in points], name=name, mode="lines+markers")
    quantiles.update_layout(title="Percentiles", xaxis_title="percent of the requests (of the gaps)", yaxis_title="ms", yaxis_type="log")

    timeline = charts["timeline"]
    seconds = [i * timeline["seconds"] for i in range(len(timeline["running"]))]
    load = go.Figure([go.Scatter(x=seconds, y=timeline[name], name=name) for name in ("running", "waiting")])
    load.add_scatter(x=seconds, y=timeline["kv_share"], name="KV in use", yaxis="y2")
    load.update_layout(title="Around the peak", xaxis_title="seconds", yaxis_title="requests",
                       yaxis2={"overlaying": "y", "side": "right", "range": [0, 1], "tickformat": ".0%"})  # fmt: skip
    figures = (whole, memory, quantiles, load)
    return [io.to_html(figure, full_html=False, include_plotlyjs="inline" if i == 0 else False) for i, figure in enumerate(figures)]


def _options(options: list[dict[str, Any]]) -> str:
    head = ("device", "level", "together", "requests/s", "gives out", "devices", "USD/month")
    rows = []
    for option in options:
        name = f"<td>{escape(option['device'])}<td>{option['level']}<td>{option['tp']}"
        if option["cannot"] is not None:
            rows.append(f"<tr>{name}<td colspan=4 style='text-align:left'>cannot: {escape(option['cannot'])}")
        else:
            usd = "?" if option["usd_month"] is None else f"{option['usd_month']:,.0f}"
            rows.append(f"<tr>{name}<td>{option['capacity_rate']:.2f}<td>{option['limit']}<td>{option['devices']}<td>{usd}")
    return f"<table><tr>{''.join(f'<th>{cell}' for cell in head)}{''.join(rows)}</table>"
