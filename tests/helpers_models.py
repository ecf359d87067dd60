"""Model files made by hand: a GGUF and a safetensors writer that write what they are told, lies included, and tiny random models.

Nothing here uses the package's readers or packers, so that a bug is not shared between a file and its test.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
STRUCTS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
TYPES = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q8_0": (8, 32, 34), "BF16": (30, 1, 2)}


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, kind: int, value: Any, item: int | None = None) -> bytes:
    """One metadata entry; `item` is the item type of an array."""
    return text(key) + struct.pack("<I", kind) + encode(kind, value, item)


def encode(kind: int, value: Any, item: int | None = None) -> bytes:
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        assert item is not None
        return struct.pack("<IQ", item, len(value)) + b"".join(encode(item, v) for v in value)
    return struct.pack("<" + STRUCTS[kind], value)


@dataclass
class Tensor:
    """A tensor to be written. `shape` has the outermost dimension first. None: what is right."""

    name: str | bytes
    shape: tuple[int, ...]
    type: str = "F32"
    data: bytes = b""
    number: int | None = None
    offset: int | None = None
    dimensions: int | None = None


def gguf_bytes(
    entries: Sequence[bytes] = (),
    tensors: Sequence[Tensor] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    alignment: int = 32,
    order: str = "<",
) -> bytes:
    """A GGUF file. Every count can be a lie."""
    head = magic + struct.pack(order + "I", version)
    head += struct.pack(order + "QQ", len(tensors) if num_tensors is None else num_tensors, len(entries) if num_keys is None else num_keys)
    head += b"".join(entries)
    data = b""
    for tensor in tensors:
        shape = tensor.shape[::-1]
        number = TYPES[tensor.type][0] if tensor.number is None else tensor.number
        head += text(tensor.name) + struct.pack("<I", len(shape) if tensor.dimensions is None else tensor.dimensions)
        head += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", number, len(data) if tensor.offset is None else tensor.offset)
        data += tensor.data + bytes(-len(tensor.data) % alignment)
    return head + (bytes(-len(head) % alignment) + data if tensors else b"")


def safetensors_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file of name -> (dtype, shape, data)."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (kind, shape, value) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [len(data), len(data) + len(value)]}
        data += value
    return raw_safetensors(json.dumps(header).encode(), data)


def raw_safetensors(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> bytes:
    """Random values in the type's own encoding: every code used, scales around 0.01, of both signs."""
    count = int(np.prod(shape))
    if kind == "F32":
        return (1.0 + rng.normal(0, 0.3, count) if len(shape) == 1 else rng.normal(0, 0.1, count)).astype("<f4").tobytes()
    if kind == "F16":
        return rng.normal(0, 0.1, count).astype("<f2").tobytes()
    if kind == "BF16":
        return (rng.normal(0, 0.1, count).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    _, block, size = TYPES[kind]
    blocks = rng.integers(0, 256, (count // block, size), dtype=np.uint8)
    blocks[:, :2] = (
        (rng.uniform(0.005, 0.02, count // block) * rng.choice([-1, 1], count // block)).astype("<f2").view(np.uint8).reshape(-1, 2)
    )
    if kind == "Q4_1":
        blocks[:, 2:4] = rng.uniform(-0.1, 0.1, count // block).astype("<f2").view(np.uint8).reshape(-1, 2)
    return blocks.tobytes()


def values_of(kind: str, shape: tuple[int, ...], data: bytes) -> NDArray[np.float32]:
    """What a tensor's bytes mean, as float32: exact for every type but Q4_1, where scale * code + minimum rounds once."""
    raw = np.frombuffer(data, np.uint8)
    if kind == "F32":
        return raw.view("<f4").reshape(shape)
    if kind == "F16":
        return raw.view("<f2").astype(np.float32).reshape(shape)
    if kind == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    blocks = raw.reshape(-1, TYPES[kind][2])
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    if kind == "Q8_0":
        return (blocks[:, 2:].view(np.int8) * scale).reshape(shape)
    body = blocks[:, 4:] if kind == "Q4_1" else blocks[:, 2:]
    codes = np.concatenate([body & 15, body >> 4], axis=1).astype(np.float32)
    if kind == "Q4_1":
        return (codes * scale + blocks[:, 2:4].copy().view("<f2").astype(np.float32)).reshape(shape)
    return ((codes - 8) * scale).reshape(shape)


def unpacked(form: str, packed: NDArray[np.uint8], n: int, k: int) -> NDArray[np.float32]:
    """The values [n, k] of a packed weight, read by the layout that native/kernels.h writes down."""
    panels, groups = -(-n // 32), -(-k // 32)
    if form == "bf16":
        bits = packed.view("<u2").reshape(panels, groups, 16, 32, 2)  # [k / 2][column][k % 2]
        values = (bits.astype(np.uint32) << 16).view(np.float32).transpose(0, 3, 1, 2, 4)
        return values.reshape(panels * 32, groups * 32)[:n, :k]
    records = packed.reshape(panels, groups, {"q4_0": 576, "q4_1": 640, "q8_0": 1088}[form])
    scale = records[:, :, :64].copy().view("<f2").astype(np.float32)  # [panel, group, column]
    body = records[:, :, 128 if form == "q4_1" else 64 :]
    if form == "q8_0":
        codes = body.reshape(panels, groups, 8, 32, 4).transpose(0, 3, 1, 2, 4).astype(np.float32) - 128
    else:
        nibbles = body.reshape(panels, groups, 4, 32, 4)
        codes = np.stack([nibbles & 15, nibbles >> 4], axis=3)  # [panel, group, j, half, column, i]: k = 8 j + 4 half + i
        codes = codes.transpose(0, 4, 1, 2, 3, 5).astype(np.float32)
    codes = codes.reshape(panels, 32, groups, 32)
    scale = scale.transpose(0, 2, 1)[..., None]
    if form == "q4_1":
        values = codes * scale + records[:, :, 64:128].copy().view("<f2").astype(np.float32).transpose(0, 2, 1)[..., None]
    else:
        values = (codes - 8 if form == "q4_0" else codes) * scale
    return values.reshape(panels * 32, groups * 32)[:n, :k]


@dataclass
class Tiny:
    """A tiny model of an architecture: `tensors` by canonical name as (type, shape, bytes), every one away from its default."""

    architecture: str = "llama"
    layers: int = 2
    hidden: int = 64
    inner: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 100
    context: int = 64
    tied: bool = False
    types: tuple[str, ...] = ("F32",)  # of the matrices, in turn
    seed: int = 0
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {"attn_norm": (self.hidden,), "q": (q, self.hidden), "k": (kv, self.hidden)}
        layer |= {"v": (kv, self.hidden), "o": (self.hidden, q), "ffn_norm": (self.hidden,), "gate": (self.inner, self.hidden)}
        layer |= {"up": (self.inner, self.hidden), "down": (self.hidden, self.inner)}
        if self.architecture == "qwen2":
            layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
        if self.architecture == "qwen3":
            layer |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab, self.hidden)}
        shapes |= {f"layers.{i}.{name}": shape for i in range(self.layers) for name, shape in layer.items()}
        shapes["final_norm"] = (self.hidden,)
        if not self.tied:
            shapes["head"] = (self.vocab, self.hidden)
        for i, (name, shape) in enumerate(shapes.items()):
            kind = self.types[i % len(self.types)] if len(shape) == 2 else "F32"
            self.tensors[name] = (kind, shape, random_tensor(rng, shape, kind))

    def values(self, name: str) -> NDArray[np.float32]:
        return values_of(*self.tensors[name])

    def with_tensor(self, name: str, kind: str, shape: tuple[int, ...], data: bytes) -> Tiny:
        other = replace(self, tensors={})
        other.tensors = {**self.tensors, name: (kind, shape, data)}
        return other


GGUF = {
    "embed": "token_embd.weight", "head": "output.weight", "final_norm": "output_norm.weight", "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight", "k": "attn_k.weight", "v": "attn_v.weight", "o": "attn_output.weight", "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias", "v_bias": "attn_v.bias", "q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight",
    "ffn_norm": "ffn_norm.weight", "gate": "ffn_gate.weight", "up": "ffn_up.weight", "down": "ffn_down.weight",
}  # fmt: skip
HF = {
    "embed": "model.embed_tokens.weight", "head": "lm_head.weight", "final_norm": "model.norm.weight",
    "attn_norm": "input_layernorm.weight", "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight", "o": "self_attn.o_proj.weight", "q_bias": "self_attn.q_proj.bias", "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias", "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight",
    "ffn_norm": "post_attention_layernorm.weight", "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}  # fmt: skip


def file_name(canonical: str, names: Mapping[str, str], prefix: str) -> str:
    if not canonical.startswith("layers."):
        return names[canonical]
    _, layer, name = canonical.split(".")
    return f"{prefix}{layer}.{names[name]}"


def interleave(rows: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """How converters store q and k of GGUF's `llama`: row d and d + head_dim/2 of a head become 2d and 2d + 1."""
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_entries(tiny: Tiny, extra: Mapping[str, tuple[int, Any]] | None = None, without: Sequence[str] = ()) -> list[bytes]:
    """The metadata of a tiny model; `extra` replaces or adds (key without the architecture's prefix if it begins with a dot)."""
    arch = "llama" if tiny.architecture == "mistral" else tiny.architecture
    tokens = [f"token {i}" for i in range(tiny.vocab)]
    keys: dict[str, tuple[Any, ...]] = {
        "general.architecture": (STRING, arch), "general.name": (STRING, "tiny"), ".block_count": (U32, tiny.layers),
        ".context_length": (U32, tiny.context), ".embedding_length": (U32, tiny.hidden), ".feed_forward_length": (U32, tiny.inner),
        ".attention.head_count": (U32, tiny.heads), ".attention.head_count_kv": (U32, tiny.kv_heads),
        ".attention.layer_norm_rms_epsilon": (F32, 1e-5), ".rope.freq_base": (F32, 50000.0), ".attention.key_length": (U32, tiny.head_dim),
        ".attention.value_length": (U32, tiny.head_dim), "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.tokens": (ARRAY, tokens, STRING), "tokenizer.ggml.token_type": (ARRAY, [1] * tiny.vocab, I32),
        "tokenizer.ggml.eos_token_id": (U32, 7),
    }  # fmt: skip
    keys |= extra or {}
    return [entry(arch + key if key.startswith(".") else key, *value) for key, value in keys.items() if key not in without]


def gguf_tensors(tiny: Tiny) -> list[Tensor]:
    interleaved = tiny.architecture in ("llama", "mistral")
    found = []
    for name, (kind, shape, data) in tiny.tensors.items():
        if interleaved and name.rpartition(".")[2] in ("q", "k", "q_bias", "k_bias"):
            data = interleave(np.frombuffer(data, np.uint8).reshape(shape[0], -1), tiny.head_dim).tobytes()
        found.append(Tensor(file_name(name, GGUF, "blk."), shape, kind, data))
    return found


def write_gguf(path: Path, tiny: Tiny, extra: Mapping[str, tuple[int, Any]] | None = None, without: Sequence[str] = ()) -> Path:
    path.write_bytes(gguf_bytes(gguf_entries(tiny, extra, without), gguf_tensors(tiny)))
    return path


def changed_gguf(tiny: Tiny, **tensors: tuple[str, tuple[int, ...], bytes] | None) -> bytes:
    """A GGUF file with tensors replaced, added, or (None) taken out, by their names in the file, dots as double underscores."""
    found = {str(tensor.name): tensor for tensor in gguf_tensors(tiny)}
    for name, value in tensors.items():
        name = name.replace("__", ".")
        found.pop(name, None)
        if value is not None:
            kind, shape, data = value
            found[name] = Tensor(name, shape, kind, data)
    return gguf_bytes(gguf_entries(tiny), list(found.values()))


def hf_config(tiny: Tiny) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["TinyForCausalLM"], "model_type": tiny.architecture, "num_hidden_layers": tiny.layers, "hidden_size": tiny.hidden,
        "intermediate_size": tiny.inner, "num_attention_heads": tiny.heads, "num_key_value_heads": tiny.kv_heads, "head_dim": tiny.head_dim,
        "vocab_size": tiny.vocab, "max_position_embeddings": tiny.context, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
        "tie_word_embeddings": tiny.tied, "hidden_act": "silu", "eos_token_id": 7, "torch_dtype": "float32",
    }  # fmt: skip
    if tiny.architecture == "mistral":
        config["sliding_window"] = 24
    return config


def write_folder(path: Path, tiny: Tiny, config: Mapping[str, Any] | None = None, shards: int = 1) -> Path:
    """A Hugging Face folder; keys of `config` replace those of the tiny model, `...` takes a key out."""
    path.mkdir(parents=True, exist_ok=True)
    told = {key: value for key, value in {**hf_config(tiny), **(config or {})}.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(told))
    tensors = {file_name(name, HF, "model.layers."): value for name, value in tiny.tensors.items()}
    if shards == 1:
        (path / "model.safetensors").write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
        return path
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        shard = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        weight_map |= dict.fromkeys(names[i::shards], shard)
        (path / shard).write_bytes(safetensors_bytes({name: tensors[name] for name in names[i::shards]}))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


def cuts(size: int, count: int = 64) -> list[int]:
    """Where to cut a file short: `count` lengths over all of it, and one byte before its end."""
    return sorted({size * i // count for i in range(count)} | {size - 1})


def mutated(rng: np.random.Generator, data: bytes, reach: int) -> bytes:
    """`data` with a few of its first `reach` bytes changed: bits flipped, bytes and words set to extremes, pieces removed or doubled."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(0, min(reach, len(changed))))
        match int(rng.integers(0, 6)):
            case 0:
                changed[at] ^= 1 << int(rng.integers(0, 8))
            case 1:
                changed[at] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF]))
            case 2:
                changed[at : at + 8] = struct.pack("<Q", int(rng.choice([0, 1, 2**31, 2**32 - 1, 2**60, 2**63 - 1])))
            case 3:
                changed[at : at + 4] = b"\xff\xff\xff\xff"
            case 4:
                del changed[at : at + int(rng.integers(1, 16))]
            case 5:
                changed[at:at] = changed[at : at + int(rng.integers(1, 16))]
        if not changed:
            break
    return bytes(changed)
