"""What it costs: a month's rent, a million tokens, and the purchase price below which buying is cheaper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.plan.devices import Device

HOURS = 730.0  # a month
YEARS = 3.0  # over which a bought device is written off, unless said otherwise


@dataclass(frozen=True, slots=True)
class Terms:
    """How the hardware would be used and paid for."""

    duty: float = 1.0  # share of the hours it is on
    usd_kwh: float = 0.20
    years: float = YEARS
    purchase_usd: float | None = None  # of one device with its share of the server, if known


def monthly(device: Device, count: int, terms: Terms) -> float | None:
    """USD a month to rent so many, for the hours they are on; None without a known price."""
    price = device.price
    return None if price is None else price.usd_hour * count * HOURS * terms.duty


def per_million(usd_month: float | None, tokens_s: float) -> float | None:
    """USD for a million tokens of the average traffic, the whole month long."""
    return None if usd_month is None or tokens_s <= 0 else usd_month / (tokens_s * HOURS * 3600 / 1e6)


def rent_or_buy(device: Device, count: int, terms: Terms) -> dict[str, Any]:
    """Rent stops when the devices are off; a bought one is paid for all the time, and its power while it is on. Plain data."""
    rent = monthly(device, count, terms)
    power = device.watts * count * HOURS * terms.duty / 1e3 * terms.usd_kwh if device.watts else None
    told: dict[str, Any] = {
        "rent_usd_month": rent, "power_usd_month": power, "duty": terms.duty, "usd_kwh": terms.usd_kwh, "years": terms.years,
        "break_even_price_usd": None, "break_even_months": None,
    }  # fmt: skip
    if rent is None:
        return told | {"why": f"no price is known for {device.name}: give one in a --devices file"}
    if power is None:
        return told | {"why": f"the power of {device.name} is not known"}
    saved = rent - power  # a month that is not rented
    if saved <= 0:
        return told | {"why": f"renting costs no more than the power of an owned device ({power:,.0f} USD a month): never buy"}
    limit = saved * terms.years * 12 / count
    told["break_even_price_usd"] = limit
    why = f"at a duty of {terms.duty:.0%} buying pays within {terms.years:g} years below {limit:,.0f} USD a device"
    if terms.purchase_usd is not None:
        told["break_even_months"] = months = terms.purchase_usd * count / saved
        verdict = "buy" if months <= 12 * terms.years else "rent"
        why = f"at {terms.purchase_usd:,.0f} USD a device bought ones have paid for themselves after {months:.0f} months: {verdict}; {why}"
    return told | {"why": why}
