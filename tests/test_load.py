"""The load test against a scripted server: times against the server's own, what fails and why, and the command."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from headrace.bench.client import Client, Target
from headrace.bench.drive import Run, closed_loop, open_loop, probe
from headrace.bench.lengths import Lengths
from headrace.bench.prompts import Conversation, Ruler
from headrace.bench.record import Record
from headrace.bench.stream import Answer
from headrace.bench.workload import Asking, Job, drawn
from headrace.errors import UsageError
from tests.load_server import DONE, ROLE, Exchange, Reply, Server, answer, delta, event, serving, usage
from tests.test_front import PEM

EXACT_S = 0.002
ASKING = Asking("scripted")
JOBS = drawn(Lengths("fixed", 20), Lengths("fixed", 5), 0.0, Ruler(), 1)


def drive(script: Callable[[int, Any], Reply], times: list[float], **target: Any) -> tuple[Run, Server, float]:
    """An open loop; (what it left, the server, the run's zero on the server's clock)."""

    async def go() -> tuple[Run, Server, float]:
        async with serving(script) as server:
            client = Client(Target.parse(server.url, **target))
            found = await open_loop(client, ASKING, JOBS, times)
            client.close()
            return found, server, client.begun

    return asyncio.run(go())


def one(reply: Reply, **target: Any) -> Record:
    return drive(lambda number, body: reply, [0.0], **target)[0].records[0]


def off(record: Record, exchange: Exchange, texts: list[int], zero: float) -> float:
    """The greatest difference between the client's times and the server's; `texts` are the parts of the reply with text."""
    there = [exchange.sent[i] - zero for i in texts]
    here = record.times
    assert len(here) == len(there)
    pairs = [*zip(here, there, strict=True), (record.end, exchange.sent[-1] - zero), (record.sent, exchange.came - zero)]
    return max(abs((a or 0.0) - b) for a, b in pairs)


def parts_of(number: int) -> tuple[Reply, list[int], list[int]]:
    """A reply with a role first, a stall of 0.3 s, several tokens a chunk, chunks in pieces; (it, its text parts, their tokens)."""
    text = [delta(f"word{number} ", usage={"completion_tokens": n}) for n in (1, 2, 5, 6)]
    waits = (0.02, 0.01, 0.3, 0.015)
    parts = [(0.01, ROLE), *zip(waits, text, strict=True), (0.0, delta(None, finish="length")), (0.0, usage(6)), (0.0, DONE)]
    return Reply(parts, bytewise=number % 2 == 1), [1, 2, 3, 4], [1, 1, 3, 1]


def test_every_time_is_the_servers_within_two_milliseconds() -> None:
    """A machine that pauses does so between the two clocks too, so each request of the schedule must be exact in one run of ten."""
    schedule = [0.05 + 0.06 * i for i in range(8)]
    best = [1e9] * len(schedule)
    for _ in range(10):
        found, server, zero = drive(lambda number, body: parts_of(number)[0], schedule)
        assert [record.counts for record in found.records] == [[1, 1, 3, 1]] * 8
        assert [record.error for record in found.records] == [""] * 8
        assert [record.scheduled for record in found.records] == schedule
        by_text = {exchange.body["messages"][0]["content"]: exchange for exchange in server.log}  # they overlap
        for i, record in enumerate(found.records):
            exchange = by_text[JOBS(record.index).conversation.turns[0]["content"]]
            late = (record.started or 1e9) - record.scheduled
            best[i] = min(best[i], max(late, off(record, exchange, [1, 2, 3, 4], zero)))
        if max(best) < EXACT_S:
            return
    pytest.fail(f"in ten runs never exact: off by {', '.join(f'{1e3 * error:.2f}' for error in best)} ms")


def test_an_open_loop_does_not_wait_for_the_server() -> None:
    """The server holds every answer back until all requests are there: a loop that waited would never end."""
    everyone = asyncio.Event()

    def script(number: int, body: Any) -> Reply:
        if number == 19:
            everyone.set()
        return Reply([(everyone, ROLE), (0.0, delta("a")), (0.0, usage(1)), (0.0, DONE)])

    found, server, zero = drive(script, [0.01 * i for i in range(20)], timeout_s=20.0)
    came = max(exchange.came - zero for exchange in server.log)
    assert all(record.ok for record in found.records)
    assert all(record.times[0] >= came for record in found.records)
    assert (found.open, found.done, found.failed) == (0, 20, 0)


def test_connections_are_kept_and_a_stale_one_is_no_failure() -> None:
    async def go() -> tuple[list[Record], int]:
        async with serving(lambda number, body: answer("a")) as server:
            client = Client(Target.parse(server.url))
            records = [Record(i) for i in range(4)]
            for record in records[:3]:
                await client.send(Answer(record), ASKING.body([{"role": "user", "content": "x"}], 5))
            assert server.connections == 1
            client._idle[0].abort("as a server that is tired of waiting would")
            client._idle[0].is_open = True  # nobody has heard of it yet
            await client.send(Answer(records[3]), ASKING.body([{"role": "user", "content": "x"}], 5))
            client.close()
            return records, server.connections

    records, connections = asyncio.run(go())
    assert [record.error for record in records] == [""] * 4
    assert connections == 2


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply([(0, b'{"error": {"code": "rate_limit_exceeded"}}')], status=429), "HTTP 429: rate_limit_exceeded"),
        (Reply([(0, b"<html>oops")], status=500), "HTTP 500"),
        (Reply([(0, ROLE), (0, delta("a"))], cut=True), "connection closed early"),
        (Reply([(0, ROLE), (0, delta("a"))]), "the stream ended early"),
        (Reply([(0, ROLE), (0, delta("a")), (0, event(error={"code": "engine_error"}))]), "error in the stream: engine_error"),
        (Reply([(0, ROLE), (0, delta(None, finish="stop")), (0, DONE)]), "empty answer"),
        (Reply([(0, b'{"choices": []}')]), "no event stream"),
        (Reply([(0, ROLE), (0.5, delta("a"))]), "timeout"),
    ],
)
def test_what_fails_says_why(reply: Reply, error: str) -> None:
    record = one(reply, timeout_s=0.2 if error == "timeout" else 20.0)
    assert record.error == error
    assert not record.ok
    assert record.end is not None


def test_a_failure_before_a_connection() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, not listening
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"

        async def go() -> Record:
            record = Record(0)
            await Client(Target.parse(url)).send(Answer(record), b"{}")
            return record

        record = asyncio.run(go())
        assert record.error.startswith("no connection: ")
        assert record.sent is None
        with pytest.raises(UsageError, match="cannot be reached"):
            asyncio.run(Client(Target.parse(url)).models())


def answered_with(answer: bytes) -> Record:
    """What is recorded of a request whose connection brings these bytes and ends."""

    async def go() -> Record:
        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        record = Record(0)
        await Client(Target.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")).send(Answer(record), b"{}")
        server.close()
        return record

    return asyncio.run(go())


def test_an_answer_that_is_not_http() -> None:
    assert answered_with(b"SSH-2.0 hello\r\n\r\n").error == "the answer is not HTTP"


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    record = answered_with(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + ROLE + delta("a") + DONE)
    assert (record.error, record.tokens) == ("", 1)


def test_tls_and_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)

    async def go() -> tuple[Record, Server]:
        async with serving(lambda number, body: answer("a"), ssl=context) as server:
            client = Client(Target.parse(server.url, api_key="secret"))
            record = Record(0)
            await client.send(Answer(record), ASKING.body([{"role": "user", "content": "x"}], 5))
            client.close()
            return record, server

    assert "certificate" in asyncio.run(go())[0].error.lower()
    monkeypatch.setenv("SSL_CERT_FILE", str(PEM))
    record, server = asyncio.run(go())
    assert record.error == ""
    assert server.log[0].headers["authorization"] == "Bearer secret"


def test_a_closed_loop_has_no_more_open_than_its_users() -> None:
    peak = 0

    def script(number: int, body: Any) -> Reply:
        return answer("a", "b")

    async def go() -> tuple[Run, Server]:
        nonlocal peak

        def watch(run: Run) -> None:
            nonlocal peak
            peak = max(peak, run.open)

        async with serving(script) as server:
            client = Client(Target.parse(server.url))
            found = await closed_loop(client, ASKING, JOBS, 3, count=30, watch=watch)
            client.close()
            return found, server

    found, server = asyncio.run(go())
    assert len(found.records) == found.done == 30
    assert server.connections == 3
    assert peak <= 3
    events = sorted([(record.sent or 0, 1) for record in found.records] + [(record.end or 0, -1) for record in found.records])
    level = 0
    for _, change in events:
        level += change
        assert level <= 3
    assert sorted(record.index for record in found.records) == list(range(30))


def test_a_closed_loop_ends_in_time() -> None:
    async def go() -> Run:
        async with serving(lambda number, body: answer("a", gap=0.02)) as server:
            client = Client(Target.parse(server.url))
            found = await closed_loop(client, ASKING, JOBS, 2, seconds=0.3, think_s=0.01)
            client.close()
            return found

    found = asyncio.run(go())
    assert 2 <= len(found.records) <= 30
    assert all(record.scheduled < 0.3 for record in found.records)


def talk(number: int) -> Job:
    turns = tuple({"role": "user", "content": text} for text in ("one", "two", "three"))
    return Job(Conversation(({"role": "system", "content": "be brief"},), turns), 0, 5)


@pytest.mark.parametrize("broken", [False, True])
def test_a_turn_waits_for_the_answer_before_it_and_quotes_it(broken: bool) -> None:
    def script(number: int, body: Any) -> Reply:
        return Reply([], status=500) if broken and number == 1 else answer("so ", "it is")

    async def go() -> tuple[Run, Server]:
        async with serving(script) as server:
            client = Client(Target.parse(server.url))
            found = await open_loop(client, ASKING, talk, [0.0], think_s=0.05)
            client.close()
            return found, server

    found, server = asyncio.run(go())
    if broken:
        assert [record.error for record in found.records] == ["", "HTTP 500", "an earlier turn failed"]
        assert (found.done, found.failed) == (1, 2)
        return
    said = [[message["content"] for message in exchange.body["messages"]] for exchange in server.log]
    assert said[2] == ["be brief", "one", "so it is", "two", "so it is", "three"]
    for before, after in pairwise(found.records):
        assert 0.05 <= after.scheduled - (before.end or 0) < 0.5
    assert [record.turn for record in found.records] == [0, 1, 2]


def test_how_a_server_counts_is_found() -> None:
    async def go() -> Ruler:
        async with serving(lambda number, body: answer("a")) as server:
            client = Client(Target.parse(server.url))
            found = await probe(client, ASKING)
            client.close()
            return found

    assert asyncio.run(go()) == Ruler(5.0, 1.0)


@pytest.mark.parametrize(
    ("url", "endpoint", "host", "port", "path", "base"),
    [
        ("http://h:8000", "chat", "h", 8000, "/v1/chat/completions", ""),
        ("h:8000/", "completions", "h", 8000, "/v1/completions", ""),
        ("https://h/v1", "chat", "h", 443, "/v1/chat/completions", ""),
        ("https://h/openai/v1/chat/completions", "chat", "h", 443, "/openai/v1/chat/completions", "/openai"),
        ("http://h/v1/completions", "chat", "h", 80, "/v1/chat/completions", ""),
        ("http://[::1]:9/v1/", "chat", "::1", 9, "/v1/chat/completions", ""),
    ],
)
def test_urls(url: str, endpoint: str, host: str, port: int, path: str, base: str) -> None:
    target = Target.parse(url, endpoint=endpoint)
    assert (target.host, target.port, target.path, target.base) == (host, port, path, base)


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "http://h:port", "http://h?x=1", "http://h:99999", "http://h/a b"])
def test_urls_that_cannot_be(url: str) -> None:
    with pytest.raises(UsageError, match="URL"):
        Target.parse(url)


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(Target.parse("http://h", api_key="secret"))
    with pytest.raises(UsageError, match="--api-key"):
        Target.parse("http://h", api_key="two\r\nlines")
