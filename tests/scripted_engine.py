"""A server whose engine gives back the prompt: the API process and the seam between the processes, without a model.

    python scripted_engine.py serve [--port 0] [--step-ms 2] ...     a whole server; prints its port
    python scripted_engine.py --socket FD ...                        the engine process such a server starts

Greedy samples are the prompt's ids, one a step, and then the end token; others are rotated by seed and sample. A few ids are orders:
see CRASH and its neighbours. Ids below 256 are bytes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from scripted_prompts import scores_of

from headrace.errors import InvalidRequest, UsageError
from headrace.request import PROTOCOL_VERSION, Abort, EngineStats, Refusal, StepEvents, Submit, TokenLogprob
from headrace.server import engine_process
from headrace.server.messages import EngineSettings, Hello, Planned, Ready
from headrace.text.detokenizer import Detokenizer, PieceTexts
from headrace.text.tools import FORMATS

END, START, CRASH, HANG, RAISE, FAIL = 256, 257, 260, 261, 262, 263
WORDS = {300: b"DEF", 301: b"HI", 302: b"beta ga", 303: b"mma delta", 304: b" word", 305: "é".encode(), 306: b"\xf0\x9f", 307: b"\x98\x80"}
SPECIAL = {END: b"<|im_end|>", START: b"<|im_start|>"}
THIS_FILE = str(Path(__file__).resolve())
VOCAB = 320
CONTEXT = 2048
BLOCK = 32


class ByteTokenizer:
    """Bytes are ids; enough of a tokenizer for the server."""

    def __init__(self) -> None:
        none = dict.fromkeys(range(256, VOCAB), b"")
        self.pieces = {i: bytes([i]) for i in range(256)} | none | WORDS | dict.fromkeys((CRASH, HANG, RAISE), b"!") | SPECIAL
        self._texts = PieceTexts(self.pieces, frozenset(SPECIAL), VOCAB)

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        try:
            return list(text.encode())
        except UnicodeEncodeError:
            raise InvalidRequest("the text is not valid Unicode") from None

    tool_format = FORMATS["hermes"]
    control: ClassVar[dict[str, int]] = {}

    def encode_chat(self, messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """The last message, so that the answer repeats it."""
        if any("refuse me" in message["content"] for message in messages):
            raise InvalidRequest("the template refuses this", param="messages")
        return self.encode(messages[-1]["content"])

    def min_tokens(self, text: str) -> int:
        return len(text) // 9

    def detokenizer(
        self,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        strip_space: bool = False,
        record: bool = False,
        shown: tuple[str, ...] = (),
    ) -> Detokenizer:
        return Detokenizer(self._texts, stop=stop, include_stop=include_stop, record=record)

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


class ScriptedEngine:
    """One token a sample and step. A prompt that begins with CRASH kills every engine that runs it; elsewhere, only the first one."""

    def __init__(self, settings: EngineSettings, step_s: float, num_blocks: int) -> None:
        self.settings = settings
        self.step_s = step_s
        self.num_blocks = num_blocks
        self.waiting: list[Submit] = []
        self.running: dict[int, tuple[Submit, list[int], list[int]]] = {}  # submit, prompt, tokens made per sample
        self.steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def apply(self, command: Submit | Abort) -> StepEvents | None:
        if isinstance(command, Abort):
            if command.sample >= 0:
                if command.request_id in self.running:
                    self.running[command.request_id][2][command.sample] = -1
                return self._events(finished=[(command.request_id, command.sample, "abort")])
            self.waiting = [submit for submit in self.waiting if submit.request_id != command.request_id]
            if self.running.pop(command.request_id, None) is None:
                return self._events()
            return self._events(finished=[(command.request_id, 0, "abort")])
        if len(self.waiting) >= self.settings.max_waiting:
            return self._events(refused=[Refusal(command.request_id, "QueueFull", "the queue is full")])
        self.waiting.append(command)
        return None

    def step(self) -> StepEvents:
        events = self._events()
        while self.waiting and len(self.running) < self.settings.max_batch_size:
            submit = self.waiting.pop(0)
            prompt = list(array("i", submit.prompt))
            made = [len(array("i", each)) for each in submit.emitted] or [0] * submit.num_samples
            self.running[submit.request_id] = (submit, prompt, made)
            events.admitted.append((submit.request_id, time.monotonic(), BLOCK if len(prompt) > BLOCK else 0))
            events.prompts += scores_of(submit)
        if self.step_s:
            time.sleep(self.step_s)
        for request_id, (submit, prompt, made) in list(self.running.items()):
            for sample in range(submit.num_samples):
                if made[sample] >= 0:
                    self._advance(events, submit, prompt, made, sample)
            if all(count < 0 for count in made):
                del self.running[request_id]
        self.steps += 1
        events.time = time.monotonic()
        events.stats = self._stats(len(events.tokens))
        return events

    def _advance(self, events: StepEvents, submit: Submit, prompt: list[int], made: list[int], sample: int) -> None:
        at = made[sample]
        shift = 0 if submit.params.is_greedy else (submit.seed * 7 + sample * 3 + 1) % len(prompt)
        at_end = at >= len(prompt)
        token = END if at_end and not submit.params.ignore_eos else prompt[(at + shift) % len(prompt)]
        if token in (CRASH, HANG, RAISE) and (at == 0 or not submit.emitted):
            if token == CRASH:
                os._exit(9)
            if token == RAISE:
                raise RuntimeError("scripted failure")
            time.sleep(60)
        if token == FAIL:
            events.finished.append((submit.request_id, sample, "error"))
            made[sample] = -1
            return
        wants = submit.params.logprobs
        if wants >= 0 or events.logprobs:
            events.logprobs += [None] * (len(events.tokens) - len(events.logprobs))
            top = tuple((token + i) % 256 for i in range(wants)) if wants >= 0 else ()
            events.logprobs.append(TokenLogprob(-0.25, top, tuple(-0.25 - i for i in range(len(top)))) if wants >= 0 else None)
        events.request_ids.append(submit.request_id)
        events.samples.append(sample)
        events.tokens.append(token)
        made[sample] = at + 1
        if token == END or token in submit.params.stop_token_ids:
            events.finished.append((submit.request_id, sample, "stop"))
            made[sample] = -1
        elif at + 1 >= submit.params.max_tokens:
            events.finished.append((submit.request_id, sample, "length"))
            made[sample] = -1

    def _stats(self, tokens: int) -> EngineStats:
        held = sum(1 + len(prompt) // BLOCK for _, prompt, _ in self.running.values())
        return EngineStats(
            running=len(self.running), waiting=len(self.waiting), blocks_free=self.num_blocks - held, blocks_cached=0,
            blocks_held=held, preemptions=0, recomputed_tokens=0, prompt_tokens=0, cached_tokens=0, steps=self.steps,
            step_seconds=self.step_s, step_tokens=tokens, step_rows=tokens,
        )  # fmt: skip

    def _events(self, **columns: Any) -> StepEvents:
        empty: dict[str, Any] = {
            name: [] for name in ("request_ids", "samples", "tokens", "logprobs", "admitted", "finished", "stalled", "refused")
        }
        return StepEvents(time=time.monotonic(), **(empty | columns), stats=self._stats(0))


def build(hello: Hello, weights_fd: int, tell: Callable[[Planned], None]) -> tuple[ScriptedEngine, Ready]:
    settings = hello.settings
    script = json.loads(settings.model)
    time.sleep(script["load_s"])
    if script["fail"]:
        raise UsageError(script["fail"])
    if script["crash_while_loading"]:
        os._exit(11)
    engine = ScriptedEngine(settings, script["step_ms"] / 1000, script["num_blocks"])
    return engine, Ready(PROTOCOL_VERSION, CONTEXT, script["num_blocks"], BLOCK, VOCAB)


def serve(arguments: list[str]) -> int:
    # The engine process, which is started more often, needs none of these.
    import uvloop

    from headrace.server.app import Application, ServerSettings
    from headrace.server.auth import read_keys
    from headrace.server.listen import bind, bind_unix, tls_context
    from headrace.server.logs import set_up
    from headrace.server.quotas import Quota
    from headrace.server.run import Runner
    from headrace.server.worker import Worker

    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--fail", default="")
    parser.add_argument("--crash-while-loading", action="store_true")
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument("--max-waiting", type=int, default=1024)
    parser.add_argument("--num-blocks", type=int, default=CONTEXT)
    parser.add_argument("--shutdown-timeout", type=float, default=10.0)
    parser.add_argument("--watchdog-s", type=float, default=60.0)
    parser.add_argument("--log-level", default="WARNING")
    parser.add_argument("--api-key", action="append", default=[])
    parser.add_argument("--allowed-host", action="append", default=[])
    parser.add_argument("--profile", default="")
    parser.add_argument("--max-queue-time", type=float, default=0.0)
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--quota", type=int, nargs=3, default=(0, 0, 0))
    parser.add_argument("--cors-origin", action="append", default=[])
    parser.add_argument("--read-timeout", type=float, default=30.0)
    parser.add_argument("--uds", type=Path)
    parser.add_argument("--tls-cert", type=Path)
    parser.add_argument("--log-format", default="text")
    parser.add_argument("--log-content", action="store_true")
    parser.add_argument("--trace", default="")
    parser.add_argument("--audit", default="", help="write what this process does to the outside into this file, from when it listens")
    options = parser.parse_args(arguments)
    set_up(options.log_level, options.log_format)
    sock = bind("127.0.0.1", options.port) if options.uds is None else bind_unix(options.uds)[0]
    names = ("step_ms", "load_s", "fail", "crash_while_loading", "num_blocks")
    settings = EngineSettings(
        model=json.dumps({name: getattr(options, name) for name in names}),
        max_batch_size=options.max_batch_size,
        max_waiting=options.max_waiting,
        policy=options.policy,
    )

    async def main() -> int:
        worker = Worker(settings, command=(sys.executable, THIS_FILE), watchdog_s=options.watchdog_s)
        quota = Quota(*options.quota)
        keys = read_keys(options.api_key, None, None, quota)
        front = ServerSettings(
            ("scripted",), 1 << 20, options.policy == "priority", keys, frozenset(options.allowed_host), options.max_queue_time, quota,
            tuple(options.cors_origin), options.log_content,
        )  # fmt: skip
        tracer = None
        if options.trace:
            from headrace.server.tracing import open_tracer

            tracer = open_tracer(options.trace)
        app = Application(front, worker, tracer=tracer)
        runner = Runner(
            app, sock, ByteTokenizer,
            shutdown_timeout_s=options.shutdown_timeout, tls=tls_context(options.tls_cert, None), read_timeout_s=options.read_timeout,
        )  # fmt: skip
        print(sock.getsockname()[1] if options.uds is None else 0, flush=True)
        if options.audit:
            import audit_hook

            audit_hook.audit(options.audit)
        code = await runner.run()
        if runner.error is not None:
            print(f"error: {runner.error}", file=sys.stderr)
        return code

    def run() -> int:
        return uvloop.run(main())

    if options.profile:
        import cProfile

        profile = cProfile.Profile()
        code = profile.runcall(run)
        profile.dump_stats(options.profile)
        return code
    return run()


class ServerProcess:
    """A scripted server as tests see it: over its port, by its exit code."""

    def __init__(self, *arguments: str) -> None:
        self.errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed with the process
        command = [sys.executable, THIS_FILE, "serve", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=ENVIRONMENT)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ServerProcess:
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self, signal_number: int = signal.SIGTERM) -> int:
        """The exit code. The process is gone when this returns."""
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        try:
            code = self.process.wait(15)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            if not self.errors.closed:
                self.log = self.said()
                self.errors.close()
        return code

    def said(self) -> str:
        """What it wrote to standard error."""
        if self.errors.closed:
            return self.log
        self.errors.seek(0)
        return self.errors.read()

    def wait_ready(self, within_s: float = 10.0) -> None:
        wait_for(lambda: self.get("/ready")[0] == 200, within_s)

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def exchange(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers, body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": "application/json"} | (headers or {}))
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, Any]:
        status, headers, body = self.exchange("GET", path)
        return status, json.loads(body) if headers.get("content-type") == "application/json" else body.decode()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        status, _, answer = self.exchange("POST", path, body)
        return status, json.loads(answer)

    def complete(self, prompt: Any, **more: Any) -> Any:
        """A completion's body; the request must succeed."""
        status, body = self.post("/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 200} | more)
        assert status == 200, body
        return body

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, `[DONE]` checked and left out."""
        status, headers, data = self.exchange("POST", path, body | {"stream": True})
        assert status == 200, data
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        return events_of(data)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        total, found = 0.0, False
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith((f"headrace_{name}{{", f"headrace_{name} ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total, found = total + float(line.rsplit(" ", 1)[1]), True
        assert found, f"no metric {name} with {labels}"
        return total


ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def events_of(data: bytes) -> list[Any]:
    """A whole stream cut into events: each `data: ` and one line of JSON, `[DONE]` once and last."""
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    assert parts[-1] == "data: [DONE]"
    return [json.loads(part[6:]) for part in parts[:-1]]


def wait_for(condition: Callable[[], Any], within_s: float = 5.0) -> None:
    """Fail unless the condition comes true in time."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"not within {within_s} s: {condition}"
        time.sleep(0.01)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        sys.exit(serve(sys.argv[2:]))
    sys.exit(engine_process.main(build, sys.argv[1:]))
