"""/v1/responses, /v1/messages and deadlines, over real sockets; the official client where there is one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from scripted_engine import ServerProcess, wait_for

RESPONSES, MESSAGES, COMPLETIONS = "/v1/responses", "/v1/messages", "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--step-ms", "1") as server:
        yield server
        wait_for(lambda: server.metric("requests_open") == 0)
        assert server.end() == 0
    assert "Traceback" not in server.said()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def named_events(server: ServerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, headers, data = server.exchange("POST", path, body | {"stream": True})
    assert status == 200, data
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    *parts, last = data.decode().split("\n\n")
    assert last == ""
    events = []
    for part in parts:
        name, line = part.split("\n")
        events.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def message(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 100, "temperature": 0} | more


# /v1/responses


def test_a_response(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="scripted", instructions="short", input="héllo", temperature=0, metadata={"a": "b"}, extra_body={"top_k": 5}
    )
    assert (response.output_text, response.status, response.object) == ("héllo", "completed", "response")
    assert response.id.startswith("resp_")
    assert (response.instructions, response.metadata, response.temperature) == ("short", {"a": "b"}, 0)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (6, 7, 13)
    cut = client.responses.create(model="scripted", input="abcdef", temperature=0, max_output_tokens=3)
    assert (cut.output_text, cut.status) == ("abc", "incomplete")
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_response_input_as_messages(client: openai.OpenAI) -> None:
    before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "output_text", "text": "y"}]}]
    last = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one "}, {"type": "input_text", "text": "two"}]}
    response = client.responses.create(model="scripted", input=[*before, last], temperature=0)  # type: ignore[list-item]
    assert response.output_text == "one two"


def test_a_response_streamed(client: openai.OpenAI, server: ServerProcess) -> None:
    with client.responses.stream(model="scripted", input="héllo 😀", temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert deltas == list("héllo 😀")
    assert (final.output_text, final.status) == ("héllo 😀", "completed")
    events = named_events(server, RESPONSES, {"input": "abc", "temperature": 0, "max_output_tokens": 2})
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(10))
    whole = server.post(RESPONSES, {"input": "abc", "temperature": 0, "max_output_tokens": 2})[1]
    for streamed_too in ("status", "incomplete_details", "usage"):
        assert events[-1]["response"][streamed_too] == whole[streamed_too]
    assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools"),
        (RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning"),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text"),
        (RESPONSES, {"truncation": "auto"}, "truncation"),
        (RESPONSES, {"messages": []}, "messages"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (MESSAGES, {"tools": [{"name": "f"}]}, "tools"),
        (MESSAGES, {"no_such_field": 1}, "no_such_field"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ],
)
def test_what_is_not_supported_is_named(server: ServerProcess, path: str, more: dict[str, Any], param: str) -> None:
    body = {"input": "x"} if path == RESPONSES else message("x")
    status, answer = server.post(path, body | more)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "unsupported_parameter", param)


@pytest.mark.parametrize("more", [{"input": []}, {"input": None}, {"input": [{"role": "robot", "content": "x"}]}, {"max_output_tokens": 0},
                                  {"temperature": 3}, {"input": "x", "stream_options": {}}, {"input": ""}])  # fmt: skip
def test_bad_responses(server: ServerProcess, more: dict[str, Any]) -> None:
    assert server.post(RESPONSES, {"input": "x"} | more)[0] == 400


def test_errors_have_the_names_of_the_endpoint(server: ServerProcess) -> None:
    for path, body, param in (
        (RESPONSES, {"input": ""}, "input"),
        (RESPONSES, {"input": "please refuse me"}, "input"),
        (RESPONSES, {"input": "x", "max_output_tokens": 5000}, "max_output_tokens"),
        (RESPONSES, {"instructions": "i", "input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        (MESSAGES, message(""), "messages"),
        (MESSAGES, message("x", max_tokens=5000), "max_tokens"),
        (MESSAGES, message("x", stop_sequences=[""]), "stop_sequences"),
    ):
        status, answer = server.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert not answer["error"]["message"].startswith(("stop:", "prompt:"))
    assert " max_output_tokens asks" in server.post(RESPONSES, {"input": "x", "max_output_tokens": 5000})[1]["error"]["message"]


# /v1/messages


def test_a_message(server: ServerProcess) -> None:
    blocks = [{"type": "text", "text": "hé", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "llo"}]
    status, answer = server.post(MESSAGES, message(blocks, system="short", metadata={"user_id": "u"}))
    assert status == 200
    assert answer["id"].startswith("msg_")
    assert {name: answer[name] for name in ("type", "role", "model", "content", "stop_reason", "stop_sequence")} == {
        "type": "message", "role": "assistant", "model": "scripted", "content": [{"type": "text", "text": "héllo"}],
        "stop_reason": "end_turn", "stop_sequence": None,
    }  # fmt: skip
    assert answer["usage"] == {"input_tokens": 6, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0, "output_tokens": 7}
    assert server.post(MESSAGES, message("abcdef", max_tokens=3))[1]["stop_reason"] == "max_tokens"
    stopped = server.post(MESSAGES, message("abcdef", stop_sequences=["zz", "de"]))[1]
    assert (stopped["content"][0]["text"], stopped["stop_reason"], stopped["stop_sequence"]) == ("abc", "stop_sequence", "de")


def test_a_message_streamed(server: ServerProcess) -> None:
    events = named_events(server, MESSAGES, message("abcdef", stop_sequences=["de"]))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert events[0]["message"]["usage"]["input_tokens"] == 6
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == "abc"
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "de"}


def test_messages_errors_have_their_type(server: ServerProcess) -> None:
    for body, param in (({"messages": message("x")["messages"]}, "max_tokens"), (message("x", temperature=9), "temperature")):
        status, answer = server.post(MESSAGES, body)
        assert (status, answer["type"], answer["error"]["type"], answer["error"]["param"]) == (400, "error", "invalid_request_error", param)
    assert server.post(MESSAGES, message("x", model="other"))[0] == 404


def test_tokens_are_counted(server: ServerProcess) -> None:
    assert server.post(f"{MESSAGES}/count_tokens", {"messages": message("héllo")["messages"], "system": "s"}) == (200, {"input_tokens": 6})
    status, answer = server.post(f"{MESSAGES}/count_tokens", {"messages": []})
    assert (status, answer["error"]["param"]) == (400, "messages")


# deadline_ms


def test_a_deadline_ends_a_running_request(server: ServerProcess) -> None:
    status, headers, body = server.exchange(
        "POST", COMPLETIONS, {"prompt": "abc", "temperature": 0, "ignore_eos": True, "max_tokens": 2000, "deadline_ms": 150}
    )
    error = json.loads(body)["error"]
    assert (status, error["code"], error["param"], error["type"]) == (408, "deadline_exceeded", "deadline_ms", "timeout_error")
    assert headers["x-should-retry"] == "false"
    events = server.stream(COMPLETIONS, {"prompt": "abc", "temperature": 0, "ignore_eos": True, "max_tokens": 2000, "deadline_ms": 150})
    assert events[0]["choices"][0]["text"] == "a"
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    for path, body in ((MESSAGES, message("abc", max_tokens=2000)), (RESPONSES, {"input": "abc", "temperature": 0})):
        *_, last = named_events(server, path, body | {"ignore_eos": True, "deadline_ms": 150})
        assert (last["type"], last["error"]["type"]) == ("error", "timeout_error")
    wait_for(lambda: server.metric("kv_blocks", state="held") == 0)
    assert server.complete("abc", deadline_ms=60_000)["choices"][0]["text"] == "abc"


def test_a_deadline_ends_a_waiting_request() -> None:
    with ServerProcess("--step-ms", "1", "--max-batch-size", "1") as server:
        long = threading.Thread(target=server.complete, args=("abc",), kwargs={"ignore_eos": True, "max_tokens": 600})
        long.start()
        wait_for(lambda: server.metric("requests_running") == 1)
        status, answer = server.post(COMPLETIONS, {"prompt": "abc", "deadline_ms": 20})
        assert (status, answer["error"]["code"]) == (408, "deadline_exceeded")
        wait_for(lambda: server.metric("requests_waiting") == 0)
        long.join()


@pytest.mark.parametrize("value", ["0", "-1", "NaN", '"5"', "true", "1e12"])
def test_bad_deadlines(server: ServerProcess, value: str) -> None:
    status, _, body = server.exchange("POST", COMPLETIONS, f'{{"prompt":"a","deadline_ms":{value}}}'.encode())
    assert status == 400
    assert json.loads(body)["error"]["param"] in ("deadline_ms", None)
