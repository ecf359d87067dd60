"""One client request on its way from the engine's tokens to the response: text, usage, timings, and how it ends.

A request has one part per prompt, a part one sample per `n`. `flush` runs once a step for each part that got tokens, on the event
loop, and is where the API process spends its time: a stream's chunk is two ready-made byte strings around one escaped piece of text.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from headrace.errors import EngineFailed, RequestError
from headrace.request import Embedding, PromptTold, SamplingParams, Submit
from headrace.server.calls import Calls
from headrace.server.codec import TextCodec
from headrace.server.formats import Endpoint, Format, usage
from headrace.server.front import Front
from headrace.server.logprobs import ChatLogprobs, CompletionLogprobs, LogprobWriter
from headrace.server.metrics import Metrics
from headrace.server.prompt import PromptScores
from headrace.server.queue import Waiting
from headrace.server.report import Ended
from headrace.server.sample import Sample
from headrace.server.wire import SlowReader, Wire
from headrace.server.worker import Worker

log = logging.getLogger("headrace.request")

LONG_WAIT_S = 1.0  # an expectation worth a line in the log
JSON_HEADERS = [(b"content-type", b"application/json")]
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Work:
    """A validated request: everything the answer needs to know of it."""

    endpoint: Endpoint
    prompts: list[list[int]]
    params: SamplingParams
    seed: int
    num_samples: int
    stop: tuple[str, ...]
    include_stop: bool
    stream: bool
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""  # the name of the caller's key
    batch: bool = False
    deadline_ms: float | None = None  # from its arrival
    echo: Sequence[str] = ()  # the prompts as texts, where answers begin with them
    prompt_logprobs: int = -1  # as in SamplingParams, but what is told apart from `echo`
    calls: Calls | None = None  # how calls of functions are found in the answer; none: it is all text


class Part:
    """One prompt and its samples: what the worker tells about one submitted request."""

    def __init__(self, answer: Answer, prompt: list[int], samples: Sequence[Sample], echo: str) -> None:
        self.answer = answer
        self.samples: Sequence[Sample] = samples
        self.vector: bytes | None = None  # the prompt's embedding, float32
        self.echo = echo  # what each sample's text begins with
        self.num_prompt = len(prompt)
        self.scores = PromptScores(answer.codec, prompt, best) if (best := answer.work.params.prompt_logprobs) >= 0 else None
        self.request_id = 0
        self.done = False
        self.waiting: Waiting | None = None  # its place in the queue's account, once it is submitted
        self.submitted_at = 0.0
        self.admitted_at = 0.0  # first scheduled
        self.first_at = 0.0
        self.last_at = 0.0
        self.stalled_s = [0.0, 0.0]  # before and after the first token
        self.cached_tokens = 0
        # The common case, which must be cheap: the only sample gets one token, and no stop string nor log-probability is to be looked at.
        plain = len(samples) == 1 and not answer.work.stop and samples[0].logprob_writer is None and samples[0].calls is None
        self.quick = samples[0] if plain else None

    def admitted(self, time: float, cached_tokens: int) -> None:
        if not self.admitted_at:
            self.admitted_at = max(time, self.submitted_at)
            self.leave_queue(admitted=True)
            self.cached_tokens = cached_tokens
            metrics = self.answer.metrics
            metrics.queue.observe(self.admitted_at - self.submitted_at)
            metrics.prompt_tokens += self.num_prompt
            metrics.cached_tokens += cached_tokens

    def leave_queue(self, *, admitted: bool) -> None:
        if self.waiting is not None:
            self.answer.front.queue.leave(self.waiting, admitted=admitted)

    def stalled(self, seconds: float) -> None:
        self.stalled_s[1 if self.first_at else 0] += seconds

    def scored(self, told: PromptTold) -> None:
        if isinstance(told, Embedding):
            self.vector = told.vector
        elif self.scores is not None:
            self.scores.add(told)

    def flush(self, time: float) -> bool:
        try:
            sample = self.quick
            if sample is not None and sample.reason is None and len(sample.tokens) == sample.seen + 1 and sample.seen:
                metrics = self.answer.metrics
                metrics.generated_tokens += 1
                metrics.inter_token.observe(time - sample.last_at)
                self.last_at = sample.last_at = time
                sample.seen += 1
                self.answer.next_token(sample)
                return False
            self._count(time)
            self.done = self.answer.flush(self)
        except SlowReader:
            self.answer.cancel("slow_reader")
            return True
        except Exception:
            log.exception("%s: the answer could not be written", self.answer.request_id)
            self.answer.fail(EngineFailed("internal error"))
            return True
        return self.done

    def _count(self, time: float) -> None:
        metrics = self.answer.metrics
        if not self.first_at:
            self._first_token(time)
        self.last_at = time
        for sample in self.samples:
            new = len(sample.tokens) - sample.seen
            if new and sample.finish is None:
                metrics.generated_tokens += new
                if sample.last_at:  # the first token's time is no gap
                    metrics.inter_token.observe(time - sample.last_at)
                for _ in range(new - 1):
                    metrics.inter_token.observe(0.0)  # steps merged into one message
                sample.last_at = time
            sample.seen = len(sample.tokens)

    def _first_token(self, time: float) -> None:
        self.first_at = time
        if not self.admitted_at:
            self.admitted_at = self.submitted_at
        metrics, answer = self.answer.metrics, self.answer
        metrics.prefill.observe(max(0.0, time - self.admitted_at))
        metrics.first_token.observe(time - answer.arrived_at)

    def failed(self, error: RequestError) -> None:
        self.done = True
        self.leave_queue(admitted=False)
        self.answer.fail(error)


class Answer:
    """The response to one request. Subclasses say how text leaves."""

    def __init__(
        self,
        work: Work,
        fmt: Format,
        wire: Wire,
        worker: Worker,
        codec: TextCodec,
        metrics: Metrics,
        front: Front,
        *,
        request_id: str,
        arrived_at: float,
        traceparent: str = "",
    ) -> None:
        self.work = work
        self.format = fmt
        self.wire = wire
        self.metrics = metrics
        self.request_id = request_id
        self.arrived_at = arrived_at
        self.ended = False
        self.parts: list[Part] = []
        self.front = front
        self.traceparent = traceparent
        self._worker = worker
        self.codec = codec
        shown = work.calls.format.tokens if work.calls is not None else ()
        for number, prompt in enumerate(work.prompts):
            first = len(self.parts) * work.num_samples
            record = work.params.logprobs >= 0
            echo = work.echo[number] if work.echo else ""

            def sample(index: int, record: bool = record, echo: str = echo) -> Sample:
                text = codec.detokenizer(
                    stop=work.stop,
                    include_stop=work.include_stop,
                    strip_space=work.endpoint != "completions",
                    record=record,
                    shown=shown,
                )
                writer: LogprobWriter | None = None
                if record:
                    writer = CompletionLogprobs(codec, len(echo)) if work.endpoint == "completions" else ChatLogprobs(codec)
                return Sample(index, text, writer, work.calls)

            samples = [sample(first + i) for i in range(work.num_samples)]
            self.parts.append(Part(self, prompt, samples, echo))

    def begin(self) -> None:
        """Send the prompts to the engine."""
        work, queue = self.work, self.front.queue
        self.metrics.open_requests += 1
        self.front.quotas.charge(work.tenant, sum(part.num_prompt for part in self.parts))
        for part, prompt in zip(self.parts, work.prompts, strict=True):
            part.submitted_at = now = time.monotonic()

            def make(request_id: int, ids: list[int] = prompt, now: float = now) -> Submit:
                return Submit(
                    request_id=request_id,
                    prompt=pack_ids(ids),
                    params=work.params,
                    seed=work.seed,
                    received=now,
                    num_samples=work.num_samples,
                    priority=work.priority,
                    cache_salt=work.cache_salt,
                    tenant=work.tenant,
                    batch=work.batch,
                )

            if not work.batch:  # nobody waits for the batch tier, and nobody behind it
                part.waiting = queue.enter(self.request_id, work.tenant, part.num_prompt, work.priority)
            part.request_id = self._worker.submit(make, part)
        last = self.parts[-1].waiting
        if last is not None and last.expected_s >= LONG_WAIT_S:
            self.front.reporter.waits(self.request_id, work.tenant, last.ahead + 1, last.expected_s)

    def flush(self, part: Part) -> bool:
        """Deliver what is new. True: the part is over."""
        raise NotImplementedError

    def next_token(self, sample: Sample) -> None:
        """Deliver the one token that came for a sample which goes on."""
        raise NotImplementedError

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Who it is, how long it waited and was expected to, and what is left of its key's limits."""
        found = [(b"x-request-id", self.request_id.encode()), *self.front.quotas.headers(self.work.tenant)]
        part = max(self.parts, key=lambda part: part.admitted_at)
        if part.waiting is not None and part.admitted_at:
            found += [
                (b"x-queue-ms", b"%.1f" % (1000 * (part.admitted_at - part.submitted_at))),
                (b"x-queue-position", b"%d" % (part.waiting.ahead + 1)),
                (b"x-queue-expected-ms", b"%.1f" % (1000 * part.waiting.expected_s)),
            ]
        return found

    # Ends

    def cancel(self, why: str = "disconnected") -> None:
        """The client is gone, or as good as gone."""
        if not self.ended:
            self._abort_parts()
            self._end("aborted", why, 499)
            self.wire.close()

    def fail(self, error: RequestError) -> None:
        """End with an error: as a status while none is sent, else in the body."""
        if self.ended:
            return
        self._abort_parts()
        self._end("refused" if error.status < 500 else "failed", error.code or "error", error.status)
        try:
            if self.wire.started:
                self.wire.write(self.format.failure(error), more=False)
            else:
                self.wire.respond(error.status, JSON_HEADERS + self.headers() + retry_headers(error), self.format.error(error))
        except SlowReader:
            self.wire.close()

    def _abort_parts(self) -> None:
        for part in self.parts:
            if not part.done:
                part.done = True
                part.leave_queue(admitted=False)
                self._worker.abort(part.request_id)

    def _end(self, outcome: str, detail: str, status: int) -> None:
        self.ended = True
        metrics, work, front = self.metrics, self.work, self.front
        metrics.open_requests -= 1
        metrics.ended(work.endpoint, outcome, detail if outcome in ("refused", "failed") else "")
        prompt, cached, completion = self._counts()
        front.quotas.charge(work.tenant, completion)
        first = [part.first_at for part in self.parts if part.first_at]
        front.reporter.ended(
            Ended(
                self.request_id, work.endpoint, work.tenant, status, detail, self.format.model, self.traceparent, prompt, cached,
                completion, round(1000 * (min(first) - self.arrived_at), 3) if first else None, self.timings(), self._content,
            )
        )  # fmt: skip

    def _content(self) -> tuple[list[str], list[str]]:
        """The prompts and the answers as texts, for a log that is to have them."""

        def text(ids: Sequence[int]) -> str:
            detokenizer = self.codec.detokenizer()
            return detokenizer.add(ids) + detokenizer.finish()

        return [text(ids) for ids in self.work.prompts], [text(sample.tokens) for part in self.parts for sample in part.samples]

    def _complete(self) -> None:
        """All parts are done."""
        reasons = [sample.finish for part in self.parts for sample in part.samples]
        outcome = "stop" if reasons[0] == "stop" else "length"
        self.metrics.total.observe(time.monotonic() - self.arrived_at)
        self._end(outcome, outcome, 200)

    def _counts(self) -> tuple[int, int, int]:
        """Prompt, cached and completion tokens."""
        return (
            sum(part.num_prompt for part in self.parts),
            sum(part.cached_tokens for part in self.parts),
            sum(sample.num_tokens for part in self.parts for sample in part.samples),
        )

    def usage(self) -> dict[str, Any]:
        prompt, cached, completion = self._counts()
        return usage(prompt, completion, cached)

    def timings(self) -> dict[str, float]:
        """Milliseconds; the parts sum to the total. With several prompts, those of the one that ended last."""
        part = max(self.parts, key=lambda part: part.last_at)
        marks = [self.arrived_at, part.submitted_at, part.admitted_at, part.first_at, part.last_at, time.monotonic()]
        for i in range(1, len(marks)):  # a request that ended early has no later marks
            marks[i] = max(marks[i] or marks[-1], marks[i - 1])
        # Whole microseconds, so that the sum holds exactly.
        us = [round(mark * 1e6) for mark in marks]
        accept, queue, prefill, decode, deliver = (b - a for a, b in pairwise(us))
        before = min(round(part.stalled_s[0] * 1e6), prefill)
        after = min(round(part.stalled_s[1] * 1e6), decode)
        spans = {
            "accept": accept, "queue": queue, "prefill": prefill - before, "decode": decode - after, "stalled": before + after,
            "deliver": deliver, "total": us[-1] - us[0],
        }  # fmt: skip
        return {name: value / 1000 for name, value in spans.items()}


def pack_ids(ids: Sequence[int]) -> bytes:
    """int32 ids, little end first."""
    return array("i", ids).tobytes()


def retry_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    """When to come again, for refusals that will pass."""
    if error.status == 408:
        return [(b"x-should-retry", b"false")]  # its time is over: clients would try again by themselves
    if error.status not in (429, 503):
        return []
    seconds = max(1, math.ceil(error.retry_after_s))
    return [(b"retry-after", b"%d" % seconds), (b"retry-after-ms", b"%d" % math.ceil(1000 * error.retry_after_s))]
