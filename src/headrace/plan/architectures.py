"""A Hugging Face configuration -> Shape. An architecture that is not in the table is unknown: nothing is guessed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ModelError, UnsupportedModel
from headrace.models.hf_config import Fields
from headrace.plan.shape import KVGroup, Weight
from headrace.plan.shape import Shape as _Shape

MAX = 1 << 26


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture's name implies beside the numbers in its configuration."""

    gated: bool = True  # gate and up beside down; else up and down
    qkv_bias: bool = False
    biases: bool = False  # on every linear layer
    qk_norm: bool = False
    norms: int = 2  # vectors of the hidden size in a layer
    tied: bool = False  # when the file does not say
    head_dim: int = 0  # when the file does not say; 0: hidden / heads
    window: str = "never"  # always: in all layers when it is set; switch: only with use_sliding_window; types: by layer_types
    pattern: int = 0  # without layer_types every so many-th layer is full
    kv_heads: int = 0  # when the file does not say: 0: one a query head
    mla: bool = False
    hybrid: bool = False  # linear attention in the layers between the full ones
    experts: str = ""  # key of the number of routed experts
    gate_in_q: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(window="always"),
    "ministral": Family(window="types"),
    "qwen2": Family(qkv_bias=True, window="switch"),
    "qwen3": Family(qk_norm=True, head_dim=128, window="switch"),
    "phi3": Family(window="always"),
    "smollm3": Family(tied=True),
    "granite": Family(tied=True),
    "olmo2": Family(qk_norm=True),
    "glm4": Family(qkv_bias=True, norms=4),
    "gemma": Family(tied=True, head_dim=256),
    "gemma2": Family(tied=True, head_dim=256, norms=4, window="types", pattern=2),
    "gemma3_text": Family(tied=True, head_dim=256, norms=4, qk_norm=True, window="types", pattern=6),
    "falcon": Family(gated=False, tied=True, kv_heads=1, norms=1),
    "starcoder2": Family(gated=False, biases=True, tied=True, window="always"),
    "mixtral": Family(window="always", experts="num_local_experts"),
    "qwen2_moe": Family(qkv_bias=True, experts="num_experts", window="switch"),
    "qwen3_moe": Family(qk_norm=True, head_dim=128, experts="num_experts", window="switch"),
    "olmoe": Family(qk_norm=True, experts="num_experts"),
    "minimax_m2": Family(qk_norm=True, experts="num_local_experts"),
    "gpt_oss": Family(biases=True, window="types", pattern=2, experts="num_local_experts"),
    "deepseek_v2": Family(mla=True, experts="n_routed_experts"),
    "deepseek_v3": Family(mla=True, experts="n_routed_experts"),
    "kimi_k2": Family(mla=True, experts="n_routed_experts"),
    "qwen3_next": Family(qk_norm=True, head_dim=256, hybrid=True, gate_in_q=True, experts="num_experts"),
    "qwen3_5_text": Family(qk_norm=True, head_dim=256, hybrid=True, gate_in_q=True),
    "qwen3_5_moe_text": Family(qk_norm=True, head_dim=256, hybrid=True, gate_in_q=True, experts="num_experts"),
}
TEXT_ONLY = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "mistral3": "mistral"}  # wrappers


def shape_of(config: dict[str, Any], name: str, source: str) -> _Shape:
    """The shape that a configuration describes. Raises UnsupportedModel for an unknown architecture, ModelError for a contradiction."""
    path = Path(name)
    kind = Fields(path, config).text("model_type")
    if isinstance(config.get("text_config"), dict):
        text: dict[str, Any] = config["text_config"]
        if "tie_word_embeddings" not in text and "tie_word_embeddings" in config:
            text = text | {"tie_word_embeddings": config["tie_word_embeddings"]}
        kind = text.get("model_type") or TEXT_ONLY.get(kind, kind)
        config = text
    kind = TEXT_ONLY.get(kind, kind)
    family = FAMILIES.get(kind)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModel(path, "model_type", f"unknown architecture {str(kind)[:80]!r}: its size would be a guess; known are {known}")
    return _Reader(Fields(path, config), family, kind).shape(name, source)


