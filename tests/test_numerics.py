"""The numerics version as it was written down: hashes of float32 logits at each level (docs/numerics.md)."""

from __future__ import annotations

import json
from dataclasses import replace

import golden_runs
import pytest

from headrace.cli import engine_process
from headrace.config import NUMERICS_VERSION
from headrace.engine.prefix import PrefixHasher
from headrace.kernels import native
from headrace.models import loader


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
    assert levels["scalar"] == levels["avx2"] == levels["avx512vnni"] == levels["amx"]
    assert levels["avx512bf16"] != levels["scalar"]


def test_what_keys_and_values_depend_on_is_in_the_root_of_the_prefix_index(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loader.load_model(golden_runs.GOLDEN / "tiny" / golden_runs.TINY[0], "bf16")

    def root(model: loader.Model = model, salt: str = "") -> bytes:
        return PrefixHasher(engine_process.prefix_scope(model), b"secret").root(salt).digest

    roots = [root(), root(salt="tenant"), root(replace(model, digest="0" * 32)), root(replace(model, level="int8"))]
    for name, value in (("NUMERICS_VERSION", NUMERICS_VERSION + 1), ("KV_LEVEL", "int8")):
        with monkeypatch.context() as patch:
            patch.setattr(engine_process, name, value)
            roots.append(root())
    before = native.level()
    try:
        for level in native.levels():
            if level != before:
                native.use(level)
                roots.append(root())
    finally:
        native.use(before)
    assert len(set(roots)) == 6 + len(native.levels()) - 1
    assert root() == roots[0]
