"""Fit the factors to measurements: robustly, within their bounds, and no farther from where they were than the data ask for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from headrace.engine.plan import Chunk
from headrace.plan.cost import CostModel
from headrace.plan.devices import Device
from headrace.plan.factors import BOUNDS, Factors
from headrace.plan.measured import TTFT_CONCURRENCY, Row, predict
from headrace.plan.memory import Level
from headrace.plan.shape import Shape

OUTLIER = 0.5  # |log(predicted / measured)| beyond which a row counts no more: a run that measured something else must not bend the rest
TTFT_WEIGHT = 0.25
PRIOR = 2e-3  # loss for a factor that moved by e: what few rows say little about stays where it was
ROUNDS = 6
FIRST_STEP = 0.3  # relative; it shrinks in every round
SHRINK = 0.6
MOST_STEPS = 2000  # of a recording, evenly taken

Progress = Callable[[int, int], None]


def fit(rows: Sequence[Row], start: Factors, progress: Progress = lambda done, of: None) -> Factors:
    """The factors with the least mean absolute log error of TPOT, and of TTFT where no client's queue is in it. Deterministic."""

    def loss(factors: Factors) -> float:
        tpot, ttft = [], []
        for row in rows:
            predicted = predict(row, factors)
            tpot.append(_error(predicted.tpot, row.tpot))
            if row.concurrency <= TTFT_CONCURRENCY:
                ttft.append(_error(predicted.ttft, row.ttft))
        return statistics.fmean(tpot) + (TTFT_WEIGHT * statistics.fmean(ttft) if ttft else 0.0)

    return _descend(loss, start, progress)


@dataclass(frozen=True, slots=True)
class Step:
    """A step as a server recorded it: what it computed, and how long it took (seconds)."""

    chunks: tuple[Chunk, ...]
    seconds: float


def fit_steps(
    steps: Sequence[Step], shape: Shape, device: Device, level: Level, start: Factors, progress: Progress = lambda done, of: None
) -> Factors:
    """The same for the steps of a recording. What its steps do not show (links, requests) stays as it was."""
    chosen = [steps[i * len(steps) // MOST_STEPS] for i in range(MOST_STEPS)] if len(steps) > MOST_STEPS else steps

    def loss(factors: Factors) -> float:
        cost = CostModel(shape, device, level, 1, factors)
        return statistics.fmean(_error(cost.step_s(step.chunks), step.seconds) for step in chosen)

    return _descend(loss, start, progress)


def step_errors(steps: Sequence[Step], cost: CostModel) -> dict[str, float | int]:
    """Of each step (median and p90 of the absolute relative error), and of all of them together."""
    predicted = [cost.step_s(step.chunks) for step in steps]
    errors = sorted(abs(p / step.seconds - 1) for p, step in zip(predicted, steps, strict=True))
    total = sum(predicted) / sum(step.seconds for step in steps) - 1
    return {"steps": len(steps), "median": statistics.median(errors), "p90": errors[math.ceil(0.9 * len(errors)) - 1], "total": total}


def _error(predicted: float, measured: float) -> float:
    return min(OUTLIER, abs(math.log(predicted / measured)))


def _descend(loss: Callable[[Factors], float], start: Factors, progress: Progress) -> Factors:
    """Coordinate descent: one factor at a time goes up or down by a step as long as that helps; the step shrinks from round to round."""
    prior: dict[str, Any] = asdict(start)

    def total(factors: Factors) -> float:
        moved = sum(math.log(value / prior[name]) ** 2 for name, value in asdict(factors).items())
        return loss(factors) + PRIOR * moved

    best, least = start, total(start)
    step = FIRST_STEP
    for done in range(ROUNDS):
        progress(done, ROUNDS)
        for name, (low, high) in BOUNDS.items():
            for ratio in (1 + step, 1 / (1 + step)):
                while True:
                    value = min(high, max(low, getattr(best, name) * ratio))
                    tried = replace(best, **{name: value})
                    reached = total(tried)
                    if reached >= least - 1e-7:
                        break
                    best, least = tried, reached
        step *= SHRINK
    return best
