"""A run's figures as plain data: what is printed, written as JSON, drawn, and held against a plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from headrace.bench.drive import Run
from headrace.bench.objective import Objective
from headrace.bench.record import FIGURES, GAPS, OTHERS, SERVER, Record
from headrace.bench.statistics import QUANTILES, Interval, interval, needed, pooled_interval, quantile
from headrace.bench.window import Window

# A client is a bottleneck when 1 of 100 requests began, or 1 of 100 chunks was stamped, later than is small beside the p99 of TTFT or ITL.
LAG_S, DELAY_S = 0.010, 0.005  # never too late for anybody
SMALL = 0.10
MAX_CPU = 0.8  # of a core, beyond which a client's queue grows

Told = dict[str, Any]


def summary(run: Run, window: Window, objective: Objective | None = None) -> Told:
    """All figures of a run. Times in milliseconds; a percentile that too few samples know is None, with the number it needs."""
    records = [record for record in run.records if window.holds(record.scheduled)]
    good = [record for record in records if record.ok]
    figures = {f"{name}_ms": _figure([x for r in good if (x := take(r)) is not None]) for name, take in FIGURES.items()}
    itl = _pooled([GAPS["itl"](record) for record in good])
    others = {f"{name}_ms": _figure([x for r in good if (x := take(r)) is not None]) for name, take in (OTHERS | SERVER).items()}
    others |= {f"{name}_ms": _pooled([take(record) for record in good]) for name, take in GAPS.items() if name != "itl"}
    ends = [FIGURES["total"](record) if record.ok else math.inf for record in records]
    others["total_failures_infinite_ms"] = _figure([x for x in ends if x is not None])
    told: Told = {
        "requests": len(records),
        "succeeded": len(good),
        "failed": len(records) - len(good),
        "reasons": dict(Counter(record.error or "not ended" for record in records if not record.ok).most_common()),
        "outside_window": len(run.records) - len(records),
        "failed_outside_window": sum(not record.ok for record in run.records) - (len(records) - len(good)),
        "window": {"begin_s": window.begin, "end_s": window.end, "kind": window.kind, "why": window.why},
        "throughput": _throughput(run.records, window),
        "tokens": _tokens(good),
        "queue_ms": figures["queue_ms"], "ttft_ms": figures["ttft_ms"], "itl_ms": itl, "tpot_ms": figures["tpot_ms"],
        "total_ms": figures["total_ms"],
        "client": _client(run, records, good),
        "others": others,
    }  # fmt: skip
    told["valid"] = not told["client"]["bottleneck"]
    if objective is not None:
        told["goodput"] = _goodput(records, window, objective)
    return told


def _figure(values: list[float]) -> Told:
    values.sort()
    return _told(values, {q: interval(values, q) for q in QUANTILES})


def _pooled(groups: list[list[float]]) -> Told:
    values = sorted(value for group in groups for value in group)
    return _told(values, {q: pooled_interval(groups, values, q) for q in QUANTILES})


def _told(ordered: list[float], intervals: dict[float, Interval | None]) -> Told:
    told: Told = {"n": len(ordered), "mean": _ms(sum(ordered) / len(ordered)) if ordered else None}
    told["max"] = _ms(ordered[-1]) if ordered else None
    for q, known in intervals.items():
        name = f"p{round(100 * q)}"
        told[name] = None if known is None else _ms(quantile(ordered, q))
        told[f"{name}_interval"] = None if known is None else [_ms(known[0]), _ms(known[1])]
        if known is None:
            told[f"{name}_needs"] = needed(q)
    return told


def _ms(seconds: float) -> float | None:
    """None for what never came: JSON has no infinity."""
    return round(1e3 * seconds, 4) if math.isfinite(seconds) else None


def _throughput(records: Sequence[Record], window: Window) -> Told:
    """Of successful requests: tokens that came in the window, by its length. Tokens that failed requests had got are counted apart."""
    out, wasted, ended, prompt = 0.0, 0, 0, 0
    for record in records:
        came = sum(count for time, count in zip(record.times, record.counts, strict=True) if window.holds(time))
        if record.ok:
            # The server's own count is spread over the chunks as they came: the end token and tokens without text have none.
            out += came * record.tokens / max(1, sum(record.counts))
            if record.end is not None and window.holds(record.end):
                ended += 1
                prompt += record.prompt_tokens or 0
        else:
            wasted += came
    offered = sum(window.holds(record.scheduled) for record in records)
    return {
        "output_tokens_s": out / window.seconds, "prompt_tokens_s": prompt / window.seconds, "requests_s": ended / window.seconds,
        "offered_requests_s": offered / window.seconds, "wasted_tokens_s": wasted / window.seconds,
        "concurrency": sum(_overlap(record, window) for record in records) / window.seconds,
    }  # fmt: skip


def _overlap(record: Record, window: Window) -> float:
    return 0.0 if record.end is None else max(0.0, min(record.end, window.end) - max(record.scheduled, window.begin))


def _tokens(good: Sequence[Record]) -> Told:
    """How they were counted: by the server chunk by chunk, by the server at the end, or as one a chunk."""
    count = max(1, len(good))
    ways = Counter(
        "exact" if record.exact else "usage" if record.completion_tokens is not None else "chunks" for record in good
    )  # fmt: skip
    aimed = [(record.prompt_tokens, record.aimed) for record in good if record.aimed and record.prompt_tokens]
    return {
        "counted_by": dict(ways),
        "prompt_mean": sum(record.prompt_tokens or 0 for record in good) / count,
        "prompt_of_aimed": sum(got for got, _ in aimed) / sum(wanted for _, wanted in aimed) if aimed else None,
        "cached_share": sum(r.cached_tokens or 0 for r in good) / max(1, sum(r.prompt_tokens or 0 for r in good)),
        "answer_mean": sum(record.tokens for record in good) / count,
        "shorter_than_wanted": sum(record.tokens < record.wanted for record in good),
        "more_than_one_a_chunk": sum(record.text_tokens > len(record.times) for record in good),
    }  # fmt: skip


def _client(run: Run, records: Sequence[Record], good: Sequence[Record]) -> Told:
    """What the client cost and was late by, and whether that spoils the figures."""
    lags = sorted(record.started - record.scheduled for record in records if record.started is not None)
    delays = sorted(run.delays)
    ttfts = sorted(x for record in good if (x := FIGURES["ttft"](record)) is not None)
    gaps = sorted(gap for record in good for gap in record.token_gaps())
    lag, delay, ttft, gap = (quantile(values, 0.99) if values else 0.0 for values in (lags, delays, ttfts, gaps))
    cpu = run.cpu_s / max(run.wall_s, 1e-9)
    tokens = sum(record.tokens for record in run.records)
    may_lag, may_delay = max(LAG_S, SMALL * ttft), max(DELAY_S, SMALL * gap)
    because = []
    if lag > may_lag:
        because.append(
            f"1 of 100 requests began {1e3 * lag:.1f} ms late or later ({1e3 * may_lag:.1f} at most is small beside the figures)"
        )
    if delay > may_delay:
        because.append(
            f"1 of 100 chunks was stamped {1e3 * delay:.1f} ms late or later ({1e3 * may_delay:.1f} at most is small beside the figures)"
        )
    if cpu > MAX_CPU:
        because.append(f"the client used {cpu:.0%} of a core")
    return {
        "lag_p99_ms": _ms(lag), "lag_max_ms": _ms(lags[-1] if lags else 0.0), "delay_p99_ms": _ms(delay),
        "delay_max_ms": _ms(delays[-1] if delays else 0.0), "cpu_share": cpu, "cpu_us_per_token": 1e6 * run.cpu_s / max(1, tokens),
        "bottleneck": because,
    }  # fmt: skip


def _goodput(records: Sequence[Record], window: Window, objective: Objective) -> Told:
    good = [record for record in records if objective.is_met(record)]
    share = len(good) / len(records) if records else 0.0
    return {
        "limits_ms": {name: 1e3 * limit for name, limit in objective.limits.items()}, "share_wanted": objective.share, "share": share,
        "requests_s": len(good) / window.seconds, "tokens_s": sum(record.tokens for record in good) / window.seconds,
        "is_met": share >= objective.share,
    }  # fmt: skip
