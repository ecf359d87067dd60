"""Runs token sequences through the native executor and reads the golden files; shared by the tests against transformers."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import BLOCK_TOKENS, EngineConfig
from headrace.engine.plan import Chunk, NewRow, Plan
from headrace.executors.native import NativeExecutor
from headrace.models import families, loader
from headrace.models.hub import default_model_path
from headrace.request import SamplingParams

GOLDEN = Path(__file__).parent / "golden"
HASHES = GOLDEN / "hashes.json"
TINY = sorted(path.name for path in (GOLDEN / "tiny").iterdir())


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


@cache
def summary() -> dict[str, Any]:
    return json.loads((GOLDEN / "smollm2.json").read_text())


def executor_for(model: Any, context: int, threads: int = 2) -> NativeExecutor:
    blocks = -(-context // BLOCK_TOKENS)
    config = EngineConfig(context_length=context, num_blocks=blocks, max_batch_size=4, max_batch_tokens=context, prefix_cache=False)
    return NativeExecutor(model, config, threads)


def logits_of(executor: NativeExecutor, ids: Sequence[int], context: int, logits_start: int = 0) -> np.ndarray:
    """Logits [len(ids) - logits_start, vocab] of one sequence, computed in one step from an empty cache; a view."""
    plan = Plan(
        chunks=[Chunk(0, 0, len(ids), logits_start, False)],
        new_rows=[NewRow(0, array("i", ids).tobytes(), len(ids), SamplingParams(max_tokens=1, temperature=0.0), 0, 0, ())],
        new_blocks=[(0, 0, list(range(-(-context // BLOCK_TOKENS))))],
    )
    executor.forward(plan)
    return executor.logits()


def safetensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder as float32: a second, short reader, so that no bug is shared with the package's own."""
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            raw = data[8 + size + begin : 8 + size + end]
            if entry["dtype"] == "BF16":
                value = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                value = np.frombuffer(raw, {"F16": "<f2", "F32": "<f4"}[entry["dtype"]]).astype(np.float32)
            tensors[name] = value.reshape(entry["shape"])
    return tensors


def canonical(name: str) -> tuple[Any, dict[str, np.ndarray]]:
    """The configuration and the weights by canonical name, read by the tests' own reader."""
    with families.open_source(GOLDEN / "tiny" / name) as source:
        config = families.describe(source).config
    values = safetensors(GOLDEN / "tiny" / name)
    found = {key: values.get(families.HF_NAMES[kind].format(layer)) for key, kind, layer, _ in families.shapes(config)}
    if config.tie_embeddings:
        found["head"] = found["embed"]
    return config, {key: value for key, value in found.items() if value is not None}


def copy_with_zeros(folder: Path, target: Path, tensor: str) -> None:
    """A copy of the model in which one tensor is all zeros."""
    target.mkdir()
    for file in folder.iterdir():
        data = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            size = int.from_bytes(data[:8], "little")
            entry = json.loads(data[8 : 8 + size]).get(tensor)
            if entry is not None:
                begin, end = entry["data_offsets"]
                data[8 + size + begin : 8 + size + end] = bytes(end - begin)
        if file.suffix in (".safetensors", ".json"):
            (target / file.name).write_bytes(data)


def numerics_version() -> int:
    """As docs/numerics.md states it."""
    title = (Path(__file__).parents[1] / "docs" / "numerics.md").read_text().splitlines()[0]
    return int(title.rpartition(" ")[2])


def all_hashes() -> dict[str, str]:
    """Model -> hash of the logits of a fixed sequence, at the level in use. The default model's is short: scalar kernels are slow."""
    found = {}
    for name in TINY:
        executor = executor_for(loader.load_model(GOLDEN / "tiny" / name, "bf16"), 128)
        found[name] = digest(logits_of(executor, golden(f"tiny/{name}/logits")["ids"].tolist(), 128))
    executor = executor_for(loader.load_model(default_model_path()), 32)
    found["default"] = digest(logits_of(executor, golden("smollm2")["ids"][:12].tolist(), 32))
    return found


def digest(logits: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()[:32]
