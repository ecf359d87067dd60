"""For each device and level: does it fit, what does it carry, what gives out first, how many, at what price; and which to take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import UsageError
from headrace.plan.capacity import Capacity, Lengths, Objective, batch_limits, capacity, engine_config, kv_in_flight, sequences_that_fit
from headrace.plan.cost import CostModel
from headrace.plan.devices import Device
from headrace.plan.factors import Factors
from headrace.plan.memory import Level, Memory, levels_for, split_memory, weight_bytes
from headrace.plan.money import Terms, monthly
from headrace.plan.shape import Shape
from headrace.plan.simulate import Failure, Outcome, simulate
from headrace.plan.traffic import Traffic

LOAD = 0.80  # of a replica's capacity planned for the peak: nearer to it, waiting times are a matter of luck
LEAST_WINDOW = 1.0  # seconds
SIMULATED = 4000  # requests around the peak that the answer is checked with,
SIMULATED_TOKENS = 12_000_000  # or as many as have so many prompt tokens
FEWER = 1.15  # one device is taken before several that cost less by no more than this
FAITHFUL = ("bf16", "file", "fp8", "int8", "fp4", "int4")  # the more faithful level first, where the price is the same
REPAIRS = 6  # times replicas are added when the simulation misses the objective
WORTH_IT = 0.05  # share of prompt tokens from the cache below which it does not change the answer
LOST_FOR = 60.0  # seconds without the lost replica


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. `budget`: USD a month."""

    shape: Shape
    traffic: Traffic
    objective: Objective
    devices: Sequence[Device]
    factors: Callable[[Device], Factors]
    levels: Sequence[str] = ()  # all a device has
    terms: Terms = field(default_factory=Terms)
    budget: float | None = None
    window: float | None = None

    @property
    def peak_window(self) -> float:
        """A burst shorter than the time to the first token can wait it out; a longer one must be carried."""
        return self.window if self.window is not None else max(LEAST_WINDOW, self.objective.ttft)

    @property
    def peak(self) -> float:
        """Requests a second in the busiest window that the promised share of requests sees."""
        return self.traffic.peak_rate(self.peak_window, self.objective.share)

    def around_peak(self) -> Traffic:
        """The requests that a simulation is run with."""
        affordable = int(SIMULATED_TOKENS * len(self.traffic) / sum(self.traffic.prompts))
        return self.traffic.around_peak(self.peak_window, max(200, min(SIMULATED, affordable)))


@dataclass(slots=True)
class Option:
    """A device at a level, `tp` of them together as one replica. `cannot`: why not, in words; then the rest is as far as it got."""

    device: Device
    level: Level
    tp: int
    memory: Memory
    cannot: str = ""
    cost: CostModel | None = None
    carries: Capacity | None = None
    sequences: float = 0.0
    needed: int = 0  # replicas for the peak
    usd_month: float | None = None
    reasons: list[str] = field(default_factory=list)

    @property
    def replicas(self) -> int:
        """One more than needed."""
        return self.needed + 1

    @property
    def count(self) -> int:
        """Devices in all."""
        return self.replicas * self.tp

    @property
    def name(self) -> str:
        return f"{self.device.name} {self.level.name}" + (f" x{self.tp}" if self.tp > 1 else "")


def options(question: Question) -> list[Option]:
    """One for each device and level: the fewest together that fit and hold the objective. The cheapest first, the impossible last."""
    found = [
        _smallest(question, device, level, Lengths.of(question.traffic, 0.0))
        for device in question.devices
        for level in _levels(question, device)
    ]
    for option in found:
        if not option.cannot:
            option.reasons += _why_not_otherwise(option, found)
    return sorted(found, key=lambda o: (bool(o.cannot), o.usd_month is None, o.usd_month or 0.0, o.count, FAITHFUL.index(o.level.name)))


