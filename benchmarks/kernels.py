"""Linear layers beside what this machine can do at most, in one run: bytes read and multiply-adds, on the same threads.

    python benchmarks/kernels.py [gemm] [gemv] [shapes] [levels] [--threads 2] [--rounds 5] [--json]

A figure is the median over the rounds of the ratio to the limit, and each round's limit is the mean of the windows just before and after
it. The
limits of a layer: reading its weights once, and its multiply-adds at the port bound. A group of 32 k costs 8 dot products, a scale
product and a
multiply-add (and one more for a minimum) on the ports of the dot product: 8/10 of the int8 peak, 8/11 for q4_1.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from headrace import _native
from headrace.executors.native import FORMATS
from headrace.executors.profile import PORT_BOUND

GROUP_BYTES = {"q4_0": 576, "q4_1": 640, "q8_0": 1088, "bf16": 2048}  # of 32 columns by 32 k
EPILOGUES = {"store": 0, "add": 1, "silu_mul": 2}
# name, k, n, format, epilogue: the linear layers of SmolLM2-135M's Q4_1 file.
MODEL = [
    ("qkv", 576, 960, "q4_1", "store"),
    ("o", 576, 576, "q4_1", "add"),
    ("gate_up", 576, 3072, "q4_1", "silu_mul"),
    ("down", 1536, 576, "q4_1", "add"),
    ("head", 576, 49152, "q8_0", "store"),
]
MODEL_ROWS = [1, 2, 4, 8, 32, 128, 512]


@dataclass
class Result:
    case: str
    level: str
    rows: int
    us: float  # a layer
    gmacs: float
    gbytes: float  # of weights a second
    of_compute: float  # ratio to the port bound
    of_read: float  # ratio to reading the weights
    of_bound: float  # ratio to the slower of the two

    def line(self) -> str:
        return (
            f"{self.case:34} {self.level:10} rows {self.rows:4}  {self.us:9.1f} us  {self.gmacs:6.1f} GMAC/s  {self.gbytes:5.1f} GB/s  "
            f"compute {self.of_compute:5.1%}  read {self.of_read:6.1%}  bound {self.of_bound:5.1%}"
        )


class Runner:
    """Interleaves windows of limit and kernel."""

    def __init__(self, threads: int, rounds: int, window: float) -> None:
        self.threads, self.rounds, self.window = threads, rounds, window
        self.limits = _native.Limits(threads, 256)

    def read(self) -> float:
        """Bytes a second, the better of the hardware's own prefetching and ours."""
        return 1e9 * max(self.limits.read(self.window / 4, 0), self.limits.read(self.window / 4, 4096))

    def peaks(self, fmt: str) -> tuple[float, float]:
        peak = self.limits.bf16(self.window / 8) if fmt == "bf16" else self.limits.int8(self.window / 8)
        return 1e9 * peak * PORT_BOUND[fmt], self.read()

    def run(self, case: str, fmt: str, rows: int, k: int, n: int, epilogue: str, mib: int) -> Result:
        """One case over at least `mib` MiB of weights, so that none is in a cache from the pass before."""
        layer = n // 32 * (k // 32) * GROUP_BYTES[fmt]
        bench = _native.LinearBench(FORMATS[fmt], n, k, rows, EPILOGUES[epilogue], -(-(mib << 20) // layer), self.threads)
        bench.run(0)  # faults the pages in
        seconds, compute, read, bound = [], [], [], []
        before = self.peaks(fmt)
        for _ in range(self.rounds):
            took = bench.run(self.window)
            after = self.peaks(fmt)
            port, stream = ((x + y) / 2 for x, y in zip(before, after, strict=True))
            before = after
            ideal = bench.macs / port if port else 0.0, bench.bytes / stream
            seconds.append(took)
            compute.append(ideal[0] / took)
            read.append(ideal[1] / took)
            bound.append(max(ideal) / took)
        us, *ratios = (statistics.median(x) for x in (seconds, compute, read, bound))
        return Result(case, _native.level(), rows, us * 1e6, bench.macs / us / 1e9, bench.bytes / us / 1e9, *ratios)


def gemm(r: Runner) -> Iterator[Result]:
    """256 rows, K = N = 2048: the port bound is the limit."""
    for fmt in FORMATS:
        yield r.run(f"gemm {fmt} 2048 x 2048", fmt, 256, 2048, 2048, "store", 64)


def gemv(r: Runner) -> Iterator[Result]:
    """Few rows over 600 MiB and more: the read bandwidth is the limit."""
    for rows in (1, 2, 4):
        yield r.run("gemv q4_0 2048 x 8192, 600 MiB", "q4_0", rows, 2048, 8192, "store", 600)


def shapes(r: Runner) -> Iterator[Result]:
    """The default model's layers at the numbers of rows a step has."""
    for name, k, n, fmt, epilogue in MODEL:
        for rows in MODEL_ROWS:
            yield r.run(f"{name} {fmt} {k} x {n} {epilogue}", fmt, rows, k, n, epilogue, 100)


def levels(r: Runner) -> Iterator[Result]:
    """The same GEMM at each level with vectors, beside the best level's limits."""
    best = _native.level()
    for level in _native.levels():
        if level == "scalar":
            continue
        _native.use(level)
        for fmt in ("q4_0", "q4_1", "q8_0"):
            yield r.run(f"gemm {fmt} 2048 x 2048", fmt, 256, 2048, 2048, "store", 64)
    _native.use(best)


PARTS = {"gemm": gemm, "gemv": gemv, "shapes": shapes, "levels": levels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=float, default=0.1, help="seconds of a measurement")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"parts: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    runner = Runner(args.threads, args.rounds, args.window)
    if not args.json:
        int8, bf16, fp32 = (f(0.1) for f in (runner.limits.int8, runner.limits.bf16, runner.limits.fp32))
        print(
            f"limits now, {args.threads} threads: {int8:.0f} int8, {bf16:.0f} bf16, {fp32:.0f} fp32 GMAC/s, {runner.read() / 1e9:.1f} GB/s"
        )
    for part in args.parts or PARTS:
        for result in PARTS[part](runner):
            print(json.dumps(asdict(result)) if args.json else result.line(), flush=True)


if __name__ == "__main__":
    main()
