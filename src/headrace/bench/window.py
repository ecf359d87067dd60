"""The steady part of a run: after its warm-up, before its load ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.bench.record import Record
from headrace.bench.statistics import settled

FEWEST = 100  # requests from which on a steady part is looked for
BINS = 100


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds [begin, end) of the run's clock. Requests scheduled in it and tokens that came in it count."""

    begin: float
    end: float
    kind: str  # steady: found · given: as asked for · whole: all of the run, for the reason in `why`
    why: str = ""

    def holds(self, time: float) -> bool:
        return self.begin <= time < self.end

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def in_flight(records: Sequence[Record], begin: float, width: float, bins: int, *, waiting: bool = False) -> list[float]:
    """Mean number of requests between schedule and end (`waiting`: and first token) in each of so many bins."""
    found = [0.0] * bins
    for record in records:
        stop = record.end if not waiting or not record.times else record.times[0]
        if stop is not None:
            spread(found, record.scheduled, stop, begin, width)
    return found


def spread(bins: list[float], start: float, stop: float, begin: float, width: float) -> None:
    """Add the share of each bin that [start, stop) covers."""
    for at in range(max(0, int((start - begin) / width)), min(len(bins), int((stop - begin) / width) + 1)):
        left, right = begin + at * width, begin + (at + 1) * width
        bins[at] += max(0.0, min(stop, right) - max(start, left)) / width


def find(records: Sequence[Record], *, is_level: bool, warmup_s: float | None = None) -> Window:
    """`is_level`: the load offered was the same all along, so that there is something steady to find."""
    end = max((record.end or record.scheduled for record in records), default=0.0) + 1e-9
    last = max((record.scheduled for record in records), default=0.0)
    if warmup_s is not None:
        return Window(warmup_s, last, "given") if warmup_s < last else Window(0.0, end, "whole", f"it was over within {warmup_s:g} s")
    if not is_level:
        return Window(0.0, end, "whole", "the load was meant to change")
    if len(records) < FEWEST or last <= 0:
        return Window(0.0, end, "whole", f"fewer than {FEWEST} requests")
    bins = min(BINS, len(records) // 5)
    width = last / bins
    tokens = [0.0] * bins
    for record in records:
        for time, count in zip(record.times, record.counts, strict=True):
            if time < last:
                tokens[min(bins - 1, int(time / width))] += count
    cuts = [settled(in_flight(records, 0.0, width, bins)), settled(tokens)]
    known = [cut for cut in cuts if cut is not None]
    if len(known) < len(cuts):
        return Window(0.0, end, "whole", "it never became steady: the load is beyond what the server can do, or the run too short")
    return Window(max(known) * width, last, "steady")
