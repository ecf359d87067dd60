"""Percentiles with the interval they are known to, and where a run is steady. Plain arithmetic on lists of seconds."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

QUANTILES = (0.5, 0.95, 0.99)
TAIL = 0.025  # probability beyond each end of an interval: together they are 95 % intervals
PRECISE = 0.005  # standard error of a mean over the mean that is good enough
Z = 1.959963984540054  # of the normal distribution, for TAIL
Interval = tuple[float, float]


def quantile(ordered: Sequence[float], q: float) -> float:
    """The nearest rank: the smallest value that at least a share `q` of all do not exceed."""
    return ordered[max(0, math.ceil(q * len(ordered) - 1e-9) - 1)]


def needed(q: float) -> int:
    """Samples from which on the largest is beyond the quantile with 97.5 % certainty: 6 for p50, 72 for p95, 368 for p99."""
    return max(math.ceil(math.log(TAIL) / math.log(q)), math.ceil(math.log(TAIL) / math.log1p(-q)))


def rank_interval(count: int, q: float) -> tuple[int, int] | None:
    """Indices of the ordered samples between which the true quantile is with 95 % certainty, whatever the distribution.

    How many of `count` independent samples are below the quantile is binomial. None where the samples are too few.
    """
    if count < needed(q):
        return None
    # Terms by their ratio, from the logarithm of the first: no factorial, and no underflow that would matter.
    log_term, cumulative, low = count * math.log1p(-q), 0.0, 0
    for below in range(count):
        cumulative += math.exp(log_term)
        if cumulative <= TAIL:
            low = below
        if cumulative >= 1 - TAIL:
            return low, below
        log_term += math.log((count - below) / (below + 1)) + math.log(q) - math.log1p(-q)
    return low, count - 1


def interval(ordered: Sequence[float], q: float) -> Interval | None:
    """Where the true quantile is with 95 % certainty, from independent samples; None where they are too few."""
    ranks = rank_interval(len(ordered), q)
    return None if ranks is None else (ordered[ranks[0]], ordered[ranks[1]])


def pooled_interval(groups: Sequence[Sequence[float]], ordered: Sequence[float], q: float) -> Interval | None:
    """The same for values that come in groups whose members are alike, as one answer's gaps are (Woodruff's interval).

    The share of values up to the quantile is estimated with the variance between groups, and the interval of that share is read off
    the ordered values. None where the upper end is beyond the largest value.
    """
    groups = [group for group in groups if group]
    count = len(ordered)
    if count < needed(q) or len(groups) < needed(0.5):
        return None
    value = quantile(ordered, q)
    # Where many values are equal the share jumps: the side with the greater variance counts.
    up_to, under = bisect_right(ordered, value) / count, bisect_left(ordered, value) / count
    spread = max(
        sum((sum(x <= value for x in group) - up_to * len(group)) ** 2 for group in groups),
        sum((sum(x < value for x in group) - under * len(group)) ** 2 for group in groups),
    )
    error = Z * math.sqrt(spread * len(groups) / (len(groups) - 1)) / count
    if q + error >= 1:
        return None
    return quantile(ordered, max(0.0, q - error)), quantile(ordered, q + error)


def settled(series: Sequence[float]) -> int | None:
    """The index from which on a series is steady: what makes the mean of the rest best known (MSER). None if it never settles.

    White's rule: of all beginnings that could be cut, the one that makes the variance over the square of the count smallest. A minimum in
    the second half says that the series still changes there. Nothing is cut to know the mean better than to `PRECISE`.
    """
    count = len(series)
    total = squares = 0.0
    scores = [math.inf] * count
    enough = [0.0] * count
    for start in range(count - 1, -1, -1):
        total += series[start]
        squares += series[start] ** 2
        left = count - start
        if left >= 5:  # a handful of values can be alike by chance
            scores[start] = max(0.0, squares - total * total / left) / left**2
            enough[start] = (PRECISE * total / left) ** 2
    best = min(scores, default=math.inf)
    for start in range(count // 2 + 1):
        if start < count and scores[start] <= max(best, enough[start]):
            return start
    return None
