"""Strictness: which files and settings are understood as what, and that everything else is refused by file and field."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_models import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U32,
    Tiny,
    changed_gguf,
    gguf_bytes,
    gguf_entries,
    gguf_tensors,
    write_folder,
    write_gguf,
)

from headrace.config import RopeConfig
from headrace.errors import ModelError, UnsupportedModel
from headrace.models.families import describe, open_source
from headrace.models.loader import load_model, prepare

QUANTIZED = ("Q4_0", "Q4_1", "Q8_0")


def bad_scale(tiny: Tiny, name: str, value: float, at: int) -> bytes:
    tensors = gguf_tensors(tiny)
    for tensor in tensors:
        if tensor.name == name:
            raw = bytearray(tensor.data)
            size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[tensor.type]
            raw[at * size : at * size + 2] = np.float16(value).tobytes()
            tensor.data = bytes(raw)
    return gguf_bytes(gguf_entries(tiny), tensors)


NONE = np.zeros(64, "<f4")
NAN_AT_3 = NONE.copy()
NAN_AT_3[3] = np.nan
NAN_MATRIX = np.full((96, 64), np.nan, "<f4").tobytes()
Q = Tiny(types=QUANTIZED)
BAD_FILES: dict[str, tuple[bytes, type[ModelError], str]] = {
    "missing": (changed_gguf(Tiny(), blk__1__ffn_norm__weight=None), ModelError, "blk.1.ffn_norm.weight: missing; expected a tensor"),
    "missing embedding": (changed_gguf(Tiny(), token_embd__weight=None), ModelError, "token_embd.weight: missing"),
    "extra": (changed_gguf(Tiny(), blk__0__ffn_exps__weight=("F32", (4,), bytes(16))), ModelError, "ffn_exps.weight: unexpected tensor"),
    "extra layer": (changed_gguf(Tiny(), blk__2__ffn_norm__weight=("F32", (64,), bytes(256))), ModelError, "blk.2.ffn_norm"),
    "output bias": (changed_gguf(Tiny(), blk__0__attn_output__bias=("F32", (64,), bytes(256))), ModelError, "attn_output.bias: unexpected"),
    "bias in one layer": (changed_gguf(Tiny(), blk__0__attn_q__bias=("F32", (64,), bytes(256))), ModelError, "attn_k.bias: missing"),
    "transposed": (changed_gguf(Tiny(), blk__0__ffn_up__weight=("F32", (64, 96), bytes(24576))), ModelError, "(96, 64), got (64, 96)"),
    "norm as a matrix": (changed_gguf(Tiny(), output_norm__weight=("F32", (1, 64), bytes(256))), ModelError, "shape (64,), got (1, 64)"),
    "quantized norm": (changed_gguf(Tiny(), output_norm__weight=("Q8_0", (64,), bytes(68))), UnsupportedModel, "Q8_0 is not supported"),
    "NaN in a norm": (changed_gguf(Tiny(), output_norm__weight=("F32", (64,), NAN_AT_3.tobytes())), ModelError, "value 3 is not finite"),
    "NaN scale": (bad_scale(Q, "blk.0.attn_k.weight", np.nan, 5), ModelError, "blk.0.attn_k.weight: rows 0 to 32"),
    "infinite scale": (bad_scale(Q, "blk.1.ffn_down.weight", np.inf, 7), ModelError, "blk.1.ffn_down.weight: rows"),
    "NaN weight": (changed_gguf(Tiny(), blk__0__ffn_up__weight=("F32", (96, 64), NAN_MATRIX)), ModelError, "ffn_up"),
    "vocabulary only": (gguf_bytes(gguf_entries(Tiny())), UnsupportedModel, "vocabulary only"),
    "longer vocabulary": (gguf_bytes(gguf_entries(Tiny(vocab=101)), gguf_tensors(Tiny())), ModelError, "101 tokens, but"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(tmp_path: Path, name: str) -> None:
    data, kind, words = BAD_FILES[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(kind) as caught:
        load_model(path)
    assert words in str(caught.value)
    assert str(caught.value).startswith(str(path))
    caught = None  # type: ignore[assignment]  # its traceback holds the arena
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors, "nothing is left open"
    assert "headrace-weights" not in Path("/proc/self/maps").read_text(), "nothing is left mapped"


SETTINGS: dict[str, tuple[dict[str, Any], type[ModelError], str]] = {
    "architecture": ({"general.architecture": (STRING, "gpt2")}, UnsupportedModel, "unknown architecture 'gpt2'; known are llama, qwen2"),
    "architecture as a number": ({"general.architecture": (U32, 1)}, ModelError, "general.architecture: expected a string"),
    "rope type": ({".rope.scaling.type": (STRING, "longrope")}, UnsupportedModel, "unknown rope type 'longrope'; known are none"),
    "experts": ({".expert_count": (U32, 8)}, UnsupportedModel, "llama.expert_count: 8 is not supported; expected 0"),
    "not causal": ({".attention.causal": (BOOL, False)}, UnsupportedModel, "llama.attention.causal"),
    "not causal, as text": ({".attention.causal": (STRING, "no")}, UnsupportedModel, "llama.attention.causal"),
    "unknown setting": ({".logit_scale": (F32, 2.0)}, UnsupportedModel, "llama.logit_scale: this setting is not known"),
    "layers 0": ({".block_count": (U32, 0)}, ModelError, "llama.block_count: expected 1 to"),
    "layers 2^32-1": ({".block_count": (U32, 2**32 - 1)}, ModelError, "llama.block_count: expected 1 to"),
    "heads 0": ({".attention.head_count": (U32, 0)}, ModelError, "llama.attention.head_count: expected 1 to"),
    "key heads 0": ({".attention.head_count_kv": (U32, 0)}, ModelError, "llama.attention.head_count_kv: expected 1 to"),
    "key heads": ({".attention.head_count_kv": (U32, 3)}, ModelError, "4 query heads are not a multiple of 3"),
    "heads by layer": ({".attention.head_count_kv": (ARRAY, [2, 1], I32)}, UnsupportedModel, "different sizes from layer to layer"),
    "negative": ({".embedding_length": (I32, -64)}, ModelError, "llama.embedding_length: expected 1 to"),
    "head_dim": ({".attention.key_length": (U32, 24), ".attention.value_length": (U32, 24)}, UnsupportedModel, "a multiple of 16"),
    "value length": ({".attention.value_length": (U32, 32)}, UnsupportedModel, "differs from the key length"),
    "rotary": ({".rope.dimension_count": (U32, 18)}, ModelError, "expected an even number up to head_dim 16, got 18"),
    "theta": ({".rope.freq_base": (F32, 0.0)}, ModelError, "rope theta"),
    "theta NaN": ({".rope.freq_base": (F32, float("nan"))}, ModelError, "llama.rope.freq_base: expected a finite number"),
    "eps": ({".attention.layer_norm_rms_epsilon": (F32, -1.0)}, ModelError, "epsilon"),
    "split": ({"split.count": (U32, 2)}, UnsupportedModel, "split.count"),
    "old quantization": ({"general.quantization_version": (U32, 1)}, UnsupportedModel, "general.quantization_version"),
    "end token": ({"tokenizer.ggml.eos_token_id": (U32, 100)}, ModelError, "tokenizer.ggml.eos_token_id: expected 0 to 99"),
    "vocabulary size": ({".vocab_size": (U32, 99)}, ModelError, "99, but token_embd.weight has 100 rows"),
    "linear factor": ({".rope.scaling.type": (STRING, "linear"), ".rope.scaling.factor": (F32, 0.0)}, ModelError, "scaling factor"),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_bad_settings(tmp_path: Path, name: str) -> None:
    extra, kind, words = SETTINGS[name]
    path = write_gguf(tmp_path / "m.gguf", Tiny(), extra)
    with pytest.raises(kind) as caught:
        prepare(path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "key", [".block_count", ".context_length", ".embedding_length", ".feed_forward_length", ".attention.head_count",
            ".attention.layer_norm_rms_epsilon", "general.architecture"],
)  # fmt: skip
def test_missing_settings(tmp_path: Path, key: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", Tiny(), without=[key])
    with pytest.raises(ModelError, match=f"{key}: missing"):
        prepare(path)


def test_gguf_configuration(tmp_path: Path) -> None:
    tiny = Tiny("llama", head_dim=32)
    path = write_gguf(
        tmp_path / "m.gguf", tiny, {".attention.sliding_window": (U32, 24), ".vocab_size": (U32, 100), ".expert_count": (U32, 0)}
    )
    with open_source(path) as source:
        network = describe(source)
    config = network.config
    assert (config.architecture, config.num_layers, config.hidden_size, config.intermediate_size) == ("llama", 2, 64, 96)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size, config.context_length) == (4, 2, 32, 100, 64)
    assert (config.tie_embeddings, config.qkv_bias, config.qk_norm, config.sliding_window) == (False, False, False, 24)
    assert config.norm_eps == pytest.approx(1e-5)
    assert config.rope == RopeConfig(theta=50000.0, rotary_dim=32)
    assert network.end_token_ids == (7,)


def test_gguf_rope_settings(tmp_path: Path) -> None:
    scaling = {".rope.scaling.type": (STRING, "linear"), ".rope.scaling.factor": (F32, 4.0)}
    assert prepare(write_gguf(tmp_path / "a", Tiny(), scaling)).config.rope == RopeConfig(50000.0, 16, "linear", 4.0)
    assert prepare(write_gguf(tmp_path / "b", Tiny(), {".rope.scale_linear": (F32, 2.0)})).config.rope == RopeConfig(
        50000.0, 16, "linear", 2.0
    )
    scaling = {
        ".rope.scaling.type": (STRING, "yarn"),
        ".rope.scaling.factor": (F32, 4.0),
        ".rope.scaling.original_context_length": (U32, 16),
    }
    yarn = RopeConfig(50000.0, 16, "yarn", 4.0, original_context=16)
    assert prepare(write_gguf(tmp_path / "c", Tiny(), scaling)).config.rope == yarn
    scaling[".rope.scaling.attn_factor"] = (F32, 2.0)
    assert prepare(write_gguf(tmp_path / "d", Tiny(), scaling)).config.rope.attention_factor == pytest.approx(2 * (1 + 0.1 * np.log(4)))
    factors = np.linspace(1, 8, 8).astype("<f4")
    path = tmp_path / "e"
    path.write_bytes(changed_gguf(Tiny(), rope_freqs__weight=("F32", (8,), factors.tobytes())))
    assert prepare(path).config.rope.freq_factors == tuple(factors.tolist())
    for bad, words in ((np.zeros(8, "<f4"), "expected positive finite"), (np.ones(7, "<f4"), r"expected F32 of shape \(8,\)")):
        path.write_bytes(changed_gguf(Tiny(), rope_freqs__weight=("F32", (len(bad),), bad.tobytes())))
        with pytest.raises(ModelError, match="rope_freqs.weight: " + words):
            prepare(path)


def test_gguf_end_tokens(tmp_path: Path) -> None:
    """Those the file names, and control tokens that chat formats end a turn with; the same text as an ordinary token is not one."""
    tokens = [f"token {i}" for i in range(100)]
    tokens[3], tokens[9], tokens[11] = "<|im_end|>", "<|eot_id|>", "<|endoftext|>"
    types = [1] * 100
    types[3] = types[11] = 3
    extra = {"tokenizer.ggml.tokens": (ARRAY, tokens, STRING), "tokenizer.ggml.token_type": (ARRAY, types, I32)}
    with prepare(write_gguf(tmp_path / "m.gguf", Tiny(), extra)) as prepared:
        assert prepared.network.end_token_ids == (3, 7, 11)


def settings_of(folder: Path, tiny: Tiny, **config: Any) -> Any:
    with open_source(write_folder(folder, tiny, config)) as source:
        return describe(source)


LAYER_TYPES = ["sliding_attention", "full_attention"]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def test_folder_settings(tmp_path: Path) -> None:
    rope = settings_of(tmp_path, Tiny(), rope_scaling=LLAMA3).config.rope
    llama3 = RopeConfig(50000.0, 16, "llama3", 8.0, 1.0, 4.0, 16)
    assert rope == llama3
    newer = {"rope_theta": 70000.0, **LLAMA3}
    assert settings_of(tmp_path, Tiny(), rope_parameters=newer, rope_theta=...).config.rope.theta == 70000.0
    assert settings_of(tmp_path, Tiny(), rope_scaling={"type": "linear", "factor": 2.0}).config.rope == RopeConfig(
        50000.0, 16, "linear", 2.0
    )
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0}
    assert settings_of(tmp_path, Tiny(), rope_scaling=yarn).config.rope == RopeConfig(
        50000.0, 16, "yarn", 4.0, original_context=16, beta_fast=16.0
    )
    assert settings_of(tmp_path, Tiny(), rope_theta=...).config.rope.theta == 10000.0
    assert settings_of(tmp_path, Tiny(), partial_rotary_factor=0.5).config.rope.rotary_dim == 8
    assert settings_of(tmp_path, Tiny(), head_dim=...).config.head_dim == 16
    assert settings_of(tmp_path, Tiny(kv_heads=4), num_key_value_heads=...).config.num_kv_heads == 4
    assert settings_of(tmp_path, Tiny("mistral")).config.sliding_window == 24
    assert settings_of(tmp_path, Tiny("mistral"), sliding_window=None).config.sliding_window == 0
    assert settings_of(tmp_path, Tiny("mistral", context=8192), sliding_window=...).config.sliding_window == 4096
    qwen = {"sliding_window": 16, "max_window_layers": 0}
    assert settings_of(tmp_path, Tiny("qwen2"), **qwen, use_sliding_window=False).config.sliding_window == 0
    assert settings_of(tmp_path, Tiny("qwen2"), **qwen, use_sliding_window=True).config.sliding_window == 16
    assert settings_of(tmp_path, Tiny("qwen3", head_dim=128), head_dim=...).config.head_dim == 128
    assert settings_of(tmp_path, Tiny("qwen2")).config.qkv_bias
    assert settings_of(tmp_path, Tiny("qwen3")).config.qk_norm
    assert settings_of(tmp_path, Tiny(), eos_token_id=[9, 4, 9]).end_token_ids == (4, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert settings_of(tmp_path, Tiny()).end_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("architecture", "config", "kind", "words"),
    [
        ("llama", {"model_type": "falcon"}, UnsupportedModel, "unknown architecture 'falcon'; known are llama, mistral, qwen2, qwen3"),
        ("llama", {"model_type": ...}, ModelError, "model_type: missing"),
        ("llama", {"attention_bias": True}, UnsupportedModel, "attention_bias: expected false, got True"),
        ("qwen3", {"attention_bias": True}, UnsupportedModel, "attention_bias"),
        ("llama", {"mlp_bias": True}, UnsupportedModel, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, UnsupportedModel, "hidden_act: expected silu, got gelu"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, UnsupportedModel, "quantization_config: expected no such setting"),
        ("llama", {"num_local_experts": 8}, UnsupportedModel, "num_local_experts"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedModel, "unknown rope type 'dynamic'; known are"),
        ("llama", {"rope_scaling": {**LLAMA3, "mscale": 1.0}}, UnsupportedModel, "rope_scaling.mscale: not known for rope type llama3"),
        ("llama", {"rope_scaling": {**LLAMA3, "low_freq_factor": 5.0}}, ModelError, "low_freq_factor 5.0 < high_freq_factor 4.0"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, ModelError, "rope_scaling.factor: missing"),
        ("llama", {"rope_scaling": "linear"}, ModelError, "rope_scaling: expected an object"),
        ("llama", {"rope_theta": 1e999}, ModelError, "Infinity is not JSON"),
        ("llama", {"rope_theta": 10**400}, ModelError, "rope_theta: expected a finite number"),
        ("llama", {"num_attention_heads": 0}, ModelError, "num_attention_heads: expected an integer from 1"),
        ("llama", {"num_hidden_layers": True}, ModelError, "num_hidden_layers: expected an integer"),
        ("llama", {"num_hidden_layers": 2.0}, ModelError, "num_hidden_layers: expected an integer"),
        ("llama", {"num_hidden_layers": 10**9}, ModelError, "num_hidden_layers: expected an integer from 1 to 1024"),
        ("llama", {"hidden_size": "64"}, ModelError, "hidden_size: expected an integer"),
        ("llama", {"vocab_size": 101}, ModelError, "expected shape (101, 64), got (100, 64)"),
        ("llama", {"tie_word_embeddings": "yes"}, ModelError, "tie_word_embeddings: expected true or false"),
        ("llama", {"eos_token_id": 100}, ModelError, "eos_token_id: expected ids below 100"),
        ("llama", {"eos_token_id": ["</s>"]}, ModelError, "eos_token_id: expected ids"),
        ("mistral", {"num_key_value_heads": ...}, ModelError, "num_key_value_heads: missing"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, UnsupportedModel, "some of the layers only"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "layer_types": LAYER_TYPES}, UnsupportedModel, "some"),
    ],
)  # fmt: skip
def test_bad_folder_settings(tmp_path: Path, architecture: str, config: dict[str, Any], kind: type[ModelError], words: str) -> None:
    with pytest.raises(kind) as caught:
        settings_of(tmp_path, Tiny(architecture), **config)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)
