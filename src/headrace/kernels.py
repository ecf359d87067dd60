"""The front door to the native module: one place that says it has no type stubs."""

from __future__ import annotations

import importlib
from typing import Any

native: Any = importlib.import_module("headrace._native")
