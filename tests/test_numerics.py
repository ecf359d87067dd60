"""The numerics version as it was written down: hashes of float32 logits at each level (docs/numerics.md)."""

from __future__ import annotations

import json

import golden_runs
import pytest

from headrace.config import NUMERICS_VERSION
from headrace.kernels import native


@pytest.mark.parametrize("level", native.levels())
def test_logits_have_the_bits_of_this_version(level: str) -> None:
    stored = json.loads(golden_runs.HASHES.read_text())
    assert stored["version"] == golden_runs.numerics_version() == NUMERICS_VERSION
    before = native.level()
    native.use(level)
    try:
        assert golden_runs.all_hashes() == stored["levels"][level]
    finally:
        native.use(before)


def test_levels_that_must_agree_do() -> None:
    """Everything but VDPBF16PS is the same at every level, so the levels without it agree to the bit."""
    levels = json.loads(golden_runs.HASHES.read_text())["levels"]
    assert levels["scalar"] == levels["avx2"] == levels["avx512vnni"]
    assert levels["avx512bf16"] != levels["scalar"]
