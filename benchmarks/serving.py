"""Headrace through HTTP, under the client's closed loop, beside the floor of the same workload at the limits measured around it.

    python benchmarks/serving.py [MODEL] [--concurrency 1 --concurrency 8 ...] [--rounds 5] [--requests N] [--json FILE]

Each round draws a fresh seed, measures the machine's limits just before and after, and counts as one ratio; the figure is the median.
The parts (server process, closed-loop client, rounds) are used by benchmarks/peers.py too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import floor

from headrace.executors.profile import Meter
from headrace.models.hub import default_model_path

Row = dict[str, Any]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)


class Server:
    """A `headrace serve` process."""

    def __init__(self, model: Path, port: int, flags: list[str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.begun = time.perf_counter()
        command = [sys.executable, "-m", "headrace", "serve", str(model), "--port", str(port), "--log-level", "warning", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)

    def wait_until_ready(self, timeout: float = 120.0) -> float:
        """Seconds from start to ready."""
        while True:
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with code {self.process.returncode}")
            try:
                get(f"{self.url}/ready")
                return time.perf_counter() - self.begun
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if time.perf_counter() - self.begun > timeout:
                    raise SystemExit("the server did not become ready") from None
                time.sleep(0.005)

    @property
    def model(self) -> str:
        return str(get(f"{self.url}/v1/models")["data"][0]["id"])

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def serving(model: Path, flags: list[str]) -> Iterator[tuple[Server, float]]:
    server = Server(model, free_port(), flags)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a benchmark that is ended takes its server along
    try:
        yield server, server.wait_until_ready()
    finally:
        server.stop()


async def closed_loop(client: ModuleType, options: Any) -> list[tuple[Any, ...]]:
    """The client's own requests and closed loop, its rows (due, times, usage, wanted, error) kept for every percentile."""
    import aiohttp

    jobs, _ = client.workload(options)
    rows: list[tuple[Any, ...]] = []
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=options.timeout), connector=connector) as session:
        warm: list[tuple[Any, ...]] = []
        await client.one(session, options, "warm up the engine please", 4, time.perf_counter(), warm)
        if warm[0][4]:
            raise SystemExit(f"warm-up failed: {warm[0][4]}")
        remaining = iter(jobs)

        async def slot() -> None:
            for prompt, output in remaining:
                await client.one(session, options, prompt, output, time.perf_counter(), rows)

        await asyncio.gather(*(slot() for _ in range(options.concurrency)))
    return rows


def drive(client: ModuleType, server: Server, options: list[str]) -> Row:
    """One run of the client against the server."""
    settings = client.parse([server.url, server.model, *options])
    start = time.perf_counter()
    rows = asyncio.run(closed_loop(client, settings))
    good = [row for row in rows if not row[4] and row[1]]
    failed = [row[4] for row in rows if row[4] or not row[1]]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(rows)} requests failed: {failed[0]}")
    usage = [row[2] or {} for row in good]
    wrong = sum(u.get("completion_tokens") != wanted for u, (*_, wanted, _) in zip(usage, good, strict=True))
    outcome = floor.Outcome(
        wall=max(times[-1] for _, times, *_ in good) - min(due for due, *_ in good),
        ttft=[times[0] - due for due, times, *_ in good],
        itl=[b - a for _, times, *_ in good for a, b in itertools.pairwise(times)],
        tokens_in=sum(u.get("prompt_tokens", 0) for u in usage),
        tokens_out=sum(u.get("completion_tokens", 0) for u in usage),
    )
    cached = sum((u.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for u in usage)
    return outcome.summary() | {"ok": len(good), "wrong_count": wrong, "cached_in": cached, "run_s": round(time.perf_counter() - start, 2)}


class Rounds:
    """Windows of the machine's limits between runs, and the floor of each run's workload at the mean of its two windows."""

    def __init__(self, model: Path, client: ModuleType, threads: int) -> None:
        self.meter = Meter(threads)
        self.model = floor.Model.of(model)
        self.count = floor.counter(model)
        self.client = client
        self._before = self.meter.window()

    def run(self, work: Callable[[], Row], options: list[str]) -> Row:
        """`work` between two windows: its row with the limits and the floor beside it."""
        row = work()
        after = self.meter.window()
        limits, self._before = self._before.mean(after), after
        settings = self.client.parse(["-", "-", *options])
        jobs, _ = self.client.workload(settings)
        lengths = [(self.count(prompt), output) for prompt, output in jobs]
        bound = floor.simulate(self.model, lengths, settings.concurrency, limits).summary()
        return row | {"limits": asdict(limits), "floor": bound, "of_floor": round(row["out_tps"] / bound["out_tps"], 3)}

    def refresh(self) -> None:
        self._before = self.meter.window()


def requests_for(concurrency: int, given: int | None) -> int:
    return given or min(96, max(20, 4 * concurrency))


def append(path: Path | None, row: Row) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def medians(rows: list[Row], keys: list[str]) -> Row:
    return {key: statistics.median(row[key] for row in rows) for key in keys}


LATENCIES = ["ttft_p50", "ttft_p95", "itl_p50", "itl_p95"]


def report(rows: list[Row]) -> None:
    print(
        f"{'conc':>4} {'rounds':>6} {'requests':>8} {'tok/s':>8} {'floor':>8} {'of floor':>8}  " + "  ".join(f"{n:>9}" for n in LATENCIES)
    )
    for concurrency in sorted({row["concurrency"] for row in rows}):
        chosen = [row for row in rows if row["concurrency"] == concurrency]
        typical = medians(chosen, ["out_tps", "of_floor", *LATENCIES])
        bound = statistics.median(row["floor"]["out_tps"] for row in chosen)
        values = "  ".join(f"{typical[name]:9.2f}" for name in LATENCIES)
        count = sum(row["ok"] for row in chosen)
        print(f"{concurrency:4} {len(chosen):6} {count:8} {typical['out_tps']:8.1f} {bound:8.1f} {typical['of_floor']:8.1%}  {values}")
    cached, wrong = sum(row["cached_in"] for row in rows), sum(row["wrong_count"] for row in rows)
    print(f"cached prompt tokens {cached}, answers of another length than asked {wrong}")


def add_rounds(parser: argparse.ArgumentParser) -> None:
    floor.add_workload(parser)
    parser.add_argument("--concurrency", type=int, action="append", help="may be given several times (1, 8, 32)")
    parser.add_argument("--requests", type=int, help="a round (four times the concurrency, from 20 to 96)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append each round as a line of JSON")
    parser.add_argument("--serve-flags", default="", help="for `headrace serve`, in one word")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rounds(parser)
    a = parser.parse_args()
    path = a.model or default_model_path()
    client = floor.load_client(a.client)
    rows: list[Row] = []
    with serving(path, a.serve_flags.split()) as (server, ready_s):
        rounds = Rounds(path, client, a.threads)
        for _ in range(a.rounds):
            for concurrency in a.concurrency or [1, 8, 32]:
                seed = random.randrange(10**6)
                options = floor.client_options(a, concurrency, requests_for(concurrency, a.requests), seed)
                row = rounds.run(lambda options=options: drive(client, server, options), options)
                rows.append({"server": "headrace", "concurrency": concurrency, "seed": seed, **row})
                append(a.out, rows[-1])
    if a.json:
        print("\n".join(json.dumps(row) for row in rows))
        return
    print(f"{path.name}, ready after {ready_s:.2f} s")
    report(rows)


if __name__ == "__main__":
    main()
