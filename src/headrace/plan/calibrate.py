"""Fit the factors to measurements: robustly, within their bounds, and no farther from where they were than the data ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from headrace.plan.factors import BOUNDS, Factors
from headrace.plan.measured import TTFT_CONCURRENCY, Row, predict

OUTLIER = 0.5  # |log(predicted / measured)| beyond which a row counts no more: a run that measured something else must not bend the rest
TTFT_WEIGHT = 0.25
PRIOR = 2e-3  # loss for a factor that moved by e: what few rows say little about stays where it was
ROUNDS = 6
FIRST_STEP = 0.3  # relative; it shrinks in every round
SHRINK = 0.6


def fit(rows: Sequence[Row], start: Factors, progress: Callable[[int, int], None] = lambda done, of: None) -> Factors:
    """The factors with the least mean absolute log error of TPOT, and of TTFT where no client's queue is in it. Deterministic.

    Coordinate descent: one factor at a time goes up or down by a step as long as that helps; the step shrinks from round to round.
    """
    best, least = start, _loss(rows, start, start)
    step = FIRST_STEP
    for done in range(ROUNDS):
        progress(done, ROUNDS)
        for name, (low, high) in BOUNDS.items():
            for ratio in (1 + step, 1 / (1 + step)):
                while True:
                    value = min(high, max(low, getattr(best, name) * ratio))
                    tried = replace(best, **{name: value})
                    loss = _loss(rows, tried, start)
                    if loss >= least - 1e-7:
                        break
                    best, least = tried, loss
        step *= SHRINK
    return best


def _loss(rows: Sequence[Row], factors: Factors, start: Factors) -> float:
    tpot = ttft = 0.0
    counted = 0
    for row in rows:
        predicted = predict(row, factors)
        tpot += min(OUTLIER, abs(math.log(predicted.tpot / row.tpot)))
        if row.concurrency <= TTFT_CONCURRENCY:
            ttft += min(OUTLIER, abs(math.log(predicted.ttft / row.ttft)))
            counted += 1
    prior: dict[str, Any] = asdict(start)
    moved = sum(math.log(value / prior[name]) ** 2 for name, value in asdict(factors).items())
    return tpot / len(rows) + TTFT_WEIGHT * (ttft / counted if counted else 0.0) + PRIOR * moved
