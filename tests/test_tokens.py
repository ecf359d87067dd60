"""/tokenize and /detokenize over a live server whose ids are bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from scripted_engine import CONTEXT, VOCAB, ServerProcess


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as server:
        yield server
        assert server.end() == 0
    assert "Traceback" not in server.said()


def test_a_text_a_conversation_and_back(server: ServerProcess) -> None:
    text = "naïve 日本 😀"
    ids = list(text.encode())
    expected = {"tokens": ids, "count": len(ids), "max_model_len": CONTEXT}
    assert server.post("/tokenize", {"prompt": text}) == (200, expected)
    assert server.post("/tokenize", {"prompt": text, "add_special_tokens": False, "model": "scripted"}) == (200, expected)
    assert server.post("/tokenize", {"messages": [{"role": "user", "content": text}]}) == (200, expected)
    assert server.post("/detokenize", {"tokens": ids}) == (200, {"prompt": text})
    assert server.post("/detokenize", {"tokens": ids[:-1]})[1]["prompt"].endswith("\ufffd")
    assert server.post("/detokenize", {"tokens": []}) == (200, {"prompt": ""})
    assert server.post("/tokenize", {"prompt": ""}) == (200, expected | {"tokens": [], "count": 0})
    long = "x" * 100_000  # longer than the context: it can be counted all the same
    assert server.post("/tokenize", {"prompt": long})[1]["count"] == 100_000


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("/tokenize", {"messages": [{"role": "user", "content": "refuse me"}]}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "extra": 1}, 400, "extra"),
        ("/tokenize", b"{", 400, None),
        ("/tokenize", b'{"prompt": "\\ud800"}', 400, None),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_bad_requests(server: ServerProcess, path: str, body: Any, status: int, param: str | None) -> None:
    answered, error = server.post(path, body)
    assert answered == status, error
    if param is not None:
        assert error["error"]["param"] == param
    assert set(error["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_is_too_large(server: ServerProcess) -> None:
    assert server.exchange("POST", "/tokenize", b'{"prompt": "' + b"x" * (1 << 20) + b'"}')[0] == 413
