"""A step's time, turned into tokens."""

from __future__ import annotations

FIRST_TOKENS = 64  # before anything is measured; then at most twice what was
MIN_CHUNK = 16  # prompt tokens a step may always compute: fewer cost a narrow GEMM nearly as much
BATCH_TIER_S = 0.05  # a step of the batch tier, whose rest an interactive request that comes in must wait for
_RATE = 0.3  # weight of the newest step among those of its size
_DEARER = 2.0  # a token in a larger step costs at most so many times one in a smaller step: in truth it costs less


class StepBudget:
    """How many tokens fit into `target_s` seconds, by what steps of that size took so far.

    Steps are put together by size, a power of two each, and every size has a moving average (tokens, seconds); between two averages the
    cost is a line, fixed + per token. So a thousand decode steps in a row cannot make it forget what a prompt costs, and what is flat
    for few tokens (bound by memory) may be steep for many. A machine that slept is not a slow model: a step counts as at most twice
    what its size took before, as at most what a larger one takes, and its tokens as at most twice as dear as those of a smaller one,
    so that no slow step deters for ever from its size. `target_s` 0: always `max_tokens`. `short_tokens` is the same for
    `itl_target_s`, or for a step of the batch tier.
    """

    __slots__ = ("_itl", "_max_tokens", "_mean_seconds", "_mean_tokens", "_short", "_target", "short_tokens", "tokens")

    def __init__(self, target_s: float, max_tokens: int, itl_target_s: float = 0.0) -> None:
        self._target = target_s
        self._itl = itl_target_s
        self._short = itl_target_s or BATCH_TIER_S
        self._max_tokens = max_tokens
        sizes = max_tokens.bit_length() + 1
        self._mean_tokens = [0.0] * sizes
        self._mean_seconds = [0.0] * sizes  # 0: no such step yet
        self.tokens = max_tokens if target_s == 0 else min(max_tokens, FIRST_TOKENS)
        self.short_tokens = min(max_tokens, FIRST_TOKENS)

    def limit(self, decoding: bool, interactive: bool) -> int:
        """Tokens of the next step: fewer beside answers that are being written, if they have a target of their own, and fewer of the batch
        tier alone, lest whoever comes in wait for long."""
        return self.short_tokens if not interactive or (decoding and self._itl) else self.tokens

    def observe(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` tokens, `max_tokens` at most, in `seconds`."""
        if tokens == 0 or seconds <= 0:  # nothing could run
            return
        size = tokens.bit_length()
        before = self._mean_seconds[size]
        if before == 0:
            self._mean_tokens[size], self._mean_seconds[size] = float(tokens), seconds
        else:
            self._mean_tokens[size] += _RATE * (tokens - self._mean_tokens[size])
            self._mean_seconds[size] = before + _RATE * (min(seconds, 2 * before) - before)
        self.tokens, self.short_tokens = self._tokens(self._target), self._tokens(self._short)

    def _tokens(self, target: float) -> int:
        return min(self._max_tokens, max(MIN_CHUNK, int(self._solve(target)))) if target else self._max_tokens

    def _solve(self, target: float) -> float:
        """The tokens at which the averages reach `target`. Beyond the last one it goes on as it came, and at most to twice its tokens."""
        known = []
        ceiling = float("inf")
        for tokens, seconds in zip(reversed(self._mean_tokens), reversed(self._mean_seconds), strict=True):
            if seconds > 0:
                ceiling = min(ceiling, seconds)
                known.append((tokens, ceiling))
        low_tokens = low_seconds = slope = 0.0
        for tokens, seconds in reversed(known):
            if low_tokens > 0:
                seconds = min(seconds, _DEARER * low_seconds * tokens / low_tokens)
            slope = (seconds - low_seconds) / (tokens - low_tokens)
            if seconds > target:
                return low_tokens + (target - low_seconds) / slope
            low_tokens, low_seconds = tokens, seconds
        most = max(2 * low_tokens, float(FIRST_TOKENS))
        return min(most, low_tokens + (target - low_seconds) / slope) if slope > 0 else most
