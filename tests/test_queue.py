"""The front's arithmetic on a clock of its own: how long a newcomer would wait, whom it passes, and what a key may still ask for."""

from __future__ import annotations

import random
from collections import deque

import pytest

from headrace.errors import InvalidRequest, QueueFull, QueueTimeExceeded, RateLimited, UsageError
from headrace.server.auth import read_keys
from headrace.server.queue import Queue, Waiting
from headrace.server.quotas import NO_QUOTA, Quota, Quotas, duration


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def simulate(rate: float, load: float, limit_s: float, *, seconds: float, slots: int = 4, seed: int = 1) -> tuple[list[float], int]:
    """Waits of the admitted, and how many were refused, at `slots` servers that finish `rate` requests a second in all."""
    rng, clock = random.Random(seed), Clock()
    queue = Queue("fcfs", 100_000, limit_s, clock)
    waiting: deque[Waiting] = deque()
    free_at = [clock.now] * slots
    waits, refused, end = [], 0, clock.now + seconds
    while clock.now < end:
        arrival = clock.now + rng.expovariate(load * rate)
        while waiting and max(min(free_at), waiting[0].since) <= arrival:
            at = free_at.index(min(free_at))
            clock.now = max(free_at[at], waiting[0].since)
            free_at[at] = clock.now + rng.expovariate(rate / slots)
            it = waiting.popleft()
            queue.leave(it, admitted=True)
            waits.append(clock.now - it.since)
        clock.now = arrival
        try:
            queue.check()
        except QueueTimeExceeded:
            refused += 1
        else:
            waiting.append(queue.enter("r", "", 10))
    return waits, refused


@pytest.mark.parametrize("rate", [0.5, 4.0, 100.0])
def test_ten_times_too_much(rate: float) -> None:
    """The admitted wait about as long as they may at most, none is idle for want of work, and the rest is refused."""
    limit = 8 / rate
    waits, refused = simulate(rate, 10, limit, seconds=400 / rate)
    assert 360 <= len(waits) <= 450  # capacity: 400
    assert refused > 8 * len(waits)
    waits.sort()
    assert waits[len(waits) // 2] <= 1.25 * limit
    assert waits[int(0.95 * len(waits))] <= 2 * limit


def test_nobody_is_refused_below_capacity() -> None:
    waits, refused = simulate(4.0, 0.6, 4.0, seconds=1000)
    assert len(waits) > 2000
    assert refused <= 0.01 * len(waits)


def test_a_queue_that_was_slow_and_emptied_is_forgotten() -> None:
    clock = Clock()
    queue = Queue("fcfs", 100, 2.0, clock)
    for _ in range(10):  # each waits for ten seconds
        it = queue.enter("slow", "", 1)
        clock.now += 10
        queue.leave(it, admitted=True)
    assert queue.expected_s() == 0.0
    clock.now += 20
    for _ in range(5):
        queue.check()
        queue.enter("quick", "", 1)
        clock.now += 0.001


def test_somebody_who_waits_long_says_what_no_rate_does() -> None:
    clock = Clock()
    queue = Queue("fcfs", 100, 2.0, clock)
    queue.enter("first", "", 1)
    queue.check()
    clock.now += 2.5
    with pytest.raises(QueueTimeExceeded, match=r"about 2\.5 s in the queue, the limit is 2 s: 1 requests"):
        queue.check()


def test_a_full_queue() -> None:
    queue = Queue("fcfs", 2)
    first = queue.enter("a", "", 1)
    queue.enter("b", "", 1)
    with pytest.raises(QueueFull, match="2 requests are waiting, the limit is 2"):
        queue.check()
    queue.leave(first, admitted=False)
    queue.leave(first, admitted=True)  # a second end is none
    queue.check()
    assert len(queue) == 1
    with pytest.raises(QueueFull):
        queue.check(count=2)
    with pytest.raises(InvalidRequest, match="prompt: 3 prompts at once, the queue holds 2"):
        queue.check(count=3)


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", "abcde"), ("shortest", "cabde"), ("priority", "dabce"), ("fair", "adbce")],
)
def test_places_are_by_policy(policy: str, order: str) -> None:
    clock = Clock()
    queue = Queue(policy, 100, 0, clock)
    asked = {"a": ("x", 500, 0), "b": ("x", 510, 0), "c": ("x", 20, 0), "d": ("y", 600, -1), "e": ("x", 700, 0)}
    entered = {name: queue.enter(name, *rest) for name, rest in asked.items()}
    places = [*queue.places("x"), *queue.places("y")]
    assert "".join(it.request_id for it, _, _ in sorted(places, key=lambda row: row[1])) == order
    assert [it.request_id for it, _, _ in queue.places("y")] == ["d"]
    assert queue.places("z") == []
    assert entered["d"].ahead == {"fair": 1, "priority": 0}.get(policy, 3)
    assert entered["e"].ahead == 4


