"""A server at many times its capacity: what it still delivers, how long the admitted take, and how fast the rest is refused.

    python benchmarks/overload.py [MODEL] [--times 10] [--rounds 3] [--seconds 8] [--batch 16] [--max-queue-time 2] [--scripted]

First the capacity: as many clients in a closed loop as the batch has places. Then Poisson arrivals at `--times` that rate, each a
connection of its own, whose first refusal is its last. `--scripted` puts an engine without kernels behind the same API process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from serving import serving

from headrace.models.hub import default_model_path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from scripted_engine import ServerProcess

WORDS = ("river", "stone", "light", "under", "never", "again", "table", "seven", "house", "music", "plain", "water", "paper", "green")


@dataclass
class Seen:
    """What a load saw; seconds."""

    tokens: int = 0
    whole: int = 0  # complete answers
    ttft: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)  # from sent to read
    broken: int = 0


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


async def ask(port: int, options: argparse.Namespace, rng: random.Random, seen: Seen) -> None:
    """One request on a fresh connection."""
    prompt = " ".join(rng.choices(WORDS, k=options.prompt_words))
    length = max(4, round(rng.lognormvariate(0, 0.4) * options.tokens))
    body = json.dumps({"prompt": prompt, "max_tokens": length, "ignore_eos": True, "temperature": 0, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        start = time.perf_counter()
        writer.write(head % len(body) + b"\r\n\r\n" + body)
        first = await reader.readline()
        if first.startswith(b"HTTP/1.1 429"):
            seen.refused.append(time.perf_counter() - start)
            return
        if not first.startswith(b"HTTP/1.1 200"):
            seen.broken += 1
            return
        data, ttft = b"", 0.0
        while part := await reader.read(1 << 16):
            data += part
            if not ttft and b'"text":' in data:
                ttft = time.perf_counter() - start
        if b"data: [DONE]" not in data:
            seen.broken += 1
            return
        seen.tokens += length
        seen.whole += 1
        seen.ttft.append(ttft)
        seen.total.append((time.perf_counter() - start - ttft) / max(1, length - 1))
    finally:
        writer.close()


async def closed_loop(port: int, options: argparse.Namespace, seen: Seen) -> None:
    until = time.monotonic() + options.seconds

    async def client(seed: int) -> None:
        rng = random.Random(seed)  # no prompt comes twice: none is in the cache
        while time.monotonic() < until:
            await ask(port, options, rng, seen)

    await asyncio.gather(*(client(random.getrandbits(64)) for _ in range(options.batch)))


async def open_loop(port: int, options: argparse.Namespace, rate: float, seen: Seen) -> None:
    rng, loop = random.Random(random.getrandbits(64)), asyncio.get_running_loop()
    at, until, tasks = loop.time(), loop.time() + options.seconds, []
    while at < until:
        at += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, at - loop.time()))
        tasks.append(asyncio.create_task(ask(port, options, rng, seen)))
    await asyncio.gather(*tasks)


def refusal_p99(port: int) -> str:
    """The server's own view, from received to written: the bucket in which the 99th percentile lies."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    rows = [
        (bound, float(n)) for bound, n in re.findall(r'headrace_refusal_seconds_bucket\{le="([^"]+)",model="[^"]*"\} (\S+)', text)
    ]  # the last is all
    if not rows or not rows[-1][1]:
        return "none"
    return next(f"<= {1000 * float(bound):g} ms" for bound, n in rows if n >= 0.99 * rows[-1][1])


@contextlib.contextmanager
def server(options: argparse.Namespace) -> Iterator[int]:
    limits = ["--max-batch-size", str(options.batch), "--max-queue-time", str(options.max_queue_time)]
    if options.scripted:
        with ServerProcess("--step-ms", "20", *limits) as scripted:
            yield scripted.port
    else:
        with serving(Path(options.model or default_model_path()), limits) as (process, _):
            yield int(process.url.rsplit(":", 1)[1])


def timed(load: Callable[[Seen], Coroutine[Any, Any, None]]) -> tuple[Seen, float]:
    seen, start = Seen(), time.perf_counter()
    uvloop.run(load(seen))
    return seen, time.perf_counter() - start


def describe(seen: Seen, wall: float) -> str:
    return (
        f"{seen.tokens / wall:6.0f} tok/s in {seen.whole / wall:5.2f} answers/s; TTFT p50 {percentile(seen.ttft, 0.5):.2f} "
        f"p95 {percentile(seen.ttft, 0.95):.2f} s; a token p50 {1000 * percentile(seen.total, 0.5):.1f} "
        f"p95 {1000 * percentile(seen.total, 0.95):.1f} ms; {len(seen.refused)} refused, {seen.broken} broken"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--max-queue-time", type=float, default=2.0)
    parser.add_argument("--prompt-words", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=40, help="of an answer, the median of a log-normal")
    parser.add_argument("--scripted", action="store_true")
    options = parser.parse_args()
    goodputs, slowdowns, refused = [], [], []
    with server(options) as port:
        for _ in range(options.rounds):
            quiet, wall = timed(lambda seen: closed_loop(port, options, seen))
            capacity, rate = quiet.tokens / wall, quiet.whole / wall
            print(f"capacity  {describe(quiet, wall)}")
            loaded, wall = timed(lambda seen, rate=rate: open_loop(port, options, options.times * rate, seen))
            print(f"overload  {describe(loaded, wall)}")
            goodputs.append(loaded.tokens / wall / capacity)
            slowdowns.append(statistics.median(loaded.total) / statistics.median(quiet.total))
            refused += loaded.refused
        print(
            f"goodput {statistics.median(goodputs):.1%} of capacity, a token in {statistics.median(slowdowns):.2f} of its time there, "
            f"medians of {options.rounds}; {len(refused)} refused after p50 {1000 * percentile(refused, 0.5):.1f} p99 "
            f"{1000 * percentile(refused, 0.99):.1f} ms as the client sees it, p99 {refusal_p99(port)} as the server does"
        )


if __name__ == "__main__":
    main()