class _Reader:
    def __init__(self, fields: Fields, family: Family, kind: str) -> None:
        self.fields, self.family, self.kind = fields, family, kind
        self.hidden = fields.integer("hidden_size", 1, MAX)
        self.layers = fields.integer("num_hidden_layers", 1, 1 << 12)
        self.heads = fields.integer("num_attention_heads", 1, 1 << 14)
        self.weights: list[Weight] = []
        self.groups: list[KVGroup] = []

    def refuse(self, field: str, problem: str) -> ModelError:
        return ModelError(self.fields.path, field, problem)

    def add(self, name: str, n: int, k: int, count: int, parts: int, kind: Any = "linear") -> None:
        if n * k * count:
            self.weights.append(Weight(name, kind, n, k, count, parts))
            if self.family.biases and kind in ("linear", "expert"):
                self.weights.append(Weight(name + "_bias", "vector", n, 1, count, 1))

    def shape(self, name: str, source: str) -> _Shape:
        fields, family = self.fields, self.family
        vocab = fields.integer("vocab_size", 1, MAX)
        context = fields.integer("max_position_embeddings", 1, 1 << 28)
        self.add("embed", vocab, self.hidden, 1, vocab, "embed")
        if not fields.flag("tie_word_embeddings", family.tied):
            self.weights.append(Weight("head", "head", vocab, self.hidden, 1, vocab))
        self.add("norms", self.hidden, 1, family.norms * self.layers + 1, 1, "vector")
        if family.mla:
            self.latent_attention()
        else:
            full, sliding, linear, window = self.kinds_of_layers()
            self.attention(full, sliding, window)
            if linear:
                self.linear_attention(linear)
        experts, active = self.feed_forward()
        return _Shape(
            name, self.kind, source, self.layers, self.hidden, vocab, context, tuple(self.weights), tuple(self.groups), experts, active
        )

    def kinds_of_layers(self) -> tuple[int, int, int, int]:
        """(full, sliding, linear layers, window)."""
        fields, family, layers = self.fields, self.family, self.layers
        window = fields.integer("sliding_window", 1, 1 << 32, 0) if family.window != "never" else 0
        if window >= fields.integer("max_position_embeddings", 1, 1 << 28):
            window = 0  # it holds the whole context
        types = fields.values.get("layer_types")
        if types is not None:
            known = {"full_attention", "sliding_attention", "linear_attention"}
            if not isinstance(types, list) or len(types) != layers or not set(types) <= known:
                raise self.refuse("layer_types", f"expected {layers} entries (num_hidden_layers) of {', '.join(sorted(known))}")
            full, sliding, linear = (types.count(kind) for kind in ("full_attention", "sliding_attention", "linear_attention"))
            if linear and not family.hybrid:
                raise self.refuse("layer_types", f"linear_attention is not known for {self.kind}")
            if sliding and not window and fields.has("sliding_window"):
                full, sliding = full + sliding, 0
            if sliding and not window:
                raise self.refuse("sliding_window", "missing, and layer_types has sliding_attention")
            return full, sliding, linear, window
        if family.hybrid:
            interval = fields.integer("full_attention_interval", 1, layers)
            return layers // interval, 0, layers - layers // interval, 0
        if window and family.window == "types":
            every = fields.integer("sliding_window_pattern", 1, 1 << 12, family.pattern or None)
            return layers // every, layers - layers // every, 0, window
        if window and family.window == "switch":
            if not fields.flag("use_sliding_window", False):
                return layers, 0, 0, 0
            first = min(layers, fields.integer("max_window_layers", 0, 1 << 12, 28))
            return first, layers - first, 0, window
        return (0, layers, 0, window) if window else (layers, 0, 0, 0)

    def head_dim(self) -> int:
        given, family = self.fields, self.family
        if given.has("head_dim") or family.head_dim:
            return given.integer("head_dim", 1, 1 << 14, family.head_dim)
        if self.hidden % self.heads:
            raise self.refuse("head_dim", f"missing, and hidden_size {self.hidden} is not a multiple of {self.heads} heads")
        return self.hidden // self.heads

    def attention(self, full: int, sliding: int, window: int) -> None:
        fields, family, heads = self.fields, self.family, self.heads
        dim = self.head_dim()
        kv_heads = fields.integer("num_key_value_heads", 1, 1 << 14, fields.integer("num_kv_heads", 1, 1 << 14, family.kv_heads or heads))
        if heads % kv_heads:
            raise self.refuse("num_key_value_heads", f"{heads} query heads are not a multiple of {kv_heads} key heads")
        count = full + sliding
        self.add("q", (2 if family.gate_in_q else 1) * heads * dim, self.hidden, count, heads)
        self.add("k", kv_heads * dim, self.hidden, count, kv_heads)
        self.add("v", kv_heads * dim, self.hidden, count, kv_heads)
        self.add("o", self.hidden, heads * dim, count, heads)
        if family.qkv_bias:
            self.add("qkv_bias", (heads + 2 * kv_heads) * dim, 1, count, 1, "vector")
        if family.qk_norm:
            self.add("qk_norm", 2 * dim, 1, count, 1, "vector")
        for layers, kept in ((full, 0), (sliding, window)):
            if layers:
                self.groups.append(KVGroup(layers, kv_heads, dim, dim, kept, query_heads=heads, query_dim=2 * dim))

    def latent_attention(self) -> None:
        fields, heads, hidden, layers = self.fields, self.heads, self.hidden, self.layers
        rank, rope = fields.integer("kv_lora_rank", 1, MAX), fields.integer("qk_rope_head_dim", 1, MAX)
        nope, value = fields.integer("qk_nope_head_dim", 1, MAX), fields.integer("v_head_dim", 1, MAX)
        q_rank = fields.integer("q_lora_rank", 1, MAX, 0)
        if q_rank:
            self.add("q_a", q_rank, hidden, layers, 1)
            self.add("q_b", heads * (nope + rope), q_rank, layers, heads)
        else:
            self.add("q", heads * (nope + rope), hidden, layers, heads)
        self.add("kv_a", rank + rope, hidden, layers, 1)
        self.add("kv_b", heads * (nope + value), rank, layers, heads)
        self.add("o", hidden, heads * value, layers, heads)
        self.add("latent_norms", q_rank + rank, 1, layers, 1, "vector")
        self.groups.append(KVGroup(layers, 1, rank + rope, 0, split=False, query_heads=heads, query_dim=nope + rope + value))

    def linear_attention(self, layers: int) -> None:
        """Gated delta rule: a state of (key, value) a value head in float32, and the last inputs of a short convolution."""
        fields, hidden = self.fields, self.hidden
        key_heads, value_heads = (fields.integer(f"linear_num_{kind}_heads", 1, 1 << 14) for kind in ("key", "value"))
        key_dim, value_dim = (fields.integer(f"linear_{kind}_head_dim", 1, 1 << 14) for kind in ("key", "value"))
        kernel = fields.integer("linear_conv_kernel_dim", 1, 1 << 10)
        mixed = 2 * key_heads * key_dim + value_heads * value_dim
        self.add("linear_qkv", mixed, hidden, layers, key_heads)
        self.add("linear_z", value_heads * value_dim, hidden, layers, value_heads)
        self.add("linear_gates", 2 * value_heads, hidden, layers, value_heads)
        self.add("linear_o", hidden, value_heads * value_dim, layers, value_heads)
        self.add("linear_conv", mixed, kernel, layers, key_heads, "vector")
        state = 4 * value_heads * key_dim * value_dim + 2 * (kernel - 1) * mixed
        self.groups.append(KVGroup(layers, 0, 0, 0, state_bytes=state))

    def feed_forward(self) -> tuple[int, int]:
        """Adds the layers' MLPs. (routed experts, active ones)."""
        fields, family, hidden, layers = self.fields, self.family, self.hidden, self.layers
        if family.experts and fields.integer(family.experts, 0, 1 << 16, 0):
            return self.experts()
        default = 4 * hidden if self.kind == "falcon" else None
        inner = fields.integer("intermediate_size", 1, MAX, fields.integer("ffn_hidden_size", 1, MAX, 0) or default)
        self.mlp("", inner, layers)
        return 0, 0

    def mlp(self, prefix: str, inner: int, layers: int) -> None:
        if self.family.gated:
            self.add(prefix + "gate", inner, self.hidden, layers, inner)
        self.add(prefix + "up", inner, self.hidden, layers, inner)
        self.add(prefix + "down", self.hidden, inner, layers, inner)

    def experts(self) -> tuple[int, int]:
        fields, hidden = self.fields, self.hidden
        experts = fields.integer(self.family.experts, 1, 1 << 16)
        active = fields.integer("num_experts_per_tok", 1, 1 << 16)
        if active > experts:
            raise self.refuse("num_experts_per_tok", f"{active} of {experts} experts")
        inner = fields.integer("moe_intermediate_size", 1, MAX, fields.integer("intermediate_size", 1, MAX, 0) or None)
        dense = min(self.layers, fields.integer("first_k_dense_replace", 0, 1 << 12, 0))
        if only := fields.values.get("mlp_only_layers"):
            dense = len(only)
        if fields.integer("decoder_sparse_step", 1, 1 << 12, 1) != 1 or fields.integer("moe_layer_freq", 1, 1 << 12, 1) != 1:
            raise UnsupportedModel(fields.path, "decoder_sparse_step", "experts in every so many-th layer only are not known here")
        sparse = self.layers - dense
        if dense:
            self.mlp("dense_", fields.integer("intermediate_size", 1, MAX), dense)
        shared = fields.integer("n_shared_experts", 0, 1 << 10, 0) * inner or fields.integer("shared_expert_intermediate_size", 0, MAX, 0)
        if shared:
            self.mlp("shared_", shared, sparse)
        self.add("router", experts, hidden, sparse, 1)
        for name, n, k in (("expert_gate", inner, hidden), ("expert_up", inner, hidden), ("expert_down", hidden, inner)):
            self.add(name, n, k, sparse * experts, inner, "expert")
        return experts, active
