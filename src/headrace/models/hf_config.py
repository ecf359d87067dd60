"""Hugging Face `config.json` -> ModelConfig, and the ids that end an answer.

Settings that would change the network and that it does not have are refused by name; everything else in the file is a note.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from headrace.config import ModelConfig, RopeConfig
from headrace.errors import ModelError, UnsupportedModel
from headrace.models import shape
from headrace.models.safetensors import SafetensorsFolder

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

# Settings accepted only with the value the network has anyway (or absent).
FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),  # it would also put a bias on the output projection
    "mlp_bias": (False,),
    "rope_interleaved": (False,),
    "is_decoder": (True, False),
    "num_experts": (0,),
    "num_local_experts": (0, 1),
    "quantization_config": (),
    "add_cross_attention": (False,),
}
# Defaults of the architecture's own configuration class, which count when a key is absent.
DEFAULT_THETA = 10000.0
DEFAULT_WINDOW = {"mistral": 4096}
DEFAULT_HEAD_DIM = {"qwen3": 128}

ROPE_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"},
}


class Fields:
    """Typed access to a JSON object. null counts as absent."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _get(self, key: str, wanted: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise ModelError(self.path, self.prefix + key, f"missing; expected {wanted}")
        return default

    def integer(self, key: str, least: int, most: int, default: int | None = None) -> int:
        value = self._get(key, "an integer", default)
        if isinstance(value, bool) or not isinstance(value, int) or (self.has(key) and not least <= value <= most):
            raise ModelError(self.path, self.prefix + key, f"expected an integer from {least} to {most}, got {str(value)[:80]!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, "a number", default)
        try:
            number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        except OverflowError:  # an integer beyond float64
            number = math.inf
        if not math.isfinite(number):
            raise ModelError(self.path, self.prefix + key, f"expected a finite number, got {str(value)[:80]!r}")
        return number

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, "true or false", default)
        if not isinstance(value, bool):
            raise ModelError(self.path, self.prefix + key, f"expected true or false, got {str(value)[:80]!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, "a string", default)
        if not isinstance(value, str):
            raise ModelError(self.path, self.prefix + key, f"expected a string, got {str(value)[:80]!r}")
        return value


def read(folder: SafetensorsFolder) -> ModelConfig:
    """The configuration of a model folder. Raises ModelError or UnsupportedModel, naming the key."""
    path = folder.path / "config.json"
    fields = Fields(path, folder.config)
    family = fields.text("model_type")
    if family not in ARCHITECTURES:
        raise UnsupportedModel(path, "model_type", f"unknown architecture {family!r}; known are {', '.join(ARCHITECTURES)}")
    for key, accepted in FIXED.items():
        if fields.has(key) and folder.config[key] not in accepted:
            wanted = " or ".join(str(value).lower() for value in accepted) or "no such setting"
            raise UnsupportedModel(path, key, f"expected {wanted}, got {str(folder.config[key])[:80]}")
    hidden = fields.integer("hidden_size", 1, shape.MAX_HIDDEN)
    heads = fields.integer("num_attention_heads", 1, shape.MAX_HEADS)
    if family not in DEFAULT_HEAD_DIM and not fields.has("head_dim") and hidden % heads:
        raise ModelError(path, "head_dim", f"missing, and hidden_size {hidden} is not a multiple of {heads} heads")
    head_dim = fields.integer("head_dim", 1, 1 << 16, DEFAULT_HEAD_DIM.get(family, hidden // heads))
    context_length = fields.integer("max_position_embeddings", 1, shape.MAX_CONTEXT)
    layers = fields.integer("num_hidden_layers", 1, shape.MAX_LAYERS)
    config = ModelConfig(
        architecture=family,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1, shape.MAX_INNER),
        num_heads=heads,
        # Only old Llama files leave it out, and there it means one key head a query head.
        num_kv_heads=fields.integer("num_key_value_heads", 1, shape.MAX_HEADS, heads if family == "llama" else None),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", 1, shape.MAX_VOCAB),
        context_length=context_length,
        norm_eps=fields.number("rms_norm_eps"),
        rope=_rope(fields, head_dim, context_length),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        sliding_window=shape.window(_window(fields, family, layers), context_length),
    )
    return shape.check(path, config)


def _window(fields: Fields, family: str, layers: int) -> int:
    """Keys a query sees, the same in all layers; 0: all."""
    if family == "llama":
        return 0
    window = fields.integer("sliding_window", 1, 2**32, 0)
    if family == "mistral":
        # An explicit null means full attention, an absent key the class's default.
        return window if "sliding_window" in fields.values else DEFAULT_WINDOW[family]
    if not fields.flag("use_sliding_window", False) or window == 0:
        return 0
    types = fields.values.get("layer_types")
    if isinstance(types, list):
        sliding = [kind == "sliding_attention" for kind in types]
        if len(types) != layers or not all(kind in ("sliding_attention", "full_attention") for kind in types):
            raise ModelError(fields.path, "layer_types", f"expected {layers} of sliding_attention or full_attention")
    else:
        first = fields.integer("max_window_layers", 0, 1 << 20, 28)
        sliding = [layer >= first for layer in range(layers)]
    if any(sliding) and not all(sliding):
        raise UnsupportedModel(fields.path, "use_sliding_window", "a sliding window in some of the layers only is not supported")
    return window if all(sliding) else 0


def _rope(fields: Fields, head_dim: int, context_length: int) -> RopeConfig:
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    given = fields.values.get(key) or {}
    if not isinstance(given, dict):
        raise ModelError(fields.path, key, f"expected an object, got {str(given)[:80]!r}")
    rope = Fields(fields.path, given, key + ".")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ROPE_KEYS:
        raise UnsupportedModel(fields.path, f"{key}.rope_type", f"unknown rope type {kind!r}; known are {', '.join(ROPE_KEYS)}")
    for name in given:
        if name not in ROPE_KEYS[kind] | {"rope_type", "type", "rope_theta", "partial_rotary_factor"} and rope.has(name):
            raise UnsupportedModel(fields.path, f"{key}.{name}", f"not known for rope type {kind}")
    theta = rope.number("rope_theta", fields.number("rope_theta", DEFAULT_THETA))
    rotary = int(head_dim * rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)))
    if kind == "default":
        return RopeConfig(theta=theta, rotary_dim=rotary)
    factor = rope.number("factor")
    if kind == "linear":
        return RopeConfig(theta=theta, rotary_dim=rotary, scaling="linear", factor=factor)
    if kind == "llama3":
        return RopeConfig(
            theta=theta, rotary_dim=rotary, scaling="llama3", factor=factor, low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context=rope.integer("original_max_position_embeddings", 1, shape.MAX_CONTEXT),
        )  # fmt: skip
    if not rope.flag("truncate", True):
        raise UnsupportedModel(fields.path, f"{key}.truncate", "false is not supported for yarn")
    return RopeConfig(
        theta=theta, rotary_dim=rotary, scaling="yarn", factor=factor,
        original_context=rope.integer("original_max_position_embeddings", 1, shape.MAX_CONTEXT, context_length),
        attention_factor=rope.number("attention_factor", 0.0), beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
    )  # fmt: skip


def end_token_ids(folder: SafetensorsFolder, vocab_size: int) -> tuple[int, ...]:
    """Ids that end an answer: of generation_config.json, else of config.json."""
    for name, values in (("generation_config.json", folder.generation), ("config.json", folder.config)):
        given = values.get("eos_token_id")
        if given is None:
            continue
        ids = given if isinstance(given, list) else [given]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ModelError(folder.path / name, "eos_token_id", f"expected ids below {vocab_size}, got {str(given)[:80]}")
        return tuple(sorted(set(ids)))
    return ()
