"""A run on the console and as CSV. Throughput is one line of a table whose other lines are its latencies."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.bench.record import FIGURES, OTHERS, SERVER, Record

TITLES = {
    "queue_ms": "queue (server)", "ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "total_ms": "total",
}  # fmt: skip


def show(told: dict[str, Any]) -> None:
    """A run's figures (bench/summary.py) on standard output."""
    console = Console(highlight=False, markup=False)
    if not told["valid"]:
        console.print("INVALID: the client was the bottleneck: " + "; ".join(told["client"]["bottleneck"]), style="bold red")
    console.print(_throughput(told))
    table = Table(box=None)
    for name in ("ms", "p50", "p95", "p99", "p99 within", "mean", "max", "n"):
        table.add_column(name, justify="left" if name == "ms" else "right")
    for name, title in TITLES.items():
        table.add_row(title, *_cells(told[name]))
    console.print(table)
    for line in _notes(told):
        console.print(line)
    if "goodput" in told:
        _goodput(console, told["goodput"])
    if "plan" in told:
        _beside(console, told["plan"])


def _throughput(told: dict[str, Any]) -> str:
    rate, failed = told["throughput"], told["failed"]
    return (
        f"{rate['output_tokens_s']:,.1f} tokens/s out, {rate['prompt_tokens_s']:,.0f} in, {rate['requests_s']:.2f} requests/s "
        f"({rate['offered_requests_s']:.2f} offered, {rate['concurrency']:.1f} in flight); n = {told['requests']}, {failed} failed"
    )


def _cells(figure: dict[str, Any]) -> list[str]:
    if not figure["n"]:
        return ["-"] * 6 + ["0"]
    span = figure["p99_interval"]
    needs = figure.get("p99_needs", 0)
    # Gaps of one answer are alike: there may be enough of them from too few answers.
    too_few = f"needs n = {needs}" if figure["n"] < needs else "needs more requests"
    within = f"{_number(span[0])} to {_number(span[1])}" if span else too_few
    return [
        *(_number(figure[q]) for q in ("p50", "p95", "p99")), within, _number(figure["mean"]), _number(figure["max"]), f"{figure['n']:,}",
    ]  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _notes(told: dict[str, Any]) -> list[str]:
    window, client, tokens = told["window"], told["client"], told["tokens"]
    seconds = f"{window['begin_s']:.1f} to {window['end_s']:.1f} s"
    kinds = {
        "steady": f"steady from {seconds}: requests scheduled in it count, {told['outside_window']} others do not",
        "given": f"counted from {seconds}, as asked for; {told['outside_window']} requests outside",
        "whole": f"the whole run counts: {window['why']}",
    }
    ways = ", ".join(f"{way} {count}" for way, count in tokens["counted_by"].items()) or "none"
    lines = [
        *(f"failed: {count} x {reason}" for reason, count in told["reasons"].items()),
        kinds[window["kind"]] + (f" ({told['failed_outside_window']} of those failed)" if told["failed_outside_window"] else ""),
        f"prompts of {tokens['prompt_mean']:.0f} tokens, {tokens['cached_share']:.0%} of them cached; answers of "
        f"{tokens['answer_mean']:.0f}, counted by: {ways}",
        f"client: {client['cpu_share']:.1%} of a core, {client['cpu_us_per_token']:.0f} us a token; p99 {client['lag_p99_ms']:.1f} ms "
        f"behind the schedule, {client['delay_p99_ms']:.1f} ms late to read",
    ]
    if tokens["shorter_than_wanted"]:
        lines.append(f"{tokens['shorter_than_wanted']} answers were shorter than asked for")
    if not told["queue_ms"]["n"]:
        lines.append("the server does not say how long requests waited in its queue")
    return lines


def _goodput(console: Console, good: dict[str, Any]) -> None:
    limits = ", ".join(f"{name} {limit:g} ms" for name, limit in good["limits_ms"].items())
    verdict = "met" if good["is_met"] else "MISSED"
    console.print(
        f"objective ({limits} for {good['share_wanted']:.0%}) {verdict}: {good['share']:.2%} of all requests; goodput "
        f"{good['requests_s']:.2f} requests/s, {good['tokens_s']:,.1f} tokens/s",
        style="bold",
    )


def _beside(console: Console, plan: dict[str, Any]) -> None:
    table = Table(title=f"\nplan: {plan['model']} on {plan['device']}", title_justify="left", box=None)
    for name in ("ms", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name == "ms" else "right")
    for row in plan["rows"]:
        error = "-" if row["error"] is None else f"{row['error']:+.0%}"
        table.add_row(row["what"], _number(row["predicted"]), _number(row["measured"]), error)
    console.print(table)
    for note in plan["notes"]:
        console.print(note)


FIELDS = (
    "index", "turn", "scheduled", "started", "sent", "head", "first_chunk", "answer", "last_chunk", "end", "wanted", "aimed",
    "prompt_tokens", "cached_tokens", "completion_tokens", "finish", "status", "error",
)  # fmt: skip


def rows(records: Sequence[Record]) -> str:
    """CSV, a request a line: its moments in seconds of the run, its figures in milliseconds, and all chunks with text as SECONDS:TOKENS."""
    figures = FIGURES | SERVER | OTHERS
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*FIELDS, "tokens", *(f"{name}_ms" for name in figures), "chunks"])
    for record in records:
        values = [getattr(record, name) for name in FIELDS]
        taken = [None if (value := take(record)) is None else round(1e3 * value, 4) for take in figures.values()]
        chunks = " ".join(f"{time:.6f}:{count}" for time, count in zip(record.times, record.counts, strict=True))
        moments = [round(value, 6) if isinstance(value, float) else value for value in values]
        writer.writerow([*moments, record.tokens, *taken, chunks])
    return out.getvalue()