def choose(question: Question, found: Sequence[Option]) -> Option | None:
    """The cheapest within the budget; a single device before several together that cost about the same. None: nothing will do."""
    able = [o for o in found if not o.cannot and (question.budget is None or (o.usd_month is not None and o.usd_month <= question.budget))]
    if not able:
        return None
    best = able[0]
    if best.tp > 1 and best.usd_month is not None:
        for option in able:
            if option.tp == 1 and option.usd_month is not None and option.usd_month <= FEWER * best.usd_month:
                option.reasons.append(f"one device a replica rather than {best.tp}: within {FEWER - 1:.0%} of the price of {best.name}")
                return option
    return best


def _levels(question: Question, device: Device) -> list[Level]:
    levels = levels_for(question.shape, device.kind)
    return [level for name, level in levels.items() if not question.levels or name in question.levels]


def _smallest(question: Question, device: Device, level: Level, lengths: Lengths) -> Option:
    shape, last = question.shape, None
    if reason := device.refusal(level.compute):
        return Option(device, level, 1, _memory(shape, device, level, 1), cannot=reason)
    tp = 1
    while tp <= min(device.max_tp, 16):
        option = Option(device, level, tp, _memory(shape, device, level, tp))
        last = option
        memory = option.memory
        if not memory.fits:
            gb = 1e9
            option.cannot = (
                f"does not fit: weights {memory.weights / gb:.1f} + activations {memory.activations / gb:.1f} + reserve "
                f"{memory.overhead / gb:.1f} of {memory.total / gb:.0f} GB{f', on each of {tp}' if tp > 1 else ''}"
            )
        else:
            _carry(question, option, lengths)
            if not option.cannot:
                return option
        tp *= 2
    if last is None:
        raise UsageError(f"{device.name}: max_tp {device.max_tp}")
    return last


def _memory(shape: Shape, device: Device, level: Level, tp: int) -> Memory:
    rows, tokens = batch_limits(device.kind)
    return split_memory(
        shape, level, memory=device.memory, usable=device.usable, overhead=device.overhead, tp=tp, batch_tokens=tokens, batch_size=rows
    )


def _carry(question: Question, option: Option, lengths: Lengths) -> None:
    device = option.device
    cost = option.cost = CostModel(question.shape, device, option.level, option.tp, question.factors(device))
    option.sequences = sequences_that_fit(option.memory, *kv_in_flight(cost, lengths))
    longest = max(a + b for a, b in zip(question.traffic.prompts, question.traffic.answers, strict=True))
    longest = min(longest, question.shape.context_length)
    if question.shape.kv_bytes(longest, option.tp) > option.memory.kv:
        option.cannot = f"the longest request ({longest} tokens) needs more KV memory than the {option.memory.kv / 1e9:.1f} GB left"
        return
    carries = option.carries = capacity(cost, option.memory, lengths, question.objective, batch_limits(device.kind)[0])
    if carries.rate <= 0:
        option.cannot = carries.why
        return
    size(question, option, max(1, math.ceil(question.peak / (LOAD * carries.rate) - 1e-9)))


def size(question: Question, option: Option, needed: int) -> None:
    """So many replicas for the peak, and one more."""
    option.needed = needed
    option.usd_month = monthly(option.device, option.count, question.terms)


def _why_not_otherwise(option: Option, found: Sequence[Option]) -> list[str]:
    reasons = []
    others = [other for other in found if other.device is option.device and not other.cannot]
    if option.tp > 1:
        link = option.device.link / 1e9
        reasons.append(
            f"{option.tp} together: fewer do not fit or miss the objective; they meet twice a layer over {link:.0f} GB/s each way"
        )
        if smaller := [other for other in others if other.tp < option.tp]:
            reasons.append(f"quantize before splitting: at {smaller[0].level.name}, {smaller[0].tp} together will do")
    if wider := [other for other in others if other.tp > option.tp and other.level.bits > option.level.bits]:
        reasons.append(f"quantized rather than split: {wider[0].level.name} takes {wider[0].tp} together")
    if option.device.note:
        reasons.append(option.device.note)
    return reasons


@dataclass(slots=True)
class Checked:
    """The answer as the simulator found it: whole, and with a replica lost at the peak."""

    whole: Outcome
    lost: Outcome
    good: float
    good_lost: float


