"""A fleet on a virtual clock: replicas behind a router, a workload, failures; how long users wait, and how busy it all is."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.config import BLOCK_TOKENS, EngineConfig
from headrace.engine.plan import Plan
from headrace.errors import UsageError
from headrace.plan.cost import CostModel
from headrace.plan.replica import Gaps, Record, Replica, Usage
from headrace.plan.traffic import HASH_TOKENS, Traffic
from headrace.request import SamplingParams, Submit

Routing = Literal["round-robin", "least-load", "prefix"]
QUANTILES = (0.5, 0.9, 0.95, 0.99)
BINS = 120  # of the timeline
PREFIX_SLACK = 1.25  # a replica that has the prefix is left when it has so many times the least loaded one's requests, and more than 4
KNOWN_PREFIXES = 1 << 16  # names a router remembers the replica of


@dataclass(frozen=True, slots=True)
class Failure:
    """A replica loses everything at a time, and is back `down` seconds later."""

    at: float
    replica: int
    down: float


@dataclass(slots=True)
class Timeline:
    """Means over equal bins of the run: running and waiting requests, blocks held, and the share of time with a step in it."""

    width: float
    running: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    peak_held: int = 0

    def add(self, usage: Usage) -> None:
        """A step counts in the bin it starts in: bins are many steps long."""
        at = int(usage.start / self.width)
        while len(self.busy) <= at:
            for values in (self.running, self.waiting, self.held, self.busy):
                values.append(0.0)
        self.running[at] += usage.running * usage.seconds
        self.waiting[at] += usage.waiting * usage.seconds
        self.held[at] += usage.held * usage.seconds
        self.busy[at] += usage.seconds
        self.peak_held = max(self.peak_held, usage.held)


class Router:
    """Chooses a replica for a request, among those that are up."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._turn = -1
        self._home: dict[int, int] = {}  # name of a prompt's block -> the replica it went to last

    def choose(self, replicas: Sequence[Replica], now: float, names: tuple[int, ...]) -> Replica:
        """`names`: of the prompt's blocks, if the trace has them."""
        if self._routing == "round-robin":
            self._turn += 1
            return replicas[self._turn % len(replicas)]
        least = min(replicas, key=lambda replica: (replica.load(now), replica.index))
        chosen = least
        if self._routing == "prefix" and names:
            for name in reversed(names):
                home = next((replica for replica in replicas if replica.index == self._home.get(name)), None)
                if home is not None:
                    if home.load(now) <= max(4, PREFIX_SLACK * least.load(now)):
                        chosen = home
                    break
            for name in names:
                self._home[name] = chosen.index
            while len(self._home) > KNOWN_PREFIXES:
                del self._home[next(iter(self._home))]
        return chosen


