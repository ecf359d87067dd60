"""The floor of a workload on this machine: what a server would do if nothing but the arithmetic and the memory took time.

    python benchmarks/floor.py [MODEL] [--concurrency 8] [--requests N] [--seed N] [--limits GBPS,INT8,BF16] [--json]

The closed-loop workload of the client (--client, its `workload` function) is played through on a virtual clock. A step takes the sum over
its operations of the larger of multiply-adds at the port bound of their format and bytes at the read bandwidth; weights are read once a
step, a request's keys and values once a layer. There is no other cost: no norms, no sampling, no scheduler, no sockets. The bounds are
measured just before, or given.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.config import ModelConfig
from headrace.executors.profile import PORT_BOUND, Limits, Meter
from headrace.models.hub import default_model_path

BYTES_PER_GROUP = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34, "BF16": 64}  # of 32 weights
KERNEL_FORMAT = {"F32": "BF16", "F16": "BF16"}
MAX_BATCH_TOKENS = 512  # in a step, as the server's default


@dataclass(frozen=True, slots=True)
class Matrix:
    """Linear layers of one kind, taken together: one operation of a step."""

    format: str
    elements: int
    logits: bool = False  # the head: only the rows whose logits are wanted

    def seconds(self, rows: int, limits: Limits) -> float:
        if rows == 0:
            return 0.0
        peak = (limits.bf16 if self.format == "BF16" else limits.int8) * PORT_BOUND[self.format.lower()]
        return max(rows * self.elements / peak, self.elements / 32 * BYTES_PER_GROUP[self.format] / limits.read)


@dataclass(frozen=True, slots=True)
class Model:
    config: ModelConfig
    matrices: list[Matrix]

    @classmethod
    def of(cls, path: Path) -> Model:
        """Shapes and types from the file's header; the weights are not read."""
        from headrace.models import families

        with families.open_source(path) as source:
            network = families.describe(source)
        matrices = []
        for canonical, use in network.uses.items():
            if len(use.tensor.shape) == 2 and canonical != "embed":
                kind = KERNEL_FORMAT.get(use.tensor.type, use.tensor.type)
                matrices.append(Matrix(kind, use.tensor.elements, canonical == "head"))
        if "head" not in network.uses:
            embed = network.uses["embed"].tensor
            matrices.append(Matrix(KERNEL_FORMAT.get(embed.type, embed.type), embed.elements, True))
        return cls(network.config, matrices)

    def step_seconds(self, chunks: Sequence[tuple[int, int, bool]], limits: Limits) -> float:
        """A step of chunks (start, stop, wants logits of its last row)."""
        rows, logit_rows = sum(stop - start for start, stop, _ in chunks), sum(wants for *_, wants in chunks)
        total = sum(matrix.seconds(logit_rows if matrix.logits else rows, limits) for matrix in self.matrices)
        config = self.config
        window = config.sliding_window or config.context_length
        pairs = sum(_pairs(start, stop, window) for start, stop, _ in chunks)
        keys = sum(min(stop, window + stop - start) for start, stop, _ in chunks)
        macs = 2 * pairs * config.num_heads * config.head_dim * config.num_layers
        return total + max(macs / limits.bf16, keys * config.kv_bytes_per_token / limits.read)


def _pairs(start: int, stop: int, window: int) -> int:
    """(query, key) pairs of positions [start, stop), each seeing itself and what is before it, at most `window`."""
    full = min(stop, max(start, window))
    return (start + 1 + full) * (full - start) // 2 + (stop - full) * window


@dataclass(slots=True)
class Request:
    prompt: int
    output: int
    begun: float
    computed: int = 0
    times: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """What a user would feel, in seconds."""

    wall: float = 0.0
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    tokens_in: int = 0
    tokens_out: int = 0

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = {"out_tps": round(self.tokens_out / self.wall, 1), "wall_s": round(self.wall, 2)}
        found |= {"in_tok": self.tokens_in, "out_tok": self.tokens_out}
        for name, values in (("ttft", self.ttft), ("itl", self.itl)):
            found |= {f"{name}_p{p}": round(1e3 * quantile(values, p / 100), 2) for p in (50, 95, 99)}
        return found


