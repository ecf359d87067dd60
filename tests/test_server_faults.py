"""What happens when clients leave, engines die, queues fill and signals come."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import CRASH, HANG, RAISE, ServerProcess, events_of, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "abcdefgh", "temperature": 0, "ignore_eos": True, "max_tokens": 2000}


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ServerProcess(*getattr(request, "param", ())) as server:
        yield server


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerProcess]:
    """For faults that leave no trace."""
    with ServerProcess("--step-ms", "2") as server:
        yield server
        assert server.end() == 0


def send(server: ServerProcess, body: dict[str, Any], path: str = COMPLETIONS, receive_buffer: int = 0) -> socket.socket:
    """A request whose answer nobody has read yet."""
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(10)
    sock.connect(("127.0.0.1", server.port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def held(server: ServerProcess) -> float:
    return server.metric("kv_blocks", state="held")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"n": 3}, {"stop": ["never"]}], ids=str)
def test_leaving_frees_a_running_request(shared: ServerProcess, stream: bool, more: dict[str, Any]) -> None:
    server = shared
    aborted = server.metric("requests_total", outcome="aborted")
    sock = send(server, LONG | {"stream": stream} | more)
    wait_for(lambda: held(server) > 0)
    sock.close()
    wait_for(lambda: held(server) == 0, 1.0)
    assert server.metric("requests_total", outcome="aborted") == aborted + 1
    steps = server.metric("engine_steps_total")
    time.sleep(0.05)
    assert server.metric("engine_steps_total") == steps
    assert server.complete("next")["choices"][0]["text"] == "next"


@pytest.mark.parametrize("server", [("--step-ms", "2", "--max-batch-size", "1")], indirect=True)
def test_leaving_frees_a_queued_request(server: ServerProcess) -> None:
    running = send(server, LONG | {"stream": True})
    wait_for(lambda: held(server) > 0)
    queued = [send(server, LONG | {"stream": bool(i % 2)}) for i in range(4)]
    wait_for(lambda: server.metric("requests_waiting") == 4)
    for sock in queued:
        sock.close()
    wait_for(lambda: server.metric("requests_waiting") == 0, 1.0)
    assert server.metric("requests_open") == 1
    running.close()
    wait_for(lambda: server.metric("requests_open") == 0)


@pytest.mark.parametrize("server", [("--step-ms", "2", "--max-batch-size", "4", "--max-waiting", "3")], indirect=True)
def test_a_full_queue_refuses(server: ServerProcess) -> None:
    socks = []
    for running in range(1, 5):  # one by one: four between two steps would be one too many for the queue
        socks.append(send(server, LONG))
        wait_for(lambda running=running: server.metric("requests_running") == running)  # type: ignore[misc]
    socks += [send(server, LONG) for _ in range(3)]
    wait_for(lambda: server.metric("requests_waiting") == 3)
    status, headers, body = server.exchange("POST", COMPLETIONS, LONG | {"stream": True})
    assert (status, json.loads(body)["error"]["code"]) == (429, "rate_limit_exceeded")
    assert headers["retry-after"] == "1"
    for sock in socks:
        sock.close()


@pytest.mark.parametrize("server", [("--step-ms", "0.2")], indirect=True)
def test_a_slow_reader_stalls_nobody(server: ServerProcess) -> None:
    wide = {"prompt": "x" * 40, "temperature": 0, "ignore_eos": True, "max_tokens": 1900, "logprobs": 5, "n": 8, "stream": True}
    slow = send(server, wide, receive_buffer=4096)
    wait_for(lambda: held(server) > 0)
    gaps = []
    while server.metric("requests_total", outcome="aborted") == 0:
        start = time.monotonic()
        assert server.complete("quick")["choices"][0]["text"] == "quick"
        gaps.append(time.monotonic() - start)
        assert sum(gaps) < 20
    assert max(gaps) < 1.0
    wait_for(lambda: held(server) == 0)
    slow.close()
    resident = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096
    assert resident < 200 << 20


@pytest.mark.parametrize("server", [("--step-ms", "0.2")], indirect=True)
def test_a_late_reader_gets_everything(server: ServerProcess) -> None:
    body = {"prompt": "abcdefgh", "temperature": 0, "ignore_eos": True, "max_tokens": 2000, "stream": True}
    sock = send(server, body | {"n": 2}, receive_buffer=4096)
    wait_for(lambda: server.metric("generation_tokens_total") > 3000 or server.metric("requests_open") == 0)
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += sock.recv(65536)
    sock.close()
    payload = data.split(b"\r\n\r\n", 1)[1]
    events = b""
    while payload:
        size, _, payload = payload.partition(b"\r\n")
        events += payload[: int(size, 16)]
        payload = payload[int(size, 16) + 2 :]
    texts = ["", ""]
    for event in events_of(events):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == ["abcdefgh" * 250] * 2


def expect_tokens(server: ServerProcess, futures: list[concurrent.futures.Future[Any]], expected: str) -> None:
    for future in futures:
        assert future.result(20)["choices"][0]["text"] == expected
    wait_for(lambda: server.get("/ready")[0] == 200)


@pytest.mark.parametrize("how", ["kill", "stop", "raise", "exit"])
@pytest.mark.parametrize("server", [("--step-ms", "3", "--watchdog-s", "1")], indirect=True)
def test_streams_survive_the_engine(server: ServerProcess, how: str) -> None:
    """The engine dies under load: it is started again, and every open request goes on with the tokens that would have come."""
    text = "to be continued, token for token; " * 5
    with concurrent.futures.ThreadPoolExecutor(16) as pool:

        def streamed(i: int) -> str:
            events = server.stream(COMPLETIONS, {"prompt": text, "temperature": 0, "max_tokens": 500})
            return "".join(event["choices"][0]["text"] for event in events)

        streams = [pool.submit(streamed, i) for i in range(8)]
        wholes = [pool.submit(server.complete, text, max_tokens=500) for _ in range(7)]
        wait_for(lambda: server.metric("generation_tokens_total") > 200)
        pid = server.engine_pid()
        start = time.monotonic()
        if how == "kill":
            os.kill(pid, signal.SIGKILL)
        elif how == "stop":
            os.kill(pid, signal.SIGSTOP)
        elif how == "exit":
            pool.submit(server.complete, [97, 98, CRASH, 99])
        else:
            pool.submit(server.post, COMPLETIONS, {"prompt": [97, 98, RAISE], "temperature": 0})
        wait_for(lambda: server.metric("engine_restarts_total") == 1)
        wait_for(lambda: server.get("/ready")[0] == 200)
        assert time.monotonic() - start < 3.0 + (how == "stop")
        assert server.get("/health")[0] == 200
        assert [stream.result(20) for stream in streams] == [text] * 8
        for whole in wholes:
            body = whole.result(20)
            assert body["choices"][0]["text"] == text
            assert body["usage"]["completion_tokens"] == len(text) + 1
            timings = body["timings"]
            assert timings["stalled"] > 0
            assert abs(sum(timings.values()) - 2 * timings["total"]) < 1e-6
    assert server.end() == 0


def test_a_request_that_kills_twice_is_ended(shared: ServerProcess) -> None:
    server = shared
    restarts = server.metric("engine_restarts_total")
    status, body = server.post(COMPLETIONS, {"prompt": [CRASH, 97], "temperature": 0})
    assert (status, body["error"]["code"]) == (500, "engine_error")
    wait_for(lambda: server.get("/ready")[0] == 200)
    assert server.complete("fine")["choices"][0]["text"] == "fine"
    assert server.metric("engine_restarts_total") == restarts + 2


def test_an_engine_that_keeps_dying_ends_the_server(server: ServerProcess) -> None:
    for _ in range(4):
        if server.process.poll() is not None:
            break
        wait_for(lambda: server.process.poll() is not None or server.get("/ready")[0] == 200)
        os.kill(server.engine_pid(), signal.SIGKILL)
        time.sleep(0.1)
    assert server.process.wait(5) == 1
    server.end()
    assert "engine process ended" in server.said()


@pytest.mark.parametrize("server", [("--watchdog-s", "1")], indirect=True)
def test_a_hung_step_is_a_crash(server: ServerProcess) -> None:
    body = server.complete([97, 98, HANG, 99])
    assert body["choices"][0]["text"] == "ab!c"
    assert server.metric("engine_restarts_total") == 1


def test_loading() -> None:
    server = ServerProcess("--load-s", "0.7")
    try:
        wait_for(lambda: server.get("/health")[0] == 200)
        assert server.get("/ready") == (503, {"status": "loading"})
        status, headers, body = server.exchange("POST", COMPLETIONS, {"prompt": "x"})
        assert (status, json.loads(body)["error"]["code"], headers["retry-after"]) == (503, "unavailable", "1")
        server.wait_ready()
        assert server.complete("x")["choices"][0]["text"] == "x"
    finally:
        assert server.end() == 0


@pytest.mark.parametrize(("arguments", "code"), [(("--fail", "model.gguf: shape: no"), 2), (("--crash-while-loading",), 1)])
def test_a_model_that_cannot_be_loaded(arguments: tuple[str, ...], code: int) -> None:
    server = ServerProcess(*arguments)
    assert server.process.wait(5) == code
    server.end()
    assert "Traceback" not in server.said()
    assert "error: " in server.said()


def test_stopped_while_loading() -> None:
    server = ServerProcess("--load-s", "30")
    wait_for(lambda: server.get("/health")[0] == 200)
    engine = server.engine_pid()
    start = time.monotonic()
    assert server.end() == 0
    assert time.monotonic() - start < 3
    wait_for(lambda: not Path(f"/proc/{engine}").exists())


@pytest.mark.parametrize("server", [("--step-ms", "4")], indirect=True)
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_draining_finishes_what_runs(server: ServerProcess, signal_number: int) -> None:
    text = "finish this one please " * 4
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(server.complete, text) for _ in range(4)]
        wait_for(lambda: server.metric("requests_running") == 4)
        engine = server.engine_pid()
        server.process.send_signal(signal_number)
        wait_for(lambda: server.get("/ready") == (503, {"status": "draining"}))
        status, body = server.post(COMPLETIONS, {"prompt": "late"})
        assert (status, body["error"]["code"]) == (503, "unavailable")
        assert [future.result(10)["choices"][0]["text"] for future in running] == [text] * 4
    assert server.process.wait(5) == 0
    assert not Path(f"/proc/{engine}").exists()


@pytest.mark.parametrize("server", [("--step-ms", "4", "--shutdown-timeout", "0.3")], indirect=True)
def test_draining_ends_what_takes_too_long(server: ServerProcess) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        stream = pool.submit(server.exchange, "POST", COMPLETIONS, LONG | {"stream": True})
        whole = pool.submit(server.exchange, "POST", COMPLETIONS, LONG)
        wait_for(lambda: server.metric("requests_running") == 2)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert events_of(stream.result(5)[2])[-1]["error"]["code"] == "unavailable"
        assert whole.result(5)[0] == 503
    assert server.process.wait(5) == 0
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("server", [("--step-ms", "4")], indirect=True)
def test_a_second_signal_is_now(server: ServerProcess) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.exchange, "POST", COMPLETIONS, LONG)
        wait_for(lambda: server.metric("requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.get("/ready")[0] == 503)
        server.process.send_signal(signal.SIGTERM)
        assert whole.result(5)[0] == 503
    assert server.process.wait(3) == 128 + signal.SIGTERM


def test_no_orphan_and_no_taken_port(server: ServerProcess) -> None:
    engine = server.engine_pid()
    running = send(server, LONG)
    wait_for(lambda: held(server) > 0)
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not Path(f"/proc/{engine}").exists() or "Z" in Path(f"/proc/{engine}/stat").read_text().split(")")[1][:3], 2.0)
    running.close()
    with ServerProcess("--port", str(server.port)) as again:
        assert again.complete("again")["choices"][0]["text"] == "again"


def test_kept_connections_and_pipelines(shared: ServerProcess) -> None:
    server = shared
    data = json.dumps({"prompt": "abc", "temperature": 0}).encode()
    one = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data) + data
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(one * 5)
        answers = b""
        while answers.count(b'"text":"abc"') < 5:
            part = sock.recv(65536)
            assert part, answers
            answers += part


def test_nothing_is_left_behind(shared: ServerProcess) -> None:
    server = shared

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{server.process.pid}/fd"))

    server.complete("warm")
    before = descriptors()
    for i in range(60):
        send(server, LONG | {"stream": bool(i % 2)}).close()
        server.post(COMPLETIONS, {"prompt": ""})
    wait_for(lambda: server.metric("requests_open") == 0 and held(server) == 0)
    wait_for(lambda: descriptors() <= before + 2)
    assert threading.active_count() < 20
