"""The API over real sockets: what a request answers, streamed and whole, and that the official client understands it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from scripted_engine import CONTEXT, WORDS, ServerProcess, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--step-ms", "1") as server:
        yield server
        wait_for(lambda: server.metric("requests_open") == 0)
        wait_for(lambda: server.metric("kv_blocks", state="held") == 0)
        assert server.end() == 0
    assert "Traceback" not in server.said()


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0} | more


def test_chat(server: ServerProcess) -> None:
    status, body = server.post(CHAT, chat("hello"))
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "scripted"
    assert body["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "hello", "refusal": None}, "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 0}
    }  # fmt: skip


def test_chat_stream_in_order(server: ServerProcess) -> None:
    events = server.stream(CHAT, chat("héllo 😀", stream_options={"include_usage": True}))
    *chunks, last = events
    assert {chunk["object"] for chunk in events} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in events}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-1]] == list("héllo 😀")
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len("héllo 😀".encode()) + 1


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_no_usage_unless_asked_for(server: ServerProcess, options: Any) -> None:
    events = server.stream(COMPLETIONS, {"prompt": "abc", "temperature": 0, "stream_options": options})
    assert all("usage" not in event for event in events)
    assert "timings" in events[-1]


def whole_from(events: list[Any], kind: str) -> dict[int, tuple[str, str | None]]:
    """Text and reason of each choice, put together from a stream."""
    text: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    for event in events:
        for choice in event["choices"]:
            index = choice["index"]
            assert reasons.get(index) is None, "a chunk after the last one of its choice"
            piece = choice["delta"].get("content", "") if kind == CHAT else choice["text"]
            text[index] = text.get(index, "") + piece
            reasons[index] = choice["finish_reason"]
    return {index: (text[index], reasons[index]) for index in text}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"max_tokens": 3},
        {"max_tokens": 1},
        {"n": 3, "temperature": 1, "seed": 5},
        {"stop": "lo"},
        {"stop": ["never", "o w"], "n": 2},
        {"stop": ["😀"]},
        {"stop": "lo", "include_stop_str_in_output": True},
        {"stop": "hello world 😀!"},
        {"ignore_eos": True, "max_tokens": 40},
        {"max_tokens": 14},  # inside the emoji
        {"stop_token_ids": [ord("w")]},
        {"logit_bias": {"5": 1.5}, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_stream_equals_whole(server: ServerProcess, path: str, more: dict[str, Any]) -> None:
    text = "hello world 😀!"
    body = chat(text, **more) if path == CHAT else {"prompt": text, "temperature": 0, "max_tokens": 100} | more
    _, whole = server.post(path, body)
    events = server.stream(path, body | {"stream_options": {"include_usage": True}})
    expected = {
        choice["index"]: (choice["message"]["content"] if path == CHAT else choice["text"], choice["finish_reason"])
        for choice in whole["choices"]
    }
    assert whole_from(events, path) == expected
    assert events[-1]["usage"] == whole["usage"]
    assert len(expected) == more.get("n", 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "stop", "text", "tokens"),
    [
        ([300, ord("G"), 301, ord("J")], ["DEFGHIJ"], "", 4),
        ([302, 303], ["gamma"], "beta ", 2),
        (list(b"aaab"), ["aab"], "a", 4),
        (list(b"xyz"), ["z"], "xy", 3),
        (list(b"abcdef"), ["cd", "bcx", "e"], "ab", 4),
        ([*b"ok ", 306, 307, *b" no"], ["😀"], "ok ", 5),
        (list(b"keep"), ["keeper"], "keep", 5),
    ],
    ids=str,
)
def test_stop_strings(server: ServerProcess, prompt: list[int], stop: list[str], text: str, tokens: int, stream: bool) -> None:
    body = {"prompt": prompt, "stop": stop, "temperature": 0, "max_tokens": 50}
    if stream:
        events = server.stream(COMPLETIONS, body | {"stream_options": {"include_usage": True}})
        assert whole_from(events, COMPLETIONS) == {0: (text, "stop")}
        assert all(stop[0][0] not in event["choices"][0]["text"] or text for event in events[:-1])
        usage = events[-1]["usage"]
    else:
        whole = server.complete(prompt, stop=stop)
        assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (text, "stop")
        usage = whole["usage"]
    assert usage["completion_tokens"] == tokens


def test_the_engine_stops_at_a_stop_string(server: ServerProcess) -> None:
    before = server.metric("generation_tokens_total")
    server.complete("ab" * 20, stop="b", ignore_eos=True, max_tokens=1900)
    wait_for(lambda: server.metric("kv_blocks", state="held") == 0)
    assert server.metric("generation_tokens_total") - before < 20


def test_the_engine_stops_the_one_sample_that_a_stop_string_ends(server: ServerProcess) -> None:
    """Samples 0 and 1 begin at the letters 1 and 4: one comes to "e" after 4 tokens, the other at once, and to "d" after 29."""
    text = "abcdefghijklmnopqrstuvwxyzABCD"
    whole = server.complete(text, stop=["e"], n=2, seed=0, temperature=1.0, ignore_eos=True, max_tokens=1900)
    assert [choice["text"] for choice in whole["choices"]] == ["bcd", ""]
    before = server.metric("batch_size_sum")
    whole = server.complete(text, stop=["d", "e"], n=2, seed=0, temperature=1.0, ignore_eos=True, max_tokens=1900)
    assert [choice["text"] for choice in whole["choices"]] == ["bc", ""]
    whole = server.complete(text, stop=["d"], n=2, seed=0, temperature=1.0, ignore_eos=True, max_tokens=1900)
    assert [choice["text"] for choice in whole["choices"]] == ["bc", text[4:] + "abc"]
    wait_for(lambda: server.metric("kv_blocks", state="held") == 0)
    assert server.metric("batch_size_sum") - before < 3 + 1 + 3 + 30 + 4 * 3  # a step or two are under way when the engine hears of it


def test_characters_are_never_cut(server: ServerProcess) -> None:
    text = "naïve 日本 👩‍👩‍👧 ends"
    events = server.stream(COMPLETIONS, {"prompt": text, "temperature": 0, "max_tokens": 500})
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert not any("\ufffd" in event["choices"][0]["text"] for event in events)
    invalid = server.complete([0xFF, 0xC0, 0x80, ord("x")])
    assert invalid["choices"][0]["text"] == "\ufffd\ufffd\ufffdx"


def test_several_prompts_and_samples(server: ServerProcess) -> None:
    body = server.complete(["ab", "cde", "f"], n=2)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "ab"), (1, "ab"), (2, "cde"), (3, "cde"), (4, "f"), (5, "f")
    ]  # fmt: skip
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 2 * (3 + 4 + 2)
    events = server.stream(COMPLETIONS, {"prompt": [[97, 98], [99]], "temperature": 0})
    assert whole_from(events, COMPLETIONS) == {0: ("ab", "stop"), 1: ("c", "stop")}


def test_seeds(server: ServerProcess) -> None:
    def ask(**more: Any) -> list[str]:
        body = server.complete("abcdefghijklm", temperature=1, n=4, **more)
        return [choice["text"] for choice in body["choices"]]

    first = ask(seed=7)
    assert first == ask(seed=7) != ask(seed=8)
    assert len(set(first)) == 4
    drawn = server.complete("abcdefghijklm", temperature=1)
    again = server.complete("abcdefghijklm", temperature=1, seed=drawn["seed"])
    assert drawn["choices"] == again["choices"]
    assert len({server.complete("a", temperature=1)["seed"] for _ in range(5)}) == 5
    assert server.complete("a", seed=-1)["seed"] == 2**64 - 1


def test_chat_logprobs(server: ServerProcess) -> None:
    body = chat("日x", logprobs=True, top_logprobs=2)
    _, whole = server.post(CHAT, body)
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == "日x".encode()
    assert content[0]["token"] == "bytes:\\xe6"
    assert content[3]["token"] == "x"
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] == -0.25 for entry in content)
    streamed = [
        entry
        for event in server.stream(CHAT, body)
        for choice in event["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == content


@pytest.mark.parametrize("stop", [None, "lo wor"])
def test_completion_logprobs(server: ServerProcess, stop: str | None) -> None:
    body = {"prompt": "héllo wörld lo world", "temperature": 0, "logprobs": 1, "stop": stop, "max_tokens": 100}
    whole = server.complete(**body)["choices"][0]["logprobs"]
    tokens, offsets = whole["tokens"], whole["text_offset"]
    text = "héllo wörld lo world"
    assert len(tokens) == len(offsets) == len(whole["token_logprobs"]) == len(whole["top_logprobs"])
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert text[offset : offset + len(token)] == token
    assert all(token in top for token, top in zip(tokens, whole["top_logprobs"], strict=True))
    joined: dict[str, list[Any]] = {name: [] for name in whole}
    for event in server.stream(COMPLETIONS, body):
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            joined[name] += values
    assert joined == whole


def test_timings_sum_to_the_total(server: ServerProcess) -> None:
    for body in (server.complete("abc"), server.complete(["ab", "cde"], n=2)):
        timings = body["timings"]
        assert set(timings) == {"accept", "queue", "prefill", "decode", "stalled", "deliver", "total"}
        assert all(value >= 0 for value in timings.values())
        assert abs(sum(timings.values()) - 2 * timings["total"]) < 1e-6
    assert server.complete("abc" * 30)["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


def test_limits_of_length(server: ServerProcess) -> None:
    assert server.complete("a" * (CONTEXT - 1), max_tokens=1)["choices"][0]["finish_reason"] == "length"
    assert server.complete("abcdef", max_tokens=6)["usage"]["completion_tokens"] == 6
    for size, more in ((CONTEXT, {"max_tokens": 1}), (CONTEXT + 5, {"max_tokens": 1}), (10, {"max_tokens": CONTEXT})):
        status, body = server.post(COMPLETIONS, {"prompt": "a" * size} | more)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert str(size) in body["error"]["message"]
        assert str(CONTEXT) in body["error"]["message"]
    status, body = server.post(CHAT, chat("b" * 40))
    assert (status, body["choices"][0]["finish_reason"]) == (200, "stop")
    assert server.complete("a" * 3000, truncate_prompt_tokens=5, max_tokens=9)["usage"]["prompt_tokens"] == 5


def test_default_lengths(server: ServerProcess) -> None:
    status, body = server.post(COMPLETIONS, {"prompt": "x" * 30, "temperature": 0})
    assert (status, body["usage"]["completion_tokens"]) == (200, 16)


def test_message_forms(server: ServerProcess) -> None:
    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]
    _, body = server.post(CHAT, {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}], "temperature": 0})
    assert body["choices"][0]["message"]["content"] == "two parts"


def test_models(server: ServerProcess) -> None:
    status, body = server.get("/v1/models")
    assert status == 200
    assert [(model["id"], model["max_model_len"]) for model in body["data"]] == [("scripted", CONTEXT)]
    assert server.get("/v1/models/scripted")[1] == body["data"][0]
    status, body = server.get("/v1/models/other/one")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


def test_request_ids(server: ServerProcess) -> None:
    for given, kept in (("abc-1.2_3", True), ("a b", False), ("x" * 129, False), ("é", False)):
        _, headers, _ = server.exchange("POST", COMPLETIONS, {"prompt": "a"}, {"x-request-id": given.encode("latin-1")})
        assert (headers["x-request-id"] == given) is kept
    for path in ("/health", "/ready", "/metrics", "/v1/models", "/nowhere"):
        assert server.exchange("GET", path)[1]["x-request-id"].startswith("req-")


def test_many_at_once_equal_one_alone(server: ServerProcess) -> None:
    alone = server.complete("the same every time")["choices"]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda i: server.complete("the same every time", stop=["zz"] * (i % 2) or None), range(48)))
    assert all(answer["choices"] == alone for answer in answers)


def test_metrics_are_consistent(server: ServerProcess) -> None:
    def outcomes() -> float:
        return server.metric("requests_total")

    names = ("time_to_first_token_seconds_count", "request_seconds_count", "generation_tokens_total", "inter_token_seconds_count")
    before = [server.metric(name) for name in names]
    ended = outcomes()
    for _ in range(3):
        server.complete("abcd")
    server.post(COMPLETIONS, {"prompt": ""})
    first, total, tokens, gaps = (server.metric(name) - old for name, old in zip(names, before, strict=True))
    assert (first, total, tokens, gaps) == (3, 3, 15, 12)
    assert outcomes() - ended == 4
    text = server.get("/metrics")[1]
    assert 'headrace_inter_token_seconds_bucket{le="0.001"' in text
    assert 'headrace_inter_token_seconds_bucket{le="600.0"' in text
    openmetrics = server.exchange("GET", "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert openmetrics[1]["content-type"].startswith("application/openmetrics-text")
    assert openmetrics[2].endswith(b"# EOF\n")


def test_official_client(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}], temperature=0)
        assert answer.choices[0].message.content == "hi"
        assert answer.usage is not None
        assert answer.usage.total_tokens == 5
        pieces = client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "hi you"}], temperature=0, stream=True, n=2
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices[0].index == 1) == "hi you"
        text = client.completions.create(model="scripted", prompt=[[300, 301]], temperature=0, logprobs=2)
        assert text.choices[0].text == (WORDS[300] + WORDS[301]).decode()
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}], tools=[{"type": "function"}])  # type: ignore[list-item]
        assert refused.value.code == "missing_required_parameter"
        assert refused.value.param == "tools[0].function"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=[{"role": "user", "content": "hi"}])
        assert [model.id for model in client.models.list()] == ["scripted"]

    async def use_async() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.completions.create(model="scripted", prompt="async", temperature=0, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

    assert asyncio.run(use_async()) == "async"


def test_an_error_in_the_stream_is_an_error_to_the_client(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="scripted", prompt=[97, 98, 263, 99], temperature=0, stream=True)
        with pytest.raises(openai.APIError) as failed:
            for _ in stream:
                pass
        assert "engine" in str(failed.value)
    status, body = server.post(COMPLETIONS, {"prompt": [97, 263], "temperature": 0})
    assert (status, body["error"]["type"], body["error"]["code"]) == (500, "server_error", "engine_error")


def test_body_is_json_in_one_line(server: ServerProcess) -> None:
    text = 'quotes " and \n lines \u2028 \\ \x00 <end>'
    assert server.complete(text)["choices"][0]["text"] == text
    events = server.stream(COMPLETIONS, {"prompt": text, "temperature": 0, "max_tokens": 99})
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert json.dumps(text)
