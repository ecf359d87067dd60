"""A pytest plugin: the tests use the native module of `make sanitize`, in place of the one the package has.

    HEADRACE_NATIVE=build/sanitize/_native.*.so python -m pytest -p scripts.sanitized tests/test_linear.py

Processes that a test starts have the ordinary module.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import headrace

_NAME = "headrace._native"

spec = importlib.util.spec_from_file_location(_NAME, os.path.abspath(os.environ["HEADRACE_NATIVE"]))
if spec is None or spec.loader is None or _NAME in sys.modules:
    raise ImportError(f"{os.environ['HEADRACE_NATIVE']}: expected a native module, and that no other is loaded")
headrace._native = sys.modules[_NAME] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(headrace._native)
