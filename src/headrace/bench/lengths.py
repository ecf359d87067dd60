"""How long prompts and answers are, in tokens."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from headrace.errors import UsageError

LONGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution: `fixed` (a), `lognormal` (mean a, sigma b of the logarithm) or `uniform` (a to b, both included)."""

    kind: str
    a: float
    b: float = 0.0

    @classmethod
    def parse(cls, text: str, flag: str) -> Lengths:
        """`128`, `lognormal:200,0.8` or `uniform:50,150`. Raises UsageError."""
        kind, colon, numbers = text.partition(":")
        try:
            values = [float(number) for number in (numbers if colon else text).split(",")]
            lengths = cls(kind if colon else "fixed", *values)
        except (ValueError, TypeError):
            raise UsageError(_expected(flag, text)) from None
        sane = all(math.isfinite(value) for value in values) and 1 <= lengths.a <= LONGEST
        takes = {"fixed": 1, "lognormal": 2, "uniform": 2}.get(lengths.kind)
        if not sane or takes != len(values):
            raise UsageError(_expected(flag, text))
        if (lengths.kind == "lognormal" and not 0 <= lengths.b <= 5) or (
            lengths.kind == "uniform" and not lengths.a <= lengths.b <= LONGEST
        ):
            raise UsageError(_expected(flag, text))
        return lengths

    def draw(self, count: int, draw: random.Random) -> list[int]:
        """So many lengths, each 1 or more."""
        return [min(LONGEST, max(1, round(self._one(draw)))) for _ in range(count)]

    def _one(self, draw: random.Random) -> float:
        if self.kind == "fixed":
            return self.a
        if self.kind == "uniform":
            return draw.randint(math.ceil(self.a), math.floor(self.b)) if math.ceil(self.a) <= self.b else self.a
        return self.a * math.exp(draw.gauss(-(self.b**2) / 2, self.b))  # shifted so that the mean is a


def _expected(flag: str, text: str) -> str:
    return f"{flag}: expected TOKENS, lognormal:MEAN,SIGMA (sigma up to 5) or uniform:FROM,TO, got {text!r}"
