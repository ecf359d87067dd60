"""Attention beside the machine's limits: decode against the read bandwidth, prefill against the peak of the level's own multiply-add (bf16
dot products, else fp32), at every level that runs here.

    PYTHONPATH=src python benchmarks/attention.py [--threads 2] [--rounds 5] [--level LEVEL ...]

The shape is SmolLM2-135M's: 9 query heads, 3 KV heads, head dimension 64, the blocks of a request scattered in the pool. Limit and kernel
are measured in turn; a figure is the median of the rounds, a ratio the median of the rounds' ratios to the mean of the limit before and
after. Decode counts the bytes of the keys and values of whole blocks once, over enough layers that no cache holds them. Prefill counts the
causal multiply-adds only: 2 * q_heads * head_dim * n (n + 1) / 2.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headrace import _native

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 32


@dataclass
class Work:
    name: str
    run: Callable[[], float]  # seconds
    amount: float  # bytes or multiply-adds
    limit: Callable[[], float]  # amount a second
    unit: str


def aligned(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """As the server's pool is: on a huge page's boundary."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + (2 << 20), np.uint8)
    at = -raw.ctypes.data % (2 << 20)
    return raw[at : at + size].view(dtype).reshape(shape)


def step(requests: int, start: int, stop: int, layers: int, threads: int, rng: np.random.Generator) -> Callable[[], float]:
    """A step of `requests` requests with queries [start, stop) each."""
    per_request = -(-stop // BLOCK)
    blocks = requests * per_request
    pool = aligned((layers, blocks, KV_HEADS, 2 * BLOCK * HEAD_DIM), np.uint16)
    pool[:] = rng.integers(0x3C00, 0x3F80, pool.shape, dtype=np.uint16)
    pool |= rng.integers(0, 2, pool.shape, dtype=np.uint16) << 15
    tables = rng.permutation(blocks).astype(np.int32).reshape(requests, per_request)
    rows = requests * (stop - start)
    q = rng.integers(0x3C00, 0x4040, (rows, Q_HEADS, HEAD_DIM), dtype=np.uint16)
    out = aligned((rows, Q_HEADS * HEAD_DIM), np.float32)
    starts, stops = (np.full(requests, x, np.int32) for x in (start, stop))

    def run() -> float:
        return float(_native.attention_step(q, pool, tables, starts, stops, scale=HEAD_DIM**-0.5, window=0, out=out, threads=threads))

    return run


def works(threads: int, rng: np.random.Generator) -> list[Work]:
    limits = _native.Limits(threads, 1024)

    def read() -> float:
        return float(max(limits.read(0.06, ahead) for ahead in (0, 4096))) * 1e9

    def peak() -> float:
        return float(limits.bf16(0.05) if _native.level() == "avx512bf16" else limits.fp32(0.05)) * 1e9

    out = []
    for context, layers in ((300, 30), (1000, 10)):
        size = layers * 32 * -(-context // BLOCK) * KV_HEADS * 2 * BLOCK * HEAD_DIM * 2
        run = step(32, context - 1, context, layers, threads, rng)
        out.append(Work(f"decode 32 x {context}", run, size, read, "GB/s"))
    for length, layers in ((512, 8), (2048, 1)):
        macs = layers * 2 * Q_HEADS * HEAD_DIM * length * (length + 1) / 2
        out.append(Work(f"prefill {length}", step(1, 0, length, layers, threads, rng), macs, peak, "GMAC/s"))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--level", nargs="*", default=_native.levels())
    args = parser.parse_args()
    print(f"{'level':<12} {'work':<18} {'us':>9} {'rate':>8} {'limit':>8} {'unit':<7} {'of limit':>8}")
    for work in works(args.threads, np.random.default_rng()):
        for level in args.level:
            if level == "scalar":
                continue
            _native.use(level)
            work.run()
            limits, seconds = [work.limit()], []
            for _ in range(args.rounds):
                seconds.append(work.run())
                limits.append(work.limit())
            rates = [work.amount / s for s in seconds]
            ratios = [2 * r / (a + b) if a else 0 for r, a, b in zip(rates, limits, limits[1:], strict=False)]
            rate, limit = statistics.median(rates) / 1e9, statistics.median(limits) / 1e9
            print(
                f"{level:<12} {work.name:<18} {statistics.median(seconds) * 1e6:9.0f} {rate:8.1f} {limit:8.1f} {work.unit:<7}"
                f" {statistics.median(ratios):8.1%}"
            )


if __name__ == "__main__":
    main()
