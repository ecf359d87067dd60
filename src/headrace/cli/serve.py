"""`headrace serve`: listen, start the engine process, and only then import and load the rest."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from headrace import __version__, machine
from headrace.errors import MemoryBudgetExceeded, ModelError, UsageError
from headrace.server.logs import say, set_up
from headrace.server.messages import EngineSettings, Planned, Ready
from headrace.server.quotas import NO_QUOTA, Quota

if TYPE_CHECKING:
    from headrace.server.codec import TextCodec


LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the command line said. `engine.model` is filled in from `reference`."""

    reference: str | None
    host: str
    port: int
    names: tuple[str, ...]
    max_body: str
    shutdown_timeout_s: float
    log_level: str
    engine: EngineSettings
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    record: Path | None = None
    quota: Quota = NO_QUOTA
    max_queue_time_s: float = 0.0
    read_timeout_s: float = 30.0
    cors_origins: tuple[str, ...] = ()
    uds: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    log_format: str = "text"
    log_content: bool = False
    trace: str = ""
    tool_parser: str = "auto"


def engine_settings(settings: EngineSettings, reference: str | None) -> EngineSettings:
    """With the model's path, and a secret for the prefix index. Raises UsageError or ModelError."""
    from headrace.models.hub import resolve_model

    return msgspec.structs.replace(settings, model=str(resolve_model(reference)), secret=os.urandom(32))


def model_name(reference: str | None, path: str) -> str:
    """What clients call the model when nothing else is said: the hub id, the file's name without its ending, the folder's name."""
    if reference is not None and not Path(reference).expanduser().exists():
        return reference
    resolved = Path(path)
    return resolved.stem if resolved.suffix == ".gguf" else resolved.resolve().name


def load_codec(path: str, tool_parser: str = "auto") -> Callable[[], TextCodec]:
    def load() -> TextCodec:
        from headrace.text.tokenizer import load_tokenizer
        from headrace.text.tools import FORMATS

        tokenizer = load_tokenizer(path)
        if tool_parser != "auto":
            tokenizer.tool_format = FORMATS[tool_parser]
        return tokenizer

    return load


def parse_size(text: str) -> int:
    """Bytes of "4MiB" and the like. Raises UsageError."""
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}
    upper = text.strip().upper().removesuffix("B")
    digits = upper.rstrip("KMGI")
    unit = upper[len(digits) :]
    if not digits.isdecimal() or unit not in units or not 0 < int(digits) * units[unit] <= 1 << 40:
        raise UsageError(f"--max-body-size: expected a size such as 4MiB, got {text!r}")
    return int(digits) * units[unit]


def check_origins(origins: Sequence[str]) -> tuple[str, ...]:
    """Origins as browsers write them, or * for all. Raises UsageError."""
    for origin in origins:
        parts = urlsplit(origin)
        if origin != "*" and (not parts.netloc or origin not in (f"http://{parts.netloc}", f"https://{parts.netloc}")):
            raise UsageError(f"--cors-origin: expected an origin such as https://chat.example.org, or *, got {origin!r}")
    return tuple(origin.lower() for origin in origins)


def parse_seconds(flag: str, text: str) -> float:
    """Seconds of "30ms", "1.5s" or "2". Raises UsageError."""
    number, unit = (text[:-2], 1e-3) if text.endswith("ms") else (text.removesuffix("s"), 1.0)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 3600:
        raise UsageError(f"{flag}: expected a time such as 30ms or 1.5s, at most an hour, got {text!r}")
    return seconds


def run_server(options: ServeOptions) -> int:
    """Serve until stopped. Returns the exit code; raises HeadraceError for what a person can change."""
    started = time.monotonic()
    max_body, origins = parse_size(options.max_body), check_origins(options.cors_origins)
    from headrace.server.auth import ENVIRONMENT, read_keys

    # The engine process need not have the keys.
    keys = read_keys(options.api_keys, options.api_key_file, os.environ.pop(ENVIRONMENT, None), options.quota)
    from headrace.server.listen import bind, bind_unix, is_loopback, remove_unix, tls_context  # small imports first: the port comes first

    form = options.log_format
    set_up(options.log_level, form)
    settings = engine_settings(options.engine, options.reference)
    if options.record is not None:
        from headrace.cli.recording import create

        settings = msgspec.structs.replace(settings, record=create(options.record))
    tls = tls_context(options.tls_cert, options.tls_key)
    machine.raise_file_limit()
    tracer = None
    if options.trace:
        from headrace.server.tracing import open_tracer

        tracer = open_tracer(options.trace)
    host = f"[{options.host}]" if ":" in options.host else options.host
    inode = 0
    if options.uds is not None:
        sock, inode = bind_unix(options.uds)
        url = f"unix:{options.uds}"
    else:
        sock = bind(options.host, options.port)
        url = f"{'https' if tls else 'http'}://{host}:{sock.getsockname()[1]}"
    from headrace.server.worker import Worker

    def planned(plan: Planned) -> None:
        say(plan.text, form)

    names = options.names or (model_name(options.reference, settings.model),)
    say(f"headrace {__version__}: loading {names[0]}, listening on {url}", form)
    local = is_loopback(sock)
    if not len(keys) and not local:
        say(f"warning: anybody who reaches {host} can use this server: there is no API key (--api-key-file)", form)
    worker = Worker(settings, on_planned=planned)
    worker.spawn()

    import uvloop

    from headrace.server.app import Application, ServerSettings
    from headrace.server.run import Runner

    async def main() -> int:
        hosts = {name.lower() for name in options.allowed_hosts}
        if local and options.uds is None:
            hosts |= {*LOOPBACK_NAMES, host.lower()}
        front = ServerSettings(
            names, max_body, settings.policy == "priority", keys, frozenset(hosts), options.max_queue_time_s, options.quota,
            origins, options.log_content,
        )  # fmt: skip
        app = Application(front, worker, tracer=tracer)

        def ready() -> None:
            engine: Ready | None = worker.ready
            if engine is not None:
                say(
                    f"ready in {time.monotonic() - started:.2f} s: {url}/v1 ({engine.level}, {engine.isa}, {engine.threads} threads, "
                    f"context {engine.context_length})",
                    form,
                )

        runner = Runner(
            app, sock, load_codec(settings.model, options.tool_parser),
            shutdown_timeout_s=options.shutdown_timeout_s, on_ready=ready, tls=tls, read_timeout_s=options.read_timeout_s,
        )  # fmt: skip
        code = await runner.run()
        if runner.error is not None:
            if isinstance(runner.error, UsageError | ModelError | MemoryBudgetExceeded):
                raise runner.error
            print(f"error: {runner.error}", file=sys.stderr)
        return code

    try:
        return uvloop.run(main())
    finally:
        if options.uds is not None:
            remove_unix(options.uds, inode)
