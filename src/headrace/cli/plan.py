"""`headrace plan`: what hardware a model and its traffic need; `check` and `calibrate`: how good the model behind it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from headrace.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from headrace.plan.capacity import Objective
    from headrace.plan.devices import Device
    from headrace.plan.factors import Factors
    from headrace.plan.traffic import Traffic


class _PlanGroup(TyperGroup):
    """`headrace plan MODEL` is `headrace plan for MODEL`: what is no command's name is a model or an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["for", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_PlanGroup,
    help="Size the hardware before buying it: headrace plan MODEL --traffic FILE",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
DevicesFile = Annotated[
    Path | None, typer.Option("--devices", help="YAML file with further devices, in the form of the built-in catalogue.")
]
FactorsFile = Annotated[
    str, typer.Option("--factors", help="Factors of the cost model: fitted, published, or a file that `plan calibrate` wrote.")
]


def factors_named(name: str) -> Factors:
    """A set of the package, or a file's. Raises UsageError."""
    from headrace.plan.factors import load_factors, named_factors

    return named_factors(name) if name in ("fitted", "published") else load_factors(Path(name))


@app.command(name="for")
def plan_for(
    model: Annotated[str, typer.Argument(help="Name of a well-known model, config.json, GGUF file, model folder or hub id (owner/name).")],
    slo: Annotated[str, typer.Option(help="ttft=MS,itl=MS[,share=0.95]: what so many of the requests must get.")],
    traffic: Annotated[Path | None, typer.Option(help="Trace: CSV or JSON lines; docs/sizing.md has the forms.")] = None,
    rate: Annotated[float | None, typer.Option(help="Instead of a trace: requests a second, arriving at random.")] = None,
    prompt: Annotated[float | None, typer.Option("--in", help="Mean tokens of a prompt, with --rate.")] = None,
    out: Annotated[float | None, typer.Option("--out", help="Mean tokens of an answer, with --rate.")] = None,
    spread: Annotated[float, typer.Option(help="Standard deviation of the lengths over their mean, with --rate.")] = 1.0,
    scale: Annotated[float, typer.Option(help="Times the traffic.")] = 1.0,
    device: Annotated[list[str] | None, typer.Option(help="Only this one; several may be given. this-machine: measured now.")] = None,
    level: Annotated[list[str] | None, typer.Option(help="Only this weight level; several may be given.")] = None,
    budget: Annotated[float | None, typer.Option(help="USD a month.")] = None,
    window: Annotated[float | None, typer.Option(help="Seconds of the peak. Default: the time to the first token, at least 1.")] = None,
    duty: Annotated[float, typer.Option(help="Share of the hours the hardware is on.")] = 1.0,
    usd_kwh: Annotated[float, typer.Option(help="Price of electricity, for rent or buy.")] = 0.20,
    purchase: Annotated[float | None, typer.Option(help="USD to buy one device with its share of a server, for rent or buy.")] = None,
    top: Annotated[int, typer.Option(help="Options in the table; 0: all.")] = 10,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan (JSON), to be measured against.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts; needs the extra `report`.")] = None,
    factors: FactorsFile = "",
    devices: DevicesFile = None,
    as_json: Json = False,
) -> None:
    """Say what hardware a model and its traffic need: for the peak and not the average, with one to spare.

    \b
    Example:
      headrace plan Llama-3.1-8B --rate 5 --in 1200 --out 210 --slo ttft=1000,itl=60
    """
    from rich.console import Console

    from headrace.cli.plan_tables import show
    from headrace.plan.advise import Question
    from headrace.plan.answer import answer
    from headrace.plan.devices import find_device, load_devices
    from headrace.plan.factors import CPU
    from headrace.plan.models import load_shape
    from headrace.plan.money import Terms

    shape = load_shape(model)
    requests = _traffic(traffic, rate, prompt, out, spread, scale)
    catalogue = load_devices(devices)
    chosen = [_this_machine() if name == "this-machine" else find_device(name, catalogue) for name in device or ()]
    given = factors_named(factors) if factors else None
    on_gpu = given or factors_named("fitted")

    def factors_of(one: Device) -> Factors:
        return given or (CPU if one.kind == "cpu" else on_gpu)

    for name, value, low, high in (("--duty", duty, 0, 1), ("--usd-kwh", usd_kwh, 0, 100), ("--purchase", purchase, 0, 1e9),
                                   ("--budget", budget, 0, 1e12), ("--window", window, 0, 1e6)):  # fmt: skip
        if value is not None and not low < value <= high:
            raise UsageError(f"{name}: expected a number above {low} up to {high:g}, got {value:g}")
    question = Question(
        shape, requests, _objective(slo), chosen or list(catalogue.values()), factors_of, tuple(level or ()),
        Terms(duty, usd_kwh, purchase_usd=purchase), budget, window,
    )  # fmt: skip
    if html is not None:
        from headrace.plan.page import require_plotly

        require_plotly()  # before the work, not after it
    console = Console(stderr=True)
    with console.status("sizing and simulating"):
        told = answer(question)
    if output is not None:
        _write(output, json.dumps(told, indent=1))
    if html is not None:
        from headrace.plan.page import page

        _write(html, page(told))
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        show(told, top)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def _traffic(trace: Path | None, rate: float | None, prompt: float | None, out: float | None, spread: float, scale: float) -> Traffic:
    from headrace.plan.traffic import generate, read_trace

    if (trace is None) == (rate is None):
        raise UsageError("give either --traffic FILE, or --rate with --in and --out")
    if not 0 < scale <= 1e6:
        raise UsageError(f"--scale: expected a number above 0, got {scale:g}")
    if trace is not None:
        return read_trace(trace).scaled(scale)
    if rate is None or prompt is None or out is None:
        raise UsageError("--rate: expected --in and --out with it, the mean tokens of prompt and answer")
    return generate(rate * scale, prompt, out, spread=spread)


