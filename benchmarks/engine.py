"""The engine without HTTP or scheduler, beside the sum of its operations' bounds: prefill and decode steps of a model.

    python benchmarks/engine.py [MODEL] [--rounds 5] [--prefill 512] [--decode 1x128 --decode 32x300] [--profile] [--json]

Limits are measured just before and after each round; the figure is the median over rounds of bound over measured. One JSON line a case
carries commit, CPU and limits.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
from pathlib import Path
from typing import Any

from floor import default_model

from headrace.config import BLOCK_TOKENS, EngineConfig
from headrace.executors.native import NativeExecutor
from headrace.executors.profile import Bench, Measured
from headrace.kernels import native
from headrace.models.loader import load_model


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def shape(text: str) -> tuple[int, int]:
    rows, _, context = text.partition("x")
    return int(rows), int(context)


def row_of(measured: Measured) -> dict[str, Any]:
    limits = measured.limits
    if limits is None:
        raise SystemExit(f"{measured.name}: no limits were measured")
    return {
        "case": measured.name,
        "tok_s": round(measured.tokens / (measured.step_s + measured.sample_s), 1),
        "step_ms": round(1e3 * measured.step_s, 3),
        "sample_ms": round(1e3 * measured.sample_s, 3),
        "bound_ms": round(1e3 * measured.bound_s, 3),
        "of_bound": round(measured.ratio, 3),
        "limits": {"read_GBps": limits.read / 1e9, "int8_GMACps": limits.int8 / 1e9, "bf16_GMACps": limits.bf16 / 1e9},
        "operations": {name: [round(1e3 * seconds, 3), round(1e3 * bound, 3)] for name, seconds, bound in measured.operations},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="GGUF file or folder (the default model)")
    parser.add_argument("--level", default="auto", choices=["auto", "bf16", "int8", "int4"])
    parser.add_argument("--prefill", type=int, action="append", help="tokens of a prompt (512)")
    parser.add_argument("--decode", type=shape, action="append", help="samples x context (1x128, 32x300)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--profile", action="store_true", help="also where a step's time goes, per operation")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    prefills, decodes = a.prefill or [512], a.decode or [(1, 128), (32, 300)]
    path = a.model or default_model()
    model = load_model(path, a.level)
    context = max([*prefills, *(tokens for _, tokens in decodes)]) + BLOCK_TOKENS
    rows = max([1, *(count for count, _ in decodes)])
    blocks = max([-(-context // BLOCK_TOKENS), *(count * -(-(tokens + 1) // BLOCK_TOKENS) for count, tokens in decodes)])
    config = EngineConfig(
        context_length=context, num_blocks=blocks, max_batch_size=rows, max_batch_tokens=max([256, *prefills]), prefix_cache=False
    )
    executor = NativeExecutor(model, config, a.threads)
    bench = Bench(executor, a.threads, a.seed)
    results = [bench.prefill(tokens, a.rounds) for tokens in prefills]
    results += [bench.decode(count, tokens, a.rounds) for count, tokens in decodes]
    if a.json:
        about = {
            "commit": commit(),
            "cpu": cpu(),
            "isa": native.level(),
            "threads": a.threads,
            "model": path.name,
            "level": a.level,
            "seed": a.seed,
        }
        print("\n".join(json.dumps(about | row_of(result)) for result in results))
        return
    print(f"{path.name} at {native.level()}, {a.threads} threads, {cpu()}, {commit()}")
    print(f"{'case':16} {'tok/s':>9} {'step ms':>9} {'sample':>8} {'bound ms':>9} {'of bound':>8}  limits: GB/s read, GMAC/s int8, bf16")
    for result in results:
        row = row_of(result)
        limits = ", ".join(f"{value:.0f}" for value in row["limits"].values())
        figures = f"{row['tok_s']:9.1f} {row['step_ms']:9.3f} {row['sample_ms']:8.3f} {row['bound_ms']:9.3f} {row['of_bound']:8.1%}"
        print(f"{row['case']:16} {figures}  {limits}")
        if a.profile:
            for name, (spent, bound) in row["operations"].items():
                print(f"  {name:14} {'':9} {spent:9.3f} {'':8} {bound:9.3f}")


if __name__ == "__main__":
    main()
