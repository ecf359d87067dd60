"""A step's time, turned into tokens."""

from __future__ import annotations

FIRST_TOKENS = 64  # before anything is measured; then at most twice what was
MIN_CHUNK = 16  # prompt tokens a step may always compute: fewer cost a narrow GEMM nearly as much
_SCALE = 64.0  # tokens: a step below it corrects mostly `fixed`, one above it mostly `per_token`
_RATE = 0.5  # share of a step's error that is believed


class StepBudget:
    """How many tokens fit into `target_s` seconds, by a line through the measured steps: seconds = fixed + per_token * tokens.

    Every step moves the line towards itself along both coefficients (normalized least mean squares): there is no history, so a thousand
    decode steps in a row cannot make it forget what a prompt costs, and no matrix that could degenerate. A step is believed to have
    taken at most twice what was expected: a machine that slept is not a slow model. `target_s` 0: always `max_tokens`.
    """

    __slots__ = ("_largest", "_max_tokens", "_target", "fixed", "per_token", "tokens")

    def __init__(self, target_s: float, max_tokens: int) -> None:
        self._target = target_s
        self._max_tokens = max_tokens
        self._largest = FIRST_TOKENS // 2
        self.fixed = -1.0  # nothing measured yet
        self.per_token = 0.0
        self.tokens = max_tokens if target_s == 0 else min(max_tokens, FIRST_TOKENS)

    def observe(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` tokens in `seconds`."""
        if self._target == 0 or seconds <= 0:
            return
        if self.fixed < 0:
            self.fixed = seconds
        z = tokens / _SCALE
        expected = self.fixed + self.per_token * tokens
        correction = _RATE * min(seconds - expected, expected) / (1.0 + z * z)
        self.fixed = max(0.0, self.fixed + correction)
        self.per_token = max(0.0, self.per_token + correction * z / _SCALE)
        if tokens > self._largest:
            self._largest = tokens
        most = 2 * self._largest
        left = self._target - self.fixed
        if left < self.per_token * most:
            most = max(MIN_CHUNK, int(left / self.per_token)) if self.per_token > 0 else MIN_CHUNK
        self.tokens = min(most, self._max_tokens)
