"""Percentiles, their intervals and the steady part, against formulas written out and against simulation."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.record import Record
from headrace.bench.statistics import TAIL, interval, needed, pooled_interval, quantile, rank_interval, settled
from headrace.bench.window import find, in_flight


@given(st.lists(st.floats(0, 1e6), min_size=1), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_quantile_is_the_smallest_value_that_enough_do_not_exceed(values: list[float], q: float) -> None:
    values.sort()
    found = quantile(values, q)
    within = [value for value in values if sum(x <= value for x in values) >= q * len(values) - 1e-9]
    assert found == within[0]


def below(count: int, q: float, most: int) -> float:
    """P(at most `most` of `count` samples are below the quantile), by the binomial formula."""
    terms = (math.log(math.comb(count, k)) + k * math.log(q) + (count - k) * math.log(1 - q) for k in range(most + 1))
    return math.fsum(math.exp(term) for term in terms)


@pytest.mark.parametrize("q", [0.5, 0.95, 0.99])
@pytest.mark.parametrize("more", [0, 1, 50, 700])
def test_ranks_of_an_interval_are_the_tightest_that_the_binomial_allows(q: float, more: int) -> None:
    count = needed(q) + more
    ranks = rank_interval(count, q)
    assert ranks is not None
    low, high = ranks
    assert below(count, q, low) <= TAIL < below(count, q, low + 1)
    assert below(count, q, high) >= 1 - TAIL > below(count, q, high - 1)
    assert 0 <= low < high < count


def test_how_many_samples_a_percentile_needs() -> None:
    assert [needed(q) for q in (0.5, 0.95, 0.99)] == [6, 72, 368]
    for q in (0.5, 0.95, 0.99):
        assert rank_interval(needed(q) - 1, q) is None
        assert interval([1.0] * (needed(q) - 1), q) is None


def test_intervals_hold_the_true_value_as_often_as_they_say() -> None:
    draw = random.Random(1)
    hits = 0
    for _ in range(400):
        values = sorted(draw.expovariate(1.0) for _ in range(500))
        found = interval(values, 0.99)
        assert found is not None
        hits += found[0] <= -math.log(0.01) <= found[1]
    assert 0.93 <= hits / 400 <= 0.99


def test_pooled_intervals_know_that_gaps_of_one_answer_are_alike() -> None:
    """Each group has its own level: as many values from few groups say less, and intervals of single samples would be far too narrow."""
    draw = random.Random(2)
    hits = naive = 0
    for _ in range(200):
        groups = [[level + draw.random() * 1e-3] * 20 for level in (draw.expovariate(1.0) for _ in range(300))]
        values = sorted(value for group in groups for value in group)
        found, single = pooled_interval(groups, values, 0.95), interval(values, 0.95)
        assert found is not None
        assert single is not None
        truth = -math.log(0.05)
        hits += found[0] <= truth <= found[1]
        naive += single[0] <= truth <= single[1]
    assert hits / 200 >= 0.90
    assert naive / 200 < 0.5


def test_pooled_intervals_are_refused_from_few_or_uneven_groups() -> None:
    even = [[0.01] * 100 for _ in range(5)]
    assert pooled_interval(even, [0.01] * 500, 0.99) is None  # five answers
    uneven = [[0.01] * 99 + [1.0] for _ in range(6)] + [[1.0] * 10]
    assert pooled_interval(uneven, sorted(x for group in uneven for x in group), 0.99) is None
    calm = [[0.01] * 100 for _ in range(10)]
    assert pooled_interval(calm, [0.01] * 1000, 0.99) == (0.01, 0.01)


def test_where_a_series_settles() -> None:
    draw = random.Random(3)
    level = [10 + draw.gauss(0, 0.5) for _ in range(80)]
    assert settled([1.0] * 40) == 0
    rising = [0.0, 2.0, 4.0, 6.0, 8.0, *level]
    found = settled(rising)
    assert found is not None
    assert 4 <= found <= 12
    assert settled([float(i) for i in range(100)]) is None


def made(scheduled: float, took: float, tokens: int = 10) -> Record:
    gap = took / tokens
    record = Record(0, scheduled=scheduled, started=scheduled, sent=scheduled, end=scheduled + took)
    record.times = [scheduled + gap * (i + 1) for i in range(tokens)]
    record.counts = [1] * tokens
    return record


def test_the_steady_window_leaves_out_the_slow_beginning_and_the_end() -> None:
    """While the server warms up requests take 4 s, then 1 s; two come each second."""
    records = [made(i / 2, 4.0 if i < 40 else 1.0) for i in range(400)]
    window = find(records, is_level=True)
    assert window.kind == "steady"
    assert 18 <= window.begin <= 30
    assert window.end == records[-1].scheduled


def test_an_overloaded_run_is_not_called_steady() -> None:
    records = [made(i / 10, 1.0 + i / 10) for i in range(300)]  # each waits longer than the one before
    window = find(records, is_level=True)
    assert window.kind == "whole"
    assert "never became steady" in window.why
    assert window.end > records[-1].scheduled


@pytest.mark.parametrize(
    ("count", "is_level", "warmup", "kind"),
    [(20, True, None, "whole"), (400, False, None, "whole"), (400, True, 3.0, "given"), (400, True, 1e6, "whole")],
)
def test_windows_that_are_not_searched(count: int, is_level: bool, warmup: float | None, kind: str) -> None:
    window = find([made(i / 2, 1.0) for i in range(count)], is_level=is_level, warmup_s=warmup)
    assert window.kind == kind
    assert window.why or kind == "given"
    if kind == "given":
        assert window.begin == 3.0


def test_in_flight_adds_up_to_the_time_requests_took() -> None:
    records = [made(i * 0.37, 0.1 + i % 5) for i in range(50)]
    end = max(record.end or 0 for record in records)
    bins = in_flight(records, 0.0, end / 60, 60)
    assert sum(bins) * end / 60 == pytest.approx(sum((record.end or 0) - record.scheduled for record in records))
    waiting = in_flight(records, 0.0, end / 60, 60, waiting=True)
    assert sum(waiting) * end / 60 == pytest.approx(sum(record.times[0] - record.scheduled for record in records))
