"""The command line as a person and a script meet it: output, exit codes, one line for what is wrong."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import scripted_engine
from scripted_engine import ServerProcess

from headrace.cli import chat as chat_module
from headrace.cli import generate, serve, session
from headrace.cli.app import main
from headrace.cli.generate import read_line, route
from headrace.errors import HeadraceError, InvalidRequest, UsageError
from headrace.models.hub import default_model_path
from headrace.server import worker
from headrace.server.messages import EngineSettings

MODEL = str(default_model_path())


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def run(*arguments: str, stdin: str | bytes = b"", apart: bool = False) -> Done:
    """What the command says and ends with. In this process, which is faster, unless `apart` or it serves."""
    given = stdin.encode() if isinstance(stdin, str) else stdin
    if apart or arguments[:1] == ("serve",):
        command = [sys.executable, "-m", "headrace", *arguments]
        done = subprocess.run(command, input=given, capture_output=True, timeout=20, env=scripted_engine.ENVIRONMENT, check=False)
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())
    out, err, code = io.StringIO(), io.StringIO(), 0
    before = sys.argv, sys.stdin
    sys.argv, sys.stdin = ["headrace", *arguments], io.TextIOWrapper(io.BytesIO(given))
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv, sys.stdin = before
    return Done(code, out.getvalue(), err.getvalue())


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "inspect", "tokenize"])
def test_help_has_an_example(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert f"headrace {command}" in done.stdout.split("Example:")[1].split("Options:")[0]


def test_version_and_no_arguments() -> None:
    assert re.fullmatch(r"headrace \d+\.\d+\.\d+\n", run("--version", apart=True).stdout)
    assert "serve" in run().stdout + run().stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "/no/such/model.gguf"), ["/no/such/model.gguf"]),
        (("serve", "--memory", "10MB", "--port", "0"), ["budget", "weights", "--memory"]),
        (("serve", "--memory", "lots", "--port", "0"), ["memory", "lots"]),
        (("serve", "--context", "100000", "--port", "0"), ["--context", "8192", "100000"]),
        (("serve", "--host", "256.1.1.1"), ["256.1.1.1"]),
        (("serve", "--max-body-size", "x"), ["--max-body-size"]),
        (("serve", "--cors-origin", "example.org"), ["--cors-origin", "example.org"]),
        (("serve", "--tls-cert", "/no/such/cert"), ["--tls-cert", "/no/such/cert"]),
        (("serve", "--uds", "/no/such/folder/socket"), ["--uds", "/no/such/folder/socket"]),
        (("serve", "--trace", "nonsense"), ["--trace", "nonsense"]),
        (("chat", MODEL, "--url", "http://x"), ["--url"]),
        (("generate", "/no/such/file.jsonl"), ["/no/such/file.jsonl"]),
        (("inspect", "/no/such/model"), ["/no/such/model"]),
        (("tokenize", "/no/such/model"), ["/no/such/model"]),
        (("tokenize", MODEL, "/no/such/text"), ["/no/such/text"]),
    ],
    ids=str,
)
def test_what_a_person_can_change_is_one_line_and_code_2(arguments: tuple[str, ...], words: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words)


def test_options_that_are_no_options() -> None:
    for arguments in (("serve", "--port", "99999"), ("serve", "--level", "int3"), ("serve", "--nonsense"), ("no-such-command",)):
        done = run(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_a_taken_port_is_known_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        start = time.monotonic()
        done = run("serve", "--port", str(taken.getsockname()[1]))
        assert time.monotonic() - start < 1.5
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "in use" in done.stderr


def test_a_broken_model(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(Path(MODEL).read_bytes()[:100_000])
    for command in ("serve", "inspect", "tokenize"):
        done = run(command, str(broken), *(("--port", "0") if command == "serve" else ()), stdin="x")
        assert done.returncode == 2, command
        assert "broken.gguf" in done.stderr
        assert done.stderr.count("\n") == 1


def test_inspect() -> None:
    told = json.loads(run("inspect", "--json", "--memory", "2GiB").stdout)
    assert told["kv_bytes_per_token"] == 2 * 2 * 30 * 3 * 64
    assert told["config"]["num_layers"] == 30
    assert sum(entry["tensors"] for entry in told["tensors"].values()) == 272
    assert told["fits"]
    table = run("inspect", MODEL).stdout
    assert "30 layers" in table
    assert "22.5 KiB a token" in table


def test_tokenize(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("Hello world 😀<|im_end|>")
    ids = json.loads(run("tokenize", MODEL, str(text), "--json").stdout)
    assert ids[:2] == [19556, 905]
    assert 2 not in ids  # the control token is spelled out
    assert json.loads(run("tokenize", MODEL, "-", "--json", stdin=text.read_text()).stdout) == ids
    assert run("tokenize", MODEL, stdin="Hello").stdout == "  19556  'Hello'\n1 tokens\n"
    text.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in run("tokenize", MODEL, str(text)).stderr


# Without a model: the same sessions on a scripted engine.


@pytest.fixture
def scripted_sessions(monkeypatch: pytest.MonkeyPatch) -> EngineSettings:
    monkeypatch.setattr(worker, "ENGINE_COMMAND", (sys.executable, scripted_engine.THIS_FILE))
    monkeypatch.setattr(session, "engine_settings", lambda settings, reference: settings)
    monkeypatch.setattr(session, "load_codec", lambda path: scripted_engine.ByteTokenizer)
    monkeypatch.setenv("PYTHONPATH", scripted_engine.ENVIRONMENT["PYTHONPATH"])
    script = {"step_ms": 0.2, "load_s": 0, "fail": "", "crash_while_loading": False, "num_blocks": 512}
    return EngineSettings(json.dumps(script), max_batch_size=4)


def test_generate(scripted_sessions: EngineSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[Any] = [{"prompt": f"line {i}" + "." * (20 - i), "temperature": 0, "max_tokens": 40} for i in range(20)]
    lines.append({"messages": [{"role": "user", "content": "chat"}], "temperature": 0})
    lines.append(
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "gpt", "prompt": "batch", "temperature": 0}}
    )
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert generate.run_generate(source, target, None, None, scripted_sessions) == 0
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["choices"][0]["text"] for answer in answers[:20]] == [line["prompt"] for line in lines[:20]]
    assert answers[20]["choices"][0]["message"]["content"] == "chat"
    assert (answers[21]["custom_id"], answers[21]["response"]["status_code"]) == ("a", 200)
    assert answers[21]["response"]["body"]["choices"][0]["text"] == "batch"
    assert "22 requests, 0 failed" in capsys.readouterr().err


def test_generate_tells_what_failed(scripted_sessions: EngineSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "good", "temperature": 0}\n{"prompt": "bad", "top_p": 3}\nnot json\n{"custom_id": "x"}\n')
    assert generate.run_generate(source, None, None, None, scripted_sessions) == 1
    out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert out[0]["choices"][0]["text"] == "good"
    assert out[1]["error"]["param"] == "top_p"
    assert out[2]["error"]["code"] == "invalid_json"
    assert "error" in out[3]
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UsageError, match="no request"):
        generate.run_generate(tmp_path / "empty", None, None, None, scripted_sessions)


def test_a_batch_file(scripted_sessions: EngineSettings, tmp_path: Path) -> None:
    def line(custom_id: Any, url: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "any", "temperature": 0} | body}

    chat = [{"role": "user", "content": "hi"}]
    lines = [
        line("c", "/v1/chat/completions", messages=chat),
        line("bad", "/v1/completions", prompt="x", top_p=3),
        line("r", "/v1/responses", input="in"),
        line("url", "/v1/models"),
        line("c", "/v1/completions", prompt="twice"),
        line("s", "/v1/completions", prompt="x", stream=True),
        line(5, "/v1/completions", prompt="x"),
        line("t", "/v1/completions", prompt="text"),
    ]
    source, target, errors = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "errors.jsonl"))
    source.write_text("\n".join(map(json.dumps, lines)))
    assert generate.run_generate(source, target, errors, None, scripted_sessions) == 1
    answers, failures = ([json.loads(line) for line in file.read_text().splitlines()] for file in (target, errors))
    assert [(it["custom_id"], it["response"]["status_code"], it["error"]) for it in answers] == [(c, 200, None) for c in "crt"]
    assert answers[1]["response"]["body"]["output"][0]["content"][0]["text"] == "in"
    assert [(it["custom_id"], it["response"]["body"]["error"]["param"]) for it in failures] == [
        ("bad", "top_p"), ("url", None), ("c", "custom_id"), ("s", "stream"), (5, "custom_id"),
    ]  # fmt: skip
    assert all(it["id"].startswith("batch_req_") and it["response"]["request_id"] == it["id"] for it in answers + failures)


def test_a_session_that_cannot_start(scripted_sessions: EngineSettings, tmp_path: Path) -> None:
    script = json.loads(scripted_sessions.model) | {"fail": "model.gguf: shape: bad"}
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}')
    with pytest.raises(UsageError, match="shape"):
        generate.run_generate(source, None, None, None, EngineSettings(json.dumps(script)))


def ask(monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    lines = iter([*texts, None])
    monkeypatch.setattr(chat_module, "_ask", lambda: next(lines))


def test_chat_here(scripted_sessions: EngineSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ask(monkeypatch, "hello you", "refuse me", "/new", "again é")
    assert chat_module.run_chat(None, "", scripted_sessions, system="s", temperature=0, max_tokens=0) == 0
    said = capsys.readouterr()
    assert [line for line in said.out.splitlines() if line] == ["hello you", "again é"]
    assert "the template refuses this" in said.err


def test_chat_with_a_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with ServerProcess("--step-ms", "0.2") as server:
        ask(monkeypatch, "over there", "refuse me")
        assert chat_module.run_chat(None, server.url + "/v1/", EngineSettings(""), system="", temperature=0, max_tokens=50) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == "over there"
    assert "400: the template refuses this" in said.err
    ask(monkeypatch, "hello")
    assert chat_module.run_chat(None, server.url, EngineSettings(""), system="", temperature=0, max_tokens=50) == 0
    assert f"error: {server.url}" in capsys.readouterr().err


def test_leaving_a_session_stream_cancels_it(scripted_sessions: EngineSettings) -> None:
    async def main() -> None:
        async with session.Session(scripted_sessions, None) as offline:
            body = {"prompt": "abc", "ignore_eos": True, "max_tokens": 1900, "temperature": 0}
            events = offline.stream("/v1/completions", body)
            assert (await anext(events))["choices"][0]["text"] == "a"
            await events.aclose()
            assert offline._app.metrics.requests["completions", "aborted"] == 1
            with pytest.raises(HeadraceError, match="top_p"):
                async for _ in offline.stream("/v1/completions", body | {"top_p": 9}):
                    pass

    asyncio.run(main())


def test_routes_of_a_line() -> None:
    assert route({"messages": []}, b"line") == ("/v1/chat/completions", b"line")
    assert route({"prompt": "x"}, b"line") == ("/v1/completions", b"line")
    for line in (b"[]", b"1", b'{"custom_id": "a", "url": "/v1/embeddings", "body": {}}', b'{"custom_id": "a", "url": "/v1/completions"}'):
        with pytest.raises(InvalidRequest):
            route(read_line(line), line)


def test_names_and_sizes(tmp_path: Path) -> None:
    file = tmp_path / "some.Q4_0.gguf"
    file.touch()
    assert serve.model_name(str(file), str(file)) == "some.Q4_0"
    assert serve.model_name(str(tmp_path), str(tmp_path)) == tmp_path.name
    assert serve.model_name("owner/name", "/cache/snapshots/abc") == "owner/name"
    assert [serve.parse_size(text) for text in ("4MiB", "1kb", "100", "2GiB")] == [4 << 20, 1000, 100, 2 << 30]
    for text in ("", "-1", "x", "1.5MiB", "0", "9999999GiB"):
        with pytest.raises(UsageError):
            serve.parse_size(text)
    assert os.path.isabs(MODEL)
