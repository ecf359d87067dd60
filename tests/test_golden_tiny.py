"""Tiny random models of each architecture against transformers (scripts/tiny_models.py)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import golden_runs
import numpy as np
import pytest
from golden_runs import GOLDEN, TINY, golden

from headrace.executors import interpreter
from headrace.models import families, loader

LENGTH = 96

# The bf16 level rounds to nearest, which moves an operand by at most the unit roundoff and by 0.7 of what `sigma` assumes in the root
# mean square (the logits are measured 0.69 to 0.75 sigma away); the rest is for the kernels' float32 sums and exp. One row may lie
# further out, as sigma is an average over draws.
TOTAL, ROW = 1.0, 2.5


def moved(name: str, logits: np.ndarray) -> tuple[float, float]:
    """How far the logits are from transformers', in units of sigma: over all rows, and in the worst row."""
    expected = golden(f"tiny/{name}/logits")
    difference = logits.astype(np.float64) - expected["logits"]
    rows = np.sqrt((difference**2).mean(axis=1))
    sigma = expected["sigma"]
    return float(np.sqrt((rows**2).mean() / (sigma**2).mean())), float((rows / sigma).max())


def run(folder: Path) -> np.ndarray:
    model = loader.load_model(folder, "bf16")
    ids = golden(f"tiny/{folder.name}/logits")["ids"].tolist()
    executor = golden_runs.executor_for(model, LENGTH)  # held: the logits are a view of its memory
    return golden_runs.logits_of(executor, ids, LENGTH).copy()


def tensors(name: str) -> list[str]:
    return sorted(golden_runs.safetensors(GOLDEN / "tiny" / name))


@pytest.mark.parametrize("name", TINY)
def test_recorded_network(name: str) -> None:
    """The recording, run in float64, is the network: what differs is transformers' own float32 norms and rotations."""
    config, weights = golden_runs.canonical(name)
    expected = golden(f"tiny/{name}/logits")
    logits = interpreter.logits(config, weights, expected["ids"].tolist())
    assert np.abs(logits - expected["logits"]).max() <= 4 * expected["float32_error"]


@pytest.mark.parametrize("name", TINY)
def test_logits(name: str) -> None:
    total, row = moved(name, run(GOLDEN / "tiny" / name))
    assert total <= TOTAL
    assert row <= ROW


@pytest.mark.parametrize(("name", "tensor"), [(name, tensor) for name in TINY for tensor in tensors(name)])
def test_every_tensor_matters(name: str, tensor: str, tmp_path: Path) -> None:
    """A kernel or loader that ignored one tensor would be found: without it the logits are far outside of the tolerance."""
    folder = tmp_path / name
    golden_runs.copy_with_zeros(GOLDEN / "tiny" / name, folder, tensor)
    total, _ = moved(name, run(folder))
    assert total > 4 * TOTAL


# What in config.json changes the answer, and must therefore be read: name -> keys to take out, and what to put in.
SETTINGS: dict[str, dict[str, Any]] = {
    "llama-llama3-tied": {"rope_scaling": None},
    "llama-linear": {"rope_scaling": None},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "qwen2-yarn": {"rope_scaling": None},
    "qwen3": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "mistral": {"sliding_window": None},
}


@pytest.mark.parametrize("name", TINY)
def test_settings_matter(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(GOLDEN / "tiny" / name, folder)
    config = json.loads((folder / "config.json").read_text()) | SETTINGS[name]
    (folder / "config.json").write_text(json.dumps(config))
    total, _ = moved(name, run(folder))
    assert total > 4 * TOTAL


def test_recording_has_no_default_left() -> None:
    """The tiny models between them use every part of the configuration that changes the network."""
    configs = [golden_runs.canonical(name)[0] for name in TINY]
    assert {c.architecture for c in configs} == set(families.ARCHITECTURES)
    assert {c.rope.scaling for c in configs} == {"none", "linear", "llama3", "yarn"}
    for field in ("tie_embeddings", "qkv_bias", "qk_norm"):
        assert {getattr(c, field) for c in configs} == {False, True}, field
    assert any(0 < c.sliding_window < LENGTH for c in configs)
    assert any(c.head_dim * c.num_heads != c.hidden_size for c in configs)
    assert len({c.num_heads // c.num_kv_heads for c in configs}) >= 3
