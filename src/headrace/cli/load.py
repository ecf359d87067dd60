"""`headrace bench load URL`: any OpenAI-compatible server under a load, and what its users would have felt."""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.errors import UsageError

if TYPE_CHECKING:
    from headrace.bench.arrivals import Arrivals
    from headrace.bench.client import Client, Target
    from headrace.bench.drive import Run, Watch
    from headrace.bench.lengths import Lengths
    from headrace.bench.prompts import Conversation, Ruler
    from headrace.bench.workload import Asking, Jobs
    from headrace.plan.traffic import Traffic

DEFAULT_REQUESTS = 200
DEFAULT_IN, DEFAULT_OUT = "lognormal:200,0.8", "lognormal:120,0.8"


@dataclass(frozen=True, slots=True)
class _Load:
    """What is offered: times of an open loop, or the users of a closed one; and what is asked."""

    arrivals: Arrivals | None
    concurrency: int | None
    trace: Traffic | None
    lengths: Traffic | None
    conversations: list[Conversation] | None
    prompt: Lengths
    answer: Lengths
    shared: float
    requests: int | None
    seconds: float | None
    think_s: float
    seed: int
    asked: str

    @property
    def is_level(self) -> bool:
        return self.concurrency is not None or (self.arrivals is not None and self.arrivals.rate == self.arrivals.final)

    def times(self) -> list[float]:
        """Of an open loop."""
        if self.trace is not None:
            count = self.requests or len(self.trace)
            times = self.trace.first(count).times
            return [time for time in times if self.seconds is None or time < self.seconds]
        if self.arrivals is None:
            raise UsageError("give one of --rate, --ramp, --concurrency and --trace")
        if self.seconds is not None:
            return self.arrivals.during(self.seconds, self.seed)
        return self.arrivals.first(self.requests or DEFAULT_REQUESTS, self.seed)

    def jobs(self, ruler: Ruler) -> Jobs:
        from headrace.bench import workload

        if self.trace is not None:
            return workload.from_trace(self.trace, ruler, self.seed)
        if self.lengths is not None:
            return workload.lengths_of(self.lengths, self.shared, ruler, self.seed)
        if self.conversations is not None:
            return workload.from_file(self.conversations, self.answer, self.seed)
        return workload.drawn(self.prompt, self.answer, self.shared, ruler, self.seed)

    def words(self) -> str:
        if self.concurrency is not None:
            return f"closed loop of {self.concurrency}"
        if self.arrivals is None:
            return f"trace {self.trace.name}" if self.trace else ""
        one = self.arrivals
        bursts = f" (burstiness {one.burstiness:g})" if one.kind == "gamma" else ""
        return f"{one.kind}{bursts} arrivals, {one.rate:g}{f' to {one.final:g}' if one.rate != one.final else ''} requests/s"


