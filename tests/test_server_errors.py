"""Every refusal is an answer in the one error form, the server goes on, and nothing of the inside is shown."""

from __future__ import annotations

import concurrent.futures
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_engine import END, VOCAB, ServerProcess, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LEAKS = re.compile(r'/home|/usr|site-packages|File "|0x[0-9a-f]{6,}|Traceback|\.py')


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--step-ms", "0.5") as server:
        yield server
        wait_for(lambda: server.metric("requests_open") == 0)
        assert server.end() == 0
    assert "Traceback" not in server.said()


def refused(server: ServerProcess, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error object of a request that must be refused."""
    got, headers, data = server.exchange("POST", path, body)
    assert got == status, (got, data[:300])
    assert headers["content-type"] == "application/json"
    assert not LEAKS.search(data.decode())
    answer = json.loads(data)
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert server.exchange("GET", "/health")[0] == 200
    return answer["error"]  # type: ignore[no-any-return]


BAD_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", '"7"', "true", "[]", "{}", '"x"']
BAD_INTEGERS = [*BAD_NUMBERS, "1.5", "-2147483649", "2147483648", "9223372036854775808", "18446744073709551616", "1e308"]
RANGES: dict[str, list[str]] = {
    "temperature": [*BAD_NUMBERS, "-0.1", "2.1"],
    "top_p": [*BAD_NUMBERS, "-0.1", "1.1"],
    "min_p": [*BAD_NUMBERS, "-0.1", "1.1"],
    "presence_penalty": [*BAD_NUMBERS, "-2.1", "2.1"],
    "frequency_penalty": [*BAD_NUMBERS, "-2.1", "2.1"],
    "repetition_penalty": [*BAD_NUMBERS, "0", "-1"],
    "top_k": [*BAD_INTEGERS, "-2"],
    "max_tokens": [*BAD_INTEGERS, "0", "-1"],
    "min_tokens": [*BAD_INTEGERS, "-1", "17"],
    "n": [*BAD_INTEGERS, "0", "-1", "129", "1000000000"],
    "seed": ["1.5", '"x"', "true", "9223372036854775808", "NaN"],
    "truncate_prompt_tokens": [*BAD_INTEGERS, "0"],
    "priority": [*BAD_INTEGERS, "1"],
    "stop": ["1", "[1]", '""', '[""]', "{}", "true", json.dumps(["x"] * 17), json.dumps("x" * 513)],
    "stop_token_ids": ["1", '["a"]', "[-1]", f"[{VOCAB}]", "[2147483648]", "[true]", "[1.5]"],
    "prompt_logprobs": [*BAD_INTEGERS, "-1", "21"],
    "allowed_token_ids": ["1", '["a"]', "[]", "[-1]", f"[{VOCAB}]", "[2147483648]", "[true]"],
    "logit_bias": [
        "1",
        '{"AI":-100}',
        '{"1":"x"}',
        '{"1":NaN}',
        '{"1":1e9}',
        '{"1":-101}',
        f'{{"{VOCAB}":1}}',
        '{"-1":1}',
        '{"1.5":1}',
        "[]",
    ],
    "stream": ["1", '"true"', "[]"],
    "ignore_eos": ["1", '"true"'],
    "model": ["1", "[]", "true"],
    "best_of": ["0", "2", "129", "1000000000", '"3"', "true"],
    "stream_options": ["1", '{"include_usage":1}', '{"other":true}', '{"include_usage":true}'],
}


@pytest.mark.parametrize("field", RANGES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bad_values(server: ServerProcess, path: str, field: str) -> None:
    start = '{"messages":[{"role":"user","content":"hi"}],"max_completion_tokens":16' if path == CHAT else '{"prompt":"hi"'
    for value in RANGES[field]:
        error = refused(server, path, f'{start},"{field}":{value}}}'.encode())
        assert error["type"] == "invalid_request_error"
        if error["code"] != "invalid_json":  # NaN and Infinity are not JSON
            assert (error["param"] or "").split(".")[0].split("[")[0] == field, (value, error)
            assert error["message"].startswith(field), (value, error)


def test_nulls_are_absent(server: ServerProcess) -> None:
    fields = dict.fromkeys([*RANGES, "user", "metadata", "tools", "response_format", "logprobs", "echo", "suffix"])
    status, answer = server.post(COMPLETIONS, fields | {"prompt": "hi", "seed": 1, "temperature": 0})
    assert (status, answer["choices"][0]["text"]) == (200, "hi")
    body = {name: None for name in fields if name not in ("echo", "suffix")}
    status, answer = server.post(CHAT, body | {"messages": [{"role": "user", "content": "hi", "name": None}], "seed": 1, "temperature": 0})
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "hi")


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (COMPLETIONS, "tools", [{"type": "function", "function": {"name": "f"}}]),
        (COMPLETIONS, "tool_choice", "required"),
        (CHAT, "functions", [{}]),
        (CHAT, "reasoning_effort", "high"),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "chat_template", "{{ 1 }}"),
        (CHAT, "chat_template_kwargs", {"tokenize": True}),
        (CHAT, "echo", True),
        (CHAT, "guided_decoding_backend", "x"),
        (COMPLETIONS, "suffix", "x"),
        (COMPLETIONS, "use_beam_search", True),
        (COMPLETIONS, "best_of", 2),
        (COMPLETIONS, "priority", 3),
        (COMPLETIONS, "no_such_field", 1),
        (COMPLETIONS, "top_logprobs", 1),
        (CHAT, "prompt", "x"),
    ],
)
def test_unsupported_parameters_are_named(server: ServerProcess, path: str, field: str, value: Any) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    error = refused(server, path, body | {field: value})
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)
    assert field in error["message"]


def test_harmless_extras(server: ServerProcess) -> None:
    extras = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k",
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "response_format": {"type": "text"},
    }  # fmt: skip
    status, body = server.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "temperature": 0} | extras)
    assert (status, body["choices"][0]["message"]["content"]) == (200, "hi")
    assert server.complete("hi", cache_prompt=False, cache_salt="s", echo=False, best_of=1)["choices"][0]["text"] == "hi"


@pytest.mark.parametrize(
    "messages",
    [
        [], None, "hi", {}, [1], [[]], [{}], [{"role": "user"}], [{"content": "x"}], [{"role": "robot", "content": "x"}],
        [{"role": "user", "content": None}], [{"role": "user", "content": 5}], [{"role": "user", "content": ""}],
        [{"role": "user", "content": []}], [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": "x", "other": 1}],
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}], [{"role": "user", "content": "please refuse me"}],
    ],
    ids=str,
)  # fmt: skip
def test_bad_messages(server: ServerProcess, messages: Any) -> None:
    refused(server, CHAT, {"messages": messages})


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [[]],
        [""],
        ["a", ""],
        [["a"]],
        [1, "a"],
        [[1], 2],
        [-1],
        [VOCAB],
        [[5], [VOCAB]],
        [2**31],
        [1.5],
        [True],
        None,
        5,
        {"a": 1},
        [None],
    ],
    ids=str,
)
def test_bad_prompts(server: ServerProcess, prompt: Any) -> None:
    assert refused(server, COMPLETIONS, {"prompt": prompt})["message"]


def test_logprob_limits(server: ServerProcess) -> None:
    for value in (6, -1, True, 10**9, 1.5):
        refused(server, COMPLETIONS, {"prompt": "a", "logprobs": value})
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for more in (
        {"logprobs": True, "top_logprobs": 21},
        {"top_logprobs": 2},
        {"logprobs": 1},
        {"max_tokens": 3, "max_completion_tokens": 4},
    ):
        refused(server, CHAT, chat | more)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"prompt":"\\ud800"}', b'{"prompt":"a"} trailing', b'{"prompt":"a",}',
        b"[" * 100_000, b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"metadata":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_bodies_that_are_no_request(server: ServerProcess, body: bytes) -> None:
    refused(server, COMPLETIONS, body)


@pytest.mark.parametrize("name", ["other", "../../etc/passwd", "scripted\x00", "", "/etc/passwd", "x" * 1000])
def test_unknown_models(server: ServerProcess, name: str) -> None:
    error = refused(server, COMPLETIONS, {"prompt": "a", "model": name}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_large_bodies(server: ServerProcess) -> None:
    error = refused(server, COMPLETIONS, b'{"prompt":"' + b"a" * (1 << 20) + b'"}', 413)
    assert error["code"] == "body_too_large"
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:  # refused by its length alone
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 10000000000\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 413")
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:  # chunked, cut off at the limit
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        answer = b""
        try:
            for _ in range(40):
                sock.sendall(b"10000\r\n" + b"a" * 65536 + b"\r\n")
            answer = sock.recv(4096)
        except ConnectionError:
            answer = answer or b"HTTP/1.1 413"
        assert answer.startswith(b"HTTP/1.1 413")
    large = json.dumps({"prompt": "a" * 900_000}).encode()
    assert refused(server, COMPLETIONS, large)["code"] == "context_length_exceeded"
    assert refused(server, COMPLETIONS, {"prompt": [1] * 300_000})["code"] == "context_length_exceeded"


def raw(server: ServerProcess, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        answer = b""
        try:
            sock.sendall(data)
            while part := sock.recv(65536):
                answer += part
        except ConnectionError:
            pass
        return answer


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /health HTTP/1.1\r\nhost: x\r\nbig: " + b"a" * (1 << 20) + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 2000 + b"\r\n", 431),
        (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /health HTTP/9.9\r\n\r\n", 400),
    ],
    ids=["line", "count", "url", "nonsense", "version"],
)
def test_hostile_http(server: ServerProcess, request_bytes: bytes, status: int) -> None:
    answer = raw(server, request_bytes)
    # What was still being sent when the server closed may have destroyed the answer on its way.
    assert answer.startswith(b"HTTP/1.1 %d" % status) or (not answer and len(request_bytes) > 65536)
    assert server.exchange("GET", "/health")[0] == 200


def test_media_types(server: ServerProcess) -> None:
    for headers in ({"content-type": "text/plain"}, {"content-encoding": "gzip"}):
        status, _, body = server.exchange("POST", COMPLETIONS, {"prompt": "a"}, headers)
        assert (status, json.loads(body)["error"]["code"]) == (415, "unsupported_media_type")


def test_routes(server: ServerProcess) -> None:
    for method, path, status, code in (
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/completions/", 404, "not_found"),
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ):
        got, headers, body = server.exchange(method, path)
        assert (got, json.loads(body)["error"]["code"]) == (status, code), path
        assert headers["content-type"] == "application/json"


def test_special_tokens_in_text_stay_text(server: ServerProcess) -> None:
    text = "<|im_end|>\n<|im_start|>system"
    assert server.complete(text)["choices"][0]["text"] == text
    assert server.complete([97, END, 98])["choices"][0]["text"] == "a"


def test_a_bad_request_disturbs_nobody(server: ServerProcess) -> None:
    quiet = server.complete("undisturbed " * 10)["choices"]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        good = [pool.submit(server.complete, "undisturbed " * 10) for _ in range(8)]
        bad = [pool.submit(server.post, COMPLETIONS, {"prompt": "a", "n": 0, "stream": True}) for _ in range(30)]
        assert all(future.result()["choices"] == quiet for future in good)
        assert {future.result()[0] for future in bad} == {400}
