"""What the load test costs a streamed token: CPU time of the client's process by the operating system, the server in another process.

    python benchmarks/load_client.py [--streams 50] [--rate 40] [--seconds 10] [--rounds 3]

`streams` answers at once, each of `rate` tokens a second, one a chunk in the form of an OpenAI-compatible server. The promise is 2,000
tokens a second at under 20 % of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import uvloop

from headrace.bench.client import Client, Target
from headrace.bench.drive import Run, closed_loop
from headrace.bench.lengths import Lengths
from headrace.bench.prompts import Ruler
from headrace.bench.summary import summary
from headrace.bench.window import find
from headrace.bench.workload import Asking, drawn

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = {"id": "chatcmpl-4e2c262877c1c7e104c7c0f2", "object": "chat.completion.chunk", "created": 1796641239, "model": "scripted"}


def framed(choices: list[object], usage: object = None) -> bytes:
    body = b"data: " + json.dumps(CHUNK | {"choices": choices, "usage": usage}, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(body), body)


TOKEN = framed([{"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}])


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rate: float) -> None:
    """Requests of a connection, each token written when it is due."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            tokens = json.loads(await reader.readexactly(length))["max_tokens"]
            writer.write(HEAD)
            due = time.perf_counter()
            for _ in range(tokens):
                due += 1 / rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                writer.write(TOKEN)
            end = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
            writer.write(framed([], {"prompt_tokens": 20, "completion_tokens": tokens}) + end)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def serve(rate: float, port: Connection) -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda reader, writer: answer(reader, writer, rate), "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(run())


async def load(port: int, streams: int, tokens: int) -> Run:
    client = Client(Target.parse(f"http://127.0.0.1:{port}"))
    jobs = drawn(Lengths("fixed", 20), Lengths("fixed", tokens), 0.0, Ruler(), 1)
    run = await closed_loop(client, Asking("scripted"), jobs, streams, count=2 * streams)
    client.close()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--rate", type=float, default=40.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(options.rate, there), daemon=True)
    server.start()
    port, shares = here.recv(), []
    try:
        for _ in range(options.rounds):
            run = uvloop.run(load(port, options.streams, round(options.rate * options.seconds / 2)))
            told = summary(run, find(run.records, is_level=False))
            tokens = sum(record.tokens for record in run.records)
            shares.append(2000 * run.cpu_s / tokens)
            print(
                f"{tokens / run.wall_s:,.0f} tokens/s over {options.streams} streams: {run.cpu_s / run.wall_s:.1%} of a core, "
                f"{1e6 * run.cpu_s / tokens:.1f} us a token; stamped late by p99 {told['client']['delay_p99_ms']} ms"
            )
    finally:
        server.terminate()
    print(f"at 2,000 tokens/s: {statistics.median(shares):.1%} of a core (median of {options.rounds}; promised: under 20 %)")


if __name__ == "__main__":
    main()