@dataclass(slots=True)
class Outcome:
    """What a simulation found. `records` in order of arrival."""

    records: list[Record]
    gaps: Gaps
    timeline: Timeline
    replicas: list[Replica]
    ended: float  # when the last request was done
    num_blocks: int  # of one replica

    def summary(self) -> dict[str, Any]:
        """Percentiles in milliseconds, counts, shares. Plain data. A request that was refused counts in no percentile, but is counted."""
        done = [record for record in self.records if not record.refused]
        span = max(self.ended, 1e-9)
        fleet = len({replica.index for replica in self.replicas})
        prompt, cached = sum(record.prompt for record in done), sum(record.cached for record in done)
        tallies = [replica.scheduler.tally for replica in self.replicas]
        return {
            "requests": len(self.records),
            "refused": len(self.records) - len(done),
            "retried": sum(record.retries for record in self.records),
            "seconds": round(span, 3),
            "queue_ms": _percentiles([record.admitted - record.received for record in done]),
            "ttft_ms": _percentiles([record.first - record.arrived for record in done]),
            "itl_ms": _weighted(self.gaps),
            "tpot_ms": _percentiles([(r.last - r.first) / (r.produced - 1) for r in done if r.produced > 1]),
            "total_ms": _percentiles([record.ended - record.arrived for record in done]),
            "output_tokens_s": sum(record.produced for record in done) / span,
            "prompt_tokens_s": prompt / span,
            "cached_share": cached / prompt if prompt else 0.0,
            "concurrency": sum(record.ended - record.received for record in done) / span,
            "utilization": sum(replica.busy for replica in self.replicas) / span / fleet,
            "kv_peak": self.timeline.peak_held / self.num_blocks,
            "preemptions": sum(tally.preemptions for tally in tallies),
            "recomputed_tokens": sum(tally.recomputed_tokens for tally in tallies),
            "steps": sum(replica.steps for replica in self.replicas),
            "steps_skipped": sum(replica.skipped for replica in self.replicas),
        }

    def good_share(self, ttft: float, itl: float) -> float:
        """Of all requests, those with a TTFT and a mean gap within these seconds; one refused is none."""
        good = sum(
            not r.refused and r.first - r.arrived <= ttft and (r.produced < 2 or (r.last - r.first) / (r.produced - 1) <= itl)
            for r in self.records
        )
        return good / len(self.records) if self.records else 0.0


