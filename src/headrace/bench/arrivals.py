"""When requests come: offsets from the start in seconds, absolute, drawn once before the run so that no server can delay them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.errors import UsageError

KINDS = ("poisson", "gamma", "constant")
MAX_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A rate in requests a second, `rate` at first and `final` at the end of `seconds`, and how regular the arrivals are.

    `burstiness` (gamma only) is the variance of the intervals over the square of their mean: 1 is Poisson, above 1 comes in bursts.
    """

    kind: str
    rate: float
    final: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"--arrivals: expected {', '.join(KINDS)}, got {self.kind!r}")
        for rate in (self.rate, self.final):
            if not (math.isfinite(rate) and 0 < rate <= 1e6):
                raise UsageError(f"--rate, --ramp: expected requests a second above 0, got {rate:g}")
        if not 0.01 <= self.burstiness <= 1000:
            raise UsageError(f"--burstiness: expected 0.01 to 1000, got {self.burstiness:g}")
        if self.burstiness != 1 and self.kind != "gamma":
            raise UsageError("--burstiness: only with --arrivals gamma")

    def during(self, seconds: float, seed: int) -> list[float]:
        """The arrivals of so many seconds, the rate changing evenly over them. Raises UsageError for too many."""
        if seconds * (self.rate + self.final) / 2 > MAX_REQUESTS:
            raise UsageError(f"--duration: at most {MAX_REQUESTS:,} requests, got about {seconds * (self.rate + self.final) / 2:,.0f}")
        total = seconds * (self.rate + self.final) / 2
        times: list[float] = []
        for unit in self._units(seed):
            if unit >= total:
                return times
            times.append(self._when(unit, seconds))
        return times

    def first(self, count: int, seed: int) -> list[float]:
        """So many arrivals; a rate that changes has reached its end with the last of them."""
        seconds = count / ((self.rate + self.final) / 2)
        units = self._units(seed)
        return [self._when(next(units), seconds) for _ in range(count)]

    def _units(self, seed: int) -> Iterator[float]:
        """Arrivals at one a second on average, for ever. The first comes after an interval, as from a process that always was."""
        draw = random.Random(f"{seed}/arrivals")
        shape = 1 / self.burstiness
        time = 0.0
        while True:
            if self.kind == "constant":
                yield time
                time += 1.0
            else:
                time += draw.gammavariate(shape, 1 / shape) if self.kind == "gamma" else draw.expovariate(1.0)
                yield time

    def _when(self, unit: float, seconds: float) -> float:
        """The time by which `unit` arrivals are due: the inverse of the rate summed up, rate·t + slope·t²/2."""
        slope = (self.final - self.rate) / seconds
        if slope == 0:
            return unit / self.rate
        inside = self.rate**2 + 2 * slope * unit
        if inside <= 0 or unit > seconds * (self.rate + self.final) / 2:  # past the end: on at the last rate
            return seconds + (unit - seconds * (self.rate + self.final) / 2) / self.final
        return 2 * unit / (self.rate + math.sqrt(inside))  # the root without cancellation for small slopes
