"""The answer to a question of sizing as plain data: what is printed, written to the plan file and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from headrace.errors import UsageError
from headrace.plan.advise import Checked, Option, Question, choose, mistakes, options, repair
from headrace.plan.memory import levels_for
from headrace.plan.money import per_million, rent_or_buy

BINS = 120  # of the demand over time


def answer(question: Question) -> dict[str, Any]:
    """Everything as plain data: the form of the plan file (docs/sizing.md). Raises UsageError for what contradicts itself."""
    _refuse_impossible(question)
    found = options(question)
    best = choose(question, found)
    traffic, objective = question.traffic, question.objective
    told: dict[str, Any] = {
        "version": 1,
        "model": {
            "name": question.shape.name, "architecture": question.shape.architecture, "source": question.shape.source,
            "parameters": question.shape.parameters, "kv_bytes_per_token": question.shape.kv_bytes_per_token(),
            "context_length": question.shape.context_length,
        },
        "traffic": {
            "name": traffic.name, "requests": len(traffic), "rate": traffic.rate, "peak_rate": question.peak,
            "peak_window_s": question.peak_window, "highest_rate": traffic.peak_rate(question.peak_window),
            "prompt_mean": sum(traffic.prompts) / len(traffic), "answer_mean": sum(traffic.answers) / len(traffic),
            "prefix_share": traffic.prefix_share(), "notes": list(traffic.notes),
        },
        "objective": {"ttft_ms": 1e3 * objective.ttft, "itl_ms": 1e3 * objective.itl, "share": objective.share},
        "answer": None,
        "mistakes": [],
    }  # fmt: skip
    if best is None:
        able = [option for option in found if not option.cannot]
        told["cannot"] = _cannot(question, able, found)
    else:
        checked = repair(question, best)
        told["answer"] = _told(question, best) | _found(question, best, checked)
        told["mistakes"] = mistakes(question, best)
    told["options"] = [_told(question, option) for option in found]
    return told


def _refuse_impossible(question: Question) -> None:
    objective = question.objective
    if not (0 < objective.ttft < 1e6 and 0 < objective.itl < 1e6 and 0.5 <= objective.share < 1):
        raise UsageError("--slo: expected positive times, and a share from 0.5 to below 1")
    shortest = min(prompt + answer for prompt, answer in zip(question.traffic.prompts, question.traffic.answers, strict=True))
    if shortest > question.shape.context_length:
        raise UsageError(f"the shortest request has {shortest} tokens, the model's context is {question.shape.context_length}")
    known = [name for kind in ("gpu", "cpu") for name in levels_for(question.shape, kind)]
    if unknown := set(question.levels) - set(known):
        raise UsageError(f"--level: unknown {sorted(unknown)[0]!r}; known are {', '.join(dict.fromkeys(known))}")


def _cannot(question: Question, able: Sequence[Option], found: Sequence[Option]) -> str:
    if able and question.budget is not None:
        cheapest = able[0]
        if cheapest.usd_month is None:
            return f"no option has a known price, so none is known to be within {question.budget:,.0f} USD a month"
        return f"nothing within {question.budget:,.0f} USD a month: the cheapest, {cheapest.name}, costs {cheapest.usd_month:,.0f}"
    return "no device can: " + "; ".join(f"{option.name}: {option.cannot}" for option in list(found)[:3])


def _told(question: Question, option: Option) -> dict[str, Any]:
    memory, carries, price = option.memory, option.carries, option.device.price
    told: dict[str, Any] = {
        "device": option.device.name, "level": option.level.name, "tp": option.tp, "cannot": option.cannot or None,
        "memory_gb": {
            "total": memory.total / 1e9, "weights": memory.weights / 1e9, "activations": memory.activations / 1e9,
            "reserve": memory.overhead / 1e9, "kv": max(0.0, memory.kv) / 1e9,
        },
    }  # fmt: skip
    if option.cannot or carries is None:
        return told
    state, peak, traffic = carries.state, question.peak, question.traffic
    tokens_s = traffic.rate * (sum(traffic.prompts) + sum(traffic.answers)) / len(traffic)
    return told | {
        "sequences_that_fit": option.sequences, "capacity_rate": carries.rate, "limit": carries.limit, "why": carries.why,
        "time_shares": state.shares, "needed": option.needed, "replicas": option.replicas, "devices": option.count,
        "load_at_peak": peak / (option.replicas * carries.rate), "load_after_loss": peak / (option.needed * carries.rate),
        "headroom": 1 - peak / (option.replicas * carries.rate), "usd_month": option.usd_month,
        "price": None if price is None else asdict(price),
        "usd_per_million_tokens": per_million(option.usd_month, tokens_s),
        "usd_per_million_output_tokens": per_million(option.usd_month, traffic.rate * sum(traffic.answers) / len(traffic)),
        "rent_or_buy": rent_or_buy(option.device, option.count, question.terms), "reasons": option.reasons,
    }  # fmt: skip


def _found(question: Question, option: Option, checked: Checked) -> dict[str, Any]:
    """What the simulation adds: predictions to be measured against, and the series of the charts."""
    summary = checked.whole.summary()
    width, demand = question.traffic.demand(BINS)
    rate = option.carries.rate if option.carries is not None else 0.0
    grid = [q / 100 for q in (*range(5, 100, 5), 99)]
    ttft = sorted(record.first - record.arrived for record in checked.whole.records if not record.refused)
    timeline = checked.whole.timeline
    return {
        "holds": checked.good >= question.objective.share,
        "holds_after_loss": checked.good_lost >= question.objective.share,
        "simulated_requests": len(checked.whole.records),
        "within_objective": checked.good,
        "within_objective_after_loss": checked.good_lost,
        "predicted": summary,
        "predicted_after_loss": checked.lost.summary(),
        "charts": {
            "demand": {"seconds": width, "rates": demand, "capacity": rate * option.replicas, "after_loss": rate * option.needed},
            "ttft_ms": {"quantiles": grid, "values": [1e3 * ttft[min(len(ttft) - 1, int(q * len(ttft)))] for q in grid] if ttft else []},
            "timeline": {
                "seconds": timeline.width,
                "kv_share": [held / timeline.width / checked.whole.num_blocks / option.replicas for held in timeline.held],
                "running": [running / timeline.width for running in timeline.running],
                "waiting": [waiting / timeline.width for waiting in timeline.waiting],
            },
        },
    }
