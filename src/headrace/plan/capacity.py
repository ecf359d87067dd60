"""How much of a workload one replica carries within an objective, what then gives out first, and how many sequences its memory holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.config import BLOCK_TOKENS, EngineConfig
from headrace.plan.cost import CostModel
from headrace.plan.memory import Memory
from headrace.plan.traffic import Traffic

SAMPLE = 512  # requests whose lengths stand for the traffic's, evenly taken
KV_SIGMA = 2.33  # standard deviations of the KV in flight that must fit beside its mean: 99 %
BUSY = 0.95  # of a replica's time at most: beyond, queues grow without end under the smallest burst
STEP_SHARE = 0.8  # of the objective for the time between tokens, a step's target: a step that is cut too long must not miss it
TAIL = 3.0  # the 95th percentile of a queue's wait over its mean: exponential


@dataclass(frozen=True, slots=True)
class Objective:
    """What users are promised: seconds to the first token, seconds between tokens, for a share of the requests."""

    ttft: float
    itl: float
    share: float = 0.95


@dataclass(frozen=True, slots=True)
class Lengths:
    """Pairs of prompt and answer tokens that stand for the traffic, and the share of prompt tokens a prefix cache has."""

    pairs: tuple[tuple[int, int], ...]
    cached: float = 0.0

    @staticmethod
    def of(traffic: Traffic, cached: float = 0.0) -> Lengths:
        """At equal ranks of the sorted requests, so that the tail is in it."""
        pairs = sorted(zip(traffic.prompts, traffic.answers, strict=True))
        count = min(SAMPLE, len(pairs))
        return Lengths(tuple(pairs[int((i + 0.5) * len(pairs) / count)] for i in range(count)), cached)

    @property
    def answer(self) -> float:
        return sum(answer for _, answer in self.pairs) / len(self.pairs)

    @property
    def prompt(self) -> float:
        return sum(prompt for prompt, _ in self.pairs) / len(self.pairs)

    @property
    def context(self) -> float:
        """Mean context of a decode step: long answers are met more often, half done."""
        return sum(answer * (prompt + answer / 2) for prompt, answer in self.pairs) / sum(answer for _, answer in self.pairs)


@dataclass(frozen=True, slots=True)
class State:
    """A replica at a steady rate. Times in seconds; `shares` of its time go to reading, computing, exchanging and overhead."""

    rate: float
    busy: float
    running: float
    itl: float
    ttft: float
    kv_sequences: float  # that fit, of the sizes in flight
    shares: dict[str, float]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rate (requests/s) within the objective; `limit` names what gives out first, `why` in words."""

    rate: float
    limit: str  # memory, bandwidth, compute, interconnect, overhead
    why: str
    state: State


def kv_in_flight(cost: CostModel, lengths: Lengths, kv_value_bytes: float = 2) -> tuple[float, float]:
    """(mean, standard deviation) of the bytes a running sequence holds on a device, met at a random time: long answers run longer."""
    sizes = [(answer, cost.shape.kv_bytes(prompt + answer / 2, cost.tp, kv_value_bytes)) for prompt, answer in lengths.pairs]
    weight = sum(answer for answer, _ in sizes)
    mean = sum(answer * size for answer, size in sizes) / weight
    return mean, math.sqrt(sum(answer * (size - mean) ** 2 for answer, size in sizes) / weight)


def sequences_that_fit(memory: Memory, mean: float, deviation: float) -> float:
    """How many at once, so that with 99 % probability all fit: n * mean + 2.33 * sqrt(n) * deviation = what is left for KV."""
    if memory.kv <= 0:
        return 0.0
    spread = KV_SIGMA * deviation
    root = (-spread + math.sqrt(spread * spread + 4 * mean * memory.kv)) / (2 * mean)
    return root * root


