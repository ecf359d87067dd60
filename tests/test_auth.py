"""Who may call what: keys on the matched route, default deny, and what is said when there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from scripted_engine import ServerProcess, wait_for

from headrace.errors import UsageError
from headrace.server.auth import Keys, read_keys

ALICE, BOB = "alice-key-0001", "c2VjcmV0LWtleQ=="
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "temperature": 0},
    "/v1/completions": {"prompt": "hello", "temperature": 0},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [104, 105]},
}
GUARDED = [("POST", path) for path in BODIES] + [("GET", "/v1/models"), ("GET", "/v1/models/scripted"), ("GET", "/metrics")]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess("--step-ms", "1", "--api-key", f"alice={ALICE}", "--api-key", BOB)
    wait_for(lambda: server.get("/ready")[0] == 200, 10)
    yield server
    assert server.end() == 0
    assert "Traceback" not in server.said()


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_only_with_a_key(server: ServerProcess, method: str, path: str) -> None:
    body = BODIES.get(path)
    wrong = [
        {}, {"authorization": "Bearer wrong-key-000"}, {"authorization": f"Basic {ALICE}"}, {"authorization": ALICE},
        {"authorization": "Bearer"},
        {"authorization": f"Bearer {ALICE}x"}, {"authorization": f"Bearer {ALICE[:-1]}"}, {"x-api-key": ""}, {"api-key": ALICE},
        {"authorization": "Bearer \xff\xfe"},
    ]  # fmt: skip
    for headers in wrong:
        status, answered, data = server.exchange(method, path, body, headers)
        assert (status, answered["www-authenticate"]) == (401, "Bearer"), headers
        error = json.loads(data)["error"]
        assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
        assert ALICE not in error["message"]
        assert answered["x-request-id"].startswith("req-")
    for headers in ({"authorization": f"Bearer {ALICE}"}, {"authorization": f"bearer  {BOB}"}, {"x-api-key": ALICE}):
        assert server.exchange(method, path, body, headers)[0] == 200, headers


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_need_none(server: ServerProcess, path: str) -> None:
    assert server.get(path)[0] == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/%6dodels", 401),
        ("/v1/models?health", 401),
        ("/v1/models/../health", 401),
        ("//v1/models", 404),
        ("/v1/models/", 401),
        ("/nothing", 404),
    ],
)
def test_no_spelling_of_a_path_gets_around_it(server: ServerProcess, path: str, status: int) -> None:
    assert server.exchange("GET", path)[0] == status


def test_other_methods_do_not_either(server: ServerProcess) -> None:
    assert server.exchange("HEAD", "/v1/models")[0] == 401
    for method in ("OPTIONS", "PUT", "DELETE"):
        status, headers, _ = server.exchange(method, "/v1/models")
        assert (status, headers["allow"]) == (405, "GET, HEAD")


def test_the_official_client(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=ALICE, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["scripted"]
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none-of-them", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_an_unread_body_does_not_become_a_request(server: ServerProcess) -> None:
    """The refusal closes the connection, or the body would be read as the next request on it."""
    status, headers, _ = server.exchange("POST", "/v1/completions", b"GET /metrics HTTP/1.1\r\n\r\n")
    assert (status, headers["connection"]) == (401, "close")


def test_only_its_own_names_on_loopback() -> None:
    with ServerProcess("--allowed-host", "localhost", "--allowed-host", "127.0.0.1", "--allowed-host", "[::1]") as server:
        for host in ("localhost", "LOCALHOST:80", "127.0.0.1", f"127.0.0.1:{server.port}", "[::1]:8000", "localhost."):
            assert server.exchange("GET", "/v1/models", headers={"host": host})[0] == 200, host
        for host in (
            "evil.example",
            f"evil.example:{server.port}",
            "127.0.0.1.evil.example",
            "localhost@evil.example",
            "",
            "[::2]",
            "127.0.0.1:80:80",
        ):
            for method, path in (("GET", "/health"), ("POST", "/v1/completions"), ("GET", "/nothing")):
                status, headers, data = server.exchange(method, path, headers={"host": host})
                assert (status, json.loads(data)["error"]["code"]) == (421, "misdirected_request"), host
                assert "www-authenticate" not in headers


def test_keys_from_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# who may call\n\nalice={ALICE}\n  {BOB}  \n")
    keys = read_keys(["flag-key-0001"], file, "env=env-key-0001,env-key-0002")
    found = {key: keys.find(key.encode()) for key in ("flag-key-0001", ALICE, BOB, "env-key-0001", "env-key-0002", "other-key-0001", "")}
    assert found == {
        "flag-key-0001": "key-1",
        "env-key-0001": "env", "env-key-0002": "key-3", ALICE: "alice", BOB: "key-5", "other-key-0001": None, "": None,
    }  # fmt: skip
    assert len(keys) == 5
    assert len(read_keys([], None, None)) == len(read_keys([], None, "")) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["short"], "at least 8"), (["a=short"], "a: expected"), (["a=with space1"], "a: expected"),
        ([""], "at least 8"), (["ключ-ключ"], "at least 8"),
        (["a=key-00001", "a=key-00002"], "the name a is given twice"), (["a=key-00001", "b=key-00001"], "the same key"),
    ],
)  # fmt: skip
def test_bad_keys(given: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        read_keys(given, None, None)
    assert not any(len(key) > 8 and key.partition("=")[2] in str(caught.value) for key in given if "=" in key)


def test_bad_files(tmp_path: Path) -> None:
    for name, content, said in (
        ("empty", b"# nothing\n", "has no key"),
        ("bytes", b"\xff\xfe\x00", "not UTF-8"),
        ("large", b"x" * (2 << 20), "more than"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=said):
            read_keys([], tmp_path / name, None)
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            read_keys([], path, None)


def test_no_key_is_kept() -> None:
    assert ALICE not in repr(vars(Keys({"a": ALICE})))