def test_a_short_prompt_does_not_pass_what_was_there_long_before() -> None:
    queue = Queue("shortest", 100)
    queue.enter("long", "", 1000)
    queue.computed(2000)
    queue.enter("short", "", 10)
    assert [it.request_id for it, _, _ in queue.places("")] == ["long", "short"]


def test_expected_waits_grow_with_the_place() -> None:
    clock = Clock()
    queue = Queue("fcfs", 100, 0, clock)
    entered = [queue.enter(str(i), "", 1) for i in range(21)]
    for it in entered[:11]:  # one a second
        clock.now += 1
        queue.leave(it, admitted=True)
    expected = [seconds for _, _, seconds in queue.places("")]
    assert expected == sorted(expected)
    assert 7 < expected[-1] < 11  # ten places at one a second


def test_a_flood_of_one_key_leaves_room_and_time_to_another() -> None:
    clock = Clock()
    queue = Queue("fair", 100, 5.0, clock)
    flood = []
    for _ in range(50):
        queue.check("flood")
        flood.append(queue.enter("f", "flood", 1))
    with pytest.raises(QueueFull, match="50 requests of this key"):
        queue.check("flood")
    for it in flood[:6]:
        clock.now += 1
        queue.leave(it, admitted=True)
    with pytest.raises((QueueTimeExceeded, QueueFull)):
        queue.check("flood")
    queue.check("other")  # its turn comes next
    assert queue.enter("o", "other", 1).expected_s < 3


def test_an_urgent_request_is_not_refused_for_those_it_passes() -> None:
    clock = Clock()
    queue = Queue("priority", 100, 2.0, clock)
    for _ in range(20):
        queue.enter("later", "", 1, 5)
    clock.now += 3
    queue.check("", None)  # not known yet
    queue.check("", 1)
    with pytest.raises(QueueTimeExceeded) as caught:
        queue.check("", 5)
    assert caught.value.retry_after_s >= 1


# Quotas


def test_requests_a_minute() -> None:
    clock = Clock()
    quotas = Quotas(Quota(rpm=3), {"free": NO_QUOTA}, clock)
    for _ in range(3):
        quotas.enter("a")
        quotas.leave("a")
    with pytest.raises(RateLimited, match="3 requests a minute") as caught:
        quotas.enter("a")
    assert caught.value.retry_after_s == pytest.approx(20.0)
    for _ in range(50):
        quotas.enter("free")
    quotas.enter("b")  # another key's limits are its own
    clock.now += 20.01
    quotas.enter("a")
    assert quotas.headers("a") == [
        (b"x-ratelimit-limit-requests", b"3"),
        (b"x-ratelimit-remaining-requests", b"0"),
        (b"x-ratelimit-reset-requests", b"59.991s"),
    ]
    clock.now += 1e6
    assert (b"x-ratelimit-remaining-requests", b"3") in quotas.headers("a")
    assert quotas.headers("free") == []


def test_tokens_a_minute_are_owed() -> None:
    clock = Clock()
    quotas = Quotas(Quota(tpm=600), None, clock)
    quotas.enter("a")
    quotas.charge("a", 900)  # more than there was: known only afterwards
    assert (b"x-ratelimit-remaining-tokens", b"0") in quotas.headers("a")
    with pytest.raises(RateLimited, match="600 tokens a minute") as caught:
        quotas.enter("a")
    clock.now += caught.value.retry_after_s - 0.01
    with pytest.raises(RateLimited):
        quotas.enter("a")
    clock.now += 0.02
    quotas.enter("a")


def test_requests_at_once() -> None:
    quotas = Quotas(Quota(concurrent=2))
    quotas.enter("a")
    quotas.enter("a")
    with pytest.raises(RateLimited, match="2 at once"):
        quotas.enter("a")
    quotas.leave("a")
    quotas.enter("a")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.1201, "121ms"), (1, "1s"), (1.5, "1.5s"), (59.999, "59.999s"), (60, "1m0s"), (361.25, "6m1.25s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_limits_in_the_key_file() -> None:
    keys = read_keys(["a=key-00001 rpm=5 concurrent=2", "b=key-00002"], None, None, Quota(rpm=1, tpm=9))
    assert keys.quotas == {"a": Quota(rpm=5, tpm=9, concurrent=2)}
    for text in ("a=key-00001 rpm=-1", "a=key-00001 rpm=", "a=key-00001 secret-word", "a=key-00001 rpm=5x"):
        with pytest.raises(UsageError, match="expected rpm=N, tpm=N or concurrent=N") as caught:
            read_keys([text], None, None)
        assert "secret" not in str(caught.value)
        assert "key-00001" not in str(caught.value)
