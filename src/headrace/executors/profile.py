"""Where a step's time goes, per operation, beside what the machine allows: the table of `headrace bench step`.

Each operation's bound is the larger of its multiply-adds at the port bound of its format and its bytes at the bandwidth, both measured in
windows just before and after each round. Operations without a bound worth naming (norms, rope, sampling) have bound 0, so their whole
time counts as loss.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.config import BLOCK_TOKENS, ModelConfig
from headrace.engine.plan import Chunk, NewRow, Plan
from headrace.executors.native import NativeExecutor
from headrace.kernels import native
from headrace.request import SamplingParams

# Share of the int8 (or bf16) peak that the dot ports allow: beside 8 dots, a group of 32 costs a multiply and an add (two for minima).
PORT_BOUND = {"q4_0": 8 / 10, "q8_0": 8 / 10, "q4_1": 8 / 11, "bf16": 1.0}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do now: bytes/s read, multiply-adds/s of int8 and of bf16."""

    read: float
    int8: float
    bf16: float

    def mean(self, other: Limits) -> Limits:
        """The limits between two windows."""
        return Limits((self.read + other.read) / 2, (self.int8 + other.int8) / 2, (self.bf16 + other.bf16) / 2)

    def __str__(self) -> str:
        return f"{self.read / 1e9:.1f} GB/s read, {self.int8 / 1e9:.0f} GMAC/s int8, {self.bf16 / 1e9:.0f} bf16"


class Meter:
    """Measures the limits in short windows; the buffer it reads is larger than any cache."""

    def __init__(self, threads: int, mib: int = 512) -> None:
        self._native = native.Limits(threads, mib)

    def window(self, seconds: float = 1.0) -> Limits:
        """The best of four short windows for each: neighbours only ever take away."""
        part = seconds / 12
        best = [max(measure(part) for _ in range(4)) for measure in (self._native.read, self._native.int8, self._native.bf16)]
        return Limits(best[0] * 1e9, best[1] * 1e9, best[2] * 1e9)


@dataclass(frozen=True, slots=True)
class Cost:
    """One kind of operation in a step: multiply-adds by format, and bytes that must come from memory."""

    macs: dict[str, float]
    nbytes: float

    def seconds(self, limits: Limits) -> float:
        peaks = {name: (limits.bf16 if name == "bf16" else limits.int8) * share for name, share in PORT_BOUND.items()}
        return max(sum(macs / peaks[name] for name, macs in self.macs.items()), self.nbytes / limits.read)


def step_costs(executor: NativeExecutor, chunks: Iterable[Chunk]) -> dict[str, Cost]:
    """The bound of each operation of a step, by the names the program profiles under."""
    config, weights = executor.model.config, executor.model.weights
    chunks = list(chunks)
    rows = sum(chunk.num_tokens for chunk in chunks)
    logit_rows = sum(chunk.stop - chunk.logits_start for chunk in chunks)
    costs: dict[str, Cost] = {}
    for name, parts in (("qkv", ("q", "k", "v")), ("o", ("o",)), ("gate_up", ("gate_up",)), ("down", ("down",))):
        macs: dict[str, float] = {}
        nbytes = 0.0
        for layer in range(config.num_layers):
            for part in parts:
                w = weights[f"layers.{layer}.{part}"]
                macs[w.format] = macs.get(w.format, 0.0) + rows * w.n * w.k
                nbytes += w.nbytes
        costs[name] = Cost(macs, nbytes)
    head = weights["head"]
    costs["head"] = Cost({head.format: float(logit_rows * head.n * head.k)}, head.nbytes if logit_rows else 0.0)
    costs["attention"] = _attention_cost(config, chunks)
    return costs


def _attention_cost(config: ModelConfig, chunks: list[Chunk]) -> Cost:
    window = config.sliding_window or 1 << 60
    pairs = sum(min(position + 1, window) for chunk in chunks for position in range(chunk.start, chunk.stop))
    keys = sum(min(chunk.stop, window + chunk.num_tokens) for chunk in chunks)
    macs = 2 * pairs * config.num_heads * config.head_dim * config.num_layers
    return Cost({"bf16": float(macs)}, float(keys * config.kv_bytes_per_token))


@dataclass(slots=True)
class Measured:
    """One scenario: per operation the median seconds and bound of a step, and the step as a whole."""

    name: str
    tokens: int  # computed in a step
    step_s: float = 0.0
    bound_s: float = 0.0
    ratio: float = 0.0  # median over rounds of bound / measured
    sample_s: float = 0.0
    operations: list[tuple[str, float, float]] = field(default_factory=list)  # name, seconds, bound
    limits: Limits | None = None


