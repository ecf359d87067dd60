"""What was promised to users, and which requests got it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from headrace.bench.record import FIGURES, Record
from headrace.errors import UsageError


def _mean_gap(record: Record) -> float | None:
    gaps = record.token_gaps()
    return sum(gaps) / len(gaps) if gaps else None


LIMITS: dict[str, Callable[[Record], float | None]] = {
    "ttft": FIGURES["ttft"],
    "itl": _mean_gap,  # of the request's own gaps, as `headrace plan --slo` means it
    "gap": lambda record: max(record.gaps(), default=None),
    "total": FIGURES["total"],
}
FORM = f"{{{','.join(LIMITS)}}}=MS[,...][,share=0.95]"


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits in seconds, and the share of all requests that must keep every one of them."""

    limits: dict[str, float]
    share: float = 0.95

    @classmethod
    def parse(cls, text: str) -> Objective:
        """`ttft=500,itl=50,share=0.95`, times in milliseconds. Raises UsageError."""
        values: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = part.partition("=")
            try:
                value = float(number)
            except ValueError:
                value = math.nan
            if name.strip() not in (*LIMITS, "share") or not 0 < value < 1e9:
                raise UsageError(f"--slo: expected {FORM}, got {text!r}")
            values[name.strip()] = value
        share = values.pop("share", 0.95)
        if not values or share > 1:
            raise UsageError(f"--slo: expected {FORM}, got {text!r}")
        return cls({name: value / 1e3 for name, value in values.items()}, share)

    def is_met(self, record: Record) -> bool:
        """A failed or empty answer misses every objective; an answer of one token has no gap that could be too long."""
        if not record.ok:
            return False
        found = [(LIMITS[name](record), limit) for name, limit in self.limits.items()]
        return all(value is None or value <= limit for value, limit in found)
