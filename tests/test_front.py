"""What stands in front of generation: the queue's answer, a key's limits, other origins, TLS, a unix socket, and slow clients."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import re
import resource
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted_engine import ENVIRONMENT, ServerProcess, wait_for

from headrace.cli.serve import check_origins
from headrace.errors import UsageError
from headrace.server.limits import MAX_CONTAINERS, MAX_DEPTH, refuse_shape
from headrace.server.listen import bind_unix, remove_unix, tls_context

COMPLETIONS = "/v1/completions"
ALICE, BOB = {"authorization": "Bearer alice-key-01"}, {"authorization": "Bearer bobby-key-01"}
KEYS = ("--api-key", "alice=alice-key-01", "--api-key", "bob=bobby-key-01")
PEM = Path(__file__).with_name("localhost.pem")
LONG = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


# The queue


def test_where_a_request_stands() -> None:
    arguments = ("--step-ms", "5", "--max-batch-size", "2", "--log-format", "json", "--log-level", "INFO")
    with ServerProcess(*arguments, *KEYS) as server, concurrent.futures.ThreadPoolExecutor(6) as pool:

        def ask(i: int) -> tuple[int, dict[str, str], bytes]:
            body = {"prompt": "ab" * 60, "max_tokens": 120, "temperature": 0}
            return server.exchange("POST", COMPLETIONS, body, ALICE | {"x-request-id": f"r{i}"})

        def queue(headers: dict[str, str]) -> Any:
            return json.loads(server.exchange("GET", "/queue", None, headers)[2])

        def running() -> float:
            lines = server.exchange("GET", "/metrics", None, ALICE)[2].decode().splitlines()
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("headrace_requests_running"))

        assert server.exchange("GET", "/queue")[0] == 401
        assert queue(ALICE) == {"object": "queue", "waiting": 0, "expected_wait_ms": 0.0, "data": []}
        asked = [pool.submit(ask, i) for i in range(2)]
        wait_for(lambda: running() == 2)
        asked += [pool.submit(ask, i) for i in range(2, 6)]
        wait_for(lambda: queue(BOB)["waiting"] == 4)
        mine, others = queue(ALICE), queue(BOB)
        assert [row["position"] for row in mine["data"]] == [1, 2, 3, 4]
        assert len({row["request_id"] for row in mine["data"]}) == 4
        assert all(row["waited_ms"] > 0 and row["expected_wait_ms"] >= 0 for row in mine["data"])
        assert others["data"] == []  # another key's requests are nobody's business
        assert others["expected_wait_ms"] > 0
        answers = [future.result() for future in asked]
        for status, headers, body in answers:
            assert status == 200
            assert float(headers["x-queue-ms"]) == pytest.approx(json.loads(body)["timings"]["queue"], abs=0.06)
        assert 4 <= max(int(headers["x-queue-position"]) for _, headers, _ in answers) <= 6  # the first two may still have been there
        assert sum(float(headers["x-queue-ms"]) > 400 for _, headers, _ in answers) == 4
        assert server.end() == 0
        lines = [json.loads(line) for line in server.said().splitlines()]
        told = {line["request_id"]: line for line in lines if line.get("endpoint") == "completions"}
        assert {told[f"r{i}"]["status"] for i in range(6)} == {200}


# A key's limits


def test_limits_of_a_key() -> None:
    with ServerProcess("--step-ms", "1", "--api-key", "alice=alice-key-01 rpm=4 tpm=100", *KEYS[2:]) as server:
        body = {"prompt": "hello", "max_tokens": 5, "temperature": 0}
        status, headers, _ = server.exchange("POST", COMPLETIONS, body, ALICE)
        assert (status, headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == (200, "4", "3")
        assert (headers["x-ratelimit-limit-tokens"], headers["x-ratelimit-remaining-tokens"]) == ("100", "90")
        assert re.fullmatch(r"(\d+m)?\d+(\.\d+)?m?s", headers["x-ratelimit-reset-tokens"])
        bad = server.exchange("POST", COMPLETIONS, {"prompt": ""}, ALICE)  # counts: it was sent
        assert (bad[0], bad[1]["x-ratelimit-remaining-requests"]) == (400, "2")
        large = server.exchange("POST", COMPLETIONS, body | {"prompt": "x" * 90}, ALICE)
        assert (large[0], large[1]["x-ratelimit-remaining-tokens"]) == (200, "0")
        status, headers, data = server.exchange("POST", COMPLETIONS, body, ALICE)
        error = json.loads(data)["error"]
        assert (status, error["type"], error["code"], error["param"]) == (429, "rate_limit_error", "rate_limit_exceeded", None)
        assert "100 tokens a minute" in error["message"]
        assert 1 <= int(headers["retry-after"]) <= 60
        assert int(headers["retry-after-ms"]) <= 1000 * int(headers["retry-after"])
        status, headers, _ = server.exchange("POST", COMPLETIONS, body, BOB)
        assert status == 200
        assert not any(name.startswith("x-ratelimit") for name in headers)
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="alice-key-01", max_retries=0) as client,
            pytest.raises(openai.RateLimitError) as caught,
        ):
            client.completions.create(model="scripted", prompt="hello")
        assert caught.value.code == "rate_limit_exceeded"


def test_requests_of_a_key_at_once() -> None:
    with ServerProcess("--step-ms", "2", "--quota", "0", "0", "2", *KEYS) as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(server.exchange, "POST", COMPLETIONS, LONG | {"max_tokens": 150}, ALICE) for _ in range(2)]
        authorized = {"authorization": "Bearer bobby-key-01"}
        wait_for(lambda: b'requests_open{model="scripted"} 2.0' in server.exchange("GET", "/metrics", None, authorized)[2])
        status, _, data = server.exchange("POST", COMPLETIONS, LONG, ALICE)
        assert (status, "its limit is 2 at once" in data.decode()) == (429, True)
        assert server.exchange("POST", COMPLETIONS, {"prompt": "hi"}, BOB)[0] == 200
        assert [future.result()[0] for future in running] == [200, 200]
        with socket.create_connection(("127.0.0.1", server.port)) as left:  # who leaves gives the place back
            body = json.dumps(LONG).encode()
            left.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer alice-key-01\r\n")
            left.sendall(b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        for _ in range(3):
            wait_for(lambda: server.exchange("POST", COMPLETIONS, {"prompt": "hi"}, ALICE)[0] == 200)


# Other origins


@pytest.fixture(scope="module")
def cors() -> Iterator[ServerProcess]:
    with ServerProcess("--step-ms", "1", "--cors-origin", "https://chat.example.org", *KEYS) as server:
        yield server


def test_a_page_of_an_allowed_origin(cors: ServerProcess) -> None:
    origin = {"origin": "https://chat.example.org"}
    asks = origin | {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    status, headers, _ = cors.exchange("OPTIONS", COMPLETIONS, None, asks)  # a preflight has no key
    assert (status, headers["access-control-allow-origin"]) == (200, "https://chat.example.org")
    assert {"authorization", "content-type"} <= set(re.split(r", *", headers["access-control-allow-headers"].lower()))
    for more in ({}, {"stream": True}):
        status, headers, data = cors.exchange("POST", COMPLETIONS, {"prompt": "hi", "temperature": 0} | more, ALICE | origin)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://chat.example.org")
        assert "".join(re.findall(r'"text":"([^"]*)"', data.decode())) == "hi"
        assert "x-request-id" in headers["access-control-expose-headers"]
    status, headers, _ = cors.exchange("POST", COMPLETIONS, {"prompt": "hi"}, origin)
    assert (status, headers["access-control-allow-origin"]) == (401, "https://chat.example.org")  # so that the page can read why


def test_pages_of_other_origins(cors: ServerProcess) -> None:
    for origin in ("https://evil.example", "http://chat.example.org", "https://chat.example.org.evil.example", "null"):
        status, headers, data = cors.exchange("OPTIONS", COMPLETIONS, None, {"origin": origin, "access-control-request-method": "POST"})
        assert (status, json.loads(data)["error"]["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in headers
        status, headers, _ = cors.exchange("POST", COMPLETIONS, {"prompt": "hi"}, ALICE | {"origin": origin})
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("origin", ["chat.example.org", "https://", "https://a.example/", "https://a.example/path", "ftp://a.example", ""])
def test_origins_that_are_none(origin: str) -> None:
    with pytest.raises(UsageError, match="--cors-origin: expected an origin"):
        check_origins([origin])


def test_origins() -> None:
    assert check_origins(["https://a.example", "http://localhost:3000", "*"]) == ("https://a.example", "http://localhost:3000", "*")


# TLS and unix sockets


def test_tls() -> None:
    server = ServerProcess("--step-ms", "1", "--tls-cert", str(PEM))
    context = ssl.create_default_context(cafile=str(PEM))

    def exchange(method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection("localhost", server.port, context=context, timeout=10)
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, data

    try:
        wait_for(lambda: exchange("GET", "/ready")[0] == 200, 10)
        for stream in (False, True):
            status, data = exchange("POST", COMPLETIONS, {"prompt": "over TLS", "temperature": 0, "stream": stream})
            text = "".join(re.findall(r'"text":"([^"]*)"', data.decode()))
            assert (status, text) == (200, "over TLS")
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert not plain.recv(100).startswith(b"HTTP/1.1 200")
        assert exchange("GET", "/health")[0] == 200
    finally:
        assert server.end() == 0


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    text = PEM.read_text()
    (tmp_path / "cert").write_text(text[: text.index("-----BEGIN PRIVATE")])
    (tmp_path / "nonsense").write_text("nothing")
    for cert, key, said in (
        (tmp_path / "none", None, "none cannot be read"),
        (tmp_path / "cert", None, "no certificate with its key"),
        (tmp_path / "cert", tmp_path / "nonsense", "no certificate with its key"),
        (tmp_path / "nonsense", PEM, "no certificate with its key"),
        (None, PEM, "--tls-key: needs --tls-cert"),
    ):
        with pytest.raises(UsageError, match=said):
            tls_context(cert, key)
    assert tls_context(None, None) is None


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=10)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self.path))


def over_unix(path: Path, method: str, where: str, body: Any = None) -> tuple[int, bytes]:
    connection = UnixConnection(path)
    try:
        connection.request(method, where, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "headrace.sock"
    for how in (signal.SIGKILL, signal.SIGTERM):  # the second start finds what the first one left
        server = ServerProcess("--step-ms", "1", "--uds", str(path))
        wait_for(lambda: over_unix(path, "GET", "/ready")[0] == 200, 10)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        status, data = over_unix(path, "POST", COMPLETIONS, {"prompt": "hello", "temperature": 0})
        assert (status, json.loads(data)["choices"][0]["text"]) == (200, "hello")
        with pytest.raises(UsageError, match="a server is listening on"):
            bind_unix(path)
        server.end(how)
        assert path.exists()


def test_the_command_on_a_unix_socket(tmp_path: Path) -> None:
    """The whole command: it says what it does as JSON, and takes its socket away when it ends."""
    path = tmp_path / "headrace.sock"
    command = [sys.executable, "-m", "headrace", "serve", "--uds", str(path), "--memory", "1GiB", "--log-format", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        wait_for(path.exists, 10)
        wait_for(lambda: over_unix(path, "GET", "/ready")[0] == 200, 20)
        status, data = over_unix(path, "POST", COMPLETIONS, {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0})
        assert (status, json.loads(data)["choices"][0]["text"]) == (200, " Paris")
        process.send_signal(signal.SIGTERM)
        said, logged = process.communicate(timeout=15)
    assert process.returncode == 0
    assert not path.exists()
    assert any(json.loads(line)["msg"].startswith("ready in ") for line in said.splitlines())
    assert [json.loads(line)["status"] for line in logged.splitlines()] == [200]


def test_unix_sockets_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="is not a socket"):
        bind_unix(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    for path in (tmp_path / "no" / "folder", tmp_path / ("x" * 200)):
        with pytest.raises(UsageError, match="--uds: cannot listen"):
            bind_unix(path)
    path = tmp_path / "one"
    sock, inode = bind_unix(path)
    sock.close()
    second, other = bind_unix(path)
    remove_unix(path, inode if inode != other else -1)  # not its own any more
    assert path.exists()
    remove_unix(path, other)
    assert not path.exists()
    second.close()


# Clients that are slow or send strange shapes


def test_slow_clients() -> None:
    with ServerProcess("--read-timeout", "0.2", "--step-ms", "2") as server:
        body = b'{"prompt":"abc","temperature":0}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        for sent in (b"", b"POST /v1/comp", head[:-2], head, head + body[:5]):
            with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
                sock.sendall(sent)
                assert sock.recv(4096).startswith(b"HTTP/1.1 408"), sent
                assert sock.recv(4096) == b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:  # an answer may take as long as it likes
            long = json.dumps(LONG | {"max_tokens": 300}).encode()
            sock.sendall(head.replace(b"%d" % len(body), b"%d" % len(long)) + long)
            wait_for(lambda: server.metric("requests_open") == 1)
            wait_for(lambda: server.metric("requests_open") == 0, 10)
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
            sock.sendall(head)  # the next one on the same connection has its time too
            assert sock.recv(65536).startswith(b"HTTP/1.1 408")
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:  # in pieces, but in time
            for i in range(0, len(head), 40):
                sock.sendall(head[i : i + 40])
            for i in range(len(body)):
                sock.sendall(body[i : i + 1])
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")


def test_more_connections_than_descriptors() -> None:
    """Those beyond are told so, those that are there go on, and when some leave others may come."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        server = ServerProcess("--step-ms", "1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5)) for _ in range(220)]
        answers = [client.recv(1000) for client in clients[140:]]
        assert all(answer.startswith(b"HTTP/1.1 503") and b'"code":"unavailable"' in answer for answer in answers)
        clients[0].sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert clients[0].recv(1000).startswith(b"HTTP/1.1 200")
        for client in clients[1:20]:
            client.close()
        wait_for(lambda: server.get("/health")[0] == 200)


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        (b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, False),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), True),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), True),
        (b'{"a":"' + b"[" * 1000 + b'"}', False),
        (b'{"a":"\\"' + b"[" * 1000 + b'"}', False),
        (b'{"a":"\\\\"' + b",".join([b"[" * 70]) + b"}", True),
        (b'{"a":"\\\\\\"' + b"[" * 1000 + b'"}', False),
        (b"[" + b"[]," * 1000 + b"[]]", False),
        (b"[" + b"[]," * MAX_CONTAINERS + b"[]]", True),
        (b"[" * (4 << 20), True),
        (b'"",' * (1 << 19) + b"[" * (1 << 20), True),
        ("{\"ключ[[\": \"[[[[\"}".encode() * 50, False),
    ],
)  # fmt: skip
def test_shapes(body: bytes, refused: bool) -> None:
    if not refused:
        refuse_shape(body)
        return
    with pytest.raises(Exception, match=r"nested too deeply|more than 100000 arrays"):
        refuse_shape(body)
