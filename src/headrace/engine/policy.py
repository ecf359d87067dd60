"""Who goes first: the order of running samples, and the queues of waiting ones.

fcfs       by arrival
shortest   by arrival, as if each request had come later by as many computed tokens as its prompt has: a short prompt passes a long one that
           came just before, and who waits falls behind by no more than its own length
priority   by priority, lower first, then by arrival
fair       of the tenants that wait the one that was served least; its requests by arrival. Once admitted, a request keeps its place (the
           order of admission): a place that moved with every token would let two large requests preempt each other for ever

Under every policy requests of the batch tier come after all others, and none of them runs while another is open: what they had computed
stays in the prefix cache as long as nobody needs its place.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headrace.engine.samples import Request, Sample

by_order = attrgetter("order")


class Queue(Protocol):
    """Samples that wait. `head` is the next one in policy order. `remove` raises RuntimeError for one that is not there."""

    def __len__(self) -> int: ...
    def push(self, sample: Sample) -> None: ...
    def head(self) -> Sample | None: ...
    def remove(self, sample: Sample) -> None: ...


class OrderedQueue:
    """By `sample.order`. Removal of any one is a binary search and a move of pointers: the queue is bounded by `max_waiting`."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: list[Sample] = []

    def __len__(self) -> int:
        return len(self._samples)

    def push(self, sample: Sample) -> None:
        insort(self._samples, sample, key=by_order)

    def head(self) -> Sample | None:
        return self._samples[0] if self._samples else None

    def remove(self, sample: Sample) -> None:
        at = bisect_left(self._samples, sample.order, key=by_order)
        if at == len(self._samples) or self._samples[at] is not sample:
            raise RuntimeError(f"[OrderedQueue.remove] request {sample.request_id} sample {sample.index} is not in the queue")
        del self._samples[at]


class Account:
    """A tenant's: tokens computed for it, requests open, and those that wait."""

    __slots__ = ("num_open", "served", "waiting")

    def __init__(self) -> None:
        self.served = 0
        self.num_open = 0
        self.waiting: deque[Sample] = deque()


class FairQueue:
    """The least-served tenant's oldest sample first.

    A tenant that comes back from doing nothing starts level with the least-served one that is busy: idle time is no credit. When nobody
    is busy the books are closed.
    """

    __slots__ = ("_accounts", "_size", "_waiting")

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._waiting: dict[str, Account] = {}  # those with samples waiting
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def open(self, tenant: str) -> Account:
        """A request of `tenant` came in. Its account, to be closed again by `close`."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account()
        if account.num_open == 0:
            busy = [other.served for other in self._accounts.values() if other.num_open]
            account.served = max(account.served, min(busy, default=0))
        account.num_open += 1
        return account

    def close(self, request: Request) -> None:
        """A request is over. One of the batch tier has no account."""
        account = request.account
        if account is None:
            return
        account.num_open -= 1
        if account.num_open == 0 and not any(other.num_open for other in self._accounts.values()):
            self._accounts.clear()

    def charge(self, sample: Sample, num_tokens: int) -> None:
        """Tokens were computed for a sample."""
        if sample.request.account is not None:
            sample.request.account.served += num_tokens

    def push(self, sample: Sample) -> None:
        account = self._account(sample.request)
        account.waiting.append(sample)
        self._waiting[sample.request.submit.tenant] = account
        self._size += 1

    def head(self) -> Sample | None:
        if not self._waiting:
            return None
        first = min(self._waiting.values(), key=lambda account: (account.served, account.waiting[0].order))
        return first.waiting[0]

    def remove(self, sample: Sample) -> None:
        tenant = sample.request.submit.tenant
        account = self._waiting.get(tenant)
        if account is None or sample not in account.waiting:
            raise RuntimeError(f"[FairQueue.remove] request {sample.request_id} sample {sample.index} is not in the queue")
        account.waiting.remove(sample)
        if not account.waiting:
            del self._waiting[tenant]
        self._size -= 1

    @staticmethod
    def _account(request: Request) -> Account:
        if request.account is None:
            raise RuntimeError(f"[FairQueue] request {request.id} has no account")
        return request.account


class Queues:
    """Samples without a row: the first of each `fresh` or `batch` request, and `resuming` ones, preempted or further ones of a running one.

    `num_interactive` is the number of open requests that are not of the batch tier."""

    __slots__ = ("batch", "fair", "fresh", "num_interactive", "resuming")

    def __init__(self, policy: str) -> None:
        self.fair = FairQueue() if policy == "fair" else None
        self.fresh: Queue = OrderedQueue() if self.fair is None else self.fair
        self.resuming = OrderedQueue()
        self.batch = OrderedQueue()
        self.num_interactive = 0

    def __len__(self) -> int:
        return len(self.fresh) + len(self.resuming) + len(self.batch)

    def next(self, with_fresh: bool) -> Sample | None:
        """Who is to come in next, in policy order. Under `fair`, what has run goes before what has not."""
        resuming = self.resuming.head()
        if self.num_interactive:
            if resuming is not None and resuming.request.submit.batch:
                resuming = None
            fresh = self.fresh.head() if with_fresh else None
        else:
            fresh = self.batch.head() if with_fresh else None
        if resuming is None or fresh is None:
            return resuming or fresh
        return resuming if self.fair is not None or resuming.order < fresh.order else fresh

    def of(self, sample: Sample) -> Queue:
        """The one a sample belongs to."""
        if sample.request.first_scheduled >= 0:
            return self.resuming
        return self.batch if sample.request.submit.batch else self.fresh
