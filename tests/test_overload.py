"""Ten times more than the engine can do: it keeps working at its rate, who is let in is served in time, and the rest hears so at once."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import pytest
from scripted_engine import ServerProcess, wait_for

TOKENS, BATCH, STEP_S = 10, 4, 0.01
CAPACITY = BATCH / (TOKENS * STEP_S)  # requests a second, if a step took no longer than it sleeps
LIMIT_S = 0.5
BODY = {"prompt": "abcdefghij", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


class Seen:
    def __init__(self) -> None:
        self.waits: list[float] = []  # of the admitted, as their answers tell, in ms
        self.decodes: list[float] = []
        self.refused: list[tuple[dict[str, str], dict[str, Any]]] = []


async def ask(port: int, body: bytes, seen: Seen) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    top, _, content = answer.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    told = json.loads(content)
    if status.startswith("HTTP/1.1 200"):
        seen.waits.append(told["timings"]["queue"])
        seen.decodes.append(told["timings"]["decode"])
    else:
        assert status.startswith("HTTP/1.1 429"), answer
        seen.refused.append((dict(line.lower().split(": ", 1) for line in lines), told["error"]))


async def load(port: int, rate: float, seconds: float) -> Seen:
    seen, loop, body = Seen(), asyncio.get_running_loop(), json.dumps(BODY).encode()
    start, tasks = loop.time(), []
    for i in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, start + i / rate - loop.time()))
        tasks.append(asyncio.create_task(ask(port, body, seen)))
    await asyncio.gather(*tasks)
    return seen


def test_ten_times_too_much() -> None:
    seconds = 2.0
    with ServerProcess(
        "--step-ms", str(1000 * STEP_S), "--max-batch-size", str(BATCH), "--max-queue-time", str(LIMIT_S), "--max-waiting", "200"
    ) as server:
        start = time.monotonic()
        alone = asyncio.run(load(server.port, 0.5 * CAPACITY, 1.0))
        assert not alone.refused
        seen = asyncio.run(load(server.port, 10 * CAPACITY, seconds))
        elapsed = time.monotonic() - start
        assert len(seen.waits) + len(seen.refused) == int(10 * CAPACITY * seconds)
        # The engine was never without work: it took what it can take in that time and in the queue's, however slow this machine is.
        steps = server.metric("engine_steps_total")
        assert (len(alone.waits) + len(seen.waits)) * TOKENS / BATCH >= 0.75 * steps - 1.0 / STEP_S
        assert steps <= elapsed / STEP_S
        assert server.metric("refusal_seconds_count") == len(seen.refused)
        assert server.metric("requests_total", outcome="refused") == len(seen.refused)
        assert server.metric("request_errors_total", code="queue_time_exceeded") == len(seen.refused)
        assert server.metric("requests_total", outcome="length") == len(alone.waits) + len(seen.waits)
        # Refused in the API process, before anything of them was worked on.
        assert server.metric("prompt_tokens_total") == 10 * (len(alone.waits) + len(seen.waits))
    seen.waits.sort()
    assert seen.waits[len(seen.waits) // 2] <= 1.5 * 1000 * LIMIT_S
    assert seen.waits[-1] <= 4 * 1000 * LIMIT_S
    for headers, error in seen.refused:
        assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "queue_time_exceeded", None)
        assert "in the queue, the limit is 0.5 s" in error["message"]
        assert int(headers["retry-after"]) >= 1
        assert 1000 <= int(headers["retry-after-ms"]) <= 1000 * int(headers["retry-after"])


@pytest.mark.parametrize("room", [1, 16])
def test_a_full_queue_refuses_exactly_what_is_too_much(room: int) -> None:
    """Two hundred at once: as many as run and wait are answered, all others refused, and nobody is forgotten."""

    async def burst(port: int) -> Seen:
        seen, body = Seen(), json.dumps(BODY).encode()
        await asyncio.gather(*(ask(port, body, seen) for _ in range(200)))
        return seen

    with ServerProcess("--step-ms", "20", "--max-batch-size", str(BATCH), "--max-waiting", str(room)) as server:
        seen = asyncio.run(burst(server.port))
        body = json.dumps(BODY | {"max_tokens": 2000}).encode()
        left = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(BATCH + 1)]
        for number, sock in enumerate(left, 1):  # one at a time: there may be room for one only
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            wait_for(lambda number=number: server.metric("requests_running") == min(number, BATCH))
            wait_for(lambda number=number: server.get("/queue")[1]["waiting"] == number // (BATCH + 1))
        for sock in left:
            sock.close()
        wait_for(lambda: server.metric("requests_open") == server.metric("requests_waiting") == 0)
        assert server.get("/queue")[1] == {"object": "queue", "waiting": 0, "expected_wait_ms": 0.0, "data": []}
    assert len(seen.waits) + len(seen.refused) == 200
    assert len(seen.waits) >= room
    assert {error["code"] for _, error in seen.refused} == {"rate_limit_exceeded"}
    assert all(headers["retry-after"] == "1" for headers, _ in seen.refused)
    assert all(f"the limit is {room}" in error["message"] for _, error in seen.refused)
