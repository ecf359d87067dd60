"""From what a person calls a model to its Shape: a file or folder, a name of the built-in table, or a hub id."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from headrace.errors import UsageError
from headrace.models import gguf_config
from headrace.models.gguf import GGUFFile
from headrace.models.hub import HUB_ID, hub_file
from headrace.models.safetensors import read_json
from headrace.plan.architectures import shape_of
from headrace.plan.shape import Shape

# Endings of names that say how a model was trained on or stored, not what shape it has.
SUFFIXES = (
    "-v0.1",
    "-v2",
    "-mxfp4",
    "-preview",
    "-thinking",
    "-2507",
    "-v0.3",
    "-instruct",
    "-chat",
    "-it",
    "-hf",
    "-base",
    "-fp8",
    "-fp8-dynamic",
    "-nvfp4",
    "-fp4",
    "-awq",
    "-gptq",
    "-int4",
    "-int8",
    "-bf16",
    "-gguf",
)


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """The built-in table: hub id -> entry."""
    table = yaml.safe_load(files("headrace.plan").joinpath("models.yaml").read_text())
    return dict(table)


@cache
def _names() -> dict[str, str]:
    names: dict[str, str] = {}
    for hub_id, entry in catalogue().items():
        for name in (hub_id, hub_id.partition("/")[2], *entry.get("aliases", ())):
            names[_plain(name)] = hub_id
    return names


def _plain(name: str) -> str:
    """Lower case, without owner and without the endings that do not change the shape."""
    plain = name.lower().rpartition("/")[2]
    while True:
        shorter = next((plain.removesuffix(suffix) for suffix in SUFFIXES if plain.endswith(suffix)), plain)
        if shorter == plain:
            return plain
        plain = shorter


def known(name: str) -> Shape | None:
    """The shape of a model of the built-in table, by hub id, by its last part, or by an alias; None if it is not there."""
    hub_id = _names().get(_plain(name))
    if hub_id is None:
        return None
    entry = catalogue()[hub_id]
    return shape_of(entry["config"], hub_id, entry["source"])


def load_shape(reference: str) -> Shape:
    """The shape of a model. Weights are never read, and of the hub only config.json. Raises UsageError, ModelError, UnsupportedModel."""
    path = Path(reference).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.exists():
        return _from_gguf(path) if path.suffix != ".json" else _from_config(path, reference)
    shape = known(reference)
    if shape is not None:
        return shape
    if HUB_ID.fullmatch(reference):
        return _from_config(hub_file(reference, "config.json"), reference)
    raise UsageError(f"model: {reference!r} is no file or folder here, no model of the built-in table and no hub id (owner/name)")


def _from_config(path: Path, name: str) -> Shape:
    return shape_of(read_json(path), name, str(path))


def _from_gguf(path: Path) -> Shape:
    """What the header says; the level is that of the file's own tensors."""
    with GGUFFile(path) as file:
        config = gguf_config.read(file)
        values = {
            "model_type": config.architecture, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim, "vocab_size": config.vocab_size, "max_position_embeddings": config.context_length,
            "tie_word_embeddings": config.tie_embeddings, "sliding_window": config.sliding_window or None,
        }  # fmt: skip
        shape = shape_of(values, file.text("general.name", path.stem), str(path))
        nbytes = sum(tensor.nbytes for tensor in file.tensors.values())
    return Shape(**{name: getattr(shape, name) for name in Shape.__slots__ if name != "file_bytes"}, file_bytes=nbytes)
