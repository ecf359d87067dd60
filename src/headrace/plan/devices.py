"""The device catalogue: what there is to run on, each fact with its source, and this machine as measured now."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from headrace.errors import UsageError
from headrace.plan.memory import GIB

TYPES = ("bf16", "fp16", "fp8", "int8", "fp4")
# What an engine for accelerators takes of the memory (its usual default), and its runtime, graphs and communication buffers in it.
GPU_USABLE = 0.90
GPU_OVERHEAD = 1.5 * GIB
CPU_USABLE = 0.90
CPU_OVERHEAD = 0.5 * GIB
KEYS = {"kind", "memory_gb", "memory_gib", "bandwidth_gbs", "peaks", "link_gbs", "max_tp", "watts", "prices", "note"}


@dataclass(frozen=True, slots=True)
class Price:
    """USD an hour for one device."""

    seller: str
    usd_hour: float
    terms: str
    date: str
    source: str


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one CPU socket. Bytes, bytes a second, operations a second, watts; 0 where it is not known."""

    name: str
    kind: str  # gpu, cpu
    memory: float
    bandwidth: float
    peaks: dict[str, float]
    link: float  # bytes a second to another device, one direction; 0: none
    max_tp: int
    watts: float
    prices: tuple[Price, ...]
    note: str
    sources: dict[str, str]  # fact -> where it is from

    @property
    def usable(self) -> float:
        return CPU_USABLE if self.kind == "cpu" else GPU_USABLE

    @property
    def overhead(self) -> float:
        return CPU_OVERHEAD if self.kind == "cpu" else GPU_OVERHEAD

    def peak(self, compute: str) -> float:
        """Operations a second in a type; fp16 units serve bf16's place where a level only says 16 bits. 0: not in hardware."""
        return self.peaks.get(compute, self.peaks.get("fp16", 0.0) if compute == "bf16" else 0.0)

    @property
    def price(self) -> Price | None:
        """The cheapest on-demand one."""
        return min((price for price in self.prices if price.terms == "on demand"), key=lambda price: price.usd_hour, default=None)

    def refusal(self, compute: str) -> str:
        """Why a level that multiplies in this type is not for this device; empty if it is."""
        if not self.peak(compute):
            return f"{self.name} has no {compute} in hardware"
        if compute == "int8" and 0 < self.peaks["int8"] < self.peaks.get("fp8", 0.0) / 4:
            return f"{self.name} computes int8 at {self.peaks['int8'] / self.peaks['fp8']:.0%} of fp8: use fp8"
        return ""


def load_devices(extra: Path | None = None) -> dict[str, Device]:
    """The built-in catalogue, and the devices of a file of the same form. Raises UsageError, naming device and field."""
    catalogue = _parse(yaml.safe_load(files("headrace.plan").joinpath("devices.yaml").read_text()), "devices.yaml")
    if extra is None:
        return catalogue
    try:
        given = yaml.safe_load(extra.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--devices {extra}: cannot be read: {str(error).splitlines()[0]}") from None
    return catalogue | _parse(given, str(extra))


def find_device(name: str, devices: dict[str, Device]) -> Device:
    """By name; the form is free: H100_SXM, h100-sxm, h200 for h200-sxm. Raises UsageError."""
    wanted = name.lower().replace("_", "-").replace(" ", "-")
    for candidate in (wanted, wanted + "-sxm", wanted.removesuffix("-sxm")):
        if candidate in devices:
            return devices[candidate]
    raise UsageError(f"device: unknown {name!r}; known are {', '.join(devices)}")


def _parse(given: Any, file: str) -> dict[str, Device]:
    if not isinstance(given, dict) or not isinstance(given.get("devices"), dict):
        raise UsageError(f"{file}: expected `devices:` with a name for each")
    sources = given.get("sources") or {}
    return {str(name): _device(str(name), entry, sources, f"{file}: {name}") for name, entry in given["devices"].items()}


def _device(name: str, entry: Any, sources: Any, where: str) -> Device:
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: expected fields, got {str(entry)[:40]!r}")
    if unknown := set(entry) - KEYS:
        raise UsageError(f"{where}: unknown field {sorted(map(str, unknown))[0]!r}; known are {', '.join(sorted(KEYS))}")
    origin: dict[str, str] = {}

    def fact(field: str, given: Any, needed: bool = True) -> float:
        if given is None and not needed:
            return 0.0
        value, source = (given[0], str(given[1])) if isinstance(given, list) and len(given) == 2 else (given, "given")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise UsageError(f"{where}: {field}: expected a positive number, or [number, source], got {str(given)[:40]!r}")
        origin[field] = str(sources.get(source, source))
        return float(value)

    kind = entry.get("kind")
    if kind not in ("gpu", "cpu"):
        raise UsageError(f"{where}: kind: expected gpu or cpu, got {str(kind)[:40]!r}")
    if ("memory_gb" in entry) == ("memory_gib" in entry):
        raise UsageError(f"{where}: expected one of memory_gb and memory_gib")
    peaks = entry.get("peaks")
    if not isinstance(peaks, dict) or not peaks or not set(peaks) <= set(TYPES):
        raise UsageError(f"{where}: peaks: expected TFLOP/s for some of {', '.join(TYPES)}")
    memory = fact("memory_gb", entry["memory_gb"]) * 1e9 if "memory_gb" in entry else fact("memory_gib", entry["memory_gib"]) * GIB
    max_tp = entry.get("max_tp", 1)
    if isinstance(max_tp, bool) or not isinstance(max_tp, int) or not 1 <= max_tp <= 1024:
        raise UsageError(f"{where}: max_tp: expected 1 to 1024, got {str(max_tp)[:40]!r}")
    link = fact("link_gbs", entry.get("link_gbs"), needed=False) * 1e9
    if max_tp > 1 and not link:
        raise UsageError(f"{where}: max_tp is {max_tp}, but link_gbs is missing")
    return Device(
        name, kind, memory, fact("bandwidth_gbs", entry.get("bandwidth_gbs")) * 1e9,
        {str(key): 1e12 * fact(f"peaks.{key}", value) for key, value in peaks.items()}, link, max_tp,
        fact("watts", entry.get("watts"), needed=False), tuple(_price(price, sources, where) for price in entry.get("prices") or ()),
        str(entry.get("note", "")), origin,
    )  # fmt: skip


def _price(given: Any, sources: Any, where: str) -> Price:
    if not isinstance(given, dict) or not {"seller", "usd_hour", "date"} <= set(given):
        raise UsageError(f"{where}: prices: expected seller, usd_hour and date for each, got {str(given)[:60]!r}")
    usd = given["usd_hour"]
    if isinstance(usd, bool) or not isinstance(usd, int | float) or not 0 < usd < 1e6:
        raise UsageError(f"{where}: prices: usd_hour: expected a positive number, got {str(usd)[:40]!r}")
    source = str(given.get("source", "given"))
    return Price(
        str(given["seller"]), float(usd), str(given.get("terms", "on demand")), str(given["date"]), str(sources.get(source, source))
    )