def load(
    url: Annotated[str, typer.Argument(help="The server: http://HOST:PORT, or its base URL ending in /v1.")],
    rate: Annotated[float | None, typer.Option(help="Requests a second, whatever the server does (open loop).")] = None,
    ramp: Annotated[str, typer.Option(help="FROM:TO requests a second, rising evenly over the run.")] = "",
    concurrency: Annotated[int | None, typer.Option(min=1, max=65536, help="Users who ask again when answered (closed loop).")] = None,
    trace: Annotated[Path | None, typer.Option(help="Replay arrivals, lengths and shared prefixes of a trace (CSV or JSON lines).")] = None,
    time_scale: Annotated[float, typer.Option(help="With --trace: times as many requests a second.")] = 1.0,
    arrivals: Annotated[str, typer.Option(help="poisson, gamma (with --burstiness) or constant.")] = "poisson",
    burstiness: Annotated[float, typer.Option(help="Of gamma: variance of the intervals over their squared mean; 1 is poisson.")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, max=1_000_000, help="Conversations to begin. Default: 200, or the trace.")] = None,
    duration: Annotated[float | None, typer.Option(help="Instead of --requests: seconds in which they begin.")] = None,
    prompt: Annotated[str, typer.Option("--in", help="Tokens of a prompt: N, lognormal:MEAN,SIGMA or uniform:FROM,TO.")] = "",
    out: Annotated[str, typer.Option("--out", help="Tokens of an answer, in the same forms.")] = "",
    lengths: Annotated[Path | None, typer.Option(help="Lengths drawn from this trace's rows.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines: prompt, messages or turns (a conversation), and max_tokens.")] = None,
    shared: Annotated[float, typer.Option(min=0, max=1, help="Share of every prompt that all begin with.")] = 0.0,
    think: Annotated[float, typer.Option(min=0, max=3600, help="Seconds from an answer to the same user's next question.")] = 0.0,
    model: Annotated[str, typer.Option(help="Model to ask for. Default: the first of /v1/models.")] = "",
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    api_key: Annotated[str, typer.Option(envvar="HEADRACE_API_KEY", help="Sent as Bearer.")] = "",
    ignore_eos: Annotated[bool | None, typer.Option(help="Answers as long as --out says. Default: yes, unless --prompts.")] = None,
    extra: Annotated[str, typer.Option(help="JSON object whose fields are added to every request.")] = "",
    timeout: Annotated[float, typer.Option(min=0.001, max=86400, help="Seconds after which a request has failed.")] = 600.0,
    warmup: Annotated[float | None, typer.Option(min=0, help="Seconds at the start not to count. Default: found in the run.")] = None,
    slo: Annotated[str, typer.Option(help="ttft=MS,itl=MS,gap=MS,total=MS,share=0.95: some of them; what so many requests must get.")] = "",
    gate: Annotated[bool, typer.Option("--gate", help="Exit code 1 when --slo is missed, or the run is invalid.")] = False,
    plan: Annotated[Path | None, typer.Option(help="A file of headrace plan --output: its prediction beside what is measured.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything drawn; 0: a fresh one, printed.")] = 0,
    csv: Annotated[Path | None, typer.Option(help="Write a line a request, with every chunk.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts; needs the extra `report`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Put an OpenAI-compatible server under load, and report throughput with the latencies it cost, counted from the schedule.

    \b
    Example:
      headrace bench load http://127.0.0.1:8000 --rate 2 --duration 120 --slo ttft=500,itl=50 --html load.html
      headrace bench load http://127.0.0.1:8000 --concurrency 8 --in 200 --out lognormal:120,0.8
    """
    import uvloop

    from headrace.bench.client import Target
    from headrace.bench.compare import beside, read_plan
    from headrace.bench.objective import Objective
    from headrace.bench.report import rows, show
    from headrace.bench.summary import summary
    from headrace.bench.window import find

    offered = _offered(
        rate=rate, ramp=ramp, concurrency=concurrency, trace=trace, time_scale=time_scale, arrivals=arrivals, burstiness=burstiness,
        requests=requests, duration=duration, prompt=prompt, out=out, lengths=lengths, prompts=prompts, shared=shared, think=think,
        endpoint=endpoint, seed=seed or random.randrange(1, 1 << 31),
    )  # fmt: skip
    target = Target.parse(url, endpoint=endpoint, api_key=api_key, timeout_s=timeout)
    objective = Objective.parse(slo) if slo else None
    if gate and objective is None:
        raise UsageError("--gate: expected --slo with it")
    planned = read_plan(plan) if plan is not None else None
    if html is not None:
        from headrace.bench.page import page, require_plotly

        require_plotly()
    for path in (csv, html):
        if path is not None:
            _write(path, "", "a")  # whether it can be, before the work
    eos = prompts is None if ignore_eos is None else ignore_eos
    asked, run = uvloop.run(_run(target, offered, model, eos, _fields(extra)))
    window = find(run.records, is_level=offered.is_level, warmup_s=warmup)
    told: dict[str, Any] = {"version": 1, "url": url, "model": asked.model, "load": offered.words(), "asked": offered.asked}
    told["seed"] = offered.seed
    told |= summary(run, window, objective)
    if planned is not None:
        told["plan"] = beside(planned, told)
    if csv is not None:
        _write(csv, rows(run.records))
    if html is not None:
        _write(html, page(told, run.records))
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        print(f"{told['model']} at {url}: {told['load']}; {told['asked']}; seed {told['seed']}")
        show(told)
    if gate and not (told["valid"] and told["goodput"]["is_met"]):
        raise typer.Exit(1)


def _offered(
    *, rate: float | None, ramp: str, concurrency: int | None, trace: Path | None, time_scale: float, arrivals: str, burstiness: float,
    requests: int | None, duration: float | None, prompt: str, out: str, lengths: Path | None, prompts: Path | None, shared: float,
    think: float, endpoint: str, seed: int,
) -> _Load:  # fmt: skip
    """The load the flags describe. Raises UsageError where they contradict each other."""
    from headrace.bench.arrivals import Arrivals
    from headrace.bench.lengths import Lengths
    from headrace.bench.prompts import read_prompts
    from headrace.bench.workload import check_endpoint

    if sum(given is not None for given in (rate, ramp or None, concurrency, trace)) != 1:
        raise UsageError("give one of --rate, --ramp, --concurrency and --trace")
    if requests is not None and duration is not None and trace is None:
        raise UsageError("give --requests or --duration, not both")
    if duration is not None and not 0 < duration <= 1e7:
        raise UsageError(f"--duration: expected seconds above 0, got {duration:g}")
    if not 0 < time_scale <= 1e6 or (time_scale != 1 and trace is None):
        raise UsageError(f"--time-scale: expected a number above 0, and --trace with it, got {time_scale:g}")
    if (rate is None and not ramp) and (arrivals != "poisson" or burstiness != 1):
        raise UsageError("--arrivals, --burstiness: only with --rate or --ramp")
    sources = {"--trace": trace, "--lengths": lengths, "--prompts": prompts, "--in": prompt or None}
    named = [name for name, given in sources.items() if given is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)}: each says what is asked; give one")
    if out and (trace is not None or lengths is not None):
        raise UsageError("--out: the trace says how long answers are")
    if shared and (trace is not None or prompts is not None):
        raise UsageError("--shared: only for texts made up here; a trace says what its prompts share by hash ids")
    conversations = None
    if prompts is not None:
        conversations = read_prompts(prompts)
        check_endpoint(conversations, endpoint)
    files = {"prompts": prompts, "lengths": lengths}
    asked = "as it has them" if trace else ", ".join(f"{name} of {path.name}" for name, path in files.items() if path)
    asked = asked or f"in {prompt or DEFAULT_IN}"
    asked += "" if trace or lengths else f", out {out or DEFAULT_OUT}"
    first, final = (rate, rate) if rate is not None else _ramp(ramp)
    return _Load(
        arrivals=Arrivals(arrivals, first, final, burstiness) if first is not None and final is not None else None,
        concurrency=concurrency, trace=_read(trace, "--trace", time_scale), lengths=_read(lengths, "--lengths", 1.0),
        conversations=conversations,
        prompt=Lengths.parse(prompt or DEFAULT_IN, "--in"), answer=Lengths.parse(out or DEFAULT_OUT, "--out"), shared=shared,
        requests=requests, seconds=duration, think_s=think, seed=seed,
        asked=asked + (f", {shared:.0%} shared" if shared else ""),
    )  # fmt: skip


def _read(path: Path | None, flag: str, scale: float) -> Traffic | None:
    from headrace.plan.traffic import read_trace

    return None if path is None else read_trace(path, flag).scaled(scale)


def _ramp(text: str) -> tuple[float | None, float | None]:
    if not text:
        return None, None
    first, _, final = text.partition(":")
    try:
        return float(first), float(final)
    except ValueError:
        raise UsageError(f"--ramp: expected FROM:TO in requests a second, got {text!r}") from None


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text or "{}")
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise UsageError(f"--extra: expected a JSON object, got {text!r}")
    return fields


async def _run(target: Target, offered: _Load, model: str, ignore_eos: bool, extra: dict[str, Any]) -> tuple[Asking, Run]:
    from headrace.bench.client import Client
    from headrace.bench.drive import closed_loop, open_loop, probe
    from headrace.bench.workload import Asking

    client = Client(target)
    try:
        asking = Asking(model or (await client.models())[0], _endpoint(target), ignore_eos, extra=extra)
        jobs = offered.jobs(await probe(client, asking))
        if offered.concurrency is None:
            times = offered.times()
            if not times:
                raise UsageError("--duration: no request comes in so short a time")
            with _bar(len(times), client) as watch:
                return asking, await open_loop(client, asking, jobs, times, think_s=offered.think_s, watch=watch)
        count = offered.requests or (None if offered.seconds else DEFAULT_REQUESTS)
        with _bar(count, client) as watch:
            return asking, await closed_loop(
                client, asking, jobs, offered.concurrency, count=count, seconds=offered.seconds, think_s=offered.think_s, watch=watch
            )
    finally:
        client.close()


def _endpoint(target: Target) -> str:
    return "chat" if target.path.endswith("/chat/completions") else "completions"


@contextlib.contextmanager
def _bar(total: int | None, client: Client) -> Iterator[Watch]:
    """A progress bar on a terminal; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.completed}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # Drawn only when told to: a thread that draws by itself takes the interpreter from the loop that stamps chunks.
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), auto_refresh=False) as progress:
        task = progress.add_task("", total=total)

        def watch(run: Run) -> None:
            tokens = sum(len(record.times) for record in run.records)
            words = f"{run.open} in flight, {run.failed} failed, {tokens / max(client.now(), 1e-9):,.0f} chunks/s"
            progress.update(task, completed=run.done + run.failed, description=words, refresh=True)

        yield watch


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode) as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
