"""Peak memory of both server processes in a run that fills the KV pool, beside the ledger the server printed before it loaded.

    python benchmarks/memory.py [MODEL] [--memory 2GiB] [--concurrency 24] [--requests 96] [--json]

Long prompts, each different, until every block has been written; PSS of the processes is read throughout. The ledger is to be a bound
that is also near: the peak at most its total, and at least 92 % of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from serving import Server, get, serving

from headrace.models.hub import default_model_path


def processes(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += processes(int(child))
    return found


def pss(pid: int) -> int:
    """Bytes of a process, shared pages by their share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"no Pss in smaps_rollup of {pid}")


class Peak:
    """Reads PSS until stopped."""

    def __init__(self, pid: int) -> None:
        self.pids = processes(pid)
        self.total, self.parts = 0, [0] * len(self.pids)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            parts = [pss(pid) for pid in self.pids]
            if sum(parts) > self.total:
                self.total, self.parts = sum(parts), parts

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def gauges(server: Server, name: str, label: str) -> dict[str, float]:
    """Values of a metric by one of its labels."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=5) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith(f"headrace_{name}{{")]
    return {line.split(f'{label}="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


async def fill(server: Server, a: argparse.Namespace, context: int) -> None:
    import aiohttp

    rng, model = random.Random(a.seed), server.model
    remaining = iter(range(a.requests))
    timeout = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def slot() -> None:
            for _ in remaining:
                prompt = [rng.randrange(1000, 40000) for _ in range(rng.randrange(context // 8, context // 4))]
                body = {"model": model, "prompt": prompt, "max_tokens": 32, "ignore_eos": True, "stream": True, "logprobs": 5}
                async with session.post(f"{server.url}/v1/completions", json=body) as response:
                    text = await response.text()
                    if response.status != 200:
                        raise SystemExit(f"{response.status} {text[:200]}")

        await asyncio.gather(*(slot() for _ in range(a.concurrency)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="GGUF file or folder (the default model)")
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    with serving(a.model or default_model_path(), ["--memory", a.memory]) as (server, _):
        plan = gauges(server, "memory_planned_bytes", "purpose")
        peak, begun = Peak(server.process.pid), time.perf_counter()
        asyncio.run(fill(server, a, int(get(f"{server.url}/v1/models")["data"][0].get("max_model_len", 8192))))
        peak.stop()
        blocks = gauges(server, "kv_blocks", "state")
    found: dict[str, Any] = {"seed": a.seed, "planned": plan, "peak_pss": peak.total, "by_process": peak.parts}
    found |= {"of_planned": round(peak.total / plan["total"], 4), "blocks": blocks, "seconds": round(time.perf_counter() - begun, 1)}
    if a.json:
        print(json.dumps(found))
        return
    mib = 1 << 20
    print("ledger  " + ", ".join(f"{name} {size / mib:.0f} MiB" for name, size in plan.items()))
    parts = " + ".join(f"{part / mib:.0f}" for part in peak.parts)
    print(f"peak    {peak.total / mib:.0f} MiB PSS ({parts}), {found['of_planned']:.1%} of the ledger")
    print("blocks at the end  " + ", ".join(f"{state} {count:.0f}" for state, count in blocks.items()))


if __name__ == "__main__":
    main()
