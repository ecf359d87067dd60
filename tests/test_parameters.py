"""Every field of every generation endpoint: honoured, accepted or refused by name; good, null, of a wrong type, out of range, no number.

The tables must have every field that the endpoints' types have: a new one needs its row.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from scripted_engine import ServerProcess

from headrace.server import embeddings, messages_api, protocol, responses_api

USER = [{"role": "user", "content": "hi"}]
REQUIRED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 16},
    "/v1/embeddings": {"input": "hi"},
}
TYPES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": protocol.ChatRequest,
    "/v1/completions": protocol.CompletionRequest,
    "/v1/responses": responses_api.ResponsesRequest,
    "/v1/messages": messages_api.MessagesRequest,
    "/v1/embeddings": embeddings.EmbeddingsRequest,
}
REFUSED = {
    "/v1/chat/completions": protocol.REFUSED,
    "/v1/completions": protocol.REFUSED | protocol.REFUSED_IN_COMPLETIONS,
    "/v1/responses": responses_api.REFUSED,
    "/v1/messages": messages_api.REFUSED,
    "/v1/embeddings": embeddings.REFUSED,
}
# field -> good values, values out of range. A field whose good value depends on the endpoint is in SPECIAL.
TOO_LARGE = 2**31
TOOL = {"type": "function", "function": {"name": "f"}}
TABLE: dict[str, tuple[list[Any], list[Any]]] = {
    "model": (["scripted"], []),
    "messages": ([USER], [[]]),
    "prompt": (["a", [1], ["a", "b"], [[1], [2]]], [[], ""]),
    "input": (["a", USER], [[], ""]),
    "instructions": (["a", ""], []),
    "system": (["a", [{"type": "text", "text": "a"}]], []),
    "stream": ([False, True], []),
    "stream_options": ([], []),
    "max_tokens": ([1, 16], [0, -1, TOO_LARGE]),
    "max_completion_tokens": ([1, 16], [0, -1, TOO_LARGE]),
    "max_output_tokens": ([1, 16], [0, -1, TOO_LARGE]),
    "temperature": ([0, 0.5, 2], [-0.1, 2.1]),
    "top_p": ([0, 0.5, 1], [-0.1, 1.1]),
    "top_k": ([-1, 0, 40], [-2, TOO_LARGE]),
    "min_p": ([0, 1], [-0.1, 1.1]),
    "presence_penalty": ([-2, 0, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 0, 2], [-2.1, 2.1]),
    "repetition_penalty": ([0.5, 1, 10], [0, -1, 10.1]),
    "logit_bias": ([{}, {"1": -100, "2": 100}], [{"1": 101}, {"-1": 0}, {"99999": 0}]),
    "seed": ([-(2**63), 0, 2**63 - 1], [2**63]),
    "n": ([1, 2], [0, 129]),
    "best_of": ([1], [0, 129]),
    "stop": (["x", ["x", "y"], []], ["", ["x"] * 17]),
    "stop_sequences": ([["x"], []], [[""], ["x"] * 17]),
    "stop_token_ids": ([[1], []], [[-1], [99999], [1] * 65]),
    "allowed_token_ids": ([[1], [319, 1, 1]], [[], [-1], [99999], [1] * (1 + (1 << 14))]),
    "include_stop_str_in_output": ([False, True], []),
    "min_tokens": ([0, 1], [-1, TOO_LARGE]),
    "ignore_eos": ([False], []),
    "priority": ([0], [TOO_LARGE]),
    "cache_salt": (["s"], ["s" * 1025]),
    "service_tier": (["auto"], ["fast"]),
    "cache_prompt": ([False, True], []),
    "encoding_format": (["float", "base64"], ["int8"]),
    "echo": ([False, True], []),
    "prompt_logprobs": ([0, 20], [-1, 21, TOO_LARGE]),
    "truncate_prompt_tokens": ([1], [0, TOO_LARGE]),
    "deadline_ms": ([60_000, 1e5], [0, -1, 1e9]),
    "response_format": ([{"type": "text"}, {"type": "json_object"}], [{"type": "yaml"}, {"type": "json_schema"}]),
    "structured_outputs": ([{"regex": "a"}, {"json_object": True}], [{"regex": "("}, {"choice": []}, {"regex": "a", "grammar": "b"}]),
    "guided_json": ([True, {"type": "object"}, "{}"], [{"type": "nope"}]),
    "guided_regex": (["a"], ["("]),
    "guided_choice": ([["a", "b"]], [[]]),
    "guided_grammar": (['start: "a"'], ["start: b"]),
    "tools": ([[], [TOOL]], [[TOOL, TOOL], [{"type": "function"}]]),
    "tool_choice": (["none", "auto"], ["required"]),
    "parallel_tool_calls": ([False, True], []),
    "top_logprobs": ([], [-1, 21]),
    "logprobs": ([], []),
}
SPECIAL: dict[tuple[str, str], tuple[list[Any], list[Any]]] = {
    ("/v1/chat/completions", "logprobs"): ([False, True], []),
    ("/v1/completions", "logprobs"): ([0, 5], [-1, 6]),
    ("/v1/embeddings", "input"): (["a", [1], ["a", "b"], [[1], [2]]], [[], "", [[]], [-1], ["a"] * 257]),
}
TEXTS = ("model", "prompt", "input", "instructions", "system", "stop", "cache_salt", "guided_regex", "guided_grammar")
OBJECTS = ("logit_bias", "stream_options", "response_format", "structured_outputs", "guided_json")
CASES = [(path, field) for path, kind in TYPES.items() for field in kind.__struct_fields__]


def ask(server: ServerProcess, path: str, field: str, text: str) -> tuple[int, Any]:
    """The status, and the error object if there is one, of a request with one field as that text of JSON."""
    others = json.dumps({name: value for name, value in REQUIRED[path].items() if name != field})[1:-1]
    status, headers, body = server.exchange("POST", path, f"{{{others}{', ' if others else ''}{json.dumps(field)}: {text}}}".encode())
    return status, json.loads(body)["error"] if headers["content-type"] == "application/json" and status != 200 else None


@pytest.mark.parametrize(("path", "field"), CASES)
def test_a_field(server: ServerProcess, path: str, field: str) -> None:
    good, out_of_range = SPECIAL.get((path, field)) or TABLE[field]
    for value in good:
        assert ask(server, path, field, json.dumps(value)) == (200, None), value
    status, error = ask(server, path, field, "null")
    assert status == (400 if field in REQUIRED[path] else 200), error
    wrong_type = ["7"] if field in TEXTS else ['"x"', "{}"] if field not in OBJECTS else ['"x"', "[]"]
    wrong_type += [] if isinstance(good[0] if good else None, bool) else ["true"]
    for text in (*map(json.dumps, out_of_range), *wrong_type):
        status, error = ask(server, path, field, text)
        assert (status, error["type"]) == (400, "invalid_request_error"), text
        assert (error["param"] or "").split("[")[0].split(".")[0] == field, (text, error)
    for text in ("NaN", "Infinity", "-Infinity"):
        status, error = ask(server, path, field, text)
        assert (status, error["code"]) == (400, "invalid_json"), text


@pytest.mark.parametrize("path", TYPES)
def test_a_required_field_is_missed(server: ServerProcess, path: str) -> None:
    for field in REQUIRED[path]:
        status, answer = server.post(path, {name: value for name, value in REQUIRED[path].items() if name != field})
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "missing_required_parameter", field)


@pytest.mark.parametrize("path", TYPES)
def test_what_is_refused_and_what_is_harmless(server: ServerProcess, path: str) -> None:
    for field, neutral in REFUSED[path].items():
        for value in (*neutral, None):
            assert ask(server, path, field, json.dumps(value)) == (200, None), (field, value)
        status, error = ask(server, path, field, '{"some": "thing"}')
        assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", field)
    for field in protocol.HARMLESS:
        for value in ("x", None, {"a": "b"}, True):
            assert ask(server, path, field, json.dumps(value)) == (200, None), (field, value)
    status, error = ask(server, path, "no_such_field", "null")
    assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", "no_such_field")
