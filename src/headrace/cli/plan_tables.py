"""What `headrace plan` prints: the answer in words, then the options, then the two mistakes."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(told: dict[str, Any], top: int) -> None:
    """A plan (plan/answer.py) on standard output."""
    console = Console(highlight=False, markup=False)
    model, traffic, objective, best = told["model"], told["traffic"], told["objective"], told["answer"]
    size = f"{model['parameters'] / 1e9:.2f} B parameters, {model['kv_bytes_per_token'] / 1024:,.0f} KiB of keys and values a token"
    console.print(f"{model['name']}: {size}")
    console.print(
        f"{traffic['name']}: {traffic['rate']:.2f} requests/s on average, {traffic['peak_rate']:.1f} in the peak of "
        f"{traffic['peak_window_s']:g} s (at most {traffic['highest_rate']:.1f}); {traffic['prompt_mean']:.0f} tokens in, "
        f"{traffic['answer_mean']:.0f} out" + (f"; prefixes shared: {traffic['prefix_share']:.0%}" if traffic["prefix_share"] else "")
    )
    for note in traffic["notes"]:
        console.print(f"note: {note}")
    console.print(
        f"promised to {objective['share']:.0%}: first token within {objective['ttft_ms']:g} ms, then one every {objective['itl_ms']:g} ms\n"
    )
    if best is None:
        console.print(f"cannot: {told['cannot']}", style="bold")
    else:
        _answer(console, best, objective)
    _options(console, told["options"], top)
    if told["mistakes"]:
        _mistakes(console, told["mistakes"], best)


def _usd(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _answer(console: Console, best: dict[str, Any], objective: dict[str, Any]) -> None:
    memory, predicted = best["memory_gb"], best["predicted"]
    together = f" of {best['tp']} together" if best["tp"] > 1 else ""
    price = best["price"]
    at = f" at {price['usd_hour']} USD/h ({price['seller']}, {price['date']})" if price else ""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    replicas = f"{best['replicas']} replicas{together}, one of them to spare"
    a_million = (
        f"{_usd(best['usd_per_million_tokens'])} a million tokens, {_usd(best['usd_per_million_output_tokens'])} a million of output"
    )
    parts = ", ".join(f"{name} {memory[name]:.1f}" for name in ("weights", "kv", "activations", "reserve"))
    held = f"{best['within_objective']:.1%} within the objective"
    lost = best["predicted_after_loss"]["ttft_ms"]["p95"]
    rows = [
        ("take", f"{best['devices']} x {best['device']}, weights at {best['level']}: {replicas}"),
        ("costs", f"{_usd(best['usd_month'])} USD a month{at}; {a_million}"),
        ("memory", f"of {memory['total']:.0f} GB: {parts}; {best['sequences_that_fit']:.0f} sequences at once"),
        ("carries", f"{best['capacity_rate']:.1f} requests/s a replica; first to give out: {best['limit']} ({best['why']})"),
        ("load", f"{best['load_at_peak']:.0%} of it at the peak, {best['load_after_loss']:.0%} on the others after one is lost"),
        (
            "simulated",
            f"{best['simulated_requests']} requests around the peak: TTFT p50/p95/p99 {_three(predicted['ttft_ms'])} ms, "
            f"ITL {_three(predicted['itl_ms'])} ms, {held}" + ("" if best["holds"] else f": MISSES the {objective['share']:.0%} promised"),
        ),
        ("one lost", f"at the peak: TTFT p95 {lost:,.0f} ms, {best['within_objective_after_loss']:.1%} within the objective"),
        ("rent or buy", best["rent_or_buy"]["why"]),
        *(("because", reason) for reason in best["reasons"]),
    ]
    if best["needed"] == 1 and best["replicas"] == 2:
        rows.append(("note", "one replica would carry the peak, and be a single point of failure"))
    for name, text in rows:
        table.add_row(name, text)
    console.print(table)


def _three(values: dict[str, float]) -> str:
    return "/".join(f"{values[name]:,.0f}" for name in ("p50", "p95", "p99"))


def _options(console: Console, options: list[dict[str, Any]], top: int) -> None:
    table = Table(title="\noptions, the cheapest first", title_justify="left", box=None)
    for name in ("device", "level", "weights+KV GB", "seqs", "req/s", "limit", "devices", "USD/month"):
        table.add_column(name, justify="left" if name in ("device", "level", "limit") else "right", no_wrap=True)
    able = [option for option in options if option["cannot"] is None]
    for option in able[: top or None]:
        device = option["device"] + (f" x{option['tp']}" if option["tp"] > 1 else "")
        memory = f"{option['memory_gb']['weights']:.1f} + {option['memory_gb']['kv']:.1f}"
        seqs, rate = f"{option['sequences_that_fit']:.0f}", f"{option['capacity_rate']:.2f}"
        table.add_row(device, option["level"], memory, seqs, rate, option["limit"], str(option["devices"]), _usd(option["usd_month"]))
    if able:
        console.print(table)
    if 0 < top < len(able):
        console.print(f"and {len(able) - top} more (--top 0 shows all)")
    cannot = [option for option in options if option["cannot"] is not None]
    for option in cannot[: top or None]:
        console.print(f"cannot: {option['device']} {option['level']}: {option['cannot']}")
    if 0 < top < len(cannot):
        console.print(f"and {len(cannot) - top} more that cannot")


def _mistakes(console: Console, mistakes: list[dict[str, Any]], best: dict[str, Any]) -> None:
    console.print("\nwhat two common mistakes would have bought", style="bold")
    for mistake in mistakes:
        share, wait = mistake["within_objective"], mistake["ttft_p95_ms"]
        got = (
            "It does not run." if wait is None else f"Simulated: {share:.0%} of the requests within the objective, TTFT p95 {wait:,.0f} ms."
        )
        console.print(
            f"{mistake['mistake']}: {mistake['devices']} x {best['device']}, {_usd(mistake['usd_month'])} USD a month instead of "
            f"{_usd(best['usd_month'])}: {mistake['why']}. {got}"
        )
