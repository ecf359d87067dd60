"""`headrace plan`: what hardware a model and its traffic need; `check` and `calibrate`: how good the model behind it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from headrace.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.plan.factors import Factors


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

    console = Console(highlight=False)
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
    measured: Annotated[list[Path], typer.Argument(help="CSV files of measurements, as for check.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the factors go (YAML), for --factors.")],
    start: Annotated[str, typer.Option(help="Factors to start from: published, fitted, or a file.")] = "published",
    model: Annotated[str, typer.Option(help="Only rows of models whose name contains this.")] = "",
    devices: DevicesFile = None,
) -> None:
    """Fit the cost model's factors to measurements.

    \b
    Example:
      headrace plan calibrate measured.csv --model Llama-3.1-8B -o factors.yaml
      headrace plan check measured.csv --factors factors.yaml
    """
    from rich.console import Console

    from headrace.plan.calibrate import fit
    from headrace.plan.devices import load_devices
    from headrace.plan.factors import dump_factors
    from headrace.plan.measured import check as check_rows
    from headrace.plan.measured import read_measured

    catalogue = load_devices(devices)
    rows = [row for path in measured for row in read_measured(path, catalogue)[0] if model.lower() in row.model.lower()]
    if not rows:
        raise UsageError(f"no row to calibrate with{f': no model contains {model!r}' if model else ''}")
    console = Console(stderr=True)
    with console.status("fitting") as status:
        factors = fit(rows, factors_named(start), lambda done, of: status.update(f"fitting, round {done + 1} of {of}"))
    told = check_rows(rows, factors)
    about = {
        "rows": len(rows), "models": sorted({row.model for row in rows}), "devices": sorted({row.device.name for row in rows}),
        "tpot_median_error": round(told["tpot"]["median"], 4), "ttft_median_error": round(told["ttft"]["median"], 4),
    }  # fmt: skip
    try:
        output.write_text(dump_factors(factors, about))
    except OSError as error:
        raise UsageError(f"--output {output}: cannot be written: {error.strerror}") from None
    print(f"{output}: {len(rows)} rows, median error on them: TPOT {told['tpot']['median']:.1%}, TTFT {told['ttft']['median']:.1%}")
