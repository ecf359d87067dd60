"""GGUF metadata -> ModelConfig, and the ids that end an answer."""

from __future__ import annotations

import math

import numpy as np

from headrace.config import ModelConfig, RopeConfig
from headrace.errors import ModelError, UnsupportedModel
from headrace.models import shape
from headrace.models.gguf import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"  # float32 divisors of the rotary frequencies, one a pair (Llama 3.1 and later)
ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral's files say llama

# Keys below `<architecture>.` that are read here. Any other could change what the model computes, so it is refused by name.
READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.sliding_window", "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
# Notes, and switches that are only accepted in the position the network has anyway.
NOTES = {"rope.scaling.finetuned", "tensor_data_layout"}
NEUTRAL: dict[str, object] = {"attention.causal": True, "expert_count": 0, "expert_used_count": 0, "use_parallel_residual": False}

# Tokens that end an answer in some chat format, when the vocabulary has them as control tokens.
END_TOKENS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "</s>"}
CONTROL_TOKEN = 3
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def read(file: GGUFFile) -> ModelConfig:
    """The configuration in a GGUF file's metadata. Raises ModelError or UnsupportedModel, naming the key."""
    architecture = file.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            file.path, "general.architecture", f"unknown architecture {architecture!r}; known are {', '.join(ARCHITECTURES)}"
        )
    if not file.tensors:
        raise UnsupportedModel(file.path, "tensors", "the file has a vocabulary only, no weights")
    if "split.count" in file.metadata and file.integer("split.count", 0, 1 << 16) > 1:
        raise UnsupportedModel(file.path, "split.count", "a model in several files; merge them into one")
    if file.integer("general.quantization_version", 0, 1 << 16, 2) != 2:
        raise UnsupportedModel(file.path, "general.quantization_version", "expected 2")
    prefix = architecture + "."
    for key, value in file.metadata.items():
        name = key.removeprefix(prefix)
        if name == key or name in READ or name in NOTES:
            continue
        if name not in NEUTRAL:
            raise UnsupportedModel(file.path, key, "this setting is not known here, and ignoring it could change the model's answers")
        if not isinstance(value, int) or value != NEUTRAL[name]:
            raise UnsupportedModel(file.path, key, f"{value} is not supported; expected {NEUTRAL[name]}")
    hidden = file.integer(prefix + "embedding_length", 1, shape.MAX_HIDDEN)
    heads = _same_everywhere(file, prefix + "attention.head_count", shape.MAX_HEADS)
    kv_heads = _same_everywhere(file, prefix + "attention.head_count_kv", shape.MAX_HEADS, heads)
    head_dim = _head_dim(file, prefix, hidden, heads)
    context_length = file.integer(prefix + "context_length", 1, shape.MAX_CONTEXT)
    vocab_size = _vocab_size(file, prefix)
    sliding_window = file.integer(prefix + "attention.sliding_window", 0, 2**32 - 1, 0)
    config = ModelConfig(
        architecture=architecture,
        num_layers=file.integer(prefix + "block_count", 1, shape.MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=_same_everywhere(file, prefix + "feed_forward_length", shape.MAX_INNER),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        context_length=context_length,
        norm_eps=file.number(prefix + "attention.layer_norm_rms_epsilon"),
        rope=_rope(file, prefix, head_dim),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        sliding_window=shape.window(sliding_window, context_length),
    )
    return shape.check(file.path, config)


def _same_everywhere(file: GGUFFile, key: str, most: int, default: int | None = None) -> int:
    """A size that may also be given as one number a layer, if they are all the same."""
    if isinstance(file.metadata.get(key), np.ndarray):
        values = file.integers(key)
        if values is None or len(values) == 0 or (values != values[0]).any():
            raise UnsupportedModel(file.path, key, "different sizes from layer to layer are not supported")
        value = int(values[0])
        if not 1 <= value <= most:
            raise ModelError(file.path, key, f"expected 1 to {most}, got {value}")
        return value
    return file.integer(key, 1, most, default)


def _head_dim(file: GGUFFile, prefix: str, hidden: int, heads: int) -> int:
    key = prefix + "attention.key_length"
    if key not in file.metadata and hidden % heads:
        raise ModelError(file.path, key, f"missing, and embedding_length {hidden} is not a multiple of {heads} heads")
    head_dim = file.integer(key, 1, 1 << 16, hidden // heads)
    value_length = file.integer(prefix + "attention.value_length", 1, 1 << 16, head_dim)
    if value_length != head_dim:
        raise UnsupportedModel(file.path, prefix + "attention.value_length", f"{value_length} differs from the key length {head_dim}")
    return head_dim


def _vocab_size(file: GGUFFile, prefix: str) -> int:
    """Rows of the embedding; a vocabulary may be shorter (padded rows), never longer."""
    embed = file.tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise ModelError(file.path, "token_embd.weight", "missing or not a matrix")
    rows = embed.shape[0]
    if not 1 <= rows <= shape.MAX_VOCAB:
        raise ModelError(file.path, "token_embd.weight", f"{rows} rows, expected 1 to {shape.MAX_VOCAB}")
    if file.integer(prefix + "vocab_size", 1, shape.MAX_VOCAB, rows) != rows:
        raise ModelError(file.path, prefix + "vocab_size", f"{file.metadata[prefix + 'vocab_size']}, but token_embd.weight has {rows} rows")
    tokens = file.strings("tokenizer.ggml.tokens")
    if tokens is not None and len(tokens) > rows:
        raise ModelError(file.path, "tokenizer.ggml.tokens", f"{len(tokens)} tokens, but token_embd.weight has {rows} rows")
    return rows


def _rope(file: GGUFFile, prefix: str, head_dim: int) -> RopeConfig:
    rotary = file.integer(prefix + "rope.dimension_count", 1, 1 << 16, head_dim)
    theta = file.number(prefix + "rope.freq_base", 10000.0)
    factors = _rope_factors(file, rotary)
    kind = file.text(prefix + "rope.scaling.type", "none")
    old = prefix + "rope.scale_linear"
    if old in file.metadata and prefix + "rope.scaling.type" not in file.metadata:
        factor = file.number(old)
        kind = "none" if factor == 1.0 else "linear"
    else:
        factor = file.number(prefix + "rope.scaling.factor", 1.0)
    if kind == "none":
        return RopeConfig(theta=theta, rotary_dim=rotary, freq_factors=factors)
    if kind == "linear":
        return RopeConfig(theta=theta, rotary_dim=rotary, scaling="linear", factor=factor, freq_factors=factors)
    if kind == "yarn":
        given = file.number(prefix + "rope.scaling.attn_factor", 1.0)
        # The file's factor multiplies the formula's own, 1 + 0.1 ln(factor).
        attention = 0.0 if given == 1.0 or factor <= 0 else given * (0.1 * math.log(factor) + 1.0)
        original = file.integer(prefix + "rope.scaling.original_context_length", 1, shape.MAX_CONTEXT)
        fast, slow = (file.number(prefix + "rope.scaling.yarn_beta_" + which, value) for which, value in (("fast", 32.0), ("slow", 1.0)))
        return RopeConfig(
            theta=theta, rotary_dim=rotary, scaling="yarn", factor=factor, original_context=original, attention_factor=attention,
            beta_fast=fast, beta_slow=slow, freq_factors=factors,
        )  # fmt: skip
    raise UnsupportedModel(file.path, prefix + "rope.scaling.type", f"unknown rope type {kind!r}; known are none, linear, yarn")


def _rope_factors(file: GGUFFile, rotary: int) -> tuple[float, ...]:
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return ()
    if tensor.type != "F32" or tensor.shape != (rotary // 2,):
        raise ModelError(file.path, ROPE_FACTORS, f"expected F32 of shape ({rotary // 2},), got {tensor.type} of shape {tensor.shape}")
    factors = np.frombuffer(file.read(ROPE_FACTORS), "<f4")
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelError(file.path, ROPE_FACTORS, "expected positive finite factors")
    return tuple(float(factor) for factor in factors)


def end_token_ids(file: GGUFFile, vocab_size: int) -> tuple[int, ...]:
    """Ids that end an answer: those the file names, and control tokens that chat formats end a turn with."""
    ids = {file.integer(key, 0, vocab_size - 1) for key in END_KEYS if key in file.metadata}
    tokens = file.strings("tokenizer.ggml.tokens")
    types = file.integers("tokenizer.ggml.token_type")
    if tokens is not None and types is not None:
        if len(types) != len(tokens):
            raise ModelError(file.path, "tokenizer.ggml.token_type", f"{len(types)} types for {len(tokens)} tokens")
        ids |= {int(i) for i in np.flatnonzero(types == CONTROL_TOKEN) if tokens[int(i)] in END_TOKENS}
    return tuple(sorted(ids))
