"""`headrace serve` with the default model: both processes, the real kernels, over a real port."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ENVIRONMENT, ServerProcess, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class HeadraceServe(ServerProcess):
    """The command itself, on a free port."""

    def __init__(self, *arguments: str) -> None:
        self.started = time.monotonic()
        command = [sys.executable, "-m", "headrace", "serve", "--port", "0", "--log-level", "warning", "--memory", "1GiB", *arguments]
        self.log = ""
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT)
        self.errors = open(os.devnull)  # noqa: SIM115 - closed with the process
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.port = int(line.rsplit(":", 1)[1])
        self.url = f"http://127.0.0.1:{self.port}"


def test_a_recording_replays(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with HeadraceServe("--record", str(path)) as server:
        for i in range(3):
            assert server.post(COMPLETIONS, {"prompt": f"{i} The river", "max_tokens": 20, "n": 2, "temperature": 1})[0] == 200
        assert server.end() == 0
    command = [sys.executable, "-m", "headrace", "replay", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=True)
    found = json.loads(done.stdout)
    assert found["different_at"] == 0
    assert found["steps"] >= 60
    for bad, message in ((tmp_path / "none" / "run.jsonl", "No such file"), (tmp_path, "directory")):
        command = [sys.executable, "-m", "headrace", "serve", "--port", "0", "--record", str(bad)]
        failed = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)
        assert failed.returncode == 2
        assert message in failed.stderr


@pytest.fixture(scope="module")
def server() -> Iterator[HeadraceServe]:
    with HeadraceServe("--max-batch-size", "32") as server:
        yield server
        wait_for(lambda: server.metric("requests_open") == 0)
        wait_for(lambda: server.metric("kv_blocks", state="held") == 0)
        assert server.end() == 0


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24} | more


def test_the_question_of_the_readme(server: HeadraceServe) -> None:
    """A question whose answer leads by more than the noise of int8 activations at every token, unlike most for so small a model."""
    status, body = server.post(CHAT, ask("What is the capital of Japan?"))
    assert status == 200
    assert "Tokyo" in body["choices"][0]["message"]["content"]
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 1, "seed": 3, "n": 3},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 1, "repetition_penalty": 1.2},
        {"stop": ["river", "."]},
        {"logprobs": True, "top_logprobs": 3},
        {"ignore_eos": True, "max_tokens": 40, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logit_bias": {"260": -100}, "min_tokens": 10},
    ],
    ids=str,
)
def test_stream_equals_whole_and_repeats(server: HeadraceServe, more: dict[str, Any]) -> None:
    body = ask("Tell me about a river.", **more)
    _, whole = server.post(CHAT, body)
    _, again = server.post(CHAT, body)
    assert again["choices"] == whole["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    texts: dict[int, str] = {}
    entries: list[Any] = []
    for event in server.stream(CHAT, body):
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
            entries += (choice["logprobs"] or {}).get("content", [])
    assert [texts[i] for i in sorted(texts)] == [choice["message"]["content"] for choice in whole["choices"]]
    if "logprobs" in more:
        content = whole["choices"][0]["logprobs"]["content"]
        assert entries == content
        assert len(content) == whole["usage"]["completion_tokens"]
        assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in content)  # greedy: the best one
        assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == whole["choices"][0]["message"]["content"]


def test_allowed_tokens(server: HeadraceServe) -> None:
    """Alone, beside a grammar, and without an end token among them."""
    digits = {server.post("/tokenize", {"prompt": each})[1]["tokens"][-1]: each for each in "0123456789"}
    _, body = server.post(CHAT, ask("Say a number.", allowed_token_ids=[*digits], logprobs=True, temperature=1, seed=2))
    (choice,) = body["choices"]
    assert re.fullmatch("[0-9]{24}", choice["message"]["content"])
    assert choice["finish_reason"] == "length"
    assert all(entry["logprob"] < 0 for entry in choice["logprobs"]["content"])
    even = [token for token, digit in digits.items() if digit in "02468"]
    _, body = server.post(CHAT, ask("Say a number.", allowed_token_ids=even, guided_regex="[0-9]{5}"))
    (choice,) = body["choices"]
    assert re.fullmatch("[02468]{5}", choice["message"]["content"])
    assert choice["finish_reason"] == "stop"


def test_a_prompt_is_scored_as_it_would_have_been_written(server: HeadraceServe) -> None:
    """The same bits for a token that was chosen, and for it as a part of the prompt, whatever is cached."""
    ids = server.post("/tokenize", {"prompt": "The river flows " * 30})[1]["tokens"]
    written = server.complete(ids, max_tokens=12, logprobs=3, ignore_eos=True)["choices"][0]
    text = server.complete(ids, max_tokens=1, echo=True)["choices"][0]["text"]
    assert text.startswith("The river flows " * 30)
    whole = ids + server.post("/tokenize", {"prompt": written["text"]})[1]["tokens"]
    assert len(whole) == len(ids) + 12
    body = server.complete(whole, max_tokens=1, logprobs=3, echo=True, prompt_logprobs=3)
    (choice,) = body["choices"]
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert choice["logprobs"][name][len(ids) : len(whole)] == written["logprobs"][name]
    for token, told in zip(whole[len(ids) :], choice["prompt_logprobs"][len(ids) :], strict=True):
        assert told[str(token)]["rank"] == 1
    again = server.complete(whole, max_tokens=1, logprobs=3)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_embeddings(server: HeadraceServe) -> None:
    """Near texts are near; the same bits alone, together, twice, and beside answers."""
    texts = ["The cat sat on the mat.", "A cat is sitting on a mat.", "Stock prices fell sharply on Monday."]

    def ask(given: Any) -> list[list[float]]:
        status, body = server.post("/v1/embeddings", {"input": given})
        assert status == 200, body
        return [each["embedding"] for each in body["data"]]

    first, second, other = vectors = ask(texts)
    assert {len(vector) for vector in vectors} == {576}
    near, far = (sum(a * b for a, b in zip(first, vector, strict=True)) for vector in (second, other))
    assert far < near < 1
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(server.complete, text, max_tokens=20) for text in texts]
        assert [pool.submit(ask, text).result(30) for text in texts] == [[vector] for vector in vectors]
        assert all(answer.result(30) for answer in answers)


def test_same_answer_whatever_else_runs(server: HeadraceServe) -> None:
    alone = server.complete("The water of the river", max_tokens=20)["choices"]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        same = [pool.submit(server.complete, "The water of the river", max_tokens=20) for _ in range(8)]
        others = [pool.submit(server.complete, f"{i} other " * (5 * i + 1), max_tokens=15, temperature=1) for i in range(12)]
        assert all(future.result(60)["choices"] == alone for future in same)
        assert all(future.result(60)["usage"]["completion_tokens"] <= 15 for future in others)


def test_a_killed_engine_changes_no_token(server: HeadraceServe) -> None:
    """Promise 2: the streams go on with the very tokens that would have come."""
    requests = [
        {"prompt": f"Chapter {i}. The", "max_tokens": 120, "ignore_eos": True, "temperature": i % 2, "seed": i, "n": 1 + i % 3 // 2}
        for i in range(6)
    ]

    def streamed(body: dict[str, Any]) -> dict[int, str]:
        texts: dict[int, str] = {}
        for event in server.stream(COMPLETIONS, body):
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        return texts

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        quiet = list(pool.map(streamed, requests))
        before = server.metric("generation_tokens_total")
        disturbed = [pool.submit(streamed, body) for body in requests]
        wait_for(lambda: server.metric("generation_tokens_total") > before + 100)
        os.kill(server.engine_pid(), signal.SIGKILL)
        killed_at = time.monotonic()
        wait_for(lambda: server.metric("engine_restarts_total") == 1)
        wait_for(lambda: server.get("/ready")[0] == 200)
        assert time.monotonic() - killed_at < 3.0
        assert [future.result(60) for future in disturbed] == quiet


def test_a_prompt_longer_than_the_pool() -> None:
    with HeadraceServe("--memory", "400MiB", "--threads", "1", "--level", "int4") as server:
        pool = int(server.metric("kv_blocks")) * 32
        assert pool < 8192
        status, body = server.post(COMPLETIONS, {"prompt": [5] * (pool + 1), "max_tokens": 1})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert str(pool) in body["error"]["message"]
        assert str(pool + 1) in body["error"]["message"]
        assert server.complete([5] * 100, max_tokens=2)["usage"]["completion_tokens"] <= 2
        assert server.end() == 0


def test_a_file_of_requests(tmp_path: Any) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}\n' * 3)
    command = [sys.executable, "-m", "headrace", "generate", str(source), "-o", str(target), "--memory", "1GiB"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 requests, 0 failed" in done.stderr
    assert target.read_text().count('"text": " four,') == 3


def test_the_batch_tier_gives_way(server: HeadraceServe) -> None:
    """It is answered when nobody else is there, with the tokens it has alone; beside others it waits, in no queue that others see."""
    slow = {"prompt": "The river", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    expected = server.post(COMPLETIONS, slow)[1]["choices"][0]["text"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        batch = pool.submit(server.post, COMPLETIONS, slow | {"service_tier": "batch"})
        wait_for(lambda: server.metric("requests_running") == 1)
        before = server.metric("preemptions_total")
        status, headers, _ = server.exchange("POST", COMPLETIONS, {"prompt": "Now", "max_tokens": 30, "ignore_eos": True})
        assert status == 200
        assert int(headers["x-queue-position"]) == 1
        assert not batch.done()
        assert server.metric("preemptions_total") == before + 1
        status, body = batch.result(30)
    assert (status, body["choices"][0]["text"]) == (200, expected)
    assert server.post(COMPLETIONS, {"prompt": "x", "service_tier": "priority"})[0] == 400
