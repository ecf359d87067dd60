"""Which models are known, what each of their tensors is called in a file, and the strict match of a file against that.

Every tensor of a file is used exactly once or is on a named list of what is ignored; every tensor a model needs is there with exactly
the shape its configuration implies. Canonical names, the only ones used past this module:

    embed  head  final_norm  layers.{i}.{attn_norm q k v o q_bias k_bias v_bias q_norm k_norm ffn_norm gate up down}
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.config import ModelConfig
from headrace.errors import ModelError, UnsupportedModel
from headrace.models import gguf_config, hf_config
from headrace.models.gguf import GGUFFile
from headrace.models.safetensors import SafetensorsFolder
from headrace.models.source import Source, TensorInfo

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")
MATRIX_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
VECTOR_TYPES = ("F32", "F16", "BF16")

GGUF_NAMES = {
    "embed": "token_embd.weight", "head": "output.weight", "final_norm": "output_norm.weight",
    "attn_norm": "blk.{}.attn_norm.weight", "q": "blk.{}.attn_q.weight", "k": "blk.{}.attn_k.weight", "v": "blk.{}.attn_v.weight",
    "o": "blk.{}.attn_output.weight", "q_bias": "blk.{}.attn_q.bias", "k_bias": "blk.{}.attn_k.bias", "v_bias": "blk.{}.attn_v.bias",
    "q_norm": "blk.{}.attn_q_norm.weight", "k_norm": "blk.{}.attn_k_norm.weight", "ffn_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight", "up": "blk.{}.ffn_up.weight", "down": "blk.{}.ffn_down.weight",
}  # fmt: skip
HF_NAMES = {
    "embed": "model.embed_tokens.weight", "head": "lm_head.weight", "final_norm": "model.norm.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight", "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight", "v": "model.layers.{}.self_attn.v_proj.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight", "q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{}.self_attn.k_proj.bias", "v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight", "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "ffn_norm": "model.layers.{}.post_attention_layernorm.weight", "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight", "down": "model.layers.{}.mlp.down_proj.weight",
}  # fmt: skip

# Tables of frequencies that old converters stored; the rotary embedding is computed from the configuration. `rope_freqs.weight` is not
# among the weights either: gguf_config reads it into RopeConfig.freq_factors.
IGNORED = {
    "gguf": re.compile(r"blk\.\d+\.attn_rot_embd\.weight|rope_freqs\.weight"),
    "safetensors": re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
}


@dataclass(frozen=True, slots=True)
class Use:
    """Where a canonical weight comes from."""

    tensor: TensorInfo
    interleaved: bool = False  # the rows of each head are rotary pairs (2d, 2d + 1), to be reordered to (d, d + rotary/2)


@dataclass(frozen=True, slots=True)
class Network:
    """A file understood: its configuration, and every weight by canonical name."""

    config: ModelConfig
    uses: dict[str, Use]  # without `head` when it is tied to `embed`
    end_token_ids: tuple[int, ...]
    untied_copy: TensorInfo | None = None  # a head stored although the configuration ties it: must equal the embedding


def open_source(path: str | Path) -> GGUFFile | SafetensorsFolder:
    """Open a GGUF file or a model folder, headers checked. Raises ModelError."""
    path = Path(path)
    if path.is_dir():
        return SafetensorsFolder(path)
    if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"):
        raise UnsupportedModel(path, "", "pickled weights are never opened: convert them to safetensors or GGUF")
    if path.suffix == ".safetensors":
        raise UnsupportedModel(path, "", "expected the folder with config.json that the file belongs to")
    return GGUFFile(path)


def shapes(config: ModelConfig) -> Iterator[tuple[str, str, int, tuple[int, ...]]]:
    """(canonical name, key of the name tables, layer, shape) of every weight a model has, the head included even when it is tied."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), "q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q),
        "ffn_norm": (hidden,), "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner),
    }  # fmt: skip
    if config.qkv_bias:
        layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if config.qk_norm:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    yield "embed", "embed", 0, (config.vocab_size, hidden)
    for i in range(config.num_layers):
        for name, shape in layer.items():
            yield f"layers.{i}.{name}", name, i, shape
    yield "final_norm", "final_norm", 0, (hidden,)
    yield "head", "head", 0, (config.vocab_size, hidden)


def describe(source: GGUFFile | SafetensorsFolder) -> Network:
    """The network in an opened file. Raises ModelError, or UnsupportedModel for what is well-formed but not known."""
    if isinstance(source, GGUFFile):
        config = gguf_config.read(source)
        names = GGUF_NAMES
        # Converters write `llama` with each head's rows interleaved; the other architectures keep the halves.
        interleaved = source.text("general.architecture") == "llama"
        end_token_ids = gguf_config.end_token_ids(source, config.vocab_size)
    else:
        config = hf_config.read(source)
        names = HF_NAMES
        interleaved = False
        end_token_ids = hf_config.end_token_ids(source, config.vocab_size)
    uses: dict[str, Use] = {}
    used: set[str] = set()
    untied_copy = None
    for canonical, key, layer, shape in shapes(config):
        name = names[key].format(layer)
        tensor = source.tensors.get(name)
        if key == "head" and config.tie_embeddings and tensor is None:
            continue
        if tensor is None:
            raise ModelError(source.path, name, f"missing; expected a tensor of shape {shape}")
        _check(source, tensor, shape)
        used.add(name)
        if key == "head" and config.tie_embeddings:
            untied_copy = tensor
        else:
            uses[canonical] = Use(tensor, interleaved and key in ("q", "k", "q_bias", "k_bias"))
    for name in source.tensors:
        if name not in used and not IGNORED[source.kind].fullmatch(name):
            raise ModelError(
                source.path, name, f"unexpected tensor: the {config.architecture} architecture as configured has none of this name"
            )
    return Network(config, uses, end_token_ids, untied_copy)


def _check(source: Source, tensor: TensorInfo, shape: tuple[int, ...]) -> None:
    path = source.file_of(tensor).path
    if tensor.shape != shape:
        raise ModelError(path, tensor.name, f"expected shape {shape}, got {tensor.shape}")
    known = MATRIX_TYPES if len(shape) == 2 else VECTOR_TYPES
    if tensor.type not in known:
        raise UnsupportedModel(path, tensor.name, f"tensor type {tensor.type} is not supported here; known are {', '.join(known)}")
