"""Measurements of other people's servers: a CSV of closed-loop runs, what the cost model says of each, and the error."""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError, UsageError
from headrace.plan.cost import CostModel
from headrace.plan.devices import Device, find_device
from headrace.plan.factors import Factors
from headrace.plan.memory import Level, level_named, split_memory
from headrace.plan.models import known
from headrace.plan.shape import Shape

COLUMNS = ("id", "model_path", "system", "isl", "osl", "batch_size", "tp_size", "silicon_ttft_ms", "silicon_tpot_ms")
CONCURRENCY = re.compile(r"_c(\d+)_")
RAMP = 0.04  # of all its sequences, a closed loop's cohort on average over a run of some ten rounds: the first round starts as one
# Engines before these versions compute all waiting prompts before they decode again, so that a closed loop of equal lengths stays in step.
PREFILL_FIRST = {"sglang": (0, 5, 6)}
TTFT_CONCURRENCY = 32  # the goal for TTFT counts rows up to this: above it the load generator's queue is what is measured


@dataclass(frozen=True, slots=True)
class Row:
    """One run: `concurrency` requests always open, each of `isl` prompt and `osl` answer tokens. Seconds."""

    id: str
    model: str
    shape: Shape
    device: Device
    level: Level
    tp: int
    isl: int
    osl: int
    concurrency: int
    prefill_first: bool
    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds, and how many of the open requests run at once."""

    ttft: float
    tpot: float
    running: float


def read_measured(path: Path, devices: dict[str, Device]) -> tuple[list[Row], list[tuple[str, str]]]:
    """Rows that can be predicted, and (id, reason) of those that cannot. Raises UsageError for a file that is none."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            lines = list(reader)
            columns = reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if missing := [name for name in COLUMNS if name not in columns]:
        raise UsageError(f"{path}: expected the columns {', '.join(COLUMNS)}; missing: {', '.join(missing)}")
    if not lines:
        raise UsageError(f"{path}: no rows")
    rows: list[Row] = []
    skipped: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 2):
        try:
            rows.append(_row(line, devices, f"{path}: line {number}"))
        except _Cannot as reason:
            skipped.append((line["id"], str(reason)))
    return rows, skipped


class _Cannot(Exception):
    """The row is sound, and this model has nothing to say of it."""


def _row(line: dict[str, str], devices: dict[str, Device], where: str) -> Row:
    def number(name: str) -> float:
        try:
            value = float(line[name])
        except (TypeError, ValueError):
            value = math.nan
        if not value > 0 or math.isinf(value):
            raise UsageError(f"{where}: {name}: expected a positive number, got {str(line[name])[:40]!r}")
        return value

    values = {name: number(name) for name in COLUMNS[3:]}
    shape = known(line["model_path"])
    if shape is None:
        raise _Cannot(f"model {line['model_path']} is not in the built-in table")
    try:
        device = find_device(line["system"], devices)
    except UsageError as error:
        raise _Cannot(str(error).partition(";")[0]) from None
    if line.get("mode") not in (None, "", "agg"):
        raise _Cannot(f"mode {line['mode']}: only aggregated serving is modelled")
    if line.get("pp_size") not in (None, "", "1"):
        raise _Cannot("pipeline stages are not modelled")
    level = level_named(_level(line, device))
    if reason := device.refusal(level.compute):
        raise _Cannot(reason)
    tp = int(values["tp_size"])
    if tp > device.max_tp:
        raise _Cannot(f"{device.name} goes together in up to {device.max_tp}")
    found = CONCURRENCY.search(line["id"])
    first = PREFILL_FIRST.get(line.get("backend") or "")
    return Row(
        line["id"], line["model_path"], shape, device, level, tp, int(values["isl"]), int(values["osl"]),
        int(found[1]) if found else int(values["batch_size"]), first is not None and _version(line.get("backend_version") or "") < first,
        values["silicon_ttft_ms"] / 1e3, values["silicon_tpot_ms"] / 1e3,
    )  # fmt: skip


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _level(line: dict[str, str], device: Device) -> str:
    mode = (line.get("gemm_quant_mode") or line.get("precision") or "").lower()
    if mode in ("", "bf16", "bfloat16", "fp16", "float16"):
        return "bf16"
    if "fp4" in mode:
        return "fp4" if device.peak("fp4") else "int4"  # without the units it is unpacked and multiplied at 16 bits
    if mode.startswith("fp8"):
        return "fp8"
    if mode.startswith(("int8", "w8a8")):
        return "int8"
    if mode.startswith(("int4", "w4a16", "awq", "gptq")):
        return "int4"
    raise _Cannot(f"precision {mode} is not known")


