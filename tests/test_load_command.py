"""The command `headrace bench load`: what it prints and writes, its exit codes, and what it refuses."""

from __future__ import annotations

import csv
import json
import socket
import time
from pathlib import Path

import pytest

from tests.load_server import Reply, answer, apart
from tests.test_cli import run

DATA = Path(__file__).parent / "data"


def test_the_command(tmp_path: Path) -> None:
    page, lines = tmp_path / "load.html", tmp_path / "load.csv"
    with apart(lambda number, body: answer(*["a"] * body["max_tokens"], gap=0.001, prompt=25)) as server:
        arguments = ("bench", "load", server.url, "--rate", "200", "--requests", "60", "--in", "uniform:10,30", "--out", "6", "--seed", "5")
        done = run(*arguments, "--csv", str(lines), "--html", str(page), "--json", "--slo", "ttft=5000")
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["requests"], told["failed"], told["seed"], told["model"]) == (60, 0, 5, "scripted")
        assert told["asked"] == "in uniform:10,30, out 6"
        assert told["tokens"]["counted_by"] == {"usage": 60}
        assert told["tokens"]["answer_mean"] == 6
        assert len(list(csv.DictReader(lines.read_text().splitlines()))) == 60
        assert page.stat().st_size > 1 << 20
        words = [len(exchange.body["messages"][0]["content"].split()) for exchange in server.log]
        assert 5 <= min(words) <= max(words) <= 25  # the five of the template taken off
        bodies = [exchange.body for exchange in server.log]
        again = run(*arguments)
        assert again.returncode == 0
        assert "tokens/s out" in again.stdout
        # The same requests; which of two connections the server hears first is not ours to say.
        key = lambda body: body["messages"][0]["content"]  # noqa: E731
        assert sorted((exchange.body for exchange in server.log[60:]), key=key) == sorted(bodies, key=key)


def test_the_command_as_a_gate() -> None:
    with apart(lambda number, body: Reply([], status=500) if number % 2 else answer("a", "b", gap=0.001)) as server:
        load = ("bench", "load", server.url, "--concurrency", "2", "--requests", "20", "--slo", "ttft=5000")
        assert run(*load).returncode == 0
        missed = run(*load, "--gate")
        assert missed.returncode == 1
        assert "MISSED" in missed.stdout
        assert "10 x HTTP 500" in missed.stdout


def test_the_command_replays_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 400 * i, "input_length": 600, "output_length": 3, "hash_ids": [7, i]} for i in range(6)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    with apart(lambda number, body: answer("a", "b", "c", gap=0.001)) as server:
        begun = time.monotonic()
        done = run("bench", "load", server.url, "--trace", str(trace), "--time-scale", "10", "--json")
        assert done.returncode == 0, done.stderr
        assert 0.2 <= time.monotonic() - begun < 20
        texts = [exchange.body["messages"][0]["content"].split() for exchange in server.log]
    assert len({tuple(text[:512]) for text in texts}) == 1
    assert len({tuple(text[512:]) for text in texts}) == 6
    assert json.loads(done.stdout)["window"]["why"] == "the load was meant to change"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["--rate", "--concurrency"]),
        (("--rate", "1", "--concurrency", "2"), ["give one of"]),
        (("--rate", "-1"), ["--rate", "-1"]),
        (("--ramp", "5"), ["--ramp", "FROM:TO"]),
        (("--rate", "1", "--arrivals", "weibull"), ["--arrivals", "weibull"]),
        (("--concurrency", "1", "--burstiness", "2"), ["--burstiness"]),
        (("--rate", "1", "--requests", "5", "--duration", "5"), ["--duration"]),
        (("--rate", "1", "--duration", "0"), ["--duration"]),
        (("--rate", "1", "--in", "long"), ["--in", "long"]),
        (("--rate", "1", "--time-scale", "2"), ["--time-scale"]),
        (("--rate", "1", "--slo", "fast"), ["--slo", "fast"]),
        (("--rate", "1", "--gate"), ["--slo"]),
        (("--rate", "1", "--extra", "[]"), ["--extra"]),
        (("--rate", "1", "--endpoint", "images"), ["--endpoint"]),
        (("--rate", "1", "--prompts", "/no/such.jsonl"), ["/no/such.jsonl"]),
        (("--rate", "1", "--plan", "/no/such.json"), ["/no/such.json"]),
        (("--rate", "1", "--csv", "/no/such/dir.csv"), ["/no/such/dir.csv"]),
        (("--trace", "/no/such.csv"), ["--trace /no/such.csv"]),
        (("--trace", str(DATA / "agents.jsonl"), "--in", "5"), ["--trace and --in"]),
        (("--trace", str(DATA / "agents.jsonl"), "--shared", "0.5"), ["--shared"]),
        (("--rate", "1"), ["cannot be reached"]),
    ],
)
def test_what_cannot_be_is_one_line(arguments: tuple[str, ...], words: list[str]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        done = run("bench", "load", f"http://127.0.0.1:{nobody.getsockname()[1]}", *arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words), done.stderr


def test_a_server_that_refuses_the_first_request() -> None:
    with apart(lambda number, body: answer("a")) as server:
        done = run("bench", "load", server.url, "--rate", "1", "--endpoint", "completions")
    assert done.returncode == 2
    assert "the first request failed: HTTP 404: not_found" in done.stderr


def test_help_has_an_example() -> None:
    said = run("bench", "load", "--help").stdout
    assert "headrace bench load http" in said.split("Example:")[1]
