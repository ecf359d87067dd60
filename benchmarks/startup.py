"""From the start of `headrace serve` to ready, and the first request beside the steady ones.

    python benchmarks/startup.py [MODEL] [--rounds 5] [--json]

A round reads the file once (its pages dropped from the cache first, where the system lets them go), starts the server with the file in that
same state, asks once, then asks eight times more. Two states: cold, and warm (the file in the cache). Allowed: 1.5 s, and for files over
300 MB 1 s and 1.3 times the reading; the first request's time to its first token at most 1.5 times the steady one's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any

from serving import Server, free_port

from headrace.models.hub import default_model_path

LARGE = 300 << 20
CHUNK = 4 << 20


def drop(path: Path) -> None:
    """Ask the system to forget the file's pages."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)  # pages that are not written yet cannot go
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def read_seconds(path: Path) -> float:
    buffer = bytearray(CHUNK)
    begun = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - begun


def first_token_seconds(server: Server, text: str) -> float:
    body = {"model": server.model, "prompt": text, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
    )
    begun = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.readline()
        seconds = time.perf_counter() - begun
        answer.read()
    return seconds


def measure(path: Path, state: str, flags: list[str]) -> dict[str, Any]:
    if state == "cold":
        drop(path)
    reading = read_seconds(path)
    if state == "cold":
        drop(path)
    server = Server(path, free_port(), flags)
    try:
        ready = server.wait_until_ready()
        text = [f"{i} " + "the river runs down to the sea " * 5 for i in range(9)]  # nothing shared from the first word on
        first, *later = [first_token_seconds(server, each) for each in text]
    finally:
        server.stop()
    allowed = 1.5 if path.stat().st_size < LARGE else 1 + 1.3 * reading
    return {
        "state": state,
        "read_s": reading,
        "ready_s": ready,
        "allowed_s": allowed,
        "first_s": first,
        "steady_s": statistics.median(later),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="GGUF file (the default model)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve-flags", default="", help="for `headrace serve`, in one word")
    parser.add_argument("--json", action="store_true", help="one JSON object a round")
    a = parser.parse_args()
    path = a.model or default_model_path()
    rows = [measure(path, state, a.serve_flags.split()) for _ in range(a.rounds) for state in ("cold", "warm")]
    if a.json:
        print("\n".join(json.dumps(row) for row in rows))
        return
    print(f"{path.name}, {path.stat().st_size / 1e6:.0f} MB, medians of {a.rounds} rounds")
    for state in ("cold", "warm"):
        of = {name: statistics.median(row[name] for row in rows if row["state"] == state) for name in rows[0] if name != "state"}
        print(
            f"{state}: file read in {of['read_s']:.2f} s, ready after {of['ready_s']:.2f} s (allowed {of['allowed_s']:.2f}); "
            f"first token of the first request {1e3 * of['first_s']:.0f} ms, of later ones {1e3 * of['steady_s']:.0f} ms "
            f"({of['first_s'] / of['steady_s']:.2f} times)"
        )


if __name__ == "__main__":
    main()
