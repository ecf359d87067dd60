"""Sizes against what authors publish, against hand arithmetic, and against tensors counted one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelError, UnsupportedModel, UsageError
from headrace.models.gguf import GGUFFile
from headrace.models.hub import default_model_path
from headrace.models.loader import prepare
from headrace.plan.architectures import shape_of
from headrace.plan.devices import find_device, load_devices
from headrace.plan.memory import LEVELS, level_named, levels_for, split_memory, weight_bytes
from headrace.plan.models import catalogue, known, load_shape
from headrace.plan.shape import Shape

GIB = 1 << 30


def shape(name: str) -> Shape:
    found = known(name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", catalogue())
def test_parameters_are_what_the_authors_publish(name: str) -> None:
    assert shape(name).parameters / 1e9 == pytest.approx(catalogue()[name]["parameters"], rel=0.01)
    assert catalogue()[name]["source"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Llama-3.1-8B", 2 * 32 * 8 * 128 * 2),
        ("meta-llama/Llama-3.1-70B-Instruct", 327_680),
        ("deepseek-ai/DeepSeek-V3", 61 * (512 + 64) * 2),
        ("Llama-2-7b", 2 * 32 * 32 * 128 * 2),  # MHA
        ("falcon-7b", 2 * 32 * 64 * 2),  # MQA: one head of 4544 / 71
        ("Qwen3-0.6B", 2 * 28 * 8 * 128 * 2),  # explicit head_dim: not 1024 / 16
    ],
)
def test_kv_bytes_per_token(name: str, expected: int) -> None:
    assert shape(name).kv_bytes_per_token() == expected


@pytest.mark.parametrize(
    ("name", "context", "gib"),
    [
        ("gemma-3-27b", 131_072, 10.41),  # 10 of 62 layers full, the rest keeps 1024 tokens
        ("DeepSeek-V3.1", 163_840, 10.72),
        ("Kimi-K2.5", 262_144, 17.16),
        ("Qwen3-0.6B", 40_960, 4.38),
    ],
)
def test_kv_of_a_whole_context(name: str, context: int, gib: float) -> None:
    assert shape(name).kv_bytes(context) / GIB == pytest.approx(gib, abs=0.006)


def test_hybrid_layers_keep_a_state_of_fixed_size() -> None:
    hybrid = shape("Qwen3.5-27B")
    assert hybrid.kv_bytes_per_token() * 262_144 / GIB == 16.0  # 16 of 64 layers
    state = hybrid.kv_bytes(0)
    assert state == 48 * (4 * 48 * 128 * 128 + 2 * 3 * (2 * 16 * 128 + 48 * 128))
    assert hybrid.kv_bytes(1000) - hybrid.kv_bytes(999) == hybrid.kv_bytes_per_token()


def test_split_over_devices() -> None:
    llama, latent = shape("Llama-3.1-8B"), shape("DeepSeek-V3")
    assert [llama.kv_bytes_per_token(tp) for tp in (1, 2, 8, 16)] == [131_072, 65_536, 16_384, 16_384]  # a KV head cannot be halved
    assert latent.kv_bytes_per_token(8) == latent.kv_bytes_per_token(1)  # nor can a latent
    whole = weight_bytes(llama, LEVELS["bf16"])
    assert whole == 2 * llama.parameters
    vectors = 2 * sum(w.values for w in llama.weights if w.kind == "vector")
    assert weight_bytes(llama, LEVELS["bf16"], 8) == pytest.approx((whole - vectors) / 8 + vectors)
    kv = 2 * sum(w.values for w in llama.weights if w.name in ("k", "v"))
    assert weight_bytes(llama, LEVELS["bf16"], 16) == pytest.approx((whole - vectors - kv) / 16 + kv / 8 + vectors)


def test_levels_by_hand() -> None:
    llama = shape("Llama-3.1-8B")
    outside = 2 * 2 * 128_256 * 4096  # embedding and output layer, 16 bits
    norms = 2 * 65 * 4096
    linear = llama.parameters - outside // 2 - norms // 2
    columns = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert weight_bytes(llama, LEVELS["int8"]) == outside + norms + linear + 4 * columns
    assert weight_bytes(llama, LEVELS["int4"]) == outside + norms + linear * (4 + 20 / 128) / 8
    assert weight_bytes(llama, LEVELS["fp4"]) == outside + norms + linear * 4.5 / 8


def test_a_7b_at_8_bits_on_80_gb() -> None:
    """By hand: 6.74 GB + 0.26 GB more for two 16-bit vocabularies; of 80 GB 90 %, less 1.61 GB of runtime and the activations."""
    llama = shape("Llama-2-7b")
    device = load_devices()["h100-sxm"]
    memory = split_memory(llama, LEVELS["int8"], memory=device.memory, usable=device.usable, overhead=device.overhead)
    assert memory.weights / 1e9 == pytest.approx(7.0, abs=0.02)
    assert memory.kv / 1e9 == pytest.approx(72 - 1.61 - 7.0 - memory.activations / 1e9, abs=0.02)
    assert memory.activations < 1.0e9
    assert memory.sequences(llama.kv_bytes(4096)) == int(memory.kv // (4096 * 524_288)) in range(28, 31)


def test_a_70b_at_4_bits_fits_one_80_gb_device_and_at_16_bits_two_do_not_serve_it() -> None:
    llama, device = shape("Llama-3.1-70B"), load_devices()["h100-sxm"]

    def kv(level: str, tp: int) -> float:
        return split_memory(llama, LEVELS[level], memory=device.memory, usable=device.usable, overhead=device.overhead, tp=tp).kv / 1e9

    assert weight_bytes(llama, LEVELS["int4"]) / 1e9 == pytest.approx(68.45 * (4 + 20 / 128) / 8 + 4.2, abs=0.1)  # 39.8
    assert kv("int4", 1) == pytest.approx(72 - 1.61 - 39.8 - 1.6, abs=1.0)
    assert kv("bf16", 1) < 0
    assert kv("bf16", 2) < 2  # 70.55 of 72 GB are weights: nothing to speak of is left for keys and values
    assert kv("bf16", 4) > 30


def test_a_gguf_header_and_its_folder_form_agree(tmp_path: Path) -> None:
    path = default_model_path()
    got = load_shape(str(path))
    with GGUFFile(path) as file:
        tensors = file.tensors.values()
        assert got.parameters == sum(tensor.elements for tensor in tensors)
        assert got.file_bytes == sum(tensor.nbytes for tensor in tensors)
    assert weight_bytes(got, levels_for(got, "cpu")["file"]) == pytest.approx(got.file_bytes, rel=0.001)
    table = shape("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert "file" not in levels_for(table, "cpu")
    with prepare(path, "int8") as prepared:  # what the server packs, padding and alignment included
        assert weight_bytes(got, level_named("int8", "cpu")) == pytest.approx(prepared.nbytes, rel=0.01)
    assert (table.weights, table.groups) == (got.weights, got.groups)
    (tmp_path / "config.json").write_text(json.dumps(catalogue()["HuggingFaceTB/SmolLM2-135M"]["config"]))
    assert load_shape(str(tmp_path)).weights == table.weights


def config(**changes: Any) -> dict[str, Any]:
    values = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 1000,
    }  # fmt: skip
    return {key: value for key, value in (values | changes).items() if value is not None}


def test_an_unknown_architecture_is_unknown_and_never_a_number() -> None:
    with pytest.raises(UnsupportedModel, match="unknown architecture 'mamba9'"):
        shape_of(config(model_type="mamba9"), "m", "")
    with pytest.raises(ModelError, match="model_type: missing"):
        shape_of(config(model_type=None), "m", "")
    with pytest.raises(UsageError, match="no model of the built-in table"):
        load_shape("no-such-model")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"hidden_size": "64"}, "hidden_size: expected an integer"),
        ({"hidden_size": -1}, "hidden_size: expected an integer from 1"),
        ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3"),
        ({"hidden_size": 66}, "head_dim: missing, and hidden_size 66 is not a multiple of 4"),
        ({"intermediate_size": None}, "intermediate_size: missing"),
        ({"model_type": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 3}, "3 of 2 experts"),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention"]}, "expected 2 entries"),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention", "sliding_attention"]}, "sliding_window: missing"),
        ({"model_type": "llama", "layer_types": ["full_attention", "linear_attention"]}, "linear_attention is not known for llama"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2}, "every so many-th layer"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        shape_of(config(**changes), "m", "")


def test_windows() -> None:
    def kept(**changes: Any) -> list[tuple[int, int]]:
        return [(group.layers, group.window) for group in shape_of(config(**changes), "m", "").groups]

    assert kept(model_type="mistral", sliding_window=100) == [(2, 100)]
    assert kept(model_type="mistral", sliding_window=4096) == [(2, 0)]  # holds the whole context
    assert kept(model_type="qwen2", sliding_window=100) == [(2, 0)]  # only with use_sliding_window
    assert kept(model_type="qwen2", sliding_window=100, use_sliding_window=True, max_window_layers=1) == [(1, 0), (1, 100)]
    assert kept(model_type="gpt_oss", sliding_window=100, num_local_experts=0) == [(1, 0), (1, 100)]


def test_the_catalogue_has_a_source_for_every_fact() -> None:
    devices = load_devices()
    assert len(devices) >= 24
    for device in devices.values():
        assert device.memory > 1e9
        assert device.bandwidth > 1e11
        assert all(len(source) > 8 for source in device.sources.values()), device.name
        assert all(price.seller and price.date and price.source for price in device.prices)
    assert find_device("H200_SXM", devices) is find_device("h200", devices) is devices["h200-sxm"]
    with pytest.raises(UsageError, match="unknown 'h900'"):
        find_device("h900", devices)


def test_a_level_a_device_cannot_do_is_refused_with_the_reason() -> None:
    devices = load_devices()
    assert "no fp8 in hardware" in devices["t4"].refusal("fp8")
    assert devices["t4"].refusal("bf16") == ""  # 16 bits, as fp16
    assert "no fp8" in devices["a100-80"].refusal("fp8")
    assert "use fp8" in devices["b300"].refusal("int8")
    assert devices["h100-sxm"].refusal("int8") == ""
    with pytest.raises(UsageError, match="expected one of bf16, int8, int4 on a cpu"):
        level_named("fp8", "cpu")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("devices: 3", "expected `devices:`"),
        ("devices: {x: {kind: tpu}}", "x: kind: expected gpu or cpu"),
        ("devices: {x: {kind: gpu}}", "expected one of memory_gb and memory_gib"),
        ("devices: {x: {kind: gpu, memory_gb: -1, peaks: {bf16: 1}}}", "memory_gb: expected a positive number"),
        ("devices: {x: {kind: gpu, memory_gb: 1, bandwidth_gbs: 1, peaks: {bf17: 1}}}", "peaks: expected"),
        ("devices: {x: {kind: gpu, memory_gb: 1, bandwidth_gbs: 1, peaks: {bf16: 1}, max_tp: 2}}", "link_gbs is missing"),
        ("devices: {x: {kind: gpu, wheels: 4}}", "unknown field 'wheels'"),
        ("devices: {x: {kind: gpu, memory_gb: 1, bandwidth_gbs: 1, peaks: {bf16: 1}, prices: [{seller: a}]}}", "expected seller"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_device_file_is_checked(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "devices.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        load_devices(path)


def test_a_device_file_adds_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "devices.yaml"
    path.write_text("devices: {mine: {kind: gpu, memory_gb: 10, bandwidth_gbs: [100, me], peaks: {bf16: 5}}}")
    devices = load_devices(path)
    assert (devices["mine"].memory, devices["mine"].peak("bf16"), devices["mine"].sources["bandwidth_gbs"]) == (10e9, 5e12, "me")
    assert "h100-sxm" in devices