def _percentiles(values: list[float]) -> dict[str, float]:
    values.sort()
    named = {f"p{round(100 * q)}": 1e3 * values[max(0, -int(-q * len(values) // 1) - 1)] if values else 0.0 for q in QUANTILES}
    return named | {"mean": 1e3 * sum(values) / len(values) if values else 0.0, "max": 1e3 * values[-1] if values else 0.0}


def _weighted(gaps: Gaps) -> dict[str, float]:
    order = sorted(range(len(gaps.seconds)), key=gaps.seconds.__getitem__)
    total = sum(gaps.counts)
    told: dict[str, float] = {}
    wanted = list(QUANTILES)
    seen = 0
    for at in order:
        seen += gaps.counts[at]
        while wanted and seen >= wanted[0] * total:
            told[f"p{round(100 * wanted.pop(0))}"] = 1e3 * gaps.seconds[at]
    mean = sum(s * n for s, n in zip(gaps.seconds, gaps.counts, strict=True)) / total if total else 0.0
    empty = {f"p{round(100 * q)}": 0.0 for q in QUANTILES}
    return empty | told | {"mean": 1e3 * mean, "max": 1e3 * gaps.seconds[order[-1]] if order else 0.0}


def prompt_ids(tokens: int, names: tuple[int, ...]) -> bytes:
    """int32 ids: alike where a trace's hashes are. Without hashes all the same, which only a prefix cache would notice."""
    if not names:
        return bytes(4 * tokens)
    ids = array("i")
    for name in names:
        ids.extend(array("i", (name + 1,)) * HASH_TOKENS)
    return ids[:tokens].tobytes()


def simulate(
    traffic: Traffic,
    cost: CostModel,
    config: EngineConfig,
    *,
    replicas: int = 1,
    routing: Routing = "least-load",
    failures: Sequence[Failure] = (),
    fast: bool = True,
    block_tokens: int = BLOCK_TOKENS,
    on_step: Callable[[int, Plan, float], None] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Run a workload through `replicas` servers. Without hashes in the trace, `config.prefix_cache` must be off: its prompts are unknown.

    Raises UsageError for what contradicts itself. Arrivals wait `request_s` of the factors before a scheduler sees them.
    """
    if replicas < 1:
        raise UsageError(f"replicas: expected at least 1, got {replicas}")
    if config.prefix_cache and traffic.hashes is None:
        raise UsageError("prefix cache: the trace has no hash ids, so what its prompts share is not known")
    for failure in failures:
        if not 0 <= failure.replica < replicas or failure.down <= 0:
            raise UsageError(f"failure: replica {failure.replica} of {replicas}, down for {failure.down} s")
    fleet = _Fleet(traffic, cost, config, replicas, routing, fast, block_tokens, on_step)
    events = [(time, 1, i) for i, time in enumerate(traffic.times)]
    for i, failure in enumerate(failures):
        events += [(failure.at, 0, i), (failure.at + failure.down, -1, i)]
    for done, (time, kind, i) in enumerate(sorted(events)):
        if kind == 1:
            fleet.arrive(i, time)
        elif kind == 0:
            fleet.fail(failures[i])
        else:
            fleet.restart(failures[i])
        if done % 1000 == 0:
            progress(done)
    return fleet.finish()


class _Fleet:
    def __init__(
        self,
        traffic: Traffic,
        cost: CostModel,
        config: EngineConfig,
        replicas: int,
        routing: Routing,
        fast: bool,
        block_tokens: int,
        on_step: Callable[[int, Plan, float], None] | None,
    ) -> None:
        self.traffic, self.cost, self.config = traffic, cost, config
        self.fast, self.block_tokens, self.on_step = fast, block_tokens, on_step
        self.router = Router(routing)
        self.records: dict[int, Record] = {}
        self.gaps = Gaps()
        self.timeline = Timeline(max(traffic.span / BINS, 1e-3))
        self.gone: list[Replica] = []
        self.up = [self.start(i, 0.0) for i in range(replicas)]
        self.homeless: list[Submit] = []  # came, or were thrown out, while no replica was up

    def start(self, index: int, at: float) -> Replica:
        on_step = self.on_step
        return Replica(
            index, self.config, self.cost, self.records, self.gaps, self.timeline.add, start=at, fast=self.fast,
            block_tokens=self.block_tokens, on_step=None if on_step is None else lambda plan, start: on_step(index, plan, start),
        )  # fmt: skip

    def arrive(self, i: int, time: float) -> None:
        traffic = self.traffic
        received = time + self.cost.factors.request_s
        self.records[i] = Record(time, traffic.prompts[i], traffic.answers[i], received)
        ids = prompt_ids(traffic.prompts[i], traffic.hashes[i] if traffic.hashes else ())
        self.route(Submit(i, ids, SamplingParams(traffic.answers[i], temperature=0.0, ignore_eos=True), 0, received), received)

    def route(self, submit: Submit, now: float) -> None:
        if not self.up:
            self.homeless.append(submit)
            return
        for replica in self.up:
            replica.advance(now)
        names = self.traffic.hashes[submit.request_id] if self.traffic.hashes else ()
        self.router.choose(self.up, now, names).submit(submit)

    def fail(self, failure: Failure) -> None:
        """What it had goes to the others, with the tokens already sent: they compute them again and go on."""
        lost = next((replica for replica in self.up if replica.index == failure.replica), None)
        if lost is None:
            return
        for replica in self.up:
            replica.advance(failure.at)
        self.up.remove(lost)
        self.gone.append(lost)
        for submit in list(lost.open.values()):
            record = self.records[submit.request_id]
            record.retries += 1
            again = Submit(submit.request_id, submit.prompt, submit.params, 0, failure.at, emitted=(bytes(4 * record.produced),))
            self.route(again, failure.at)

    def restart(self, failure: Failure) -> None:
        now = failure.at + failure.down
        if all(replica.index != failure.replica for replica in self.up):
            self.up.append(self.start(failure.replica, now))
            self.up.sort(key=lambda replica: replica.index)
        waiting, self.homeless = self.homeless, []
        for submit in waiting:
            self.route(submit, now)

    def finish(self) -> Outcome:
        for replica in self.up:
            replica.advance(float("inf"))
        ended = max((record.ended for record in self.records.values()), default=0.0)
        everyone = sorted([*self.gone, *self.up], key=lambda replica: replica.index)
        return Outcome(list(self.records.values()), self.gaps, self.timeline, everyone, ended, self.config.num_blocks)