def predict(row: Row, factors: Factors) -> Prediction:
    """The steady state of a closed loop.

    Of `concurrency` open requests those run whose keys and values fit; each of its answer's tokens takes a decode step, and the prompts
    of the others come in between. A request waits for the prompts that are computed with or before its own (its cohort), and is held up
    by all the rest while it decodes: the work of the prompts is the same, only where it is felt differs.
    """
    cost = CostModel(row.shape, row.device, row.level, row.tp, factors)
    memory = split_memory(row.shape, row.level, memory=row.device.memory, usable=row.device.usable, overhead=row.device.overhead, tp=row.tp)
    context = row.isl + row.osl / 2
    running = min(float(row.concurrency), max(1.0, memory.kv / row.shape.kv_bytes(context, row.tp)))
    decode = cost.decode_s(running, context)
    prompt = cost.mixed_s(running, context, row.isl) - decode
    cohort = running / 2 if row.prefill_first else min(running / 2, factors.cohort + RAMP * running)
    tpot = decode + (running - cohort) * prompt / max(1, row.osl - 1)
    ttft = factors.request_s + tpot / 2 + decode + cohort * prompt
    if running < row.concurrency:  # Little: the others wait, as long as it takes to serve them
        ttft += (row.concurrency - running) / running * (ttft + (row.osl - 1) * tpot)
    return Prediction(ttft, tpot, running)


def check(rows: Sequence[Row], factors: Factors, skipped: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """Absolute relative errors of TTFT and TPOT: in all, by device, model and TP, and of every row. Plain data."""
    if not rows:
        raise UsageError(f"no row can be predicted: {skipped[0][1] if skipped else 'there is none'}")
    told: list[dict[str, Any]] = []
    for row in rows:
        try:
            predicted = predict(row, factors)
        except HeadraceError as error:
            raise UsageError(f"{row.id}: {error}") from None
        told.append(
            {
                "id": row.id, "model": row.model, "device": row.device.name, "level": row.level.name, "tp": row.tp, "isl": row.isl,
                "osl": row.osl, "concurrency": row.concurrency, "running": round(predicted.running, 1),
                "ttft_ms": {"measured": 1e3 * row.ttft, "predicted": 1e3 * predicted.ttft, "error": predicted.ttft / row.ttft - 1},
                "tpot_ms": {"measured": 1e3 * row.tpot, "predicted": 1e3 * predicted.tpot, "error": predicted.tpot / row.tpot - 1},
            }
        )  # fmt: skip
    low = [row for row in told if row["concurrency"] <= TTFT_CONCURRENCY]
    return {
        "tpot": _errors(told, "tpot_ms"),
        "ttft": _errors(told, "ttft_ms") | {f"concurrency_to_{TTFT_CONCURRENCY}": _errors(low, "ttft_ms")},
        "by": {
            name: _grouped(told, key)
            for name, key in (("device", lambda r: r["device"]), ("model", lambda r: r["model"]), ("tp", lambda r: str(r["tp"])))
        },
        "rows": told,
        "skipped": [{"id": identifier, "reason": reason} for identifier, reason in skipped],
    }


def _grouped(told: Iterable[dict[str, Any]], key: Callable[[dict[str, Any]], str]) -> dict[str, Any]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in told:
        groups.setdefault(key(row), []).append(row)
    return {name: {"tpot": _errors(rows, "tpot_ms"), "ttft": _errors(rows, "ttft_ms")} for name, rows in sorted(groups.items())}


def _errors(told: Sequence[dict[str, Any]], field: str) -> dict[str, float | int | None]:
    errors = sorted(abs(row[field]["error"]) for row in told)
    if not errors:
        return {"rows": 0, "median": None, "p90": None, "bias": None}
    bias = statistics.median(row[field]["error"] for row in told)
    return {"rows": len(errors), "median": statistics.median(errors), "p90": errors[math.ceil(0.9 * len(errors)) - 1], "bias": bias}
