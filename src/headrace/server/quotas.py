"""What a key may ask for: requests and tokens a minute, and requests at once. Decided before anything of a request is read."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from headrace.errors import RateLimited, UsageError

_OPTION = re.compile(r"(rpm|tpm|concurrent)=([0-9]{1,12})")
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Quota:
    """A key's limits; 0: none."""

    rpm: int = 0  # requests a minute
    tpm: int = 0  # tokens a minute, of prompts and answers
    concurrent: int = 0  # requests at once

    def with_options(self, options: Iterable[str], where: str) -> Quota:
        """Changed by texts such as `rpm=60`. Raises UsageError."""
        given: dict[str, int] = {"rpm": self.rpm, "tpm": self.tpm, "concurrent": self.concurrent}
        for option in options:
            found = _OPTION.fullmatch(option)
            if found is None:
                raise UsageError(f"{where}: expected rpm=N, tpm=N or concurrent=N after the key")  # never what was there: it may be a key
            given[found[1]] = int(found[2])
        return Quota(**given)


NO_QUOTA = Quota()


class Bucket:
    """A minute's worth at most, refilled evenly. What is taken beyond it is owed."""

    __slots__ = ("_at", "_clock", "_level", "limit")

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._clock = clock
        self._level = float(limit)
        self._at = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / _MINUTE_S)
        self._at = now
        return self._level

    def take(self, amount: float) -> None:
        self._level = self.level - amount

    def seconds_until(self, level: float) -> float:
        return max(0.0, level - self.level) * _MINUTE_S / self.limit


class _Account:
    """A key's standing."""

    def __init__(self, quota: Quota, clock: Callable[[], float]) -> None:
        self.quota = quota
        self.num_open = 0
        self.requests = Bucket(quota.rpm, clock) if quota.rpm else None
        self.tokens = Bucket(quota.tpm, clock) if quota.tpm else None


class Quotas:
    """The accounts of all keys. `enter` and `leave` in pairs around a request; tokens are charged when they are known."""

    def __init__(self, default: Quota, named: Mapping[str, Quota] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`named`: limits of single keys. Names come from the keys alone, so there are never more accounts than keys."""
        self._default = default
        self._named = dict(named or {})
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def enter(self, tenant: str) -> None:
        """A request begins. Raises RateLimited, and counts nothing then."""
        account = self._account(tenant)
        quota = account.quota
        if quota.concurrent and account.num_open >= quota.concurrent:
            raise _limited(f"{account.num_open} requests of this key are open, its limit is {quota.concurrent} at once", 1.0)
        if account.requests is not None and account.requests.level < 1:
            raise _limited(f"this key may send {quota.rpm} requests a minute", account.requests.seconds_until(1))
        if account.tokens is not None and account.tokens.level < 1:
            raise _limited(f"this key may use {quota.tpm} tokens a minute", account.tokens.seconds_until(1))
        account.num_open += 1
        if account.requests is not None:
            account.requests.take(1)

    def leave(self, tenant: str) -> None:
        self._account(tenant).num_open -= 1

    def charge(self, tenant: str, num_tokens: int) -> None:
        tokens = self._account(tenant).tokens
        if tokens is not None:
            tokens.take(num_tokens)

    def headers(self, tenant: str) -> list[tuple[bytes, bytes]]:
        """`x-ratelimit-*` of the limits that there are."""
        account = self._account(tenant)
        found: list[tuple[bytes, bytes]] = []
        for what, bucket in ((b"requests", account.requests), (b"tokens", account.tokens)):
            if bucket is not None:
                found += [
                    (b"x-ratelimit-limit-" + what, str(bucket.limit).encode()),
                    (b"x-ratelimit-remaining-" + what, str(max(0, math.floor(bucket.level))).encode()),
                    (b"x-ratelimit-reset-" + what, duration(bucket.seconds_until(bucket.limit)).encode()),
                ]
        return found

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(self._named.get(tenant, self._default), self._clock)
        return account


def _limited(text: str, retry_after_s: float) -> RateLimited:
    error = RateLimited(text)
    error.retry_after_s = retry_after_s
    return error


def duration(seconds: float) -> str:
    """As OpenAI's headers write it: 120ms, 1.5s, 6m0s."""
    ms = math.ceil(seconds * 1000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    rest = f"{ms / 1000:g}s"
    return f"{minutes}m{rest}" if minutes else rest
