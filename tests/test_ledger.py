"""The memory ledger's arithmetic against hand-made numbers, and what inspect says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers_models import Tiny, gguf_bytes, gguf_entries, write_folder, write_gguf
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import SCORED_ROWS, ModelConfig, RopeConfig
from headrace.errors import MemoryBudgetExceeded, UsageError
from headrace.models import hub
from headrace.models.arena import HUGE_PAGE
from headrace.models.inspect import inspect_model
from headrace.models.ledger import default_budget, estimate_activations, format_bytes, parse_bytes, plan_memory
from headrace.models.loader import load_model, prepare

MIB, GIB = 1 << 20, 1 << 30


def config(layers: int = 32, kv_heads: int = 8, head_dim: int = 128) -> ModelConfig:
    return ModelConfig("llama", layers, 4096, 14336, 32, kv_heads, head_dim, 128256, 8192, 1e-5, RopeConfig(rotary_dim=head_dim), False)


def test_the_shares_of_a_budget() -> None:
    """Llama 3 8B: 2 (K, V) * 2 bytes * 32 layers * 8 heads * 128 = 128 KiB a token, 4 MiB a block."""
    ledger = plan_memory(
        config(), weights=4 * GIB, budget=8 * GIB, max_batch_size=256, context_length=8192, activations=100 * MIB, overhead=156 * MIB
    )
    assert ledger.block_bytes == 4 * MIB
    assert ledger.num_blocks == (4 * 1024 - 256) // 4
    assert (ledger.kv, ledger.kv_tokens) == (960 * 4 * MIB, 960 * 32)
    assert ledger.total == 8 * GIB == ledger.budget
    assert [(name, size) for name, size, _ in ledger.rows()] == [
        ("weights", 4 * GIB), ("KV cache", 960 * 4 * MIB), ("activations", 100 * MIB), ("overhead", 156 * MIB), ("total", 8 * GIB),
        ("budget", 8 * GIB),
    ]  # fmt: skip
    assert "960 blocks of 32 tokens, 4.0 MiB each" in str(ledger)


def test_no_more_blocks_than_all_samples_can_fill() -> None:
    ledger = plan_memory(config(1, 1, 16), weights=0, budget=8 * GIB, max_batch_size=3, context_length=100, activations=0, overhead=0)
    assert ledger.num_blocks == 3 * 4
    assert ledger.total == HUGE_PAGE + 12 * 32 * 64


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(MemoryBudgetExceeded) as caught:
        plan_memory(
            config(), weights=4 * GIB, budget=4 * GIB, max_batch_size=1, context_length=8192, activations=256 * MIB, overhead=192 * MIB
        )
    message = str(caught.value)
    for part in ("needs at least 4.5 GiB", "weights 4.0 GiB", "activations 256.0 MiB", "overhead 192.0 MiB", "KV 64.0 MiB for 512 tokens"):
        assert part in message
    assert "the budget is 4.0 GiB" in message


@given(
    weights=st.integers(0, 16 * GIB), budget=st.integers(1, 32 * GIB), batch=st.integers(1, 512), context=st.integers(1, 1 << 20),
    activations=st.integers(0, GIB), overhead=st.integers(0, GIB), layers=st.integers(1, 100),
)  # fmt: skip
def test_the_total_never_exceeds_the_budget(
    weights: int, budget: int, batch: int, context: int, activations: int, overhead: int, layers: int
) -> None:
    shape = config(layers)
    block = 32 * shape.kv_bytes_per_token
    fixed = -(-max(weights, 1) // HUGE_PAGE) * HUGE_PAGE + activations + overhead
    least = min(16, -(-context // 32))
    try:
        ledger = plan_memory(
            shape, weights=weights, budget=budget, max_batch_size=batch, context_length=context, activations=activations, overhead=overhead
        )
    except MemoryBudgetExceeded:
        assert fixed + least * block > budget
        return
    assert ledger.total <= budget
    assert ledger.num_blocks >= least
    # One more block would exceed either the budget or what all samples can hold.
    assert ledger.total + block > budget or ledger.num_blocks == batch * -(-context // 32)


def test_weights_are_known_before_loading(tmp_path: Path) -> None:
    with prepare(write_gguf(tmp_path / "m.gguf", Tiny(types=("Q4_0",), vocab=20000))) as prepared:
        ledger = plan_memory(prepared.config, weights=prepared.nbytes, budget=GIB, max_batch_size=1, context_length=64, activations=0)
        assert prepared.load().arena.nbytes == ledger.weights


def test_activations_cover_what_a_step_needs() -> None:
    """The logits of all samples, those for prompts, and the residual stream of all tokens at least."""
    least = (64 + SCORED_ROWS) * 128256 * 4 + 512 * 4096 * 4
    assert least < estimate_activations(config(), 512, 64, 8192) < 4 * least


def test_the_default_budget() -> None:
    assert default_budget(10 * GIB, 5 * GIB) == 3 * GIB
    assert default_budget(10 * GIB, 20 * GIB) == 6 * GIB


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 * GIB), ("2gib", 2 * GIB), (" 512 MiB ", 512 * MIB), ("800MB", 800_000_000), ("1.5G", 1_500_000_000), ("4096", 4096),
     ("4096B", 4096), ("60%", 600), ("100%", 1000), ("0.5%", 5), ("1Ki", 1024), ("2T", 2 * 10**12)],
)  # fmt: skip
def test_sizes_a_person_writes(text: str, size: int) -> None:
    assert parse_bytes(text, 1000) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 gigs", "101%", "1e9", "2GiB GiB", "nan", "0", "0%", "1.G"])
def test_sizes_nobody_understands(text: str) -> None:
    with pytest.raises(UsageError, match="memory: expected"):
        parse_bytes(text, 1000)


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 94 * MIB, 3 * GIB, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "94.0 MiB",
        "3.0 GiB",
        "5.0 TiB",
    ]


def test_inspect_the_default_model() -> None:
    told = inspect_model(hub.default_model_path(), 2 * GIB)
    assert json.loads(json.dumps(told)) == told
    assert (told["architecture"], told["format"], told["parameters"]) == ("llama", "GGUF v3", 134_515_008)
    assert told["tensors"]["Q4_1"] == {"tensors": 210, "values": 106_168_320, "bytes": 66_355_200}
    assert sum(entry["bytes"] for entry in told["tensors"].values()) < told["files"][0]["bytes"]
    assert told["kv_bytes_per_token"] == 2 * 2 * 30 * 3 * 64
    # The file's own bytes, the few norms padded to 64: exact packing costs nothing.
    assert told["packed_bytes"]["auto"] == sum(entry["bytes"] for entry in told["tensors"].values())
    assert told["packed_bytes"]["bf16"] > told["packed_bytes"]["int8"] > told["packed_bytes"]["int4"]
    fits = {entry["context"]: entry["sequences"] for entry in told["fits"]}
    assert list(fits) == [512, 2048, 8192]
    assert 2 * GIB // (8192 * 23040) - 3 < fits[8192] < 2 * GIB // (8192 * 23040)
    assert inspect_model(hub.default_model_path(), 100 * MIB)["fits"][0]["sequences"] == 0


def test_inspect_other_files(tmp_path: Path) -> None:
    (tmp_path / "vocabulary.gguf").write_bytes(gguf_bytes(gguf_entries(Tiny())))
    told = inspect_model(tmp_path / "vocabulary.gguf", GIB)
    assert told["vocabulary_only"]
    assert told["vocabulary"]["tokens"] == 100
    tiny = Tiny("qwen3", types=("F16",))
    told = inspect_model(write_folder(tmp_path / "folder", tiny, shards=2), GIB, "int8")
    assert (told["format"], told["architecture"], told["name"], len(told["files"])) == ("safetensors", "qwen3", "folder", 2)
    assert told["config"]["qk_norm"]
    assert told["packed_bytes"]["int8"] == load_model_bytes(tmp_path / "folder", "int8")


def load_model_bytes(folder: Path, level: str) -> int:
    model = load_model(folder, level)  # type: ignore[arg-type]
    ends = [
        w.offset + w.nbytes if hasattr(w, "offset") else w.ctypes.data - model.arena.address + -(-w.nbytes // 64) * 64
        for w in model.weights.values()
    ]
    return max(ends)
