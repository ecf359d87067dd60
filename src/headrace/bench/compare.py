"""What a plan predicted beside what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.errors import UsageError

TIMES = ("queue_ms", "ttft_ms", "itl_ms", "tpot_ms", "total_ms")
QUANTILES = ("p50", "p95", "p99")
ALIKE = 0.1  # a load that differs by more than this from the planned one is no check of the plan


def read_plan(path: Path) -> dict[str, Any]:
    """A file of `headrace plan --output`. Raises UsageError when it is none, or found no hardware."""
    try:
        plan = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--plan {path}: cannot be read: {getattr(error, 'strerror', None) or 'not text'}") from None
    except ValueError:
        raise UsageError(f"--plan {path}: not JSON") from None
    if not isinstance(plan, dict) or plan.get("version") != 1 or "answer" not in plan:
        raise UsageError(f"--plan {path}: expected what `headrace plan --output` writes")
    if plan["answer"] is None:
        raise UsageError(f"--plan {path}: it predicts nothing: {plan.get('cannot', 'no answer')}")
    try:
        for name in TIMES:
            for q in QUANTILES:
                float(plan["answer"]["predicted"][name][q])
        float(plan["answer"]["predicted"]["output_tokens_s"])
        float(plan["traffic"]["rate"])
        int(plan["answer"]["devices"])
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"--plan {path}: expected what `headrace plan --output` writes, with its predictions") from None
    return plan


def beside(plan: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """Rows of (what, predicted, measured, error relative to what was measured), and notes on why they may not be comparable."""
    predicted = plan["answer"]["predicted"]
    rows = [_row(f"{name.removesuffix('_ms')} {q}", predicted[name][q], told[name][q]) for name in TIMES for q in QUANTILES]
    rows.append(_row("output tokens/s", predicted["output_tokens_s"], told["throughput"]["output_tokens_s"]))
    notes = []
    for what, planned, offered in (
        ("requests/s", plan["traffic"]["rate"], told["throughput"]["offered_requests_s"]),
        ("tokens a prompt", plan["traffic"]["prompt_mean"], told["tokens"]["prompt_mean"]),
        ("tokens an answer", plan["traffic"]["answer_mean"], told["tokens"]["answer_mean"]),
    ):
        if abs(offered - planned) > ALIKE * planned:
            notes.append(f"not the same load: {planned:.3g} {what} were planned, {offered:.3g} measured")
    if plan["answer"]["devices"] > 1:
        notes.append(f"the plan is for all {plan['answer']['devices']} devices together, not for one of them")
    return {"model": plan["model"]["name"], "device": plan["answer"]["device"], "rows": rows, "notes": notes}


def _row(what: str, predicted: float, measured: float | None) -> dict[str, Any]:
    error = predicted / measured - 1 if measured else None
    return {"what": what, "predicted": predicted, "measured": measured, "error": error}
