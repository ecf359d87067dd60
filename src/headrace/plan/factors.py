"""What stands between a data sheet and a step: few numbers, each with a cause, so that those found on one model hold for another."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from headrace.errors import UsageError


@dataclass(frozen=True, slots=True)
class Factors:
    """Shares of the device's peaks, and seconds."""

    bandwidth: float  # of memory bandwidth: weights, keys and values
    compute_16: float  # of the dense peak: matrix products at 16 bits
    compute_8: float  # at 8 bits or less: unpacking and scaling beside it do not get faster
    attention: float  # of the 16-bit peak: attention over a prompt
    link: float  # of a link's bandwidth: large all-reduces
    link_s: float  # an all-reduce of nothing
    layer_s: float  # launching and joining a layer's kernels
    step_s: float  # scheduling, sampling and returning a step
    row_s: float  # of a step for each sequence in it: its tables, its sampling, its stream
    request_s: float  # of a request before it can be scheduled: reading, tokenizing, passing on
    cohort: float  # prompts whose prefill a request of a closed loop with equal lengths waits for: those that end together start together


# Beyond these a factor would stand for something else than its name says.
BOUNDS: dict[str, tuple[float, float]] = {
    "bandwidth": (0.3, 0.95), "compute_16": (0.2, 0.85), "compute_8": (0.2, 0.85), "attention": (0.1, 0.8), "link": (0.1, 0.95),
    "link_s": (1e-6, 1e-4), "layer_s": (1e-7, 1e-3), "step_s": (1e-5, 0.1), "row_s": (1e-7, 1e-3), "request_s": (1e-4, 1.0),
    "cohort": (1.0, 16.0),
}  # fmt: skip
# A CPU runs our own server: no launches, no links; the rest is measured by `headrace bench step`.
CPU = Factors(0.80, 0.70, 0.60, 0.50, 0.60, 8e-6, 20e-6, 0.3e-3, 20e-6, 0.003, 3.0)


@cache
def _sets() -> dict[str, dict[str, float]]:
    return dict(yaml.safe_load(files("headrace.plan").joinpath("factors.yaml").read_text()))


def named_factors(name: str = "fitted") -> Factors:
    """`published` or `fitted` (plan/factors.yaml)."""
    return parse_factors(_sets()[name], "factors.yaml")


def load_factors(path: Path) -> Factors:
    """Of a file that `headrace plan calibrate` wrote. Raises UsageError."""
    try:
        given = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--factors {path}: cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(given, dict) or not isinstance(given.get("factors"), dict):
        raise UsageError(f"--factors {path}: expected `factors:` with a number for each")
    return parse_factors(given["factors"], str(path))


def parse_factors(given: dict[str, Any], where: str) -> Factors:
    """All of them, within bounds. Raises UsageError, naming the one that is not."""
    names = [field.name for field in fields(Factors)]
    if odd := set(given) ^ set(names):
        raise UsageError(f"{where}: factors: {sorted(map(str, odd))[0]!r} is missing or not known; expected {', '.join(names)}")
    for name, value in given.items():
        low, high = BOUNDS[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not low <= value <= high:
            raise UsageError(f"{where}: {name}: expected a number from {low:g} to {high:g}, got {str(value)[:40]!r}")
    return Factors(**{name: float(value) for name, value in given.items()})


def dump_factors(factors: Factors, about: dict[str, Any]) -> str:
    """As `load_factors` reads it."""
    values = {name: float(f"{value:.4g}") for name, value in asdict(factors).items()}
    return str(yaml.safe_dump({"factors": values, "about": about}, sort_keys=False))