def check(question: Question, option: Option) -> Checked:
    """Simulate the requests around the peak with the replicas of an option, whole and with one lost in the middle of it."""
    traffic, objective = question.around_peak(), question.objective
    whole = _run(question, option, traffic, option.replicas)
    lost = _run(question, option, traffic, option.replicas, [Failure(traffic.times[len(traffic) // 2], 0, LOST_FOR)])
    return Checked(whole, lost, *(outcome.good_share(objective.ttft, objective.itl) for outcome in (whole, lost)))


def _run(question: Question, option: Option, traffic: Traffic, replicas: int, failures: Sequence[Failure] = ()) -> Outcome:
    if option.cost is None:
        raise UsageError(f"{option.name}: {option.cannot}")
    prefix = traffic.hashes is not None
    config = engine_config(option.cost, option.memory, Lengths.of(traffic), question.objective, prefix)
    return simulate(traffic, option.cost, config, replicas=replicas, routing="prefix" if prefix else "least-load", failures=failures)


def repair(question: Question, option: Option) -> Checked:
    """Size again with what the prefix cache was found to have; add replicas while the simulation misses the objective, `REPAIRS` times."""
    checked = check(question, option)
    cached = checked.whole.summary()["cached_share"]
    if cached > WORTH_IT:
        _carry(question, option, Lengths.of(question.traffic, cached))
        option.reasons.append(
            f"the prefix cache has {cached:.0%} of the prompts' tokens, as simulated; the other options are sized without"
        )
        checked = check(question, option)
    for _ in range(REPAIRS):
        if checked.good >= question.objective.share:
            break
        size(question, option, option.needed + max(1, option.needed // 4))
        checked = check(question, option)
    return checked


def mistakes(question: Question, option: Option) -> list[dict[str, Any]]:
    """The two classical ones beside the answer: what would have been bought, what it costs, and what users would get."""
    if option.carries is None or option.cost is None:
        return []
    rate, peak = option.carries.rate, question.peak
    traffic = question.around_peak()

    runs: dict[int, Outcome] = {}

    def told(mistake: str, replicas: int, tp: int, why: str) -> dict[str, Any]:
        if tp == option.tp and replicas not in runs:
            runs[replicas] = _run(question, option, traffic, replicas)
        found = runs.get(replicas) if tp == option.tp else None
        return {
            "mistake": mistake,
            "devices": replicas * tp,
            "usd_month": monthly(option.device, replicas * tp, question.terms),
            "within_objective": found.good_share(question.objective.ttft, question.objective.itl) if found else 0.0,
            "ttft_p95_ms": found.summary()["ttft_ms"]["p95"] if found else None,
            "why": why,
        }

    average = max(1, math.ceil(question.traffic.rate / rate))
    busy = f"at it each replica gets {peak / average / rate:.0%} of what it can carry"
    means = f"the average is {question.traffic.rate:.2f} requests/s, the peak {peak:.2f}: {busy}"
    shape, device, level = question.shape, option.device, option.level
    tp = 1
    while weight_bytes(shape, level, tp) > device.memory and tp < device.max_tp:
        tp *= 2
    memory = _memory(shape, device, level, tp)
    mean, deviation = kv_in_flight(option.cost, Lengths.of(question.traffic))
    fit = sequences_that_fit(memory, mean * option.tp / tp, deviation * option.tp / tp)
    left = (
        f"{memory.kv / 1e9:.1f} GB are left for keys and values, {fit:.0f} sequences"
        if memory.fits
        else "nothing is left for keys and values"
    )
    weights = (
        f"{memory.weights * tp / 1e9:.1f} GB of weights are in {tp} x {device.memory / 1e9:.0f} GB; beside activations and reserve {left}, "
        f"and the peak is {peak:.1f} requests/s, of which a replica as in the answer carries {rate:.1f}"
    )
    return [
        told("sized for average traffic", average, option.tp, means),
        told("counted the weights alone", 1, tp, weights),
    ]
