"""Structured output and tools over HTTP: requests refused by field, and answers as the official client reads them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from scripted_engine import ServerProcess
from test_server_model import HeadraceServe

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def scripted() -> Iterator[ServerProcess]:
    """Its answers repeat the last message, so that a test says what the model writes."""
    with ServerProcess() as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[HeadraceServe]:
    with HeadraceServe("--max-batch-size", "16", "--context", "1024") as server:
        yield server


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


# Requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_json": "no JSON"}, "guided_json"),
        ({"guided_grammar": "start: ???"}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a" * 20_000}, "guided_regex"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [CLOCK], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "guided_regex": "a"}, "guided_regex"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nope"}}}], "tool_choice": "required"},
            "tools",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]}]},
            "messages[0].tool_calls",
        ),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(scripted: ServerProcess, fields: dict[str, Any], param: str) -> None:
    status, body = scripted.post(CHAT, {"messages": says("x")} | fields)
    assert status == 400, body
    assert body["error"]["param"] == param
    assert body["error"]["message"].startswith(param)


@pytest.mark.parametrize(
    "node", [None, [], 1, "x", True, {"type": []}, {"pattern": 5}, {"enum": {}}, {"properties": {"a": []}}, {"$ref": 1}]
)
@pytest.mark.parametrize("place", ["parameters", "property", "items"])
def test_schemas_of_tools_are_answered_whatever_is_in_them(scripted: ServerProcess, node: Any, place: str) -> None:
    schema = {"parameters": node, "property": {"type": "object", "properties": {"a": node}}, "items": {"type": "array", "items": node}}[
        place
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    status, _ = scripted.post(CHAT, {"messages": says("x"), "tools": [tool], "tool_choice": "required"})
    assert status in (200, 400)
    assert scripted.get("/ready")[0] == 200


# Answers, written by the test


CALL = 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
TWO = CALL + '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


def collect(chunks: Any) -> dict[str, Any]:
    """A stream of the official client as a message, deltas joined the way its users do."""
    content, reason = "", None
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for delta in choice.delta.tool_calls or ():
            if delta.index == len(calls):
                assert delta.id
                assert delta.type == "function"
                calls.append({"id": delta.id, "name": delta.function.name, "arguments": delta.function.arguments})
            else:
                assert delta.function.name is None
                calls[delta.index]["arguments"] += delta.function.arguments
        reason = choice.finish_reason or reason
    return {"content": content, "calls": calls, "reason": reason}


@pytest.mark.parametrize(("text", "names"), [(CALL, ["get_weather"]), (TWO, ["get_weather", "clock"])])
def test_calls_whole_and_streamed(scripted: ServerProcess, text: str, names: list[str]) -> None:
    client = client_of(scripted)
    ask: dict[str, Any] = {"model": "scripted", "messages": says(text), "tools": [WEATHER, CLOCK], "temperature": 0}
    whole = client.chat.completions.create(**ask).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "Let me see."
    assert [call.function.name for call in whole.message.tool_calls] == names
    assert json.loads(whole.message.tool_calls[0].function.arguments) == {"city": "Rome", "days": 2}
    assert len({call.id for call in whole.message.tool_calls}) == len(names)
    streamed = collect(client.chat.completions.create(**ask, stream=True))
    assert streamed["reason"] == "tool_calls"
    assert streamed["content"] == "Let me see."
    assert [(call["name"], call["arguments"]) for call in streamed["calls"]] == [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls
    ]


def test_the_first_delta_of_a_call_has_its_name_and_the_rest_arguments(scripted: ServerProcess) -> None:
    events = scripted.stream(CHAT, {"messages": says(CALL), "tools": [WEATHER], "temperature": 0})
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0] == {"index": 0, "id": calls[0]["id"], "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in calls[1:])
    assert len(calls) > 10  # the script writes a byte a step, and each is told at once
    assert events[-1]["choices"][0] | {"logprobs": None} == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}


@pytest.mark.parametrize("more", [{}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": [CLOCK]}])
def test_what_looks_like_a_call_stays_text(scripted: ServerProcess, more: dict[str, Any]) -> None:
    """Without tools, with tools that may not be called, and where no such tool exists."""
    status, body = scripted.post(CHAT, {"messages": says(CALL), "temperature": 0} | more)
    assert status == 200
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert choice["finish_reason"] == "stop"
    streamed = scripted.stream(CHAT, {"messages": says(CALL), "temperature": 0} | more)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in streamed) == CALL


def test_without_parallel_calls_the_first_ends_the_answer(scripted: ServerProcess) -> None:
    ask = {"messages": says(TWO), "tools": [WEATHER, CLOCK], "parallel_tool_calls": False, "temperature": 0}
    body = scripted.post(CHAT, ask)[1]
    assert [call["function"]["name"] for call in body["choices"][0]["message"]["tool_calls"]] == ["get_weather"]
    assert body["usage"]["completion_tokens"] < len(TWO)
    assert collect_events(scripted.stream(CHAT, ask)) == (["get_weather"], "tool_calls")


def collect_events(events: list[Any]) -> tuple[list[str], str]:
    deltas = [event["choices"][0]["delta"] for event in events]
    names = [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", ()) if "name" in call["function"]]
    return names, events[-1]["choices"][0]["finish_reason"]


@pytest.mark.parametrize("limit", [5, 15, 40, 70])
def test_an_answer_cut_by_its_length_says_so_and_loses_nothing(scripted: ServerProcess, limit: int) -> None:
    ask = {"messages": says(CALL), "tools": [WEATHER], "temperature": 0, "max_tokens": limit}
    (choice,) = scripted.post(CHAT, ask)[1]["choices"]
    assert choice["finish_reason"] == "length"
    message = choice["message"]
    if "tool_calls" not in message:
        assert message["content"] == CALL[:limit]
    else:
        assert CALL[:limit].endswith(message["tool_calls"][0]["function"]["arguments"])


def test_a_stop_string_with_tools_loses_no_text(scripted: ServerProcess) -> None:
    """What the parser holds back is told when a stop string ends the answer."""
    for tools in ([], [WEATHER]):
        body = scripted.post(CHAT, {"messages": says("one <tool STOP"), "tools": tools, "stop": "STOP", "temperature": 0})[1]
        assert body["choices"][0]["message"]["content"] == "one <tool "


def test_log_probabilities_of_calls(scripted: ServerProcess) -> None:
    ask = {"messages": says(CALL), "tools": [WEATHER], "logprobs": True, "temperature": 0}
    whole = scripted.post(CHAT, ask)[1]["choices"][0]
    events = scripted.stream(CHAT, ask)
    told = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert told == whole["logprobs"]["content"]
    assert "".join(entry["token"] for entry in told).startswith(CALL)


# Answers of the model, held by grammars


class Person(pydantic.BaseModel):
    name: str
    age: int
    mood: Literal["happy", "sad"]


def test_parse_of_the_official_client(server: HeadraceServe) -> None:
    done = client_of(server).chat.completions.parse(
        model=server.get("/v1/models")[1]["data"][0]["id"],
        messages=says("Anna is 31 and happy. Describe her as JSON."),
        response_format=Person,
        max_tokens=120,
        seed=1,
    )
    person = done.choices[0].message.parsed
    assert isinstance(person, Person)
    assert done.choices[0].finish_reason == "stop"


def test_the_streaming_helper_of_the_official_client(server: HeadraceServe) -> None:
    with client_of(server).chat.completions.stream(
        model=server.get("/v1/models")[1]["data"][0]["id"], messages=says("Tom, 5, sad"), response_format=Person, seed=2,
        max_tokens=120,
    ) as stream:  # fmt: skip
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Person)


FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"guided_choice": ["red", "green"]}, lambda text: text in ("red", "green")),
    ({"structured_outputs": {"choice": ["red", "green"]}}, lambda text: text in ("red", "green")),
    ({"structured_outputs": {"regex": "[A-C]{3}-[0-9]{2}"}}, lambda text: len(text) == 6 and text[3] == "-"),
    ({"guided_grammar": 'start: "<" word ">"\nword: /[a-z]{1,5}/'}, lambda text: text[0] == "<" and text[-1] == ">"),
    ({"guided_json": json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 3})}, lambda text: len(json.loads(text)) <= 3),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": False, "schema": {"enum": [17, "x"]}}}},
     lambda text: json.loads(text) in (17, "x")),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_form_holds_at_any_temperature(server: HeadraceServe, path: str) -> None:
    given = {"messages": says("Say something.")} if path == CHAT else {"prompt": "Something:"}
    for fields, good in FORMS:
        more = {"temperature": 1.5, "n": 4, "seed": 5, "max_tokens": 60, "logit_bias": {"10": 50}, "frequency_penalty": 1, "min_tokens": 30}
        status, body = server.post(path, given | fields | more)
        assert status == 200, body
        for choice in body["choices"]:
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            assert choice["finish_reason"] == "stop"
            assert good(text), (fields, text)


def test_constrained_answers_are_the_same_alone_and_in_company(server: HeadraceServe) -> None:
    import concurrent.futures

    asks = [
        {"messages": says(f"Person {i} as JSON"), "seed": i, "max_tokens": 80, "temperature": 0.9}
        | (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema()}}}
            if i % 2
            else {}
        )
        for i in range(8)
    ]

    def answer(ask: dict[str, Any]) -> str:
        return server.post(CHAT, ask)[1]["choices"][0]["message"]["content"]

    alone = [answer(ask) for ask in asks]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(answer, asks)) == alone


def test_log_probabilities_are_those_before_the_mask(server: HeadraceServe) -> None:
    ask = {"messages": says("What is the capital of Japan?"), "temperature": 0, "logprobs": True, "top_logprobs": 3, "max_tokens": 4}
    free = server.post(CHAT, ask)[1]["choices"][0]["logprobs"]["content"][0]
    held = server.post(CHAT, ask | {"guided_choice": ["zebra"]})[1]["choices"][0]["logprobs"]["content"][0]
    assert held["top_logprobs"] == free["top_logprobs"]
    assert held["token"] not in [entry["token"] for entry in free["top_logprobs"]]
    assert held["logprob"] < free["top_logprobs"][-1]["logprob"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_calls_of_the_model(server: HeadraceServe, choice: Any) -> None:
    client = client_of(server)
    model = server.get("/v1/models")[1]["data"][0]["id"]
    ask: dict[str, Any] = {
        "model": model, "messages": says("How is the weather in Rome for two days?"), "tools": [WEATHER], "tool_choice": choice,
        "parallel_tool_calls": False, "seed": 3, "max_tokens": 100,
    }  # fmt: skip
    whole = client.chat.completions.create(**ask).choices[0]
    (call,) = whole.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Rome", "Oslo")
    assert 1 <= arguments["days"] <= 9
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    streamed = collect(client.chat.completions.create(**ask, stream=True))
    assert [(each["name"], each["arguments"]) for each in streamed["calls"]] == [("get_weather", call.function.arguments)]
    # The answer goes back with its result, and the model goes on.
    more = [*ask["messages"], whole.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    after = client.chat.completions.create(model=model, messages=more, tools=[WEATHER], tool_choice="none", max_tokens=8)
    assert after.usage.prompt_tokens > 60


def test_a_constrained_stream_goes_on_when_the_engine_is_killed(server: HeadraceServe) -> None:
    """Its grammar's state is rebuilt from what was sent."""
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99999}, "minItems": 25, "maxItems": 25}
    ask: dict[str, Any] = {
        "model": server.get("/v1/models")[1]["data"][0]["id"], "messages": says("Numbers"), "seed": 4, "max_tokens": 300,
        "response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}},
    }  # fmt: skip
    client = client_of(server)
    quiet = client.chat.completions.create(**ask).choices[0].message.content
    assert len(json.loads(quiet)) == 25
    text, killed = "", False
    for chunk in client.chat.completions.create(**ask, stream=True):
        text += chunk.choices[0].delta.content or ""
        if len(text) > 10 and not killed:
            killed = True
            os.kill(server.engine_pid(), signal.SIGKILL)
    assert killed
    assert text == quiet
