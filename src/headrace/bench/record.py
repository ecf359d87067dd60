"""One request as it went, and the figures taken from it: ours first, then other tools' by their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Record:
    """All times in seconds on the clock of the run, which is 0 when its schedule begins; None: it did not come to that.

    scheduled (when it should have begun) · started (the client turned to it) · sent (its bytes were handed to the connection, which
    may have had to be opened) · head (status and headers) · first_chunk (any chunk with a choice, an empty role too) · times (chunks
    with text, reasoning or a tool call) · answer (the first that is no reasoning) · end (the response was over)
    """

    index: int
    turn: int = 0  # of its conversation
    scheduled: float = 0.0
    wanted: int = 0  # tokens asked for at most
    aimed: int = 0  # tokens the prompt was made to have; 0: unknown
    started: float | None = None
    sent: float | None = None
    head: float | None = None
    first_chunk: float | None = None
    answer: float | None = None
    last_chunk: float | None = None
    end: float | None = None
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # tokens that came with each of `times`, as far as known
    exact: bool = False  # the counts are the server's, not one a chunk
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish: str | None = None
    status: int = 0
    error: str = ""  # why it failed; empty: it did not, or is not over
    queue: float | None = None  # the server's own timings
    prefill: float | None = None
    decode: float | None = None

    @property
    def ok(self) -> bool:
        """It was answered to the end, with at least one token."""
        return self.end is not None and not self.error

    @property
    def tokens(self) -> int:
        """Tokens of the answer: the server's count, else those of the chunks."""
        return sum(self.counts) if self.completion_tokens is None else self.completion_tokens

    @property
    def text_tokens(self) -> int:
        """Tokens that somebody waited for: without the end token, which has no text and no chunk."""
        if self.exact or self.completion_tokens is None:
            return sum(self.counts)
        return max(len(self.times), self.completion_tokens - (self.finish == "stop"))

    def gaps(self) -> list[float]:
        """Seconds between a chunk with text and the next."""
        return [after - before for before, after in pairwise(self.times)]

    def token_gaps(self) -> list[float]:
        """Seconds between a token and the next. Tokens of one chunk came together: between them are zeros.

        So it makes no difference whether a server puts two tokens into one chunk or two chunks into one packet, and a stall stays as
        long as it was however many tokens come after it at once.
        """
        return self.gaps() + [0.0] * (self.text_tokens - len(self.times))

    def divided_gaps(self) -> list[float]:
        """The same with a chunk's gap divided evenly among its tokens."""
        return [gap / max(1, count) for gap, count in zip(self.gaps(), self.counts[1:], strict=True) for _ in range(max(1, count))]


Figure = Callable[[Record], float | None]  # seconds; None where it is not defined


def _between(begin: str, end: str) -> Figure:
    def figure(record: Record) -> float | None:
        start, stop = getattr(record, begin), getattr(record, end)
        return None if start is None or stop is None else stop - start

    return figure


def _first(begin: str) -> Figure:
    def figure(record: Record) -> float | None:
        start = getattr(record, begin)
        return None if start is None or not record.times else record.times[0] - start

    return figure


def _tpot(record: Record) -> float | None:
    return (record.times[-1] - record.times[0]) / (record.tokens - 1) if record.tokens > 1 and record.times else None


def _whole_per(record: Record, tokens: int) -> float | None:
    """Seconds from the client's start to the end of the response, for each of so many tokens."""
    return None if record.end is None or record.started is None or tokens < 1 else (record.end - record.started) / tokens


def _aiperf_itl(record: Record) -> float | None:
    first = record.times[0] if record.times else None
    return None if first is None or record.end is None or record.tokens < 2 else (record.end - first) / (record.tokens - 1)


def _guidellm_tpot(record: Record) -> float | None:
    if record.started is None or not record.times or record.tokens < 1:
        return None
    return (record.times[-1] - record.started) / record.tokens


# Figures of one request, in the order of the report. What is ours counts from the schedule.
FIGURES: dict[str, Figure] = {
    "queue": lambda record: record.queue,
    "ttft": _first("scheduled"),
    "tpot": _tpot,
    "total": _between("scheduled", "end"),
}
SERVER: dict[str, Figure] = {"prefill": lambda record: record.prefill, "decode": lambda record: record.decode}
# How others count the same. `started` is where their clocks begin, before a connection is opened; `sent` is after that.
OTHERS: dict[str, Figure] = {
    "ttft_sent": _first("sent"),
    "ttft_started": _first("started"),  # vLLM's, GuideLLM's, AIPerf's
    "ttft_first_chunk": _between("started", "first_chunk"),  # a role without text counts, as in older vLLM
    "ttft_answer": _between("scheduled", "answer"),  # without reasoning: AIPerf's TTFO, from the schedule
    "total_sent": _between("sent", "end"),
    "total_started": _between("started", "end"),
    "e2el_vllm": _between("started", "last_chunk"),
    "itl_mean_aiperf": _aiperf_itl,
    "tpot_with_first_guidellm": _guidellm_tpot,
    "ntpot_inference_perf": lambda record: _whole_per(record, record.tokens),
    "itl_llmperf": lambda record: _whole_per(record, len(record.times)),
    "lag": _between("scheduled", "started"),
    "connect": _between("started", "sent"),
}
GAPS: dict[str, Callable[[Record], list[float]]] = {
    "itl": Record.token_gaps,
    "itl_vllm": Record.gaps,  # a gap a chunk, whatever is in it
    "itl_sglang": Record.divided_gaps,
}
