"""Traffic: when requests come and how long they are, from a trace or from a rate."""

from __future__ import annotations

import csv
import json
import math
import random
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.errors import UsageError

HASH_TOKENS = 512  # of a prompt that one of a trace's hash ids stands for
GAP = 60.0  # seconds without a request (and 50 times the mean interval) that are said to be a gap
MAX_TOKENS = 1 << 24
# Columns of known CSV traces: time, prompt tokens, answer tokens.
FORMS = (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), ("arrived_at", "num_prefill_tokens", "num_decode_tokens"))


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in order of arrival; seconds from the start, tokens. `hashes`: names of each prompt's blocks of HASH_TOKENS, if known."""

    name: str
    times: list[float]
    prompts: list[int]
    answers: list[int]
    hashes: list[tuple[int, ...]] | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.times)

    @property
    def span(self) -> float:
        """Seconds the arrivals are spread over: one mean interval more than from the first to the last."""
        return self.times[-1] * len(self) / (len(self) - 1) if len(self) > 1 and self.times[-1] > 0 else 1.0

    @property
    def rate(self) -> float:
        """Requests a second, on average."""
        return len(self) / self.span

    def peak_rate(self, window: float, quantile: float = 1.0) -> float:
        """Requests a second in the busiest window of that many seconds, or in the one at `quantile` of all windows.

        Windows start at every arrival, so none is missed by where a grid happens to lie.
        """
        times, counts, end = self.times, [], 0
        for begin, start in enumerate(times):
            end = max(end, begin)
            while end < len(times) and times[end] < start + window:
                end += 1
            counts.append(end - begin)
        counts.sort()
        # Never below the average: a window longer than the trace says nothing new.
        return max(self.rate, counts[max(0, math.ceil(quantile * len(counts)) - 1)] / window)

    def scaled(self, factor: float) -> Traffic:
        """`factor` times as many requests a second, the same ones closer together."""
        return replace(self, times=[time / factor for time in self.times])

    def first(self, count: int) -> Traffic:
        """That many requests; the trace is repeated, prompts under new names, if it has fewer."""
        times, prompts, answers, hashes = [], [], [], []
        span, step = self.span, 1 + max((max(names, default=0) for names in self.hashes), default=0) if self.hashes else 0
        for i in range(count):
            turn, at = divmod(i, len(self))
            times.append(turn * span + self.times[at])
            prompts.append(self.prompts[at])
            answers.append(self.answers[at])
            if self.hashes:
                hashes.append(tuple(name + turn * step for name in self.hashes[at]))
        return replace(self, times=times, prompts=prompts, answers=answers, hashes=hashes if self.hashes else None)

    def around_peak(self, window: float, count: int) -> Traffic:
        """`count` requests in a row with the busiest window in their middle; all of them if there are no more."""
        if len(self) <= count:
            return self
        busiest, most, end = 0, 0, 0
        for begin, start in enumerate(self.times):
            while end < len(self) and self.times[end] < start + window:
                end += 1
            if end - begin > most:
                busiest, most = begin + (end - begin) // 2, end - begin
        begin = min(max(0, busiest - count // 2), len(self) - count)
        cut = slice(begin, begin + count)
        start = self.times[begin]
        hashes = self.hashes[cut] if self.hashes else None
        return replace(
            self, times=[time - start for time in self.times[cut]], prompts=self.prompts[cut], answers=self.answers[cut], hashes=hashes
        )

    def demand(self, bins: int) -> tuple[float, list[float]]:
        """(seconds a bin, requests a second in each), the whole trace in so many equal bins."""
        width = self.span / bins
        counts = [0] * bins
        for time in self.times:
            counts[min(bins - 1, int(time / width))] += 1
        return width, [count / width for count in counts]

    def prefix_share(self) -> float:
        """Share of the prompts' blocks that an unlimited prefix cache would have had; 0 without hashes."""
        seen: set[int] = set()
        total = hits = 0
        for names in self.hashes or ():
            total += len(names)
            hits += sum(name in seen for name in names)
            seen.update(names)
        return hits / total if total else 0.0


def read_trace(path: Path, flag: str = "--traffic") -> Traffic:
    """A CSV trace (Azure's columns, or arrived_at and token counts), or JSON lines in Mooncake's form.

    Raises UsageError with the line, and the flag that named the file.
    """
    file = f"{flag} {path}"
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or 'not text'}") from None
    lines = text.splitlines()
    rows = _json_rows(file, lines) if lines and lines[0].startswith("{") else _csv_rows(file, lines)
    if not rows:
        raise UsageError(f"{file}: no requests")
    start = rows[0][1]
    for (_, before, *_), (number, time, *_) in pairwise(rows):
        if time < before:
            raise UsageError(f"{file}: line {number}: earlier than the line before; sort the trace by time")
    times = [row[1] - start for row in rows]
    hashes = [row[4] for row in rows]
    notes = []
    mean = times[-1] / max(1, len(times) - 1)
    for (number, *_), before, after in zip(rows[1:], times, times[1:], strict=False):
        if after - before > max(GAP, 50 * mean):
            notes.append(f"the trace has a gap of {after - before:.0f} s before line {number}; it counts as silence")
    known = [names for names in hashes if names is not None]
    if known and len(known) < len(hashes):
        raise UsageError(f"{file}: some requests have hash_ids and some have none")
    return Traffic(path.name, times, [row[2] for row in rows], [row[3] for row in rows], known or None, tuple(notes[:5]))


_Row = tuple[int, float, int, int, tuple[int, ...] | None]


def _csv_rows(file: str, lines: list[str]) -> list[_Row]:
    reader = csv.DictReader(lines)
    columns = reader.fieldnames or ()
    form = next((form for form in FORMS if set(form) <= set(columns)), None)
    if form is None:
        forms = " or ".join(",".join(form) for form in FORMS)
        raise UsageError(f"{file}: expected the columns {forms}, or JSON lines with timestamp, input_length, output_length")
    when, prompt, answer = form
    rows: list[_Row] = []
    for number, line in enumerate(reader, 2):
        where = f"{file}: line {number}"
        rows.append((number, _time(line[when], where), _tokens(line[prompt], where, prompt), _tokens(line[answer], where, answer), None))
    return rows


def _json_rows(file: str, lines: list[str]) -> list[_Row]:
    rows: list[_Row] = []
    for number, text in enumerate(lines, 1):
        where = f"{file}: line {number}"
        try:
            line = json.loads(text)
            time, hashes = float(line["timestamp"]) / 1e3, line.get("hash_ids")
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UsageError(f"{where}: expected an object with timestamp (ms), input_length and output_length") from None
        if not math.isfinite(time):
            raise UsageError(f"{where}: timestamp: expected a finite number")
        if hashes is not None and not (isinstance(hashes, list) and all(isinstance(name, int) and name >= 0 for name in hashes)):
            raise UsageError(f"{where}: hash_ids: expected a list of numbers from 0")
        prompt, answer = (_tokens(line.get(name), where, name) for name in ("input_length", "output_length"))
        if hashes is not None and len(hashes) != -(-prompt // HASH_TOKENS):
            raise UsageError(f"{where}: hash_ids: expected {-(-prompt // HASH_TOKENS)} for {prompt} tokens, got {len(hashes)}")
        rows.append((number, time, prompt, answer, None if hashes is None else tuple(hashes)))
    return rows


def _time(text: str | None, where: str) -> float:
    """Seconds, or a date and time (ISO; digits beyond microseconds are dropped)."""
    try:
        value = float(text or "")
    except ValueError:
        try:
            moment, _, fraction = (text or "").partition(".")
            value = datetime.fromisoformat(moment).timestamp() + (float("0." + fraction) if fraction.isdigit() else 0.0)
        except ValueError:
            value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{where}: expected a time in seconds or as a date, got {str(text)[:40]!r}")
    return value


def _tokens(given: Any, where: str, name: str) -> int:
    try:
        value = int(given)
    except (TypeError, ValueError):
        value = 0
    if not 1 <= value <= MAX_TOKENS:
        raise UsageError(f"{where}: {name}: expected 1 token or more, got {str(given)[:40]!r}")
    return value


def generate(rate: float, prompt: float, answer: float, *, count: int = 5000, spread: float = 1.0, seed: int = 1) -> Traffic:
    """Poisson arrivals, log-normal lengths with these means and a coefficient of variation of `spread` (0: all the same)."""
    for name, value in (("rate", rate), ("in", prompt), ("out", answer)):
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"--{name}: expected a positive number, got {value:g}")
    if min(prompt, answer) < 1 or not 0 <= spread <= 10:
        raise UsageError("--in, --out: expected 1 token or more; --spread: 0 to 10")
    draw = random.Random(seed)
    sigma = math.sqrt(math.log1p(spread**2))

    def length(mean: float) -> int:
        return max(1, round(mean * math.exp(draw.gauss(-sigma * sigma / 2, sigma)))) if sigma else max(1, round(mean))

    times, time = [], 0.0
    for _ in range(count):
        times.append(time)
        time += draw.expovariate(rate)
    lengths = [(length(prompt), length(answer)) for _ in range(count)]
    name = f"{rate:g} requests/s, {prompt:g} in, {answer:g} out"
    return Traffic(name, times, [a for a, _ in lengths], [b for _, b in lengths])
