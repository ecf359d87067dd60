"""`headrace`: what each command takes. The work is in the module of its name, imported when the command runs."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headrace import __version__
from headrace.cli.bench import app as bench
from headrace.cli.plan import app as plan
from headrace.errors import HeadraceError

app = typer.Typer(
    name="headrace",
    help="Serve language models from ordinary machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class LevelName(StrEnum):
    AUTO = "auto"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


class PolicyName(StrEnum):
    FCFS = "fcfs"
    SHORTEST = "shortest"
    PRIORITY = "priority"
    FAIR = "fair"


class ToolParserName(StrEnum):
    AUTO = "auto"
    HERMES = "hermes"
    SMOLLM = "smollm"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    MISTRAL_ARGS = "mistral-args"


class BatchingName(StrEnum):
    CONTINUOUS = "continuous"
    STATIC = "static"


class ReservationName(StrEnum):
    PAGED = "paged"
    FULL = "full"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Model = Annotated[str | None, typer.Argument(help="GGUF file, model folder or hub id (owner/name). Default: the model that comes along.")]
Level = Annotated[LevelName, typer.Option(help="Weight precision; auto: as the file is.")]
Memory = Annotated[str, typer.Option(help="Memory budget, such as 2GiB or 40%. Default: 60% of what is available.")]
Context = Annotated[int, typer.Option(min=0, help="Tokens of prompt and answer together. Default: the model's own limit.")]
Threads = Annotated[int, typer.Option(min=0, max=1024, help="Threads of the kernels. Default: what the machine gives.")]
BatchSize = Annotated[int, typer.Option(min=1, max=4096, help="Samples in a step.")]
BatchTokens = Annotated[int, typer.Option(min=1, max=65536, help="Tokens in a step.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


def _version(value: bool) -> None:
    if value:
        print(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


@app.command()
def serve(
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    level: Level = LevelName.AUTO,
    memory: Memory = "",
    context: Context = 0,
    threads: Threads = 0,
    max_batch_size: BatchSize = 256,
    max_batch_tokens: BatchTokens = 512,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are refused with 429.")] = 1024,
    max_queue_time: Annotated[
        float, typer.Option(min=0, help="Seconds a request may have to wait; refused at once with 429 if it would be longer. 0: no bound.")
    ] = 0.0,
    step_target: Annotated[float, typer.Option(min=0, max=3600, help="Seconds a step should take at most; cuts prompts.")] = 0.2,
    itl_target: Annotated[
        str,
        typer.Option(help="What a step should take at most while somebody's answer is being written, such as 30ms; cuts prompts finer."),
    ] = "",
    policy: Annotated[
        PolicyName,
        typer.Option(help="Who is served first; shortest: a short prompt passes a long one that came just before."),
    ] = PolicyName.SHORTEST,
    batching: Annotated[BatchingName, typer.Option(help="static: a batch runs to its end; to compare with.")] = BatchingName.CONTINUOUS,
    kv_reservation: Annotated[
        ReservationName, typer.Option(help="full: a whole context reserved for each sample; to compare with.")
    ] = ReservationName.PAGED,
    no_prefix_cache: Annotated[bool, typer.Option("--no-prefix-cache", help="Share no computed prompt between requests.")] = False,
    served_model_name: Annotated[list[str] | None, typer.Option(help="Name(s) clients use. Default: the file's name.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="NAME=KEY that clients must send; several may be given. Other users see it: rather use a file.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with a NAME=KEY a line. Also from HEADRACE_API_KEYS, with commas between.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Further name in the Host header; on a loopback address others are refused.")
    ] = None,
    rpm: Annotated[int, typer.Option(min=0, help="Requests a minute of each key, where its file says nothing else. 0: no limit.")] = 0,
    tpm: Annotated[int, typer.Option(min=0, help="Tokens a minute of each key, prompts and answers. 0: no limit.")] = 0,
    concurrent: Annotated[int, typer.Option(min=0, help="Requests of each key at once. 0: no limit.")] = 0,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call this server, such as https://chat.example.org; * for all.")
    ] = None,
    uds: Annotated[Path | None, typer.Option(help="Listen on this unix socket (mode 0600) instead of a port.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file with the certificate chain: serve HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with its private key, if that is not in the same file.")] = None,
    max_body_size: Annotated[str, typer.Option(help="Largest request body.")] = "4MiB",
    read_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds a client has to send a request's head, and again its body.")] = 30.0,
    shutdown_timeout: Annotated[float, typer.Option(min=0, help="Seconds running requests get after SIGTERM.")] = 10.0,
    log_level: Annotated[LogLevel, typer.Option(help="What is logged; info: a line a request.")] = LogLevel.INFO,
    record: Annotated[
        Path | None, typer.Option(help="Write every decision of the engine there, for `headrace replay`. Holds prompts.")
    ] = None,
    log_format: Annotated[LogFormat, typer.Option(help="Lines for people, or an object a line.")] = LogFormat.TEXT,
    log_content: Annotated[
        bool, typer.Option("--log-content", help="Log prompts and answers too. They are nobody else's business.")
    ] = False,
    tool_parser: Annotated[
        ToolParserName, typer.Option(help="How the model writes calls of functions; auto: as its chat template shows.")
    ] = ToolParserName.AUTO,
    trace: Annotated[
        str, typer.Option(help="Send OpenTelemetry traces to this address (OTLP over HTTP), such as http://127.0.0.1:4318/v1/traces.")
    ] = "",
) -> None:
    """Serve a model over an OpenAI-compatible API.

    \b
    Example:
      headrace serve --port 8000
      curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hello"}]}'
    """
    from headrace.cli.serve import ServeOptions, parse_seconds, run_server
    from headrace.server.messages import EngineSettings
    from headrace.server.quotas import Quota

    options = ServeOptions(
        reference=model,
        host=host,
        port=port,
        names=tuple(served_model_name or ()),
        max_body=max_body_size,
        shutdown_timeout_s=shutdown_timeout,
        log_level=log_level.value.upper(),
        api_keys=tuple(api_key or ()),
        api_key_file=api_key_file,
        allowed_hosts=tuple(allowed_host or ()),
        record=record,
        quota=Quota(rpm, tpm, concurrent),
        max_queue_time_s=max_queue_time,
        read_timeout_s=read_timeout,
        cors_origins=tuple(cors_origin or ()),
        uds=uds,
        tls_cert=tls_cert,
        tls_key=tls_key,
        log_format=log_format.value,
        log_content=log_content,
        trace=trace,
        tool_parser=tool_parser.value,
        engine=EngineSettings(
            model="",
            level=level.value,
            threads=threads,
            memory=memory,
            context_length=context,
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
            step_target_s=step_target,
            itl_target_s=parse_seconds("--itl-target", itl_target) if itl_target else 0.0,
            policy=policy.value,
            batching=batching.value,
            kv_reservation=kv_reservation.value,
            prefix_cache=not no_prefix_cache,
            max_waiting=max_queue,
        ),
    )
    raise typer.Exit(run_server(options))


@app.command()
def chat(
    model: Model = None,
    url: Annotated[str, typer.Option(help="Talk to a running server instead, such as http://127.0.0.1:8000.")] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=0, help="Tokens an answer; 0: as many as fit.")] = 0,
    level: Level = LevelName.AUTO,
    memory: Memory = "",
    context: Context = 0,
    threads: Threads = 0,
) -> None:
    """Talk to a model in the terminal. An empty line or Ctrl-D ends it, /new starts over.

    \b
    Example:
      headrace chat --system "Answer in one sentence."
    """
    from headrace.cli.chat import run_chat
    from headrace.server.messages import EngineSettings

    settings = EngineSettings(model="", level=level.value, threads=threads, memory=memory, context_length=context, max_batch_size=8)
    raise typer.Exit(run_chat(model, url, settings, system=system, temperature=temperature, max_tokens=max_tokens))


@app.command()
def generate(
    file: Annotated[Path, typer.Argument(help="One request a line: a completion or chat body, or a line of OpenAI's batch format.")],
    model: Annotated[str | None, typer.Option("--model", "-m", help="Model, as for serve.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the answers go, one a line. Default: standard output.")
    ] = None,
    errors: Annotated[Path | None, typer.Option(help="Where failed lines are told. Default: among the answers.")] = None,
    level: Level = LevelName.AUTO,
    memory: Memory = "",
    context: Context = 0,
    threads: Threads = 0,
    max_batch_size: BatchSize = 256,
    max_batch_tokens: BatchTokens = 512,
) -> None:
    """Answer a file of requests without a server, in the order of the file. Exit code 1 if a line failed.

    \b
    Example:
      echo '{"prompt": "The river", "max_tokens": 20}' > in.jsonl
      headrace generate in.jsonl -o out.jsonl
    """
    from headrace.cli.generate import run_generate
    from headrace.server.messages import EngineSettings

    settings = EngineSettings(
        model="",
        level=level.value,
        threads=threads,
        memory=memory,
        context_length=context,
        max_batch_size=max_batch_size,
        max_batch_tokens=max_batch_tokens,
        max_waiting=1 << 20,
        step_target_s=0.0,  # nobody watches a stream
    )
    raise typer.Exit(run_generate(file, output, errors, model, settings))


@app.command()
def inspect(model: Model = None, level: Level = LevelName.AUTO, memory: Memory = "", json: Json = False) -> None:
    """Say what a model is: shape, bytes by type, memory a token, sequences that fit here.

    \b
    Example:
      headrace inspect model.gguf --json
    """
    from headrace.cli.inspect import run_inspect

    run_inspect(model, level.value, memory, as_json=json)


@app.command()
def tokenize(
    model: Annotated[str, typer.Argument(help="Model, as for serve; a GGUF file with a vocabulary only will do.")],
    file: Annotated[str, typer.Argument(help="Text file; - for standard input.")] = "-",
    json: Json = False,
) -> None:
    """Print a text's token ids; nothing is added around it, and special tokens in it stay text.

    \b
    Example:
      echo -n "Hello world" | headrace tokenize model.gguf --json
    """
    from headrace.cli.tokenize import run_tokenize

    run_tokenize(model, file, as_json=json)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A recording of `headrace serve --record`.")],
    json: Json = False,
) -> None:
    """Decide again what a server decided, and compare: needs no model. Exit code 1 if a plan comes out otherwise.

    \b
    Example:
      headrace serve --record run.jsonl
      headrace replay run.jsonl
    """
    from headrace.cli.recording import run_replay

    raise typer.Exit(run_replay(file, as_json=json))


app.add_typer(bench, name="bench")
app.add_typer(plan, name="plan")


def main() -> None:
    """Entry point. What the person can act upon is one line on standard error and exit code 2."""
    try:
        app()
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        sys.exit(141)