class Bench:
    """Drives an executor directly, with random tokens, no scheduler and no server."""

    def __init__(self, executor: NativeExecutor, threads: int, seed: int) -> None:
        self.executor = executor
        self.random = random.Random(seed)
        self.meter = Meter(threads)

    def prefill(self, tokens: int, rounds: int = 5) -> Measured:
        """One prompt in one step."""
        self.executor.forward(self._rows(1, tokens))
        plan = Plan(chunks=[Chunk(0, 0, tokens, tokens - 1, True)])
        return self._measure(f"prefill {tokens}", plan, rounds, repeat=3, sample=False)

    def decode(self, rows: int, context: int, rounds: int = 5) -> Measured:
        """One token of each of `rows` samples, each with `context` tokens before it."""
        self.executor.forward(self._rows(rows, context))
        for row in range(rows):
            self._fill(row, context)
        plan = Plan(chunks=[Chunk(row, context - 1, context, context - 1, True) for row in range(rows)])
        return self._measure(f"decode {rows} x {context}", plan, rounds, repeat=40 if rows < 8 else 12, sample=True)

    def _rows(self, rows: int, tokens: int) -> Plan:
        """A step that sets rows up, each with blocks of its own, and computes one token."""
        vocab = self.executor.model.config.vocab_size
        blocks = -(-(tokens + 1) // BLOCK_TOKENS)
        plan = Plan(chunks=[Chunk(0, 0, 1, 1, False)])
        params = SamplingParams(max_tokens=1 << 20, temperature=0.0)
        for row in range(rows):
            ids = array("i", (self.random.randrange(vocab) for _ in range(tokens)))
            plan.new_rows.append(NewRow(row, ids.tobytes(), tokens, params, 0, 0, ()))
            plan.new_blocks.append((row, 0, list(range(row * blocks, (row + 1) * blocks))))
        return plan

    def _fill(self, row: int, context: int) -> None:
        for start in range(0, context, 256):
            stop = min(context, start + 256)
            self.executor.forward(Plan(chunks=[Chunk(row, start, stop, stop, False)]))

    def _measure(self, name: str, plan: Plan, rounds: int, repeat: int, sample: bool) -> Measured:
        program = self.executor.program
        costs = step_costs(self.executor, plan.chunks)
        steps: list[float] = []
        samples: list[float] = []
        ratios: list[float] = []
        shares: dict[str, list[float]] = {}
        limits: list[Limits] = [self.meter.window()]
        for _ in range(rounds):
            times: list[float] = []
            for _ in range(repeat):
                start = time.perf_counter()
                self.executor.forward(plan)
                times.append(time.perf_counter() - start)
                if sample:
                    start = time.perf_counter()
                    program.sample([chunk.row for chunk in plan.chunks], list(range(len(plan.chunks))), [], 0)
                    samples.append(time.perf_counter() - start)
                    self._forget(plan)
            steps.append(statistics.median(times))
            program.profile(True)
            for _ in range(max(1, repeat // 3)):
                self.executor.forward(plan)
            for operation, seconds in program.times():
                shares.setdefault(operation, []).append(seconds / max(1, repeat // 3))
            program.profile(False)
            limits.append(self.meter.window())
            near = Limits(*(max(getattr(limits[-2], f), getattr(limits[-1], f)) for f in ("read", "int8", "bf16")))
            bound = sum(cost.seconds(near) for cost in costs.values())
            ratios.append(bound / (steps[-1] + (statistics.median(samples) if samples else 0.0)))
        typical = Limits(*(statistics.median(getattr(limit, f) for limit in limits) for f in ("read", "int8", "bf16")))
        measured = Measured(name, plan.num_tokens, statistics.median(steps), limits=typical, ratio=statistics.median(ratios))
        measured.bound_s = sum(cost.seconds(typical) for cost in costs.values())
        measured.sample_s = statistics.median(samples) if samples else 0.0
        for operation, values in shares.items():
            bound = costs[operation].seconds(typical) if operation in costs else 0.0
            measured.operations.append((operation, statistics.median(values), bound))
        return measured

    def _forget(self, plan: Plan) -> None:
        """Drop the sampled tokens again, so that every repetition is the same step."""
        for chunk in plan.chunks:
            self.executor.program.truncate(chunk.row, chunk.stop)