class Replica:
    """One replica under a steady load of these lengths. `share` of the prompts wait no longer than `State.ttft` for their first token."""

    def __init__(self, cost: CostModel, memory: Memory, lengths: Lengths, max_rows: int, share: float = 0.95) -> None:
        self.cost, self.lengths, self.max_rows = cost, lengths, max_rows
        prompts = sorted(_prompt_s(cost, prompt * (1 - lengths.cached), prompt) for prompt, _ in lengths.pairs)
        self.prompt = sum(prompts) / len(prompts)  # seconds
        self.prompt_square = sum(seconds * seconds for seconds in prompts) / len(prompts)
        self.longest = prompts[math.ceil(share * len(prompts)) - 1]
        self.context, self.answer = lengths.context, lengths.answer
        self.fit = sequences_that_fit(memory, *kv_in_flight(cost, lengths))

    def at(self, rate: float) -> State | None:
        """The steady state at a rate; None when there is none: work comes in faster than it is done."""
        cost, prefill = self.cost, rate * self.prompt
        if prefill >= BUSY or not self._keeps_up(self.max_rows, rate, prefill):
            return None
        low, running = 0.0, float(self.max_rows)
        for _ in range(40):  # the fewest sequences at once that keep up
            middle = (low + running) / 2
            low, running = (low, middle) if self._keeps_up(middle, rate, prefill) else (middle, running)
        rows = max(1.0, running)
        decode = cost.decode_s(rows, self.context)
        steps = running / rows * (1 - prefill)  # share of the time in decode steps: less than one sequence means idle time
        itl = decode / (1 - prefill)
        wait = rate * self.prompt_square / (2 * (1 - prefill))  # a prompt waits for the prompts before it (M/G/1)
        ttft = cost.factors.request_s + itl + TAIL * wait + self.longest
        return State(rate, prefill + steps, running, itl, ttft, self.fit, self._shares(rows, rate, steps))

    def _keeps_up(self, running: float, rate: float, prefill: float) -> bool:
        """Whether so many sequences at once make as many tokens a second as are wanted, in the time that prompts leave."""
        return running * (BUSY - prefill) / self.cost.decode_s(max(1.0, running), self.context) >= rate * self.answer

    def _shares(self, rows: float, rate: float, steps: float) -> dict[str, float]:
        """Of all time: what decode steps and prompts spend on what."""
        cost = self.cost
        read, exchange = cost.weights_s(rows, rows) + rows * cost.attend_s(self.context), cost.exchange_s(rows)
        decode = cost.decode_s(rows, self.context)
        tokens = self.lengths.prompt * (1 - self.lengths.cached)
        prompt_exchange = rate * (cost.exchange_s(tokens) - cost.exchange_s(0))
        compute_bound = cost.compute_bound(rows)
        return {
            "bandwidth": steps * (0.0 if compute_bound else read) / decode,
            "compute": steps * (read if compute_bound else 0.0) / decode + rate * self.prompt - prompt_exchange,
            "interconnect": steps * exchange / decode + prompt_exchange,
            "overhead": steps * (decode - read - exchange) / decode,
        }


def capacity(cost: CostModel, memory: Memory, lengths: Lengths, objective: Objective, max_rows: int) -> Capacity:
    """By bisection over the rate. A rate of 0 says that even one request misses the objective."""

    def miss(state: State | None) -> str:
        if state is None:
            return "no time"
        if state.running > state.kv_sequences:
            return "KV"
        if state.itl > objective.itl:
            return "ITL"
        return "TTFT" if state.ttft > objective.ttft else ""

    at = Replica(cost, memory, lengths, max_rows, objective.share).at
    least = 1e-6
    quiet = at(least)
    if quiet is None or miss(quiet):
        state = quiet or State(0.0, 0.0, 0.0, math.inf, math.inf, 0.0, {})
        return Capacity(0.0, *_reason(miss(quiet), state, cost, objective, alone=True), state)
    low, high = least, 1.0
    while not miss(at(high)) and high < 1e6:
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if miss(at(middle)) else (middle, high)
    within = at(low) or quiet
    return Capacity(low, *_reason(miss(at(high)), within, cost, objective), within)


def engine_config(cost: CostModel, memory: Memory, lengths: Lengths, objective: Objective, prefix_cache: bool) -> EngineConfig:
    """As a server on this device would be started. A block's bytes are those of a mean sequence's: windows and states do not grow."""
    typical = lengths.context
    per_token = cost.shape.kv_bytes(typical, cost.tp) / typical
    blocks = max(1, int(memory.kv / (per_token * BLOCK_TOKENS)))
    rows, tokens = batch_limits(cost.device.kind)
    return EngineConfig(
        context_length=cost.shape.context_length, num_blocks=blocks, max_batch_size=rows, max_batch_tokens=tokens,
        step_target_s=min(STEP_SHARE * objective.itl, 0.2), prefix_cache=prefix_cache, max_waiting=1 << 30,
    )  # fmt: skip


def batch_limits(kind: str) -> tuple[int, int]:
    """Sequences and tokens of a step, as servers have them by default."""
    return (256, 512) if kind == "cpu" else (512, 8192)


def _prompt_s(cost: CostModel, computed: float, prompt: float) -> float:
    """A prompt's own seconds in a step that decodes anyway."""
    extra = cost.weights_s(computed + 1, 1) - cost.weights_s(1, 1)
    return extra + cost.prompt_s(prompt - computed, prompt) + cost.overhead_s(computed, 1) - cost.overhead_s(0, 1)


def _reason(missed: str, state: State, cost: CostModel, objective: Objective, alone: bool = False) -> tuple[str, str]:
    most = max(state.shares, key=state.shares.__getitem__) if state.shares else "compute"
    spent = f"most of a step's time goes to {most}"
    if missed == "KV":
        return "memory", f"keys and values of {state.kv_sequences:.0f} sequences fit, and more would run at once"
    if alone:
        what = "decode step" if missed == "ITL" else "prompt"
        have, want = (state.itl, objective.itl) if missed == "ITL" else (state.ttft, objective.ttft)
        if not math.isfinite(have):
            return most, "even one request at a time is more than it can do"
        return most, f"a {what} alone takes {1e3 * have:,.0f} ms (p95), the objective is {1e3 * want:,.0f} ms; {spent}"
    return most, {
        "ITL": f"the time between tokens reaches {1e3 * objective.itl:,.0f} ms; {spent}",
        "TTFT": f"prompts wait for prompts until the first token takes {1e3 * objective.ttft:,.0f} ms (p95); {spent}",
    }.get(missed, f"it is busy {BUSY:.0%} of the time; {spent}")
