"""`headrace bench`: `load` (cli/load.py), and `step`: where its time goes, per operation, beside what the machine allows in that minute."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from headrace.cli.load import load
from headrace.config import EngineConfig, Level

if TYPE_CHECKING:
    from headrace.executors.profile import Measured

app = typer.Typer(help="Measure the kernels and the server.", no_args_is_help=True, rich_markup_mode=None)
app.command()(load)


@app.command()
def step(
    model: Annotated[str | None, typer.Argument(help="Model, as for serve.")] = None,
    level: Annotated[str, typer.Option(help="Weight precision, as for serve.")] = "auto",
    prefill: Annotated[int, typer.Option(min=1, max=8192, help="Tokens of the prompt.")] = 512,
    rows: Annotated[str, typer.Option(help="Sequences of the decode steps.")] = "1,8,32",
    context: Annotated[str, typer.Option(help="Tokens before each sequence's next one; one number for each of --rows.")] = "128,300,300",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds; each is compared with the limits just before and after it.")] = 5,
    threads: Annotated[int, typer.Option(min=0, max=256, help="Threads. Default: what the machine gives.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the tokens; 0: a fresh one, printed.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Print where a step's time goes, per operation, and how near each comes to its bound.

    \b
    Example:
      headrace bench step --rows 1,32 --context 128,300
    """
    from headrace import machine
    from headrace.errors import UsageError
    from headrace.executors.native import NativeExecutor
    from headrace.executors.profile import Bench
    from headrace.kernels import native
    from headrace.models.arena import Arena
    from headrace.models.hub import resolve_model
    from headrace.models.loader import prepare

    try:
        counts, contexts = [int(x) for x in rows.split(",")], [int(x) for x in context.split(",")]
    except ValueError:
        raise UsageError(f"--rows and --context: expected numbers with commas between, got {rows!r} and {context!r}") from None
    if len(counts) != len(contexts) or min(counts + contexts) < 1:
        raise UsageError("--rows and --context: expected the same count of positive numbers")
    threads = threads or machine.threads()
    seed = seed or random.randrange(1, 1 << 31)
    with prepare(resolve_model(model), cast("Level", level)) as prepared:
        loaded = prepared.load(Arena.private(prepared.nbytes))  # huge pages, as the server has them
    longest = max(prefill, *contexts) + 1
    if longest > loaded.config.context_length:
        raise UsageError(f"--prefill and --context: the model's limit is {loaded.config.context_length} tokens, asked for {longest}")
    blocks = max(-(-(prefill + 1) // 32), *(n * -(-(c + 1) // 32) for n, c in zip(counts, contexts, strict=True)))
    config = EngineConfig(
        context_length=max(longest, 512), num_blocks=blocks, max_batch_size=max(counts), max_batch_tokens=max(prefill, 256)
    )
    bench = Bench(NativeExecutor(cast("Any", loaded), config, threads), threads, seed)
    runs = [("prefill", prefill, 0), *(("decode", n, c) for n, c in zip(counts, contexts, strict=True))]
    results: list[Measured] = []
    from rich.console import Console

    console = Console(stderr=True)
    for i, (kind, n, tokens) in enumerate(runs):
        with console.status(f"{kind} {n}{f' x {tokens}' if tokens else ''} ({i + 1} of {len(runs)})"):
            results.append(bench.prefill(n, rounds) if kind == "prefill" else bench.decode(n, tokens, rounds))
    if as_json:
        about = {"seed": seed, "threads": threads, "level": loaded.level, "isa": native.level()}
        print(json.dumps(about | {"steps": [asdict(r) for r in results]}, indent=2))
        return
    for result in results:
        show(result, seed)


def show(result: Measured, seed: int) -> None:
    """One table: operations in the order of a layer, the step as a whole last."""
    from rich.console import Console
    from rich.table import Table

    limits = result.limits
    table = Table(title=f"{result.name}: {result.tokens / (result.step_s + result.sample_s):,.0f} tokens/s", title_justify="left", box=None)
    for name in ("operation", "ms", "share", "bound ms", "of bound"):
        table.add_column(name, justify="left" if name == "operation" else "right")
    whole = result.step_s + result.sample_s
    for name, seconds, bound in [*result.operations, ("sample", result.sample_s, 0.0)]:
        of_bound = f"{100 * bound / seconds:.0f} %" if bound else ""
        table.add_row(name, f"{1e3 * seconds:.3f}", f"{100 * seconds / whole:.1f} %", f"{1e3 * bound:.3f}" if bound else "", of_bound)
    table.add_row("step", f"{1e3 * whole:.3f}", "", f"{1e3 * result.bound_s:.3f}", f"{100 * result.ratio:.0f} %", style="bold")
    console = Console(highlight=False)
    console.print(table)
    if limits is not None:
        console.print(f"limits: {limits}; seed {seed}\n")
