"""What `headrace inspect MODEL` says, as plain data: shape, bytes by tensor type and level, KV bytes a token, sequences that fit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from headrace.config import BLOCK_TOKENS, Level
from headrace.errors import MemoryBudgetExceeded
from headrace.models import ledger, pack
from headrace.models.families import describe, open_source
from headrace.models.gguf import GGUFFile
from headrace.models.safetensors import SafetensorsFolder

SEQUENCE_LENGTHS = (512, 2048, 8192, 32768)  # tokens; the model's own context length is added


def inspect_model(path: str | Path, budget: int, level: Level = "auto", overhead: int = ledger.DEFAULT_OVERHEAD) -> dict[str, Any]:
    """Everything there is to say about a model without reading its weights. `budget`: bytes the server may take (machine.memory).

    A file with a vocabulary only gives what it has. Raises ModelError or UnsupportedModel.
    """
    with open_source(path) as source:
        tensors = _tensor_types(source)
        told: dict[str, Any] = {
            "path": str(path),
            "format": f"GGUF v{source.version}" if isinstance(source, GGUFFile) else "safetensors",
            "name": _name(source),
            "files": _files(source),
            "tensors": tensors,
        }
        if isinstance(source, GGUFFile):
            tokens = source.strings("tokenizer.ggml.tokens")
            told["vocabulary"] = {
                "tokens": len(tokens) if tokens is not None else 0,
                "kind": source.text("tokenizer.ggml.model", ""),
                "pre_tokenizer": source.text("tokenizer.ggml.pre", ""),
                "chat_template": "tokenizer.chat_template" in source.metadata,
            }
            if not source.tensors:
                return told | {"architecture": source.text("general.architecture", ""), "vocabulary_only": True}
        network = describe(source)
        config = network.config
        told["architecture"] = config.architecture
        told["config"] = asdict(config)
        told["config"]["rope"]["freq_factors"] = list(config.rope.freq_factors)
        told["parameters"] = sum(use.tensor.elements for use in network.uses.values())
        told["end_token_ids"] = list(network.end_token_ids)
        told["kv_bytes_per_token"] = config.kv_bytes_per_token
        told["block_tokens"] = BLOCK_TOKENS
        told["packed_bytes"] = {name: pack.plan(network, name).nbytes for name in get_args(Level)}
        told["level"] = level
        told["budget"] = budget
        told["fits"] = [
            {"context": length, "sequences": _sequences(told["packed_bytes"][level], network.config, budget, length, overhead)}
            for length in sorted({*(n for n in SEQUENCE_LENGTHS if n < config.context_length), config.context_length})
        ]
        return told


def _sequences(weights: int, config: Any, budget: int, context: int, overhead: int) -> int:
    """Sequences of `context` tokens whose KV fits beside the weights in the budget."""
    activations = ledger.estimate_activations(config, 512, 256, context)
    try:
        plan = ledger.plan_memory(
            config,
            weights=weights,
            budget=budget,
            max_batch_size=1 << 20,
            context_length=context,
            activations=activations,
            overhead=overhead,
        )
    except MemoryBudgetExceeded:
        return 0
    return plan.num_blocks // -(-context // BLOCK_TOKENS)


def _tensor_types(source: GGUFFile | SafetensorsFolder) -> dict[str, dict[str, int]]:
    types: dict[str, dict[str, int]] = {}
    for tensor in source.tensors.values():
        entry = types.setdefault(tensor.type, {"tensors": 0, "values": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["values"] += tensor.elements
        entry["bytes"] += tensor.nbytes
    return dict(sorted(types.items(), key=lambda item: -item[1]["bytes"]))


def _files(source: GGUFFile | SafetensorsFolder) -> list[dict[str, Any]]:
    files = [source.file] if isinstance(source, GGUFFile) else source.files
    return [{"path": str(file.path), "bytes": file.size} for file in files]


def _name(source: GGUFFile | SafetensorsFolder) -> str:
    if isinstance(source, GGUFFile):
        return source.text("general.name", source.path.stem)
    return source.path.resolve().name
