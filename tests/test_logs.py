"""What is told of requests: a line in the log, and spans to a collector."""

from __future__ import annotations

import concurrent.futures
import gzip
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripted_engine import ENVIRONMENT, ServerProcess, wait_for

COMPLETIONS = "/v1/completions"
ALICE = {"authorization": "Bearer alice-key-01"}
LONG = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


def lines_of(server: ServerProcess) -> list[dict[str, Any]]:
    """Its log, in JSON."""
    return [json.loads(line) for line in server.said().splitlines()]


def test_a_line_a_request_and_nothing_of_what_was_said() -> None:
    secret = "the treasure lies under the oak"
    with ServerProcess("--step-ms", "1", "--log-format", "json", "--log-level", "INFO", "--api-key", "alice=alice-key-01") as server:
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        headers = ALICE | {"x-request-id": "mine", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
        for stream in (False, True):
            assert server.exchange("POST", COMPLETIONS, {"prompt": secret, "temperature": 0, "stream": stream}, headers)[0] == 200
        server.exchange("POST", COMPLETIONS, {"prompt": secret, "n": 0}, ALICE)
        server.exchange("POST", COMPLETIONS, {"prompt": secret})
        server.exchange("GET", "/v1/models", None, ALICE)
        server.exchange("GET", "/nowhere%0aINFO%20forged", None, ALICE)
        with socket.create_connection(("127.0.0.1", server.port)) as left:
            body = json.dumps(LONG).encode()
            left.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer alice-key-01\r\n")
            left.sendall(b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            wait_for(lambda: b'requests_running{model="scripted"} 1.0' in server.exchange("GET", "/metrics", None, ALICE)[2])
        wait_for(lambda: any(line.get("status") == 499 for line in lines_of(server)))
        assert server.end() == 0
        said, lines = server.said(), lines_of(server)
    assert secret not in said
    assert "alice-key-01" not in said
    assert [line["status"] for line in lines] == [200, 200, 400, 401, 200, 404, 499]
    first = lines[0]
    assert (first["request_id"], first["trace_id"], first["key"], first["endpoint"]) == ("mine", trace, "alice", "completions")
    assert (first["prompt_tokens"], first["completion_tokens"], first["outcome"]) == (31, 16, "length")
    assert {"ts", "level", "duration_ms", "queue_ms", "prefill_ms", "decode_ms", "ttft_ms"} <= set(first)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["ts"])
    assert first["duration_ms"] >= first["ttft_ms"] > 0
    assert (lines[2]["outcome"], lines[2]["key"]) == ("invalid_value", "alice")
    assert (lines[5]["path"], len(said.splitlines())) == ("/nowhere\nINFO forged", 7)  # a newline in a path makes no line of its own


def test_a_long_wait_is_told_when_it_begins() -> None:
    with (
        ServerProcess("--step-ms", "20", "--max-batch-size", "1", "--log-format", "json", "--log-level", "INFO") as server,
        concurrent.futures.ThreadPoolExecutor(30) as pool,
    ):
        first = [pool.submit(server.complete, "abcd", max_tokens=4) for _ in range(14)]
        wait_for(lambda: server.metric("requests_total", outcome="length") >= 4)
        later = [pool.submit(server.complete, "abcd", max_tokens=4) for _ in range(10)]
        assert len([future.result() for future in first + later]) == 24
        assert server.end() == 0
        waits = [line for line in lines_of(server) if line["msg"] == "waits"]
        queued = {line["request_id"]: line["queue_ms"] for line in lines_of(server) if line["msg"] == "request"}
    assert waits
    for line in waits:
        assert line["position"] > 4
        assert 1000 <= line["expected_ms"] < 10_000
        assert queued[line["request_id"]] > 300


def test_text_and_content_where_they_were_asked_for() -> None:
    with ServerProcess("--step-ms", "1", "--log-level", "INFO", "--log-content") as server:
        server.complete("what\nwas said")
        server.get("/v1/no%0asuch")
        assert server.end() == 0
    first, second = server.said().splitlines()
    assert re.match(r"\S+Z INFO headrace\.request: request request_id=req-\w+ endpoint=completions status=200 outcome=stop ", first)
    assert first.endswith(r'prompt="what\\nwas said" answer="what\\nwas said"')
    assert r"path=/v1/no\nsuch" in second


def test_traces_reach_a_collector() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with socket.create_server(("127.0.0.1", 0)) as collector:
        collector.settimeout(10)
        with ServerProcess("--step-ms", "2", "--trace", f"http://127.0.0.1:{collector.getsockname()[1]}/v1/traces") as server:
            trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
            body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
            server.exchange("POST", "/v1/chat/completions", body, {"traceparent": f"00-{trace}-{parent}-01"})
            server.process.send_signal(signal.SIGTERM)  # what is left is sent before it ends
            connection, _ = collector.accept()
            with connection, connection.makefile("rwb") as stream:
                assert stream.readline().startswith(b"POST /v1/traces ")
                headers = http.client.parse_headers(stream)
                data = stream.read(int(headers["content-length"]))
                stream.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            assert server.process.wait(10) == 0
    if headers["content-encoding"] == "gzip":
        data = gzip.decompress(data)
    request = ExportTraceServiceRequest.FromString(data)
    spans = {span.name: span for span in request.resource_spans[0].scope_spans[0].spans}
    whole = spans["chat scripted"]
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (trace, parent)
    assert {"chat scripted", "queue", "prefill", "decode"} <= set(spans)
    told = {attribute.key: attribute.value for attribute in whole.attributes}
    assert told["gen_ai.usage.output_tokens"].int_value == 6
    assert not any("hello" in str(value) for value in told.values())
    at = whole.start_time_unix_nano
    for name in ("queue", "prefill", "decode"):
        span = spans[name]
        assert span.parent_span_id == whole.span_id
        assert at <= span.start_time_unix_nano < span.end_time_unix_nano
        at = span.end_time_unix_nano
    assert at <= whole.end_time_unix_nano
    assert abs(whole.end_time_unix_nano / 1e9 - time.time()) < 30


def test_without_the_packages_traces_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "opentelemetry.py").write_text("raise ImportError('not here')\n")
    environment = ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"}
    code = "from headrace.server.tracing import open_tracer; open_tracer('http://127.0.0.1:1')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "UsageError: --trace: the OpenTelemetry packages are not installed: pip install 'headrace[trace]'" in done.stderr
    code = "import sys, headrace.server.app, headrace.server.run; assert not any('opentelemetry' in name for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True)
