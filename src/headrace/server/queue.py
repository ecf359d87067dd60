"""What waits for the engine, how fast it leaves, and so how long a newcomer would wait: what a request is refused by before it is read.

The engine's queue is its own; this is the API process's account of it. Places are by the engine's policy, to the letter where the API
process knows what the engine knows, and otherwise as good as an expectation needs.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

from headrace.errors import InvalidRequest, QueueFull, QueueTimeExceeded

_MEMORY_S = 10.0  # how long an admission counts towards the rate, as long as
_ENOUGH = 16  # there are more than so many
_EMPTY_MEMORY_S = 2.0  # how long while nobody waits: then the engine takes what comes, and old rates say little


class Waiting:
    """A prompt that the engine has not scheduled yet."""

    __slots__ = ("ahead", "expected_s", "number", "priority", "request_id", "since", "size", "tenant")

    def __init__(self, request_id: str, tenant: str, priority: int, size: float, number: int, since: float, ahead: int, expected_s: float):
        self.request_id = request_id  # the client's name of it
        self.tenant = tenant
        self.priority = priority
        self.size = size  # its place under `shortest`: tokens computed before it came, and its own
        self.number = number  # by arrival
        self.since = since
        self.ahead = ahead  # how many were before it when it came
        self.expected_s = expected_s  # what it was to wait, by the rate of that time


class Queue:
    """Times are the injected clock's, in seconds."""

    def __init__(
        self, policy: str = "fcfs", max_waiting: int = 1024, max_wait_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`max_wait_s`: 0 for no bound."""
        self._policy = policy
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._waiting: dict[int, Waiting] = {}  # by number: the oldest first
        self._by_tenant: Counter[str] = Counter()
        self._num_arrived = 0
        self._num_computed = 0  # tokens, as the engine tells them
        self._at = clock()
        # Time in which two or more waited, and admissions in it; both fade. Who comes to an engine with room says nothing of its rate.
        self._busy_s = 0.0
        self._admitted = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def check(self, tenant: str = "", priority: int | None = None, count: int = 1) -> None:
        """Raises QueueFull or QueueTimeExceeded where a newcomer of `count` prompts has no place, InvalidRequest where it never would.

        `priority`: None while it is not known.
        """
        if count > self._max_waiting:
            raise InvalidRequest(f"prompt: {count} prompts at once, the queue holds {self._max_waiting}", param="prompt")
        if len(self._waiting) + count > self._max_waiting:
            raise QueueFull(f"the queue is full: {len(self._waiting)} requests are waiting, the limit is {self._max_waiting}")
        if self._policy == "fair" and self._by_tenant[tenant] >= max(1, self._max_waiting // (1 + len({*self._by_tenant, tenant}))):
            raise QueueFull(
                f"{self._by_tenant[tenant]} requests of this key are waiting: its share of the queue's {self._max_waiting} places"
            )
        if not self._max_wait_s or (self._policy == "priority" and priority is None):
            return
        # Whoever comes next is never refused: the engine is about to look.
        if self._ahead(tenant, priority or 0):
            expected = self.expected_s(tenant, priority or 0)
            if expected > self._max_wait_s:
                error = QueueTimeExceeded(
                    f"this request would wait about {expected:.1f} s in the queue, the limit is {self._max_wait_s:g} s: "
                    f"{len(self._waiting)} requests are waiting"
                )
                error.retry_after_s = max(1.0, expected - self._max_wait_s)
                raise error

    def enter(self, request_id: str, tenant: str, num_prompt: int, priority: int = 0) -> Waiting:
        """A prompt was sent to the engine. `leave` follows, in whatever way it ends."""
        now = self._advance()
        self._num_arrived += 1
        size = self._num_computed + num_prompt
        ahead = self._ahead(tenant, priority)
        waiting = Waiting(request_id, tenant, priority, size, self._num_arrived, now, ahead, self.expected_s(tenant, priority))
        self._waiting[waiting.number] = waiting
        self._by_tenant[tenant] += 1
        return waiting

    def leave(self, waiting: Waiting, *, admitted: bool) -> None:
        """It was scheduled, or it ended before."""
        if waiting.number not in self._waiting:
            return
        self._advance()
        self._admitted += admitted and len(self._waiting) > 1
        del self._waiting[waiting.number]
        self._by_tenant[waiting.tenant] -= 1
        if not self._by_tenant[waiting.tenant]:
            del self._by_tenant[waiting.tenant]

    def computed(self, num_tokens: int) -> None:
        """A step of the engine computed so many tokens."""
        self._num_computed += num_tokens

    def expected_s(self, tenant: str = "", priority: int = 0) -> float:
        """How long a newcomer would wait; 0 while nobody does."""
        if not self._waiting:
            return 0.0
        return max(self._wait_s(self._ahead(tenant, priority) + 1), self._oldest_s(tenant))

    def places(self, tenant: str) -> list[tuple[Waiting, int, float]]:
        """A caller's own waiting prompts in order: each with its position, from 1, and the seconds it still has to wait."""
        self._advance()
        order = sorted(self._waiting.values(), key=self._key())
        return [(it, place, self._wait_s(place)) for place, it in enumerate(order, 1) if it.tenant == tenant]

    def _wait_s(self, places: int) -> float:
        self._advance()
        return places * self._busy_s / (self._admitted + 1)  # one more than there were: unknown is fast

    def _oldest_s(self, tenant: str) -> float:
        """What somebody has waited who is before any newcomer: no newcomer waits less, whatever the rate says."""
        if self._policy == "priority":
            return 0.0  # the urgent pass
        oldest = next((it for it in self._waiting.values() if self._policy != "fair" or it.tenant == tenant), None)
        return self._clock() - oldest.since if oldest is not None else 0.0

    def _ahead(self, tenant: str, priority: int) -> int:
        if self._policy == "fair":  # tenants take turns
            own = self._by_tenant[tenant]
            return own + sum(min(count, own + 1) for name, count in self._by_tenant.items() if name != tenant)
        if self._policy == "priority":
            return sum(it.priority <= priority for it in self._waiting.values())
        return len(self._waiting)

    def _key(self) -> Callable[[Waiting], tuple[float, int]]:
        if self._policy == "fair":
            turns: Counter[str] = Counter()
            turn = {}
            for it in self._waiting.values():
                turn[it.number] = turns[it.tenant]
                turns[it.tenant] += 1
            return lambda it: (turn[it.number], it.number)
        if self._policy == "priority":
            return lambda it: (it.priority, it.number)
        if self._policy == "shortest":
            return lambda it: (it.size, it.number)
        return lambda it: (it.number, 0)

    def _advance(self) -> float:
        """Account for the time since the last call."""
        now = self._clock()
        elapsed, self._at = max(0.0, now - self._at), now
        if not self._waiting:
            self._fade(elapsed / _EMPTY_MEMORY_S)
        elif self._admitted > _ENOUGH:
            self._fade(elapsed / _MEMORY_S)
        if len(self._waiting) > 1:
            self._busy_s += elapsed
        return now

    def _fade(self, exponent: float) -> None:
        kept = math.exp(-exponent)
        self._admitted *= kept
        self._busy_s *= kept
