"""Tiny random models of each architecture, with the logits transformers computes for them: tests/golden/tiny/<name>/.

Every tensor is drawn away from its default (norms are not 1, biases not 0), the sequence runs beyond the original context of a rope
scaling and beyond a sliding window. Values are bf16 numbers whatever type they are stored in, so the bf16 level loads them exactly.

logits.npz holds the ids, the logits of the float64 model (stored as float32), how far those of the float32 model are from them, and
`sigma`, per position: the root mean square over the vocabulary and over random draws of what the logits move by when every operand that
the bf16 level rounds (inputs of linear layers, queries, keys, values, probabilities) is moved by a random relative error of at most
2^-8, the unit roundoff of bf16. That is the tolerance a test may derive from.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

UNIT_ROUNDOFF = 2.0**-8
DRAWS = 16
LENGTH = 96  # tokens of the fixed sequence

SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

# name -> (config.json beyond SHAPE, type the tensors are stored in, number of files). Rope settings come in the form of transformers 4
# (rope_theta, rope_scaling) and 5 (rope_parameters): both are met in the wild.
MODELS: dict[str, tuple[dict[str, Any], torch.dtype, int]] = {
    "llama-llama3-tied": (
        {"model_type": "llama", "tie_word_embeddings": True, "rope_theta": 10000.0, "rope_scaling": LLAMA3}, torch.bfloat16, 1,
    ),
    "llama-linear": (
        {"model_type": "llama", "tie_word_embeddings": False, "rope_theta": 20000.0, "rope_scaling": {"type": "linear", "factor": 4.0},
         "max_position_embeddings": 128, "vocab_size": 131, "intermediate_size": 80, "num_attention_heads": 2, "num_key_value_heads": 1,
         "head_dim": 32}, torch.float16, 2,
    ),
    "qwen2": (
        {"model_type": "qwen2", "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
         "use_sliding_window": False, "rms_norm_eps": 1e-6}, torch.bfloat16, 1,
    ),
    "qwen2-yarn": (
        {"model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1e4, "rope_scaling": YARN, "max_position_embeddings": 128,
         "use_sliding_window": False, "rms_norm_eps": 1e-6}, torch.bfloat16, 1,
    ),
    "qwen3": (
        {"model_type": "qwen3", "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "head_dim": 32,
         "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 100,
         "use_sliding_window": False, "rms_norm_eps": 1e-6}, torch.float32, 1,
    ),
    "mistral": (
        {"model_type": "mistral", "tie_word_embeddings": False, "rope_theta": 10000.0, "sliding_window": 40, "num_key_value_heads": 1,
         "num_hidden_layers": 3}, torch.bfloat16, 1,
    ),
}  # fmt: skip
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM"}


def draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """A tensor of bf16 numbers whose absence shows: scores spread over a few nats, norms between 0.5 and 1.5, biases of some size."""
    if "norm" in name:
        value = 0.5 + torch.rand(shape, generator=generator)
    elif name.endswith("bias"):
        value = 0.5 * torch.randn(shape, generator=generator)
    elif "embed_tokens" in name:
        value = torch.randn(shape, generator=generator)
    else:
        value = 1.3 * torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    value = value.bfloat16().float()
    return torch.where(value.abs() < 2.0**-13, 2.0**-13, value)  # a normal number in f16 too


def build(config: dict[str, Any], seed: int) -> transformers.PreTrainedModel:
    settings = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied head is not listed twice
            parameter.copy_(draw(name, parameter.shape, generator))
    return model


@torch.no_grad()
def logits(model: transformers.PreTrainedModel, ids: torch.Tensor) -> np.ndarray:
    return model(ids[None]).logits[0].numpy()


@contextmanager
def perturbed(model: transformers.PreTrainedModel, generator: torch.Generator) -> Iterator[None]:
    """Every operand that the bf16 level rounds moves by a random relative error of at most the unit roundoff."""

    def move(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + UNIT_ROUNDOFF * (2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1))

    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> tuple[torch.Tensor, None]:
        group = q.shape[1] // k.shape[1]
        q, k, v = move(q), move(k).repeat_interleave(group, 1), move(v).repeat_interleave(group, 1)
        scores = q @ k.transpose(2, 3) * scaling + mask
        return (move(scores.softmax(-1)) @ v).transpose(1, 2).contiguous(), None

    modeling = sys.modules[type(model).__module__]
    original = modeling.eager_attention_forward
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [module.register_forward_pre_hook(lambda _, inputs: (move(inputs[0]),)) for module in linears]
    modeling.eager_attention_forward = attention
    try:
        yield
    finally:
        modeling.eager_attention_forward = original
        for hook in hooks:
            hook.remove()


def save(model: transformers.PreTrainedModel, config: dict[str, Any], dtype: torch.dtype, shards: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
    written = {"architectures": [ARCHITECTURES[config["model_type"]]], **config, "torch_dtype": names[dtype]}
    (folder / "config.json").write_text(json.dumps(written, indent=1) + "\n")
    tensors = {name: value.detach().to(dtype).contiguous() for name, value in model.named_parameters()}
    for name, value in tensors.items():
        if not torch.equal(value.float(), model.get_parameter(name).float()):
            raise SystemExit(f"{folder.name}: {name} is not exact in {dtype}")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    where = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file, metadata={"format": "pt"})
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=1) + "\n"
    )


def write(folder: Path) -> None:
    """Write all of MODELS below `folder`."""
    for seed, (name, (extra, dtype, shards)) in enumerate(MODELS.items(), start=1):
        config = SHAPE | extra
        model = build(dict(config), seed)
        ids = torch.randint(0, config["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(100 + seed))
        single = logits(model, ids)
        save(model, config, dtype, shards, folder / name)
        model.double()
        exact = logits(model, ids)
        generator = torch.Generator().manual_seed(200 + seed)
        with perturbed(model, generator):
            moves = np.stack([logits(model, ids) - exact for _ in range(DRAWS)])
        sigma = np.sqrt((moves**2).mean(axis=(0, 2)))
        error = np.abs(single - exact).max()
        stored = {"ids": ids.numpy().astype(np.int32), "logits": exact.astype(np.float32), "sigma": sigma, "float32_error": error}
        np.savez_compressed(folder / name / "logits.npz", **stored)
        weakest, least = "", np.inf
        for tensor, parameter in model.named_parameters():
            kept = parameter.detach().clone()
            with torch.no_grad():
                parameter.zero_()
            moved = float(np.sqrt(((logits(model, ids) - exact) ** 2).mean()))
            with torch.no_grad():
                parameter.copy_(kept)
            if moved < least:
                weakest, least = tensor, moved
        scale, rms = float(np.sqrt((exact**2).mean())), float(np.sqrt((sigma**2).mean()))
        print(f"{name}: logits {scale:.2f}, sigma {rms:.4f}, float32 off by {error:.1e}, ", end="")
        print(f"weakest tensor {weakest} moves them by {least / rms:.0f} sigma")