def quantile(values: Sequence[float], p: float) -> float:
    """As the client computes it: the element at p of the sorted list."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(p * len(ordered)))] if ordered else float("nan")


def simulate(model: Model, lengths: Iterable[tuple[int, int]], concurrency: int, limits: Limits, budget: int = MAX_BATCH_TOKENS) -> Outcome:
    """Play (prompt tokens, output tokens) in a closed loop: running requests first, prompts in chunks up to the budget of a step."""
    waiting, running, clock, outcome = deque(lengths), list[Request](), 0.0, Outcome()
    while waiting or running:
        while waiting and len(running) < concurrency:
            prompt, output = waiting.popleft()
            running.append(Request(prompt, output, clock))
        left, chunks, advanced = budget, [], []
        for request in sorted(running, key=lambda r: r.computed < r.prompt):  # stable: decoding ones, then prompts as they came
            known = request.prompt + len(request.times)
            stop = min(known, request.computed + left)
            if stop > request.computed:
                left -= stop - request.computed
                chunks.append((request.computed, stop, stop == known))
                advanced.append((request, stop))
        clock += model.step_seconds(chunks, limits)
        for (request, stop), (_, _, sampled) in zip(advanced, chunks, strict=True):
            request.computed = stop
            if sampled:
                request.times.append(clock)
            if len(request.times) == request.output:
                running.remove(request)
                outcome.ttft.append(request.times[0] - request.begun)
                outcome.itl += [b - a for a, b in itertools.pairwise(request.times)]
                outcome.tokens_in += request.prompt
                outcome.tokens_out += request.output
    outcome.wall = clock
    return outcome


def load_client(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("client", path)
    if spec is None or spec.loader is None or not path.exists():
        raise SystemExit(f"{path}: no client there; pass --client FILE")
    client = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(client)
    return client


def counter(model: Path) -> Callable[[str], int]:
    """Tokens of a prompt as the server counts them."""
    from headrace.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    return lambda text: len(tokenizer.encode(text, add_special=True))


def add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", type=Path, help="GGUF file or folder (the default model)")
    parser.add_argument("--client", type=Path, default=Path("../shared/bench/load.py"), help="the load test whose workload is played")
    parser.add_argument("--mean-in", type=int, default=200)
    parser.add_argument("--mean-out", type=int, default=120)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")


def client_options(arguments: argparse.Namespace, concurrency: int, requests: int, seed: int) -> list[str]:
    pairs = {"concurrency": concurrency, "requests": requests, "seed": seed, "mean-in": arguments.mean_in, "mean-out": arguments.mean_out}
    return [word for name, value in pairs.items() for word in (f"--{name}", str(value))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload(parser)
    parser.add_argument("--concurrency", type=int, action="append", help="may be given several times (1, 8, 32)")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--limits", help="GB/s read, GMAC/s int8, GMAC/s bf16 instead of measuring them")
    a = parser.parse_args()
    path = a.model or default_model_path()
    if a.limits:
        limits = Limits(*(float(value) * 1e9 for value in a.limits.split(",")))
    else:
        limits = Meter(a.threads).window()
    client, model, count = load_client(a.client), Model.of(path), counter(path)
    if not a.json:
        print(f"{path.name}: {limits}, seed {a.seed}")
    for concurrency in a.concurrency or [1, 8, 32]:
        jobs, _ = client.workload(client.parse(["-", "-", *client_options(a, concurrency, a.requests, a.seed)]))
        result = simulate(model, [(count(prompt), output) for prompt, output in jobs], concurrency, limits).summary()
        if a.json:
            print(json.dumps({"concurrency": concurrency, "seed": a.seed, "limits": [limits.read, limits.int8, limits.bf16], **result}))
        else:
            ttft, itl = (f"{name} p50 {result[f'{name}_p50']:.2f} p95 {result[f'{name}_p95']:.2f} ms" for name in ("ttft", "itl"))
            print(f"concurrency {concurrency:3}: {result['out_tps']:8.1f} tok/s, {ttft}, {itl}")


if __name__ == "__main__":
    main()
