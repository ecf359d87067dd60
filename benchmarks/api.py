"""What the API process costs: its CPU a token and a request, with a scripted engine in place of kernels.

    python benchmarks/api.py [--streams 32] [--rate 3000] [--seconds 20] [--tokens 200] [--chat] [--profile FILE]

User and system time of the API process alone, from the kernel's accounting, over the tokens that arrived at TCP clients. On a machine of
two cores this time is taken from the kernels. Beside it the same bytes written by an event loop that does nothing else: the floor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from scripted_engine import ServerProcess

TICKS = os.sysconf("SC_CLK_TCK")
TEXT = "The quick brown fox jumps over the lazy dog. "


def cpu_seconds(pid: int) -> tuple[float, float]:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) / TICKS, int(fields[12]) / TICKS


async def client(port: int, path: str, body: bytes, until: float) -> tuple[int, int]:
    """Stream after stream over fresh connections; tokens and requests."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    tokens = requests = 0
    while time.monotonic() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        while data := await reader.read(1 << 16):
            tokens += data.count(b'"text":"') + data.count(b'"delta":{"content":"')
        requests += 1
        writer.close()
    return tokens, requests


async def measure(server: ServerProcess, options: argparse.Namespace, tokens: int, seconds: float) -> dict[str, float]:
    """One load, after a short one to warm up."""
    path = "/v1/chat/completions" if options.chat else "/v1/completions"
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT}]} if options.chat else {"prompt": TEXT}
    ask |= {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(ask).encode()

    async def load(seconds: float) -> tuple[int, int]:
        until = time.monotonic() + seconds
        done = await asyncio.gather(*(client(server.port, path, body, until) for _ in range(options.streams)))
        return sum(count for count, _ in done), sum(count for _, count in done)

    await load(0.3)
    before, start = cpu_seconds(server.process.pid), time.monotonic()
    got, requests = await load(seconds)
    after, wall = cpu_seconds(server.process.pid), time.monotonic() - start
    user, system = after[0] - before[0], after[1] - before[1]
    return {"tokens": got, "requests": requests, "rate": got / wall, "user": user, "system": system}


async def floor(options: argparse.Namespace) -> tuple[float, float]:
    """User and system seconds a write, of a loop that writes a chunk to each of the streams at the same rate."""
    loop = asyncio.get_running_loop()
    transports: list[Any] = []
    all_here = asyncio.Event()

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(transport)
            if len(transports) == options.streams:
                all_here.set()

    server = await loop.create_server(Server, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code = (
        "import asyncio\nasync def one():\n r, w = await asyncio.open_connection('127.0.0.1', PORT)\n while await r.read(65536): pass\n"
        "async def main(): await asyncio.gather(*(one() for _ in range(STREAMS)))\nasyncio.run(main())"
    )
    source = code.replace("PORT", str(port)).replace("STREAMS", str(options.streams))
    reader = await asyncio.create_subprocess_exec(sys.executable, "-c", source)
    await asyncio.wait_for(all_here.wait(), 10)
    chunk, writes = b"x" * 230, 0
    before, end = os.times(), loop.time() + 3
    while loop.time() < end:
        await asyncio.sleep(options.streams / options.rate)
        for transport in transports:
            transport.write(chunk)
            writes += 1
    after = os.times()
    for transport in transports:
        transport.close()
    server.close()
    await reader.wait()
    return (after.user - before.user) / writes, (after.system - before.system) / writes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rate", type=float, default=3000, help="tokens a second the engine makes in all")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--tokens", type=int, default=200, help="a stream")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--profile", default="", help="write cProfile data of the API process here (and be slower)")
    options = parser.parse_args()
    step_ms = 1000 * options.streams / options.rate
    extra = ["--profile", options.profile] if options.profile else []
    # The engine's own work, and waking up, take a while beside its sleep.
    with ServerProcess("--step-ms", str(max(0.1, step_ms - 0.6)), *extra) as server:
        long = uvloop.run(measure(server, options, options.tokens, options.seconds))
        short = uvloop.run(measure(server, options, 2, options.seconds / 4))
    user, system = uvloop.run(floor(options))
    each = 1e6 / long["tokens"]
    total = each * (long["user"] + long["system"])
    print(
        f"{options.streams} streams of {options.tokens} at {long['rate']:.0f} tok/s: {each * long['user']:.1f} user + "
        f"{each * long['system']:.1f} system = {total:.1f} µs a token, requests included"
    )
    request = 1e6 * (short["user"] + short["system"]) / short["requests"]
    print(f"{short['requests']} requests of 2 tokens: {request:.0f} µs a request, connection included")
    print(f"floor: {1e6 * user:.1f} user + {1e6 * system:.1f} system = {1e6 * (user + system):.1f} µs a write")


if __name__ == "__main__":
    main()