def _objective(text: str) -> Objective:
    from headrace.plan.capacity import Objective

    values: dict[str, float] = {"share": 0.95}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            values[name.strip()] = float(number)
        except ValueError:
            raise UsageError(f"--slo: expected ttft=MS,itl=MS[,share=0.95], got {text!r}") from None
    if set(values) != {"ttft", "itl", "share"}:
        raise UsageError(f"--slo: expected ttft=MS,itl=MS[,share=0.95], got {text!r}")
    return Objective(values["ttft"] / 1e3, values["itl"] / 1e3, values["share"])


def _this_machine() -> Device:
    """What the kernels' own meter finds, in about a second."""
    from headrace import machine
    from headrace.executors.profile import Meter
    from headrace.plan.devices import Device

    limits = Meter(machine.threads()).window()
    peaks = {"bf16": 2 * limits.bf16, "int8": 2 * limits.int8}  # a multiply-add is two operations
    source = "measured now"
    return Device(
        "this-machine", "cpu", machine.memory().limit, limits.read, peaks, 0.0, 1, 0.0, (), "",
        {"memory": source, "bandwidth": source, "peaks": source},
    )  # fmt: skip


@app.command()
def check(
    measured: Annotated[Path, typer.Argument(help="CSV of closed-loop measurements; its columns are in docs/sizing.md.")],
    factors: FactorsFile = "fitted",
    devices: DevicesFile = None,
    as_json: Json = False,
) -> None:
    """Say how far the predictions are from measurements: TTFT and TPOT, by device, model and TP.

    \b
    Example:
      headrace plan check measured.csv --json
    """
    from headrace.plan.devices import load_devices
    from headrace.plan.measured import check as check_rows
    from headrace.plan.measured import read_measured

    rows, skipped = read_measured(measured, load_devices(devices))
    told = check_rows(rows, factors_named(factors), skipped)
    if as_json:
        print(json.dumps(told, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table(title=f"{len(rows)} rows, error of the prediction relative to what was measured", title_justify="left", box=None)
    for name in ("", "rows", "TPOT median", "p90", "bias", "TTFT median", "p90", "bias"):
        table.add_column(name, justify="right" if name else "left")
    _error_row(table, "all", told)
    low = told["ttft"]["concurrency_to_32"]
    for kind, groups in told["by"].items():
        for name, group in groups.items():
            _error_row(table, f"{kind} {name}", group)
    console.print(table)
    if low["rows"]:
        console.print(f"TTFT where concurrency is at most 32: median {low['median']:.1%} of {low['rows']} rows")
    for entry in told["skipped"][:10]:
        console.print(f"not predicted: {entry['id']}: {entry['reason']}")
    if len(told["skipped"]) > 10:
        console.print(f"not predicted: {len(told['skipped']) - 10} more (--json has all)")


def _error_row(table: Table, name: str, told: dict[str, Any]) -> None:
    cells = [f"{told[metric][field]:+.1%}" if field == "bias" else f"{told[metric][field]:.1%}" for metric in ("tpot", "ttft")
             for field in ("median", "p90", "bias")]  # fmt: skip
    table.add_row(name, str(told["tpot"]["rows"]), *cells)


@app.command()
def calibrate(
    measured: Annotated[list[Path], typer.Argument(help="CSV files of measurements, as for check; or one recording of serve --record.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the factors go (YAML), for --factors.")],
    start: Annotated[str, typer.Option(help="Factors to start from: published, fitted, or a file. For a recording a CPU's own.")] = "",
    model: Annotated[str, typer.Option(help="Only rows of models whose name contains this. For a recording: the model it is of.")] = "",
    level: Annotated[str, typer.Option(help="For a recording: the level of its weights.")] = "file",
    device: Annotated[str, typer.Option(help="For a recording: the device it was made on.")] = "this-machine",
    devices: DevicesFile = None,
) -> None:
    """Fit the cost model's factors to measurements.

    \b
    Example:
      headrace plan calibrate measured.csv --model Llama-3.1-8B -o factors.yaml
      headrace plan check measured.csv --factors factors.yaml
      headrace plan calibrate run.jsonl --model model.gguf -o here.yaml
    """
    from rich.console import Console

    from headrace.plan.devices import load_devices
    from headrace.plan.factors import dump_factors

    catalogue = load_devices(devices)
    console = Console(stderr=True)
    with console.status("fitting") as status:

        def progress(done: int, of: int) -> None:
            status.update(f"fitting, round {done + 1} of {of}")

        if measured[0].suffix == ".jsonl":
            if len(measured) > 1 or not model:
                raise UsageError("a recording: expected one file, and --model with the model it is of")
            factors, about = _from_recording(measured[0], model, level, device, start, catalogue, progress)
        else:
            factors, about = _from_rows(measured, model, start or "published", catalogue, progress)
    _write(output, dump_factors(factors, about))
    print(f"{output}: " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items()))


def _from_rows(
    measured: list[Path], model: str, start: str, catalogue: dict[str, Device], progress: Callable[[int, int], None]
) -> tuple[Factors, dict[str, Any]]:
    from headrace.plan.calibrate import fit
    from headrace.plan.measured import check as check_rows
    from headrace.plan.measured import read_measured

    rows = [row for path in measured for row in read_measured(path, catalogue)[0] if model.lower() in row.model.lower()]
    if not rows:
        raise UsageError(f"no row to calibrate with{f': no model contains {model!r}' if model else ''}")
    factors = fit(rows, factors_named(start), progress)
    told = check_rows(rows, factors)
    return factors, {
        "rows": len(rows), "models": sorted({row.model for row in rows}), "devices": sorted({row.device.name for row in rows}),
        "tpot_median_error": round(told["tpot"]["median"], 4), "ttft_median_error": round(told["ttft"]["median"], 4),
    }  # fmt: skip


def _from_recording(
    path: Path, model: str, level: str, device: str, start: str, catalogue: dict[str, Device], progress: Callable[[int, int], None]
) -> tuple[Factors, dict[str, Any]]:
    from headrace.cli.recording import StepLine, read
    from headrace.plan.calibrate import Step, fit_steps, step_errors
    from headrace.plan.cost import CostModel
    from headrace.plan.devices import find_device
    from headrace.plan.factors import CPU
    from headrace.plan.memory import levels_for
    from headrace.plan.models import load_shape

    shape = load_shape(model)
    on = _this_machine() if device == "this-machine" else find_device(device, catalogue)
    levels = levels_for(shape, on.kind)
    if level not in levels:
        raise UsageError(f"--level: expected one of {', '.join(levels)}, got {level!r}")
    # A step reads the clock when it starts and when it has ended, last of all.
    lines = [line for line in read(path) if isinstance(line, StepLine) and len(line.clock) >= 2 and line.plan.chunks]
    steps = [Step(tuple(line.plan.chunks), line.clock[-1] - line.clock[-2]) for line in lines if line.clock[-1] > line.clock[-2]]
    if not steps:
        raise UsageError(f"{path}: no step in it")
    factors = fit_steps(steps, shape, on, levels[level], factors_named(start) if start else CPU, progress)
    errors = step_errors(steps, CostModel(shape, on, levels[level], 1, factors))
    return factors, {
        "steps": len(steps), "model": shape.name, "level": level, "device": on.name, "read_gb_s": round(on.bandwidth / 1e9, 2),
        "step_median_error": round(errors["median"], 4), "total_error": round(errors["total"], 4),
    }  # fmt: skip
